//! The memory of a CPU executor: the arena, and the address of every buffer of a plan.

use super::super::arena::ALIGNMENT_BYTES;
use super::super::buffer::{Buffer, Location};
use super::super::op::{BufferRange, Call};
use super::super::plan::Plan;
use crate::ops::lowering::{Slice, Slices, StepState};
use crate::{Error, Result, hardware};
use candle_core::WithDType;
use std::alloc::{Layout, alloc, dealloc};
use std::ptr::NonNull;

/// The alignment of large arenas: the size of a huge page on x86 and most other systems, so that the system can use
/// such pages.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// One allocation for all arena buffers of a plan.
#[derive(Debug)]
pub(super) struct Arena {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: plain memory, owned.
unsafe impl Send for Arena {}
// SAFETY: as above; writing takes `&mut`.
unsafe impl Sync for Arena {}

impl Arena {
    /// Allocates `bytes`, filled with zeros.
    fn new(bytes: u64) -> Result<Self> {
        let available_bytes = hardware::available_bytes().unwrap_or(u64::MAX);
        let refuse = || Error::OutOfMemory {
            what: "the arena of a planned step".into(),
            wanted_bytes: bytes,
            available_bytes,
        };
        // A system that overcommits would grant the allocation and kill the process on the first write.
        if bytes > available_bytes {
            return Err(refuse());
        }
        let align = match bytes < HUGE_PAGE_BYTES as u64 {
            true => ALIGNMENT_BYTES as usize,
            false => HUGE_PAGE_BYTES,
        };
        let size = usize::try_from(bytes).map_err(|_| refuse())?;
        let layout = Layout::from_size_align(size, align).map_err(|_| refuse())?;
        // SAFETY: the layout is not empty.
        let start = NonNull::new(unsafe { alloc(layout) }).ok_or_else(refuse)?;
        ask_for_huge_pages(start, layout); // before the first write, which fixes a page's size
        // SAFETY: the allocation has this size.
        unsafe { start.as_ptr().write_bytes(0, layout.size()) };
        Ok(Self { start, layout })
    }

    /// Returns the arena itself, or a larger one if it has fewer bytes. The old one is freed first.
    pub fn of_at_least(self, bytes: u64) -> Result<Self> {
        if self.layout.size() as u64 >= bytes {
            return Ok(self);
        }
        drop(self);
        Self::new(bytes)
    }
}

/// An empty arena, aligned for buffers without elements.
impl Default for Arena {
    fn default() -> Self {
        #[repr(align(64))]
        struct Aligned;
        Self {
            start: NonNull::<Aligned>::dangling().cast(),
            layout: Layout::new::<()>(),
        }
    }
}

impl Arena {
    /// Returns the elements of an operand in the arena, between runs.
    pub fn values<T: WithDType>(&self, plan: &Plan, operand: &BufferRange) -> &[T] {
        let buffer = plan.buffer_of(operand);
        let Some(range) = buffer.arena_range() else {
            panic!("{} is not in the arena", buffer.name);
        };
        assert_eq!(buffer.dtype, T::DTYPE, "{}", buffer.name);
        assert!(operand.elements.end <= buffer.elements(), "{}", buffer.name);
        assert!(range.end <= self.layout.size() as u64, "{}", buffer.name);
        // SAFETY: within the arena, which is initialised with zeros and only written through `&mut` by a run.
        unsafe {
            let start = self.start.as_ptr().add(range.start as usize).cast::<T>();
            std::slice::from_raw_parts(start.add(operand.elements.start), operand.elements.len())
        }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        if self.layout.size() > 0 {
            // SAFETY: allocated with this layout.
            unsafe { dealloc(self.start.as_ptr(), self.layout) };
        }
    }
}

/// Asks the system for huge pages, to have fewer TLB misses, and fewer page faults in the first run. The system may not
/// grant them.
#[cfg(target_os = "linux")]
fn ask_for_huge_pages(start: NonNull<u8>, layout: Layout) {
    if layout.align() == HUGE_PAGE_BYTES {
        let whole = layout.size() / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
        // SAFETY: pages of this allocation; their contents do not change.
        unsafe { libc::madvise(start.as_ptr().cast(), whole, libc::MADV_HUGEPAGE) };
    }
}

#[cfg(not(target_os = "linux"))]
fn ask_for_huge_pages(_start: NonNull<u8>, _layout: Layout) {}

/// Buffers outside of the arena, borrowed for one run.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ExternalBuffers<'a> {
    /// The bytes of each parameter; empty ones are not accessed.
    pub parameters: &'a [*mut [u8]],
    /// The bytes of the tensors of state, by parameter; none if another rank has them. Empty in a run without an
    /// update.
    pub states: &'a [&'a [*mut [u8]]],
    /// The bytes of the run's output, if it has one.
    pub output: Option<*mut [u8]>,
    /// The bytes of each argument, by index. Arguments that the run's calls do not read may be missing.
    pub arguments: &'a [*const [u8]],
}

