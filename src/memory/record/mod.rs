//! Recording of every block of memory with its origin, while a step runs; sums, charts and PyTorch's snapshot of it.

mod blocks;
pub(super) mod buffer;
#[cfg(feature = "cuda")]
mod gpu;
#[cfg(not(feature = "cuda"))]
#[path = "no_gpu.rs"]
mod gpu;
mod report;
mod snapshot;
mod sums;

pub use blocks::{Block, PhaseSpan};
pub use report::timeline;
pub use snapshot::Snapshot;
pub use sums::BytesByKind;

use super::breakdown::MemoryKind;
use super::tracker;
use crate::probe::{self, Event, Kind, Listener, ListenerGuard};
use crate::{Error, Result};
use buffer::{EventKind, OP, Place};
use candle_core::{CpuStorage, Device, DeviceLocation, Storage, Tensor};
use std::sync::Arc;
use std::time::SystemTime;

/// The configuration of a recording.
///
/// [`record_on()`] has an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordConfig {
    /// Blocks from this size on are recorded. Smaller ones are in the sums only, as [`MemoryKind::Other`].
    pub threshold_bytes: usize,
    /// Number of events that the recording can hold, 64 bytes each; memory that is not written to stays uncommitted. A
    /// block needs two events, as does an op or a phase. Events beyond the capacity are counted and lost.
    pub capacity: usize,
    /// Bytes that were alive before the work of interest, which are subtracted from every sum: the value of
    /// [`Meter::current_bytes`](crate::memory::Meter::current_bytes) before the model is created. Without it, sums
    /// include all other memory of the process, or on a GPU of its memory pool.
    pub baseline_bytes: u64,
}

/// Records blocks of 4 KiB and more, up to 2^20 events.
impl Default for RecordConfig {
    fn default() -> Self {
        Self {
            threshold_bytes: 4096,
            capacity: 1 << 20,
            baseline_bytes: 0,
        }
    }
}

/// A running recording, until it is [finished](Recorder::finish) or dropped.
#[must_use = "the recording ends when this is dropped"]
pub struct Recorder {
    config: RecordConfig,
    began: SystemTime,
    labels: Vec<Label>,
    location: DeviceLocation,
    /// Guard of a GPU's recording; `None` when the host's blocks are recorded.
    gpu: Option<gpu::PoolRecorder>,
    /// Guard: keeps threads' paths up to date.
    _listening: ListenerGuard,
}

/// The use and name of a block, given by the caller.
struct Label {
    address: usize,
    bytes: usize,
    kind: MemoryKind,
    name: String,
    /// Number of events before the label.
    position: usize,
}

/// A finished recording.
#[derive(Clone, Debug)]
pub struct MemoryRecording {
    // Not public: sums and charts rely on event indices being within `curve`.
    pub(super) blocks: Vec<Block>,
    pub(super) phases: Vec<PhaseSpan>,
    /// Number of events beyond the capacity. If there are any, blocks are missing and sums by origin are wrong.
    pub lost_events: u64,
    /// Number of GPU blocks of unknown size that were freed in the recording: they were allocated before it. Since
    /// their size cannot be subtracted, sums are too large from that moment on. [`Recorder::label`] makes the size of a
    /// tensor known.
    pub unknown_blocks: u64,
    /// When it began.
    pub began: SystemTime,
    /// Its configuration.
    pub config: RecordConfig,
    /// For each event its time and the bytes alive then, minus the baseline.
    pub(super) curve: Vec<Sample>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    pub at_ns: u64,
    pub bytes: u64,
}

/// Starts to record the process's allocations and frees on all threads, of blocks of at least
/// [`RecordConfig::threshold_bytes`].
///
/// A block belongs to the path and phase of the thread that allocates it ([`probe`]). A thread in no range, such as a
/// kernel's worker, works for the running op; if several run, for the one that began last on any thread. A block that
/// the allocator resizes counts as freed and allocated.
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
/// let block = recording
///     .blocks()
///     .iter()
///     .find(|block| block.kind == MemoryKind::Activations)
///     .unwrap();
/// assert_eq!(
///     (block.bytes, block.phase, block.path.name()),
///     (4 * 32 * 256, "forward", "linear".to_string())
/// );
/// # drop(y);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// [`Error::Order`] if no [`Tracker`](tracker::Tracker) is installed or another recording runs; [`Error::Config`] for a
/// capacity of 0; [`Error::OutOfMemory`] if there is no memory for the events.
pub fn record(config: RecordConfig) -> Result<Recorder> {
    record_on(&Device::Cpu, config)
}

