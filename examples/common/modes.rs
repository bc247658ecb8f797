//! Flags for the part of a training step that is run, and for its execution.

use super::precision::PrecisionFlags;
use clap::ValueEnum;
use tallow::bench::Execution;
use tallow::compile::StepConfig;
use tallow::memory::Mode;
use tallow::optim::Moments;
use tallow::precision::Precision;
use tallow::{Error, Result};

/// The optimizer of a training step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OptimizerFlag {
    Adamw,
    AdamwBf16,
}

impl OptimizerFlag {
    pub fn name(self) -> &'static str {
        match self {
            Self::Adamw => "adamw",
            Self::AdamwBf16 => "adamw-bf16",
        }
    }

    /// Returns the moments of AdamW; `seed` rounds those in bf16.
    pub fn moments(self, seed: u64) -> Moments {
        match self {
            Self::Adamw => Moments::Wide,
            Self::AdamwBf16 => Moments::Bf16 { seed },
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
    Beside,
    /// Planned steps only
    Only,
}

/// Returns each mode with its executions. Modes run eagerly in precisions that cannot be planned.
pub fn executed(
    flag: Option<CompileFlag>,
    modes: Vec<Mode>,
    precision: Precision,
) -> Vec<(Mode, Execution)> {
    let executions = |mode| {
        let executions: &[Execution] = match flag.filter(|_| can_plan(precision)) {
            Some(CompileFlag::Beside) => &[Execution::Eager, Execution::Planned],
            Some(CompileFlag::Only) => &[Execution::Planned],
            _ => &[Execution::Eager],
        };
        executions.iter().map(move |execution| (mode, *execution))
    };
    modes.into_iter().flat_map(executions).collect()
}

/// Returns whether any run is planned (`planned`), or any is eager (otherwise). An invalid set of precisions returns
/// true, because it is refused later.
pub fn is_any(
    precisions: &PrecisionFlags,
    flag: Option<CompileFlag>,
    modes: &[Mode],
    planned: bool,
) -> bool {
    let Ok(precisions) = precisions.precisions() else {
        return true;
    };
    let runs = precisions.into_iter();
    let mut runs = runs.flat_map(|precision| executed(flag, modes.to_vec(), precision));
    runs.any(|(_, execution)| (execution == Execution::Planned) == planned)
}

/// Describes the optimizer, for the header.
pub fn optimizer_words(name: &str, in_backward: bool) -> String {
    match in_backward {
        true => format!("{name}; in backward where a train step is planned"),
        false => name.into(),
    }
}

/// Refuses a memory budget and the optimizer in backward without a planned training step, which alone uses them.
pub fn check_planned_flags(
    is_any_given: bool,
    flag: Option<CompileFlag>,
    modes: &[Mode],
    precisions: &[Precision],
) -> Result<()> {
    let all = precisions
        .iter()
        .map(|precision| executed(flag, modes.to_vec(), *precision));
    let is_any_planned = all
        .flatten()
        .any(|(mode, execution)| execution.is_planned_step(mode));
    if !is_any_given || is_any_planned {
        return Ok(());
    }
    Err(Error::Config {
        config: super::PROGRAM,
        field: "--memory-budget-gib, --optimizer-in-backward",
        expected: "given with a training step that is planned".into(),
        got: "none among the runs".into(),
        hint: "add --mode train-step and --compile, in f32, bf16 or f16".into(),
    })
}

/// Returns whether steps can be planned in this precision.
fn can_plan(precision: Precision) -> bool {
    let plan = StepConfig {
        precision,
        ..Default::default()
    };
    plan.validate().is_ok()
}

/// Returns the note for rows that could not be planned.
pub fn not_planned(flag: Option<CompileFlag>, precisions: &[Precision]) -> Option<String> {
    let eager = precisions.iter().filter(|p| !can_plan(**p));
    let names: Vec<&str> = eager.map(|precision| precision.name()).collect();
    let said = flag.is_some() && !names.is_empty();
    said.then(|| {
        format!(
            "Steps are planned in f32, bf16 and f16 with f32 parameters and a kept copy of each weight: {} ran \
             eagerly.",
            names.join(", ")
        )
    })
}
