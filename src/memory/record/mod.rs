//! Every block of memory with its origin: recorded while a step runs, summed, drawn, and written for PyTorch's viewers.

pub(super) mod buffer;
#[cfg(feature = "cuda")]
mod gpu;
#[cfg(not(feature = "cuda"))]
#[path = "no_gpu.rs"]
mod gpu;
mod lives;
mod report;
mod snapshot;
mod sums;

pub use lives::{Block, PhaseSpan};
pub use report::timeline;
pub use snapshot::Snapshot;
pub use sums::Holdings;

use super::breakdown::MemoryKind;
use super::tracker;
use crate::probe::{self, Event, Kind, Listener, Listening};
use crate::{Error, Result};
use buffer::{OP, Place, What};
use candle_core::{CpuStorage, Device, Storage, Tensor};
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
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    pub at_ns: u64,
    pub bytes: u64,
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
    buffer::start(place, &config)?;
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
        let (blocks, phases) = lives::of(&events, labels);
        let beyond = |bytes: usize| (bytes as u64).saturating_sub(self.config.baseline_bytes);
        let curve = events.iter().map(|event| Sample {
            at_ns: event.at_ns,
            bytes: beyond(event.current_bytes),
        });
        MemoryRecording {
            blocks,
            phases,
            lost_events,
            unknown_blocks,
            began: self.began,
            config: self.config,
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

/// Address and size of the elements of a tensor's storage, if it is on the CPU or a GPU of NVIDIA's.
pub(super) fn block_of(tensor: &Tensor) -> Option<(usize, usize)> {
    fn extent<T>(elements: &[T]) -> (usize, usize) {
        (elements.as_ptr().addr(), size_of_val(elements))
    }
    let (storage, _) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) => match storage {
            CpuStorage::U8(x) => Some(extent(x)),
            CpuStorage::U32(x) => Some(extent(x)),
            CpuStorage::I64(x) => Some(extent(x)),
            CpuStorage::BF16(x) => Some(extent(x)),
            CpuStorage::F16(x) => Some(extent(x)),
            CpuStorage::F32(x) => Some(extent(x)),
            CpuStorage::F64(x) => Some(extent(x)),
            _ => None, // types that nothing here computes in
        },
        #[cfg(feature = "cuda")]
        Storage::Cuda(storage) => gpu::block_of(storage),
        _ => None,
    }
}

struct Marks;

impl Marks {
    fn mark(event: &Event<'_>, [phase, op]: [What; 2]) {
        match event.kind {
            Kind::Phase => buffer::mark(phase, event.path, event.phase),
            Kind::Op | Kind::OpBackward => buffer::mark(op, event.path, event.phase),
            Kind::Step | Kind::Module | Kind::Range => {}
        }
    }
}

impl Listener for Marks {
    fn entered(&self, event: &Event<'_>) {
        Self::mark(event, [What::PhaseBegins, What::OpBegins]);
    }

    fn left(&self, event: &Event<'_>) {
        Self::mark(event, [What::PhaseEnds, What::OpEnds]);
    }
}
