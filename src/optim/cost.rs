//! Costs of updates, norms and clipping.

use crate::ops::cost::{Cost, cost};
use crate::ops::info::OpInfo;
use crate::probe::Operands;

/// Returns the cost of an elementwise update of parameters like the output, the first input, with FLOPs per parameter.
/// The other inputs are the tensors of state.
pub(super) fn elementwise(o: &Operands<'_>, flops: f64) -> Option<Cost> {
    // Weights are kept in f32 at least, in half precision the rounded weights are in addition.
    let (elements, own) = (o.output.elements(), o.output.dtype.size_in_bytes() as f64);
    let wide = own.max(4.0);
    let rounded = if own < wide { own } else { 0.0 };
    let states = o.inputs.iter().skip(1);
    let states: usize = states.map(|state| state.dtype.size_in_bytes()).sum();
    let kept = wide + states as f64;
    let read = elements * (own + kept);
    let written = elements * (kept + rounded);
    cost(0.0, flops * elements, read, written)
}

const CLIP: OpInfo = OpInfo::new("clip_grad_norm").costing(
    "3 an element",
    "gradients, read twice and written",
    |o| {
        let (elements, bytes) = o.output.size();
        cost(0.0, 3.0 * elements, 2.0 * bytes, bytes)
    },
    None,
);

const CLIP_VALUE: OpInfo = OpInfo::new("clip_grad_value").costing(
    "2 an element",
    "gradients, read and written",
    |o| o.elementwise(2.0),
    None,
);

const UNSCALE: OpInfo = OpInfo::new("GradScaler::unscale").costing(
    "1 an element",
    "gradients, read and written",
    |o| o.elementwise(1.0),
    None,
);

pub(crate) const INFOS: &[OpInfo] = &[CLIP, CLIP_VALUE, UNSCALE];
