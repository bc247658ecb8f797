//! Planned training steps: for a set of input shapes, a step is a list of kernel calls over one piece of memory.
//!
//! An eager step builds a graph, and allocates and checks for every op. A [`Step`] does none of that: forward, loss,
//! backward, clipping and AdamW are planned once ([`Plan`]), every buffer with its place in one arena, which buffers
//! share that are never needed together; a run executes the calls and allocates nothing. Parameters and optimizer state
//! are the model's and the optimizer's own: train planned, evaluate or save eager, and go on.
//!
//! ```
//! use candle_core::Tensor;
//! use tallow::compile::{Step, StepConfig};
//! use tallow::model::{TransformerConfig, TransformerLM};
//! use tallow::optim::{AdamW, AdamWConfig};
//!
//! let device = tallow::device("cpu")?;
//! let config = TransformerConfig {
//!     vocab_size: 10, context_length: 4, d_model: 8, num_layers: 1, num_heads: 2, d_ff: 16,
//!     ..Default::default()
//! };
//! let model = TransformerLM::new(&config, 0, &device)?;
//! let mut optimizer = AdamW::new(model.parameters(), AdamWConfig::default())?;
//! let mut step = Step::of(&model, &optimizer, &StepConfig { clip_norm: Some(1.0), ..Default::default() })?;
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
//! A plan is made from a [trace](crate::graph::trace()): [`Step::of`] traces
//! [`TransformerLM`](crate::model::TransformerLM), [`Step::new`] any loss. [`Step::forward`] runs forward alone, to
//! evaluate; [`Step::without_optimizer`] takes any function, whose output's gradient
//! [`Step::forward_backward_from`] is given.
//!
//! # On a GPU
//!
//! A model on a CUDA GPU (feature `cuda`, compute capability 8.0 and later) is planned there, in f32, bf16 and f16,
//! products by cuBLASLt. Flash attention takes heads of a multiple of
//! 8 up to 256, in f32 of 4, if their tiles fit the GPU's shared memory. Products of f32 are exact there, or TF32 if
//! [`set_tf32`](crate::hardware::set_tf32) had switched that on when the step was planned. In half precision linear
//! maps of one input are one product, heads and gates lie packed, and the copies of weights last from run to run: the
//! update writes them, so that no step casts a weight ([`Step::refresh`] after weights were loaded or set). With
//! [`StepConfig::optimizer_in_backward`] gradients are in bf16 where weights' copies are. A run is recorded as a CUDA
//! graph when it comes the second time. It allocates nothing, and nothing in it waits for the host. In f16 the
//! gradients of naive attention's scores are rounded to f16: use a loss scale. Beyond 1,024 tokens naive attention
//! leaves blocks out that the mask hides. Another plan of the step takes the arena over, and copies of weights are made
//! again in its first run.
//!
//! A loss of targets that are all ignored is not a number there, where a CPU's run is an error.
//!
//! # What a step refuses
//!
//! Each of these is an error that names the op or the field, its place and what to do. An eager loop runs them all:
//! `loss`, [`backward`](crate::backward()), [`AdamW::step`](crate::optim::AdamW::step).
//!
//! | what | where |
//! |---|---|
//! | Apple's GPUs, NVIDIA's before compute capability 8.0 | everywhere |
//! | f64, views of more than six dimensions that cannot be joined, gradients of views that overlap themselves | GPUs |
//! | heads of flash attention of no multiple of 8 (in f32 of 4), or whose tiles do not fit; a scale that is not above 0 | GPUs |
//! | heads of flash attention over 256 | everywhere |
//! | parameters in half precision under an optimizer; precisions without f32 parameters, or that drop casts | everywhere |
//! | parameters in several dtypes under an optimizer, or that share a storage | everywhere |
//! | an op that has no kernel for its dtype, or runs its reference; candle's own ops on what depends on an input | everywhere |
//! | token ids and first keys that an op makes; ids in i64 that an op takes as numbers too | everywhere |
//! | an output that is no float, and for a training step one that is not one f32 (f64 on the CPU) | everywhere |
//! | a parameter that the loss does not depend on, unless its group [takes that](crate::optim::MissingGradients) | everywhere |
//! | the optimizer in backward with clipping by norm, accumulation, loss scaling or several ranks | everywhere |
//! | gradients exchanged in bf16 | CPU |
//!
//! # Half precision
//!
//! With [`StepConfig::precision`] a step is what it is eagerly under [`autocast`](crate::autocast()), by either policy:
//! they agree in all that this model has. Products and attention are computed from bf16 or f16 and summed in f32;
//! parameters, optimizer state, the residual stream, norms, probabilities, losses and gradients of parameters are f32.
//! The weights that products read have copies in the arena. On the CPU they are renewed in each step (where the first
//! product asks for it; with accumulation, before the first micro-batch), so that there is nothing to refresh after a
//! weight was changed or loaded.
//!
//! Results are rounded where eager ones are. Only sums of products in place, the gradients of an input that several
//! weights share, are rounded once instead of twice.
//!
//! f16 wants its loss scaled: [`StepConfig::loss_scaling`] and [`Step::run_scaled`] with a
//! [`GradScaler`](crate::optim::GradScaler), whose scale is read at each run. Where a gradient overflows, the calls of
//! the update are left out.
//!
//! # What a plan is exact about
//!
//! [`Plan::peak_bytes`] is the arena's allocation. On a GPU [`Plan::workspace_bytes`] is what lies beside it, and with
//! [`Plan::total_bytes`] a step's peak is met to 0.1 MiB. On the CPU kernels keep packing buffers of 0.75 MiB a thread,
//! in half precision 2.5, whatever the sizes; flash attention takes a few tiles a thread, naive attention
//! what [`planned_attention_breakdown`](crate::memory::planned_attention_breakdown) counts.
//!
//! The bits of a run do not depend on the number of threads, nor on where buffers lie.

pub mod arena;
mod arguments;
mod batch;
mod budget;
mod buffer;
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
mod op;
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
pub use crate::ops::lowering::{Accumulate, Kernel, Named};
pub use batch::{Batch, Inputs};
#[cfg(feature = "report")]
pub(crate) use budget::least_of_forward;
pub use buffer::{Buffer, BufferId, Category, Location};
pub use config::{PlanKind, StepConfig, StepRanks};
#[cfg(feature = "train")]
pub(crate) use config::{check_clip_value, check_precision};
pub use costs::PartCost;
#[cfg(feature = "report")]
pub(crate) use loss::hollow_model;
pub use op::Op;
pub use phase_times::PhaseTimes;
pub use plan::{BufferRange, Call, Phase, Plan};
pub use planned_step::ScaledStep;
pub use step::Step;
pub use timeline::{Rates, Timeline};
