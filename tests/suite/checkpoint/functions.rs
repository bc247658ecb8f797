//! `nn::checkpoint` on arbitrary functions.

use super::{CPU, bits, gradient_bits, numbers, var};
use candle_core::{DType, Result as CandleResult, Tensor, Var};
use rstest::rstest;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tallow::precision::{self, Autocast};
use tallow::{Result, autocast, nn, no_grad, ops};

type Segment = fn(&Tensor, &[Var]) -> Result<Tensor>;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Mode {
    Plain,
    Checkpoint,
}

impl Mode {
    fn call(self, f: Segment, x: &Tensor, vars: &[Var]) -> Result<Tensor> {
        let vars = vars.to_vec();
        match self {
            Self::Plain => f(x, &vars),
            Self::Checkpoint => nn::checkpoint(move |[x]| f(x, &vars), [x]),
        }
    }
}

/// A function of candle's own ops, with views, a mask of ones and zeros, and a variable used twice.
fn of_candle_ops(x: &Tensor, vars: &[Var]) -> Result<Tensor> {
    let mlp = || -> CandleResult<Tensor> {
        let h = x.matmul(&vars[0].t()?)?.tanh()?;
        let mask = Tensor::new(&[1f32, 0.0, 1.0, 1.0], &CPU)?;
        let h = h.broadcast_mul(&mask)?.narrow(1, 1, 3)?;
        let h = (h.sqr()? + 1.0)?.sqrt()?;
        h.broadcast_add(&vars[1])?.broadcast_div(&vars[1])
    };
    Ok(mlp()?)
}

fn of_crate_ops(x: &Tensor, vars: &[Var]) -> Result<Tensor> {
    let h = ops::linear(x, &vars[0])?;
    ops::softmax(&ops::swiglu(&h, &h)?, 0.7, tallow::attention::Mask::Full)
}

/// Returns a view of the input.
fn transposed(x: &Tensor, _: &[Var]) -> Result<Tensor> {
    Ok(x.t()?)
}

fn identity(x: &Tensor, _: &[Var]) -> Result<Tensor> {
    Ok(x.clone())
}

#[rstest]
#[case::of_candle_ops(of_candle_ops)]
#[case::of_crate_ops(of_crate_ops)]
#[case::transposed(transposed)]
#[case::identity(identity)]
fn gradients_have_the_same_bits(#[case] f: Segment, #[values(false, true)] input_is_var: bool) {
    let vars = [var(&[4, 5], 1), var(&[3], 2)];
    let x = var(&[2, 5], 3);
    let run = |mode: Mode| {
        let input = match input_is_var {
            true => x.as_tensor().clone(),
            false => (x.as_tensor() * 1.5).unwrap(),
        };
        let y = mode.call(f, &input, &vars).unwrap();
        let weights = numbers(y.dims(), 9);
        let loss = (&y * &weights).unwrap().sum_all().unwrap();
        let gradients = loss.backward().unwrap();
        let mut all: Vec<_> = vars
            .iter()
            .map(|var| gradients.get(var).map(bits))
            .collect();
        all.push(Some(bits(gradients.get(&x).unwrap())));
        (bits(&y), y.is_contiguous(), all)
    };
    let (y, _, gradients) = run(Mode::Plain);
    let found = run(Mode::Checkpoint);
    assert_eq!((&found.0, &found.2), (&y, &gradients));
    assert!(found.1);
}

#[test]
fn several_inputs_each_with_its_gradient() {
    let (a, b, c) = (var(&[2, 3], 1), var(&[2, 3], 2), var(&[2, 3], 3));
    let ids = Tensor::new(&[1u32, 0], &CPU).unwrap();
    // b is unused, the ids have no gradient, and a is passed twice.
    let f = |[a, b, c, again, ids]: [&Tensor; 5]| {
        let _ = b;
        let rows = c.index_select(ids, 0)?;
        Ok(((a * rows)? + again.exp()?)?)
    };
    let inputs = [&a, &b, &c, &a, &ids].map(|x| -> &Tensor { x });
    let plain = f(inputs).unwrap().sum_all().unwrap().backward().unwrap();
    let y = nn::checkpoint(f, inputs).unwrap();
    let gradients = y.sum_all().unwrap().backward().unwrap();
    assert_eq!(
        gradient_bits(&gradients, &[&a, &c]),
        gradient_bits(&plain, &[&a, &c])
    );
    assert!(gradients.get(&b).is_none());
}

