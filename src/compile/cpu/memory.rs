//! The executor's memory: the arena, and where every buffer of a plan begins.

use super::super::arena::ALIGNMENT_BYTES;
use super::super::buffer::{Buffer, Location};
use super::super::plan::{BufferRange, Call, Plan};
use crate::ops::lowering::{Slice, Slices, StepState};
use crate::{Error, Result, hardware};
use candle_core::WithDType;
use std::alloc::{Layout, alloc, dealloc};
use std::ptr::NonNull;

/// Where an arena begins: a huge page of x86 and of most others, so that the system can back it with such pages.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// One allocation for all of a plan's own buffers.
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
    /// Room for `bytes`, zeros at first.
    fn new(bytes: u64) -> Result<Self> {
        let available_bytes = hardware::available_bytes().unwrap_or(u64::MAX);
        let refuse = || Error::OutOfMemory {
            what: "the arena of a planned step".into(),
            wanted_bytes: bytes,
            available_bytes,
        };
        // A system that overcommits would grant it, and kill the process when it is written.
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
        ask_for_huge_pages(start, layout); // before anything is written: a page stays what it was first touched as
        // SAFETY: so many bytes are ours.
        unsafe { start.as_ptr().write_bytes(0, layout.size()) };
        Ok(Self { start, layout })
    }

    /// The arena itself, or a larger one where it has fewer bytes. Never are both there.
    pub fn of_at_least(self, bytes: u64) -> Result<Self> {
        if self.layout.size() as u64 >= bytes {
            return Ok(self);
        }
        drop(self);
        Self::new(bytes)
    }
}

/// One without room, at a place that any buffer of no elements may have.
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
    /// The elements of an operand of the arena, between runs.
    pub fn values<T: WithDType>(&self, plan: &Plan, operand: &BufferRange) -> &[T] {
        let buffer = plan.buffer_of(operand);
        let Some(range) = buffer.arena_range() else {
            panic!("{} is not in the arena", buffer.name);
        };
        assert_eq!(buffer.dtype, T::DTYPE, "{}", buffer.name);
        assert!(operand.elements.end <= buffer.elements(), "{}", buffer.name);
        assert!(range.end <= self.layout.size() as u64, "{}", buffer.name);
        // SAFETY: within the arena, which began as zeros, and which a run writes through `&mut` alone.
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

/// Fewer translations to miss, and fewer page faults in the first run. A wish: the system may not grant it.
#[cfg(target_os = "linux")]
fn ask_for_huge_pages(start: NonNull<u8>, layout: Layout) {
    if layout.align() == HUGE_PAGE_BYTES {
        let whole = layout.size() / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
        // SAFETY: pages of our own; what they hold stays.
        unsafe { libc::madvise(start.as_ptr().cast(), whole, libc::MADV_HUGEPAGE) };
    }
}

#[cfg(not(target_os = "linux"))]
fn ask_for_huge_pages(_start: NonNull<u8>, _layout: Layout) {}

/// What lies outside of the arena, lent for one run.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ExternalBuffers<'a> {
    /// The bytes of each parameter; empty ones are not touched.
    pub parameters: &'a [*mut [u8]],
    /// exp_avg and exp_avg_sq by parameter, none where another rank has them; empty in a run without an update.
    pub moments: &'a [Option<[*mut [u8]; 2]>],
    /// The bytes of what the run gives out, if it does.
    pub output: Option<*mut [u8]>,
    /// The bytes of each, by number; those that the run's calls do not read may be missing.
    pub arguments: &'a [*const [u8]],
}

impl ExternalBuffers<'_> {
    fn moment(&self, number: usize, which: usize) -> *mut [u8] {
        let Some(moments) = self.moments[number] else {
            panic!("the state of parameter {number} is another rank's"); // `Step` has compared
        };
        moments[which]
    }
}

/// Every buffer of a plan in one micro-batch.
pub(super) struct View<'a> {
    plan: &'a Plan,
    arena: *mut u8,
    lent: &'a ExternalBuffers<'a>,
    micro_batch: usize,
}

impl<'a> View<'a> {
    pub fn new(plan: &'a Plan, arena: &'a mut Arena, lent: &'a ExternalBuffers<'a>) -> Self {
        for buffer in plan.buffers() {
            check_lent(buffer, lent, plan.micro_batches());
        }
        assert!(plan.peak_bytes() <= arena.layout.size() as u64);
        Self {
            plan,
            arena: arena.start.as_ptr(),
            lent,
            micro_batch: 0,
        }
    }

    /// The same, as micro-batch `micro_batch` sees it.
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
        let argument = |number: usize| self.lent.arguments[number].cast_mut().cast::<u8>();
        match buffer.location {
            // SAFETY: the arena is as large as the plan wants it.
            Location::Arena { offset_bytes } => unsafe { self.arena.add(offset_bytes as usize) },
            Location::Parameter(number) => self.lent.parameters[number].cast(),
            Location::ExpAvg(number) => self.lent.moment(number, 0).cast(),
            Location::ExpAvgSq(number) => self.lent.moment(number, 1).cast(),
            Location::Table(number) => self.plan.tables()[number].as_ptr().cast_mut().cast(),
            Location::Output => self.lent.output.map_or(std::ptr::null_mut(), |x| x.cast()),
            // SAFETY: it has the parts of all micro-batches.
            Location::Input(number) => unsafe {
                argument(number).add(self.micro_batch * buffer.bytes() as usize)
            },
            Location::Argument(number) => argument(number),
        }
    }

    /// The operands of a call that is run alone, where the gradient of the loss is multiplied by `loss_gradient`.
    pub fn slices(&self, call: &Call, loss_gradient: f64) -> Slices<'a> {
        let slice = |operand: &BufferRange| {
            let buffer = self.plan.buffer_of(operand);
            assert!(operand.elements.end <= buffer.elements(), "{}", buffer.name);
            let first = operand.elements.start * buffer.dtype.size_in_bytes();
            // SAFETY: within the buffer, all of which is initialised; what a call writes is no other operand of it
            // (`Plan::check`), and nothing else uses the memory of a buffer that is alive.
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

/// What a caller lends is what the plan was made for; the callers have checked, and said so to the user.
fn check_lent(buffer: &Buffer, lent: &ExternalBuffers<'_>, micro_batches: usize) {
    let got = match buffer.location {
        Location::Arena { .. } | Location::Table(_) => return,
        Location::Parameter(number) => lent.parameters[number].len(),
        Location::ExpAvg(_) | Location::ExpAvgSq(_) if lent.moments.is_empty() => return,
        Location::ExpAvg(number) => lent.moment(number, 0).len(),
        Location::ExpAvgSq(number) => lent.moment(number, 1).len(),
        Location::Output => lent.output.map_or(0, |output| output.len()),
        Location::Input(number) => lent.arguments[number].len() / micro_batches,
        Location::Argument(number) => match lent.arguments.get(number) {
            None => return,
            Some(argument) => argument.len(),
        },
    };
    assert_eq!(got as u64, buffer.bytes(), "{}", buffer.name);
}
