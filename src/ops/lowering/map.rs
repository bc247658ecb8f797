//! Calls of elementwise kernels.

use super::{Calls, Kernel, Slot, on_gpu};
#[cfg(feature = "cuda")]
use crate::{graph::Attribute, kernels::cuda::elementwise as cuda_kernel};

/// Returns the call of an elementwise kernel of x.
pub(in crate::ops) fn map_forward(kernel: Kernel) -> Calls {
    Calls::default().call(map(kernel), [("x", Slot::Input(0))], [("y", Slot::Output)])
}

/// Returns the call of an elementwise kernel of dy and an extra operand.
pub(in crate::ops) fn map_backward(kernel: Kernel, extra: (&'static str, Slot)) -> Calls {
    let reads = [("dy", Slot::OutputGradient), extra];
    Calls::default().call(map(kernel), reads, [("dx", Slot::Gradient(0))])
}

/// Adds the GPU's elementwise kernel of the same name, with the first two numbers among the parameters, 0 if there are
/// none.
pub(in crate::ops) fn map(kernel: Kernel) -> Kernel {
    on_gpu!(kernel, |k, l| {
        let numbers = k.attributes().iter();
        let mut numbers = numbers.filter_map(|(_, value)| match value {
            Attribute::Number(number) => Some(*number),
            _ => None,
        });
        let numbers = [(); 2].map(|()| numbers.next().unwrap_or_default());
        let reads: Vec<_> = l.reads.iter().copied().collect();
        let Some(y) = l.writes.first() else {
            candle_core::bail!("{}: nothing is written", k.name());
        };
        cuda_kernel::map(l.gpu, k.name(), numbers, &reads, *y)
    })
}
