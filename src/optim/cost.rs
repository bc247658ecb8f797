//! Costs of updates, norms and clipping.

use super::slot::STEP;
use crate::ops::cost::cost;
use crate::ops::info::OpInfo;

pub(crate) const ADAMW: OpInfo = OpInfo::new("adamw").costing(
    "14 a parameter",
    "gradient; weight and two moments, read and written",
    |o| {
        // Weights are kept in f32 at least; in half precision the rounded weights are in addition to them. Moments have
        // the dtype of the second input, or else that of the weights.
        let (elements, own) = (o.output.elements(), o.output.dtype.size_in_bytes() as f64);
        let wide = own.max(4.0);
        let rounded = if own < wide { own } else { 0.0 };
        let moment = o.input(1).map(|moments| moments.dtype.size_in_bytes());
        let kept = wide + 2.0 * moment.map_or(wide, |bytes| bytes as f64);
        let read = elements * (own + kept);
        let written = elements * (kept + rounded);
        cost(0.0, 14.0 * elements, read, written)
    },
    None,
);

/// The description of the update of a parameter of any shape.
pub(super) const STEP_INFO: OpInfo = OpInfo::new(STEP).on_gpu_up_to(usize::MAX);

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

pub(crate) const INFOS: &[OpInfo] = &[ADAMW, STEP_INFO, CLIP, CLIP_VALUE, UNSCALE];
