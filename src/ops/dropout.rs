//! Dropout: elements are zeroed at random in training.

use super::cast::cast_for;
use super::info::OpInfo;
use super::lowering::{Calls, Kernel, Lowering, Signature, Slot, kernel, on_gpu};
use super::operand::check_size;
use super::record::{CallSpec, run, wide_input};
use crate::graph::{self, Attribute};
#[cfg(feature = "cuda")]
use crate::kernels::cuda::dropout as cuda_kernel;
use crate::kernels::{self, DropoutMask, cpu::dropout as kernel};
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use std::ops::Range;

const OP: &str = "dropout";

/// The parameters of dropout: the probability, and the key that selects the elements.
///
/// [`dropout()`] has an example.
#[derive(Clone, Debug, PartialEq)]
pub struct Dropout {
    /// p: from 0, which drops nothing, to under 1. It is rounded to the nearest multiple of 2^-16.
    pub probability: f64,
    /// The key that selects the elements.
    pub key: DropoutKey,
}

/// The key that selects the elements to drop: a seed, the step's number, and the site in the model.
///
/// An element's 16 random bits are a function of the key and of the element's position: its row and its column along
/// the last dimension (Philox4x32-10). So masks are the same on every device, eager and planned, for any number of
/// threads, and when a checkpointed block is recomputed; backward saves no mask. Two calls with the same key drop the
/// same elements: give each its own [site](Self::at).
///
/// In a plan a key is an [input](Self::input), so that each run has a new one.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use tallow::ops::{self, Dropout, DropoutKey};
///
/// let x = Tensor::ones((4, 64), DType::F32, &Device::Cpu)?;
/// let dropped = |key| ops::dropout(&x, &Dropout { probability: 0.5, key })?.to_vec2::<f32>();
/// let key = DropoutKey::new(42, 7)?; // seed 42, step 7
/// let first = dropped(key.clone())?;
/// assert_eq!(first, dropped(DropoutKey::new(42, 7)?)?);
/// assert_ne!(first, dropped(key.at(1))?); // the next site
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct DropoutKey {
    /// u32 (1, 4): seed, seed >> 32, step, micro-batch.
    words: Tensor,
    site: u32,
}

/// Compares the identity of the tensors and not their elements, which may be on a GPU.
impl PartialEq for DropoutKey {
    fn eq(&self, other: &Self) -> bool {
        (self.words.id(), self.site) == (other.words.id(), other.site)
    }
}

impl DropoutKey {
    const SITES: u32 = 1 << 24;

    /// Returns the key of step `step`, of which the low 32 bits count.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn new(seed: u64, step: usize) -> Result<Self> {
        Self::of_micro_batch(seed, step, 0)
    }

    /// Returns the key of one of the micro-batches of a step, whose gradients are accumulated; otherwise like
    /// [`new`](Self::new).
    ///
    /// # Errors
    /// Errors of the device.
    pub fn of_micro_batch(seed: u64, step: usize, micro_batch: usize) -> Result<Self> {
        let words = [
            seed as u32,
            (seed >> 32) as u32,
            step as u32,
            micro_batch as u32,
        ];
        Ok(Self {
            words: Tensor::from_slice(&words, (1, 4), &Device::Cpu)?,
            site: 0,
        })
    }

    /// Returns an input of a plan with this name, u32 (1, 4). A run gets the keys of all its micro-batches from
    /// [`of_step`](Self::of_step).
    ///
    /// # Errors
    /// Those of [`graph::input`](crate::graph::input()).
    pub fn input(name: &str) -> Result<Self> {
        Ok(Self {
            words: graph::input(name, (1, 4), DType::U32)?,
            site: 0,
        })
    }

    /// Returns the value of a plan's [input](Self::input), u32 (micro-batches, 4), for the micro-batches of a step with
    /// these numbers.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn of_step(seed: u64, step: usize, micro_batches: Range<usize>) -> Result<Tensor> {
        let keys = micro_batches.map(|i| Ok(Self::of_micro_batch(seed, step, i)?.words));
        Ok(Tensor::cat(&keys.collect::<Result<Vec<_>>>()?, 0)?)
    }

    /// Returns the same key on another device. Move it to the device of use, to avoid a copy per use.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn to_device(&self, device: &Device) -> Result<Self> {
        Ok(Self {
            words: self.words.to_device(device)?,
            site: self.site,
        })
    }

    /// Returns the key at a site `sites_further` after this one. There are 2^24 sites; the first follows the last.
    pub fn at(&self, sites_further: usize) -> Self {
        let sites_further = (sites_further % Self::SITES as usize) as u32;
        Self {
            words: self.words.clone(),
            site: (self.site + sites_further) % Self::SITES,
        }
    }

    /// Returns the key's tensor, u32 (1, 4).
    pub fn tensor(&self) -> &Tensor {
        &self.words
    }
}

