//! Sharding of the optimizer's state among ranks.

use super::Optimizer;
use super::optimizer::next_id;
#[cfg(feature = "files")]
use super::slot::Slot;
use crate::distributed::{Communicator, Shard};
use crate::gradients::described;
use crate::{Error, Result};
#[cfg(feature = "files")]
use candle_core::{DType, Device, Tensor, Var};

/// The rank that owns each parameter's state.
#[derive(Debug)]
pub(super) struct Shards {
    communicator: Communicator,
    /// The owner of each parameter.
    owners: Vec<usize>,
}

impl Optimizer {
    /// Shards state and update among the ranks that train a model (ZeRO, stage 1). This rank keeps the state of the
    /// parameters that it owns, frees the rest, and updates only its own parameters. An eager [`step`](Self::step)
    /// ends by receiving the others from their owners. A [planned](crate::compile::Step::replicated) step receives them
    /// at the start of the next [`Step::run`](crate::compile::Step::run).
    ///
    /// Parameters are not split; each rank owns about the same number of elements. On each rank, state and update take
    /// about 1 / world_size of the memory and time that they take without sharding. [`Optimizer::new`] allocates the
    /// full state, so each rank has it until this call. All ranks have to call `step` with the same gradients, as
    /// [`Replicated`](crate::distributed::Replicated) returns them; the weights are then the same as without sharding.
    ///
    /// [`state`](Self::state) returns the state of this rank's parameters; [`save`](Self::save) and the
    /// [trainer](crate::train::Trainer::save) write that of all. Load a state before sharding.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use tallow::distributed;
    /// use tallow::optim::{AdamWConfig, Optimizer};
    /// use tallow::ops;
    ///
    /// // Two ranks, here threads of one process; processes call distributed::init.
    /// let ranks = distributed::threads(2)?;
    /// std::thread::scope(|scope| {
    ///     let of = |communicator: distributed::Communicator| -> tallow::Result<()> {
    ///         let parameters = ["a", "b"]
    ///             .map(|name| Ok((name.to_string(), Var::new(&[1f32, 2.0], &Device::Cpu)?)));
    ///         let parameters = parameters.into_iter().collect::<tallow::Result<Vec<_>>>()?;
    ///         let mut optimizer = Optimizer::new(parameters.clone(), AdamWConfig::default())?;
    ///         optimizer.shard(&communicator)?;
    ///         let (a, b) = (&parameters[0].1, &parameters[1].1);
    ///         optimizer.step(&tallow::backward(ops::sum(&ops::mul(a, b)?)?)?)?;
    ///         assert_eq!(optimizer.state().len(), 2); // of one parameter, not of two
    ///         assert_eq!(a.to_vec1::<f32>()?, b.to_vec1::<f32>()?); // both are updated
    ///         Ok(())
    ///     };
    ///     let ranks: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(move || of(rank))).collect();
    ///     ranks.into_iter().try_for_each(|rank| rank.join().unwrap())
    /// })?;
    /// # Ok::<(), tallow::Error>(())
    /// ```
    ///
    /// Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, section 5.1.
    ///
    /// # Errors
    /// [`Error::Order`] if the optimizer is already sharded; [`Error::Placement`] for parameters on another device than
    /// the communicator's; [`Error::Rank`] if ranks have different parameters or numbers of steps.
    pub fn shard(&mut self, communicator: &Communicator) -> Result<()> {
        const OP: &str = "Optimizer::shard";
        if self.shards.is_some() {
            return Err(Error::Order {
                op: OP,
                problem: "the optimizer is divided already".into(),
                hint: "call it once".into(),
            });
        }
        for (_, var) in self.parameters() {
            communicator.check_device(var.device())?;
        }
        let facts = [
            ("parameters", described(self.parameters())),
            ("steps", self.steps.to_string()),
        ];
        communicator.check_equal(OP, &facts)?;
        let sizes = self.parameters();
        let sizes = sizes.map(|(name, var)| (name.as_str(), var.elem_count()));
        let owners = Shard::owners(communicator.world_size(), sizes);
        for (slot, owner) in self.slots.iter_mut().zip(&owners) {
            if *owner != communicator.rank() {
                *slot = None;
            }
        }
        self.id = next_id();
        self.shards = Some(Shards {
            communicator: communicator.clone(),
            owners,
        });
        Ok(())
    }

    /// Receives the current values of the parameters that other ranks own, if the optimizer is [sharded](Self::shard).
    /// All ranks have to call it.
    ///
    /// It is needed only after [planned](crate::compile::Step::replicated) steps, which update a rank's own parameters
    /// and fetch the others in the next run.
    ///
    /// # Errors
    /// [`Error::Rank`].
    pub fn gather_weights(&self) -> Result<()> {
        let Some(shards) = &self.shards else {
            return Ok(());
        };
        for ((_, var), owner) in self.parameters().zip(&shards.owners) {
            shards.communicator.broadcast(var, *owner)?;
        }
        crate::ops::clear_cached_casts(); // an autocast region around the step must not go on with the old ones
        Ok(())
    }

    /// Returns this rank's shard, if the optimizer is sharded.
    pub(crate) fn own_shard(&self) -> Option<Shard> {
        Some(self.shards.as_ref()?.communicator.shard())
    }

    /// Returns the state of all parameters. If the optimizer is sharded, rank 0 gets it on the host and other ranks get
    /// nothing; all ranks have to call it.
    ///
    /// # Errors
    /// [`Error::Rank`].
    #[cfg(feature = "files")]
    pub(super) fn full_state(&self) -> Result<Vec<(String, Tensor)>> {
        let Some(shards) = &self.shards else {
            return Ok(self.state());
        };
        let mut state = Vec::new();
        for (entry, owner) in self.entries().zip(&shards.owners) {
            let mut own = entry.slot.into_iter().flat_map(Slot::vars);
            for (kind, dtype) in entry.rule.state(entry.var.dtype()) {
                let own = own.next().map(|(_, var)| var);
                if let Some(tensor) = shards.to_first(entry.var, dtype, *owner, own)? {
                    state.push((format!("{kind}.{}", entry.name), tensor));
                }
            }
        }
        if shards.communicator.rank() == 0 {
            state.extend(self.skipped_steps());
        }
        Ok(state)
    }
}

#[cfg(feature = "files")]
impl Shards {
    /// Sends a tensor of a parameter's state from its owner to rank 0.
    fn to_first(
        &self,
        var: &Var,
        dtype: DType,
        owner: usize,
        own: Option<&Var>,
    ) -> Result<Option<Tensor>> {
        let state = match own {
            Some(own) => own.as_tensor().clone(),
            None if owner == 0 => return Ok(None), // it is there
            None => Tensor::zeros(var.shape(), dtype, var.device())?,
        };
        let _timeout = self
            .communicator
            .apply_timeout("gathering of the optimizer's state");
        if owner != 0 {
            self.communicator.broadcast(&state, owner)?;
        }
        let is_first = self.communicator.rank() == 0;
        Ok(is_first
            .then(|| state.to_device(&Device::Cpu))
            .transpose()?)
    }
}
