//! Every block of a tensor's size, as it is taken and given back, with where it came from.
//!
//! What lives here: the recorder ([`record`], [`record_on`]), the buffer that the allocator writes to (`buffer`), a
//! GPU's blocks (`gpu`), where a tensor's block is (`storage`), a block as it is recorded (`block`),
//! the blocks' lives with their phase and path (`lives`), what a block is there for (`kind`), and the sums
//! ([`MemoryRecording`]). What does not: the allocator itself ([`tracker`](crate::memory::tracker)), what viewers read
//! ([`Snapshot`](crate::memory::Snapshot)), and pictures ([`timeline`](crate::memory::timeline())).

mod block;
pub(in crate::memory) mod buffer;
#[cfg(feature = "cuda")]
mod gpu;
#[cfg(not(feature = "cuda"))]
#[path = "no_gpu.rs"]
mod gpu;
mod kind;
mod lives;
mod report;
mod storage;
mod sums;

pub use block::{Block, PhaseSpan};
pub(in crate::memory) use storage::block_of;
pub use sums::{Holdings, Origin};

use super::MemoryKind;
use crate::memory::tracker;
use crate::probe::{self, Event, Kind, Listener, Listening};
use crate::{Error, Result};
use buffer::{Place, Refusal, What};
use candle_core::{Device, Tensor};
use std::sync::Arc;
use std::time::SystemTime;

/// How a recording is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordConfig {
    /// Blocks from this size on are recorded; what is smaller is in the sums only, as [`MemoryKind::Other`].
    pub threshold_bytes: usize,
    /// Room for so many events, 64 bytes each, of which the system gives only what is written to. A block is two
    /// events, so is an op, so is a phase. What finds no room is counted, and lost.
    pub capacity: usize,
    /// What was alive before anything of interest was: subtracted from every sum.
    pub baseline_bytes: u64,
}

/// Blocks of 4 KiB and more, a million events.
impl Default for RecordConfig {
    fn default() -> Self {
        Self {
            threshold_bytes: 4096,
            capacity: 1 << 20,
            baseline_bytes: 0,
        }
    }
}

/// A recording under way, until it is [finished](Recorder::finish) or dropped.
#[must_use = "the recording ends when this is dropped"]
pub struct Recorder {
    config: RecordConfig,
    began: SystemTime,
    labels: Vec<Label>,
    /// While it lasts, a GPU's blocks are counted; `None` where the host's are recorded.
    gpu: Option<gpu::Watch>,
    /// While it lasts, threads know where they are.
    _listening: Listening,
}

/// What is known of a block from outside.
struct Label {
    address: usize,
    bytes: usize,
    kind: MemoryKind,
    name: String,
    /// Said after this many events.
    position: usize,
}

/// What was recorded.
#[derive(Clone, Debug)]
pub struct MemoryRecording {
    // Not public: their events are within `curve`, which sums and pictures rely on.
    pub(super) blocks: Vec<Block>,
    pub(super) phases: Vec<PhaseSpan>,
    /// Events that found no room: if there are any, blocks are missing, and sums are too small or too large.
    pub lost_events: u64,
    /// Blocks of a GPU that were given back and had been taken before the recording, so that their size was not known
    /// ([`Recorder::label`] tells it): sums after them are too large.
    pub unknown_blocks: u64,
    /// When it began.
    pub began: SystemTime,
    /// How it was made.
    pub config: RecordConfig,
    /// By event: when it was, and what was alive then, the baseline subtracted.
    pub(super) curve: Vec<Sample>,
    /// All that was alive when it began, the baseline subtracted.
    pub(super) bytes_before: u64,
}

/// One moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    pub at_ns: u64,
    pub bytes: u64,
    /// Where the thread was, the range around it included.
    pub path: probe::Path,
}

/// Begins to record every block of a tensor's size that the process takes or gives back, on all threads.
///
/// A block belongs to the path and phase of the thread that takes it ([`probe`]). A thread that is nowhere, a kernel's
/// worker, works for the op that runs: that which began last, on whatever thread, if several do.
/// A block that the allocator resizes counts as freed and allocated.
///
/// ```
/// use candle_core::{DType, Device, Tensor, Var};
/// use std::alloc::System;
/// use tallow::memory::{self, MemoryKind, RecordConfig, tracker::Tracker};
/// use tallow::{ops, probe};
///
/// #[global_allocator]
/// static ALLOCATOR: Tracker<System> = Tracker::new(System);
///
/// let weight = Var::ones((256, 64), DType::F32, &Device::Cpu)?;
/// let x = Tensor::ones((32, 64), DType::F32, &Device::Cpu)?;
/// let mut recorder = memory::record(RecordConfig::default())?;
/// recorder.label(MemoryKind::Weights, "weight", &weight);
/// let y = {
///     let _phase = probe::phase("forward");
///     ops::linear(&x, &weight)?
/// };
/// let recording = recorder.finish();
/// let block = recording.blocks().iter().find(|block| block.kind == MemoryKind::Activations).unwrap();
/// assert_eq!((block.bytes, block.phase, block.path.name()), (4 * 32 * 256, "forward", "linear".to_string()));
/// # drop(y);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// No [`Tracker`](tracker::Tracker) is installed; another recording is running; no memory for the events.
pub fn record(config: RecordConfig) -> Result<Recorder> {
    record_on(&Device::Cpu, config)
}

