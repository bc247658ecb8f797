//! A run on several ranks, each of which takes a part of every step's batches.

use super::Trainer;
use crate::dist::{Communicator, Replicated, ReplicatedConfig};
use crate::{Error, Result};
use std::ops::Range;

impl Trainer {
    /// Has the ranks of a job train together: each takes its part of a step's [`accumulation`] batches, and gradients
    /// and losses are averaged over all. Every rank calls it, right after [`new`](Self::new) or
    /// [`resume`](Self::resume) and before a plan is made; all then have the weights of rank 0.
    ///
    /// A step of several ranks is the same as one rank's, but for the order of sums: the same batches, the same
    /// dropout, the same configuration, which counts the batches of all ranks. So a run may be resumed with another
    /// number of them. Evaluations are divided among the ranks; rank 0 alone writes files.
    ///
    /// [`accumulation`]: crate::train::TrainConfig::accumulation
    ///
    /// # Errors
    /// [`Error::Config`] for batches that the ranks do not divide; [`Error::Order`] for a run that is planned already;
    /// [`Error::Rank`] on all ranks where one has another configuration, other data or another step; those of
    /// [`Replicated::new`].
    pub fn replicate(
        &mut self,
        communicator: &Communicator,
        config: ReplicatedConfig,
    ) -> Result<()> {
        let world_size = communicator.world_size();
        if !self.config.accumulation.is_multiple_of(world_size) {
            return Err(
                Error::config("TrainConfig", "accumulation", self.config.accumulation).must_be(
                    format!("a multiple of the number of ranks, {world_size}"),
                    "it counts the batches of a step on all ranks, of which each takes as many",
                ),
            );
        }
        if self.planned.is_some() {
            return Err(Error::Order {
                op: "Trainer::replicate",
                problem: "the step is planned for one rank".into(),
                hint: "call replicate before compile".into(),
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
        communicator.agree("Trainer::replicate", &facts)?;
        let parameters = self.parameters.iter().cloned();
        self.replicated = Some(Replicated::new(communicator, parameters, config)?);
        Ok(())
    }

    /// Divides the optimizer's state and update among the ranks that train together (ZeRO, stage 1): each has the state
    /// of its own part of the parameters, and updates those. Every rank calls it, after
    /// [`replicate`](Self::replicate) and before a plan is made. See [`AdamW::shard`](crate::optim::AdamW::shard).
    ///
    /// The run is the same one otherwise, and so is its file, which rank 0 writes with the state of all: all ranks have
    /// to call [`save`](Self::save), and the run may be resumed by any number of ranks, divided or not.
    ///
    /// # Errors
    /// [`Error::Order`] for a run that is of no ranks, is planned, or whose optimizer is divided already;
    /// [`Error::Rank`].
    pub fn shard_optimizer(&mut self) -> Result<()> {
        let refuse = |problem: &str, hint: &str| {
            Err(Error::Order {
                op: "Trainer::shard_optimizer",
                problem: problem.into(),
                hint: hint.into(),
            })
        };
        let Some(replicated) = &self.replicated else {
            return refuse("the run is of no ranks", "call replicate before");
        };
        if self.planned.is_some() {
            return refuse("the step is planned already", "call it before compile");
        }
        self.optimizer.shard(replicated.communicator())
    }

    /// What the other ranks have updated, where steps are planned and each updates a part. (Eager ones end with it.)
    pub(super) fn gather_weights(&self) -> Result<()> {
        match self.planned {
            Some(_) => self.optimizer.gather_weights(),
            None => Ok(()),
        }
    }

    /// The ranks that train together, if they [do](Self::replicate).
    pub fn communicator(&self) -> Option<&Communicator> {
        self.replicated.as_ref().map(Replicated::communicator)
    }

    /// Which of a step's batches are this rank's.
    pub(super) fn batches(&self) -> Range<usize> {
        let (rank, world_size) = match self.communicator() {
            Some(ranks) => (ranks.rank(), ranks.world_size()),
            None => (0, 1),
        };
        let count = self.config.accumulation / world_size;
        rank * count..(rank + 1) * count
    }

    /// Numbers that each rank has of its own, averaged.
    pub(super) fn mean_over_ranks<const N: usize>(&self, numbers: [f64; N]) -> Result<[f64; N]> {
        let mut means = numbers;
        if let Some(ranks) = self.communicator() {
            means.copy_from_slice(&ranks.mean(&numbers)?);
        }
        Ok(means)
    }
}
