//! Reading and writing files so that a reader never meets half of one, nor two of them mixed.
//!
//! - [`open`]: a file to read, opened once; pipes and devices are refused. [`read`]: the whole of one.
//! - [`zeros`]: memory for what a file holds, or an error.
//! - [`write_atomically`], [`write_bytes`]: the old content or the new, never a part.
//! - [`Staged`]: new content of a file, complete before anything is replaced; [`rename`] and [`remove`] likewise sync.
//! - [`TensorFile`], [`save_tensors`]: safetensors with a checksum for every tensor.
//! - [`parts`]: tensors in parts, which ranks have written to a file each.
//! - [`first_difference`]: in what saved settings and given ones differ.
//! - [`PathLock`]: one writer for a path.

mod atomic;
mod differences;
pub(crate) mod interrupt;
#[cfg(feature = "train")]
mod lock;
mod open;
mod parts;
mod save;
mod tensors;

pub(crate) use atomic::{Staged, remove, remove_abandoned, rename, write_atomically, write_bytes};
pub(crate) use differences::{Difference, first_difference};
#[cfg(feature = "train")]
pub(crate) use lock::PathLock;
pub(crate) use open::{open, read, read_exact_at, read_to_string, zeros};
#[cfg(feature = "train")]
pub(crate) use parts::{Manifest, Part, PartFile};
#[cfg(feature = "train")]
pub(crate) use save::save_part;
pub(crate) use save::{Entry, save_tensors};
pub(crate) use tensors::TensorFile;
