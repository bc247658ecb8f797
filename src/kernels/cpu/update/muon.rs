//! Muon's update of matrices.
//!
//! ```text
//! b += (1 - momentum) (g - b);  d = g + momentum (b - g) (Nesterov) or b
//! p  = decay p - step_size orthogonal(d)
//! ```
//!
//! The two lines are elementwise passes, [`direction`] and [`Step`]. `orthogonal` is a Newton-Schulz
//! [iteration](Iteration). Its matmuls bound the update.

use super::{COEFFICIENTS, Elementwise, Moment, Real, Stored, Update, step};
use crate::kernels::cpu::gemm::{MatRef, Threads, matmul};
use crate::kernels::cpu::parallel::Shared;
use crate::kernels::cpu::simd::{self, BLOCK};
use crate::kernels::cpu::{parallel, reduce};
use crate::kernels::workspace;
use candle_core::DType;

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
    /// The iteration that makes the direction orthogonal.
    pub iteration: Iteration,
}

/// The Newton-Schulz iteration of a matrix, which makes it nearly orthogonal. With `X` the matrix, divided by its
/// Frobenius norm plus eps, and transposed if it has more rows than columns, each step is
///
/// ```text
/// A = X X^T;  X = a X + (b A + c A^2) X
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Iteration {
    /// The number of steps.
    pub steps: usize,
    /// The eps that is added to the norm.
    pub eps: f64,
    /// Whether it is in bf16.
    pub in_bf16: bool,
    /// The rows and columns of the matrix.
    pub shape: [usize; 2],
}

/// The name of the kernel of [`direction`] on a GPU.
#[cfg(feature = "cuda")]
pub const DIRECTION: &str = "muon_direction";

/// The coefficients a, b and c of the iteration. They move singular values from 0 to 1 fast, to about 0.7 to 1.2.
pub const COEFFICIENTS_OF_A_STEP: [f64; 3] = [3.4445, -4.7750, 2.0315];

impl Iteration {
    /// Returns the number of elements of the matrix.
    pub fn elements(&self) -> usize {
        self.shape[0] * self.shape[1]
    }

    /// Returns the smaller side of the matrix.
    pub fn side(&self) -> usize {
        self.shape[0].min(self.shape[1])
    }

    /// Returns whether the matrix has more rows than columns.
    pub fn is_tall(&self) -> bool {
        self.shape[0] > self.shape[1]
    }

    /// Returns the FLOPs of the matmuls: `4 s^2 l + 2 s^3` a step, with s and l the smaller and the larger side.
    pub fn flops(&self) -> f64 {
        let (elements, side) = (self.elements() as f64, self.side() as f64);
        self.steps as f64 * (4.0 * side * elements + 2.0 * side * side * side)
    }

    /// Returns name, elements and dtype of the scratch memory for `count` matrices. `wide` is the dtype of the
    /// computation.
    pub fn scratch(
        &self,
        count: usize,
        wide: DType,
        on_gpu: bool,
    ) -> Vec<(&'static str, usize, DType)> {
        let dtype = if self.in_bf16 { DType::BF16 } else { wide };
        let (matrices, squares) = (count * self.elements(), count * self.side() * self.side());
        let rounded = self.in_bf16.then_some(("x", matrices, dtype));
        let others = [("next", matrices), ("gram", squares), ("square", squares)];
        let others = others.map(|(name, elements)| (name, elements, dtype));
        let sums = count * workspace::chunks(self.elements());
        let sums = on_gpu.then_some(("sums", sums, DType::F64));
        rounded.into_iter().chain(others).chain(sums).collect()
    }
}

