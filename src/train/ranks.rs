//! A run on several ranks, each of which computes a part of every step's batches.

use super::{Data, TrainConfig, Trainer};
use crate::distributed::{Communicator, FullyShard, Replicated, ReplicatedConfig};
use crate::model::TransformerLM;
use crate::{Error, Result, ops};
use candle_core::Device;
use candle_nn::VarBuilder;
use std::collections::HashMap;
use std::ops::Range;

/// The way in which ranks train together.
#[derive(Debug)]
pub(super) enum Job {
    Replicated(Replicated),
    FullyShard(FullyShard),
}

impl Job {
    fn communicator(&self) -> &Communicator {
        match self {
            Self::Replicated(replicated) => replicated.communicator(),
            Self::FullyShard(sharded) => sharded.communicator(),
        }
    }
}

impl Trainer {
    /// Creates a run of several ranks that train together, as in [`replicate`](Self::replicate). Each rank has only a
    /// shard of every weight, gradient and optimizer state. `model` must be built from the
    /// [builder](FullyShard::builder) of `sharded`, so its weights are meta tensors. Every rank calls this, instead of
    /// [`new`](Self::new) and `replicate`. Only one full weight at a time is created, never the full model.
    ///
    /// ```no_run
    /// use candle_core::DType;
    /// use std::path::Path;
    /// use tallow::data::Tokens;
    /// use tallow::distributed::{self, DistConfig, FullyShard, FullyShardConfig};
    /// use tallow::model::{TransformerConfig, TransformerLM};
    /// use tallow::nn;
    /// use tallow::train::{TrainConfig, Trainer};
    ///
    /// # fn main() -> tallow::Result<()> {
    /// let ranks = distributed::init(&DistConfig { device: "cuda".into(), ..Default::default() })?;
    /// let (train, validation) = Tokens::bytes("input.txt")?.split(0.1)?;
    /// let size = TransformerConfig { vocab_size: 256, ..TransformerConfig::preset("small")? };
    /// // Batches of a step on all ranks together: a multiple of their number, and the same when the
    /// // run is resumed.
    /// let config = TrainConfig { sequence_length: 256, accumulation: 16, ..Default::default() };
    /// let path = Path::new("run.safetensors");
    /// let sharded = FullyShard::new(&ranks, FullyShardConfig::default())?;
    /// let mut trainer = if path.exists() {
    ///     Trainer::resume_fully_sharded(path, &size, &sharded, config, train, validation)?
    /// } else {
    ///     let weights = nn::seeded(0, DType::F32, ranks.device()); // the same on all ranks
    ///     let model = TransformerLM::from_var_builder(&size, sharded.builder(weights))?;
    ///     Trainer::fully_sharded(model, &sharded, config, train, validation)?
    /// };
    /// while let Some(step) = trainer.step()? {
    ///     if trainer.evaluation_is_due() {
    ///         let loss = trainer.evaluate()?; // every rank calls this, and save
    ///         trainer.save(path)?;
    ///         if ranks.rank() == 0 {
    ///             println!("{}: {loss:.3} nats", step.step);
    ///         }
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// In [`save`](Self::save) every rank writes its part. Any number of ranks that divides the accumulation can resume
    /// the run, fully sharded ([`resume_fully_sharded`](Self::resume_fully_sharded)) or with the full model on each
    /// rank ([`resume`](Self::resume)).
    ///
    /// # Errors
    /// Those of [`new`](Self::new) and [`replicate`](Self::replicate); [`Error::Order`] for a model that does not have
    /// all weights that the builder created.
    pub fn fully_sharded(
        model: TransformerLM,
        sharded: &FullyShard,
        config: TrainConfig,
        train: impl Into<Data>,
        validation: impl Into<Data>,
    ) -> Result<Self> {
        let trainer = Self::sharded_trainer(model, sharded, config, train, validation)?;
        trainer.check_ranks("Trainer::fully_sharded", sharded.communicator())?;
        Ok(trainer)
    }

