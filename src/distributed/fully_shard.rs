//! Fully sharded data parallelism: weights sharded over the ranks.

use super::{Collective, Communicator, FullyShardConfig, Shard, locked};
use crate::gradients::described;
use crate::{Error, Result, graph, nn, ops};
use candle_core::{DType, Device, Shape, Tensor, Var};
use candle_nn::{Init, VarBuilder, var_builder::SimpleBackend};
use std::sync::{Arc, Mutex, MutexGuard};

/// A model that is sharded over the ranks. Each rank holds one [part](Shard::part) of every weight, gradient and
/// optimizer state. Full weights exist only while they are used (ZeRO stage 3; `fully_shard` in PyTorch).
///
/// A layer that is built from the [`builder`](Self::builder) has meta tensors as weights: shape and dtype without data.
/// The parts, [`parameters`](Self::parameters), are trained in a [planned](crate::compile::Step::fully_sharded) step.
/// It gathers weights for forward and again for backward, and averages gradients while backward continues. On a GPU it
/// does so in [buckets](FullyShardConfig::bucket_bytes), and gathers a bucket while the one before it is in use.
/// Forward's last bucket is kept, because backward reads it first.
///
/// Parts are f32, also if the step computes in half precision. Weights are then gathered in the dtype that the matmul
/// reads: bf16 with [`Precision::BF16`](crate::precision::Precision::BF16). Clipping uses the norm of the full
/// gradients, over all ranks.
///
/// Its layers run only in such a step; anywhere else they return an error. To evaluate, call
/// [`Step::forward`](crate::compile::Step::forward) of the same step.
/// [`Trainer::fully_sharded`](crate::train::Trainer::fully_sharded) trains, saves and resumes such a model.
///
/// ```
/// use candle_core::{DType, Tensor};
/// use tallow::compile::{Step, StepConfig};
/// use tallow::distributed::{self, FullyShard, FullyShardConfig};
/// use tallow::model::{TransformerConfig, TransformerLM};
/// use tallow::nn;
/// use tallow::optim::{AdamWConfig, Optimizer};
///
/// let config = TransformerConfig {
///     vocab_size: 10, context_length: 4, d_model: 8, num_layers: 1, num_heads: 2, d_ff: 16,
///     ..Default::default()
/// };
/// // Two ranks, here threads of one process; processes call distributed::init.
/// let train = |communicator: distributed::Communicator| -> tallow::Result<f32> {
///     let sharded = FullyShard::new(&communicator, FullyShardConfig::default())?;
///     let weights = nn::seeded(0, DType::F32, communicator.device());
///     let model = TransformerLM::from_var_builder(&config, sharded.builder(weights))?;
///     let mut optimizer = Optimizer::new(sharded.parameters(), AdamWConfig::default())?;
///     let mut step =
///         Step::fully_sharded_for_model(&model, &optimizer, &StepConfig::default(), &sharded)?;
///     // This rank's part of the batch.
///     let tokens = Tensor::new(&[[1u32, 2, 3, 4]], communicator.device())?; // (B, T)
///     let targets = Tensor::new(&[[2u32, 3, 4, 5]], communicator.device())?; // (B, T)
///     step.run(&mut optimizer, (&tokens, &targets))
/// };
/// std::thread::scope(|scope| {
///     let communicators = distributed::threads(2)?.into_iter();
///     let ranks: Vec<_> = communicators
///         .map(|communicator| scope.spawn(move || train(communicator)))
///         .collect();
///     ranks.into_iter().try_for_each(|rank| rank.join().unwrap().map(drop))
/// })?;
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// Only `Trainer` writes a checkpoint of all ranks. In a loop of your own, each rank can write its parts and its
/// [`Optimizer::state`](crate::optim::Optimizer::state) to files of its own. To restore them, start the same number of
/// ranks. Each rank calls candle's `Var::set` and [`Optimizer::load_state`](crate::optim::Optimizer::load_state), and
/// then creates the step. [`full_weight`](Self::full_weight) returns one full weight at a time, to export the model.
///
/// Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, section 5.3; Zhao
/// et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023.
#[derive(Clone, Debug)]
pub struct FullyShard {
    communicator: Communicator,
    config: FullyShardConfig,
    /// In the order in which they were built.
    weights: Arc<Mutex<Vec<Weight>>>,
}

