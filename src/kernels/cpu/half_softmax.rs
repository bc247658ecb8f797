//! Softmax of half-precision scores: rows widened one at a time, exponentials on registers.
//!
//! Half the bytes make arithmetic the bound, which in f32 is memory: hence fewer passes and a cheaper exponential than in
//! [`softmax`](super::softmax), whose f32 results stay what they were.

use super::{Lanes, Real, Stored, parallel, simd};
use crate::kernels::Mask;
use pulp::{Arch, Simd, WithSimd};

/// A multiple of the elements of every register: what rows are filled up to.
const PADDING: usize = 16;

/// Whole rows of a batch.
#[derive(Clone, Copy)]
pub(super) struct Rows<T> {
    /// Which row of the batch the first is.
    pub first: usize,
    pub queries: usize,
    pub keys: usize,
    pub scale: T,
    pub mask: Mask,
}

impl<T> Rows<T> {
    /// How many keys row `row` of these sees.
    #[inline(always)]
    fn visible(&self, row: usize) -> usize {
        let query = (self.first + row) % self.queries;
        self.mask.visible(query, self.queries, self.keys).end
    }
}

/// `p` from `x`, both (rows, keys).
pub(super) fn forward_rows<T: Stored>(rows: Rows<T::Wide>, x: &[T], p: &mut [T]) {
    let mut e = vec![T::Wide::ZERO; rows.keys.next_multiple_of(PADDING)];
    let e = &mut e[..];
    Arch::new().dispatch(Forward { rows, x, p, e });
}

/// `dx = scale * p (dp - sum(dp p))` over the visible keys, 0 elsewhere, with p computed again from the scores `x`.
///
/// For half precision: rounded probabilities would put their error into the gradient, and the scores are kept anyway.
pub fn backward_from_scores<T: Stored>(
    dp: &[T],
    x: &[T],
    queries: usize,
    keys: usize,
    scale: f64,
    mask: Mask,
    dx: &mut [T],
) {
    let scale = T::Wide::real(scale);
    parallel::for_rows(dx, keys, |first, dx| {
        let rows = Rows {
            first,
            queries,
            keys,
            scale,
            mask,
        };
        let range = first * keys..first * keys + dx.len();
        let (dp, x) = (&dp[range.clone()], &x[range]);
        let mut buffers = vec![T::Wide::ZERO; 2 * keys.next_multiple_of(PADDING)];
        let (e, gradient) = buffers.split_at_mut(keys.next_multiple_of(PADDING));
        Arch::new().dispatch(Backward {
            rows,
            dp,
            x,
            dx,
            e,
            gradient,
        });
    });
}

struct Forward<'a, T: Stored> {
    rows: Rows<T::Wide>,
    x: &'a [T],
    p: &'a mut [T],
    /// A row, padded.
    e: &'a mut [T::Wide],
}

impl<T: Stored> WithSimd for Forward<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { rows, x, p, e } = self;
        let pairs = p.chunks_exact_mut(rows.keys).zip(x.chunks_exact(rows.keys));
        for (row, (p, x)) in pairs.enumerate() {
            let visible = rows.visible(row);
            let (p, hidden) = p.split_at_mut(visible);
            hidden.fill(T::zero());
            let share = T::Wide::ONE / exponentials(simd, &x[..visible], rows.scale, e);
            for e in &mut e[..visible] {
                *e *= share;
            }
            T::store(&e[..visible], p);
        }
    }
}

struct Backward<'a, T: Stored> {
    rows: Rows<T::Wide>,
    dp: &'a [T],
    x: &'a [T],
    dx: &'a mut [T],
    /// A row, padded.
    e: &'a mut [T::Wide],
    /// A row.
    gradient: &'a mut [T::Wide],
}

impl<T: Stored> WithSimd for Backward<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Rows { keys, scale, .. } = self.rows;
        let inputs = self.dp.chunks_exact(keys).zip(self.x.chunks_exact(keys));
        for (row, (dx, (dp, x))) in self.dx.chunks_exact_mut(keys).zip(inputs).enumerate() {
            let visible = self.rows.visible(row);
            let (dx, hidden) = dx.split_at_mut(visible);
            hidden.fill(T::zero());
            let share = T::Wide::ONE / exponentials(simd, &x[..visible], scale, self.e);
            let (e, gradient) = (&self.e[..visible], &mut self.gradient[..visible]);
            T::load(&dp[..visible], gradient);
            let inner = simd::dot(e, gradient) * share;
            let factor = share * scale;
            for (gradient, e) in gradient.iter_mut().zip(e) {
                *gradient = *e * (*gradient - inner) * factor;
            }
            T::store(gradient, dx);
        }
    }
}