    /// Creates the run without comparing the ranks' settings.
    pub(super) fn sharded_trainer(
        model: TransformerLM,
        sharded: &FullyShard,
        config: TrainConfig,
        train: impl Into<Data>,
        validation: impl Into<Data>,
    ) -> Result<Self> {
        let parts = sharded.parts_of(&model.parameters())?;
        let mut trainer = Self::of(model, parts, config, train, validation)?;
        trainer.job = Some(Job::FullyShard(sharded.clone()));
        Ok(trainer)
    }

    /// Returns the current model with full weights on rank 0; `None` on other ranks. All ranks must call this.
    /// [Sharded weights](Self::fully_sharded) are gathered in rank 0's CPU memory; with a [sharded
    /// optimizer](Self::shard_optimizer) the owners send their updated parameters.
    ///
    /// # Errors
    /// [`Error::Rank`]; a model that is too large for the host.
    pub fn gather_model(&self) -> Result<Option<TransformerLM>> {
        self.optimizer.gather_weights()?;
        let is_first = self.communicator().is_none_or(|ranks| ranks.rank() == 0);
        let Some(Job::FullyShard(sharded)) = &self.job else {
            return Ok(is_first.then(|| self.model.clone()));
        };
        let mut weights = HashMap::new();
        for (name, _) in &self.parameters {
            let _timeout = sharded.communicator().apply_timeout("gather_model");
            let whole = sharded.full_weight(name)?;
            if is_first {
                // A variable, which the builder below shares, so that the weights exist only once.
                let whole = ops::variable_of(&whole.to_device(&Device::Cpu)?)?;
                weights.insert(name.clone(), whole.into_inner());
            }
        }
        if !is_first {
            return Ok(None);
        }
        let vb = VarBuilder::from_tensors(weights, self.parameters[0].1.dtype(), &Device::Cpu);
        let model = TransformerLM::from_var_builder(self.model.config(), vb)?;
        let model = model.with_attention(self.model.attention())?;
        Ok(Some(model.with_checkpointing(self.model.checkpointing())))
    }

    /// Makes the ranks of a job train together: each computes its part of a step's [`accumulation`] batches, and
    /// gradients and losses are averaged over all ranks. Every rank calls this, right after [`new`](Self::new) or
    /// [`resume`](Self::resume) and before the first step. Afterwards all have the weights of rank 0.
    ///
    /// A step of several ranks equals that of one rank, except for the order of sums: it has the same batches and the
    /// same dropout. The configuration is the same too, because `accumulation` counts the batches of all ranks. A run
    /// may therefore be resumed with another number of ranks that divides `accumulation`. Steps, ranks and batches are
    /// counted from 0: in step `s`, rank `r` of `n` computes the batches `s * accumulation + i`, where `r *
    /// accumulation / n <= i < (r + 1) * accumulation / n`.
    /// ([`RandomBatches::batch`](crate::data::RandomBatches::batch) returns the batch of such a number.)
    ///
    /// All ranks must call [`step`](Self::step), [`evaluate`](Self::evaluate), which divides the data among them, and
    /// [`plan`](Self::plan). With `replicate` rank 0 writes the files, with [`fully_sharded`](Self::fully_sharded)
    /// every rank writes its own. Call [`save`](Self::save) on every rank. (With `replicate` and
    /// without a sharded optimizer, it does nothing on ranks other than 0.)
    ///
    /// [`accumulation`]: crate::train::TrainConfig::accumulation
    ///
    /// # Errors
    /// [`Error::Config`] if the number of batches is not a multiple of the number of ranks; [`Error::Order`] for a run
    /// that is already planned; [`Error::Rank`] on all ranks if one has another configuration, other data or another
    /// number of steps taken; those of [`Replicated::new`].
    pub fn replicate(
        &mut self,
        communicator: &Communicator,
        config: ReplicatedConfig,
    ) -> Result<()> {
        if self.job.is_some() {
            return Err(Error::Order {
                op: "Trainer::replicate",
                problem: "the run already has several ranks".into(),
                hint: "call it once, on a run of Trainer::new or resume".into(),
            });
        }
        self.check_ranks("Trainer::replicate", communicator)?;
        let parameters = self.parameters.iter().cloned();
        let replicated = Replicated::new(communicator, parameters, config)?;
        self.job = Some(Job::Replicated(replicated));
        Ok(())
    }

