//! Layers that come one after the other: the weights of each are gathered while the one before is at work.

use super::Pending;
use super::part::Part;
use crate::Result;
use crate::ops::Reading;
use candle_core::{DType, Tensor};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Says that the forwards of some layers come one after the other. These are the
/// [weights](crate::nn::Layer::weights) of each.
///
/// Where ranks have [parts](super::FullyShard) of them, an eager step gathers all of a layer's weights at once, while
/// the layer before it is at work, or in backward the layer after it: matrices in the dtype that the first product
/// reads, vectors in their own. From the first step on there is room for the weights of two layers, which all share.
///
/// Weights may be changed after a backward, and between two forwards that begin with the same layer: the next forward
/// gathers them anew.
///
/// [`TransformerLM`](crate::model::TransformerLM) says so of its blocks. A weight is gathered with the first layer that
/// it was given for; layers without such weights are not concerned.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use tallow::dist::{self, Communicator, FullyShard, FullyShardConfig};
/// use tallow::nn::{self, Layer, Linear};
/// use tallow::ops;
///
/// let ranks = Communicator::alone(&Device::Cpu); // a job of one
/// let sharded = FullyShard::new(&ranks, FullyShardConfig::default())?;
/// let weights = sharded.builder(nn::seeded(0, DType::F32, &Device::Cpu));
/// let layers = [Linear::new(3, 4, weights.pp(0))?, Linear::new(4, 2, weights.pp(1))?];
/// dist::gather_ahead(layers.iter().map(Layer::weights));
///
/// let x = Tensor::ones((1, 3), DType::F32, &Device::Cpu)?;
/// let y = layers.iter().try_fold(x, |x, layer| layer.forward(&x))?;
/// let gradients = tallow::backward(ops::sum(&y)?)?;
/// assert!(sharded.parameters().iter().all(|(_, part)| gradients.get(part).is_some()));
/// # Ok::<(), tallow::Error>(())
/// ```
pub fn gather_ahead(layers: impl IntoIterator<Item = Vec<(String, Tensor)>>) {
    let ahead = Arc::<Ahead>::default();
    let mut state = ahead.lock();
    for (layer, weights) in layers.into_iter().enumerate() {
        let mut own = Vec::new();
        for part in weights.iter().filter_map(|(_, weight)| Part::of(weight)) {
            let place = Place {
                ahead: Arc::clone(&ahead),
                layer,
                index: own.len(),
            };
            if part.place.set(place).is_ok() {
                own.push(Arc::downgrade(&part));
            }
        }
        state.layers.push(own);
    }
}

/// Where a weight is: its layer, and its index among that layer's weights.
pub(super) struct Place {
    ahead: Arc<Ahead>,
    layer: usize,
    index: usize,
}

/// Layers, and what of their weights is there.
#[derive(Default)]
struct Ahead(Mutex<State>);

#[derive(Default)]
struct State {
    /// The parts of each layer's weights.
    layers: Vec<Vec<Weak<Part>>>,
    /// Even layers have the first, odd ones the second.
    slots: [Slot; 2],
    last: Option<Last>,
}

/// What was read last, and all of its layer that was read since that was begun.
struct Last {
    reading: Reading,
    layer: usize,
    read: Vec<usize>,
}

/// Room for a layer's weights.
#[derive(Default)]
struct Slot {
    /// Each of its weight's shape, in the dtype that is read.
    weights: Vec<Tensor>,
    holds: Option<Held>,
}

/// What is gathered there.
struct Held {
    layer: usize,
    /// Vectors too, which backward does not read.
    vectors: bool,
    pending: Vec<Pending>,
}

