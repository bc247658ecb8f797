//! The figures of an eager step, from its estimate: what the answers are made of.

use crate::answers::{self, Fits, Saved, Strategy};
use std::num::NonZeroUsize;
use tallow::attention::Algorithm;
use tallow::memory::{
    Mode, Workload, estimate, largest_batch_size, most_frugal, recommend, smallest_sequence_beyond,
};
use tallow::model::TransformerConfig;
use tallow::nn::Checkpointing;
use tallow::report::{Answer, Column, Fields, Report};
use tallow::{Error, Result};

/// One configuration, and the memory there is for it.
pub struct Question<'a> {
    pub config: &'a TransformerConfig,
    pub workload: &'a Workload,
    pub available_bytes: u64,
}

/// How often T is doubled.
const DOUBLINGS: u32 = 5;

impl Question<'_> {
    pub fn answers(&self) -> Result<Vec<Answer>> {
        let Workload {
            batch_size,
            sequence_length,
            ..
        } = *self.workload;
        let all = Algorithm::ALL.into_iter();
        let algorithms: Vec<Algorithm> = all.filter(|own| self.can_compute(*own)).collect();
        let saved = algorithms.iter().map(|own| self.saved(*own));
        let fits = algorithms.iter().map(|own| self.fits(*own));
        let width = self.workload.precision.parameter_dtype().size_in_bytes();
        let sizes = [batch_size, sequence_length, self.config.d_model];
        let residual = residual_stream_bytes(self.config, self.workload);
        let mut answers = vec![
            answers::residual_stream(sizes, width, residual),
            answers::attention(&saved.collect::<Result<Vec<_>>>()?),
            answers::what_fits(
                self.available_bytes,
                [batch_size, sequence_length],
                &fits.collect::<Result<Vec<_>>>()?,
            ),
        ];
        if !matches!(self.workload.mode, Mode::Forward) {
            let layers = self.config.num_layers;
            let strategies = self.strategies()?;
            answers.extend(answers::checkpointing(
                &strategies,
                layers,
                self.available_bytes,
            ));
            let whole = self.whole_graph(self.workload.attention, sequence_length)?;
            let graph_bytes = whole.activation_bytes / layers.max(1) as u64;
            answers.push(answers::nested(layers, residual, graph_bytes));
        }
        Ok(answers)
    }

    fn can_compute(&self, attention: Algorithm) -> bool {
        let config = TransformerConfig {
            attention,
            ..self.config.clone()
        };
        config.validate().is_ok()
    }

    /// The estimate with the whole graph of forward.
    fn whole_graph(
        &self,
        attention: Algorithm,
        sequence_length: usize,
    ) -> Result<tallow::memory::Estimate> {
        let workload = Workload {
            attention,
            sequence_length,
            mode: Mode::ForwardKeepingGraph,
            checkpointing: Checkpointing::None,
            ..self.workload.clone()
        };
        estimate(self.config, &workload)
    }

    fn saved(&self, algorithm: Algorithm) -> Result<Saved> {
        const SAVED: [&str; 3] = ["probabilities", "lse", "rounded off"];
        let by_length = (0..DOUBLINGS).map(|doubling| {
            let length = self.workload.sequence_length.saturating_mul(1 << doubling);
            let whole = self.whole_graph(algorithm, length)?;
            let parts = whole.breakdown.parts.iter();
            let of_attention = parts.filter(|part| SAVED.contains(&part.what.as_ref()));
            let bytes = of_attention.fold(0u64, |sum, part| sum.saturating_add(part.bytes));
            Ok((length, bytes, whole.activation_bytes))
        });
        Ok(Saved {
            algorithm: algorithm.name(),
            by_length: by_length.collect::<Result<_>>()?,
        })
    }

    fn fits(&self, attention: Algorithm) -> Result<Fits> {
        let workload = Workload {
            attention,
            ..self.workload.clone()
        };
        let beyond = smallest_sequence_beyond(self.config, &workload, self.available_bytes)?;
        Ok(Fits {
            attention: attention.name().into(),
            context_length: Some(beyond - 1).filter(|length| *length > 0),
            batch_size: largest_batch_size(self.config, &workload, self.available_bytes)?,
        })
    }

    /// The largest batch and the largest T with the workload's own attention.
    pub fn largest(&self) -> Result<(Option<usize>, Option<usize>)> {
        let fits = self.fits(self.workload.attention)?;
        Ok((fits.batch_size, fits.context_length))
    }

    /// The strategy that fits and recomputes the fewest blocks.
    pub fn recommended(&self) -> Result<Option<Checkpointing>> {
        recommend(self.config, self.workload, self.available_bytes)
    }

    /// An error if no checkpointing keeps within the budget, which names what the most frugal needs.
    pub fn within_budget(&self, name: &str) -> Result<()> {
        if self.recommended()?.is_some() {
            return Ok(());
        }
        let (_, wanted_bytes) = most_frugal(self.config, self.workload)?;
        Err(Error::OutOfMemory {
            what: format!(
                "{name}, batch {}, context {}, {}, with any checkpointing",
                self.workload.batch_size,
                self.workload.sequence_length,
                self.workload.mode.name()
            ),
            wanted_bytes,
            available_bytes: self.available_bytes,
        })
    }

    /// No checkpointing first, then each block, then ever longer segments, then what is recommended.
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
            let plan = estimate(self.config, &workload)?;
            rows.push(Strategy {
                name,
                recomputed_blocks: checkpointing.recomputed_blocks(self.config.num_layers),
                after_forward_bytes: plan.after_forward_bytes,
                peak_bytes: plan.peak_bytes,
            });
        }
        Ok(rows)
    }

    /// The strategies as a table; `None` without a backward.
    pub fn strategy_table(&self) -> Result<Option<Report>> {
        if matches!(self.workload.mode, Mode::Forward) {
            return Ok(None);
        }
        let rows = self.strategies()?;
        let rows = rows.iter().map(Fields::of).collect::<Result<_>>()?;
        Ok(Some(Report {
            title: "Activation checkpointing".into(),
            columns: vec![
                Column::text("name", "Strategy"),
                Column::count("recomputed_blocks", "Recomputed blocks"),
                Column::mib("after_forward_bytes", "After forward"),
                Column::mib("peak_bytes", "Peak"),
            ],
            rows,
            ..Default::default()
        }))
    }
}

/// A tensor of the residual stream, which autocast leaves in f32.
pub fn residual_stream_bytes(config: &TransformerConfig, workload: &Workload) -> u64 {
    let elements = workload.batch_size as f64 * workload.sequence_length as f64;
    let width = workload.precision.parameter_dtype().size_in_bytes();
    (elements * config.d_model as f64 * width as f64) as u64
}
