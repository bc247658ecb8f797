//! AdamW and what comes before it, on many parameters in one launch; see `update.cu` and `gradients.cu`.
//!
//! [`Tables`] say to the kernels where parameters, gradients and state lie, and are made once for as long as these do
//! not move. What changes from step to step (rates, the loss scale, the largest norm) is read from the GPU.

mod gradients;
mod tables;
mod update;

pub(crate) use gradients::{check_overflow, clip_factor};
pub(crate) use tables::{Entry, Tables};
pub(crate) use update::{WORDS, prepare, step, words};

use super::source::{PRELUDE, Source};

const SOURCE: Source = Source {
    name: "adamw",
    parts: &[
        PRELUDE,
        include_str!("tables.cuh"),
        include_str!("update.cu"),
        include_str!("gradients.cu"),
    ],
};