/// As [`record()`], the blocks of `device`: on a GPU of NVIDIA's, those that its memory pool gives out, which all of
/// candle's tensors there are in.
///
/// The driver's calls are listened to through CUPTI, a library of the CUDA toolkit, which has one listener in a
/// process: no other profiler can run meanwhile. Sizes are those asked for; the pool rounds them up
/// ([`Meter`](crate::memory::Meter) has its counters). A block is there from the call that asks for it to the one that
/// gives it back, and times are the host's, which runs ahead of the GPU. What libraries take past the pool, cuBLAS's
/// own workspace, is not seen.
///
/// # Errors
/// As [`record()`]; on a GPU, no CUPTI, or another tool that has it; a device that is neither the CPU nor a GPU of
/// NVIDIA's.
pub fn record_on(device: &Device, config: RecordConfig) -> Result<Recorder> {
    const OP: &str = "memory::record";
    if device.is_cpu() && tracker::current_bytes().is_none() {
        return Err(Error::Order {
            op: OP,
            problem: "the allocator of this binary is not a memory::tracker::Tracker".into(),
            hint: "declare one as #[global_allocator]".into(),
        });
    }
    if config.capacity == 0 {
        return Err(Error::config("RecordConfig", "capacity", "0")
            .must_be("at least 1", "a block is two events"));
    }
    // The listener first: what it takes is no part of the recording.
    let listening = probe::listen(Arc::new(Marks));
    let began = SystemTime::now();
    let place = match device.is_cpu() {
        true => Place::Host,
        false => Place::Gpu,
    };
    match buffer::start(place, config.capacity, config.threshold_bytes) {
        Ok(()) => {}
        Err(Refusal::AlreadyRecording) => {
            return Err(Error::Order {
                op: OP,
                problem: "another recording is running".into(),
                hint: "finish or drop the other recorder first".into(),
            });
        }
        Err(Refusal::NoMemory { wanted_bytes }) => {
            return Err(Error::OutOfMemory {
                what: format!("{OP}, room for {} events", config.capacity),
                wanted_bytes: wanted_bytes as u64,
                available_bytes: crate::hardware::available_bytes().unwrap_or_default(),
            });
        }
    }
    let mut recorder = Recorder {
        config,
        began,
        labels: Vec::new(),
        gpu: None,
        _listening: listening,
    };
    if place == Place::Gpu {
        recorder.gpu = Some(gpu::watch(device)?);
    }
    // The first event says what is alive.
    buffer::mark(What::Begins, probe::current(), probe::current_phase());
    Ok(recorder)
}

impl Recorder {
    /// Says what the block of `tensor`'s elements is there for: parameters, the optimizer's state, inputs. It may have
    /// been taken before the recording began. Tensors elsewhere than on the device that is recorded are passed over.
    pub fn label(&mut self, kind: MemoryKind, name: impl Into<String>, tensor: &Tensor) {
        if tensor.device().is_cpu() != self.gpu.is_none() {
            return;
        }
        if let Some((address, bytes)) = block_of(tensor) {
            if self.gpu.is_some() {
                gpu::register_block(address, bytes);
            }
            self.labels.push(Label {
                address,
                bytes,
                kind,
                name: name.into(),
                position: buffer::position(),
            });
        }
    }

    /// Ends the recording.
    pub fn finish(mut self) -> MemoryRecording {
        let (events, lost_events) = buffer::stop();
        let unknown_blocks = self.gpu.take().map_or(0, |_| gpu::unknown_blocks());
        let labels = std::mem::take(&mut self.labels);
        let lives::Lives { blocks, phases } = lives::of(&events, labels);
        let beyond = |bytes: usize| (bytes as u64).saturating_sub(self.config.baseline_bytes);
        let curve = events.iter().map(|event| Sample {
            at_ns: event.at_ns,
            bytes: beyond(event.current_bytes),
            path: event.path,
        });
        MemoryRecording {
            blocks,
            phases,
            lost_events,
            unknown_blocks,
            began: self.began,
            config: self.config,
            bytes_before: events
                .first()
                .map_or(0, |event| beyond(event.current_bytes)),
            curve: curve.collect(),
        }
    }
}

/// A recording that is dropped does not go on running.
impl Drop for Recorder {
    fn drop(&mut self) {
        buffer::stop();
    }
}

/// How many blocks have been taken on `device`; a GPU's are counted while they are recorded.
pub(crate) fn blocks_taken(device: &Device) -> u64 {
    match device.is_cpu() {
        true => tracker::allocations().unwrap_or_default(),
        false => gpu::allocations(),
    }
}

/// Says when phases and ops begin and end.
struct Marks;

impl Listener for Marks {
    fn entered(&self, event: &Event<'_>) {
        match event.kind {
            Kind::Phase => buffer::mark(What::PhaseBegins, event.path, event.phase),
            Kind::Op | Kind::OpBackward => buffer::mark(What::OpBegins, event.path, event.phase),
            Kind::Step | Kind::Module | Kind::Range => {}
        }
    }

    fn left(&self, event: &Event<'_>) {
        match event.kind {
            Kind::Phase => buffer::mark(What::PhaseEnds, event.path, event.phase),
            Kind::Op | Kind::OpBackward => buffer::mark(What::OpEnds, event.path, event.phase),
            Kind::Step | Kind::Module | Kind::Range => {}
        }
    }
}