impl Muon {
    /// Returns the name of the kernel of [`Step`] on a GPU.
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

/// Updates a parameter from its orthogonal direction, which takes the place of the gradient.
pub struct Step;

impl Elementwise<0> for Step {
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

/// Computes the direction from `gradient * factor`, and updates `buffer`. All have the length of a matrix or of a part
/// of one.
pub fn direction<G: Stored<Wide = T>, T: Moment<Wide = T> + Real>(
    direction: &mut [T],
    gradient: &[G],
    factor: f64,
    buffer: &mut [T],
    update: &Update,
) {
    match G::as_wide(gradient) {
        Some(g) => step::<Momentum, T, T, 1>(direction, g, factor, [buffer], update),
        None => {
            let mut wide = vec![T::ZERO; gradient.len()];
            convert(gradient, &mut wide, G::load, Threads::All);
            step::<Momentum, T, T, 1>(direction, &wide, factor, [buffer], update);
        }
    }
}

/// Scratch memory of [`orthogonalize`], by the names of [`Iteration::scratch`]; `x` is empty in the dtype of the
/// computation.
pub struct Scratch<'a, S> {
    /// The rounded matrices.
    pub x: &'a mut [S],
    /// The matrices after a step.
    pub next: &'a mut [S],
    /// `A = X X^T` of each.
    pub gram: &'a mut [S],
    /// `b A + c A^2` of each.
    pub square: &'a mut [S],
}

/// Makes matrices of one shape, stored one after another, nearly orthogonal, in place.
///
/// Parallel over the matrices if there are at least as many as threads, else inside each step of the iteration.
pub fn orthogonalize<T: Real + Stored<Wide = T>, S: Stored<Wide = T>>(
    iteration: &Iteration,
    matrices: &mut [T],
    scratch: Scratch<'_, S>,
) {
    let (n, side) = (iteration.elements(), iteration.side());
    if matrices.is_empty() {
        return;
    }
    let (count, squares) = (matrices.len() / n, side * side);
    let matrices = Shared::new(matrices);
    let rounded = if scratch.x.is_empty() { 0 } else { n };
    let Scratch {
        x,
        next,
        gram,
        square,
    } = scratch;
    let [x, next, gram, square] = [x, next, gram, square].map(Shared::new);
    let each = |i: usize, threads: Threads| {
        // SAFETY: matrix i has parts of its own, and is run once.
        let (matrix, parts) = unsafe {
            let parts = [
                x.range(i * rounded, rounded),
                next.range(i * n, n),
                gram.range(i * squares, squares),
                square.range(i * squares, squares),
            ];
            (matrices.range(i * n, n), parts)
        };
        one(iteration, matrix, parts, threads);
    };
    match count < rayon::current_num_threads() {
        true => (0..count).for_each(|i| each(i, Threads::All)),
        false => parallel::for_tasks(count, |i| each(i, Threads::One)),
    }
}

/// Makes one matrix nearly orthogonal, in place.
fn one<T: Real + Stored<Wide = T>, S: Stored<Wide = T>>(
    iteration: &Iteration,
    matrix: &mut [T],
    [x, next, gram, square]: [&mut [S]; 4],
    threads: Threads,
) {
    let norm = T::real(reduce::sum_of_squares(matrix).sqrt() + iteration.eps);
    for_blocks(matrix, threads, |_, x| {
        x.iter_mut().for_each(|x| *x /= norm);
    });
    if x.is_empty() {
        let wide = [next, gram, square].map(|part| S::as_wide_mut(part));
        let [Some(next), Some(gram), Some(square)] = wide else {
            panic!("an iteration in another dtype needs a rounded matrix");
        };
        return newton_schulz(iteration, matrix, [next, gram, square], threads);
    }
    convert(matrix, x, |from, to| S::store(from, to), threads);
    newton_schulz(iteration, x, [next, gram, square], threads);
    convert(x, matrix, S::load, threads);
}

/// Runs the steps of the iteration on a matrix of norm 1, in place.
fn newton_schulz<S: Stored>(
    iteration: &Iteration,
    x: &mut [S],
    [next, gram, squared]: [&mut [S]; 3],
    threads: Threads,
) {
    let ([rows, columns], side) = (iteration.shape, iteration.side());
    let [a, b, c] = COEFFICIENTS_OF_A_STEP.map(S::Wide::real);
    for _ in 0..iteration.steps {
        let matrix = MatRef::new(x, rows, columns);
        match iteration.is_tall() {
            true => matmul(matrix.t(), matrix, gram, false, threads),
            false => matmul(matrix, matrix.t(), gram, false, threads),
        }
        let square = MatRef::new(gram, side, side);
        matmul(square, square, squared, false, threads);
        combine(squared, c, gram, b, threads);
        let square = MatRef::new(squared, side, side);
        match iteration.is_tall() {
            true => matmul(matrix, square, next, false, threads),
            false => matmul(square, matrix, next, false, threads),
        }
        combine(x, a, next, S::Wide::ONE, threads);
    }
}

/// Computes `y = alpha y + beta x`.
fn combine<S: Stored>(y: &mut [S], alpha: S::Wide, x: &[S], beta: S::Wide, threads: Threads) {
    for_blocks(y, threads, |first, y| {
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

/// Converts all elements by `convert`.
fn convert<A: Sync, B: Send>(
    from: &[A],
    to: &mut [B],
    convert: impl Fn(&[A], &mut [B]) + Sync,
    threads: Threads,
) {
    for_blocks(to, threads, |first, to| {
        convert(&from[first..first + to.len()], to)
    });
}

/// Calls `f` with consecutive elements and the index of their first.
fn for_blocks<T: Send>(x: &mut [T], threads: Threads, f: impl Fn(usize, &mut [T]) + Sync) {
    match threads {
        Threads::All => parallel::for_rows(x, 1, f),
        Threads::One => f(0, x),
    }
}
