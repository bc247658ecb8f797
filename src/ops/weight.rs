//! A weight as products read it: itself; in an autocast region its copy in half precision; all of one that ranks have
//! parts of. Neither copies nor what was gathered are nodes of the graph.
//!
//! PyTorch's autocast casts the weight first, and the graph has a node for that. Here the op takes the f32 weight
//! itself and its copy beside it: the products are the same, while the weight's gradient is summed and returned in f32,
//! without a gradient of the copy.

use super::cast::operand;
use super::cast::{cached_copy, cast_castable, cast_weight};
use super::dispatch::{KernelPolicy, current_kernel_policy, has_kernel};
use super::info::OpInfo;
use super::lowering::{Signature, Slot};
use crate::graph::{self, Attribute};
use crate::holding::holding;
use crate::{Result, precision, probe};
use candle_core::{DType, Tensor, TensorId};
use std::any::Any;
use std::cell::Cell;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};

/// A weight that ranks have parts of; its layer has a hollow tensor in its place.
pub(crate) trait Divided: Any + Send + Sync {
    /// All of it in `dtype`, outside of the graph.
    fn gathered(self: Arc<Self>, dtype: DType) -> Result<Tensor>;

    /// The same in room that is there for it and others by turns, if there is: for a product that comes next, and not
    /// to be kept.
    fn lent(&self, dtype: DType, reading: Reading) -> Result<Option<Tensor>>;

    /// All of it as a node of the graph: its gradient goes on to the part.
    fn node(self: Arc<Self>) -> Result<Tensor>;

    /// The same node without its elements, for ops that read its weight beside it.
    fn empty_node(self: Arc<Self>) -> Result<Tensor>;

    /// Whether there are no parts, and it is there to be traced.
    fn is_on_paper(&self) -> bool;
}

/// Divided weights that are there, by their hollow tensors.
static DIVIDED: LazyLock<Mutex<HashMap<TensorId, Weak<dyn Divided>>>> =
    LazyLock::new(Mutex::default);

fn all_divided() -> MutexGuard<'static, HashMap<TensorId, Weak<dyn Divided>>> {
    DIVIDED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Says what a hollow tensor stands for, until [`forget`].
pub(crate) fn stands_for(hollow: &Tensor, weight: Weak<dyn Divided>) {
    all_divided().insert(hollow.id(), weight);
}

/// The weight of this hollow tensor goes.
pub(crate) fn forget(hollow: &Tensor) {
    all_divided().remove(&hollow.id());
}

/// What a hollow tensor stands for, if it stands for a weight that ops gather: a plan gathers by itself.
pub(crate) fn divided(weight: &Tensor) -> Option<Arc<dyn Divided>> {
    if !graph::is_hollow(weight) {
        return None;
    }
    let divided = all_divided().get(&weight.id()).and_then(Weak::upgrade);
    divided.filter(|weight| !graph::is_tracing() || weight.is_on_paper())
}

/// When a weight is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reading {
    Forward,
    /// In a forward that backward has run again.
    Recompute,
    Backward,
}

thread_local! {
    static RECOMPUTES: Cell<bool> = const { Cell::new(false) };
}

/// Runs `f`, a forward, in backward.
pub(crate) fn recomputing<R>(f: impl FnOnce() -> R) -> R {
    holding(|recomputes| RECOMPUTES.replace(recomputes), true, f)
}

/// When forward reads what it reads here.
pub(crate) fn forward_reading() -> Reading {
    match RECOMPUTES.get() {
        true => Reading::Recompute,
        false => Reading::Forward,
    }
}

/// What products read beside a weight, for the life of an op; nothing, where they read the weight as it is.
pub(super) struct WeightCopy(Option<Box<Copied>>);

struct Copied {
    /// None after forward, where it is dropped then.
    copy: Mutex<Option<Tensor>>,
    source: Source,
    dtype: DType,
    /// Whether it is of its own, and dropped after forward.
    drops: bool,
}

/// What a copy is made of.
enum Source {
    /// The weight, cast.
    Cast,
    /// The parts of all ranks.
    Gathered(Arc<dyn Divided>),
    /// The same, in room that others get next.
    Lent(Arc<dyn Divided>),
}

/// x and the weights as `op` takes them here, and the copies that its products read.
///
/// Copies are for f32 variables that a kernel multiplies by in half precision, and for weights that ranks have parts
/// of; others are cast as `cast_for` casts.
pub(super) fn with_copies<const N: usize>(
    op: &OpInfo,
    x: &Tensor,
    weights: [&Tensor; N],
) -> Result<(Tensor, [Tensor; N], [WeightCopy; N])> {
    let all: Vec<_> = [x].into_iter().chain(weights).map(Into::into).collect();
    let mut x = operand(op.op, x)?;
    let mut inputs = weights.map(Tensor::clone);
    for weight in &mut inputs {
        *weight = operand(op.op, weight)?;
    }
    let target = precision::decide(op.op, &all);
    let cast = |x: &Tensor| match target {
        Some(dtype) => cast_castable(x, dtype),
        None => Ok(x.clone()),
    };
    x = cast(&x)?;
    let has_kernel = current_kernel_policy() != KernelPolicy::Reference && has_kernel(op, &x);
    let in_half = target.filter(|dtype| matches!(dtype, DType::F16 | DType::BF16));
    let mut copies = weights.map(|_| WeightCopy::none());
    for (weight, copy) in inputs.iter_mut().zip(&mut copies) {
        let is_copied = has_kernel && weight.is_variable() && weight.dtype() == DType::F32;
        match (divided(weight), in_half) {
            (Some(divided), _) if has_kernel => {
                let castable = target.filter(|_| precision::is_castable(weight.dtype()));
                let dtype = castable.unwrap_or(weight.dtype());
                *weight = Arc::clone(&divided).empty_node()?;
                *copy = WeightCopy::gathered(divided, dtype)?;
            }
            (Some(divided), _) => *weight = cast(&divided.node()?)?,
            (None, Some(dtype)) if is_copied => *copy = WeightCopy::cast(weight, dtype)?,
            (None, _) => *weight = cast(weight)?,
        }
    }
    Ok((x, inputs, copies))
}