/// Computes `y = x / (1 - p)` where an element stays, with probability 1 - p, else 0.
///
/// With p = 0 it returns x itself. Backward computes dx from dy as forward computes y from x. Saved for backward:
/// nothing; the mask is drawn again. The product is rounded once. Autocast: follows x.
///
/// Srivastava et al., "Dropout: A Simple Way to Prevent Neural Networks from Overfitting", JMLR 15, 2014, section 10
/// (scaled in training).
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use tallow::ops::{self, Dropout, DropoutKey};
///
/// let x = Tensor::ones((4, 256), DType::F32, &Device::Cpu)?;
/// let dropout = |step| {
///     Ok::<_, tallow::Error>(Dropout { probability: 0.25, key: DropoutKey::new(42, step)? })
/// };
/// let y = ops::dropout(&x, &dropout(0)?)?.flatten_all()?.to_vec1::<f32>()?;
/// assert!(y.iter().all(|y| *y == 0.0 || *y == 1.0 / 0.75));
/// let again = ops::dropout(&x, &dropout(0)?)?.flatten_all()?.to_vec1::<f32>()?;
/// let other = ops::dropout(&x, &dropout(1)?)?.flatten_all()?.to_vec1::<f32>()?;
/// assert!(y == again && y != other);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// A probability that is not from 0 to under 1; a dtype that is not a float.
pub fn dropout(x: &Tensor, dropout: &Dropout) -> Result<Tensor> {
    check_probability("ops::Dropout", "probability", dropout.probability)?;
    let [x] = &cast_for(OP, [x])?;
    let call = CallSpec::like_first()
        .with_all(attributes(dropout.kernel()))
        .reading(&dropout.key.words);
    run(&INFO, call, [x], || reference(x, dropout))
}

/// Computes [`dropout()`] in plain candle ops, with its mask drawn on the CPU.
///
/// # Errors
/// Those of [`dropout()`].
pub fn reference(x: &Tensor, dropout: &Dropout) -> Result<Tensor> {
    check_probability("ops::Dropout", "probability", dropout.probability)?;
    check_size(OP, x.dims(), x.dtype(), x.device())?;
    let wide = wide_input(OP, x)?;
    let width = width_of(x.dims());
    let mask = dropout.mask(width)?;
    let mut factors = Vec::with_capacity(x.elem_count());
    for row in 0..x.elem_count().checked_div(width).unwrap_or(0) {
        mask.each(row, 0..width, |_, stays| {
            factors.push(if stays { mask.scale() } else { 0.0 });
        });
    }
    let factors = Tensor::from_vec(factors, x.shape(), &Device::Cpu)?;
    let factors = factors.to_dtype(wide.dtype())?.to_device(x.device())?;
    let dropped = factors.zeros_like()?;
    let kept = (&wide * &factors)?;
    Ok(factors
        .ne(&dropped)?
        .where_cond(&kept, &dropped)?
        .to_dtype(x.dtype())?)
}

