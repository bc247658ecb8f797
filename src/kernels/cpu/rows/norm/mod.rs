//! RMSNorm and LayerNorm, optionally with a residual addition before them. Backward computes all gradients in one pass.
//!
//! X is the dtype of the residual stream and Y that of the branch and the output. They are equal, or X is the dtype of
//! the computation and Y is half precision. Rows in half precision are converted first, and summed block by block.

use crate::kernels::cpu::parallel::{self, BLOCK_ROWS, Shared};
use crate::kernels::cpu::{Real, Stored, simd, simd::BLOCK};
use crate::kernels::norm::Norm;
use std::borrow::Cow;

/// Inputs of both passes.
#[derive(Clone, Copy)]
pub struct Inputs<'a, X, W> {
    /// (rows, width).
    pub x: &'a [X],
    /// (width).
    pub weight: &'a [W],
    /// LayerNorm's: (width).
    pub bias: &'a [W],
}

/// Outputs of forward.
pub struct Outputs<'a, Y: Stored> {
    /// (rows, width).
    pub y: &'a mut [Y],
    /// (rows, [`statistics`](Norm::statistics)).
    pub statistics: &'a mut [Y::Wide],
}

/// A branch that is added to x, and their sum.
pub struct Branch<'a, X, Y> {
    /// (rows, width).
    pub branch: &'a [Y],
    /// x + branch, rounded to X: (rows, width).
    pub sum: &'a mut [X],
}

/// Computes `y` and the statistics of x, or of x + branch.
pub fn forward<X: Stored<Wide = Y::Wide>, Y: Stored>(
    norm: Norm,
    eps: f64,
    inputs: Inputs<'_, X, Y::Wide>,
    branch: Option<Branch<'_, X, Y>>,
    outputs: Outputs<'_, Y>,
) {
    let weight = factors_of(norm, inputs.weight);
    let inputs = Inputs {
        weight: &weight,
        ..inputs
    };
    match norm {
        Norm::Rms | Norm::OffsetRms => forward_rows::<X, Y, false>(eps, inputs, branch, outputs),
        Norm::Layer => forward_rows::<X, Y, true>(eps, inputs, branch, outputs),
    }
}

/// Returns the factors of a row's normed elements: the weight, or 1 + weight.
fn factors_of<W: Real>(norm: Norm, weight: &[W]) -> Cow<'_, [W]> {
    match norm {
        Norm::Rms | Norm::Layer => weight.into(),
        Norm::OffsetRms => weight.iter().map(|w| W::ONE + *w).collect(),
    }
}

fn forward_rows<X: Stored<Wide = Y::Wide>, Y: Stored, const CENTERED: bool>(
    eps: f64,
    inputs: Inputs<'_, X, Y::Wide>,
    branch: Option<Branch<'_, X, Y>>,
    outputs: Outputs<'_, Y>,
) {
    let Inputs { x, weight, bias } = inputs;
    let (width, eps) = (weight.len(), Y::Wide::real(eps));
    let kept = if CENTERED { 2 } else { 1 };
    assert_eq!(x.len(), outputs.y.len());
    let statistics = Shared::new(outputs.statistics);
    let branch = branch.map(|of| (of.branch, Shared::new(of.sum)));
    parallel::for_rows(outputs.y, width, |first, y| {
        let mut wide_row = WideRow::<X>::new(width);
        simd::vectorized(
            #[inline(always)]
            || {
                for (i, y) in y.chunks_exact_mut(width).enumerate() {
                    let at = (first + i) * width;
                    let mut row = &x[at..at + width];
                    if let Some((branch, sum)) = &branch {
                        // SAFETY: only this task has these rows.
                        let sum = unsafe { sum.range(at, width) };
                        add_row(row, &branch[at..at + width], sum);
                        row = sum;
                    }
                    let x = wide_row.wide(row);
                    let [mean, rstd] = moments::<Y::Wide, CENTERED>(x, block_of::<X>(width), eps);
                    // SAFETY: as above.
                    let statistics = unsafe { statistics.range((first + i) * kept, kept) };
                    statistics[0] = mean;
                    statistics[kept - 1] = rstd;
                    normed::<Y, CENTERED>(x, [weight, bias], [mean, rstd], y);
                }
            },
        );
    });
}

