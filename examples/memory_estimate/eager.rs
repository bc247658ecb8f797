//! The figures of an eager step, from its estimate: what the answers are made of.

use crate::answers::{self, Fits, Saved, Strategy};
use std::num::NonZeroUsize;
use tallow::Result;
use tallow::attention::Algorithm;
use tallow::memory::{
    MemoryBreakdown, Mode, Workload, estimate, largest_batch_size, recommend,
    smallest_sequence_not_fitting,
};
use tallow::model::TransformerConfig;
use tallow::nn::Checkpointing;
use tallow::report::{Answer, Column, Fields, Report};

/// One configuration, and the memory there is for it.
pub struct Question<'a> {
    pub config: &'a TransformerConfig,
    pub workload: Workload,
    pub available_bytes: u64,
}

/// How often T is doubled.
const DOUBLINGS: u32 = 5;

impl Question<'_> {
    /// The answers, and the table of checkpointing strategies if there is a backward.
    pub fn answers(&self) -> Result<(Vec<Answer>, Option<Report>)> {
        let [batch_size, sequence_length] =
            [self.workload.batch_size, self.workload.sequence_length];
        let all = Algorithm::ALL.into_iter();
        let algorithms: Vec<Algorithm> = all.filter(|own| self.can_compute(*own)).collect();
        let saved = algorithms.iter().map(|own| self.saved(*own));
        let fits = algorithms.iter().map(|own| self.fits(*own));
        let width = self.workload.precision.parameter_dtype().size_in_bytes();
        let sizes = [batch_size, sequence_length, self.config.d_model];
        let residual = residual_stream_bytes(self.config, &self.workload);
        let mut answers = vec![
            answers::residual_stream(sizes, width, residual),
            answers::attention(&saved.collect::<Result<Vec<_>>>()?),
            answers::what_fits(
                self.available_bytes,
                [batch_size, sequence_length],
                &fits.collect::<Result<Vec<_>>>()?,
            ),
        ];
        if self.workload.mode == Mode::Forward {
            return Ok((answers, None));
        }
        let (layers, strategies) = (self.config.num_layers, self.strategies()?);
        let available_bytes = self.available_bytes;
        answers.extend(answers::checkpointing(&strategies, layers, available_bytes));
        let whole = self.whole_graph(self.workload.attention, sequence_length)?;
        let graph_bytes = whole.activation_bytes / layers.max(1) as u64;
        answers.push(answers::nested(layers, residual, graph_bytes));
        let rows = strategies.iter().map(Fields::of).collect::<Result<_>>()?;
        let table = Report {
            title: "Activation checkpointing".into(),
            columns: vec![
                Column::text("name", "Strategy"),
                Column::count("recomputed_blocks", "Recomputed blocks"),
                Column::mib("after_forward_bytes", "After forward"),
                Column::mib("peak_bytes", "Peak"),
            ],
            rows,
            ..Default::default()
        };
        Ok((answers, Some(table)))
    }

    /// Adds what fits to the run's row, and returns what its peak is made of.
    pub fn add_to(&self, row: &mut Fields) -> Result<MemoryBreakdown> {
        let fits = self.fits(self.workload.attention)?;
        let recommended = self.recommended()?.map(|strategy| strategy.to_string());
        row.insert("available_bytes", self.available_bytes)
            .insert("largest_batch_size", fits.batch_size)
            .insert("largest_context_length", fits.context_length)
            .insert("recommended_checkpointing", recommended);
        Ok(estimate(self.config, &self.workload)?.breakdown)
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
            let parts = whole.breakdown.terms.iter();
            let of_attention = parts.filter(|part| SAVED.contains(&part.name.as_ref()));
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
        let beyond = smallest_sequence_not_fitting(self.config, &workload, self.available_bytes)?;
        Ok(Fits {
            attention: attention.name().into(),
            context_length: Some(beyond - 1).filter(|length| *length > 0),
            batch_size: largest_batch_size(self.config, &workload, self.available_bytes)?,
        })
    }

    /// The strategy that fits and recomputes the fewest blocks.
    fn recommended(&self) -> Result<Option<Checkpointing>> {
        recommend(self.config, &self.workload, self.available_bytes)
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
}

/// A tensor of the residual stream, which autocast leaves in f32.
pub fn residual_stream_bytes(config: &TransformerConfig, workload: &Workload) -> u64 {
    let elements = workload.batch_size as f64 * workload.sequence_length as f64;
    let width = workload.precision.parameter_dtype().size_in_bytes();
    (elements * config.d_model as f64 * width as f64) as u64
}
