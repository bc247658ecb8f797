//! Softmax of half-precision scores: rows are widened one at a time, and exponentials run on SIMD registers.
//!
//! With half the bytes, arithmetic is the bottleneck, where f32 is bound by memory. So this makes fewer passes and uses
//! a cheaper exponential than [`softmax`](super::softmax), whose f32 results do not change.

use super::softmax::visible_part;
use crate::kernels::attention::KeyRanges;
use crate::kernels::cpu::{Lanes, Real, Stored, parallel};
use crate::probe::parts::{Part, timed};
use pulp::{Arch, Simd, WithSimd};

/// A multiple of the elements of every register, to which rows are padded.
const PADDING: usize = 16;

/// The position of some rows in a batch, with their mask and scale.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a, T> {
    /// The index of the first row in the batch.
    pub first: usize,
    pub seen: KeyRanges<'a>,
    pub scale: T,
}

/// Computes `p` from `x`, both (rows, keys).
pub(super) fn forward_rows<T: Stored>(rows: Rows<'_, T::Wide>, x: &[T], p: &mut [T]) {
    let mut e = vec![T::Wide::ZERO; rows.seen.keys.next_multiple_of(PADDING)];
    let e = &mut e[..];
    Arch::new().dispatch(Forward { rows, x, p, e });
}

/// Computes `dx = scale * p (dp - sum(dp p))` over the visible keys, 0 elsewhere, with p recomputed from the scores
/// `x`.
///
/// It is for half precision: rounded probabilities would add their error to the gradient, and the scores are saved
/// anyway.
pub fn backward_from_scores<T: Stored>(
    dp: &[T],
    x: &[T],
    seen: KeyRanges<'_>,
    scale: f64,
    dx: &mut [T],
) {
    let (keys, scale) = (seen.keys, T::Wide::real(scale));
    let of_task = |first: usize, dx: &mut [T]| {
        let rows = Rows { first, seen, scale };
        let range = first * keys..first * keys + dx.len();
        let (dp, x) = (&dp[range.clone()], &x[range]);
        let padded = keys.next_multiple_of(PADDING);
        let mut buffers = vec![T::Wide::ZERO; 2 * padded];
        let (e, gradient) = buffers.split_at_mut(padded);
        Arch::new().dispatch(Backward {
            rows,
            dp,
            x,
            dx,
            e,
            gradient,
        });
    };
    timed(Part::Softmax, || parallel::for_rows(dx, keys, of_task));
}

struct Forward<'a, T: Stored> {
    rows: Rows<'a, T::Wide>,
    x: &'a [T],
    p: &'a mut [T],
    e: &'a mut [T::Wide],
}

impl<T: Stored> WithSimd for Forward<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { rows, x, p, e } = self;
        let zero = T::Wide::vsplat(simd, T::Wide::ZERO);
        let keys = rows.seen.keys;
        let pairs = p.chunks_exact_mut(keys).zip(x.chunks_exact(keys));
        for (row, (p, x)) in pairs.enumerate() {
            let visible = rows.seen.of_row(rows.first + row);
            let (x, p) = (&x[visible.clone()], visible_part(p, visible, T::zero()));
            let (e, max) = scaled(simd, x, rows.scale, e);
            let sum = fold_registers::<T::Wide, S, _, 0>(
                e,
                [],
                zero,
                #[inline(always)]
                |sum, x, []| {
                    let e = T::Wide::vexp(simd, T::Wide::vsub(simd, x, max));
                    (T::Wide::vadd(simd, sum, e), e)
                },
                #[inline(always)]
                |a, b| T::Wide::vadd(simd, a, b),
            );
            let share = T::Wide::ONE / fold_lanes::<T::Wide, S>(sum, |a, b| a + b);
            for e in &mut e[..x.len()] {
                *e *= share;
            }
            T::store(&e[..x.len()], p);
        }
    }
}

struct Backward<'a, T: Stored> {
    rows: Rows<'a, T::Wide>,
    dp: &'a [T],
    x: &'a [T],
    dx: &'a mut [T],
    e: &'a mut [T::Wide],
    gradient: &'a mut [T::Wide],
}