#[derive(Clone, Debug)]
struct Weight {
    name: String,
    /// A meta tensor of the weight's shape.
    meta: Tensor,
    /// This rank's part (elements, 1, ...), with as many dimensions as the weight, so that weight decay of matrices
    /// applies to it.
    part: Var,
}

impl FullyShard {
    /// Creates the store of a job's sharded weights, still empty. The [builder](Self::builder) fills it.
    ///
    /// # Errors
    /// [`Error::Config`] for a dtype that is neither bf16 nor f32.
    pub fn new(communicator: &Communicator, config: FullyShardConfig) -> Result<Self> {
        config.validate()?;
        Ok(Self {
            communicator: communicator.clone(),
            config,
            weights: Arc::default(),
        })
    }

    /// Returns a builder of meta weights. It takes each weight from `vb`, which must return the same on all ranks (a
    /// seed, a file), and keeps this rank's part on the ranks' device. Only one full weight exists at a time, and never
    /// the full model.
    pub fn builder<'v>(&self, vb: VarBuilder<'v>) -> VarBuilder<'v> {
        let (dtype, device) = (vb.dtype(), self.communicator.device().clone());
        let sharded = self.clone();
        VarBuilder::from_backend(Box::new(Sharding { vb, sharded }), dtype, device)
    }

    /// Returns this rank's parts of the weights, by the weights' names, in the order in which they were built: the
    /// parameters for an optimizer.
    ///
    /// A part of a matrix has the shape (elements, 1), a part of a vector (elements).
    pub fn parameters(&self) -> Vec<(String, Var)> {
        let weights = self.weights();
        let parts = weights.iter();
        let parts = parts.map(|weight| (weight.name.clone(), weight.part.clone()));
        parts.collect()
    }

    /// Returns a full weight on every rank, on the ranks' device. All ranks must call this.
    ///
    /// # Errors
    /// [`Error::Order`] for a weight that was not built; [`Error::Rank`].
    pub fn full_weight(&self, name: &str) -> Result<Tensor> {
        let weight = self.weights().iter().find(|w| w.name == name).cloned();
        let Some(Weight { meta, part, .. }) = weight else {
            return Err(self.refuse(format!("there is no weight {name}")));
        };
        let (shard, elements) = (self.shard(), meta.elem_count());
        let whole = ops::zeros(meta.shape(), part.dtype(), self.communicator.device())?;
        let (flat, own) = (whole.flatten_all()?, shard.part(elements));
        if !own.is_empty() {
            flat.slice_set(&part.flatten_all()?, 0, own.start)?;
        }
        for (collective, some) in Collective::gathering(shard.world_size, elements) {
            let some = flat.narrow(0, some.start, some.len())?;
            self.communicator.run(collective, &some)?;
        }
        Ok(whole)
    }

    /// Returns the communicator of the ranks.
    pub fn communicator(&self) -> &Communicator {
        &self.communicator
    }

    /// Returns the configuration.
    pub fn config(&self) -> FullyShardConfig {
        self.config
    }

    /// Returns this rank and the number of ranks.
    pub fn shard(&self) -> Shard {
        self.communicator.shard()
    }

    /// Returns this rank's part of a tensor with a weight's shape, on any device.
    ///
    /// # Errors
    /// Those of candle.
    pub(crate) fn own_part(&self, whole: &Tensor) -> Result<Tensor> {
        let part = self.shard().part(whole.elem_count());
        let flat = whole.flatten_all()?;
        let part = flat.narrow(0, part.start, part.len())?;
        Ok(part.reshape(self.part_dims(whole.dims()))?)
    }

    /// Returns the shape of this rank's part of a weight: a column with the same number of dimensions.
    pub(crate) fn part_dims(&self, whole: &[usize]) -> Vec<usize> {
        let mut dims = vec![1; whole.len().max(1)];
        dims[0] = self.shard().part(whole.iter().product()).len();
        dims
    }

    /// Returns the shape of a weight.
    #[cfg(feature = "files")]
    pub(crate) fn shape_of(&self, name: &str) -> Option<Vec<usize>> {
        let weights = self.weights();
        let weight = weights.iter().find(|weight| weight.name == name)?;
        Some(weight.meta.dims().to_vec())
    }

    /// Returns the part of each of these weights, which must be all weights that were built, the same on all ranks.
    ///
    /// # Errors
    /// [`Error::Order`] if the weights differ from those that were built; [`Error::Rank`].
    pub(crate) fn parts_of(&self, weights: &[(String, Var)]) -> Result<Vec<(String, Var)>> {
        self.communicator
            .check_equal(OP, &[("weights", described(weights.iter()))])?;
        let mut own = self.weights().clone();
        let parts = weights.iter().map(|(name, weight)| {
            let place = own.iter().position(|own| own.meta.id() == weight.id());
            match place {
                Some(place) => Ok((name.clone(), own.swap_remove(place).part)),
                None => Err(self.refuse(format!(
                    "weight {name} was not built by FullyShard::builder"
                ))),
            }
        });
        let parts = parts.collect::<Result<Vec<_>>>()?;
        match own.first() {
            None => Ok(parts),
            Some(other) => {
                Err(self.refuse(format!("weight {} is not among those planned", other.name)))
            }
        }
    }

    /// Returns the meta weights with their names.
    pub(crate) fn meta_weights(&self) -> Vec<(String, Var)> {
        let weights = self.weights();
        let meta = weights.iter().filter_map(|weight| {
            let var = Var::from_tensor(&weight.meta); // the same variable
            Some((weight.name.clone(), var.ok()?))
        });
        meta.collect()
    }

    fn weights(&self) -> MutexGuard<'_, Vec<Weight>> {
        locked(&self.weights)
    }

    fn refuse(&self, problem: String) -> Error {
        Error::Order {
            op: OP,
            problem,
            hint: "build one model from FullyShard::builder, and nothing else".into(),
        }
    }
}