/// The only input is token ids; everything with a gradient is captured.
#[test]
fn no_input_with_a_gradient() {
    let table = var(&[7, 3], 1);
    let ids = Tensor::new(&[[1u32, 5, 1]], &CPU).unwrap();
    let captured = table.clone();
    let y = nn::checkpoint(move |[ids]| ops::embedding(ids, &captured), [&ids]).unwrap();
    let plain = ops::embedding(&ids, &table).unwrap();
    let gradients = [y, plain].map(|y| y.sqr().unwrap().backward().unwrap());
    let [found, wanted] = gradients.map(|g| gradient_bits(&g, &[&table]));
    assert_eq!(found, wanted);
}

#[test]
fn what_depends_on_nothing_has_no_graph() {
    let x = numbers(&[2, 3], 1);
    assert!(!nn::checkpoint(|[x]| Ok(x.exp()?), [&x]).unwrap().track_op());
    let x = var(&[2, 3], 1);
    assert!(
        !nn::checkpoint(|[x]| Ok(x.detach()), [&x])
            .unwrap()
            .track_op()
    );
    assert!(
        !no_grad(|| nn::checkpoint(|[x]| ops::relu(x), [&x]))
            .unwrap()
            .track_op()
    );
}

/// Three nested checkpoints.
#[test]
fn calls_nest() {
    let vars: Vec<Var> = (0..4).map(|salt| var(&[5, 5], salt)).collect();
    let x = var(&[3, 5], 7);
    let layer = |x: &Tensor, var: &Var| ops::relu(&ops::linear(x, var)?);
    let plain = vars
        .iter()
        .try_fold(x.as_tensor().clone(), |x, var| layer(&x, var));
    let captured = vars.clone();
    let nested = nn::checkpoint(
        move |[x]| {
            let x = layer(x, &captured[0])?;
            let inner = captured.clone();
            let x = nn::checkpoint(
                move |[x]| {
                    let x = layer(x, &inner[1])?;
                    let innermost = inner[2].clone();
                    nn::checkpoint(move |[x]| layer(x, &innermost), [&x])
                },
                [&x],
            )?;
            layer(&x, &captured[3])
        },
        [&x],
    );
    let all: Vec<&Var> = vars.iter().chain([&x]).collect();
    let run = |y: &Tensor| {
        let loss = (y * numbers(y.dims(), 5)).unwrap().sum_all().unwrap();
        gradient_bits(&loss.backward().unwrap(), &all)
    };
    let (plain, nested) = (plain.unwrap(), nested.unwrap());
    assert_eq!(bits(&nested), bits(&plain));
    let wanted = run(&plain);
    assert_eq!(run(&nested), wanted);
    assert_eq!(run(&nested), wanted); // again, recomputing the inner calls
}

/// The function runs once in forward and once in each backward, with forward's settings each time.
#[test]
fn the_function_runs_again_as_it_ran() {
    let seen = Arc::new(AtomicUsize::new(0));
    let w = var(&[4, 4], 1);
    let x = var(&[2, 4], 2);
    let policy = Autocast::cuda(DType::BF16);
    let (counter, weight, wanted) = (seen.clone(), w.clone(), policy.clone());
    let f = move |[x]: [&Tensor; 1]| {
        counter.fetch_add(1, Ordering::Relaxed);
        assert_eq!(precision::current().as_ref(), Some(&wanted));
        assert!(tallow::is_grad_enabled());
        let y = ops::linear(x, &weight)?;
        assert_eq!(y.dtype(), DType::BF16);
        // Disabled inside, like the original.
        autocast(Autocast::disabled(), || {
            ops::linear(&ops::cast(&y, DType::F32)?, &weight)
        })
    };
    let y = autocast(policy.clone(), || nn::checkpoint(f, [&x])).unwrap();
    assert_eq!(seen.load(Ordering::Relaxed), 1);
    let loss = y.sum_all().unwrap();
    let first = loss.backward().unwrap();
    assert_eq!(seen.load(Ordering::Relaxed), 2);
    // Backward under another policy, and under `no_grad`.
    let elsewhere = autocast(Autocast::cpu(DType::F16), || {
        no_grad(|| Ok(loss.backward()?))
    });
    assert_eq!(seen.load(Ordering::Relaxed), 3);
    let both = [&w, &x];
    assert_eq!(
        gradient_bits(&first, &both),
        gradient_bits(&elsewhere.unwrap(), &both)
    );
    let plain = autocast(policy, || {
        let y = ops::linear(&x, &w)?;
        autocast(Autocast::disabled(), || {
            ops::linear(&ops::cast(&y, DType::F32)?, &w)
        })
    });
    let plain = plain.unwrap().sum_all().unwrap().backward().unwrap();
    assert_eq!(gradient_bits(&first, &both), gradient_bits(&plain, &both));
}

