//! Gradients in f64 against finite differences of sum(out * d_out), element by element.

use super::problem::{Attend, FLASH, MASKS, Problem, REFERENCE, Sizes, elements};
use candle_core::{DType, Tensor, Var};
use rstest::rstest;
use tallow::no_grad;

/// With this step a fourth-order difference has errors of about 1e-12, both from truncation and from rounding.
const STEP: f64 = 1e-3;

fn objective(problem: &Problem, [q, k, v]: &[Tensor; 3], attend: Attend) -> f64 {
    let (out, _) = no_grad(|| attend(q, k, v, &problem.config)).unwrap();
    let terms = elements(&out);
    terms.iter().zip(&problem.d_out).map(|(y, d)| y * d).sum()
}

/// Returns the fourth-order difference of `f` at 0.
fn slope(f: impl Fn(f64) -> f64) -> f64 {
    (8.0 * (f(STEP) - f(-STEP)) - (f(2.0 * STEP) - f(-2.0 * STEP))) / (12.0 * STEP)
}

fn close(what: &str, found: &[f64], slopes: &[f64]) {
    assert_eq!(found.len(), slopes.len());
    let largest = slopes.iter().fold(0.0f64, |a, x| a.max(x.abs()));
    for (place, (found, slope)) in found.iter().zip(slopes).enumerate() {
        let off = (found - slope).abs();
        assert!(
            off <= 1e-9 * largest,
            "{what} at {place}: {found}, not {slope}"
        );
    }
}

#[rstest]
fn every_element(
    #[values(FLASH, REFERENCE)] attend: Attend,
    #[values((3, 5), (5, 3), (4, 4))] lengths: (usize, usize),
    #[values(None, Some(-0.8))] scale: Option<f64>,
) {
    for mask in MASKS {
        let problem = Problem::random(Sizes::new((2, 2, 1), lengths, 3), mask, scale, 61);
        let results = problem.run(DType::F64, attend);
        let gradients = [results.dq, results.dk, results.dv];
        let inputs = [&problem.q, &problem.k, &problem.v];
        for (i, gradient) in gradients.iter().enumerate() {
            let slopes: Vec<f64> = (0..inputs[i].len())
                .map(|element| {
                    slope(|step| {
                        let mut moved = problem.clone();
                        let input = [&mut moved.q, &mut moved.k, &mut moved.v];
                        input[i][element] += step;
                        objective(&moved, &moved.operands(DType::F64), attend)
                    })
                })
                .collect();
            close(
                &format!("{mask:?} {lengths:?}, input {i}"),
                gradient,
                &slopes,
            );
        }
    }
}

/// A random direction in each input, over more than one tile.
#[rstest]
fn directions_across_tiles(#[values(FLASH, REFERENCE)] attend: Attend) {
    for mask in MASKS {
        for lengths in [(131, 70), (70, 131)] {
            let problem = Problem::random(Sizes::new((1, 2, 1), lengths, 5), mask, None, 62);
            let direction = Problem::random(problem.sizes, mask, None, 63);
            let results = problem.run(DType::F64, attend);
            let gradients = [results.dq, results.dk, results.dv];
            let directions = [&direction.q, &direction.k, &direction.v];
            for i in 0..3 {
                let by_differences = slope(|step| {
                    let mut moved = problem.clone();
                    let input = [&mut moved.q, &mut moved.k, &mut moved.v];
                    for (x, d) in input[i].iter_mut().zip(directions[i]) {
                        *x += 0.1 * step * d;
                    }
                    objective(&moved, &moved.operands(DType::F64), attend)
                });
                let terms = gradients[i]
                    .iter()
                    .zip(directions[i])
                    .map(|(g, d)| 0.1 * g * d);
                let terms: Vec<f64> = terms.collect();
                let size: f64 = terms.iter().map(|x| x.abs()).sum();
                let off = (by_differences - terms.iter().sum::<f64>()).abs();
                assert!(
                    off <= 1e-9 * size,
                    "{mask:?} {lengths:?}, input {i}: {off:e}"
                );
            }
        }
    }
}

/// One tensor used as q, k and v: its three gradients accumulate.
#[rstest]
fn one_tensor_three_times(#[values(FLASH, REFERENCE)] attend: Attend) {
    for mask in MASKS {
        let problem = Problem::random(Sizes::new((2, 2, 2), (4, 4), 3), mask, None, 64);
        let x = Var::from_tensor(&problem.operands(DType::F64)[0]).unwrap();
        let (out, _) = attend(&x, &x, &x, &problem.config).unwrap();
        let loss = (out * problem.d_out(DType::F64))
            .unwrap()
            .sum_all()
            .unwrap();
        let gradients = loss.backward().unwrap();
        let slopes: Vec<f64> = (0..problem.q.len())
            .map(|element| {
                slope(|step| {
                    let mut moved = problem.clone();
                    moved.q[element] += step;
                    let [q, _, _] = moved.operands(DType::F64);
                    objective(&moved, &[q.clone(), q.clone(), q], attend)
                })
            })
            .collect();
        let found = elements(gradients.get(&x).unwrap());
        close(&format!("{mask:?}"), &found, &slopes);
    }
}
