//! Blocks of c by AArch64 dot products of pairs.
//!
//! With `bfdot`, the two products of a pair are added, and their sum is added to the element's, from zero over the
//! block's depth; the result is added to c. Both additions round to odd if they are inexact: to the neighbour whose
//! last bit is 1. That is the architecture's arithmetic with `FPCR.EBF` 0, the default of operating systems. The
//! rounding error is up to twice that of rounding to nearest, but an element has only half as many long sums as its
//! depth.
//!
//! This has been run only in an emulator, never on a processor, so its speed is unknown. The instruction is inline
//! assembly because the compiler has no intrinsic for it.

use super::tile::{Factors, PAIRS, SIDE, TILE, Tiles};
use half::bf16;
use std::arch::aarch64::{
    float32x4_t, uint16x8_t, vaddq_f32, vdupq_n_f32, vdupq_n_u16, vld1q_f32, vld1q_u16, vst1q_f32,
};
use std::arch::asm;

/// The number of rows whose sums are in registers at a time.
const ROWS: usize = 8;

/// The number of sum registers per row.
const REGISTERS: usize = 2;

/// The number of sums in a register, and of pairs.
const LANES: usize = 4;

/// Computes a block like [`Session::multiply`](super::unit::Session::multiply).
///
/// # Safety
/// The processor must have the bf16 instructions; the factors must be readable for their steps, and the sums writable.
#[target_feature(enable = "neon,bf16")]
pub(super) unsafe fn multiply(factors: Factors, tiles: Tiles, sums: *mut f32, adds: bool) {
    for row in (0..tiles.rows * SIDE).step_by(ROWS) {
        for column in (0..tiles.columns * SIDE).step_by(REGISTERS * LANES) {
            // SAFETY: the caller's promise; the rows and columns are the block's.
            unsafe { part(factors, [row, column], sums, adds) };
        }
    }
}

/// Computes [`ROWS`] rows of the block by [`REGISTERS`] registers, from a row and a column on.
///
/// # Safety
/// As [`multiply`].
#[inline]
#[target_feature(enable = "neon,bf16")]
unsafe fn part(factors: Factors, [row, column]: [usize; 2], sums: *mut f32, adds: bool) {
    let (a_panel, row) = (row / SIDE, row % SIDE);
    let (b_panel, column) = (column / SIDE, column % SIDE);
    // SAFETY: a part of this block's tiles.
    unsafe {
        let sums = sums.add((2 * a_panel + b_panel) * SIDE * SIDE + row * SIDE + column);
        let mut c = [[vdupq_n_f32(0.0); REGISTERS]; ROWS];
        let a = factors.a.add(a_panel * factors.a_panel + row * 2 * PAIRS);
        let b = factors.b.add(b_panel * factors.b_panel + 2 * column);
        for step in 0..factors.steps {
            for first in (0..PAIRS).step_by(LANES) {
                let a = a.add(step * TILE + 2 * first);
                let b = b.add(step * TILE + first * 2 * SIDE);
                let mut rows = [vdupq_n_u16(0); ROWS]; // LANES pairs per row
                for (r, pairs) in rows.iter_mut().enumerate() {
                    *pairs = pairs_at(a.add(r * 2 * PAIRS));
                }
                add_pair::<0>(&mut c, rows, b);
                add_pair::<1>(&mut c, rows, b.add(2 * SIDE));
                add_pair::<2>(&mut c, rows, b.add(2 * 2 * SIDE));
                add_pair::<3>(&mut c, rows, b.add(3 * 2 * SIDE));
            }
        }
        for (r, c) in c.into_iter().enumerate() {
            for (n, mut c) in c.into_iter().enumerate() {
                let at = sums.add(r * SIDE + n * LANES);
                if adds {
                    c = vaddq_f32(c, vld1q_f32(at));
                }
                vst1q_f32(at, c);
            }
        }
    }
}

/// Adds to each row of c its pair `LANE` times the columns' pairs at `b`.
///
/// # Safety
/// As [`multiply`]; the columns' pairs must be readable.
#[inline]
#[target_feature(enable = "neon,bf16")]
unsafe fn add_pair<const LANE: usize>(
    c: &mut [[float32x4_t; REGISTERS]; ROWS],
    rows: [uint16x8_t; ROWS],
    b: *const bf16,
) {
    for n in 0..REGISTERS {
        // SAFETY: the caller's promise.
        let columns = unsafe { pairs_at(b.add(n * 2 * LANES)) };
        for (c, row) in c.iter_mut().zip(rows) {
            // SAFETY: the processor has the instruction, which changes only its register.
            unsafe {
                asm!("bfdot {c:v}.4s, {columns:v}.8h, {row:v}.2h[{lane}]", c = inout(vreg) c[n],
                    columns = in(vreg) columns, row = in(vreg) row, lane = const LANE,
                    options(pure, nomem, nostack, preserves_flags));
            }
        }
    }
}

/// Loads [`LANES`] pairs.
///
/// # Safety
/// They must be readable.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn pairs_at(at: *const bf16) -> uint16x8_t {
    // SAFETY: the caller's promise; bf16 has the size and alignment of u16.
    unsafe { vld1q_u16(at.cast()) }
}
