//! The SwiGLU gate: y = silu(gate) * up, silu(g) = g / (1 + exp(-g)).
//!
//! The exponentials are taken on registers, as attention's are: they are most of the arithmetic, and in half precision,
//! with half the bytes to wait for, arithmetic is the bound.

use super::parallel::{self, Shared};
use super::{Blocks, Lanes, Real, Stored, simd::BLOCK};
use pulp::{Arch, Simd, WithSimd};

/// `y = silu(gate) * up`, elementwise.
pub fn forward<T: Stored>(gate: &[T], up: &[T], y: &mut [T]) {
    parallel::for_rows(y, 1, |first, y| {
        let range = first..first + y.len();
        let (gate, up) = (&gate[range.clone()], &up[range]);
        Arch::new().dispatch(Forward { gate, up, y });
    });
}

/// With s = sigmoid(gate): `dgate = dy up s (1 + gate (1 - s))`, `dup = dy gate s`.
pub fn backward<T: Stored>(dy: &[T], gate: &[T], up: &[T], dgate: &mut [T], dup: &mut [T]) {
    parallel::for_rows2(dgate, 1, dup, 1, |first, dgate, dup| {
        let range = first..first + dgate.len();
        let (dy, gate, up) = (&dy[range.clone()], &gate[range.clone()], &up[range]);
        Arch::new().dispatch(Backward {
            dy,
            gate,
            up,
            dgate,
            dup,
        });
    });
}

/// [`backward`] and [`forward`] in one go and in place: `dy` becomes y, `gate` dgate, `up` dup. What forward made need
/// not be kept for the product that follows it.
pub fn backward_in_place<T: Stored>(dy: &mut [T], gate: &mut [T], up: &mut [T]) {
    let up = Shared::new(up);
    parallel::for_rows2(dy, 1, gate, 1, |first, dy, gate| {
        // SAFETY: the rows of this task, as those of dy and gate.
        let up = unsafe { up.range(first, dy.len()) };
        Arch::new().dispatch(InPlace { dy, gate, up });
    });
}

struct InPlace<'a, T> {
    dy: &'a mut [T],
    gate: &'a mut [T],
    up: &'a mut [T],
}

impl<T: Stored> WithSimd for InPlace<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let mut e = [T::Wide::ZERO; BLOCK];
        let mut buffers = [[T::Wide::ZERO; BLOCK]; 3];
        let blocks = self.gate.chunks_mut(BLOCK).zip(self.up.chunks_mut(BLOCK));
        for (dy, (gate, up)) in self.dy.chunks_mut(BLOCK).zip(blocks) {
            let e = &mut e[..gate.len()];
            if T::as_wide(&[]).is_some() {
                // Some for one slice is Some for all: never the empty ones.
                let [dy, gate, up] = [dy, gate, up].map(|x| T::as_wide_mut(x).unwrap_or_default());
                in_place_block(simd, dy, gate, up, e);
                continue;
            }
            let [wide_dy, wide_gate, wide_up] = buffers.each_mut().map(|x| &mut x[..e.len()]);
            T::load(dy, wide_dy);
            T::load(gate, wide_gate);
            T::load(up, wide_up);
            in_place_block(simd, wide_dy, wide_gate, wide_up, e);
            T::store(wide_dy, dy);
            T::store(wide_gate, gate);
            T::store(wide_up, up);
        }
    }
}

/// One block of [`backward_in_place`]; `e` is to work in.
#[inline(always)]
fn in_place_block<S: Simd, T: Lanes>(
    simd: S,
    dy: &mut [T],
    gate: &mut [T],
    up: &mut [T],
    e: &mut [T],
) {
    exp_negated(simd, gate, e);
    let inputs = gate.iter_mut().zip(up).zip(e.iter());
    for (dy, ((gate, up), e)) in dy.iter_mut().zip(inputs) {
        let (d, g, u) = (*dy, *gate, *up);
        let s = T::ONE / (T::ONE + *e);
        *dy = g * s * u;
        *gate = d * u * s * (T::ONE + g * (T::ONE - s));
        *up = d * g * s;
    }
}

struct Forward<'a, T> {
    gate: &'a [T],
    up: &'a [T],
    y: &'a mut [T],
}

impl<T: Stored> WithSimd for Forward<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        Blocks::<T, 2, 1>::new().each(
            [self.gate, self.up],
            [self.y],
            #[inline(always)]
            |_, [gate, up], [y]| {
                let inputs = gate.chunks(BLOCK).zip(up.chunks(BLOCK));
                for (y, (gate, up)) in y.chunks_mut(BLOCK).zip(inputs) {
                    exp_negated(simd, gate, y);
                    for ((y, g), u) in y.iter_mut().zip(gate).zip(up) {
                        *y = *g / (T::Wide::ONE + *y) * *u;
                    }
                }
            },
        );
    }
}

