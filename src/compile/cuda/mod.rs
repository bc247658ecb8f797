//! A GPU's executor: launches each call's kernel on one stream, and records a full run as a CUDA graph.
//!
//! A first run launches call by call, which compiles and loads the kernels. The second run is recorded. From then on a
//! run is one launch, or one for each phase if phases are timed or profiled. Values that may change from run to run
//! (learning rates, the loss scale) are in a buffer that is filled before a run and that the kernels read. If a probe
//! listener does not accept replays, runs are launched call by call again.
//!
//! The executor has its own stream, so that no other work is recorded. During a plan's first two runs, other threads
//! should not use kernels on the GPU for the first time: the driver loads a kernel when it is first launched, and
//! refuses to while a stream is recorded. The executor's stream waits for the work on the model's stream before a run,
//! and the model's stream waits for the run.

mod call;
mod device_pointers;
mod exchanges;
mod graph;
mod run_values;
mod segments;
mod update;

use super::executor::{Controls, Tensors, not_finite};
use super::op::BufferRange;
use super::op::Op;
use super::phase_times::{PhaseClock, PhaseTimes};
use super::plan::Plan;
use crate::kernels::cuda::matmul::CublasLt;
use crate::ops::cuda as ops;
use crate::{Error, Result, hardware, probe};
use candle_core::cuda_backend::cudarc::driver::result::{memcpy_dtod_async, memcpy_dtoh_async};
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaSlice, CudaStream};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{Device, Shape, Tensor, WithDType};
use device_pointers::{DevicePointers, start_of};
use exchanges::Exchanges;
use graph::Recorded;
use run_values::RunValues;
use segments::Segment;
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use update::{OptimizerLayout, Updates};

/// A plan's memory on a GPU, and the state for running it.
pub(in crate::compile) struct Executor {
    /// The model's GPU, with a separate stream.
    gpu: CudaDevice,
    /// The model's handle of the GPU; `stream` is its stream.
    model_gpu: CudaDevice,
    stream: Arc<CudaStream>,
    /// `None` while another plan's executor owns it.
    arena: Option<CudaSlice<u8>>,
    tables: Vec<CudaSlice<f32>>,
    run_values: RunValues,
    /// The output of a forward pass, until it is copied.
    output: Option<CudaSlice<u8>>,
    cublas_lt: CublasLt,
    /// The addresses of all buffers, since the first run.
    device_pointers: Option<DevicePointers>,
    updates: Option<Updates>,
    recorded: [Recorded; RunScope::COUNT],
    /// The argument addresses of the last run, by scope.
    arguments: [Vec<u64>; RunScope::COUNT],
    copies_are_current: bool,
    /// Its points in time are indices of `events`.
    clock: Option<PhaseClock<usize>>,
    events: Vec<CudaEvent>,
    /// Last field: NCCL's communicator must be dropped after the graphs that were recorded with it.
    exchanges: Exchanges,
}

/// The calls of a plan that a run covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RunScope {
    /// All calls except those after the micro-batches.
    MicroBatches,
    /// All calls, without an overflow check.
    Unchecked,
    /// All calls; the update is skipped if a gradient is not finite.
    Checked,
}

impl RunScope {
    const COUNT: usize = 3;
}

impl Executor {
    /// Allocates everything except the arena, and copies the plan's tables to the GPU. The current TF32 setting is used
    /// for all later matmuls in f32.
    pub fn new(plan: &Plan, gpu: &CudaDevice) -> Result<Self> {
        let on = Device::Cuda(gpu.clone());
        let tf32 = hardware::tf32(&on);
        call::check(plan, gpu, tf32)?;
        check_available(
            gpu,
            "the workspace of a planned step",
            plan.workspace_bytes(),
        )?;
        let (model_gpu, stream) = (gpu.clone(), gpu.cuda_stream());
        let (gpu, cublas_lt) = {
            let _lock = hardware::cuda::lock_captures();
            let gpu = CudaDevice::new_with_stream(stream.context().ordinal())?;
            let cublas_lt = CublasLt::new(&gpu, tf32)?;
            (gpu, cublas_lt)
        };
        let gpu = &gpu;
        // SAFETY: all work of this handle is on its one stream, which waits for the model's stream and vice versa.
        unsafe { gpu.disable_event_tracking() };
        let tables = plan.tables().iter().map(|table| gpu.clone_htod(table));
        let output = plan.output_bytes();
        Ok(Self {
            gpu: gpu.clone(),
            model_gpu,
            stream,
            arena: None,
            tables: tables.collect::<candle_core::Result<_>>()?,
            run_values: RunValues::new(plan, gpu)?,
            output: match output {
                0 => None,
                _ => Some(gpu.alloc_zeros(output as usize)?),
            },
            cublas_lt,
            device_pointers: None,
            updates: None,
            recorded: Default::default(),
            arguments: Default::default(),
            copies_are_current: false,
            clock: None,
            events: Vec::new(),
            exchanges: Exchanges::default(),
        })
    }