/// A function run outside of a region is not cast by a backward inside of one.
#[test]
fn outside_of_regions_stays_outside() {
    let w = var(&[4, 4], 1);
    let x = var(&[2, 4], 2);
    let weight = w.clone();
    let y = nn::checkpoint(move |[x]| ops::linear(x, &weight), [&x]).unwrap();
    let loss = y.sum_all().unwrap();
    let outside = loss.backward().unwrap();
    let inside = autocast(Autocast::cuda(DType::F16), || Ok(loss.backward()?)).unwrap();
    assert_eq!(
        gradient_bits(&outside, &[&w, &x]),
        gradient_bits(&inside, &[&w, &x])
    );
}

/// If weights change between forward and backward, the recomputation casts the new values instead of using the region's
/// old copies.
#[test]
fn casts_are_made_again() {
    let w = var(&[4, 4], 1);
    let x = var(&[2, 4], 2);
    let weight = w.clone();
    let f = move |[x]: [&Tensor; 1]| ops::linear(&ops::linear(x, &weight)?, &weight);
    let region = Autocast::cuda(DType::BF16);
    let loss = |f: &dyn Fn() -> Result<Tensor>| {
        let y = autocast(region.clone(), f).unwrap();
        y.to_dtype(DType::F32).unwrap().sum_all().unwrap()
    };
    let before = loss(&|| nn::checkpoint(f.clone(), [&x]));
    w.set(&numbers(&[4, 4], 11)).unwrap();
    let found = gradient_bits(&before.backward().unwrap(), &[&w, &x]);
    let anew = loss(&|| f([&x]));
    assert_eq!(found, gradient_bits(&anew.backward().unwrap(), &[&w, &x]));
}

/// A captured tensor with a graph has its gradient, although it is no input.
#[test]
fn captured_tensors_are_not_lost() {
    let (w, x) = (var(&[4, 4], 1), var(&[2, 4], 2));
    let captured = ops::linear(&x, &w).unwrap();
    let other = captured.clone();
    let f = move |[x]: [&Tensor; 1]| Ok((x * &other)?);
    let y = nn::checkpoint(f.clone(), [&x]).unwrap();
    let [found, wanted] = [y, f([&x]).unwrap()].map(|y| y.sum_all().unwrap().backward().unwrap());
    for var in [&w, &x] {
        let [a, b] = [&found, &wanted].map(|g| g.get(var).unwrap());
        let difference = (a - b).unwrap().abs().unwrap().max_all().unwrap();
        assert!(difference.to_scalar::<f32>().unwrap() < 1e-5);
    }
}

/// A checkpoint that is used directly and captured by another keeps the gradients of both backwards apart.
#[test]
fn a_captured_checkpoint_is_met_twice() {
    let (w, x) = (var(&[4, 4], 1), var(&[2, 4], 2));
    let weight = w.clone();
    let linear = move |[x]: [&Tensor; 1]| ops::linear(x, &weight);
    let shared = nn::checkpoint(linear, [&x]).unwrap();
    let captured = shared.clone();
    let outer = nn::checkpoint(move |[x]| Ok((x * &captured)?.sqr()?), [&x]).unwrap();
    let plain = ops::linear(&x, &w).unwrap();
    let plain_outer = (x.as_tensor() * &plain).unwrap().sqr().unwrap();
    for (left, right) in [(0.5, 2.0), (2.0, 0.5)] {
        let loss = |a: &Tensor, b: &Tensor| {
            let sum = ((a * left).unwrap() + (b * right).unwrap()).unwrap();
            sum.sum_all().unwrap().backward().unwrap()
        };
        for (found, wanted) in [
            (loss(&shared, &outer), loss(&plain, &plain_outer)),
            (loss(&outer, &shared), loss(&plain_outer, &plain)),
        ] {
            for var in [&w, &x] {
                let [a, b] = [&found, &wanted].map(|g| g.get(var).unwrap());
                let difference = (a - b).unwrap().abs().unwrap().max_all().unwrap();
                let size = b.abs().unwrap().max_all().unwrap();
                let [difference, size] = [difference, size].map(|x| x.to_scalar::<f32>().unwrap());
                assert!(difference < 1e-5 * size, "{difference} of {size}");
            }
        }
    }
}
