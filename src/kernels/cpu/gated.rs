//! Gated activations: y = f(gate) * up, with f SiLU or GELU.
//!
//! Each f(g) is g times a factor that is computed from one exponential. The exponentials run on SIMD registers, as in
//! attention: they are most of the arithmetic, and half precision, which moves half the bytes, is compute-bound.

use super::activation::{CUBE, SLOPE, density, twice_u_slope};
use super::parallel::{self, Shared};
use super::{Blocks, Lanes, Real, Stored, simd::BLOCK};
use crate::kernels::Gate;
use pulp::{Arch, Simd, WithSimd};
use std::marker::PhantomData;

/// Computes `y = f(gate) * up`, elementwise.
pub fn forward<T: Stored>(f: Gate, gate: &[T], up: &[T], y: &mut [T]) {
    parallel::for_rows(y, 1, |first, y| {
        let range = first..first + y.len();
        let (gate, up) = (&gate[range.clone()], &up[range]);
        with_gate!(f, F => Arch::new().dispatch(Forward::<T, F> { gate, up, y, f: PhantomData }));
    });
}

/// `dgate = dy up f'(gate)`, `dup = dy f(gate)`.
pub fn backward<T: Stored>(f: Gate, [dy, gate, up]: [&[T]; 3], dgate: &mut [T], dup: &mut [T]) {
    parallel::for_rows2(dgate, 1, dup, 1, |first, dgate, dup| {
        let range = first..first + dgate.len();
        let inputs = [&dy[range.clone()], &gate[range.clone()], &up[range]];
        let outputs = [dgate, dup];
        with_gate!(f, F => Arch::new().dispatch(Backward::<T, F> { inputs, outputs, f: PhantomData }));
    });
}

/// Runs [`backward`] and [`forward`] in one pass and in place: `dy` becomes y, `gate` dgate and `up` dup. So y need not
/// be saved for the matmul that follows the gate.
pub fn backward_in_place<T: Stored>(f: Gate, dy: &mut [T], gate: &mut [T], up: &mut [T]) {
    let up = Shared::new(up);
    parallel::for_rows2(dy, 1, gate, 1, |first, dy, gate| {
        // SAFETY: the rows of this task, the same as those of dy and gate.
        let up = unsafe { up.range(first, dy.len()) };
        with_gate!(f, F => Arch::new().dispatch(InPlace::<T, F> { dy, gate, up, f: PhantomData }));
    });
}

/// Evaluates an expression with the type `$F` that computes the gate `$f`.
macro_rules! with_gate {
    ($f:expr, $F:ident => $body:expr) => {
        match $f {
            Gate::Silu => {
                type $F = Silu;
                $body
            }
            Gate::Gelu => {
                type $F = Gelu;
                $body
            }
            Gate::GeluTanh => {
                type $F = GeluTanh;
                $body
            }
        }
    };
}
use with_gate;

/// A gate f(g), computed from one exponential e.
trait Compute {
    /// Returns the exponent of e for one register.
    fn exponent<T: Lanes, S: Simd>(simd: S, g: T::Register<S>) -> T::Register<S>;

    /// Returns f(g) / g.
    fn value_over_gate<T: Real>(g: T, e: T) -> T;

    /// Returns f(g).
    #[inline(always)]
    fn value<T: Real>(g: T, e: T) -> T {
        g * Self::value_over_gate(g, e)
    }

    /// Returns d f'(g), given `value_over_gate` = f(g) / g.
    fn gradient<T: Real>(d: T, g: T, e: T, value_over_gate: T) -> T;
}

/// g / (1 + e), e = exp(-g).
struct Silu;

impl Compute for Silu {
    #[inline(always)]
    fn exponent<T: Lanes, S: Simd>(simd: S, g: T::Register<S>) -> T::Register<S> {
        T::vsub(simd, T::vsplat(simd, T::ZERO), g)
    }

    #[inline(always)]
    fn value_over_gate<T: Real>(_: T, e: T) -> T {
        T::ONE / (T::ONE + e)
    }

    #[inline(always)]
    fn value<T: Real>(g: T, e: T) -> T {
        g / (T::ONE + e)
    }

    #[inline(always)]
    fn gradient<T: Real>(d: T, g: T, _: T, s: T) -> T {
        d * s * (T::ONE + g * (T::ONE - s))
    }
}

/// g Phi(g), e = exp(-g^2 / 2).
struct Gelu;