impl Ahead {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place {
    /// All of the weight that is the `part`'s in `dtype`, until its room is another's: of the second layer from here.
    /// `None` where it was gathered in another dtype, or was not.
    pub fn lent(&self, part: &Part, dtype: DType, reading: Reading) -> Result<Option<Tensor>> {
        let mut state = self.ahead.lock();
        state.note(self.layer, self.index, reading);
        if part.is_matrix() {
            let beside = match reading {
                Reading::Forward => Some(self.layer + 1),
                Reading::Recompute | Reading::Backward => self.layer.checked_sub(1),
            };
            state.gather(self.layer, dtype, reading)?;
            if let Some(beside) = beside.filter(|layer| *layer < state.layers.len()) {
                state.gather(beside, dtype, reading)?;
            }
        }
        let held = state.arrived(self.layer)?;
        let is_there = held.is_some_and(|held| part.is_matrix() || held.vectors);
        let weight = state.slots[self.layer % 2].weights.get(self.index);
        let weight = weight.filter(|weight| is_there && weight.dtype() == dtype);
        Ok(weight.cloned())
    }
}

#[cfg(feature = "report")]
impl Place {
    /// What all layers' weights have room for: elements, and their dtype.
    pub fn rooms(&self) -> Vec<(usize, DType)> {
        let state = self.ahead.lock();
        let weights = state.slots.iter().flat_map(|slot| &slot.weights);
        let rooms = weights.map(|room| (room.elem_count(), room.dtype()));
        rooms.collect()
    }
}

impl State {
    /// Notes what is read. What was gathered in an earlier pass is forgotten: an optimizer may have changed the weights
    /// since. The last layers of a forward are the first of its backward.
    fn note(&mut self, layer: usize, index: usize, reading: Reading) {
        let Some(last) = &mut self.last else {
            self.last = Some(Last::new(layer, index, reading));
            return;
        };
        let again = layer == last.layer && last.read.contains(&index);
        let is_another_pass = match (last.reading, reading) {
            (Reading::Forward, Reading::Forward) => layer < last.layer || again,
            (_, Reading::Forward) => true,
            (Reading::Backward, Reading::Backward) => layer > last.layer || again,
            (Reading::Backward, Reading::Recompute) => layer >= last.layer,
            (_, Reading::Recompute | Reading::Backward) => false,
        };
        if is_another_pass {
            self.slots.iter_mut().for_each(|slot| slot.holds = None);
        }
        if is_another_pass || (layer, reading) != (last.layer, last.reading) {
            *last = Last::new(layer, index, reading);
        } else {
            last.read.push(index);
        }
    }

    /// Begins to gather a layer's weights, unless they are there.
    fn gather(&mut self, layer: usize, dtype: DType, reading: Reading) -> Result<()> {
        let slot = &mut self.slots[layer % 2];
        if slot.holds.as_ref().is_some_and(|held| held.layer == layer) {
            return Ok(());
        }
        slot.holds = None;
        let parts: Vec<_> = self.layers[layer]
            .iter()
            .filter_map(Weak::upgrade)
            .collect();
        if parts.len() < self.layers[layer].len() {
            return Ok(()); // the model is going
        }
        let Some(first) = parts.first() else {
            return Ok(());
        };
        let vectors = reading != Reading::Backward;
        let mut collectives = Vec::new();
        slot.weights.truncate(parts.len());
        for (index, part) in parts.iter().enumerate() {
            let dtype = match part.is_matrix() {
                true => dtype,
                false => part.var.dtype(),
            };
            let fits =
                |room: &&Tensor| (room.shape(), room.dtype()) == (part.hollow.shape(), dtype);
            let whole = match slot.weights.get(index).filter(fits) {
                Some(whole) => whole.clone(),
                None => {
                    slot.weights.truncate(index);
                    slot.weights.push(part.room(dtype)?);
                    slot.weights[index].clone()
                }
            };
            if part.is_matrix() || vectors {
                collectives.extend(part.gathering_in(&whole)?);
            }
        }
        slot.holds = Some(Held {
            layer,
            vectors,
            pending: first.communicator.start_all(&collectives)?,
        });
        Ok(())
    }

    /// What is gathered of a layer, when it is there.
    fn arrived(&mut self, layer: usize) -> Result<Option<&Held>> {
        let holds = &mut self.slots[layer % 2].holds;
        let Some(mut held) = holds.take_if(|held| held.layer == layer) else {
            return Ok(None);
        };
        for pending in held.pending.drain(..) {
            pending.wait()?; // nothing is held after an error
        }
        Ok(Some(holds.insert(held)))
    }
}

impl Last {
    fn new(layer: usize, index: usize, reading: Reading) -> Self {
        Self {
            reading,
            layer,
            read: vec![index],
        }
    }
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Place")
            .field("layer", &self.layer)
            .field("index", &self.index)
            .finish_non_exhaustive()
    }
}