    /// Takes over the arena of another plan's executor, or replaces it by a new one if it is too small. Recorded graphs
    /// stay valid while the arena's address is unchanged.
    pub fn take_arena(&mut self, plan: &Plan, from: Option<&mut Self>) -> Result<()> {
        let bytes = plan.arena_bytes().max(1) as usize;
        self.copies_are_current = false;
        if let Some(from) = from
            && let Some(arena) = from.arena.take()
        {
            let stream = from.gpu.cuda_stream();
            stream.join(&from.stream).w()?; // it may be copying gradients
            stream.synchronize().w()?;
            if arena.len() >= bytes {
                let (len, own) = (arena.len(), self.gpu.cuda_stream());
                // SAFETY: the other stream has finished all its work, and the memory is owned by this stream now.
                self.arena = Some(unsafe { own.upgrade_device_ptr(arena.leak(), len) });
                return Ok(());
            }
            drop(arena);
            stream.synchronize().w()?;
        }
        check_available(&self.gpu, "the arena of a planned step", plan.arena_bytes())?;
        self.arena = Some(self.gpu.alloc_zeros(bytes)?);
        Ok(())
    }

    /// Runs the calls of every micro-batch, and copies the output of a forward pass.
    pub fn run_micro_batches(&mut self, plan: &Plan, tensors: &Tensors<'_>) -> Result<()> {
        let controls = Controls {
            loss_divisor: tensors.loss_divisor,
            ..Default::default()
        };
        let _ran: bool = self.run_scope(plan, tensors, &controls, RunScope::MicroBatches)?;
        if let (Some(output), Some(buffer)) = (tensors.output, &self.output) {
            let to = ops::elements(output)?.pointer;
            let from = start_of(buffer);
            let stream = self.gpu.cuda_stream();
            // SAFETY: both have the size of the plan's output, and are used in the order of one stream.
            unsafe { memcpy_dtod_async(to, from, buffer.len(), stream.cu_stream()) }.w()?;
            self.stream.join(&stream).w()?;
        }
        Ok(())
    }

    /// Runs every call. Returns whether the update ran. After an error neither parameters nor optimizer state have
    /// changed.
    pub fn run(
        &mut self,
        plan: &Plan,
        tensors: &Tensors<'_>,
        controls: &Controls<'_>,
    ) -> Result<bool> {
        let extent = match controls.loss_scale {
            Some(_) => RunScope::Checked,
            None => RunScope::Unchecked,
        };
        self.run_scope(plan, tensors, controls, extent)
    }

    fn run_scope(
        &mut self,
        plan: &Plan,
        tensors: &Tensors<'_>,
        controls: &Controls<'_>,
        scope: RunScope,
    ) -> Result<bool> {
        self.exchanges.join_job(tensors.communicator);
        self.place(plan, tensors, controls)?;
        self.place_arguments(tensors, scope)?;
        let stream = self.gpu.cuda_stream();
        stream.join(&self.stream).w()?;
        self.run_values.fill(&self.gpu, plan, controls)?;
        // A first run loads kernels, which would invalidate another thread's recording.
        let segments = self.segments(plan, scope);
        let recorded = self.recorded[scope as usize].is_of(&segments);
        let _lock = (!recorded).then(hardware::cuda::lock_captures);
        let launched = self.launch_segments(plan, scope, &segments);
        self.stream.join(&stream).w()?; // after an error too: launched kernels read the caller's tensors
        launched?;
        let updated = match scope {
            RunScope::MicroBatches => true,
            _ => self.updated(plan, controls)?,
        };
        self.copies_are_current = true;
        Ok(updated)
    }