/// Checks that a probability of dropout is from 0 to under 1.
pub(crate) fn check_probability(
    config: &'static str,
    field: &'static str,
    probability: f64,
) -> Result<()> {
    match (0.0..1.0).contains(&probability) {
        true => Ok(()),
        false => Err(Error::config(config, field, probability)
            .must_be("from 0 to under 1", "0 drops nothing, 0.1 is usual")),
    }
}

pub(super) const INFO: OpInfo = OpInfo::new(OP)
    .on_gpu_up_to(usize::MAX)
    .costing(
        "1 an element, backward 1",
        "x, y; backward dy, dx",
        |o| o.elementwise(1.0),
        Some(|o| o.moved_back(1.0)),
    )
    .planned(LOWERING);

const LOWERING: Lowering = Lowering {
    forward: |signature| {
        let reads = [("x", Slot::Input(0)), ("key", Slot::ExtraInput(0))];
        let kernel = map("dropout", signature);
        Calls::default().call(kernel, reads, [("y", Slot::Output)])
    },
    backward: |signature| {
        let reads = [("x", Slot::OutputGradient), ("key", Slot::ExtraInput(0))];
        let kernel = map("dropout_backward", signature);
        Calls::default().call(kernel, reads, [("y", Slot::Gradient(0))])
    },
};

/// Returns the kernel that computes y from x, or dx from dy.
fn map(name: &'static str, signature: &Signature<'_>) -> Kernel {
    let kernel = kernel!(name, |T, k, s| {
        let width = k.count("width")?;
        let mask = dropout_of_kernel(k)?.mask(s.x("key")?, width);
        kernel::dropout(s.x::<T>("x")?, &mask, width, s.y("y")?);
    });
    let kernel = on_gpu!(kernel, |k, l| {
        let (dropout, width) = (dropout_of_kernel(k)?, k.count("width")?);
        cuda_kernel::dropout(l.gpu, l.x("x")?, l.x("key")?, dropout, width, l.y("y")?)
    });
    let kernel = kernel.sized([("width", width_of(signature.output.dims))]);
    kernel.with_all(signature.attributes)
}

fn width_of(dims: &[usize]) -> usize {
    dims.last().copied().unwrap_or(1)
}

/// The attribute of the probability; only calls with dropout have it.
const PROBABILITY: &str = "probability";

/// Returns the attributes that a trace records for a call with dropout.
pub(crate) fn attributes(dropout: kernels::Dropout) -> [(&'static str, Attribute); 2] {
    [
        (PROBABILITY, Attribute::Number(dropout.probability)),
        ("site", Attribute::Count(dropout.site as usize)),
    ]
}

/// Returns the dropout of a call with these [attributes]; `None` if it has none.
pub(crate) fn dropout_from_attributes(
    all: &[(&'static str, Attribute)],
) -> Option<kernels::Dropout> {
    let of = |name| all.iter().find(|(other, _)| *other == name);
    match (of(PROBABILITY)?.1, of("site")?.1) {
        (Attribute::Number(probability), Attribute::Count(site)) => Some(kernels::Dropout {
            probability,
            site: site as u32,
        }),
        _ => None,
    }
}

pub(crate) fn dropout_of_kernel(k: &Kernel) -> candle_core::Result<kernels::Dropout> {
    let without = || candle_core::Error::msg(format!("{} has no probability of dropout", k.name()));
    dropout_from_attributes(k.attributes()).ok_or_else(without)
}

impl Dropout {
    /// Returns the parameters for kernels, which read the key separately.
    pub(crate) fn kernel(&self) -> kernels::Dropout {
        kernels::Dropout {
            probability: self.probability,
            site: self.key.site,
        }
    }

    /// Returns the mask for rows of `width`. The key must have elements, so it must not be a plan's input.
    pub(crate) fn mask(&self, width: usize) -> candle_core::Result<DropoutMask> {
        let key = self.key.words.flatten_all()?.to_vec1()?;
        Ok(self.kernel().mask(&key, width))
    }
}