    /// Checks that the ranks can train together, and are in the same run.
    pub(super) fn check_ranks(&self, op: &'static str, communicator: &Communicator) -> Result<()> {
        let world_size = communicator.world_size();
        if !self.config.accumulation.is_multiple_of(world_size) {
            return Err(
                Error::config("TrainConfig", "accumulation", self.config.accumulation).must_be(
                    format!("a multiple of the number of ranks, {world_size}"),
                    "it counts the batches of a step on all ranks, and each rank computes the same number",
                ),
            );
        }
        if self.planned.is_some() {
            return Err(Error::Order {
                op,
                problem: "the step is planned for one rank".into(),
                hint: "call replicate before the first step".into(),
            });
        }
        let facts = [
            ("configuration", format!("{:?}", self.config)),
            ("model", format!("{:?}", self.model.config())),
            ("training data", self.training_data.to_string()),
            ("validation data", self.validation_data.to_string()),
            ("step", self.step.to_string()),
            ("optimizer steps", self.optimizer.steps().to_string()),
        ];
        communicator.check_equal(op, &facts)
    }

    /// Shards the optimizer's state and update among the ranks that train together (ZeRO stage 1): each rank has the
    /// state of its part of the parameters, and updates that part. Every rank calls this, after
    /// [`replicate`](Self::replicate) and before the first step. See
    /// [`Optimizer::shard`](crate::optim::Optimizer::shard).
    ///
    /// The run is otherwise the same. Its file has the same format as without sharding: rank 0 writes it and receives
    /// the state of the other ranks, so all ranks must call [`save`](Self::save). The run may be resumed by any number
    /// of ranks that divides `accumulation`, sharded or not.
    ///
    /// # Errors
    /// [`Error::Order`] for a run without ranks, a planned run, or an optimizer that is already sharded;
    /// [`Error::Rank`].
    pub fn shard_optimizer(&mut self) -> Result<()> {
        let refuse = |problem: &str, hint: &str| {
            Err(Error::order("Trainer::shard_optimizer", problem, hint))
        };
        let Some(Job::Replicated(replicated)) = &self.job else {
            return refuse(
                "the run is not replicated over ranks",
                "call replicate before",
            );
        };
        if self.planned.is_some() {
            return refuse(
                "the step is planned already",
                "call it before the first step",
            );
        }
        self.optimizer.shard(replicated.communicator())
    }

    /// Returns the communicator of the ranks that [train together](Self::replicate), if any.
    pub fn communicator(&self) -> Option<&Communicator> {
        self.job.as_ref().map(Job::communicator)
    }

    pub(super) fn rank_of(&self) -> [usize; 2] {
        let ranks = self.communicator();
        ranks.map_or([0, 1], |ranks| [ranks.rank(), ranks.world_size()])
    }

    pub(super) fn batches(&self) -> Range<usize> {
        let [rank, world_size] = self.rank_of();
        let count = self.config.accumulation / world_size;
        rank * count..(rank + 1) * count
    }

    /// Returns the means over all ranks of numbers that differ between ranks.
    pub(super) fn mean_over_ranks<const N: usize>(&self, numbers: [f64; N]) -> Result<[f64; N]> {
        let mut means = numbers;
        if let Some(ranks) = self.communicator() {
            means.copy_from_slice(&ranks.mean(&numbers)?);
        }
        Ok(means)
    }
}
