//! Muon's update of a matrix.
//!
//! ```text
//! b += (1 - momentum) (g - b);  d = g + momentum (b - g) (Nesterov) or b
//! p  = decay p - step_size orthogonal(d)
//! ```
//!
//! `orthogonal` is a Newton-Schulz iteration, see [`newton_schulz`]. Its matmuls bound the update: with s and l the
//! smaller and the larger side, a step of it computes `4 s^2 l + 2 s^3` FLOPs.

use super::{COEFFICIENTS, Elementwise, Moment, Real, Stored, Update, step, step_half};
use crate::kernels::cpu::gemm::{MatRef, Threads, matmul};
use crate::kernels::cpu::simd::{self, BLOCK};
use crate::kernels::cpu::{parallel, reduce};

/// The coefficients of a step of Muon, for one parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Muon {
    /// The decay rate of the momentum buffer.
    pub momentum: f64,
    /// Whether a step is by the gradient plus the decayed buffer.
    pub nesterov: bool,
    /// The factor of a parameter by weight decay: `1 - lr * weight_decay`.
    pub decay: f64,
    /// The learning rate, scaled by the parameter's shape.
    pub step_size: f64,
    /// The eps that is added to the norm.
    pub eps: f64,
    /// The steps of the Newton-Schulz iteration.
    pub steps: usize,
    /// Whether the iteration is in bf16.
    pub in_bf16: bool,
    /// The rows and columns of the parameter.
    pub shape: [usize; 2],
}

/// The coefficients of the Newton-Schulz iteration. They move singular values from 0 to 1 fast, to about 0.7 to 1.2.
pub const COEFFICIENTS_OF_A_STEP: [f64; 3] = [3.4445, -4.7750, 2.0315];

impl Muon {
    /// Returns the name in errors; there is no kernel for GPUs.
    pub fn kernel(&self) -> &'static str {
        "muon"
    }

    /// Returns the coefficients of the two elementwise passes.
    pub fn words(&self) -> [f64; COEFFICIENTS] {
        let nesterov = f64::from(u8::from(self.nesterov));
        let words = [self.momentum, nesterov, self.decay, self.step_size];
        let [momentum, nesterov, decay, step_size] = words;
        [momentum, nesterov, decay, step_size, 0.0, 0.0, 0.0]
    }
}

/// Writes the direction in place of the parameter.
struct Momentum;

