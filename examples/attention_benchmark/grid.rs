//! The runs: every combination of the flags' lists.

use super::Flags;
use candle_core::Device;
use clap::ValueEnum;
use tallow::Result;
use tallow::attention::Algorithm;
use tallow::bench::{AttentionRun, Execution, Limit, Sampling, SelfAttentionRun};
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
    fn algorithm(self) -> Algorithm {
        match self {
            Self::Naive | Self::Planned => Algorithm::Naive,
            Self::Flash | Self::PlannedFlash => Algorithm::Flash,
        }
    }

    pub fn execution(self) -> Execution {
        match self {
            Self::Naive | Self::Flash => Execution::Eager,
            Self::Planned | Self::PlannedFlash => Execution::Planned,
        }
    }
}

/// The width of a layer's heads where their number is not given: one that every implementation supports.
const HEAD_DIM: usize = 64;

/// One measurement.
pub struct Run {
    precision: Precision,
    /// What tells it from other runs of its implementation and size; empty if nothing does.
    pub variant: String,
    what: What,
}

enum What {
    Attention(AttentionRun),
    Layer(SelfAttentionRun),
}

impl Run {
    pub fn title(&self) -> String {
        let (execution, by, size) = match &self.what {
            What::Attention(run) => {
                let w = &run.workload;
                let size = format!("T {}, d {}", w.sequence_length, w.head_dim);
                (run.execution, w.algorithm, size)
            }
            What::Layer(run) => {
                let (w, heads) = (&run.workload, counted(run.workload.heads, "head"));
                let size = format!("{heads}, T {}, D {}", w.sequence_length, w.d_model);
                (run.execution, w.algorithm, size)
            }
        };
        format!("{}, {} {by}, {size}", self.precision, execution.name())
    }

    /// The rows of the phases, each with its precision first.
    pub fn run(&self, device: &Device) -> Result<Vec<Fields>> {
        let rows = match &self.what {
            What::Attention(run) => run.run(device, |_, _| ()),
            What::Layer(run) => run.run(device, |_, _| ()),
        }?;
        let named = rows.into_iter().map(|row| {
            let mut named = Fields::from_iter([("precision", self.precision.name())]);
            named.merge(row);
            named
        });
        Ok(named.collect())
    }

    fn limit(&self, device: &Device) -> Option<Limit> {
        match &self.what {
            What::Attention(run) => run.limit(device),
            What::Layer(run) => run.limit(device),
        }
    }
}

impl Flags {
    /// Every run; those of one size next to each other.
    pub fn runs(&self, precisions: &[Precision], sampling: &Sampling) -> Vec<Run> {
        const LARGE: [usize; 5] = [256, 1024, 4096, 8192, 16_384];
        let given = |list: &[usize], quick: &[usize], full: &[usize]| match list {
            [] if self.full => full.to_vec(),
            [] => quick.to_vec(),
            list => list.to_vec(),
        };
        let short = [16, 32, 64, 128];
        let (lengths, widths) = match self.module {
            true => (
                given(&self.context_length, &short, &short),
                given(&self.d_model, &LARGE[..3], &LARGE),
            ),
            false => (
                given(&self.context_length, &LARGE[..3], &LARGE),
                given(&self.head_dim, &[16, 64], &short),
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
                for &heads_of_run in &heads {
                    for &precision in precisions {
                        let several = [precisions.len() > 1, heads.len() > 1];
                        let parts = [precision.to_string(), counted(heads_of_run, "head")];
                        let parts = parts.into_iter().zip(several);
                        let parts: Vec<_> = parts.filter_map(|(p, is)| is.then_some(p)).collect();
                        runs.extend(self.compare.iter().map(|implementation| Run {
                            precision,
                            variant: parts.join(", "),
                            what: self.one(
                                (*implementation, precision, heads_of_run),
                                (length, width),
                                sampling.clone(),
                            ),
                        }));
                    }
                }
            }
        }
        runs
    }

    fn one(
        &self,
        (implementation, precision, heads): (Implementation, Precision, usize),
        (sequence_length, width): (usize, usize),
        sampling: Sampling,
    ) -> What {
        let (algorithm, execution) = (implementation.algorithm(), implementation.execution());
        if self.module {
            let workload = SelfAttentionWorkload {
                algorithm,
                batch_size: self.batch_size,
                sequence_length,
                d_model: width,
                heads,
                ..Default::default()
            };
            return What::Layer(SelfAttentionRun {
                workload: workload.with_precision(precision),
                sampling,
                execution,
            });
        }
        What::Attention(AttentionRun {
            workload: AttentionWorkload {
                algorithm,
                batch_size: self.batch_size,
                heads,
                sequence_length,
                head_dim: width,
                mask: self.mask(),
                documents: self.documents,
                dropout: 0.0,
                dtype: precision.dtype(),
            },
            sampling,
            execution,
        })
    }
}

/// The first size that does not fit, for each implementation of the first run's variant.
pub fn limits(runs: &[Run], device: &Device) -> Vec<(String, Limit)> {
    let mut limits: Vec<(String, Limit)> = Vec::new();
    for run in runs.iter().filter(|run| run.variant == runs[0].variant) {
        let Some(limit) = run.limit(device) else {
            continue;
        };
        let name = match run.variant.is_empty() {
            true => limit.implementation.to_string(),
            false => format!("{} ({})", limit.implementation, run.variant),
        };
        let key = |limit: &Limit| (limit.context_length, limit.breakdown.peak_bytes());
        match limits.iter_mut().find(|(other, _)| *other == name) {
            Some((_, least)) if key(&limit) < key(least) => *least = limit,
            Some(_) => {}
            None => limits.push((name, limit)),
        }
    }
    limits
}
