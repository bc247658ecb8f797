//! Updates and the passes before them, over many parameters in one launch; see `update.cu` and `gradients.cu`.
//!
//! [`Tables`] hold the addresses of parameters, gradients and state. They are valid until one of these buffers moves.
//! Values that change with each step (rates, the loss scale, the largest norm) are read from device memory.

mod gradients;
mod launch;
mod tables;

pub(crate) use gradients::{check_overflow, clip_factor};
pub(crate) use launch::{WORDS, prepare, step, words};
pub(crate) use tables::{Entry, Tables};

use super::source::{PRELUDE, Source};

const SOURCE: Source = Source {
    name: "update",
    parts: &[
        PRELUDE,
        include_str!("tables.cuh"),
        include_str!("adamw.cuh"),
        include_str!("lion.cuh"),
        include_str!("muon.cuh"),
        include_str!("sgd.cuh"),
        include_str!("update.cu"),
        include_str!("gradients.cu"),
    ],
};
