//! A rank's part of a weight, which its layer has a hollow tensor in place of.

use super::ahead::Place;
use super::gather::{Empty, Gather, write};
use super::scattering::Scattering;
use super::{Collective, Communicator, Shard};
use crate::graph::{self, MemoryStep, Room};
use crate::no_grad;
use crate::ops::record::apply;
use crate::ops::{Divided, Reading, divided, forget, forward_reading, stands_for};
use candle_core::{DType, Result, Shape, Tensor, Var};
use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, OnceLock, Weak};

/// A rank's part of a weight.
#[derive(Debug)]
pub(super) struct Part {
    /// (elements, 1, ...), of as many dimensions as the weight: what decays matrices alone knows it as one.
    pub var: Var,
    /// Of the weight's shape.
    pub hollow: Tensor,
    pub communicator: Communicator,
    pub scattering: Arc<Scattering>,
    /// Among weights that are gathered ahead.
    pub place: OnceLock<Place>,
}

impl Part {
    /// What a hollow tensor stands for.
    pub fn of(hollow: &Tensor) -> Option<Arc<Self>> {
        let weight: Arc<dyn Any + Send + Sync> = divided(hollow)?;
        weight.downcast().ok()
    }

    /// Has ops take the hollow weight for it.
    pub fn shared(self) -> Arc<Self> {
        let part = Arc::new(self);
        let weight: Weak<Self> = Arc::downgrade(&part);
        stands_for(&part.hollow, weight);
        part
    }

    /// Whether products read it: of more than one dimension.
    pub fn is_matrix(&self) -> bool {
        self.hollow.rank() > 1
    }

    /// Room for all of it in `dtype`.
    pub fn room(&self, dtype: DType) -> Result<Tensor> {
        match self.is_on_paper() {
            true => graph::constant(self.hollow.shape(), dtype),
            false => Tensor::zeros(self.hollow.shape(), dtype, self.communicator.device()),
        }
    }

    /// Writes the part where it belongs in `all` of the weight; what gathers the others there.
    pub fn gathering_in(&self, all: &Tensor) -> Result<Vec<(Collective, Tensor)>> {
        if self.is_on_paper() {
            return Ok(Vec::new());
        }
        let all = all.flatten_all()?;
        let some = |range: Range<usize>| all.narrow(0, range.start, range.len());
        write(&self.var, &some(self.own())?)?;
        let collectives = self.gathering().into_iter();
        collectives
            .map(|(collective, range)| Ok((collective, some(range)?)))
            .collect()
    }

    pub fn shape(&self) -> &Shape {
        self.hollow.shape()
    }

    /// The elements of the weight that it is.
    pub fn own(&self) -> Range<usize> {
        let (rank, world_size) = (self.communicator.rank(), self.communicator.world_size());
        Shard { rank, world_size }.part(self.hollow.elem_count())
    }

    /// What gives every rank all of the weight, by the elements that each is of.
    pub fn gathering(&self) -> Vec<(Collective, Range<usize>)> {
        Collective::gathering(self.communicator.world_size(), self.hollow.elem_count())
    }

    /// The part's gradient from that of the whole: this rank's part of the mean over all ranks.
    pub fn scattered(&self, dy: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let gradient = self.scattering.start(self.own(), &self.var, dy)?;
        Ok(vec![Some(gradient)])
    }

    /// What [`scattered`](Self::scattered) does to memory: the own part of the gradient, and a copy of it to exchange.
    pub fn scattering_steps(&self) -> Vec<MemoryStep> {
        let exchanged = Room {
            what: "exchanged gradient",
            formula: "of a weight",
            elements: self.hollow.elem_count() as f64,
            element_bytes: self.scattering.dtype(self.var.dtype()).size_in_bytes(),
        };
        vec![MemoryStep::Gradient(0), MemoryStep::Exchange(exchanged)]
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        forget(&self.hollow);
    }
}

impl Divided for Part {
    fn gathered(self: Arc<Self>, dtype: DType) -> crate::Result<Tensor> {
        let part = self.var.detach();
        let gather = Gather::new(self, dtype, None);
        Ok(no_grad(|| apply(&[&part], gather))?)
    }

    fn lent(&self, dtype: DType, reading: Reading) -> crate::Result<Option<Tensor>> {
        match self.place.get() {
            Some(place) => place.lent(self, dtype, reading),
            None => Ok(None),
        }
    }

    fn node(self: Arc<Self>) -> crate::Result<Tensor> {
        let (part, dtype) = (self.var.clone(), self.var.dtype());
        let lent = self.lent(dtype, forward_reading())?;
        Ok(apply(&[part.as_tensor()], Gather::new(self, dtype, lent))?)
    }

    fn empty_node(self: Arc<Self>) -> crate::Result<Tensor> {
        let part = self.var.clone();
        Ok(apply(&[part.as_tensor()], Empty(self))?)
    }

    fn is_on_paper(&self) -> bool {
        graph::is_hollow(&self.var)
    }
}

/// All of a weight whose [parts](super::FullyShard) the ranks of a job have, for what a layer of your own does with it
/// in candle's ops or in views; it is kept for backward. Any other tensor itself, and in a
/// [trace](crate::graph::trace()) of a plan that of the weight too.
///
/// This crate's products ([`linear`](crate::ops::linear()) and its kin) take the layer's weight as it is, gather it for
/// as long as they read it, and again in backward: give them that.
///
/// Every rank has to call it, and gets the same. The gradient of what comes is averaged over the ranks, and a rank's
/// part of it is that of its part of the weight.
///
/// # Errors
/// [`Error::Rank`](crate::Error::Rank).
pub fn gathered(weight: &Tensor) -> crate::Result<Tensor> {
    match divided(weight) {
        Some(weight) => weight.node(),
        None => Ok(weight.clone()), // which ops outside of traces refuse, if it is hollow
    }
}
