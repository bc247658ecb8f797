//! Reading and writing of files, such that a reader never finds a partial file or a mix of two.
//!
//! - [`open`]: opens a regular file for reading; pipes and devices are refused. [`read`]: reads a whole file.
//! - [`zeros`]: allocates memory for a file's content, or returns an error.
//! - [`write_atomically`], [`write_bytes`]: replace a file's content completely or not at all.
//! - [`Staged`]: a file's new content, complete before anything is replaced. [`rename`] and [`remove`] sync the folder
//!   too.
//! - [`TensorFile`], [`save_tensors`]: safetensors with a checksum for every tensor.
//! - [`parts`]: tensors whose parts are in the files of several ranks.
//! - [`first_difference`]: the first difference between saved settings and current ones.
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