const OP: &str = "distributed::FullyShard";

/// A builder that returns meta weights and keeps parts of real ones.
struct Sharding<'v> {
    vb: VarBuilder<'v>,
    sharded: FullyShard,
}

impl SimpleBackend for Sharding<'_> {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        _: DType,
        _: &Device,
    ) -> candle_core::Result<Tensor> {
        let known = self.sharded.weights();
        if let Some(known) = known.iter().find(|weight| weight.name == name) {
            let meta = &known.meta;
            return match meta.shape() == &shape {
                true => Ok(meta.clone()),
                false => candle_core::bail!("{name} is {:?}, not {shape:?}", meta.dims()),
            };
        }
        drop(known);
        let whole = self.vb.get_with_hints(shape.clone(), name, init)?;
        if !whole.is_variable() && nn::keeps_frozen(&self.vb, name) {
            let hint = "sharded weights are trained: freeze none of them";
            return Err(Error::order(OP, format!("{name} is frozen"), hint).into());
        }
        let part = self.sharded.own_part(&whole)?.detach();
        let part = ops::variable_of(&part.to_device(self.sharded.communicator.device())?)?;
        let meta = graph::meta_weight(name, shape, part.dtype())?;
        self.sharded.weights().push(Weight {
            name: name.into(),
            meta: meta.clone(),
            part,
        });
        Ok(meta)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> candle_core::Result<Tensor> {
        if graph::builds_meta(&self.vb) {
            return self.vb.get_unchecked(name); // returns the error
        }
        candle_core::bail!("{name}: a sharded weight was asked for without its shape")
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.vb.contains_tensor(name)
    }
}
