//! Flags for the part of a training step that is run, and for its execution.

use clap::ValueEnum;
use tallow::bench::Execution;
use tallow::compile::StepConfig;
use tallow::memory::Mode;
use tallow::optim::{AdamWConfig, LionConfig, Moments, MuonConfig, Rule, Scaling, SgdConfig};
use tallow::precision::Precision;

/// The optimizer of a training step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OptimizerFlag {
    Adamw,
    /// AdamW with its moments in bf16
    AdamwBf16,
    Sgd,
    Lion,
    Muon,
}

impl OptimizerFlag {
    pub fn name(self) -> &'static str {
        match self {
            Self::Adamw => "adamw",
            Self::AdamwBf16 => "adamw-bf16",
            Self::Sgd => "sgd",
            Self::Lion => "lion",
            Self::Muon => "muon",
        }
    }

    /// Returns the rule with its default hyperparameters; `seed` rounds moments in bf16.
    pub fn rule(self, seed: u64) -> Rule {
        match self {
            Self::Adamw => Rule::default(),
            Self::AdamwBf16 => AdamWConfig {
                moments: Moments::Bf16 { seed },
                ..Default::default()
            }
            .into(),
            Self::Sgd => SgdConfig {
                momentum: 0.9,
                ..Default::default()
            }
            .into(),
            Self::Lion => LionConfig::default().into(),
            Self::Muon => MuonConfig {
                scaling: Scaling::Moonlight, // one learning rate for Muon's parameters and AdamW's
                ..Default::default()
            }
            .into(),
        }
    }
}

/// A mode, or all three.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ModeFlag {
    /// Without a graph
    Forward,
    ForwardBackward,
    TrainStep,
    All,
}

/// Returns the requested modes, in the order of the flags.
pub fn modes(flags: &[ModeFlag]) -> Vec<Mode> {
    let all = [Mode::Forward, Mode::ForwardBackward, Mode::TrainStep];
    let modes = flags.iter().flat_map(|flag| match flag {
        ModeFlag::Forward => &all[..1],
        ModeFlag::ForwardBackward => &all[1..2],
        ModeFlag::TrainStep => &all[2..],
        ModeFlag::All => &all,
    });
    modes.copied().collect()
}

/// `--compile`, or `--compile=only`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CompileFlag {
    /// Eager steps and planned steps
    Both,
    /// Planned steps only
    Only,
}

/// Returns the executions in this precision: eager alone if it cannot be planned.
pub fn executions(flag: Option<CompileFlag>, precision: Precision) -> &'static [Execution] {
    match flag.filter(|_| can_plan(precision)) {
        Some(CompileFlag::Both) => &[Execution::Eager, Execution::Planned],
        Some(CompileFlag::Only) => &[Execution::Planned],
        None => &[Execution::Eager],
    }
}

/// Returns whether steps can be planned in this precision.
pub fn can_plan(precision: Precision) -> bool {
    StepConfig::from(precision).validate().is_ok()
}