impl Compute for Gelu {
    #[inline(always)]
    fn exponent<T: Lanes, S: Simd>(simd: S, g: T::Register<S>) -> T::Register<S> {
        let half = T::vsplat(simd, T::real(-0.5));
        T::vmul(simd, T::vmul(simd, g, g), half)
    }

    #[inline(always)]
    fn value_over_gate<T: Real>(g: T, e: T) -> T {
        g.normal_cdf(e)
    }

    #[inline(always)]
    fn gradient<T: Real>(d: T, g: T, e: T, value_over_gate: T) -> T {
        d * (value_over_gate + g * density(e))
    }
}

/// g / (1 + e), e = exp(-2 u), u = sqrt(2 / pi) (g + 0.044715 g^3).
struct GeluTanh;

impl Compute for GeluTanh {
    #[inline(always)]
    fn exponent<T: Lanes, S: Simd>(simd: S, g: T::Register<S>) -> T::Register<S> {
        let [slope, cube] = [-SLOPE, -SLOPE * CUBE].map(|x| T::vsplat(simd, T::real(x)));
        T::vmul(simd, g, T::vmul_add(simd, T::vmul(simd, g, g), cube, slope))
    }

    #[inline(always)]
    fn value_over_gate<T: Real>(_: T, e: T) -> T {
        T::ONE / (T::ONE + e)
    }

    #[inline(always)]
    fn gradient<T: Real>(d: T, g: T, e: T, s: T) -> T {
        // 1 - s without cancellation; if e is infinite, s is 0.
        let most = T::real(1e38);
        let rest = s * if e < most { e } else { most };
        d * (s + g * s * rest * twice_u_slope(g))
    }
}

struct InPlace<'a, T, F> {
    dy: &'a mut [T],
    gate: &'a mut [T],
    up: &'a mut [T],
    f: PhantomData<F>,
}

impl<T: Stored, F: Compute> WithSimd for InPlace<'_, T, F> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let mut e = [T::Wide::ZERO; BLOCK];
        let mut buffers = [[T::Wide::ZERO; BLOCK]; 3];
        let blocks = self.gate.chunks_mut(BLOCK).zip(self.up.chunks_mut(BLOCK));
        for (dy, (gate, up)) in self.dy.chunks_mut(BLOCK).zip(blocks) {
            let e = &mut e[..gate.len()];
            if T::as_wide(&[]).is_some() {
                // `as_wide_mut` is `Some` for all slices of a type or for none: the default is never used.
                let [dy, gate, up] = [dy, gate, up].map(|x| T::as_wide_mut(x).unwrap_or_default());
                in_place_block::<S, _, F>(simd, dy, gate, up, e);
                continue;
            }
            let [wide_dy, wide_gate, wide_up] = buffers.each_mut().map(|x| &mut x[..e.len()]);
            T::load(dy, wide_dy);
            T::load(gate, wide_gate);
            T::load(up, wide_up);
            in_place_block::<S, _, F>(simd, wide_dy, wide_gate, wide_up, e);
            T::store(wide_dy, dy);
            T::store(wide_gate, gate);
            T::store(wide_up, up);
        }
    }
}

/// One block of [`backward_in_place`]; `e` is scratch.
#[inline(always)]
fn in_place_block<S: Simd, T: Lanes, F: Compute>(
    simd: S,
    dy: &mut [T],
    gate: &mut [T],
    up: &mut [T],
    e: &mut [T],
) {
    exponentials::<T, S, F>(simd, gate, e);
    let inputs = gate.iter_mut().zip(up).zip(e.iter());
    for (dy, ((gate, up), e)) in dy.iter_mut().zip(inputs) {
        let (d, g, u) = (*dy, *gate, *up);
        let value_over_gate = F::value_over_gate(g, *e);
        *dy = g * value_over_gate * u;
        *gate = F::gradient(d * u, g, *e, value_over_gate);
        *up = d * g * value_over_gate;
    }
}

struct Forward<'a, T, F> {
    gate: &'a [T],
    up: &'a [T],
    y: &'a mut [T],
    f: PhantomData<F>,
}

impl<T: Stored, F: Compute> WithSimd for Forward<'_, T, F> {
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
                    exponentials::<T::Wide, S, F>(simd, gate, y);
                    for ((y, g), u) in y.iter_mut().zip(gate).zip(up) {
                        *y = F::value(*g, *y) * *u;
                    }
                }
            },
        );
    }
}

