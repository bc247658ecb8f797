//! Profiling: time by op and by place in the model, forward and backward, and the time between ops.
//!
//! [`Profiler`] listens to [`probe`](crate::probe) and makes a [`Recording`]. From a recording come [`ProfileReport`]
//! (a summary like that of nsys for kernels), [`Balance`] (all parts of a step's wall time), a trace for Perfetto or
//! Chrome ([`Recording::save_trace`]) and a flame graph ([`Recording::save_flame_graph`]). [`OpCost`] has the FLOPs and
//! bytes of each op by its formula; [`node_costs`] and [`node_table`] apply the formulas to a traced forward before it
//! runs. [`emit_nvtx`] passes ranges to NVIDIA's profilers.
//!
//! On an NVIDIA GPU, [`Profiler::start_on`] also records kernels through CUPTI, each with the range that launched it,
//! without waiting for the GPU at each op. Times are then those of kernels: an op's time is that of the kernels it
//! launched, and [`Grouping::Kernel`] has a row for each kernel name. A planned step is replayed from CUDA
//! graphs, [at least one for each phase](Profiler::start_on), and each kernel counts for the plan's call that put it
//! into the graph. While [`Profiler::start`] or [`memory::record_on`](crate::memory::record_on()) records, the calls of
//! a planned step are launched one by one instead, each in its range.
//!
//! Reports also divide an op's time into matmuls, softmax and the rest ([`Row::parts`]): attention, linear layers and
//! matmuls, gated linear layers, the linear cross-entropy and softmax have such parts. On a GPU the parts follow from
//! the kernels' names. On the CPU they are timed inside the ops; there the time of attention's matmuls is also known
//! for scores and for values alone ([`Parts::scores_ns`], [`Parts::values_ns`]).
//!
//! [`ProfileReport::with_floors`] compares each op's time with its floor: its FLOPs and bytes at the rates that
//! [`DeviceRates`] measures. [`Plan::floors`](crate::compile::Plan::floors) has the floors of a planned step before it
//! runs.
//!
//! Profiling needs no build flag: layers, ops, benchmarks and the trainer always open ranges, and without a listener a
//! range costs one atomic load. [`range`] names parts of your own code; [`step`] and [`phase`] mark those of your own
//! training loop.
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
//! assert_eq!(report.rows[0].cost.unwrap().matmul_flops, 3.0 * 2.0 * 4.0 * 8.0 * 16.0);
//! # Ok::<(), tallow::Error>(())
//! ```

mod balance;
mod flame;
mod floor;
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
pub use floor::{CallFloor, DeviceRates};
pub use forecast::{NodeCost, node_costs, node_table};
pub use profiler::Profiler;
pub use recording::{Kernel, KernelWork, OperandShape, Recording, Span, op_costs};
pub use selection::{Grouping, Selection};
pub use summary::{Launches, ProfileReport, Row};
