//! Naive attention on the CPU, on heads one after another, as plans have it: a block of queries goes through scores,
//! softmax and weighted sum while it is in cache. With as many heads and keys as queries have.

use crate::graph::Attribute;
use crate::kernels::cpu::Stored;
use crate::kernels::cpu::attention::blocked;
use crate::ops::cpu::for_stored;
use crate::ops::lowering::{Kernel, Slices};
use candle_core::{DType, Result};
use half::{bf16, f16};

pub(crate) use blocked::Sizes;

/// What exponentials are kept in: digits to spare. In bf16 itself, or f16, rounding them would cost the gradients as
/// much as their own rounding does, and where the terms of a gradient cancel, more.
pub(crate) fn dtype_of_exponentials(dtype: DType) -> DType {
    match dtype {
        DType::BF16 => DType::F16,
        DType::F16 => DType::F32,
        dtype => dtype,
    }
}

/// Reads `q`, `k`, `v` (B H, T, Dh); writes `out` (B H, T, Dh), `exponentials` of the scores (as the mask leaves them;
/// for bf16 in f16), `inv_row_sum` (B H, T), in half precision `rounding_error`, what rounding took from out (B H, T,
/// Dh), and `scratch`.
pub(crate) fn forward(sizes: &Sizes) -> Kernel {
    fn run<T, E>(k: &Kernel, s: &Slices<'_>) -> Result<()>
    where
        T: Stored,
        E: Stored<Wide = T::Wide>,
    {
        let outputs = blocked::Outputs {
            out: s.y("out")?,
            rounding_error: s.some_y("rounding_error")?.unwrap_or_default(),
            e: s.y::<E>("exponentials")?,
            inv_row_sum: s.y("inv_row_sum")?,
        };
        blocked::forward(&sizes_of(k)?, heads::<T>(s)?, outputs, s.y("scratch")?);
        Ok(())
    }
    let kernel = Kernel::new("head_attention", |k, s| {
        match s.dtype_of("exponentials")? {
            DType::F16 => run::<bf16, f16>(k, s),
            _ => for_stored!(s.dtype()?, T => run::<T, <T as Stored>::Wide>(k, s)),
        }
    });
    sized(kernel, sizes, 1.0)
}

/// Reads `d_out`, `q`, `k`, `v`, `out` (B H, T, Dh) and what forward left: `exponentials`, `inv_row_sum` and, in half
/// precision, `rounding_error`; writes `dq`, `dk`, `dv` (B H, T, Dh), `partial_sums`, `scratch`.
pub(crate) fn backward(sizes: &Sizes) -> Kernel {
    fn run<T, E>(k: &Kernel, s: &Slices<'_>) -> Result<()>
    where
        T: Stored,
        E: Stored<Wide = T::Wide>,
    {
        let saved = blocked::Saved {
            e: s.x::<E>("exponentials")?,
            inv_row_sum: s.x("inv_row_sum")?,
            out: s.x("out")?,
            rounding_error: s.some_x("rounding_error")?.unwrap_or_default(),
            d_out: s.x("d_out")?,
        };
        let gradients = blocked::Gradients {
            dq: s.y("dq")?,
            dk: s.y("dk")?,
            dv: s.y("dv")?,
        };
        let (partial_sums, scratch) = (s.y("partial_sums")?, s.y("scratch")?);
        let (sizes, heads) = (sizes_of(k)?, heads::<T>(s)?);
        blocked::backward(&sizes, heads, saved, gradients, partial_sums, scratch);
        Ok(())
    }
    let name = "head_attention_backward";
    let kernel = Kernel::new(name, |k, s| match s.dtype_of("exponentials")? {
        DType::F16 => run::<bf16, f16>(k, s),
        _ => for_stored!(s.dtype()?, T => run::<T, <T as Stored>::Wide>(k, s)),
    });
    sized(kernel, sizes, 2.0)
}

fn heads<'a, T: Stored>(s: &Slices<'a>) -> Result<blocked::Inputs<'a, T>> {
    Ok(blocked::Inputs {
        q: s.x("q")?,
        k: s.x("k")?,
        v: s.x("v")?,
    })
}

fn sizes_of(k: &Kernel) -> Result<Sizes> {
    Ok(Sizes {
        matrices: k.count("BH")?,
        length: k.count("T")?,
        head_dim: k.count("Dh")?,
        mask: k.mask()?,
        scale: k.number("scale")?,
    })
}

/// With the sizes; `passes` times the two products of forward.
fn sized(kernel: Kernel, sizes: &Sizes, passes: f64) -> Kernel {
    let [m, t, d] = [sizes.matrices, sizes.length, sizes.head_dim];
    let kernel = kernel.sized([("BH", m), ("T", t), ("Dh", d)]);
    let kernel = kernel.with("mask", Attribute::Mask(sizes.mask));
    let kernel = kernel.with("scale", Attribute::Number(sizes.scale));
    let scores = m as f64 * t as f64 * t as f64;
    kernel
        .costing(4.0 * passes * scores * d as f64)
        .scoring(scores)
}
