//! The figures of one configuration, eager or planned, which its row and the answers use.

use crate::answers::{self, Strategy};
use crate::common::labels::Labels;
use crate::words;
use std::num::NonZeroUsize;
use tallow::Result;
use tallow::bench::{EndToEnd, Execution};
use tallow::compile::Target;
use tallow::memory::{
    MemoryBreakdown, MemoryKind, Mode, largest_batch_size, largest_that_fits, planned_breakdown,
    recommend, smallest_sequence_not_fitting,
};
use tallow::nn::Checkpointing;
use tallow::report::{Answer, Column, Fields, Report};

/// The largest number of tokens that is planned: the head runs some rows at a time, so its calls become many.
const MOST_TOKENS: usize = 1 << 20;

/// A configuration, and the memory that is available to it.
pub struct Question<'a> {
    pub run: &'a EndToEnd,
    pub target: Target,
    /// `None` for a planned step without `--memory-limit-gib`, because each size that is tried needs a plan.
    pub available_bytes: Option<u64>,
}

impl Question<'_> {
    /// Returns the answers, and the table of checkpointing strategies if there is a backward.
    pub fn answers(&self) -> Result<(Vec<Answer>, Option<Report>)> {
        let run = self.run;
        let sides = [run.batch_size, run.sequence_length, run.config.d_model];
        let tensor = (String::new(), sides);
        let mut answers = vec![words::residual_stream(self.element_bytes(), &[tensor])];
        // A memory budget has already chosen the checkpointing of a planned step.
        if run.mode == Mode::Forward || run.step.memory_budget_bytes.is_some() {
            return Ok((answers, None));
        }
        let (layers, strategies) = (run.config.num_layers, self.strategies()?);
        answers.extend(answers::checkpointing(&strategies, layers));
        if run.execution == Execution::Eager {
            let whole = EndToEnd {
                mode: Mode::ForwardKeepingGraph,
                checkpointing: Checkpointing::None,
                ..run.clone()
            };
            let activation_bytes = whole.estimate(self.target)?.activation_bytes;
            let graph_bytes = activation_bytes / layers.max(1) as u64;
            let residual_bytes = self.residual_stream_bytes();
            answers.push(answers::nested(layers, residual_bytes, graph_bytes));
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

    /// Returns the row of the run with its memory and the sizes that fit, and the terms of its peak.
    pub fn row(&self) -> Result<(Fields, MemoryBreakdown)> {
        let (breakdown, checkpointing) = self.breakdown(self.run)?;
        let labels = Labels {
            checkpointing,
            ..Labels::of(self.run)
        };
        let mut row = labels.fields();
        row.insert("peak_bytes", breakdown.peak_bytes())
            .insert("after_forward_bytes", breakdown.before_backward_bytes)
            .insert("residual_stream_bytes", self.residual_stream_bytes())
            .insert("available_bytes", self.available_bytes);
        for kind in MemoryKind::ALL {
            let bytes = breakdown.bytes_of(kind);
            row.insert(kind.name(), (bytes > 0).then_some(bytes));
        }
        if let Some(available_bytes) = self.available_bytes {
            let (batch_size, context_length) = self.largest(available_bytes)?;
            let recommended = self.recommended()?.map(|strategy| strategy.to_string());
            row.insert("largest_batch_size", batch_size)
                .insert("largest_context_length", context_length)
                .insert("recommended_checkpointing", recommended);
        }
        Ok((row, breakdown))
    }

    /// Returns the size of a tensor of the residual stream, in bytes. Autocast leaves it in f32.
    fn residual_stream_bytes(&self) -> u64 {
        let EndToEnd {
            batch_size: b,
            sequence_length: t,
            config,
            ..
        } = self.run;
        (*b as f64 * *t as f64 * config.d_model as f64 * self.element_bytes() as f64) as u64
    }

    fn element_bytes(&self) -> usize {
        self.run.step.precision.parameter_dtype().size_in_bytes()
    }

    /// Returns the memory of a run and its checkpointing, which a memory budget may have chosen.
    fn breakdown(&self, run: &EndToEnd) -> Result<(MemoryBreakdown, Checkpointing)> {
        match run.execution {
            Execution::Eager => Ok((run.estimate(self.target)?.breakdown, run.checkpointing)),
            Execution::Planned => {
                let (plan, checkpointing) = run.plan(self.target)?;
                Ok((planned_breakdown(&plan), checkpointing))
            }
        }
    }

    /// Returns the largest batch and the largest T that fit, 0 if none does; of a planned step, with at most
    /// [`MOST_TOKENS`] tokens.
    fn largest(&self, available_bytes: u64) -> Result<(usize, usize)> {
        let (run, config) = (self.run, &self.run.config);
        if run.execution == Execution::Eager {
            let workload = run.workload(self.target);
            let beyond = smallest_sequence_not_fitting(config, &workload, available_bytes)?;
            let batch = largest_batch_size(config, &workload, available_bytes)?;
            return Ok((batch.unwrap_or(0), beyond - 1));
        }
        let bytes = |batch_size: usize, sequence_length: usize| {
            if batch_size.saturating_mul(sequence_length) > MOST_TOKENS {
                return Ok(u64::MAX);
            }
            let mut run = run.clone();
            (run.batch_size, run.sequence_length) = (batch_size, sequence_length);
            run.config.context_length = run.config.context_length.max(sequence_length);
            Ok(run.plan(self.target)?.0.total_bytes())
        };
        let (b, t) = (run.batch_size, run.sequence_length);
        let batch = largest_that_fits(available_bytes, |batch_size| bytes(batch_size, t))?;
        let length = largest_that_fits(available_bytes, |length| bytes(b, length))?;
        Ok((batch.unwrap_or(0), length.unwrap_or(0)))
    }

    /// Returns the strategy for an eager step that fits and recomputes the fewest blocks.
    fn recommended(&self) -> Result<Option<Checkpointing>> {
        let run = self.run;
        match (run.execution, self.available_bytes) {
            (Execution::Eager, Some(bytes)) => {
                recommend(&run.config, &run.workload(self.target), bytes)
            }
            _ => Ok(None),
        }
    }

    /// Returns the predictions of all strategies: none, each block, longer and longer segments, and the recommended
    /// one.
    fn strategies(&self) -> Result<Vec<Strategy>> {
        let layers = self.run.config.num_layers;
        let lengths = [2, 3, 4, 6, 8, 12].into_iter();
        let lengths = lengths.filter(|length| *length < layers);
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
            let run = EndToEnd {
                checkpointing,
                ..self.run.clone()
            };
            let (breakdown, _) = self.breakdown(&run)?;
            rows.push(Strategy {
                name,
                recomputed_blocks: checkpointing.recomputed_blocks(layers),
                after_forward_bytes: breakdown.before_backward_bytes,
                peak_bytes: breakdown.peak_bytes(),
            });
        }
        Ok(rows)
    }
}
