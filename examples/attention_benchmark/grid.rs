//! What is measured: every combination of the flags' lists, and where memory ends.

use super::Flags;
use candle_core::{DType, Device};
use clap::ValueEnum;
use tallow::Result;
use tallow::attention::{Algorithm, Mask};
use tallow::bench::{AttentionRun, Execution, Limit, Sampling, SelfAttentionRun};
use tallow::memory::{AttentionWorkload, SelfAttentionWorkload};
use tallow::precision::Precision;
use tallow::report::Fields;

/// What is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Implementation {
    /// Scores, softmax, weighted sum, op by op
    Naive,
    /// Tile by tile, without probabilities in memory
    Flash,
    /// Naive's mathematics, planned for its shape beforehand; not in f64, not with --module
    Planned,
    /// Flash's, planned likewise: its kernels without candle's graph
    PlannedFlash,
}

impl Implementation {
    fn algorithm(self) -> Algorithm {
        match self {
            Self::Naive | Self::Planned => Algorithm::Naive,
            Self::Flash | Self::PlannedFlash => Algorithm::Flash,
        }
    }

    fn execution(self) -> Execution {
        match self {
            Self::Naive | Self::Flash => Execution::Eager,
            Self::Planned | Self::PlannedFlash => Execution::Planned,
        }
    }

    pub fn is_planned(self) -> bool {
        self.execution() == Execution::Planned
    }
}

/// One configuration.
pub struct Run {
    pub arithmetic: Arithmetic,
    what: What,
}

enum What {
    Attention(AttentionRun),
    Module(SelfAttentionRun),
}

/// What a run computes in.
#[derive(Clone, Copy, PartialEq)]
pub enum Arithmetic {
    /// Everything in one dtype.
    Of(DType),
    /// As a model of that precision would have it.
    As(Precision),
}

impl Arithmetic {
    pub fn name(self) -> &'static str {
        match self {
            Self::Of(dtype) => dtype.as_str(),
            Self::As(precision) => precision.name(),
        }
    }

    /// What attention itself is given.
    fn attention_dtype(self) -> DType {
        match self {
            Self::Of(dtype) => dtype,
            Self::As(precision) => precision.dtype(),
        }
    }
}

impl Run {
    pub fn title(&self) -> String {
        let name = self.arithmetic.name();
        match &self.what {
            What::Attention(AttentionRun {
                workload: w,
                execution,
                ..
            }) => {
                format!(
                    "{name}, {} {}, T {}, d {}",
                    execution.name(),
                    w.algorithm,
                    w.sequence_length,
                    w.head_dim
                )
            }
            What::Module(SelfAttentionRun { workload: w, .. }) => {
                format!(
                    "{name}, {}, T {}, D {}",
                    w.algorithm, w.sequence_length, w.d_model
                )
            }
        }
    }

    /// The rows, each beginning with what it was computed in.
    pub fn run(&self, device: &Device) -> Result<Vec<Fields>> {
        let rows = match &self.what {
            What::Attention(run) => run.run(device, |_, _| ()),
            What::Module(run) => run.run(device, |_, _| ()),
        }?;
        let named = rows.into_iter().map(|row| {
            let mut named = Fields::from_iter([("precision", self.arithmetic.name())]);
            named.merge(row);
            named
        });
        Ok(named.collect())
    }

    fn limit(&self, device: &Device) -> Option<Limit> {
        match &self.what {
            What::Attention(run) => run.limit(device),
            What::Module(run) => run.limit(),
        }
    }
}

impl Flags {
    /// Every run, the implementations and precisions of a configuration next to each other.
    pub fn runs(&self, arithmetic: &[Arithmetic], sampling: &Sampling) -> Vec<Run> {
        let given =
            |list: &[usize], quick: &[usize], full: &[usize]| match (list.is_empty(), self.full) {
                (false, _) => list.to_vec(),
                (true, false) => quick.to_vec(),
                (true, true) => full.to_vec(),
            };
        let (lengths, widths) = if self.module {
            (
                given(
                    &self.sequence_length,
                    &[16, 32, 64, 128],
                    &[16, 32, 64, 128],
                ),
                given(
                    &self.d_model,
                    &[256, 1024, 4096],
                    &[256, 1024, 4096, 8192, 16_384],
                ),
            )
        } else {
            (
                given(
                    &self.sequence_length,
                    &[256, 1024, 4096],
                    &[256, 1024, 4096, 8192, 16_384],
                ),
                given(&self.head_dim, &[16, 64], &[16, 32, 64, 128]),
            )
        };
        let mut runs = Vec::new();
        for &width in &widths {
            for &length in &lengths {
                for &implementation in &self.compare {
                    for &arithmetic in arithmetic {
                        let what = self.one((implementation, arithmetic), length, width, sampling);
                        runs.push(Run { arithmetic, what });
                    }
                }
            }
        }
        runs
    }

    fn one(
        &self,
        (implementation, arithmetic): (Implementation, Arithmetic),
        length: usize,
        width: usize,
        sampling: &Sampling,
    ) -> What {
        let algorithm = implementation.algorithm();
        let sampling = sampling.clone();
        if self.module {
            let workload = SelfAttentionWorkload {
                algorithm,
                batch_size: self.batch_size,
                sequence_length: length,
                d_model: width,
                heads: self.heads,
                ..Default::default()
            };
            let workload = match arithmetic {
                Arithmetic::Of(dtype) => SelfAttentionWorkload { dtype, ..workload },
                Arithmetic::As(precision) => workload.with_precision(precision),
            };
            return What::Module(SelfAttentionRun { workload, sampling });
        }
        let workload = AttentionWorkload {
            algorithm,
            batch_size: self.batch_size,
            heads: self.heads,
            sequence_length: length,
            head_dim: width,
            mask: if self.causal {
                Mask::Causal
            } else {
                Mask::Full
            },
            dtype: arithmetic.attention_dtype(),
        };
        What::Attention(AttentionRun {
            workload,
            sampling,
            execution: implementation.execution(),
        })
    }
}

/// Where memory ends for each implementation of the runs that compute in that.
pub fn limits(runs: &[Run], arithmetic: Arithmetic, device: &Device) -> Vec<Limit> {
    let own = runs.iter().filter(|run| run.arithmetic == arithmetic);
    let of_runs: Vec<Limit> = own.filter_map(|run| run.limit(device)).collect();
    let limits = ["naive", "planned", "flash", "planned-flash"]
        .into_iter()
        .filter_map(|name| {
            let own = of_runs.iter().filter(|l| l.implementation == name);
            own.min_by_key(|l| (l.context_length, l.breakdown.peak_bytes()))
                .cloned()
        });
    limits.collect()
}