/// A buffer for a row that is converted to the dtype of the computation.
struct WideRow<S: Stored>(Vec<S::Wide>);

impl<S: Stored> WideRow<S> {
    fn new(width: usize) -> Self {
        let is_wide = S::as_wide(&[]).is_some();
        Self(vec![S::Wide::ZERO; if is_wide { 0 } else { width }])
    }

    #[inline(always)]
    fn wide<'a>(&'a mut self, row: &'a [S]) -> &'a [S::Wide] {
        match S::as_wide(row) {
            Some(row) => row,
            None => {
                S::load(row, &mut self.0);
                &self.0
            }
        }
    }
}

/// Returns the number of elements that are summed together: all of a row, or a block in half precision.
fn block_of<S: Stored>(width: usize) -> usize {
    match S::as_wide(&[]) {
        Some(_) => width,
        None => BLOCK,
    }
}

/// Computes `sum = x + branch`, rounded to x's dtype.
#[inline(always)]
fn add_row<X: Stored<Wide = Y::Wide>, Y: Stored>(x: &[X], branch: &[Y], sum: &mut [X]) {
    let mut blocks = [[X::Wide::ZERO; BLOCK]; 2];
    let [wide_x, wide_branch] = &mut blocks;
    let rows = x.chunks(BLOCK).zip(branch.chunks(BLOCK));
    for ((x, branch), sum) in rows.zip(sum.chunks_mut(BLOCK)) {
        let x = loaded(x, wide_x);
        let branch = loaded(branch, wide_branch);
        match X::as_wide_mut(sum) {
            Some(sum) => add(x, branch, sum),
            None => {
                let mut wide = [X::Wide::ZERO; BLOCK];
                let wide = &mut wide[..sum.len()];
                add(x, branch, wide);
                X::store(wide, sum);
            }
        }
    }
}

#[inline(always)]
fn add<T: Real>(a: &[T], b: &[T], sum: &mut [T]) {
    for ((sum, a), b) in sum.iter_mut().zip(a).zip(b) {
        *sum = *a + *b;
    }
}

/// Returns a block in the dtype of the computation.
#[inline(always)]
fn loaded<'b, S: Stored>(x: &'b [S], buffer: &'b mut [S::Wide; BLOCK]) -> &'b [S::Wide] {
    match S::as_wide(x) {
        Some(x) => x,
        None => {
            let wide = &mut buffer[..x.len()];
            S::load(x, wide);
            wide
        }
    }
}

/// Returns mean and rstd of a row; the mean is 0 for RMSNorm.
#[inline(always)]
fn moments<T: Real, const CENTERED: bool>(x: &[T], block: usize, eps: T) -> [T; 2] {
    let share = T::real(1.0 / x.len() as f64);
    let blocks = || x.chunks(block);
    let (mut mean, mut squares) = (T::ZERO, T::ZERO);
    if CENTERED {
        blocks().for_each(|x| mean += simd::sum(x));
        mean *= share;
        // Two passes: the mean of squares minus the square of the mean would cancel.
        let centred = |x: &[T]| simd::sum_over([x], |[x]| (x - mean) * (x - mean));
        blocks().for_each(|x| squares += centred(x));
    } else {
        blocks().for_each(|x| squares += simd::dot(x, x));
    }
    [mean, T::ONE / (squares * share + eps).square_root()]
}

/// Computes y of a row.
#[inline(always)]
fn normed<Y: Stored, const CENTERED: bool>(
    x: &[Y::Wide],
    [weight, bias]: [&[Y::Wide]; 2],
    moments: [Y::Wide; 2],
    y: &mut [Y],
) {
    if let Some(y) = Y::as_wide_mut(y) {
        return scale::<_, CENTERED>(x, [weight, bias], moments, y);
    }
    let mut buffer = [Y::Wide::ZERO; BLOCK];
    for (i, y) in y.chunks_mut(BLOCK).enumerate() {
        let elements = i * BLOCK..i * BLOCK + y.len();
        let affine = [
            &weight[elements.clone()],
            bias.get(elements.clone()).unwrap_or_default(),
        ];
        let wide = &mut buffer[..y.len()];
        scale::<_, CENTERED>(&x[elements], affine, moments, wide);
        Y::store(wide, y);
    }
}

