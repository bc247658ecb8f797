//! The runs: every combination of the flags' lists.

use super::{Flags, measured};
use candle_core::Device;
use clap::ValueEnum;
use tallow::Result;
use tallow::attention::Algorithm;
use tallow::bench::{AttentionRun, AttentionTask, Execution, Limit, Sampling};
use tallow::memory::{AttentionWorkload, SelfAttentionWorkload};
use tallow::precision::Precision;
use tallow::report::{Fields, counted};

/// An algorithm with the way it is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Implementation {
    /// Scores, softmax and weighted sum, op by op
    Naive,
    /// Tile by tile, without probabilities in memory
    Flash,
    /// Naive, compiled for its shape before it runs
    Planned,
    /// Flash, compiled likewise
    PlannedFlash,
}

impl Implementation {
    fn parts(self) -> (Algorithm, Execution) {
        match self {
            Self::Naive => (Algorithm::Naive, Execution::Eager),
            Self::Flash => (Algorithm::Flash, Execution::Eager),
            Self::Planned => (Algorithm::Naive, Execution::Planned),
            Self::PlannedFlash => (Algorithm::Flash, Execution::Planned),
        }
    }
}

/// The width of a layer's heads where their number is not given: every implementation supports it.
const HEAD_DIM: usize = 64;

/// One measurement.
pub struct Run {
    pub run: AttentionRun,
    pub precision: Precision,
    /// The values that vary apart from implementation and size; empty if there are none.
    pub variant: String,
}

impl Run {
    /// Returns the run's name in progress.
    pub fn title(&self) -> String {
        let (precision, implementation) = (self.precision, self.run.implementation());
        let [_, (_, heads), (_, length), (_, width)] = self.run.task.sizes();
        let heads = counted(heads, "head");
        format!("{precision}, {implementation}, {heads}, T {length}, width {width}")
    }

    /// Returns the rows of the phases, each with its precision first.
    pub fn rows(&self, device: &Device) -> Result<Vec<Fields>> {
        let mut named = Vec::new();
        for row in self.run.run(device, |_, _| ())? {
            let mut fields = Fields::from_iter([("precision", self.precision.name())]);
            fields.merge(row);
            named.push(fields);
        }
        Ok(named)
    }
}

impl Flags {
    /// Returns every run; those of one size next to each other.
    pub fn runs(&self, precisions: &[Precision], sampling: &Sampling) -> Vec<Run> {
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
        for &width in &widths {
            let heads = match (&self.num_heads[..], self.module) {
                ([], true) if width.is_multiple_of(HEAD_DIM) => vec![width / HEAD_DIM],
                ([], _) => vec![1],
                (heads, _) => heads.to_vec(),
            };
            for &length in &lengths {
                for &of_run in &heads {
                    for &precision in precisions {
                        let (is_mixed, has_heads) = (precisions.len() > 1, heads.len() > 1);
                        let mut variant = Vec::new();
                        variant.extend(is_mixed.then(|| precision.to_string()));
                        variant.extend(has_heads.then(|| counted(of_run, "head")));
                        for implementation in &self.compare {
                            let (algorithm, execution) = implementation.parts();
                            runs.push(Run {
                                run: AttentionRun {
                                    task: self.task(algorithm, precision, [of_run, length, width]),
                                    sampling: sampling.clone(),
                                    execution,
                                },
                                precision,
                                variant: variant.join(", "),
                            });
                        }
                    }
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
pub fn limits(runs: &[Run], device: &Device) -> Vec<(String, Limit)> {
    let mut limits: Vec<(String, Limit)> = Vec::new();
    for run in runs.iter().filter(|run| run.variant == runs[0].variant) {
        let Some(limit) = run.run.limit(device) else {
            continue;
        };
        let name = measured::name(limit.implementation, &run.variant);
        let key = |limit: &Limit| {
            let length = limit.attention.sequence_length;
            (length, limit.breakdown.peak_bytes())
        };
        match limits.iter_mut().find(|(other, _)| *other == name) {
            Some((_, least)) if key(&limit) < key(least) => *least = limit,
            Some(_) => {}
            None => limits.push((name, limit)),
        }
    }
    limits
}
