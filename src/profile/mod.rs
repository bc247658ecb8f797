//! Where the time goes: ops, by name and by place in the model, forward and backward, and what lies between them.
//!
//! [`Profiler`] listens to [`probe`](crate::probe) and makes a [`Recording`], of which are
//! made [`ProfileReport`] (a summary like nsys's of kernels), [`Balance`] (what a step's wall time is made of,
//! without a rest), a trace for Perfetto or Chrome ([`Recording::save_trace`]) and a flame graph
//! ([`Recording::save_flame_graph`]); and [`OpCost`], the FLOPs and bytes of each op by its formula, and [`node_costs`]
//! and [`node_table`], those of a traced forward before it runs; [`emit_nvtx`], for NVIDIA's profilers.
//!
//! On a GPU of NVIDIA's, [`Profiler::start_on`] records its kernels too, as CUPTI tells of them, each with the range
//! that launched it, and nothing waits for the GPU at an op. Times are then the kernels': an op's are those that it
//! launched, and [`Grouping::Kernel`] has a row for each name. A planned step is replayed as it is without a profiler,
//! as CUDA graphs, and each kernel is given to the call that it was recorded of. Other listeners than this one have the
//! same calls launched one by one, each in its range.
//!
//! Of composite ops reports say what products take of their time, and what softmax takes ([`Row::parts`]): by the
//! kernels' names on a GPU, timed inside the ops on the CPU, where attention's scores and values are told apart too.
//!
//! Nothing need be built or flagged for it: layers, ops, benchmarks and the trainer open their ranges always, and while
//! no profiler runs a range is a load of an atomic. A user's own parts get names by [`range`], steps
//! and phases of a loop of one's own by [`step`] and [`phase`].
//!
//! ```
//! use candle_core::{DType, Device, Tensor, Var};
//! use tallow::profile::{self, Grouping, Profiler, ProfileReport, Selection};
//! use tallow::{nn, ops};
//!
//! let x = Tensor::ones((4, 8), DType::F32, &Device::Cpu)?;
//! let w = Var::ones((16, 8), DType::F32, &Device::Cpu)?;
//! let profiler = Profiler::start()?;
//! for _ in 0..3 {
//!     let _step = profile::step();
//!     let y = {
//!         let _phase = profile::phase("forward");
//!         let _mine = profile::range("encoder");
//!         ops::sum(&ops::linear(&x, &w)?)?
//!     };
//!     let _phase = profile::phase("backward");
//!     tallow::backward(y)?;
//! }
//! let recording = profiler.finish()?;
//!
//! let forward = Selection { phase: Some("forward".into()), ..Default::default() };
//! let report = ProfileReport::new(&recording, &forward, Grouping::Path)?;
//! assert_eq!(report.rows[0].name, "encoder/linear");
//! assert_eq!(report.rows[0].instances, 3);
//! assert_eq!(report.rows[0].cost.unwrap().product_flops, 3.0 * 2.0 * 4.0 * 8.0 * 16.0);
//! # Ok::<(), tallow::Error>(())
//! ```

mod balance;
mod flame;
mod forecast;
#[cfg(feature = "cuda")]
mod gpu;
#[cfg(not(feature = "cuda"))]
#[path = "no_gpu.rs"]
mod gpu;
mod profiler;
mod recording;
mod selection;
mod summary;
mod trace;
mod tree;

pub use crate::ops::cost::{Cost, OpCost};
pub use crate::probe::{Parts, emit_nvtx, phase, range, step};
pub use balance::{Balance, Line, LineKind};
pub use forecast::{NodeCost, node_costs, node_table};
pub use profiler::Profiler;
pub use recording::{Kernel, KernelWork, OperandShape, Recording, Span, op_costs};
pub use selection::{Grouping, Selection};
pub use summary::{Launches, ProfileReport, Row};