#[inline(always)]
fn scale<T: Real, const CENTERED: bool>(
    x: &[T],
    [weight, bias]: [&[T]; 2],
    [mean, rstd]: [T; 2],
    y: &mut [T],
) {
    let terms = y.iter_mut().zip(x).zip(weight);
    if CENTERED {
        for (((y, x), w), b) in terms.zip(bias) {
            *y = (*x - mean) * rstd * *w + *b;
        }
    } else {
        for ((y, x), w) in terms {
            *y = *x * rstd * *w;
        }
    }
}

/// The gradient of a norm's output (rows, width).
pub enum OutputGradient<'a, Y> {
    /// Only read.
    Read(&'a [Y]),
    /// Overwritten by the output, with the bits of forward, so that forward's output need not be saved.
    Becomes(&'a mut [Y]),
}

/// Outputs of backward.
pub struct Gradients<'a, X: Stored> {
    /// (rows, width).
    pub dx: &'a mut [X],
    /// Whether to add to `dx`.
    pub add_dx: bool,
    /// (width).
    pub dw: &'a mut [X::Wide],
    /// Whether to add to `dw`.
    pub add_dw: bool,
    /// LayerNorm's: (width).
    pub db: &'a mut [X::Wide],
    /// Whether to add to `db`.
    pub add_db: bool,
}

/// Returns the number of elements of scratch that [`backward`] needs.
pub const fn partials_len(norm: Norm, rows: usize, width: usize) -> usize {
    rows.div_ceil(BLOCK_ROWS) * width * norm.sums()
}

/// Computes the gradients of x (or of x + branch), the weight and the bias, reading each row of dy and x once.
/// `statistics` are forward's; `partials` is scratch of [`partials_len`] elements.
///
/// With h = (x - mean) rstd and g = dy w: `dx = rstd (g - mean(g) - h mean(g h))`, without mean(g) in RMSNorm;
/// `dw = sum over rows of dy h`, `db = sum over rows of dy`.
pub fn backward<X: Stored<Wide = Y::Wide>, Y: Stored>(
    norm: Norm,
    dy: OutputGradient<'_, Y>,
    inputs: Inputs<'_, X, Y::Wide>,
    statistics: &[Y::Wide],
    gradients: Gradients<'_, X>,
    partials: &mut [Y::Wide],
) {
    let weight = factors_of(norm, inputs.weight);
    let inputs = Inputs {
        weight: &weight,
        ..inputs
    };
    match norm {
        Norm::Rms | Norm::OffsetRms => {
            backward_rows::<X, Y, false>(dy, inputs, statistics, gradients, partials)
        }
        Norm::Layer => backward_rows::<X, Y, true>(dy, inputs, statistics, gradients, partials),
    }
}