/// `exp(scale x - max(scale x))` into the first places of `e`, and their sum.
#[inline(always)]
fn exponentials<T: Stored, S: Simd>(
    simd: S,
    x: &[T],
    scale: T::Wide,
    e: &mut [T::Wide],
) -> T::Wide {
    let e = &mut e[..x.len().next_multiple_of(PADDING)];
    let (visible, rest) = e.split_at_mut(x.len());
    T::load(x, visible);
    for value in visible {
        *value *= scale; // before the maximum, so that a negative scale is right too
    }
    rest.fill(T::Wide::NEG_INFINITY); // no maximum, and adds nothing to the sum
    let lowest = T::Wide::vsplat(simd, T::Wide::NEG_INFINITY);
    let max = fold_registers::<T::Wide, S>(
        e,
        lowest,
        #[inline(always)]
        |max, x| (T::Wide::vmax(simd, x, max), x),
        #[inline(always)]
        |a, b| T::Wide::vmax(simd, a, b),
    );
    let max = fold_lanes::<T::Wide, S>(max, T::Wide::larger);
    let max = T::Wide::vsplat(simd, max);
    let sum = fold_registers::<T::Wide, S>(
        e,
        T::Wide::vsplat(simd, T::Wide::ZERO),
        #[inline(always)]
        |sum, x| {
            let e = T::Wide::vexp(simd, T::Wide::vsub(simd, x, max));
            (T::Wide::vadd(simd, sum, e), e)
        },
        #[inline(always)]
        |a, b| T::Wide::vadd(simd, a, b),
    );
    fold_lanes::<T::Wide, S>(sum, |a, b| a + b)
}

/// Runs `(state, x) = step(state, x)` over the registers x of `row`, and joins the states: several side by side, so that
/// one step need not wait for the last.
#[inline(always)]
fn fold_registers<T: Lanes, S: Simd>(
    row: &mut [T],
    start: T::Register<S>,
    step: impl Fn(T::Register<S>, T::Register<S>) -> (T::Register<S>, T::Register<S>),
    join: impl Fn(T::Register<S>, T::Register<S>) -> T::Register<S>,
) -> T::Register<S> {
    const CHAINS: usize = 4;

    let lanes = T::lanes::<S>();
    let mut states = [start; CHAINS];
    let mut chunks = row.chunks_exact_mut(CHAINS * lanes);
    for chunk in &mut chunks {
        for (chain, state) in states.iter_mut().enumerate() {
            // SAFETY: a register of the chunk, which has one for each chain.
            unsafe {
                let at = chunk.as_mut_ptr().add(chain * lanes);
                let (next, x) = step(*state, T::vload::<S>(at));
                *state = next;
                T::vstore::<S>(at, x);
            }
        }
    }
    for register in chunks.into_remainder().chunks_exact_mut(lanes) {
        // SAFETY: a whole register.
        unsafe {
            let (next, x) = step(states[0], T::vload::<S>(register.as_ptr()));
            states[0] = next;
            T::vstore::<S>(register.as_mut_ptr(), x);
        }
    }
    let [a, b, c, d] = states;
    join(join(a, b), join(c, d))
}

/// A register's elements joined in pairs until one is left.
#[inline(always)]
fn fold_lanes<T: Lanes, S: Simd>(register: T::Register<S>, join: impl Fn(T, T) -> T) -> T {
    let mut values = [T::ZERO; PADDING];
    let mut width = T::lanes::<S>();
    assert!(width <= PADDING);
    // SAFETY: there is room for the register, as just asserted.
    unsafe { T::vstore::<S>(values.as_mut_ptr(), register) };
    while width > 1 {
        width /= 2;
        for lane in 0..width {
            values[lane] = join(values[lane], values[lane + width]);
        }
    }
    values[0]
}