impl<T: Stored> WithSimd for Backward<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Rows { first, seen, scale } = self.rows;
        let keys = seen.keys;
        let zero = T::Wide::vsplat(simd, T::Wide::ZERO);
        let inputs = self.dp.chunks_exact(keys).zip(self.x.chunks_exact(keys));
        for (row, (dx, (dp, x))) in self.dx.chunks_exact_mut(keys).zip(inputs).enumerate() {
            let visible = seen.of_row(first + row);
            let (dp, x) = (&dp[visible.clone()], &x[visible.clone()]);
            let dx = visible_part(dx, visible, T::zero());
            let gradient = &mut self.gradient[..dx.len().next_multiple_of(PADDING)];
            T::load(dp, &mut gradient[..dx.len()]);
            gradient[dx.len()..].fill(T::Wide::ZERO); // stale elements of a longer row may be NaN
            let (e, max) = scaled(simd, x, scale, self.e);
            let (sum, inner) = fold_registers::<T::Wide, S, _, 1>(
                e,
                [gradient],
                (zero, zero),
                #[inline(always)]
                |(sum, inner), x, [dp]| {
                    let e = T::Wide::vexp(simd, T::Wide::vsub(simd, x, max));
                    let inner = T::Wide::vmul_add(simd, e, dp, inner);
                    ((T::Wide::vadd(simd, sum, e), inner), e)
                },
                #[inline(always)]
                |a, b| (T::Wide::vadd(simd, a.0, b.0), T::Wide::vadd(simd, a.1, b.1)),
            );
            let share = T::Wide::ONE / fold_lanes::<T::Wide, S>(sum, |a, b| a + b);
            let inner = share * fold_lanes::<T::Wide, S>(inner, |a, b| a + b);
            let factor = share * scale;
            let gradient = &mut gradient[..dx.len()];
            for (gradient, e) in gradient.iter_mut().zip(e) {
                *gradient = *e * (*gradient - inner) * factor;
            }
            T::store(gradient, dx);
        }
    }
}

/// Writes `scale x` to `e`, padded to whole registers with values that vanish under exp. Returns it, and the largest
/// element in every lane.
#[inline(always)]
fn scaled<'a, T: Stored, S: Simd>(
    simd: S,
    x: &[T],
    scale: T::Wide,
    e: &'a mut [T::Wide],
) -> (&'a mut [T::Wide], <T::Wide as Lanes>::Register<S>) {
    let e = &mut e[..x.len().next_multiple_of(PADDING)];
    let (visible, rest) = e.split_at_mut(x.len());
    T::load(x, visible);
    rest.fill(visible.last().copied().unwrap_or(T::Wide::ZERO)); // does not change the maximum
    let scale = T::Wide::vsplat(simd, scale);
    let max = fold_registers::<T::Wide, S, _, 0>(
        e,
        [],
        T::Wide::vsplat(simd, T::Wide::NEG_INFINITY),
        #[inline(always)]
        |max, x, []| {
            let x = T::Wide::vmul(simd, x, scale); // before the maximum, so that negative scales work
            (T::Wide::vmax(simd, x, max), x)
        },
        #[inline(always)]
        |a, b| T::Wide::vmax(simd, a, b),
    );
    e[x.len()..].fill(T::Wide::NEG_INFINITY); // adds nothing to the sum
    let max = fold_lanes::<T::Wide, S>(max, T::Wide::larger);
    (e, T::Wide::vsplat(simd, max))
}

/// Runs `(state, x) = step(state, x, others)` over the registers x of `row` and the corresponding ones of `others`. All
/// are whole registers long. Several independent chains of states overlap, and are joined in the end.
#[inline(always)]
fn fold_registers<T: Lanes, S: Simd, State: Copy, const N: usize>(
    row: &mut [T],
    others: [&[T]; N],
    start: State,
    step: impl Fn(State, T::Register<S>, [T::Register<S>; N]) -> (State, T::Register<S>),
    join: impl Fn(State, State) -> State,
) -> State {
    const CHAINS: usize = 4;

    let (lanes, length) = (T::lanes::<S>(), row.len());
    assert!(length.is_multiple_of(lanes) && others.iter().all(|other| other.len() == length));
    let mut states = [start; CHAINS];
    each_chain::<CHAINS>(
        length / lanes,
        #[inline(always)]
        |chain, register| {
            let at = register * lanes;
            // SAFETY: the register is inside the slices, which have one length.
            unsafe {
                let x = T::vload::<S>(row.as_ptr().add(at));
                let others = others.map(
                    #[inline(always)]
                    |other| T::vload::<S>(other.as_ptr().add(at)),
                );
                let (next, x) = step(states[chain], x, others);
                states[chain] = next;
                T::vstore::<S>(row.as_mut_ptr().add(at), x);
            }
        },
    );
    let [a, b, c, d] = states;
    join(join(a, b), join(c, d))
}

/// Calls `f(i % N, i)` for i in `0..count`, but `f(0, i)` for the last `count % N`. The first argument is a constant
/// once inlined.
#[inline(always)]
fn each_chain<const N: usize>(count: usize, mut f: impl FnMut(usize, usize)) {
    let whole = count - count % N;
    for group in (0..whole).step_by(N) {
        for chain in 0..N {
            f(chain, group + chain);
        }
    }
    for i in whole..count {
        f(0, i);
    }
}

/// Joins a register's elements in pairs until one is left.
#[inline(always)]
fn fold_lanes<T: Lanes, S: Simd>(register: T::Register<S>, join: impl Fn(T, T) -> T) -> T {
    let mut values = [T::ZERO; PADDING];
    let mut width = T::lanes::<S>();
    assert!(width <= PADDING);
    // SAFETY: the array holds a register, as just asserted.
    unsafe { T::vstore::<S>(values.as_mut_ptr(), register) };
    while width > 1 {
        width /= 2;
        for lane in 0..width {
            values[lane] = join(values[lane], values[lane + width]);
        }
    }
    values[0]
}
