//! Softmax and its gradient over the rows of a block, a strip of keys at a time.

use crate::kernels::cpu::gemm::prefetch;
use crate::kernels::cpu::gemm::tile::COLUMNS;
use crate::kernels::cpu::simd::BLOCK;
use crate::kernels::cpu::{Lanes, Real, Stored, simd};
use crate::probe::parts::{Part, timed};
use pulp::{Arch, Simd, WithSimd};

/// By how much a row's scores may exceed its top: exponentials up to e^4 lose nothing in floating point, and few strips
/// then change the scale of those before.
const SLACK: f64 = 4.0;

/// Registers side by side, so that one need not wait for the other.
const CHAINS: usize = 4;

/// A cache line.
const LINE_BYTES: usize = 64;

/// The keys that a block meets at a time.
#[derive(Clone, Copy)]
pub(super) struct Strip {
    /// Its first key.
    pub first: usize,
    /// How many.
    pub columns: usize,
}

impl Strip {
    /// Keys of the strip that a row sees which sees `visible` keys in all.
    #[inline(always)]
    fn seen(self, visible: usize) -> usize {
        visible.saturating_sub(self.first).min(self.columns)
    }
}

/// What forward knows of each row so far.
pub(super) struct State<'a, T> {
    /// What exponentials are relative to: the largest scaled score, or up to [`SLACK`] less; -inf before any.
    pub tops: &'a mut [T],
    /// The sums of the exponentials.
    pub sums: &'a mut [T],
    /// By what the last strip changed the scale of those before it.
    pub rescale: &'a mut [T],
}

/// `exp(scale scores - top)` of a strip, 0 where a row does not see the key: in the scores' place, and in `e` as
/// stored.
pub(super) struct Exponentials<'a, E: Stored, V> {
    pub strip: Strip,
    pub scale: E::Wide,
    /// How many keys a row sees.
    pub visible: V,
    /// (rows, scores_row), of the strip alone.
    pub scores: &'a mut [E::Wide],
    pub scores_row: usize,
    /// (rows, e_row), of all keys.
    pub e: &'a mut [E],
    pub e_row: usize,
    /// Updated.
    pub state: State<'a, E::Wide>,
}

impl<E: Stored, V: Fn(usize) -> usize> Exponentials<'_, E, V> {
    /// Says whether the scale of any row has changed.
    pub fn run(self) -> bool {
        timed(Part::Softmax, || Arch::new().dispatch(self))
    }
}

impl<E: Stored, V: Fn(usize) -> usize> WithSimd for Exponentials<'_, E, V> {
    type Output = bool;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> bool {
        let Strip { first, columns } = self.strip;
        let State {
            tops,
            sums,
            rescale,
        } = self.state;
        let (scale, row) = (self.scale, self.scores_row);
        let seen = |row: usize| self.strip.seen((self.visible)(row));
        let mut has_changed = false;
        // All tops first: rows do not wait for each other then.
        let state = tops.iter_mut().zip(&mut *sums).zip(rescale);
        for (i, ((top, sum), factor)) in state.enumerate() {
            let most = largest(simd, scale, &self.scores[i * row..][..seen(i)]);
            *factor = E::Wide::ONE;
            if most > *top + E::Wide::real(SLACK) {
                *factor = (*top - most).exponential();
                *top = most;
                *sum *= *factor;
                has_changed = true;
            }
        }
        let rows = self.scores.chunks_exact_mut(row);
        let rows = rows.zip(self.e.chunks_exact_mut(self.e_row));
        for (i, ((scores, e), (top, sum))) in rows.zip(tops.iter().zip(sums)).enumerate() {
            let (scores, hidden) = scores[..columns].split_at_mut(seen(i));
            let (e, hidden_e) = e[first..first + columns].split_at_mut(scores.len());
            hidden.fill(E::Wide::ZERO);
            hidden_e.fill(E::zero());
            // Any number in place of -inf, or -inf - -inf would be NaN.
            let top = match *top == E::Wide::NEG_INFINITY {
                true => E::Wide::ZERO,
                false => *top,
            };
            *sum += exponentials(simd, scale, top, scores, e, self.e_row);
        }
        has_changed
    }
}

/// The largest scaled score, -inf of none; nothing is promised of NaN.
#[inline(always)]
fn largest<T: Lanes, S: Simd>(simd: S, scale: T, scores: &[T]) -> T {
    let factor = T::vsplat(simd, scale);
    let lanes = T::lanes::<S>();
    let whole = scores.len() / lanes * lanes;
    let mut most = [T::vsplat(simd, T::NEG_INFINITY); CHAINS];
    for at in (0..whole).step_by(CHAINS * lanes) {
        for (chain, most) in most.iter_mut().enumerate() {
            let at = at + chain * lanes;
            if at < whole {
                // SAFETY: a whole register of the slice.
                let x = unsafe { T::vload::<S>(scores.as_ptr().add(at)) };
                *most = T::vmax(simd, T::vmul(simd, x, factor), *most);
            }
        }
    }
    let [a, b, c, d] = most;
    let most = T::vmax(simd, T::vmax(simd, a, b), T::vmax(simd, c, d));
    let mut each = [T::NEG_INFINITY; COLUMNS];
    assert!(lanes <= COLUMNS);
    // SAFETY: no register has more elements than the array, as just asserted.
    unsafe { T::vstore::<S>(each.as_mut_ptr(), most) };
    for (each, score) in each.iter_mut().zip(&scores[whole..]) {
        *each = each.larger(*score * scale);
    }
    folded(each, T::larger)
}