    fn launch_segments(
        &mut self,
        plan: &Plan,
        scope: RunScope,
        segments: &[Segment],
    ) -> Result<()> {
        let copies_were_current = std::mem::replace(&mut self.copies_are_current, false);
        if !copies_were_current {
            let copies = vec![(plan.first_run_only(), 0)];
            self.launch(plan, &copies, scope)?;
        }
        match probe::accepts_replays() {
            true => self.run_recorded(plan, scope, segments),
            false => self.launch_all(plan, scope, segments),
        }
    }

    /// Updates the addresses of all buffers. Discards what was recorded with other addresses.
    fn place(&mut self, plan: &Plan, tensors: &Tensors<'_>, controls: &Controls<'_>) -> Result<()> {
        let arena = self.arena.as_ref().map_or(0, start_of);
        let placed = self.device_pointers.as_ref();
        let is_unchanged = tensors.is_unchanged && placed.is_some_and(|old| old.arena == arena);
        if !is_unchanged {
            let mut device_pointers = DevicePointers::new(self, tensors)?;
            if let Some(old) = &self.device_pointers {
                device_pointers.arguments.clone_from(&old.arguments); // `place_arguments` updates these
            }
            if self.device_pointers.as_ref() != Some(&device_pointers) {
                self.recorded = Default::default();
                self.updates = None;
                self.copies_are_current = false;
            }
            self.device_pointers = Some(device_pointers);
        }
        let has_layout = |old: &Updates| is_unchanged && old.known.has_groups_of(controls);
        if let Some(device_pointers) = &self.device_pointers
            && !tensors.updates.is_empty()
            && !self.updates.as_ref().is_some_and(has_layout)
        {
            let known = OptimizerLayout::new(tensors.updates, controls)?;
            if self.updates.as_ref().is_none_or(|old| old.known != known) {
                self.updates = Some(Updates::new(&self.gpu, plan, device_pointers, known)?);
                self.recorded = Default::default();
            }
        }
        Ok(())
    }

    /// Updates the addresses of the arguments, which may change in each run. Discards what was recorded of this scope
    /// with other addresses.
    fn place_arguments(&mut self, tensors: &Tensors<'_>, scope: RunScope) -> Result<()> {
        let arguments = tensors.arguments.iter();
        let arguments = arguments.map(|x| Ok::<_, Error>(ops::elements(x)?.pointer));
        let arguments: Vec<u64> = arguments.collect::<Result<_>>()?;
        let place = scope as usize;
        if self.arguments[place] != arguments {
            self.recorded[place] = Recorded::Nothing;
        }
        if let Some(device_pointers) = &mut self.device_pointers {
            device_pointers.arguments.clone_from(&arguments);
        }
        self.arguments[place] = arguments;
        Ok(())
    }

    pub fn time_phases(&mut self, plan: &Plan, on: bool) {
        self.recorded = Default::default(); // it may have the wrong segments
        self.clock = on.then(|| PhaseClock::new(plan));
    }

    pub fn phase_times(&self) -> Result<Option<PhaseTimes>> {
        let event = |number: &usize| &self.events[*number];
        let ms = |from: &usize, to: &usize| Ok(f64::from(event(from).elapsed_ms(event(to)).w()?));
        self.clock
            .as_ref()
            .map_or(Ok(None), |clock| clock.times(ms))
    }

    /// Returns whether the update ran, from the result of clipping or of the overflow check.
    fn updated(&mut self, plan: &Plan, controls: &Controls<'_>) -> Result<bool> {
        let decides = |op: &Op| matches!(op, Op::ClipFactor { .. } | Op::CheckOverflow { .. });
        let Some(call) = plan.calls().iter().rev().find(|call| decides(&call.op)) else {
            return Ok(true);
        };
        let words: Vec<f64> = self.read(plan, call.writes.operand("factor"))?;
        let [norm, _, found] = words[..] else {
            return Ok(true);
        };
        // The word has two i32: whether the update was skipped, and the gradient that caused it.
        let (left_out, culprit) = (found.to_bits() as i32, (found.to_bits() >> 32) as i32);
        match (left_out, controls.loss_scale) {
            (0, _) => Ok(true),
            (_, Some(_)) => Ok(false),
            (_, None) => {
                let place = usize::try_from(culprit).ok();
                let number = place.and_then(|place| call.op.checked()?.get(place).copied());
                Err(not_finite(plan, number, norm))
            }
        }
    }