struct Backward<'a, T, F> {
    /// dy, gate, up.
    inputs: [&'a [T]; 3],
    /// dgate, dup.
    outputs: [&'a mut [T]; 2],
    f: PhantomData<F>,
}

impl<T: Stored, F: Compute> WithSimd for Backward<'_, T, F> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        Blocks::<T, 3, 2>::new().each(
            self.inputs,
            self.outputs,
            #[inline(always)]
            |_, [dy, gate, up], [dgate, dup]| {
                let inputs = gate.chunks(BLOCK).zip(up.chunks(BLOCK));
                let inputs = dy.chunks(BLOCK).zip(inputs);
                let outputs = dgate.chunks_mut(BLOCK).zip(dup.chunks_mut(BLOCK));
                for ((dgate, dup), (dy, (gate, up))) in outputs.zip(inputs) {
                    exponentials::<T::Wide, S, F>(simd, gate, dup);
                    let outputs = dgate.iter_mut().zip(dup);
                    for ((((dg, du), dy), g), u) in outputs.zip(dy).zip(gate).zip(up) {
                        let (e, value_over_gate) = (*du, F::value_over_gate(*g, *du));
                        *dg = F::gradient(*dy * *u, *g, e, value_over_gate);
                        *du = *dy * *g * value_over_gate;
                    }
                }
            },
        );
    }
}

/// Computes the exponential that the gate of each x is computed from; slices of one length.
#[inline(always)]
fn exponentials<T: Lanes, S: Simd, F: Compute>(simd: S, x: &[T], e: &mut [T]) {
    const WIDEST: usize = 16;

    let lanes = T::lanes::<S>();
    assert!(x.len() == e.len() && lanes <= WIDEST);
    let whole = x.len() - x.len() % lanes;
    let ((x, x_rest), (e, e_rest)) = (x.split_at(whole), e.split_at_mut(whole));
    for (x, e) in x.chunks_exact(lanes).zip(e.chunks_exact_mut(lanes)) {
        // SAFETY: both chunks are one whole register.
        unsafe {
            let x = T::vload::<S>(x.as_ptr());
            T::vstore::<S>(
                e.as_mut_ptr(),
                exponential::<T, S>(simd, F::exponent::<T, S>(simd, x)),
            );
        }
    }
    if !x_rest.is_empty() {
        let mut last = [T::ZERO; WIDEST];
        last[..x_rest.len()].copy_from_slice(x_rest);
        // SAFETY: the array holds one register, as asserted above.
        unsafe {
            let x = T::vload::<S>(last.as_ptr());
            T::vstore::<S>(
                last.as_mut_ptr(),
                exponential::<T, S>(simd, F::exponent::<T, S>(simd, x)),
            );
        }
        e_rest.copy_from_slice(&last[..e_rest.len()]);
    }
}

/// Returns `exp(power)`, infinite above 88, where the range of [`Lanes::vexp`] ends.
#[inline(always)]
fn exponential<T: Lanes, S: Simd>(simd: S, power: T::Register<S>) -> T::Register<S> {
    let e = T::vexp(simd, power);
    let highest = T::vsplat(simd, T::real(88.0));
    let infinity = T::vsplat(simd, -T::NEG_INFINITY);
    T::vselect_at_most(simd, highest, power, infinity, e)
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    /// Checks that in-place equals forward plus backward, for every length of block; forward's last bit may differ.
    fn in_place_is_both<T: Stored>(f: Gate, rounding: f64) {
        for n in [1, 511, 513, 1700] {
            let wave = |phase: f64| -> Vec<T> {
                let value = |i: usize| T::from_f64((i as f64 * 0.37 + phase).sin() * 4.0);
                (0..n).map(value).collect()
            };
            let (dy, gate, up) = (wave(0.0), wave(1.0), wave(2.0));
            let nothing = || vec![T::zero(); n];
            let (mut y, mut dgate, mut dup) = (nothing(), nothing(), nothing());
            forward(f, &gate, &up, &mut y);
            backward(f, [&dy, &gate, &up], &mut dgate, &mut dup);
            let (mut got_y, mut got_dgate, mut got_dup) = (dy, gate, up);
            backward_in_place(f, &mut got_y, &mut got_dgate, &mut got_dup);
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
        for f in [Gate::Silu, Gate::Gelu, Gate::GeluTanh] {
            in_place_is_both::<f32>(f, 1e-6);
            in_place_is_both::<f64>(f, 1e-15);
            in_place_is_both::<bf16>(f, 2f64.powi(-7));
            in_place_is_both::<f16>(f, 2f64.powi(-10));
        }
    }
}
