//! Errors of results against exact ones, and their bounds.

use super::case::{Case, Outcome, cast, elements};
use candle_core::{DType, Tensor};

/// The norm of an error tensor, and its largest element.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    pub norm: f64,
    pub max: f64,
}

fn size(values: impl Iterator<Item = f64>) -> Size {
    let (mut squares, mut max) = (0.0, 0.0f64);
    for value in values {
        squares += value * value;
        max = max.max(value.abs()); // ignores NaN, which the norm keeps
    }
    Size {
        norm: squares.sqrt(),
        max,
    }
}

pub fn magnitude(tensor: &Tensor) -> Size {
    size(elements(tensor).into_iter())
}

pub fn error(tensor: &Tensor, exact: &Tensor) -> Size {
    assert_eq!(tensor.dims(), exact.dims());
    let (a, b) = (elements(tensor), elements(exact));
    size(a.into_iter().zip(b).map(|(a, b)| a - b))
}

/// Checks that |a - b| / |b| by norm is at most `limit`, and that no element's error exceeds `limit` of the largest
/// element.
pub fn assert_close(what: &str, tensor: &Tensor, exact: &Tensor, limit: f64) {
    let (error, exact) = (error(tensor, exact), magnitude(exact));
    assert!(
        error.norm <= limit * exact.norm && error.max <= limit * exact.max,
        "{what}: off by {error:?} of {exact:?}, which is over {limit:e}"
    );
}

/// Returns the distance between 1 and the next number of a dtype.
pub fn epsilon(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => f64::EPSILON,
        DType::F32 => f64::from(f32::EPSILON),
        DType::F16 => 2f64.powi(-10),
        DType::BF16 => 2f64.powi(-7),
        other => panic!("epsilon of {other:?}"),
    }
}

/// Returns the sizes that errors are relative to, for the output and each gradient: the exact result's size, or that of
/// its terms where it is a small difference of large ones.
fn yardsticks(case: &Case, exact: &Outcome) -> Vec<Size> {
    let gradients = exact.gradients.iter().map(|(_, gradient)| gradient);
    let tensors = std::iter::once(&exact.out).chain(gradients);
    let mut sizes: Vec<Size> = tensors.map(magnitude).collect();
    if let Some(terms) = &case.terms {
        let terms = terms(&exact.out, &case.upstream(&exact.out));
        sizes[1] = Size {
            norm: sizes[1].norm.max(terms),
            max: sizes[1].max.max(terms),
        };
    }
    sizes
}

/// Returns the named errors of the output and each gradient.
fn errors<'a>(run: &'a Outcome, exact: &'a Outcome) -> impl Iterator<Item = (String, Size)> + 'a {
    assert_eq!(run.gradients.len(), exact.gradients.len());
    let gradients = run.gradients.iter().zip(&exact.gradients);
    let gradients = gradients.map(|((name, a), (_, b))| (format!("d_{name}"), error(a, b)));
    std::iter::once(("out".into(), error(&run.out, &exact.out))).chain(gradients)
}

/// Checks that output and gradients are within `limit` of `exact`, relative by norm and for the largest error.
pub fn assert_agree(case: &Case, run: &Outcome, exact: &Outcome, limit: f64) {
    for ((what, error), size) in errors(run, exact).zip(yardsticks(case, exact)) {
        assert!(
            error.norm <= limit * size.norm && error.max <= limit * size.max,
            "{}: {what}: off by {error:?} of {size:?}, which is over {limit:e}",
            case.name
        );
    }
}

/// Checks `run` against `judge`, another computation in the same dtype: the error of `run` against f64 is at most twice
/// (gradients: three times) that of `judge`, plus (4 eps max|score| + 8 eps) of the exact result.
pub fn assert_no_worse(case: &Case, run: &Outcome, judge: &Outcome, exact: &Outcome) {
    let eps = epsilon(judge.out.dtype());
    let floor = 4.0 * eps * case.largest_score + 8.0 * eps;
    let pairs = errors(run, exact).zip(errors(judge, exact));
    for (((what, ours), (_, theirs)), size) in pairs.zip(yardsticks(case, exact)) {
        let factor = if what == "out" { 2.0 } else { 3.0 };
        assert!(
            ours.norm <= factor * theirs.norm + floor * size.norm
                && ours.max <= factor * theirs.max + floor * size.max,
            "{}: {what}: off by {ours:?}, the other by {theirs:?}, of {size:?}",
            case.name
        );
    }
}

/// Checks that `run`, in half precision, is rounded only once: its error is at most 1.1 times that of rounding the
/// exact result to the same dtypes, plus the error of the f32 arithmetic before it.
pub fn assert_rounded_once(case: &Case, run: &Outcome, exact: &Outcome) {
    let rounded = |exact: &Tensor, like: &Tensor| cast(&cast(exact, like.dtype()), DType::F64);
    let gradients = exact.gradients.iter().zip(&run.gradients);
    let rounding = Outcome {
        out: rounded(&exact.out, &run.out),
        gradients: gradients
            .map(|((name, exact), (_, like))| (*name, rounded(exact, like)))
            .collect(),
    };
    let eps = epsilon(DType::F32);
    let floor = 4.0 * eps * case.largest_score + 8.0 * eps;
    let pairs = errors(run, exact).zip(errors(&rounding, exact));
    for (((what, ours), (_, least)), size) in pairs.zip(yardsticks(case, exact)) {
        assert!(
            ours.norm <= 1.1 * least.norm + floor * size.norm
                && ours.max <= 1.1 * least.max + floor * size.max,
            "{} in {:?}: {what}: off by {ours:?}, rounding by {least:?}, of {size:?}",
            case.name,
            run.out.dtype()
        );
    }
}