impl ExternalBuffers<'_> {
    fn state(&self, parameter: usize, index: usize) -> *mut [u8] {
        let Some(state) = self.states[parameter].get(index) else {
            panic!("the state of parameter {parameter} is another rank's"); // `Step` has checked this
        };
        *state
    }
}

/// All buffers of a plan in one micro-batch.
pub(super) struct BufferView<'a> {
    plan: &'a Plan,
    arena: *mut u8,
    external: &'a ExternalBuffers<'a>,
    micro_batch: usize,
}

impl<'a> BufferView<'a> {
    pub fn new(plan: &'a Plan, arena: &'a mut Arena, external: &'a ExternalBuffers<'a>) -> Self {
        for buffer in plan.buffers() {
            check_sizes(buffer, external, plan.micro_batches());
        }
        assert!(plan.arena_bytes() <= arena.layout.size() as u64);
        Self {
            plan,
            arena: arena.start.as_ptr(),
            external,
            micro_batch: 0,
        }
    }

    /// Returns the same view for micro-batch `micro_batch`.
    pub fn of(&self, micro_batch: usize) -> Self {
        Self {
            micro_batch,
            ..*self
        }
    }

    pub fn micro_batch(&self) -> usize {
        self.micro_batch
    }

    fn start(&self, buffer: &Buffer) -> *mut u8 {
        let argument = |number: usize| self.external.arguments[number].cast_mut().cast::<u8>();
        match buffer.location {
            // SAFETY: the arena has the size that the plan needs.
            Location::Arena { offset_bytes } => unsafe { self.arena.add(offset_bytes as usize) },
            Location::Parameter(number) => self.external.parameters[number].cast(),
            Location::State { parameter, index } => self.external.state(parameter, index).cast(),
            Location::Table(number) => self.plan.tables()[number].as_ptr().cast_mut().cast(),
            Location::Output => self
                .external
                .output
                .map_or(std::ptr::null_mut(), |x| x.cast()),
            // SAFETY: it contains the inputs of all micro-batches.
            Location::Input(number) => unsafe {
                argument(number).add(self.micro_batch * buffer.bytes() as usize)
            },
            Location::Argument(number) => argument(number),
        }
    }

    /// Returns the operands of a call. The gradient of the loss is multiplied by `loss_gradient`. No other call may run
    /// at the same time.
    pub fn slices(&self, call: &Call, loss_gradient: f64) -> Slices<'a> {
        let slice = |operand: &BufferRange| {
            let buffer = self.plan.buffer_of(operand);
            assert!(operand.elements.end <= buffer.elements(), "{}", buffer.name);
            let first = operand.elements.start * buffer.dtype.size_in_bytes();
            // SAFETY: within the buffer, all of which is initialised. An operand that a call writes overlaps no other
            // operand of it (`Plan::check`), and nothing else uses the memory of a live buffer.
            unsafe {
                let start = self.start(buffer).add(first);
                Slice::new(start, operand.elements.len(), buffer.dtype)
            }
        };
        let step = StepState {
            micro_batch: self.micro_batch,
            loss_gradient,
        };
        Slices::new(step, call.reads.map(slice), &call.writes.map(slice))
    }
}

/// Asserts that a borrowed buffer has the planned size. The callers have already returned errors to the user.
fn check_sizes(buffer: &Buffer, external: &ExternalBuffers<'_>, micro_batches: usize) {
    let got = match buffer.location {
        Location::Arena { .. } | Location::Table(_) => return,
        Location::Parameter(number) => external.parameters[number].len(),
        Location::State { .. } if external.states.is_empty() => return,
        Location::State { parameter, index } => external.state(parameter, index).len(),
        Location::Output => external.output.map_or(0, |output| output.len()),
        Location::Input(number) => external.arguments[number].len() / micro_batches,
        Location::Argument(number) => match external.arguments.get(number) {
            None => return,
            Some(argument) => argument.len(),
        },
    };
    assert_eq!(got as u64, buffer.bytes(), "{}", buffer.name);
}
