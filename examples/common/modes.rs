//! The flag that says how much of a training step is run.

use clap::ValueEnum;
use tallow::memory::Mode;

/// A mode, or all three.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ModeFlag {
    /// Without a graph
    Forward,
    ForwardBackward,
    TrainStep,
    All,
}

/// The modes that were asked for, in their order; `forward` is what `forward` means.
pub fn modes_with(forward: Mode, flags: &[ModeFlag]) -> Vec<Mode> {
    let modes = flags.iter().flat_map(|flag| match flag {
        ModeFlag::Forward => vec![forward],
        ModeFlag::ForwardBackward => vec![Mode::ForwardBackward],
        ModeFlag::TrainStep => vec![Mode::TrainStep],
        ModeFlag::All => vec![forward, Mode::ForwardBackward, Mode::TrainStep],
    });
    modes.collect()
}

/// The modes that were asked for, forward without a graph.
pub fn modes(flags: &[ModeFlag]) -> Vec<Mode> {
    modes_with(Mode::Forward, flags)
}