/// Like [`record()`], for the blocks of `device`. On an NVIDIA GPU these are the blocks of its memory pool, which holds
/// all of candle's tensors there.
///
/// CUPTI, a library of the CUDA toolkit, reports the driver's calls. A process can have only one CUPTI subscriber, so
/// no other profiler can run meanwhile. Sizes are those requested; the pool rounds them up
/// ([`Meter`](crate::memory::Meter) reads its counters). A block lives from the call that allocates it to the call that
/// frees it. Times are the host's, which runs ahead of the GPU. Allocations outside of the pool, such as cuBLAS's
/// workspace, are not seen.
///
/// ```
/// use candle_core::{DType, Tensor};
/// use std::alloc::System;
/// use tallow::memory::{self, RecordConfig, tracker::Tracker};
///
/// #[global_allocator]
/// static ALLOCATOR: Tracker<System> = Tracker::new(System); // a GPU needs none
///
/// let device = tallow::device("cpu")?;
/// let config = RecordConfig { threshold_bytes: 1 << 20, ..Default::default() };
/// let recorder = memory::record_on(&device, config)?;
/// let large = Tensor::zeros((512, 1024), DType::F32, &device)?; // 2 MiB
/// let small = Tensor::zeros(1024, DType::F32, &device)?; // 4 KiB, in the sums only
/// let recording = recorder.finish();
/// assert_eq!(recording.blocks().len(), 1);
/// assert_eq!(recording.blocks()[0].bytes, 2 << 20);
/// # drop((large, small));
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Those of [`record()`], except that a GPU needs no tracker; on a GPU also a missing CUPTI, or one that another tool
/// uses; a device that is neither the CPU nor an NVIDIA GPU.
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
    // The listener first: its own allocations are not part of the recording.
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
        location: device.location(),
        gpu: None,
        _listening: listening,
    };
    if place == Place::Gpu {
        recorder.gpu = Some(gpu::start(device)?);
    }
    // The first event has the bytes alive at the start.
    buffer::mark(EventKind::Begins, probe::current(), probe::current_phase());
    Ok(recorder)
}

impl Recorder {
    /// Sets the use and name of the block that holds `tensor`'s elements: parameters, optimizer state, inputs. It may
    /// have been allocated before the recording. Tensors on another device than the recorded one are ignored.
    pub fn label(&mut self, kind: MemoryKind, name: impl Into<String>, tensor: &Tensor) {
        if tensor.device().location() != self.location {
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

    /// Ends the recording and returns it.
    pub fn finish(mut self) -> MemoryRecording {
        let (events, lost_events) = buffer::stop();
        let unknown_blocks = self.gpu.take().map_or(0, |_| gpu::unknown_blocks());
        let labels = std::mem::take(&mut self.labels);
        let (blocks, phases) = blocks::of(&events, labels);
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

/// Stops the recording.
impl Drop for Recorder {
    fn drop(&mut self) {
        buffer::stop();
    }
}

/// Returns the number of blocks allocated on `device` so far; those of a GPU are counted only while recorded.
pub(crate) fn blocks_allocated(device: &Device) -> u64 {
    match device.is_cpu() {
        true => tracker::allocations().unwrap_or_default(),
        false => gpu::allocations(),
    }
}

/// Returns the address and size of a tensor's storage, on the CPU or an NVIDIA GPU.
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
            _ => None, // types that this crate does not compute in
        },
        #[cfg(feature = "cuda")]
        Storage::Cuda(storage) => gpu::block_of(storage),
        _ => None,
    }
}

struct Marks;

impl Marks {
    fn mark(event: &Event<'_>, [phase, op]: [EventKind; 2]) {
        match event.kind {
            Kind::Phase => buffer::mark(phase, event.path, event.phase),
            Kind::Op | Kind::OpBackward => buffer::mark(op, event.path, event.phase),
            Kind::Step | Kind::Module | Kind::Range => {}
        }
    }
}

impl Listener for Marks {
    fn on_enter(&self, event: &Event<'_>) {
        Self::mark(event, [EventKind::PhaseBegins, EventKind::OpBegins]);
    }

    fn on_leave(&self, event: &Event<'_>) {
        Self::mark(event, [EventKind::PhaseEnds, EventKind::OpEnds]);
    }
}
