//! What is measured: every combination of the flags' lists, and where memory ends.

use super::Flags;
use candle_core::{DType, Device};
use clap::ValueEnum;
use std::fmt;
use std::str::FromStr;
use tallow::Result;
use tallow::attention::Algorithm;
use tallow::bench::{AttentionRun, Execution, Limit, Sampling, SelfAttentionRun};
use tallow::memory::{AttentionWorkload, SelfAttentionWorkload};
use tallow::precision::Precision;
use tallow::report::{Fields, counted};

/// What is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Implementation {
    /// Scores, softmax, weighted sum, op by op
    Naive,
    /// Tile by tile, without probabilities in memory
    Flash,
    /// Naive's mathematics, planned for its shape beforehand; not in f64
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

/// How many heads there are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Heads {
    /// As many as make heads of 64; one where the width is no multiple of that.
    Auto,
    /// So many.
    Count(usize),
}

/// The dimension of a head that every implementation takes.
const HEAD_DIM: usize = 64;

impl Heads {
    /// Those of a layer of this width.
    fn of_width(self, d_model: usize) -> usize {
        match self {
            Self::Auto if d_model.is_multiple_of(HEAD_DIM) => (d_model / HEAD_DIM).max(1),
            Self::Auto => 1,
            Self::Count(count) => count,
        }
    }
}

impl fmt::Display for Heads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => write!(f, "heads of {HEAD_DIM}"),
            Self::Count(count) => write!(f, "{}", counted(*count, "head")),
        }
    }
}

impl FromStr for Heads {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text.parse() {
            _ if text == "auto" => Ok(Self::Auto),
            Ok(count) => Ok(Self::Count(count)),
            Err(_) => Err("expected a number of heads, or auto".into()),
        }
    }
}

/// What runs are analysed together.
#[derive(Clone, Copy, PartialEq)]
pub struct Group {
    pub arithmetic: Arithmetic,
    pub heads: Heads,
}

/// One configuration.
pub struct Run {
    pub group: Group,
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
        let name = self.group.arithmetic.name();
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
            What::Module(SelfAttentionRun {
                workload: w,
                execution,
                ..
            }) => {
                format!(
                    "{name}, {} {}, {}, T {}, D {}",
                    execution.name(),
                    w.algorithm,
                    counted(w.heads, "head"),
                    w.sequence_length,
                    w.d_model
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
            let mut named = Fields::from_iter([("precision", self.group.arithmetic.name())]);
            named.merge(row);
            named
        });
        Ok(named.collect())
    }

    fn limit(&self, device: &Device) -> Option<Limit> {
        match &self.what {
            What::Attention(run) => run.limit(device),
            What::Module(run) => run.limit(device),
        }
    }
}

impl Flags {
    /// Every run, the implementations and precisions of a configuration next to each other.
    pub fn runs(&self, groups: &[Group], sampling: &Sampling) -> Vec<Run> {
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
                    for &group in groups {
                        let what = self.one((implementation, group), length, width, sampling);
                        runs.push(Run { group, what });
                    }
                }
            }
        }
        runs
    }

    fn one(
        &self,
        (implementation, Group { arithmetic, heads }): (Implementation, Group),
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
                heads: heads.of_width(width),
                ..Default::default()
            };
            let workload = match arithmetic {
                Arithmetic::Of(dtype) => SelfAttentionWorkload { dtype, ..workload },
                Arithmetic::As(precision) => workload.with_precision(precision),
            };
            return What::Module(SelfAttentionRun {
                workload,
                sampling,
                execution: implementation.execution(),
            });
        }
        let workload = AttentionWorkload {
            algorithm,
            batch_size: self.batch_size,
            heads: match heads {
                Heads::Auto => 1,
                Heads::Count(count) => count,
            },
            sequence_length: length,
            head_dim: width,
            mask: self.mask(),
            documents: self.documents,
            dropout: self.dropout,
            dtype: arithmetic.attention_dtype(),
        };
        What::Attention(AttentionRun {
            workload,
            sampling,
            execution: implementation.execution(),
        })
    }
}

/// Where memory ends for each implementation of the runs of a group.
pub fn limits(runs: &[Run], group: Group, device: &Device) -> Vec<Limit> {
    let own = runs.iter().filter(|run| run.group == group);
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
