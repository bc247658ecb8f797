//! Conversion between dtypes, for casts and for the lowerings of other ops.

use super::{Calls, Kernel, Lowering, Slices, Slot, on_gpu};
use crate::kernels::cpu::{Stored, cast as kernel};
#[cfg(feature = "cuda")]
use crate::kernels::cuda::cast as cuda_kernel;
use crate::ops::cpu::{for_any, for_stored};
use candle_core::{DType, WithDType};

/// The lowering of a cast: the input in the output's dtype.
pub(crate) const CONVERTED: Lowering = Lowering {
    forward: |_| Calls::default().call(converted(), [("x", Slot::Input(0))], [("y", Slot::Output)]),
    backward: |_| {
        let reads = [("x", Slot::OutputGradient)];
        Calls::default().call(converted(), reads, [("y", Slot::Gradient(0))])
    },
};

/// Reads x; writes y, x in another dtype.
pub(crate) fn converted() -> Kernel {
    fn from<T: WithDType>(s: &Slices<'_>) -> candle_core::Result<()> {
        let written = s.dtype_of("y")?;
        let x = s.x::<T>("x")?;
        for_stored!(written, U => {
            let each = s.y::<U>("y")?.iter_mut().zip(x);
            each.for_each(|(y, x)| *y = WithDType::from_f64(x.to_f64()));
            Ok(())
        })
    }
    fn half_or_f32<T: Stored<Wide = f32>>(s: &Slices<'_>) -> candle_core::Result<()> {
        let x = s.x::<T>("x")?;
        match s.dtype_of("y")? {
            DType::F32 => kernel::cast(x, s.y::<f32>("y")?),
            DType::F16 => kernel::cast(x, s.y::<half::f16>("y")?),
            DType::BF16 => kernel::cast(x, s.y::<half::bf16>("y")?),
            _ => return from::<T>(s),
        }
        Ok(())
    }
    let kernel = Kernel::new("cast", |_, s| match s.dtype()? {
        DType::F32 => half_or_f32::<f32>(s),
        DType::F16 => half_or_f32::<half::f16>(s),
        DType::BF16 => half_or_f32::<half::bf16>(s),
        dtype => for_any!(dtype, T => from::<T>(s)),
    });
    on_gpu!(kernel, |_, l| cuda_kernel::cast(
        l.gpu,
        l.x("x")?,
        l.y("y")?
    ))
}