/// The copies, each for as long as there is one.
pub(super) fn tensors(copies: &[WeightCopy]) -> Vec<Tensor> {
    copies.iter().filter_map(WeightCopy::get).collect()
}

/// The copies for backward: a dropped one is made again.
pub(super) fn tensors_again(
    copies: &[WeightCopy],
    weights: &[&Tensor],
) -> candle_core::Result<Vec<Tensor>> {
    let copied = copies.iter().zip(weights);
    let copied = copied.filter_map(|(copy, weight)| copy.for_backward(weight).transpose());
    Ok(copied.collect::<Result<_>>()?)
}

/// Says which copies stay for backward, after forward.
pub(super) fn tell_kept(copies: &[WeightCopy]) {
    for copy in copies.iter().filter_map(WeightCopy::get) {
        probe::kept("weight copy", &copy);
    }
}

/// Which inputs are read by copies in their own dtype: a bit each.
const GATHERED: &str = "gathered";

/// What [`read_weight`] must know of an op whose inputs from 1 on are these weights.
pub(super) fn attributes(copies: &[WeightCopy]) -> Vec<(&'static str, Attribute)> {
    let gathered = (1..).zip(copies).filter(|(_, copy)| copy.is_gathered());
    match gathered.map(|(input, _)| 1 << input).sum() {
        0 => Vec::new(),
        bits => vec![(GATHERED, Attribute::Count(bits))],
    }
}

/// What products read of input `input`, a weight: itself, or the copy beside it, where it was gathered, or where its
/// own dtype is another than x's. Copies stand first in what an op reads, in the order of their weights.
pub(super) fn read_weight(signature: &Signature<'_>, input: usize) -> Slot {
    let gathered = match signature.attribute(GATHERED) {
        Some(Attribute::Count(bits)) => bits,
        _ => 0,
    };
    let is_copied = |input: &usize| {
        gathered & (1 << *input) != 0 || signature.inputs[*input].dtype != signature.inputs[0].dtype
    };
    match is_copied(&input) {
        true => Slot::Read((1..input).filter(is_copied).count()),
        false => Slot::Input(input),
    }
}

impl WeightCopy {
    fn none() -> Self {
        Self(None)
    }

    fn cast(weight: &Tensor, dtype: DType) -> Result<Self> {
        let caches = precision::caches_weights();
        let copy = match caches {
            true => cached_copy(weight, dtype)?,
            false => cast_weight(&weight.detach(), dtype)?,
        };
        Ok(Self::new(copy, Source::Cast, !caches))
    }

    fn gathered(weight: Arc<dyn Divided>, dtype: DType) -> Result<Self> {
        Ok(match weight.lent(dtype, forward_reading())? {
            Some(copy) => Self::new(copy, Source::Lent(weight), false),
            None => {
                let copy = Arc::clone(&weight).gathered(dtype)?;
                Self::new(copy, Source::Gathered(weight), true)
            }
        })
    }

    fn new(copy: Tensor, source: Source, drops: bool) -> Self {
        Self(Some(Box::new(Copied {
            dtype: copy.dtype(),
            copy: Mutex::new(Some(copy)),
            source,
            drops,
        })))
    }

    fn get(&self) -> Option<Tensor> {
        self.0.as_ref()?.lock().clone()
    }

    fn is_gathered(&self) -> bool {
        let copied = self.0.as_ref();
        copied.is_some_and(|copied| !matches!(copied.source, Source::Cast))
    }

    /// Whether its memory goes when forward's product is done.
    pub(super) fn is_dropped(&self) -> bool {
        self.0.as_ref().is_some_and(|copied| copied.drops)
    }

    /// Drops what is dropped when forward is done.
    pub(super) fn forwarded(&self) {
        if let Some(copied) = &self.0
            && (copied.drops || matches!(copied.source, Source::Lent(_)))
        {
            *copied.lock() = None;
        }
    }

    /// The weight as products read it, before forward: for checks.
    pub(super) fn of(&self, weight: &Tensor) -> Tensor {
        self.get().unwrap_or_else(|| weight.clone())
    }

    /// What backward's products read beside the weight: a dropped copy is made again.
    fn for_backward(&self, weight: &Tensor) -> Result<Option<Tensor>> {
        let Some(copied) = &self.0 else {
            return Ok(None);
        };
        if let Some(copy) = self.get() {
            return Ok(Some(copy));
        }
        let dtype = copied.dtype;
        let copy = match &copied.source {
            Source::Cast => cast_weight(&weight.detach(), dtype),
            Source::Gathered(divided) => Arc::clone(divided).gathered(dtype),
            Source::Lent(divided) => match divided.lent(dtype, Reading::Backward)? {
                Some(copy) => Ok(copy),
                None => Arc::clone(divided).gathered(dtype),
            },
        };
        copy.map(Some)
    }
}

impl Copied {
    fn lock(&self) -> MutexGuard<'_, Option<Tensor>> {
        self.copy.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