    pub fn refresh(&mut self) {
        self.copies_are_current = false;
    }
}

impl Executor {
    /// Reads an operand that the plan keeps after a run. Waits for the GPU.
    pub fn read<T: WithDType>(&mut self, plan: &Plan, operand: &BufferRange) -> Result<Vec<T>> {
        let buffer = plan.buffer_of(operand);
        assert_eq!(buffer.dtype, T::DTYPE, "{}", buffer.name);
        let mut values = vec![T::zero(); operand.elements.len()];
        let from = self.address_of(plan, operand);
        let stream = self.gpu.cuda_stream();
        stream.context().bind_to_thread().w()?;
        // SAFETY: the operand is within its buffer, and the buffer within the arena; the host waits before it reads.
        unsafe { memcpy_dtoh_async(&mut values, from, stream.cu_stream()) }.w()?;
        stream.synchronize().w()?;
        Ok(values)
    }

    /// Copies an operand that the plan keeps to a tensor on the model's device, on the model's stream, which has waited
    /// for the run.
    pub fn copy(&self, plan: &Plan, operand: &BufferRange, shape: &Shape) -> Result<Tensor> {
        let dtype = plan.buffer_of(operand).dtype;
        let elements = operand.elements.len();
        let target = ops::alloc_uninit(&self.model_gpu, dtype, elements)?;
        let to = ops::whole(&target)?.pointer;
        let (from, bytes) = (
            self.address_of(plan, operand),
            elements * dtype.size_in_bytes(),
        );
        // SAFETY: the operand is within its buffer, and the buffer within the arena; the target has the same size.
        unsafe { memcpy_dtod_async(to, from, bytes, self.stream.cu_stream()) }.w()?;
        Ok(ops::tensor(target, shape))
    }

    fn address_of(&self, plan: &Plan, operand: &BufferRange) -> u64 {
        let buffer = plan.buffer_of(operand);
        let Some(range) = buffer.arena_range() else {
            panic!("{} is not in the arena", buffer.name);
        };
        let first = operand.elements.start * buffer.dtype.size_in_bytes();
        let arena = self.arena.as_ref().map_or(0, start_of);
        arena + range.start + first as u64
    }
}

/// Checks that a GPU has this much memory left.
fn check_available(gpu: &CudaDevice, what: &str, bytes: u64) -> Result<()> {
    let on = Device::Cuda(gpu.clone());
    hardware::check_available(what, bytes, hardware::available_bytes_on(&on))
}

impl fmt::Debug for Executor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("cuda::Executor")
            .field("arena_bytes", &self.arena.as_ref().map(CudaSlice::len))
            .finish_non_exhaustive()
    }
}

/// An executor that is only dropped while no other thread creates, records or drops a stream. cuBLAS synchronises the
/// whole context when its handle is destroyed; the driver then visits all streams, and crashes if another thread frees
/// one.
pub(in crate::compile) struct SerializedDrop(ManuallyDrop<Executor>);

impl SerializedDrop {
    pub fn new(plan: &Plan, gpu: &CudaDevice) -> Result<Self> {
        Ok(Self(ManuallyDrop::new(Executor::new(plan, gpu)?)))
    }
}

impl Deref for SerializedDrop {
    type Target = Executor;

    fn deref(&self) -> &Executor {
        &self.0
    }
}

impl DerefMut for SerializedDrop {
    fn deref_mut(&mut self) -> &mut Executor {
        &mut self.0
    }
}

impl Drop for SerializedDrop {
    fn drop(&mut self) {
        let _lock = hardware::cuda::lock_captures();
        // SAFETY: it is not used afterwards.
        unsafe { ManuallyDrop::drop(&mut self.0) };
    }
}

impl fmt::Debug for SerializedDrop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&*self.0, f)
    }
}
