//! Where a thread packs blocks of the factors.

use super::matrix::{MatMut, MatRef};
use super::panels;
use super::threads::Threads;
use crate::kernels::cpu::Lanes;
use gemm_common::cache::CACHE_INFO;
use std::cell::{Cell, RefCell};
use std::collections::TryReserveError;
use std::sync::{Mutex, PoisonError};

/// A cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// What a thread keeps from its first product on: blocks of both factors.
pub(super) const FACTOR_BYTES: usize = 3 << 18;

/// What it keeps from its first product on whose sums are rounded in the end: a block of sums beside.
pub(super) const ROUNDED_BYTES: usize = FACTOR_BYTES + (7 << 18);

thread_local! {
    /// What a thread packs into: kept, since fresh memory costs a page fault for every 4 KiB.
    static SCRATCH: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
    /// The bytes that this thread and all threads of its pool have reserved.
    static RESERVED: Cell<usize> = const { Cell::new(0) };
}

/// Calls `f` with `count` elements of the thread's scratch, with whatever they hold, aligned to cache lines.
///
/// It comes in two sizes, so that what a process has taken does not depend on which thread met which product.
pub(super) fn with_scratch<W: Lanes>(count: usize, f: impl FnOnce(&mut [W])) {
    let bytes = count * size_of::<W>();
    let kept = [FACTOR_BYTES, ROUNDED_BYTES];
    let kept = kept.into_iter().find(|kept| bytes <= *kept);
    debug_assert!(kept.is_some(), "a block of {bytes} bytes");
    let mut lines = SCRATCH.take();
    if grow(&mut lines, kept.unwrap_or(bytes)).is_err() {
        std::alloc::handle_alloc_error(std::alloc::Layout::new::<[u8; ROUNDED_BYTES]>());
    }
    // SAFETY: initialised bytes, aligned and enough; any bytes make a float.
    let scratch = unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), count) };
    f(scratch);
    SCRATCH.set(lines);
}

/// Makes this thread and all of the current pool allocate their scratch, unless they have, so that no product does
/// it later, where a refused allocation would abort the process. `rounds` where c is in half precision.
///
/// # Errors
/// A thread whose scratch is not granted.
pub fn reserve_scratch(rounds: bool) -> Result<(), TryReserveError> {
    let bytes = kept_bytes(rounds);
    if RESERVED.get() >= bytes {
        return Ok(());
    }
    let reserve = || {
        SCRATCH.with_borrow_mut(|lines| grow(lines, bytes))?;
        reserve_of_gemm_crate()
    };
    let own = reserve();
    let reserved = rayon::broadcast(|_| reserve())
        .into_iter()
        .fold(own, Result::and);
    if reserved.is_ok() {
        RESERVED.set(bytes);
    }
    reserved
}

/// The `gemm` crate's threads keep a buffer too, from the first product on whose left factor it packs block by block:
/// here one of the two, whichever factor it takes for the left. It aborts where that is refused, so we ask before, one
/// thread at a time.
fn reserve_of_gemm_crate() -> Result<(), TryReserveError> {
    const SIDE: usize = 32;
    static ASKING: Mutex<()> = Mutex::new(());
    let _asking = ASKING.lock().unwrap_or_else(PoisonError::into_inner);
    let mut asked = Vec::<u8>::new();
    asked.try_reserve_exact(slab_bytes())?;
    drop(std::hint::black_box(asked)); // or the compiler leaves the allocation out
    let (x, mut y) = ([0f32; SIDE * SIDE], [0f32; SIDE * SIDE]);
    let x = MatRef::new(&x, SIDE, SIDE);
    for x in [x, x.t()] {
        let y = MatMut::new(&mut y, SIDE, SIDE);
        panels::product(x, x, y, false, Threads::One);
    }
    Ok(())
}

/// The buffer that a thread of the `gemm` crate keeps.
fn slab_bytes() -> usize {
    CACHE_INFO[1].cache_bytes // its level 2 cache
}

/// How much [`reserve_scratch`] takes in all.
pub fn scratch_bytes(rounds: bool) -> usize {
    (kept_bytes(rounds) + slab_bytes()) * (rayon::current_num_threads() + 1)
}

fn kept_bytes(rounds: bool) -> usize {
    if rounds { ROUNDED_BYTES } else { FACTOR_BYTES }
}

fn grow(lines: &mut Vec<Line>, bytes: usize) -> Result<(), TryReserveError> {
    let needed = bytes.div_ceil(size_of::<Line>());
    if lines.len() < needed {
        *lines = Vec::new(); // nothing in it is wanted: the old goes before the new comes
        lines.try_reserve_exact(needed)?;
        lines.resize(needed, Line([0; 64]));
    }
    Ok(())
}
