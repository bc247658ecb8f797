//! Planned training steps: for one set of input shapes, a step is a fixed list of kernel calls over one arena.
//!
//! An eager step builds a graph, and allocates and checks for every op. A [`Step`] does none of that. Forward, loss,
//! backward, clipping and AdamW are planned once ([`Plan`]). Every buffer has a fixed offset in one arena; buffers that
//! are never live together share memory. A run executes the calls and allocates no tensors. Parameters and optimizer
//! state are shared with the model and the optimizer, so planned training can alternate with eager evaluation and
//! saving.
//!
//! ```
//! use candle_core::Tensor;
//! use tallow::compile::{Step, StepConfig};
//! use tallow::model::{TransformerConfig, TransformerLM};
//! use tallow::optim::{AdamWConfig, Optimizer};
//!
//! let device = tallow::device("cpu")?;
//! let config = TransformerConfig {
//!     vocab_size: 10, context_length: 4, d_model: 8, num_layers: 1, num_heads: 2, d_ff: 16,
//!     ..Default::default()
//! };
//! let model = TransformerLM::new(&config, 0, &device)?;
//! let mut optimizer = Optimizer::new(model.parameters(), AdamWConfig::default())?;
//! let mut step = Step::for_model(
//!     &model,
//!     &optimizer,
//!     &StepConfig { clip_norm: Some(1.0), ..Default::default() },
//! )?;
//!
//! let tokens = Tensor::new(&[[1u32, 2, 3, 4]], &device)?; // (B, T)
//! let targets = Tensor::new(&[[2u32, 3, 4, 5]], &device)?; // (B, T)
//! println!("{}", step.prepare((&tokens, &targets))?.explain());
//! let first = step.run(&mut optimizer, (&tokens, &targets))?;
//! let second = step.run(&mut optimizer, (&tokens, &targets))?;
//! assert!(second < first);
//! # Ok::<(), tallow::Error>(())
//! ```
//!
//! A plan is made from a [trace](crate::graph::trace()). [`Step::for_model`] traces a
//! [`TransformerLM`](crate::model::TransformerLM), [`Step::new`] any loss. [`Step::forward`] runs forward alone, for
//! evaluation. [`Step::without_optimizer`] accepts any function; [`Step::forward_backward_from`] is then passed the
//! gradient of its output.
//!
//! # On a GPU
//!
//! A model on a CUDA GPU (feature `cuda`, compute capability 8.0 and later) is planned in f32, bf16 or f16. Matmuls are
//! by cuBLASLt. In f32 they are exact, or TF32 if [`set_tf32`](crate::hardware::set_tf32) had enabled that when the
//! step was planned. Flash attention supports head widths that are multiples of 8 (in f32 of 4) up to 256, if their
//! tiles fit the GPU's shared memory. Beyond 1,024 tokens naive attention skips blocks that the mask hides. In f16 the
//! gradients of naive attention's scores are rounded to f16: use a loss scale.
//!
//! In half precision, the projections of q, k and v are one matmul, and so are gate and up of SwiGLU and GeGLU. With
//! [`StepConfig::optimizer_in_backward`] in bf16, gradients are in bf16 where weights have [half-precision
//! copies](#half-precision).
//!
//! The second run is recorded as a CUDA graph. A run allocates nothing, and within a run the GPU never waits for the
//! host. When a step switches to another of its plans, that plan takes over the arena.
//!
//! If all targets are ignored, the loss is NaN on a GPU; on the CPU the run is an error.
//!
//! # What a step refuses
//!
//! Each of these is an error that names the op or the field, its path in the model and what to do. An eager loop
//! supports them all: `loss`, [`backward`](crate::backward()), [`Optimizer::step`](crate::optim::Optimizer::step).
//!
//! | what | where |
//! |---|---|
//! | Apple GPUs; NVIDIA GPUs before compute capability 8.0 | everywhere |
//! | f64, views of more than six dimensions that cannot be joined, gradients of views that overlap themselves | GPUs |
//! | flash attention: head widths not a multiple of 8 (f32: 4), tiles that do not fit, a scale of 0 or less | GPUs |
//! | flash attention heads wider than 256 | everywhere |
//! | half-precision parameters under an optimizer, as in [`Regime::Full`] | everywhere |
//! | weights that are cast at each use: [`Precision::with_dropped_casts`] | everywhere |
//! | parameters under an optimizer that have several dtypes or share a storage | everywhere |
//! | an op that would run its reference: it has no kernel for the dtype, or [`KernelPolicy`] asks for it | everywhere |
//! | candle's own arithmetic on values that depend on an input ([views](crate::graph#meta-tensors) work) | everywhere |
//! | ids, targets or first keys that an op inside the function computes (except `topk`, `argmax`): make them inputs | everywhere |
//! | arithmetic on i64 tensors in a function whose token ids are i64: pass the ids in u32 | everywhere |
//! | an output that is not a float; in a training step, a loss that is not a scalar f32 (CPU: or f64) | everywhere |
//! | a parameter without a gradient, unless its group [permits that](crate::optim::MissingGradients) | everywhere |
//! | the optimizer in backward with clipping by norm, accumulation, loss scaling or several ranks | everywhere |
//! | gradients exchanged in bf16 | CPU |
//!
//! [`KernelPolicy`]: crate::ops::KernelPolicy
//! [`Regime::Full`]: crate::precision::Regime::Full
//! [`Precision::with_dropped_casts`]: crate::precision::Precision::with_dropped_casts
//!
//! Tensors from outside the function are constants of the plan; ids and targets may be constants too.
//!
//! # Half precision
//!
//! With [`StepConfig::precision`] a step computes what an eager step computes under [`autocast`](crate::autocast()).
//! Matmuls and attention read and write bf16 or f16, and accumulate in f32. These are f32: parameters, their gradients,
//! optimizer state, softmax probabilities and cross-entropies; in a [`TransformerLM`](crate::model::TransformerLM) also
//! the residual stream and the outputs of norms, such as the
//! [hidden states](crate::model::TransformerLM::hidden_states).
//!
//! The autocast policy is PyTorch's for CUDA, on the CPU too. [`Precision::with_regime`] selects PyTorch's policy for
//! the CPU instead. A [`TransformerLM`](crate::model::TransformerLM) computes the same under both. In a loss of your
//! own, `exp`, `log`, `log_softmax`, `logsumexp`, `pow`, `rsqrt`, `softmax`, `sum` and `layer_norm` are f32 under
//! CUDA's policy, and have the dtype of their inputs under the CPU's. `mean` has the dtype of its input under both.
//!
//! A training step needs a loss in f32. [`ops::cross_entropy`](crate::ops::cross_entropy()) returns one. A loss of your
//! own must be f32 too. An op of a bf16 and an f32 tensor returns f32, for example `sub` of a bf16 output and f32
//! targets: the loss is then f32 too. Otherwise call [`ops::cast`](crate::ops::cast()) before the last `mean`. A part
//! of the loss inside `autocast(Autocast::disabled(), ...)` computes in the dtypes of its inputs.
//!
//! The weights that matmuls read have half-precision copies in the arena:
//!
//! - On the CPU each step makes the copies again, before the first matmul that reads them or, with accumulation, before
//!   the first micro-batch. Weights may be set or loaded at any time.
//! - On a GPU the copies persist from run to run. The first run of a plan makes them, and so does the first run after a
//!   switch to it from another plan. Each update renews them, so later steps cast no weight. Call [`Step::refresh`]
//!   after you have set or loaded weights.
//!
//! [`Precision::with_regime`]: crate::precision::Precision::with_regime
//!
//! Results are rounded where eager ones are, with one exception: the gradient of a tensor that several linear layers
//! read. Each layer's matmul adds its part to the rounded sum of the parts before it, and rounds the new sum. An eager
//! step also rounds each part before it is added.
//!
//! f16 needs loss scaling: [`StepConfig::loss_scaling`] and [`Step::run_scaled`] with a
//! [`GradScaler`](crate::optim::GradScaler), whose scale is read at each run. If a gradient overflows, the update is
//! skipped.
//!
//! # What a plan is exact about
//!
//! [`Plan::arena_bytes`] is the size of the arena. [`Plan::total_bytes`] is the peak of a run, the memory of everything
//! that the plan accesses: the arena, parameters, optimizer state, inputs, frozen weights, constants, tables of rotary
//! embeddings, outputs and, on a GPU, [`Plan::workspace_bytes`].
//!
//! - On a GPU the total is within 0.1 MiB of the peak of the memory pool ([`Meter`](crate::memory::Meter)) if the
//!   process has no other tensors there. The process needs more: the CUDA context, its loaded kernels, recorded CUDA
//!   graphs and, with several ranks, NCCL's buffers.
//! - On the CPU the total is exact. Kernels need scratch memory in addition: [`Plan::scratch_bytes`].
//!   Each thread keeps a packing buffer for matmuls, 0.75 MiB in f32 and 2.5 MiB in half precision, whatever the sizes,
//!   and one for matmuls of the `gemm` crate, as large as the level 2 cache. (That crate computes small f32 matmuls
//!   and, on processors without AVX-512, most f32 matmuls.) The threads are the calling one and those of rayon's pool:
//!   `RAYON_NUM_THREADS`, or one for each core. Attention needs a workspace for all threads. In tests all other scratch
//!   memory of a run is under 1 MiB in total.
//!
//! With accumulation, the total counts the inputs of one micro-batch. Add those of the others.
//!
//! A step has a plan for each set of shapes and for each kind of run, such as the evaluation by [`Step::forward`]. All
//! share the arena, which has the size of the largest. On a GPU each plan has a workspace of its own.
//!
//! The bits of a result do not depend on the number of threads, nor on the offsets of buffers.

pub(crate) mod arena;
mod arguments;
mod batch;
mod budget;
pub(crate) mod buffer;
mod calls;
mod config;
mod costs;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod executor;
#[cfg(feature = "report")]
mod explain;
mod loss;
mod lower;
#[cfg(feature = "report")]
mod map;
pub(crate) mod op;
mod parameters;
mod phase_times;
mod plan;
mod planned_step;
mod program;
mod step;
mod timeline;
mod traced;
mod update;
mod writer;

pub use crate::graph::Target;
pub use batch::{Batch, Inputs};
#[cfg(feature = "report")]
pub(crate) use budget::forward_lower_bound;
pub use config::{PlanKind, StepConfig, StepRanks};
#[cfg(feature = "train")]
pub(crate) use config::{check_clip_value, check_precision};
pub use costs::GroupCost;
#[cfg(feature = "report")]
pub(crate) use loss::meta_model;
pub use op::Phase;
pub use phase_times::PhaseTimes;
pub use plan::Plan;
pub use planned_step::ScaledStep;
pub use step::Step;
pub use timeline::{Rates, Timeline};
