//! Splits the model dimension into heads, and merges them again.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use tallow::ops;
//!
//! let x = Tensor::ones((2, 5, 12), DType::F32, &Device::Cpu)?; // (B, T, D)
//! let heads = ops::split_heads(&x, 3)?; // (B, H, T, Dh)
//! assert_eq!(heads.dims(), [2, 3, 5, 4]);
//! assert_eq!(ops::merge_heads(&heads)?.dims(), x.dims());
//! # Ok::<(), tallow::Error>(())
//! ```

use super::cast::cast_for;
use super::cpu::for_stored;
use super::info::OpInfo;
use super::lowering::{Calls, Kernel, Lowering, Slices, Slot, on_gpu};
use super::record::{Spec, input, run};
use crate::graph::Attribute;
use crate::kernels::cpu::heads::{HeadSizes, merge, split};
use crate::probe::Operand;
use crate::{Error, Result};
use candle_core::{DType, Shape, Tensor};
#[cfg(feature = "cuda")]
use {
    crate::kernels::cuda::{View, heads as cuda_kernel},
    candle_core::cuda_backend::CudaDevice,
};

/// Splits (B, T, H*Dh) into heads (B, H, T, Dh), contiguous. Backward is [`merge_heads`]; nothing is saved for it.
///
/// ```
/// use candle_core::{Device, Tensor};
/// // (B, T, H*Dh)
/// let x = Tensor::new(&[[[1f32, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]], &Device::Cpu)?;
/// let heads = tallow::ops::split_heads(&x, 2)?;
/// assert_eq!(heads.dims(), [1, 2, 2, 2]);
/// let second = heads.get(0)?.get(1)?; // (T, Dh)
/// assert_eq!(second.to_vec2::<f32>()?, [[3.0, 4.0], [7.0, 8.0]]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// A tensor that is not (B, T, D), or a D that `heads` does not divide.
pub fn split_heads(x: &Tensor, heads: usize) -> Result<Tensor> {
    let (batch, length, head_dim) = match *x.dims() {
        [batch, length, width] if heads > 0 && width % heads == 0 => (batch, length, width / heads),
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
    let way = Direction::Split;
    run(&SPLIT_INFO, HeadsCall { way, heads }, [x], || {
        Ok(input(x)
            .reshape((batch, length, heads, head_dim))?
            .transpose(1, 2)?
            .contiguous()?)
    })
}

/// Merges heads (B, H, T, Dh) into (B, T, H*Dh), contiguous. Backward is [`split_heads`]; nothing is saved for it.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use tallow::ops;
///
/// let x = Tensor::randn(0f32, 1.0, (2, 5, 12), &Device::Cpu)?; // (B, T, H*Dh)
/// let merged = ops::merge_heads(&ops::split_heads(&x, 3)?)?;
/// assert_eq!(merged.to_vec3::<f32>()?, x.to_vec3::<f32>()?);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// A tensor that is not (B, H, T, Dh).
pub fn merge_heads(x: &Tensor) -> Result<Tensor> {
    let &[batch, heads, length, head_dim] = x.dims() else {
        return Err(Error::shape("merge_heads", format!("{:?}", x.dims()))
            .must_be("x (B, H, T, Dh)", "as split_heads returns it"));
    };
    let [x] = &cast_for("merge_heads", [x])?;
    let way = Direction::Merge;
    run(&MERGE_INFO, HeadsCall { way, heads }, [x], || {
        Ok(input(x)
            .transpose(1, 2)?
            .reshape((batch, length, heads * head_dim))?)
    })
}

pub(crate) const SPLIT_INFO: OpInfo = OpInfo::new("split_heads")
    .planned(SPLIT_HEADS)
    .on_gpu()
    .moving();

pub(crate) const MERGE_INFO: OpInfo = OpInfo::new("merge_heads")
    .planned(MERGE_HEADS)
    .on_gpu()
    .moving();

pub(super) const INFOS: &[OpInfo] = &[SPLIT_INFO, MERGE_INFO];

const SPLIT_HEADS: Lowering = Lowering {
    forward: |signature| forward(Direction::Split, signature.output.dims),
    backward: |signature| backward(Direction::Merge, signature.output.dims),
};

const MERGE_HEADS: Lowering = Lowering {
    forward: |signature| forward(Direction::Merge, signature.inputs[0].dims),
    backward: |signature| backward(Direction::Split, signature.inputs[0].dims),
};

fn forward(way: Direction, heads: &[usize]) -> Calls {
    let (x, y) = (("x", Slot::Input(0)), ("y", Slot::Output));
    Calls::default().call(planned(way, heads), [x], [y])
}

fn backward(way: Direction, heads: &[usize]) -> Calls {
    let (x, y) = (("x", Slot::OutputGradient), ("y", Slot::Gradient(0)));
    Calls::default().call(planned(way, heads), [x], [y])
}

/// Returns the kernel of one direction, for heads (B, H, T, Dh).
fn planned(way: Direction, heads: &[usize]) -> Kernel {
    fn sizes(k: &Kernel) -> candle_core::Result<HeadSizes> {
        Ok(HeadSizes {
            batch: k.count("batch")?,
            length: k.count("length")?,
            heads: k.count("heads")?,
            head_dim: k.count("head_dim")?,
        })
    }
    fn run(way: Direction, k: &Kernel, s: &Slices<'_>) -> candle_core::Result<()> {
        let sizes = sizes(k)?;
        for_stored!(s.dtype()?, T => {
            way.run(sizes, s.x::<T>("x")?, s.y("y")?);
            Ok(())
        })
    }
    let kernel = match way {
        Direction::Split => on_gpu!(
            Kernel::new("split_heads", |k, s| run(Direction::Split, k, s)),
            |k, l| Direction::Split.launch(l.gpu, sizes(k)?, l.x("x")?, l.y("y")?)
        ),
        Direction::Merge => on_gpu!(
            Kernel::new("merge_heads", |k, s| run(Direction::Merge, k, s)),
            |k, l| Direction::Merge.launch(l.gpu, sizes(k)?, l.x("x")?, l.y("y")?)
        ),
    };
    let size = |dim: usize| heads.get(dim).copied().unwrap_or(1);
    kernel.sized([
        ("batch", size(0)),
        ("heads", size(1)),
        ("length", size(2)),
        ("head_dim", size(3)),
    ])
}

/// The direction: backward runs the other one.
#[derive(Clone, Copy)]
enum Direction {
    Split,
    Merge,
}

impl Direction {
    fn run<T: Copy + Send + Sync>(self, sizes: HeadSizes, x: &[T], y: &mut [T]) {
        match self {
            Self::Split => split(sizes, x, y),
            Self::Merge => merge(sizes, x, y),
        }
    }

    #[cfg(feature = "cuda")]
    fn launch(
        self,
        gpu: &CudaDevice,
        sizes: HeadSizes,
        x: View,
        y: View,
    ) -> candle_core::Result<()> {
        let middle = match self {
            Self::Split => [sizes.length, sizes.heads],
            Self::Merge => [sizes.heads, sizes.length],
        };
        let sizes = [sizes.batch, middle[0], middle[1], sizes.head_dim];
        cuda_kernel::swap(gpu, x, sizes, y)
    }
}

/// A call of either op. It is small, because the graph of a model keeps many of these.
struct HeadsCall {
    way: Direction,
    heads: usize,
}

impl Spec for HeadsCall {
    fn output(&self, inputs: &[Operand<'_>]) -> (Shape, DType) {
        let heads = self.heads;
        let shape = match (self.way, inputs[0].dims) {
            (Direction::Split, [batch, length, width]) => {
                vec![*batch, heads, *length, width / heads]
            }
            (Direction::Merge, [batch, _, length, head_dim]) => {
                vec![*batch, *length, heads * head_dim]
            }
            (_, dims) => dims.to_vec(), // refused earlier
        };
        (shape.into(), inputs[0].dtype)
    }

    fn attributes(&self) -> Vec<(&'static str, Attribute)> {
        vec![("heads", Attribute::Count(self.heads))]
    }
}