fn backward_rows<X: Stored<Wide = Y::Wide>, Y: Stored, const CENTERED: bool>(
    dy: OutputGradient<'_, Y>,
    inputs: Inputs<'_, X, Y::Wide>,
    statistics: &[Y::Wide],
    gradients: Gradients<'_, X>,
    partials: &mut [Y::Wide],
) {
    let Inputs { x, weight, bias } = inputs;
    let width = weight.len();
    let kept = if CENTERED { 2 } else { 1 };
    let (rows, add_dx) = (statistics.len() / kept, gradients.add_dx);
    let dx = Shared::new(gradients.dx);
    let (read, becomes) = match dy {
        OutputGradient::Read(dy) => (dy, None),
        OutputGradient::Becomes(dy) => (&[][..], Some(Shared::new(dy))),
    };
    let sums = Shared::new(&mut *partials);
    parallel::for_tasks(rows.div_ceil(BLOCK_ROWS), |task| {
        // SAFETY: only this task has these sums.
        let sums = unsafe { sums.range(task * kept * width, kept * width) };
        let (mut of_x, mut of_dy) = (WideRow::<X>::new(width), WideRow::<Y>::new(width));
        let mut of_dx = WideRow::<X>::new(width);
        simd::vectorized(
            #[inline(always)]
            || {
                sums.fill(Y::Wide::ZERO);
                let (dw, db) = sums.split_at_mut(width);
                for row in task * BLOCK_ROWS..rows.min((task + 1) * BLOCK_ROWS) {
                    let at = row * width;
                    let moments = [statistics[row * kept], statistics[row * kept + kept - 1]];
                    let x = of_x.wide(&x[at..at + width]);
                    // SAFETY: only this task has these rows.
                    let dx = unsafe { dx.range(at, width) };
                    let mut gradient = |dy: &[Y]| {
                        let inputs = [of_dy.wide(dy), x, weight];
                        let pulls = pulls::<_, CENTERED>(inputs, moments, block_of::<Y>(width));
                        let factors = (moments, pulls);
                        if let Some(dx) = X::as_wide_mut(dx) {
                            gradient_row::<_, CENTERED>(inputs, factors, (dx, add_dx), dw, db);
                            return;
                        }
                        let wide = &mut of_dx.0[..];
                        if add_dx {
                            X::load(dx, wide);
                        }
                        gradient_row::<_, CENTERED>(inputs, factors, (wide, add_dx), dw, db);
                        X::store(wide, dx);
                    };
                    match &becomes {
                        None => gradient(&read[at..at + width]),
                        Some(dy) => {
                            // SAFETY: as above.
                            let dy = unsafe { dy.range(at, width) };
                            gradient(dy);
                            normed::<Y, CENTERED>(x, [weight, bias], moments, dy);
                        }
                    }
                }
            },
        );
    });
    let outputs = [
        (gradients.dw, gradients.add_dw),
        (gradients.db, gradients.add_db),
    ];
    for (sum, (out, adds)) in outputs.into_iter().enumerate().take(kept) {
        if !adds {
            out.fill(Y::Wide::ZERO);
        }
        simd::vectorized(
            #[inline(always)]
            || {
                for partial in partials.chunks_exact(kept * width) {
                    for (out, partial) in out.iter_mut().zip(&partial[sum * width..]) {
                        *out += *partial;
                    }
                }
            },
        );
    }
}

/// Returns mean(g) and mean(g h) rstd, which a row's dx subtracts.
#[inline(always)]
fn pulls<T: Real, const CENTERED: bool>(
    [dy, x, weight]: [&[T]; 3],
    [mean, rstd]: [T; 2],
    block: usize,
) -> [T; 2] {
    let share = T::real(1.0 / x.len() as f64);
    let (mut of_g, mut of_gh) = (T::ZERO, T::ZERO);
    let blocks = dy.chunks(block).zip(x.chunks(block));
    for ((dy, x), weight) in blocks.zip(weight.chunks(block)) {
        if CENTERED {
            of_g += simd::dot(dy, weight);
            of_gh += simd::sum_over([dy, weight, x], |[dy, w, x]| dy * w * (x - mean));
        } else {
            of_gh += simd::sum_over([dy, weight, x], |[dy, w, x]| dy * w * x);
        }
    }
    [of_g * share, of_gh * share * rstd * rstd]
}

/// Computes dx of a row and adds to dw and db.
#[inline(always)]
fn gradient_row<T: Real, const CENTERED: bool>(
    [dy, x, weight]: [&[T]; 3],
    ([mean, rstd], [g_mean, pull]): ([T; 2], [T; 2]),
    (dx, add_dx): (&mut [T], bool),
    dw: &mut [T],
    db: &mut [T],
) {
    let terms = dx.iter_mut().zip(dw).zip(dy).zip(x).zip(weight);
    if CENTERED {
        for (((((dx, dw), dy), x), w), db) in terms.zip(db) {
            let centred = *x - mean;
            let gradient = (*dy * *w - g_mean - centred * pull) * rstd;
            *dx = if add_dx { *dx + gradient } else { gradient };
            *dw += *dy * centred * rstd;
            *db += *dy;
        }
    } else if add_dx {
        for ((((dx, dw), dy), x), w) in terms {
            *dx += (*dy * *w - *x * pull) * rstd;
            *dw += *dy * *x * rstd;
        }
    } else {
        for ((((dx, dw), dy), x), w) in terms {
            *dx = (*dy * *w - *x * pull) * rstd;
            *dw += *dy * *x * rstd;
        }
    }
}

#[cfg(test)]
mod tests;
