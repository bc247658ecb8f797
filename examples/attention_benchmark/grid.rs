//! The runs: every combination of the flags' lists.

use super::Flags;
use super::measured::Measured;
use super::words::grouped;
use candle_core::Device;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use tallow::attention::Algorithm;
use tallow::bench::{AttentionRun, AttentionTask, Execution};
use tallow::memory::{AttentionWorkload, MemoryBreakdown, SelfAttentionWorkload};
use tallow::precision::Precision;
use tallow::profile::DeviceRates;
use tallow::report::counted;

/// Returns the parser of an implementation: an algorithm, op by op or compiled for its shape before it runs.
pub fn implementation() -> impl TypedValueParser<Value = (Algorithm, Execution)> {
    let names = PossibleValuesParser::new(["naive", "flash", "planned", "planned-flash"]);
    names.map(|name| match &*name {
        "naive" => (Algorithm::Naive, Execution::Eager),
        "flash" => (Algorithm::Flash, Execution::Eager),
        "planned" => (Algorithm::Naive, Execution::Planned),
        _ => (Algorithm::Flash, Execution::Planned),
    })
}

/// The width of a layer's heads where their number is not given: every implementation supports it.
const HEAD_DIM: usize = 64;

/// One measurement.
pub struct Run {
    pub run: AttentionRun,
    /// The name in progress.
    pub title: String,
    /// The values that vary apart from implementation and size; empty if there are none.
    pub variant: String,
}

impl Flags {
    /// Returns every run, with the steps and limits of `base`; those of one size next to each other.
    pub fn runs(
        &self,
        base: &AttentionRun,
        precisions: &[Precision],
        rates: Option<&DeviceRates>,
    ) -> Vec<Run> {
        const LARGE: [usize; 5] = [256, 1024, 4096, 8192, 16_384];
        const SMALL: [usize; 4] = [16, 32, 64, 128];
        let given = |list: &[usize], quick: &[usize], full: &[usize]| match list {
            [] if self.sampling.full => full.to_vec(),
            [] => quick.to_vec(),
            list => list.to_vec(),
        };
        let (lengths, widths) = match self.module {
            true => (
                given(&self.context_length, &SMALL, &SMALL),
                given(&self.d_model, &LARGE[..3], &LARGE),
            ),
            false => (
                given(&self.context_length, &LARGE[..3], &LARGE),
                given(&self.head_dim, &[16, 64], &SMALL),
            ),
        };
        let mut runs = Vec::new();
        for width in widths {
            let all_heads = match &self.num_heads[..] {
                [] if self.module && width.is_multiple_of(HEAD_DIM) => &[width / HEAD_DIM],
                [] => &[1],
                heads => heads,
            };
            let sizes = lengths.iter().flat_map(|length| {
                let of_heads = all_heads.iter().map(move |heads| (*length, *heads));
                of_heads.flat_map(|size| precisions.iter().map(move |one| (size, *one)))
            });
            for ((length, heads), precision) in sizes {
                let named_heads = counted(heads, "head");
                let mut variant = Vec::new();
                variant.extend((precisions.len() > 1).then(|| precision.to_string()));
                variant.extend((all_heads.len() > 1).then(|| named_heads.clone()));
                for &(algorithm, execution) in &self.compare {
                    let run = AttentionRun {
                        task: self.task(algorithm, precision, [heads, length, width]),
                        execution,
                        peak_flops: rates.and_then(|rates| rates.matmul_rate(precision.dtype())),
                        ..base.clone()
                    };
                    let name = run.implementation();
                    runs.push(Run {
                        title: format!(
                            "{precision}, {name}, {named_heads}, T {length}, width {width}"
                        ),
                        run,
                        variant: variant.join(", "),
                    });
                }
            }
        }
        runs
    }

    fn task(
        &self,
        algorithm: Algorithm,
        precision: Precision,
        [heads, sequence_length, width]: [usize; 3],
    ) -> AttentionTask {
        if self.module {
            let layer = SelfAttentionWorkload {
                algorithm,
                batch_size: self.batch_size,
                sequence_length,
                d_model: width,
                heads,
                ..Default::default()
            };
            return AttentionTask::Layer(layer.with_precision(precision));
        }
        AttentionTask::Alone(AttentionWorkload {
            algorithm,
            batch_size: self.batch_size,
            heads,
            sequence_length,
            head_dim: width,
            mask: self.mask(),
            documents: self.documents,
            dtype: precision.dtype(),
        })
    }
}

/// Returns the first size that does not fit, for each implementation of the first run's variant.
pub fn limits(runs: &[Run], device: &Device) -> Vec<Measured> {
    let same = runs.iter().filter(|run| run.variant == runs[0].variant);
    let limits = same.filter_map(|Run { run, variant, .. }| {
        Some(Measured {
            result: run.limit(device)?,
            variant: variant.clone(),
        })
    });
    let smallest = |(_, own): (String, Vec<Measured>)| {
        own.into_iter().min_by_key(|limit| {
            let breakdown = limit.breakdown.as_ref();
            let bytes = breakdown.map(MemoryBreakdown::peak_bytes);
            (limit.context_length, bytes)
        })
    };
    let by_name = grouped(limits, Measured::name).into_iter();
    by_name.filter_map(smallest).collect()
}
