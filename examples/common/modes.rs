//! Flags for the part of a training step that is run, and for its execution.

use clap::ValueEnum;
use tallow::compile::StepConfig;
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
    /// Returns the name of the flag's value.
    pub fn name(self) -> Option<String> {
        Some(self.to_possible_value()?.get_name().into())
    }

    /// Returns the rule with its default hyperparameters; `seed` rounds moments in bf16.
    pub fn rule(self, seed: u64) -> Rule {
        match self {
            Self::Adamw => Rule::default(),
            Self::AdamwBf16 => Rule::AdamW(AdamWConfig {
                moments: Moments::Bf16 { seed },
                ..Default::default()
            }),
            Self::Sgd => Rule::Sgd(SgdConfig {
                momentum: 0.9,
                ..Default::default()
            }),
            Self::Lion => Rule::Lion(LionConfig::default()),
            Self::Muon => Rule::Muon(MuonConfig {
                scaling: Scaling::Moonlight, // one learning rate for Muon's parameters and AdamW's
                ..Default::default()
            }),
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

/// `--compile`, or `--compile=only`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CompileFlag {
    /// Eager steps and planned steps
    Both,
    /// Planned steps only
    Only,
}

/// Returns whether steps can be planned in this precision.
pub fn can_plan(precision: Precision) -> bool {
    StepConfig::from(precision).validate().is_ok()
}
