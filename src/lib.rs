//! Trains transformer language models on [candle](candle_core), and measures what a training step costs.
//!
//! tallow runs on CPUs and NVIDIA GPUs. Each of its parts works alone on ordinary candle tensors. It reports the time
//! of each op, the memory of a step (predicted before the run and measured during it), and the floating-point
//! operations.
//!
//! ```sh
//! cargo test
//! cargo run --example e2e_benchmark     # times forward, backward and optimizer of a small model
//! cargo run --example profile           # times each op of it
//! cargo run --example memory_profile    # shows what its memory is used for
//! ```
//!
//! A training step by hand, on the CPU:
//!
//! ```
//! use tallow::model::{TransformerConfig, TransformerLM};
//! use tallow::optim::{AdamWConfig, Optimizer, clip_grad_norm};
//! use tallow::ops;
//! use candle_core::Tensor;
//!
//! let device = tallow::device("cpu")?;
//! let config = TransformerConfig {
//!     vocab_size: 10, context_length: 4, d_model: 8, num_layers: 1, num_heads: 2, d_ff: 16,
//!     ..Default::default()
//! };
//! let model = TransformerLM::new(&config, 0, &device)?;
//! let mut optimizer = Optimizer::new(model.parameters(), AdamWConfig::default())?;
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
//! # Guides
//!
//! [PyTorch's names, and what takes their place](guide::names), [from PyTorch](guide::coming_from_pytorch), [from
//! candle](guide::coming_from_candle), [a model of your own](guide::own_model), [several hosts](guide::several_hosts),
//! [reading a profile](guide::reading_a_profile).
//!
//! # Modules
//!
//! - [`model`]: a transformer language model ([`TransformerLM`](model::TransformerLM)) that loads Stanford CS336's
//!   checkpoints, with FLOP counts and text generation;
//! - [`nn`]: its layers, built from any candle `VarBuilder`;
//! - [`ops`]: differentiable ops with CPU and CUDA kernels for forward and backward (most of candle's own fused ops
//!   have no backward); each has a reference implementation in plain candle ops;
//! - [`attention`]: scaled dot-product attention with masks, naive and tiled ([`flash`](attention::flash()));
//! - [`precision`]: mixed precision, [`autocast`] with PyTorch's policies for CUDA and CPU;
//! - [`backward`](backward()): the gradients of a loss; it frees the graph as it proceeds;
//! - [`hf`]: models and tokenizers in Hugging Face's folders;
//! - [`optim`]: AdamW, SGD, Lion and Muon with f32 state and in-place updates, clipping, accumulation, schedules, loss
//!   scaling;
//! - [`data`] and [`train`]: token files, batches, and a training loop that resumes bit for bit;
//! - [`distributed`]: data parallelism and sharding over several GPUs, processes or threads;
//! - [`compile`]: planned training steps: a list of kernel calls with one memory arena, faster than the graph, with an
//!   exact account of memory;
//! - [`graph`]: a forward pass traced as data, without computing it;
//! - [`memory`]: the memory of a step, predicted, measured and recorded by origin;
//! - [`profile`]: the time of a step by op and by layer, and the overhead between ops;
//! - [`bench`](mod@bench), [`report`]: benchmarks of steps and attention, in tables and charts;
//! - [`hardware`] and [`probe`]: devices by name; the ranges that profilers listen to.
//!
//! # Where to start
//!
//! | task | start here |
//! |---|---|
//! | train a model on a text | [`train::Trainer`], with [`data::Tokens`] |
//! | write my own training loop | [`backward()`], [`optim`] |
//! | stop and resume a run | [`Trainer::save`](train::Trainer::save), [`Trainer::resume`](train::Trainer::resume) |
//! | load a Hugging Face model | [`hf::load`], [`hf::find`], [`hf::Tokenizer`] |
//! | load or save CS336's checkpoints | [`TransformerLM::load`][load], [`save`][save], [`open`][open] |
//! | save and load a model of my own | [`nn::save`](nn::save()), [`nn::load`](nn::load()), [`Optimizer::save`][adamw] |
//! | generate text | [`TransformerLM::generate`](model::TransformerLM::generate) |
//! | write a layer or a model of my own | [`nn::Layer`], [`nn::Parameter`], `examples/custom_model/model.rs` |
//! | freeze or tie weights, add a LoRA | [`nn::freeze()`], [`nn::from_weights()`], [`nn::Parameter`] |
//! | use only flash attention | [`attention::flash()`] |
//! | use only some ops | [`ops`] |
//! | pack documents into one sequence | [`attention::FirstKeys`], [`TrainConfig::separator`][separator] |
//! | train in bf16 or f16 | [`autocast`], [`optim::GradScaler`]; planned: [`compile::StepConfig::precision`] |
//! | plan the steps of a `TransformerLM` | [`compile::Step::for_model`] |
//! | plan my own model and loss | [the guide](guide::own_model), [`compile::Step::new`], `examples/custom_model.rs` |
//! | predict the memory of a `TransformerLM` | [`memory::estimate`], planned: [`compile::Step::plan_for_model`] |
//! | predict the memory of my own model | [`memory::estimate_graph`], planned: [`compile::Step::plan_for`] |
//! | predict the memory of one of several ranks | [the guide](guide::several_hosts#the-memory-of-a-rank) |
//! | find a batch size or checkpointing that fits | [`memory::largest_batch_size`], [`memory::recommend`] |
//! | save memory by recomputation | [`nn::checkpoint()`], [`StepConfig::memory_budget_bytes`][budget] |
//! | see which tensor uses the memory | [`memory::record_on()`], [the guide](guide::reading_a_profile) |
//! | record the memory of a `TransformerLM`'s step | [`EndToEnd::profile_memory`](bench::EndToEnd::profile_memory) |
//! | read the peak of memory | [`memory::Meter`] |
//! | profile a step | [`profile::Profiler`], [the guide](guide::reading_a_profile) |
//! | count FLOPs | [`model::flops`] |
//! | compare two versions of a step | [`bench::EndToEnd`], [`bench::alternate()`] |
//! | train on several GPUs | [`distributed`], [`Trainer::replicate`](train::Trainer::replicate) |
//! | train a model that one GPU cannot hold | [`distributed::FullyShard`] |
//! | plan the steps of several ranks | [`Step::replicated`][replicated], [`Step::fully_sharded`][sharded] |
//! | train on several hosts | [the guide](guide::several_hosts) |
//! | look at a forward pass as a graph | [`graph::trace()`], [`Graph::to_dot`](graph::Graph::to_dot) |
//! | find ops that ran without a kernel | [`ops::fallbacks`], [`ops::KernelPolicy`] |
//!
//! [load]: model::TransformerLM::load
//! [save]: model::TransformerLM::save
//! [open]: model::TransformerLM::open
//! [separator]: train::TrainConfig::separator
//! [budget]: compile::StepConfig::memory_budget_bytes
//! [adamw]: optim::Optimizer::save
//! [replicated]: compile::Step::replicated
//! [sharded]: compile::Step::fully_sharded
//!
//! # Legend of shapes
//!
//! B batch, T sequence, Tq and Tk queries and keys, H heads (Hkv of keys and values, where those are fewer), Dh head
//! dimension, D `d_model`, F `d_ff`, V vocabulary, L layers; N = B T. `(..., D)` is any number of leading dimensions.
//! Linear weights are (out, in). MiB is 2^20 bytes.
//!
//! # Kernels and references
//!
//! On the CPU ops have kernels in f32, f64, f16 and bf16. They are parallel, vectorized for the processor at run time,
//! and give the same bits with any number of threads. On CUDA ops have kernels in f32, f16 and bf16; matmuls call
//! cuBLAS. An op without a kernel for its device and dtype runs its reference implementation: [`ops::fallbacks`] lists
//! these ops, and [`ops::KernelPolicy::Strict`] makes them an error.
//!
//! # Backward
//!
//! Ops are nodes of candle's graph, so `loss.backward()` works. [`backward()`] computes the same gradients in less time
//! and memory.
//!
//! # Features
//!
//! [`ops`], [`attention`], [`nn`], [`model`], [`optim`], [`precision`], [`graph`], [`compile`] and [`distributed`] are
//! always included. With `default-features = false` they depend on candle, `gemm`, `pulp`, `rayon` and few other
//! crates. These features are on by default:
//!
//! - `train`: [`data`] and [`train`]. Includes `hf`.
//! - `report`: [`report`], [`bench`](mod@bench), [`memory`], [`profile`], and plans as text and picture
//!   ([`Plan::explain`](compile::Plan::explain)).
//! - `png`: pictures as PNG, with an embedded font (licence: `src/report/DejaVu-LICENSE.txt`). Includes `report`.
//! - `files`: files of weights, optimizer and loss scaler, with checksums
//!   ([`TransformerLM::save`](model::TransformerLM::save), [`Optimizer::save`](optim::Optimizer::save),
//!   [`nn::save`](nn::save()), [`nn::load`](nn::load())). Included in `train` and `report`; includes [`hf`].
//! - `hf`: tokenizers of Hugging Face's folders ([`hf::Tokenizer`]). Included in `train`.
//! - `serde`: serde for configurations. Included in `files`.
//!
//! These are off by default: `cuda`, `cudnn`, `metal`, `mkl` and `accelerate` enable the same features of candle; the
//! last two affect only candle's own matmul. `nvtx` emits ranges for NVIDIA's profilers ([`probe::emit_nvtx`]); `cuda`
//! includes it. `mpi` adds ranks that are processes on CPUs ([`distributed`]; the build needs an MPI and libclang).
//!
//! # Speed of a program that uses it
//!
//! - Build with `--release`, or set `opt-level = 3` in `[profile.dev]`: profiles of a dependency do not apply.
//! - candle's CPU backend allocates for every op. Eager steps are faster with mimalloc (`mimalloc::MiMalloc` as the
//!   `#[global_allocator]`) if it keeps freed pages: start the program with `MIMALLOC_PURGE_DELAY=-1`.
//! - candle's worker threads spin on cores that kernels need: call [`tallow::init`](init()) first in `main`. On a
//!   machine with other work, `CANDLE_NUM_THREADS=1` makes training faster still.
//! - On the CPU bf16 saves time only if the processor has bf16 instructions ([`hardware::bf16_matmul_unit`]). Otherwise
//!   half precision saves memory only: kernels widen it, compute in f32 and round once.
//!
//! # Errors and panics
//!
//! Every fallible function returns [`Error`], which names what was expected, what came and what to do. Public functions
//! do not panic on any input.
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
pub mod guide;
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
/// Serializes types with serde by their names: `Display` and `FromStr`, for
/// `#[serde(try_from = "String", into = "String")]`.
macro_rules! serde_by_name {
    ($($name:ty),*) => {$(
        impl TryFrom<String> for $name {
            type Error = crate::Error;

            fn try_from(name: String) -> crate::Result<Self> {
                name.parse()
            }
        }

        impl From<$name> for String {
            fn from(value: $name) -> Self {
                value.to_string()
            }
        }
    )*};
}
serde_by_name!(nn::Checkpointing, precision::Precision);

/// The version of candle that this crate depends on.
pub use candle_core as candle;
/// The version of candle's layers and `VarBuilder` that this crate depends on.
pub use candle_nn;
pub use error::{Error, Result};
pub use grad::{is_grad_enabled, no_grad};
pub use hardware::device;
pub use init::init;
pub use precision::autocast;

/// Compiles the example of the README as a doctest.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
