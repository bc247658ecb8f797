//! What is measured: every combination of the flags' lists, and where memory ends.

use super::Flags;
use candle_core::Device;
use tallow::Result;
use tallow::attention::{Algorithm, Mask};
use tallow::bench::{AttentionRun, Limit, Sampling, SelfAttentionRun};
use tallow::memory::{AttentionWorkload, SelfAttentionWorkload};
use tallow::report::Fields;

/// One configuration.
pub enum Run {
    Attention(AttentionRun),
    Module(SelfAttentionRun),
}

impl Run {
    pub fn title(&self) -> String {
        match self {
            Run::Attention(AttentionRun { workload: w, .. }) => {
                format!("{}, T {}, d {}", w.algorithm, w.sequence_length, w.head_dim)
            }
            Run::Module(SelfAttentionRun { workload: w, .. }) => {
                format!("{}, T {}, D {}", w.algorithm, w.sequence_length, w.d_model)
            }
        }
    }

    pub fn run(&self, device: &Device) -> Result<Vec<Fields>> {
        match self {
            Run::Attention(run) => run.run(device, |_, _| ()),
            Run::Module(run) => run.run(device, |_, _| ()),
        }
    }

    fn limit(&self) -> Option<Limit> {
        match self {
            Run::Attention(run) => run.limit(),
            Run::Module(run) => run.limit(),
        }
    }
}

impl Flags {
    /// Every run, the implementations of a configuration next to each other.
    pub fn runs(&self, sampling: &Sampling) -> Vec<Run> {
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
                for &algorithm in &self.implementation {
                    runs.push(self.one(algorithm, length, width, sampling.clone()));
                }
            }
        }
        runs
    }

    fn one(&self, algorithm: Algorithm, length: usize, width: usize, sampling: Sampling) -> Run {
        let dtype = self.dtype.dtype();
        if self.module {
            let workload = SelfAttentionWorkload {
                algorithm,
                batch_size: self.batch_size,
                sequence_length: length,
                d_model: width,
                heads: self.heads,
                dtype,
            };
            return Run::Module(SelfAttentionRun { workload, sampling });
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
            dtype,
        };
        Run::Attention(AttentionRun { workload, sampling })
    }
}

/// Where memory ends for each implementation of the runs.
pub fn limits(runs: &[Run]) -> Vec<Limit> {
    let of_runs: Vec<Limit> = runs.iter().filter_map(Run::limit).collect();
    let limits = Algorithm::ALL.into_iter().filter_map(|algorithm| {
        let own = of_runs.iter().filter(|l| l.implementation == algorithm);
        own.min_by_key(|l| (l.context_length, l.account.peak_bytes()))
            .cloned()
    });
    limits.collect()
}
