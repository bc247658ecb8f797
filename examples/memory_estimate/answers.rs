//! What follows from an estimate: the questions that CS336's handout asks about memory.

use tallow::attention::Algorithm;
use tallow::memory::{
    Estimate, Mode, Workload, estimate, largest_batch_size, most_frugal, recommend,
    smallest_sequence_beyond,
};
use tallow::model::TransformerConfig;
use tallow::nn::Checkpointing;
use tallow::report::{Fields, format_mib, group_digits, list_in_note};
use tallow::{Error, Result};

/// One configuration, and what there is for it.
pub struct Question<'a> {
    pub title: String,
    pub config: &'a TransformerConfig,
    pub workload: &'a Workload,
    pub available_bytes: u64,
}

/// How often T is doubled.
const DOUBLINGS: u32 = 5;

impl Question<'_> {
    /// The answers in words, and the same for programs.
    pub fn answers(&self, plan: &Estimate) -> Result<(Vec<String>, Fields)> {
        let mut notes = Vec::new();
        let mut fields = Fields::new();
        self.residual_stream(plan, &mut notes, &mut fields);
        self.attention(&mut notes, &mut fields)?;
        self.what_fits(&mut notes, &mut fields)?;
        Ok((notes, fields))
    }

    fn residual_stream(&self, plan: &Estimate, notes: &mut Vec<String>, fields: &mut Fields) {
        let Workload {
            batch_size,
            sequence_length,
            precision,
            ..
        } = self.workload;
        let width = precision.parameter_dtype().size_in_bytes(); // autocast leaves the stream in f32
        let elements = *batch_size as f64 * *sequence_length as f64 * self.config.d_model as f64;
        let bytes = (elements * width as f64) as u64;
        fields.insert("residual_stream_bytes", bytes);
        fields.insert("after_forward_bytes", plan.after_forward_bytes);
        fields.insert("peak_bytes", plan.peak_bytes);
        notes.push(format!(
            "The residual stream, BTD of {width} bytes, is {}; forward leaves {} in all, the peak is {}.",
            format_mib(bytes),
            format_mib(plan.after_forward_bytes),
            format_mib(plan.peak_bytes)
        ));
    }

    /// What attention keeps for backward beside its inputs and output, as T doubles.
    fn attention(&self, notes: &mut Vec<String>, fields: &mut Fields) -> Result<()> {
        for algorithm in self.algorithms() {
            let mut kept = Fields::new();
            let mut words = Vec::new();
            for doubling in 0..DOUBLINGS {
                let factor = 1 << doubling;
                let t = self.workload.sequence_length.saturating_mul(factor);
                let (of_attention, of_all) = self.kept(algorithm, t)?;
                kept.insert(t.to_string(), of_attention);
                let share = 100.0 * of_attention as f64 / of_all as f64;
                words.push(format!("T {t} {} ({share:.0}%)", format_mib(of_attention)));
            }
            fields.insert(
                format!("{algorithm}_kept_bytes_by_context_length"),
                serde_json::to_value(kept).unwrap_or_default(),
            );
            let formula = match algorithm {
                Algorithm::Naive => "L BHT^2 in f32",
                Algorithm::Flash => "L BHT in f32; in half precision also L BTD in half",
            };
            let start = format!(
                "Beside its inputs and output, {algorithm} attention keeps {formula} for backward (% of all \
                 activations)"
            );
            notes.push(list_in_note(&start, &words));
        }
        Ok(())
    }

    /// Those that this model can be computed with.
    fn algorithms(&self) -> Vec<Algorithm> {
        let all = Algorithm::ALL.into_iter();
        let possible = |attention: &Algorithm| {
            let config = TransformerConfig {
                attention: *attention,
                ..self.config.clone()
            };
            config.validate().is_ok()
        };
        all.filter(possible).collect()
    }

    /// Bytes that attention keeps of all that the blocks do, with the whole graph.
    fn kept(&self, attention: Algorithm, sequence_length: usize) -> Result<(u64, u64)> {
        let workload = Workload {
            attention,
            sequence_length,
            mode: Mode::ForwardKeepingGraph,
            checkpointing: Checkpointing::None,
            ..self.workload.clone()
        };
        let plan = estimate(self.config, &workload)?;
        const KEPT: [&str; 3] = ["probabilities", "lse", "rounded off"];
        let parts = plan.breakdown.parts.iter();
        let of_attention = parts.filter(|part| KEPT.contains(&part.what.as_ref()));
        let bytes = of_attention.fold(0u64, |sum, part| sum.saturating_add(part.bytes));
        Ok((bytes, plan.activation_bytes))
    }

    fn what_fits(&self, notes: &mut Vec<String>, fields: &mut Fields) -> Result<()> {
        let (config, workload, available) = (self.config, self.workload, self.available_bytes);
        fields.insert("available_bytes", available);
        let within = format_mib(available);
        for attention in self.algorithms() {
            let workload = Workload {
                attention,
                ..workload.clone()
            };
            let beyond = smallest_sequence_beyond(config, &workload, available)?;
            fields.insert(
                format!("{attention}_smallest_context_length_beyond"),
                beyond,
            );
            let batch = largest_batch_size(config, &workload, available)?;
            fields.insert(format!("{attention}_largest_batch_size"), batch);
            let batch = match batch {
                Some(batch) => format!(
                    "the largest batch that does is {}",
                    group_digits(batch as u64)
                ),
                None => "not one sequence does".into(),
            };
            notes.push(format!(
                "With {attention} attention, the smallest T that {within} do not hold is {}; at T {} {batch}.",
                group_digits(beyond as u64),
                workload.sequence_length
            ));
        }
        let strategy = recommend(config, workload, available)?;
        fields.insert("recommended_checkpointing", strategy.map(|s| s.to_string()));
        notes.push(match strategy {
            Some(strategy) => format!(
                "Within {within}, checkpointing {strategy} recomputes the fewest blocks: {} of {}, with a peak of {}.",
                strategy.recomputed_blocks(config.num_layers),
                config.num_layers,
                format_mib(self.peak(strategy)?)
            ),
            None => format!("No checkpointing lets it fit in {within}."),
        });
        Ok(())
    }

    /// An error if no checkpointing keeps within the budget, which names what the most frugal takes.
    pub fn within_budget(&self) -> Result<()> {
        if recommend(self.config, self.workload, self.available_bytes)?.is_some() {
            return Ok(());
        }
        let (_, wanted_bytes) = most_frugal(self.config, self.workload)?;
        Err(Error::OutOfMemory {
            what: format!("{}, or with any other checkpointing", self.title),
            wanted_bytes,
            available_bytes: self.available_bytes,
        })
    }

    fn peak(&self, checkpointing: Checkpointing) -> Result<u64> {
        let workload = Workload {
            checkpointing,
            ..self.workload.clone()
        };
        Ok(estimate(self.config, &workload)?.peak_bytes)
    }
}
