//! Bit-exact emulation of the bf16 instructions in plain code: for tests of the instructions on processors that have
//! them, and as their substitute on others.

use super::tile::{Factors, PAIRS, SIDE, TILE, Tiles};
use half::bf16;

/// The emulated instruction set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Emulated {
    Amx,
    Avx512,
    Neon,
}

impl Emulated {
    /// Computes a block like [`amx::multiply`](super::amx::multiply).
    ///
    /// # Safety
    /// The factors must be readable for their steps, and the sums writable.
    pub(super) unsafe fn multiply(
        self,
        factors: Factors,
        tiles: Tiles,
        sums: *mut f32,
        adds: bool,
    ) {
        for (i, j) in (0..tiles.rows).flat_map(|i| (0..tiles.columns).map(move |j| (i, j))) {
            // SAFETY: the caller's promise.
            let (a, b, c) = unsafe {
                let a = factors.a.add(i * factors.a_panel);
                let b = factors.b.add(j * factors.b_panel);
                let sums = sums.add((2 * i + j) * SIDE * SIDE);
                (
                    std::slice::from_raw_parts(a, factors.steps * TILE),
                    std::slice::from_raw_parts(b, factors.steps * TILE),
                    std::slice::from_raw_parts_mut(sums, SIDE * SIDE),
                )
            };
            let before = c.to_vec();
            // AMX accumulates onto the existing sums; the others sum from zero and add the result.
            if !adds || self != Self::Amx {
                c.fill(0.0);
            }
            for (a, b) in a.chunks_exact(TILE).zip(b.chunks_exact(TILE)) {
                self.tile(a, b, c);
            }
            if adds && self != Self::Amx {
                for (c, before) in c.iter_mut().zip(before) {
                    *c += before;
                }
            }
        }
    }

    /// Emulates one AMX instruction, or the sixteen dot products per element that are equivalent: a (SIDE, PAIRS, 2), b
    /// (PAIRS, SIDE, 2), c (SIDE, SIDE).
    pub fn tile(self, a: &[bf16], b: &[bf16], c: &mut [f32]) {
        for (i, c) in c.iter_mut().enumerate() {
            let (row, column) = (i / SIDE, i % SIDE);
            let pair = |pair: usize| {
                let (a, b) = (2 * (row * PAIRS + pair), 2 * (pair * SIDE + column));
                [0, 1].map(|half| [a + half, b + half])
            };
            let factors = |[x, y]: [usize; 2]| [a[x], b[y]].map(|x| flushed(x.to_f32()));
            let multiply_add = |sum: f32, at| {
                let [x, y] = factors(at);
                flushed(x.mul_add(y, flushed(sum)))
            };
            let multiply = |at| {
                let [x, y] = factors(at);
                flushed(x * y) // exact except for flushing: 16 significant bits
            };
            match self {
                Self::Amx => {
                    let [mut even, mut odd] = [0.0; 2];
                    for [first, second] in (0..PAIRS).map(pair) {
                        even = multiply_add(even, first);
                        odd = multiply_add(odd, second);
                    }
                    *c = flushed(flushed(*c) + flushed(even + odd));
                }
                Self::Avx512 => {
                    for [first, second] in (0..PAIRS).map(pair) {
                        *c = multiply_add(multiply_add(*c, second), first);
                    }
                }
                Self::Neon => {
                    for [first, second] in (0..PAIRS).map(pair) {
                        *c = to_odd(*c, to_odd(multiply(first), multiply(second)));
                    }
                }
            }
        }
    }
}

/// Returns `x + y` for finite numbers, rounded to odd: an inexact sum becomes the neighbour whose last bit is 1.
fn to_odd(x: f32, y: f32) -> f32 {
    let [x, y] = [x, y].map(flushed);
    let nearest = x + y;
    if !(x.is_finite() && y.is_finite()) {
        return nearest;
    }
    // The exact rounding error (Knuth's two-sum).
    let of_y = nearest - x;
    let rest = (x - (nearest - of_y)) + (y - of_y);
    let is_even = nearest.to_bits().is_multiple_of(2);
    flushed(match is_even && rest != 0.0 {
        true if rest > 0.0 => nearest.next_up(),
        true => nearest.next_down(),
        false => nearest,
    })
}

/// Returns x, or zero of the same sign if x is denormal.
fn flushed(x: f32) -> f32 {
    match x.is_subnormal() {
        true => 0f32.copysign(x),
        false => x,
    }
}