impl Elementwise<1> for Momentum {
    const STATES: [&'static str; 1] = ["momentum_buffer"];

    #[inline(always)]
    fn element<T: Real>(
        [momentum, nesterov, ..]: [T; COEFFICIENTS],
        _: T,
        g: T,
        [buffer]: [T; 1],
    ) -> (T, [T; 1]) {
        let buffer = buffer + (T::ONE - momentum) * (g - buffer);
        let ahead = g + momentum * (buffer - g);
        let direction = if nesterov > T::ZERO { ahead } else { buffer };
        (direction, [buffer])
    }
}

/// Updates a parameter from its orthogonal direction.
struct Apply;

impl Elementwise<0> for Apply {
    const STATES: [&'static str; 0] = [];

    #[inline(always)]
    fn element<T: Real>(
        [_, _, decay, step_size, ..]: [T; COEFFICIENTS],
        p: T,
        direction: T,
        states: [T; 0],
    ) -> (T, [T; 0]) {
        (p * decay - step_size * direction, states)
    }
}

/// The memory of an update: `direction` has the parameter's elements, `scratch` those of [`scratch_elements`].
pub struct Scratch<'a, T, S> {
    pub direction: &'a mut [T],
    pub scratch: &'a mut [S],
}

/// Returns the elements of scratch memory for a matrix, in the dtype of the iteration. `is_wide` is whether that is the
/// dtype of the computation.
pub fn scratch_elements([rows, columns]: [usize; 2], is_wide: bool) -> usize {
    let (n, side) = (rows * columns, rows.min(columns));
    let copies = if is_wide { 1 } else { 2 };
    copies * n + 2 * side * side
}

/// Computes the orthogonal direction from `gradient * factor`, in place of `scratch.direction`, and updates `buffer`.
pub fn direction<G: Stored<Wide = T>, T: Moment<Wide = T> + Real, S: Stored<Wide = T>>(
    rule: &Muon,
    gradient: &[G],
    factor: f64,
    buffer: &mut [T],
    scratch: &mut Scratch<'_, T, S>,
    update: &Update,
) {
    let direction = &mut *scratch.direction;
    if direction.is_empty() {
        return;
    }
    match G::as_wide(gradient) {
        Some(g) => step::<Momentum, T, T, 1>(direction, g, factor, [buffer], update),
        None => {
            let mut wide = vec![T::ZERO; gradient.len()];
            convert(gradient, &mut wide, G::load);
            step::<Momentum, T, T, 1>(direction, &wide, factor, [buffer], update);
        }
    }
    let norm = T::real(reduce::sum_of_squares(direction).sqrt() + rule.eps);
    parallel::for_rows(direction, 1, |_, x| {
        x.iter_mut().for_each(|x| *x /= norm);
    });
    match S::as_wide_mut(scratch.scratch) {
        Some(scratch) => newton_schulz(rule.shape, rule.steps, direction, scratch),
        None => {
            let (x, rest) = scratch.scratch.split_at_mut(direction.len());
            convert(direction, x, |from, to| S::store(from, to));
            newton_schulz(rule.shape, rule.steps, x, rest);
            convert(x, direction, S::load);
        }
    }
}

/// Updates a parameter in the dtype of the computation from its orthogonal direction.
pub fn apply<T: Moment<Wide = T> + Real>(parameter: &mut [T], direction: &[T], update: &Update) {
    step::<Apply, T, T, 0>(parameter, direction, 1.0, [], &unclipped(update));
}

/// Updates a parameter in half precision and its master value from its orthogonal direction.
pub fn apply_half<P: Stored<Wide = f32>>(
    parameter: &mut [P],
    direction: &[f32],
    master: &mut [f32],
    update: &Update,
) {
    step_half::<Apply, P, f32, f32, 0>(parameter, direction, master, [], &unclipped(update));
}

/// Returns an update that does not clip: only gradients are.
fn unclipped(update: &Update) -> Update {
    Update {
        clip_value: f64::INFINITY,
        ..*update
    }
}

/// Makes a matrix of norm 1 nearly orthogonal, in place: with `X` (s, l) the matrix, transposed if it has more rows
/// than columns, each step is
///
/// ```text
/// A = X X^T;  X = a X + (b A + c A^2) X
/// ```
///
/// `scratch` has a matrix and two of (s, s).
fn newton_schulz<S: Stored>(
    [rows, columns]: [usize; 2],
    steps: usize,
    x: &mut [S],
    scratch: &mut [S],
) {
    let side = rows.min(columns);
    let (next, squares) = scratch.split_at_mut(x.len());
    let (gram, squared) = squares.split_at_mut(side * side);
    let squared = &mut squared[..side * side];
    let [a, b, c] = COEFFICIENTS_OF_A_STEP.map(S::Wide::real);
    for _ in 0..steps {
        let matrix = MatRef::new(x, rows, columns);
        match rows > columns {
            true => matmul(matrix.t(), matrix, gram, false, Threads::All),
            false => matmul(matrix, matrix.t(), gram, false, Threads::All),
        }
        let square = MatRef::new(gram, side, side);
        matmul(square, square, squared, false, Threads::All);
        combine(squared, c, gram, b);
        let square = MatRef::new(squared, side, side);
        match rows > columns {
            true => matmul(matrix, square, next, false, Threads::All),
            false => matmul(square, matrix, next, false, Threads::All),
        }
        combine(x, a, next, S::Wide::ONE);
    }
}

/// Computes `y = alpha y + beta x`.
fn combine<S: Stored>(y: &mut [S], alpha: S::Wide, x: &[S], beta: S::Wide) {
    parallel::for_rows(y, 1, |first, y| {
        let x = &x[first..first + y.len()];
        simd::vectorized(
            #[inline(always)]
            || {
                let mut buffers = [[S::Wide::ZERO; BLOCK]; 2];
                for (y, x) in y.chunks_mut(BLOCK).zip(x.chunks(BLOCK)) {
                    let [wide_y, wide_x] = buffers.each_mut().map(|buffer| &mut buffer[..x.len()]);
                    S::load(y, wide_y);
                    S::load(x, wide_x);
                    for (y, x) in wide_y.iter_mut().zip(wide_x.iter()) {
                        *y = alpha * *y + beta * *x;
                    }
                    S::store(wide_y, y);
                }
            },
        );
    });
}

/// Converts all elements by `convert`, in parallel.
fn convert<A: Sync, B: Send>(from: &[A], to: &mut [B], convert: impl Fn(&[A], &mut [B]) + Sync) {
    parallel::for_rows(to, 1, |first, to| {
        convert(&from[first..first + to.len()], to)
    });
}
