//! Blocks of c by dot products of pairs, on AArch64.
//!
//! `bfdot`: each pair's products are added, then their sum to the element of c's, from zero over the block's depth,
//! which is added to c. Both additions round to odd where they are inexact: to the neighbour whose last place is 1.
//! That is the architecture's arithmetic where `FPCR.EBF` is 0, as systems leave it. An error so rounded is up to twice
//! that of rounding to the nearest, but an element takes only half as many long sums as its depth.
//!
//! This has not been run on a processor, only in an emulator of one, which says nothing about its speed. The
//! instruction is written in assembly, for the compiler has no function for it.

use super::tile::{Factors, PAIRS, SIDE, TILE, Tiles};
use half::bf16;
use std::arch::aarch64::{
    float32x4_t, uint16x8_t, vaddq_f32, vdupq_n_f32, vdupq_n_u16, vld1q_f32, vld1q_u16, vst1q_f32,
};
use std::arch::asm;

/// Rows whose sums are in registers at a time.
const ROWS: usize = 8;

/// Registers of sums side by side.
const REGISTERS: usize = 2;

/// Sums of a register, and pairs of one.
const LANES: usize = 4;

/// As [`Session::multiply`](super::unit::Session::multiply).
///
/// # Safety
/// The processor has bf16's instructions; the factors are readable for their steps, and the sums writable.
#[target_feature(enable = "neon,bf16")]
pub(super) unsafe fn multiply(factors: Factors, tiles: Tiles, sums: *mut f32, adds: bool) {
    for row in (0..tiles.rows * SIDE).step_by(ROWS) {
        for column in (0..tiles.columns * SIDE).step_by(REGISTERS * LANES) {
            // SAFETY: the caller's promise; the rows and columns are the block's.
            unsafe { part(factors, [row, column], sums, adds) };
        }
    }
}

/// [`ROWS`] rows of the block by [`REGISTERS`] registers, from a row and a column.
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
                let mut rows = [vdupq_n_u16(0); ROWS]; // LANES pairs of each
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

/// To each row of c its pair `LANE` times the columns' pairs at `b`.
///
/// # Safety
/// As [`multiply`]: the columns' pairs are readable.
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
            // SAFETY: the processor has the instruction, which changes nothing but its register.
            unsafe {
                asm!("bfdot {c:v}.4s, {columns:v}.8h, {row:v}.2h[{lane}]", c = inout(vreg) c[n],
                    columns = in(vreg) columns, row = in(vreg) row, lane = const LANE,
                    options(pure, nomem, nostack, preserves_flags));
            }
        }
    }
}

/// [`LANES`] pairs.
///
/// # Safety
/// They are readable.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn pairs_at(at: *const bf16) -> uint16x8_t {
    // SAFETY: the caller's promise; the bits of bf16 are a u16.
    unsafe { vld1q_u16(at.cast()) }
}
