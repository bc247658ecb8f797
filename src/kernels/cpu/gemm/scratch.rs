//! Per-thread scratch for packing blocks of the factors.

use super::matrix::{MatMut, MatRef};
use super::panels;
use super::threads::Threads;
use crate::kernels::cpu::Lanes;
use gemm_common::cache::CACHE_INFO;
use std::cell::{Cell, RefCell};
use std::collections::TryReserveError;
use std::sync::{Mutex, PoisonError};

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// The bytes of scratch that a thread keeps from its first matmul on: blocks of both factors.
pub(super) const FACTOR_BYTES: usize = 3 << 18;

/// The bytes of scratch that a thread keeps from its first matmul with rounded sums on: the factors and a block of
/// sums.
pub(super) const ROUNDED_BYTES: usize = FACTOR_BYTES + (7 << 18);

thread_local! {
    /// The packing buffer of the thread. It is kept because fresh memory costs a page fault per 4 KiB.
    static SCRATCH: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
    /// The bytes that this thread and all threads of its pool have reserved.
    static RESERVED: Cell<usize> = const { Cell::new(0) };
}

/// Calls `f` with `count` elements of the thread's scratch, with arbitrary contents, aligned to cache lines.
///
/// Scratch has one of two sizes, so that the memory of a process does not depend on which thread ran which matmul.
pub(super) fn with_scratch<W: Lanes>(count: usize, f: impl FnOnce(&mut [W])) {
    let bytes = count * size_of::<W>();
    let kept = [FACTOR_BYTES, ROUNDED_BYTES];
    let kept = kept.into_iter().find(|kept| bytes <= *kept);
    debug_assert!(kept.is_some(), "a block of {bytes} bytes");
    let mut lines = SCRATCH.take();
    if grow(&mut lines, kept.unwrap_or(bytes)).is_err() {
        std::alloc::handle_alloc_error(std::alloc::Layout::new::<[u8; ROUNDED_BYTES]>());
    }
    // SAFETY: initialised bytes, aligned and enough; every bit pattern is a valid float.
    let scratch = unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), count) };
    f(scratch);
    SCRATCH.set(lines);
}

/// Allocates the scratch of this thread and of all threads of the current pool, unless they have it. Otherwise a matmul
/// would allocate it later, where a failed allocation aborts the process. `rounds` is set if c is in half precision.
///
/// # Errors
/// An allocation of a thread's scratch that fails.
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

/// Makes the `gemm` crate allocate the buffer that each of its threads keeps from the first matmul on whose left factor
/// it packs block by block; which factor is its left one varies, so both are tried. The crate aborts if that allocation
/// fails, so the same amount is allocated first as a test, one thread at a time.
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
        panels::matmul(x, x, y, false, Threads::One);
    }
    Ok(())
}

/// Returns the bytes of the buffer that a thread of the `gemm` crate keeps.
fn slab_bytes() -> usize {
    CACHE_INFO[1].cache_bytes // its level 2 cache
}

/// Returns the bytes that [`reserve_scratch`] allocates in total.
pub fn scratch_bytes(rounds: bool) -> usize {
    (kept_bytes(rounds) + slab_bytes()) * (rayon::current_num_threads() + 1)
}

fn kept_bytes(rounds: bool) -> usize {
    if rounds { ROUNDED_BYTES } else { FACTOR_BYTES }
}

fn grow(lines: &mut Vec<Line>, bytes: usize) -> Result<(), TryReserveError> {
    let needed = bytes.div_ceil(size_of::<Line>());
    if lines.len() < needed {
        *lines = Vec::new(); // the contents are not needed: free the old buffer before allocating the new one
        lines.try_reserve_exact(needed)?;
        lines.resize(needed, Line([0; 64]));
    }
    Ok(())
}
