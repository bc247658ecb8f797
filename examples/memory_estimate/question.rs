//! The figures of one configuration, eager or planned, which its row and the answers use.

use crate::answers::{self, Strategy};
use crate::step::StepFlags;
use crate::words;
use std::num::NonZeroUsize;
use tallow::Result;
use tallow::compile::Target;
use tallow::memory::{
    MemoryBreakdown, Mode, Workload, estimate, largest_batch_size, planned_breakdown, recommend,
    smallest_sequence_not_fitting,
};
use tallow::model::TransformerConfig;
use tallow::nn::Checkpointing;
use tallow::report::{Answer, Column, Fields, Report};

/// A configuration, and the memory that is available to it.
pub struct Question<'a> {
    pub config: &'a TransformerConfig,
    pub workload: Workload,
    /// `None` for a planned step without `--memory-limit-gib`, because each size that is tried needs a plan.
    pub available_bytes: Option<u64>,
    /// The planned step and its device; `None` for an eager step.
    pub planned: Option<(&'a StepFlags, Target)>,
}

impl Question<'_> {
    /// Returns the answers, and the table of checkpointing strategies if there is a backward.
    pub fn answers(&self) -> Result<(Vec<Answer>, Option<Report>)> {
        let width = self.workload.precision.parameter_dtype().size_in_bytes();
        let residual = self.residual_stream_bytes();
        let Workload {
            batch_size,
            sequence_length,
            ..
        } = self.workload;
        let sides = [batch_size, sequence_length, self.config.d_model];
        let tensor = (String::new(), sides);
        let mut answers = vec![words::residual_stream(width, &[tensor])];
        // A memory budget has already chosen the checkpointing of a planned step.
        if self.workload.mode == Mode::Forward || self.has_budget() {
            return Ok((answers, None));
        }
        let (layers, strategies) = (self.config.num_layers, self.strategies()?);
        answers.extend(answers::checkpointing(&strategies, layers));
        if self.planned.is_none() {
            let whole = Workload {
                mode: Mode::ForwardKeepingGraph,
                checkpointing: Checkpointing::None,
                ..self.workload.clone()
            };
            let activation_bytes = estimate(self.config, &whole)?.activation_bytes;
            let graph_bytes = activation_bytes / layers.max(1) as u64;
            answers.push(answers::nested(layers, residual, graph_bytes));
        }
        let table = Report {
            title: "Activation checkpointing".into(),
            columns: vec![
                Column::text("name", "Strategy"),
                Column::count("recomputed_blocks", "Recomputed blocks"),
                Column::mib("after_forward_bytes", "After forward"),
                Column::mib("peak_bytes", "Peak"),
            ],
            rows: strategies.iter().map(Fields::of).collect::<Result<_>>()?,
            ..Default::default()
        };
        Ok((answers, Some(table)))
    }

    /// Adds the sizes that fit to the run's row, and returns the terms of its peak.
    pub fn add_to(&self, row: &mut Fields) -> Result<MemoryBreakdown> {
        let (breakdown, checkpointing) = self.breakdown(&self.workload)?;
        row.insert("checkpointing", checkpointing.to_string())
            .insert("available_bytes", self.available_bytes);
        if let Some(available_bytes) = self.available_bytes {
            let (batch_size, context_length) = self.largest(available_bytes)?;
            let recommended = self.recommended()?.map(|strategy| strategy.to_string());
            row.insert("largest_batch_size", batch_size)
                .insert("largest_context_length", context_length)
                .insert("recommended_checkpointing", recommended);
        }
        Ok(breakdown)
    }

    /// Returns the size of a tensor of the residual stream, in bytes. Autocast leaves it in f32.
    pub fn residual_stream_bytes(&self) -> u64 {
        let elements = self.workload.batch_size as f64 * self.workload.sequence_length as f64;
        let width = self.workload.precision.parameter_dtype().size_in_bytes();
        (elements * self.config.d_model as f64 * width as f64) as u64
    }

    fn has_budget(&self) -> bool {
        self.planned.is_some_and(|(step, _)| step.has_budget())
    }

    /// Returns the memory of a workload and its checkpointing, which a memory budget may have chosen.
    fn breakdown(&self, workload: &Workload) -> Result<(MemoryBreakdown, Checkpointing)> {
        match self.planned {
            None => {
                let estimate = estimate(self.config, workload)?;
                Ok((estimate.breakdown, workload.checkpointing))
            }
            Some((step, target)) => {
                let (plan, checkpointing) = step.plan(self.config, workload, target)?;
                Ok((planned_breakdown(&plan), checkpointing))
            }
        }
    }

    /// Returns the largest batch and the largest T that fit.
    fn largest(&self, available_bytes: u64) -> Result<(Option<usize>, Option<usize>)> {
        let (config, workload) = (self.config, &self.workload);
        if let Some((step, target)) = self.planned {
            return step.largest(config, workload, target, available_bytes);
        }
        let beyond = smallest_sequence_not_fitting(config, workload, available_bytes)?;
        let batch = largest_batch_size(config, workload, available_bytes)?;
        Ok((batch, Some(beyond - 1).filter(|length| *length > 0)))
    }

    /// Returns the strategy for an eager step that fits and recomputes the fewest blocks.
    fn recommended(&self) -> Result<Option<Checkpointing>> {
        match (self.planned, self.available_bytes) {
            (None, Some(bytes)) => recommend(self.config, &self.workload, bytes),
            _ => Ok(None),
        }
    }

    /// Returns the predictions of all strategies: none, each block, longer and longer segments, and the recommended
    /// one.
    fn strategies(&self) -> Result<Vec<Strategy>> {
        let lengths = [2, 3, 4, 6, 8, 12].into_iter();
        let lengths = lengths.filter(|length| *length < self.config.num_layers);
        let every =
            lengths.filter_map(|length| NonZeroUsize::new(length).map(Checkpointing::Every));
        let all = [Checkpointing::None, Checkpointing::Block].into_iter();
        let all = all.chain(every).chain([Checkpointing::Sqrt]);
        let mut rows: Vec<Strategy> = Vec::new();
        for checkpointing in all.chain(self.recommended()?) {
            let name = checkpointing.to_string();
            if rows.iter().any(|row| row.name == name) {
                continue;
            }
            let workload = Workload {
                checkpointing,
                ..self.workload.clone()
            };
            let (breakdown, _) = self.breakdown(&workload)?;
            rows.push(Strategy {
                name,
                recomputed_blocks: checkpointing.recomputed_blocks(self.config.num_layers),
                after_forward_bytes: breakdown.before_backward_bytes,
                peak_bytes: breakdown.peak_bytes(),
            });
        }
        Ok(rows)
    }
}
