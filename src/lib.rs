//! Train transformer language models on [candle](candle_core), and know what a training step costs.
//!
//! tallow is a library of parts, each of which works alone on ordinary candle tensors:
//!
//! - [`model`]: a transformer language model ([`TransformerLM`](model::TransformerLM)) that loads Stanford CS336's
//!   checkpoints, counts its FLOPs, and generates;
//! - [`nn`]: its layers, built from any candle `VarBuilder`;
//! - [`ops`]: differentiable operations with hand-written CPU kernels and backwards, where candle's own fused ones cut
//!   the graph silently; every op has a `reference` in plain candle ops, which is its specification;
//! - [`attention`]: scaled dot-product attention with masks, naive and in tiles ([`flash`](attention::flash()), with a
//!   backward);
//! - [`precision`]: mixed precision, [`autocast`] with PyTorch's policies for CUDA and CPU;
//! - [`backward`](backward()): the gradients of a loss, which frees the graph as it goes;
//! - [`optim`]: AdamW that keeps f32 state and updates in place, clipping, accumulation, schedules, loss scaling;
//! - [`data`] and [`train`]: token files, batches, and a training loop that resumes bit for bit;
//! - [`distributed`]: several processes that train together, each with its GPU;
//! - [`compile`]: a training step planned beforehand: one list of kernel calls in one piece of memory, faster than the
//!   graph and with a memory account that is exact;
//! - [`graph`]: a forward traced as data, without computing anything: what a model does, op by op;
//! - [`bench`](mod@bench), [`memory`], [`report`]: time and memory of a step, measured and predicted, in tables;
//! - [`profile`]: where a step's time goes, op by op and place by place, and what candle spends between them.
//!
//! ```
//! use tallow::model::{TransformerConfig, TransformerLM};
//! use tallow::optim::{AdamW, AdamWConfig, clip_grad_norm};
//! use tallow::ops;
//! use candle_core::Tensor;
//!
//! let device = tallow::device("cpu")?;
//! let config = TransformerConfig {
//!     vocab_size: 10, context_length: 4, d_model: 8, num_layers: 1, num_heads: 2, d_ff: 16,
//!     ..Default::default()
//! };
//! let model = TransformerLM::new(&config, 0, &device)?;
//! let mut optimizer = AdamW::new(model.parameters(), AdamWConfig::default())?;
//!
//! let tokens = Tensor::new(&[[1u32, 2, 3, 4]], &device)?; // (B, T)
//! let targets = Tensor::new(&[[2u32, 3, 4, 5]], &device)?; // (B, T)
//! let loss = ops::cross_entropy(&model.forward(&tokens)?, &targets)?; // a scalar
//! let mut gradients = tallow::backward(loss)?;
//! clip_grad_norm(&mut gradients, &model.parameters(), 1.0)?;
//! optimizer.step(&gradients)?;
//! # Ok::<(), tallow::Error>(())
//! ```
//!
//! # Legend of shapes
//!
//! B batch, T sequence, Tq and Tk queries and keys, H heads (Hkv of keys and values, where those are fewer), Dh head
//! dimension, D `d_model`, F `d_ff`, V vocabulary, L layers; N = B T. `(..., D)` is any number of leading dimensions.
//! Linear weights are (out, in). MiB is 2^20 bytes.
//!
//! # Kernels and references
//!
//! On the CPU ops run kernels, in f32, f64, f16 and bf16: parallel, vectorised for the processor that is there, and
//! with the same bits for any number of threads. So they do on CUDA in f32, f16 and bf16: products are cuBLAS's, the
//! rest are kernels of our own. Elsewhere they run their reference, and [`ops::fallbacks`] says which did;
//! [`ops::KernelPolicy::Strict`] makes that an error instead.
//!
//! # Backward
//!
//! Ops are nodes of candle's graph, and `loss.backward()` works. [`backward()`] gives the same gradients in less time
//! and memory: it frees the graph as it goes, and adds gradients in place.
//!
//! # Features
//!
//! [`ops`], [`attention`], [`nn`], [`model`], [`optim`], [`precision`], [`graph`], [`compile`] and
//! [`distributed`] are always there. With `default-features = false` they depend on candle, `gemm`, `pulp`, `rayon` and
//! little else. The rest is by feature, and on by default:
//!
//! - `train`: [`data`] and [`train`]. Includes `hf`.
//! - `report`: [`report`], [`bench`](mod@bench), [`memory`], [`profile`], and plans as text and picture
//!   ([`Plan::explain`](compile::Plan::explain)).
//! - `png`: pictures saved as PNG too, with a font that the build carries (its licence:
//!   `src/report/DejaVu-LICENSE.txt`). Includes `report`.
//! - `files`: weights, and the states of optimizer and loss scale, saved and loaded with checksums
//!   ([`TransformerLM::save`](model::TransformerLM::save), [`AdamW::save`](optim::AdamW::save)). Included in `train`
//!   and `report`. Without it, `candle_core::safetensors` and candle's `VarBuilder` read and write weights. [`hf`] is
//!   part of it.
//! - `hf`: tokenizers of Hugging Face's folders ([`hf::Tokenizer`]). Included in `train`.
//! - `serde`: configurations that serde reads and writes. Included in `files`.
//!
//! Off by default: `cuda`, `cudnn`, `metal`, `mkl` and `accelerate` switch on the same in candle; the last two speed up
//! candle's own matmul only, since this crate's ops have products of their own, and the `gemm` crate's. `nvtx` hands
//! ranges to NVIDIA's profilers ([`probe::emit_nvtx`]); `cuda` includes it. `mpi` has ranks on CPUs ([`distributed`];
//! needs an MPI and libclang to build).
//!
//! # Speed of a program that uses it
//!
//! - Cargo's profiles do not reach dependent crates: build with `--release`, or set `opt-level = 3` in `[profile.dev]`.
//! - candle's CPU backend allocates for every op. With mimalloc, told to keep freed pages, eager steps take less time;
//!   the examples do this.
//! - candle's thread pool spins before it sleeps, on cores that kernels then want: begin `main` with [`init`]. On a
//!   machine that is busy with other work, `CANDLE_NUM_THREADS=1` makes training faster still.
//! - On the CPU bf16 saves time where the processor multiplies it itself ([`hardware::bf16_products`]). Else half
//!   precision saves memory, not time: kernels widen it, compute in f32 and round once.
//!
//! # Errors and panics
//!
//! Every fallible function returns [`Error`], which says what was wanted, what came and what to do. No input makes a
//! public function panic.
#![deny(missing_docs)]
// With some features off, docs link to modules that are not there, and crate-private helpers of theirs have no caller.
// The default build checks both.
#![cfg_attr(
    not(all(feature = "report", feature = "train")),
    allow(rustdoc::broken_intra_doc_links, dead_code, unused_imports)
)]

pub mod attention;
mod backward;
#[cfg(feature = "report")]
pub mod bench;
pub mod compile;
#[cfg(feature = "train")]
pub mod data;
pub mod distributed;
mod error;
#[cfg(feature = "files")]
mod files;
mod grad;
mod gradients;
pub mod graph;
pub mod hardware;
#[cfg(feature = "files")]
pub mod hf;
mod init;
mod inplace;
#[doc(hidden)]
pub mod internals;
pub(crate) mod kernels;
#[cfg(feature = "report")]
pub mod memory;
pub mod model;
pub mod nn;
mod op_table;
pub mod ops;
pub mod optim;
pub mod precision;
pub mod probe;
#[cfg(feature = "report")]
pub mod profile;
#[cfg(feature = "report")]
pub mod report;
mod saved;
#[cfg(feature = "train")]
pub mod train;

pub use backward::{backward, backward_from};
/// The candle that this crate is built on: a program that uses it by this name has the same version.
pub use candle_core as candle;
pub use error::{Error, Result};
pub use grad::{is_grad_enabled, no_grad};
pub use hardware::device;
pub use init::init;
pub use precision::autocast;

/// The README's example, compiled with the other examples of the docs.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
