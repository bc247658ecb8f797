//! The runs: every combination of the flags' lists.

use super::Flags;
use super::implementation::Implementation;
use candle_core::{DType, Device};
use std::fmt;
use std::str::FromStr;
use tallow::Result;
use tallow::bench::{AttentionRun, Limit, Sampling, SelfAttentionRun};
use tallow::memory::{AttentionWorkload, SelfAttentionWorkload};
use tallow::precision::Precision;
use tallow::report::{Fields, counted};

/// How many heads there are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Heads {
    /// As many as make heads of 64; one where the width is no multiple of that.
    Auto,
    Count(usize),
}

/// The width of a head that every implementation supports.
const HEAD_DIM: usize = 64;

impl Heads {
    /// The heads of a layer of this width.
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

/// What a run computes in.
#[derive(Clone, Copy, PartialEq)]
pub enum Arithmetic {
    /// Everything in one dtype.
    Of(DType),
    /// As a model of that precision.
    As(Precision),
}

impl Arithmetic {
    pub fn name(self) -> &'static str {
        match self {
            Self::Of(dtype) => dtype.as_str(),
            Self::As(precision) => precision.name(),
        }
    }
}

/// One measurement.
pub struct Run {
    /// What it computes in.
    arithmetic: Arithmetic,
    /// What tells it from other runs of its implementation and size; empty if nothing does.
    pub variant: String,
    what: What,
}

#[derive(PartialEq)]
enum What {
    Attention(AttentionRun),
    Layer(SelfAttentionRun),
}

impl Run {
    pub fn title(&self) -> String {
        let name = self.arithmetic.name();
        match &self.what {
            What::Attention(run) => {
                let (w, execution) = (&run.workload, run.execution.name());
                let (by, length, head_dim) = (w.algorithm, w.sequence_length, w.head_dim);
                format!("{name}, {execution} {by}, T {length}, d {head_dim}")
            }
            What::Layer(run) => {
                let (w, execution) = (&run.workload, run.execution.name());
                let (by, length, width) = (w.algorithm, w.sequence_length, w.d_model);
                let heads = counted(w.heads, "head");
                format!("{name}, {execution} {by}, {heads}, T {length}, D {width}")
            }
        }
    }

    /// The rows of the phases, each with its precision first.
    pub fn run(&self, device: &Device) -> Result<Vec<Fields>> {
        let rows = match &self.what {
            What::Attention(run) => run.run(device, |_, _| ()),
            What::Layer(run) => run.run(device, |_, _| ()),
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
            What::Layer(run) => run.limit(device),
        }
    }
}

impl Flags {
    /// Every run; those of one size next to each other.
    pub fn runs(&self, arithmetic: &[Arithmetic], sampling: &Sampling) -> Vec<Run> {
        const WHOLE: &[usize] = &[256, 1024, 4096, 8192, 16_384];
        let given = |list: &[usize], quick: &[usize], full: &[usize]| match list {
            [] if self.full => full.to_vec(),
            [] => quick.to_vec(),
            list => list.to_vec(),
        };
        let (lengths, widths) = match self.module {
            true => {
                let lengths = [16, 32, 64, 128];
                (
                    given(&self.context_length, &lengths, &lengths),
                    given(&self.d_model, &WHOLE[..3], WHOLE),
                )
            }
            false => (
                given(&self.context_length, &WHOLE[..3], WHOLE),
                given(&self.head_dim, &[16, 64], &[16, 32, 64, 128]),
            ),
        };
        let heads = self.heads();
        let mut runs: Vec<Run> = Vec::new();
        for &width in &widths {
            for &length in &lengths {
                for &heads_of_run in &heads {
                    for &arithmetic_of_run in arithmetic {
                        let mut parts = Vec::new();
                        parts.extend(
                            (arithmetic.len() > 1).then(|| arithmetic_of_run.name().to_string()),
                        );
                        parts.extend((heads.len() > 1).then(|| heads_of_run.to_string()));
                        for &implementation in &self.compare {
                            let of = (implementation, arithmetic_of_run, heads_of_run);
                            let what = self.one(of, length, width, sampling);
                            // heads of 64 may be the one head that was asked for too
                            if !runs.iter().any(|run| run.what == what) {
                                runs.push(Run {
                                    arithmetic: arithmetic_of_run,
                                    variant: parts.join(", "),
                                    what,
                                });
                            }
                        }
                    }
                }
            }
        }
        runs
    }

    fn one(
        &self,
        (implementation, arithmetic, heads): (Implementation, Arithmetic, Heads),
        length: usize,
        width: usize,
        sampling: &Sampling,
    ) -> What {
        if self.module {
            let workload = SelfAttentionWorkload {
                algorithm: implementation.algorithm(),
                batch_size: self.batch_size,
                sequence_length: length,
                d_model: width,
                heads: heads.of_width(width),
                ..Default::default()
            };
            return What::Layer(SelfAttentionRun {
                workload: match arithmetic {
                    Arithmetic::Of(dtype) => SelfAttentionWorkload { dtype, ..workload },
                    Arithmetic::As(precision) => workload.with_precision(precision),
                },
                sampling: sampling.clone(),
                execution: implementation.execution(),
            });
        }
        let workload = AttentionWorkload {
            algorithm: implementation.algorithm(),
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
            dtype: match arithmetic {
                Arithmetic::Of(dtype) => dtype,
                Arithmetic::As(precision) => precision.dtype(),
            },
        };
        What::Attention(implementation.attention(workload, sampling))
    }
}

/// The first size that does not fit, for each implementation of the runs and each variant of it.
pub fn limits(runs: &[Run], device: &Device) -> Vec<(String, Limit)> {
    let mut limits: Vec<(String, Limit)> = Vec::new();
    for run in runs {
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