/// All elements by `f`, halves together.
#[inline(always)]
fn folded<T: Real>(mut x: [T; COLUMNS], f: impl Fn(T, T) -> T) -> T {
    let mut width = COLUMNS / 2;
    while width > 0 {
        for i in 0..width {
            x[i] = f(x[i], x[i + width]);
        }
        width /= 2;
    }
    x[0]
}

/// `exp(scale scores - top)` in the scores' place, and in `e` as stored; returns their sum. Asks for the lines that
/// follow `ahead` elements on from `e`, which will be written next.
#[inline(always)]
fn exponentials<E: Stored, S: Simd>(
    simd: S,
    scale: E::Wide,
    top: E::Wide,
    scores: &mut [E::Wide],
    e: &mut [E],
    ahead: usize,
) -> E::Wide {
    let scale = E::Wide::vsplat(simd, scale);
    let below = E::Wide::vsplat(simd, -top);
    let lanes = E::Wide::lanes::<S>();
    let at_once = CHAINS * lanes;
    let mut sums = [E::Wide::vsplat(simd, E::Wide::ZERO); CHAINS];
    let mut groups = scores.chunks_exact_mut(at_once);
    let mut stored = e.chunks_exact_mut(at_once);
    for (scores, e) in (&mut groups).zip(&mut stored) {
        for (chain, sum) in sums.iter_mut().enumerate() {
            // SAFETY: one of the group's registers.
            let value = unsafe {
                let at = scores.as_mut_ptr().add(chain * lanes);
                exponential(simd, scale, below, at)
            };
            *sum = E::Wide::vadd(simd, *sum, value);
        }
        for next in (0..at_once).step_by(LINE_BYTES / size_of::<E>()) {
            prefetch(e.as_ptr().wrapping_add(ahead + next));
        }
        E::store(scores, e);
    }
    let (scores, e) = (groups.into_remainder(), stored.into_remainder());
    let mut last = [E::Wide::ZERO; CHAINS * COLUMNS];
    let mut each = [E::Wide::ZERO; COLUMNS];
    assert!(lanes <= COLUMNS);
    last[..scores.len()].copy_from_slice(scores);
    let [a, b, c, d] = sums;
    let ab = E::Wide::vadd(simd, a, b);
    let sums = E::Wide::vadd(simd, ab, E::Wide::vadd(simd, c, d));
    // SAFETY: no register has more elements than COLUMNS, as just asserted.
    unsafe {
        for at in (0..scores.len()).step_by(lanes) {
            exponential(simd, scale, below, last.as_mut_ptr().add(at));
        }
        E::Wide::vstore::<S>(each.as_mut_ptr(), sums);
    }
    scores.copy_from_slice(&last[..scores.len()]);
    E::store(scores, e);
    for (i, e) in scores.iter().enumerate() {
        each[i % COLUMNS] += *e;
    }
    folded(
        each,
        #[inline(always)]
        |a, b| a + b,
    )
}

/// `exp(scale x + below)` of the register that begins at `x`, in its place, and returned.
///
/// # Safety
/// The register is there.
#[inline(always)]
unsafe fn exponential<T: Lanes, S: Simd>(
    simd: S,
    scale: T::Register<S>,
    below: T::Register<S>,
    x: *mut T,
) -> T::Register<S> {
    // SAFETY: the caller's promise.
    unsafe {
        let scaled = T::vmul_add(simd, T::vload::<S>(x), scale, below);
        let value = T::vexp(simd, scaled);
        T::vstore::<S>(x, value);
        value
    }
}

/// Each row's first `columns` elements times its factor: x (rows, row).
pub(super) fn rescale<T: Stored>(x: &mut [T], row: usize, columns: usize, factors: &[T::Wide]) {
    simd::vectorized(
        #[inline(always)]
        || {
            for (x, factor) in x.chunks_exact_mut(row).zip(factors) {
                if *factor != T::Wide::ONE {
                    scale(&mut x[..columns], *factor);
                }
            }
        },
    );
}

#[inline(always)]
fn scale<T: Stored>(x: &mut [T], factor: T::Wide) {
    if let Some(x) = T::as_wide_mut(x) {
        for x in x {
            *x *= factor;
        }
        return;
    }
    for x in x.chunks_mut(BLOCK) {
        let mut wide = [T::Wide::ZERO; BLOCK];
        let wide = &mut wide[..x.len()];
        T::load(x, wide);
        for wide in wide.iter_mut() {
            *wide *= factor;
        }
        T::store(wide, x);
    }
}

/// `ds = scale e (dp - delta)` of a strip, from dp in `ds` (rows, ds_row); 0 where a row does not see the key. e (rows,
/// e_row) begins with the strip.
pub(super) fn gradients<T: Lanes>(
    strip: Strip,
    (e, e_row): (&[T], usize),
    deltas: &[T],
    scale: T,
    visible: impl Fn(usize) -> usize,
    (ds, ds_row): (&mut [T], usize),
) {
    let rows = || {
        simd::vectorized(
            #[inline(always)]
            || {
                for (i, (delta, ds)) in deltas.iter().zip(ds.chunks_exact_mut(ds_row)).enumerate() {
                    let (ds, hidden) = ds[..strip.columns].split_at_mut(strip.seen(visible(i)));
                    for (ds, e) in ds.iter_mut().zip(&e[i * e_row..]) {
                        *ds = *e * (*ds - *delta) * scale;
                    }
                    hidden.fill(T::ZERO);
                }
            },
        )
    };
    timed(Part::Softmax, rows);
}