struct Backward<'a, T> {
    dy: &'a [T],
    gate: &'a [T],
    up: &'a [T],
    dgate: &'a mut [T],
    dup: &'a mut [T],
}

impl<T: Stored> WithSimd for Backward<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        Blocks::<T, 3, 2>::new().each(
            [self.dy, self.gate, self.up],
            [self.dgate, self.dup],
            #[inline(always)]
            |_, [dy, gate, up], [dgate, dup]| {
                let inputs = gate.chunks(BLOCK).zip(up.chunks(BLOCK));
                let inputs = dy.chunks(BLOCK).zip(inputs);
                let outputs = dgate.chunks_mut(BLOCK).zip(dup.chunks_mut(BLOCK));
                for ((dgate, dup), (dy, (gate, up))) in outputs.zip(inputs) {
                    exp_negated(simd, gate, dup);
                    let outputs = dgate.iter_mut().zip(dup);
                    for ((((dg, du), dy), g), u) in outputs.zip(dy).zip(gate).zip(up) {
                        let s = T::Wide::ONE / (T::Wide::ONE + *du);
                        *dg = *dy * *u * s * (T::Wide::ONE + *g * (T::Wide::ONE - s));
                        *du = *dy * *g * s;
                    }
                }
            },
        );
    }
}

/// `e = exp(-x)`; slices of one length.
#[inline(always)]
fn exp_negated<T: Lanes, S: Simd>(simd: S, x: &[T], e: &mut [T]) {
    const WIDEST: usize = 16;

    let lanes = T::lanes::<S>();
    assert!(x.len() == e.len() && lanes <= WIDEST);
    let whole = x.len() - x.len() % lanes;
    let ((x, x_rest), (e, e_rest)) = (x.split_at(whole), e.split_at_mut(whole));
    for (x, e) in x.chunks_exact(lanes).zip(e.chunks_exact_mut(lanes)) {
        // SAFETY: a whole register on either side.
        unsafe {
            let x = T::vload::<S>(x.as_ptr());
            T::vstore::<S>(e.as_mut_ptr(), exp_of_minus::<T, S>(simd, x));
        }
    }
    if !x_rest.is_empty() {
        let mut last = [T::ZERO; WIDEST];
        last[..x_rest.len()].copy_from_slice(x_rest);
        // SAFETY: the array holds a register, as asserted above.
        unsafe {
            let x = T::vload::<S>(last.as_ptr());
            T::vstore::<S>(last.as_mut_ptr(), exp_of_minus::<T, S>(simd, x));
        }
        e_rest.copy_from_slice(&last[..e_rest.len()]);
    }
}

/// `exp(-x)`, infinite from x = -88 down, where [`Lanes::vexp`] ends.
#[inline(always)]
fn exp_of_minus<T: Lanes, S: Simd>(simd: S, x: T::Register<S>) -> T::Register<S> {
    let power = T::vsub(simd, T::vsplat(simd, T::ZERO), x);
    let e = T::vexp(simd, power);
    let highest = T::vsplat(simd, T::real(88.0));
    let infinity = T::vsplat(simd, -T::NEG_INFINITY);
    T::vselect_at_most(simd, highest, power, infinity, e)
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    /// In place is forward and backward, for every length of blocks; forward's own last place may differ.
    fn in_place_is_both<T: Stored>(rounding: f64) {
        for n in [1, 511, 513, 1700] {
            let wave = |phase: f64| -> Vec<T> {
                let value = |i: usize| T::from_f64((i as f64 * 0.37 + phase).sin() * 4.0);
                (0..n).map(value).collect()
            };
            let (dy, gate, up) = (wave(0.0), wave(1.0), wave(2.0));
            let nothing = || vec![T::zero(); n];
            let (mut y, mut dgate, mut dup) = (nothing(), nothing(), nothing());
            forward(&gate, &up, &mut y);
            backward(&dy, &gate, &up, &mut dgate, &mut dup);
            let (mut got_y, mut got_dgate, mut got_dup) = (dy, gate, up);
            backward_in_place(&mut got_y, &mut got_dgate, &mut got_dup);
            assert!(got_dgate == dgate && got_dup == dup, "{n}");
            for (got, wanted) in got_y.iter().zip(&y) {
                let (got, wanted) = (got.to_f64(), wanted.to_f64());
                assert!(
                    (got - wanted).abs() <= rounding * wanted.abs(),
                    "{got} {wanted}"
                );
            }
        }
    }

    #[test]
    fn in_place_of_every_type() {
        in_place_is_both::<f32>(1e-6);
        in_place_is_both::<f64>(1e-15);
        in_place_is_both::<bf16>(2f64.powi(-7));
        in_place_is_both::<f16>(2f64.powi(-10));
    }
}
