//! Heads in and out of the model dimension.

use super::cast::cast_for;
use super::cpu::{elements, for_stored, output, tensor, view};
use super::dispatch::{Path, choose};
use super::record::{apply1, composed, input};
use crate::kernels::cpu::heads::{Heads, merge, split};
use crate::{Error, Result};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, Layout, Shape, Tensor};

/// (B, T, H*Dh) to (B, H, T, Dh), contiguous. Backward is [`merge_heads`]; nothing is kept for it.
///
/// # Errors
/// A tensor that is not (B, T, D), or a D that `heads` does not divide.
pub fn split_heads(x: &Tensor, heads: usize) -> Result<Tensor> {
    let sizes = match *x.dims() {
        [batch, length, width] if heads > 0 && width % heads == 0 => Heads {
            batch,
            length,
            heads,
            head_dim: width / heads,
        },
        _ => {
            return Err(Error::Shape {
                op: "split_heads",
                expected: format!("x (B, T, D) with D divisible by {heads} heads"),
                got: format!("{:?}", x.dims()),
                hint: "each head gets D/H elements".into(),
            });
        }
    };
    let [x] = &cast_for("split_heads", [x])?;
    match choose("split_heads", x)? {
        Path::Kernel => Ok(apply1(&x.contiguous()?, SplitHeads(sizes))?),
        Path::Reference => composed("split_heads", &[x], || {
            Ok(input(x)
                .reshape((sizes.batch, sizes.length, heads, sizes.head_dim))?
                .transpose(1, 2)?
                .contiguous()?)
        }),
    }
}

/// (B, H, T, Dh) to (B, T, H*Dh), contiguous. Backward is [`split_heads`]; nothing is kept for it.
///
/// # Errors
/// A tensor that is not (B, H, T, Dh).
pub fn merge_heads(x: &Tensor) -> Result<Tensor> {
    let &[batch, heads, length, head_dim] = x.dims() else {
        return Err(Error::Shape {
            op: "merge_heads",
            expected: "x (B, H, T, Dh)".into(),
            got: format!("{:?}", x.dims()),
            hint: "as split_heads returns it".into(),
        });
    };
    let sizes = Heads {
        batch,
        length,
        heads,
        head_dim,
    };
    let [x] = &cast_for("merge_heads", [x])?;
    match choose("merge_heads", x)? {
        Path::Kernel => Ok(apply1(&x.contiguous()?, MergeHeads(sizes))?),
        Path::Reference => composed("merge_heads", &[x], || {
            Ok(input(x)
                .transpose(1, 2)?
                .reshape((batch, length, heads * head_dim))?)
        }),
    }
}

fn merged_shape(sizes: Heads) -> Shape {
    (sizes.batch, sizes.length, sizes.heads * sizes.head_dim).into()
}

fn split_shape(sizes: Heads) -> Shape {
    (sizes.batch, sizes.heads, sizes.length, sizes.head_dim).into()
}

struct SplitHeads(Heads);

impl CustomOp1 for SplitHeads {
    fn name(&self) -> &'static str {
        "split_heads"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        for_stored!(x.dtype(), T => {
            let x = view::<T>(x, layout)?;
            output(split_shape(self.0), |y| split(self.0, x, y))
        })
    }

    fn bwd(&self, _x: &Tensor, _y: &Tensor, dy: &Tensor) -> candle_core::Result<Option<Tensor>> {
        let dy = dy.contiguous()?;
        for_stored!(dy.dtype(), T => {
            let dy = elements::<T>(&dy)?;
            Ok(Some(tensor(merged_shape(self.0), |dx| merge(self.0, &dy, dx))?))
        })
    }
}

struct MergeHeads(Heads);

impl CustomOp1 for MergeHeads {
    fn name(&self) -> &'static str {
        "merge_heads"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        for_stored!(x.dtype(), T => {
            let x = view::<T>(x, layout)?;
            output(merged_shape(self.0), |y| merge(self.0, x, y))
        })
    }

    fn bwd(&self, _x: &Tensor, _y: &Tensor, dy: &Tensor) -> candle_core::Result<Option<Tensor>> {
        let dy = dy.contiguous()?;
        for_stored!(dy.dtype(), T => {
            let dy = elements::<T>(&dy)?;
            Ok(Some(tensor(split_shape(self.0), |dx| split(self.0, &dy, dx))?))
        })
    }
}
