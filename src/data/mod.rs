//! Training data: token sequences from text, binary and token files, and batches of windows cut from them.
//!
//! [`Tokens`] is a checked sequence of ids with its vocabulary size, in a file or in memory; [`write_tokens`] writes a
//! token file. [`RandomBatches`] cuts batches for training, [`SequentialBatches`] for evaluation. A token is a byte, a
//! given id, or an id from a tokenizer ([`Tokens::encoded`]).
//!
//! ```
//! use candle_core::Device;
//! use tallow::data::{RandomBatches, SequentialBatches, Tokens};
//!
//! # fn main() -> tallow::Result<()> {
//! let text = "to be, or not to be, that is the question. ".repeat(20);
//! let (train, validation) = Tokens::from_bytes(text)?.split(0.1)?;
//!
//! let training = RandomBatches::new(&train, 4, 16, 1234)?;
//! let batch = training.batch(0, &Device::Cpu)?; // the batch of step 0, the same after any resume
//! assert_eq!(batch.inputs.dims(), [4, 16]);
//!
//! let evaluation = SequentialBatches::new(&validation, 4, 16)?;
//! let mut predicted = 0;
//! for batch in evaluation.iter(&Device::Cpu) {
//!     predicted += batch?.num_targets();
//! }
//! assert_eq!(predicted, validation.len() - 1); // each target once
//! # Ok(())
//! # }
//! ```

mod batch;
mod format;
mod open;
mod source;
mod tokens;
mod windows;

pub use batch::{Batch, Batches};
pub use format::{TokenFormat, write_tokens};
pub use tokens::Tokens;
pub use windows::{RandomBatches, SequentialBatches};
