//! Updates of parameters, in place: one pass over parameter, gradient and state.
//!
//! Gradients are clipped first, `g = min(max(g, -clip), clip)`; NaN stays. An elementwise update has the same bits for
//! any vector width and number of threads. It is memory-bound.

mod adamw;
mod lion;
pub(crate) mod muon;
mod sgd;

pub use adamw::AdamW;
pub use lion::Lion;
pub use muon::Muon;
pub use sgd::Sgd;

use super::parallel::{self, Shared, TASK_ELEMENTS};
use super::simd::{self, BLOCK};
use super::{Real, Stored};
use crate::kernels::{Update, stochastic};
use half::bf16;
use std::marker::PhantomData;
use std::ops::Range;

/// A rule that updates each element by itself, from N tensors of state.
pub trait Elementwise<const N: usize>: Sync {
    /// The names of the tensors of state.
    const STATES: [&'static str; N];

    /// Returns the new value and state of an element with value `p` and gradient `g`. The coefficients are those of
    /// [`Coefficients::words`](crate::kernels::Coefficients::words).
    fn element<T: Real>(coefficients: [T; COEFFICIENTS], p: T, g: T, states: [T; N])
    -> (T, [T; N]);
}

/// The most coefficients of a rule.
pub const COEFFICIENTS: usize = 7;

/// A type that state is stored in.
pub trait Moment: Stored {
    /// Calls `step` with the state widened to the compute type. The slices hold elements `first..` of a parameter,
    /// at most [`BLOCK`] of them.
    fn update<const N: usize>(
        states: [&mut [Self]; N],
        rounding: u32,
        first: usize,
        step: impl FnOnce([&mut [Self::Wide]; N]),
    );
}

macro_rules! stored_as_computed {
    ($($T:ty),+) => {$(
        impl Moment for $T {
            #[inline(always)]
            fn update<const N: usize>(
                states: [&mut [Self]; N],
                _: u32,
                _: usize,
                step: impl FnOnce([&mut [Self]; N]),
            ) {
                step(states);
            }
        }
    )+};
}
stored_as_computed!(f32, f64);

/// Rounds stochastically, at most two tensors: most steps change a moment by less than the spacing of bf16.
impl Moment for bf16 {
    #[inline(always)]
    fn update<const N: usize>(
        states: [&mut [Self]; N],
        rounding: u32,
        first: usize,
        step: impl FnOnce([&mut [f32]; N]),
    ) {
        let mut buffers = [[0f32; BLOCK]; N];
        let lens = states.each_ref().map(|state| state.len());
        for (state, buffer) in states.iter().zip(&mut buffers) {
            Self::load(state, &mut buffer[..state.len()]);
        }
        let mut which = 0;
        step(buffers.each_mut().map(|buffer| {
            which += 1;
            &mut buffer[..lens[which - 1]]
        }));
        for (which, (state, buffer)) in states.into_iter().zip(&mut buffers).enumerate() {
            let buffer = &mut buffer[..state.len()];
            for (i, x) in buffer.iter_mut().enumerate() {
                let random = stochastic::bits(rounding, (first + i) as u32);
                *x = stochastic::round_to_bf16(*x, random >> (16 * which as u32) & 0xffff);
            }
            Self::store(buffer, state);
        }
    }
}

/// Updates `parameter` and `states` from `gradient * factor`; slices of one length. The product is rounded as a
/// separate scaling pass would round it; there is none if `factor` is 1. The gradient is read once and not written.
pub fn step<R: Elementwise<N>, T: Real, M: Moment<Wide = T>, const N: usize>(
    parameter: &mut [T],
    gradient: &[T],
    factor: f64,
    states: [&mut [M]; N],
    update: &Update,
) {
    assert_eq!(gradient.len(), parameter.len());
    let kernel = Kernel::<R, _>::new(update);
    let (is_scaled, factor) = (factor != 1.0, T::real(factor));
    let parameter = Shared::new(parameter);
    in_blocks(
        gradient.len(),
        states,
        #[inline(always)]
        |block, states| {
            // SAFETY: blocks do not overlap.
            let p = unsafe { parameter.range(block.start, block.len()) };
            let g = &gradient[block.clone()];
            let mut scaled = [T::ZERO; BLOCK];
            let scaled = &mut scaled[..g.len()];
            let g = match is_scaled {
                true => {
                    for (scaled, g) in scaled.iter_mut().zip(g) {
                        *scaled = *g * factor;
                    }
                    scaled
                }
                false => g,
            };
            M::update(
                states,
                update.rounding,
                block.start,
                #[inline(always)]
                |states| kernel.block(p, g, states),
            );
        },
    );
}

/// Runs [`step`] for a parameter stored in half precision.
///
/// A step is often smaller than half the spacing of `bf16` numbers and would be rounded away every time. So the state
/// has a master copy: `master` is updated in `f32`, and `parameter` is set to its rounding. If `parameter` is not the
/// rounding of `master`, it was changed since the last step: `master` then restarts from `parameter`.
pub fn step_half<R, P, G, M, const N: usize>(
    parameter: &mut [P],
    gradient: &[G],
    master: &mut [f32],
    states: [&mut [M]; N],
    update: &Update,
) where
    R: Elementwise<N>,
    P: Stored<Wide = f32>,
    G: Stored<Wide = f32>,
    M: Moment<Wide = f32>,
{
    let n = parameter.len();
    assert_eq!((gradient.len(), master.len()), (n, n));
    let kernel = Kernel::<R, _>::new(update);
    let (parameter, master) = (Shared::new(parameter), Shared::new(master));
    in_blocks(
        n,
        states,
        #[inline(always)]
        |block, states| {
            // SAFETY: blocks do not overlap.
            let (p, master) = unsafe {
                let (start, len) = (block.start, block.len());
                (parameter.range(start, len), master.range(start, len))
            };
            let mut buffer = [0f32; BLOCK];
            let buffer = &mut buffer[..p.len()];
            restart_changed(p, master, buffer);
            G::load(&gradient[block.clone()], buffer);
            M::update(
                states,
                update.rounding,
                block.start,
                #[inline(always)]
                |states| kernel.block(master, buffer, states),
            );
            P::store(master, p);
        },
    );
}

/// Sets elements of `master` to those of `parameter` that are not their rounding; `parameter` and `buffer` are
/// overwritten.
#[inline(always)]
fn restart_changed<P: Stored<Wide = f32>>(p: &mut [P], master: &mut [f32], buffer: &mut [f32]) {
    let mut current = [0f32; BLOCK];
    let current = &mut current[..p.len()];
    P::load(p, current);
    P::store(master, p);
    P::load(p, buffer);
    for ((exact, rounded), current) in master.iter_mut().zip(buffer.iter()).zip(current.iter()) {
        *exact = if *rounded == *current {
            *exact
        } else {
            *current
        };
    }
}

/// Calls `each` with the elements and states of each block, in parallel.
#[inline(always)]
fn in_blocks<M: Moment, const N: usize>(
    n: usize,
    states: [&mut [M]; N],
    each: impl Fn(&Range<usize>, [&mut [M]; N]) + Sync,
) {
    assert!(states.iter().all(|state| state.len() == n));
    let states = states.map(Shared::new);
    parallel::for_tasks(n.div_ceil(TASK_ELEMENTS), |task| {
        simd::vectorized(
            #[inline(always)]
            || {
                let end = n.min((task + 1) * TASK_ELEMENTS);
                for start in (task * TASK_ELEMENTS..end).step_by(BLOCK) {
                    let block = start..end.min(start + BLOCK);
                    // SAFETY: blocks do not overlap.
                    let states = states
                        .each_ref()
                        .map(|state| unsafe { state.range(start, block.len()) });
                    each(&block, states);
                }
            },
        );
    });
}

/// A rule with its coefficients in the compute type.
struct Kernel<R, T> {
    coefficients: [T; COEFFICIENTS],
    clip_value: T,
    rule: PhantomData<R>,
}

impl<R, T: Real> Kernel<R, T> {
    fn new(update: &Update) -> Self {
        Self {
            coefficients: update.rule.words().map(T::real),
            clip_value: T::real(update.clip_value),
            rule: PhantomData,
        }
    }

    /// Updates one block.
    #[inline(always)]
    fn block<const N: usize>(&self, parameter: &mut [T], gradient: &[T], states: [&mut [T]; N])
    where
        R: Elementwise<N>,
    {
        let n = parameter.len();
        let (gradient, states) = (&gradient[..n], states.map(|state| &mut state[..n]));
        let mut states = states;
        let (coefficients, clip_value) = (self.coefficients, self.clip_value);
        for i in 0..n {
            let g = simd::clamp(gradient[i], clip_value);
            let state = states.each_ref().map(|state| state[i]);
            let (p, state) = R::element(coefficients, parameter[i], g, state);
            parameter[i] = p;
            for (all, one) in states.each_mut().into_iter().zip(state) {
                all[i] = one;
            }
        }
    }
}
