//! Captured values are fixed when a step's function is traced; `retrace_every` detects later changes.

use super::{CPU, batch, bits, config, model_and_optimizer};
use crate::settings::meta_of;
use candle_core::{DType, Tensor, Var};
use std::num::NonZeroUsize;
use std::sync::Mutex;
use tallow::attention::{Algorithm, Mask};
use tallow::compile::{Step, StepConfig};
use tallow::graph::Source;
use tallow::optim::{AdamWConfig, Optimizer};
use tallow::{Result, ops};

fn retracing(every: usize) -> StepConfig {
    StepConfig {
        retrace_every: NonZeroUsize::new(every),
        ..Default::default()
    }
}

/// Captured values that may change.
struct Captured {
    factor: f64,
    takes_relu: bool,
    mask: Tensor,
}

impl Captured {
    fn new() -> Self {
        Self {
            factor: 0.5,
            takes_relu: false,
            mask: Tensor::ones((3, 4), DType::F32, &CPU).unwrap(),
        }
    }
}

fn loss(captured: &Captured, frozen: &Tensor, w: &Tensor, x: &Tensor) -> Result<Tensor> {
    let mut y = ops::linear(x, w)?;
    if captured.takes_relu {
        y = ops::relu(&y)?;
    }
    let y = ops::mul(
        &ops::softmax(&y, captured.factor, Mask::Full)?,
        &captured.mask,
    )?;
    let row = frozen.narrow(1, 1, 4)?; // a slice, which the plan copies
    ops::mean(&ops::mul(&y, &row)?)
}

/// Checks that the run after `change` fails with these words, and succeeds without `retrace_every`.
fn after(change: impl Fn(&mut Captured, &Var), words: &[&str]) {
    for every in [None, Some(1), Some(3)] {
        let captured = Mutex::new(Captured::new());
        let frozen = Var::ones((3, 6), DType::F32, &CPU).unwrap();
        let w = Var::ones((4, 4), DType::F32, &CPU).unwrap();
        let mut optimizer =
            Optimizer::new([("w".into(), w.clone())], AdamWConfig::default()).unwrap();
        let config = every.map_or_else(StepConfig::default, retracing);
        let mut step = Step::new(&optimizer, &config, |inputs| {
            loss(&captured.lock().unwrap(), &frozen, &w, &inputs.get("x")?)
        })
        .unwrap();
        let x = Tensor::ones((3, 4), DType::F32, &CPU).unwrap();
        let mut run = || step.run(&mut optimizer, [("x", &x)]);
        run().unwrap();
        change(&mut captured.lock().unwrap(), &frozen);
        for number in 2..=3 {
            let result = run();
            if every.is_none_or(|every| number % every != 0) {
                result.unwrap();
                continue;
            }
            let text = result.unwrap_err().to_string();
            for words in words.iter().chain(&["has changed since", "as an input"]) {
                assert!(text.contains(words), "no {words:?} in {text:?}");
            }
        }
    }
}

#[test]
fn changed_captures() {
    after(
        |captured, _| captured.factor = 0.25,
        &["expected scale of softmax to be 0.5, got 0.25"],
    );
    after(
        |captured, _| captured.takes_relu = true,
        &["expected softmax, got relu"],
    );
    let other = Tensor::full(2f32, (3, 4), &CPU).unwrap();
    let words = ["the constant [3, 4] in f32 that mul reads"];
    after(|captured, _| captured.mask = other.clone(), &words);
    let wide = Tensor::ones((1, 4), DType::F32, &CPU).unwrap();
    after(
        |captured, _| captured.mask = wide.clone(),
        &["[3, 4]", "[1, 4]"],
    );
    let zeros = Tensor::zeros((3, 6), DType::F32, &CPU).unwrap();
    let words = ["the constant [3, 6] in f32 that contiguous reads"];
    after(|_, frozen| frozen.set(&zeros).unwrap(), &words);
}

/// A new tensor with equal elements is no change, and retracing does not affect the steps.
#[test]
fn unchanged_captures() {
    let of = |config: &StepConfig| {
        let w = Var::ones((4, 4), DType::F32, &CPU).unwrap();
        let mut optimizer =
            Optimizer::new([("w".into(), w.clone())], AdamWConfig::default()).unwrap();
        let mut step = Step::new(&optimizer, config, |inputs| {
            let scale = Tensor::full(0.5f32, (3, 4), &CPU)?; // a new tensor in each trace
            ops::mean(&ops::mul(&ops::linear(&inputs.get("x")?, &w)?, &scale)?)
        })
        .unwrap();
        let x = Tensor::ones((3, 4), DType::F32, &CPU).unwrap();
        for _ in 0..4 {
            step.run(&mut optimizer, [("x", &x)]).unwrap();
        }
        let constants = step.constants();
        assert_eq!(constants.len(), 1);
        let (place, value) = constants[0];
        assert_eq!(
            (place, &value.shape[..], &value.source),
            ("mul", &[3, 4][..], &Source::Constant)
        );
        w.as_tensor().to_vec2::<f32>().unwrap()
    };
    assert_eq!(of(&retracing(1)), of(&StepConfig::default()));

    let of = |step_config: StepConfig| {
        let (model, mut optimizer) =
            model_and_optimizer(&meta_of(&config(2, 2, 8, 24), Algorithm::Naive));
        let mut step = Step::for_model(&model, &optimizer, &step_config).unwrap();
        for length in [7, 9, 7] {
            let (tokens, targets) = batch(97, 2, length, 0);
            step.run(&mut optimizer, (&tokens, &targets)).unwrap();
            step.forward((&tokens, &targets)).unwrap();
        }
        bits(&model)
    };
    assert!(of(retracing(1)) == of(StepConfig::default()));
}

/// The least recently used plan is evicted, and the step counts evictions.
#[test]
fn evictions() {
    let (model, mut optimizer) =
        model_and_optimizer(&meta_of(&config(1, 2, 8, 24), Algorithm::Naive));
    let mut step = Step::for_model(&model, &optimizer, &StepConfig::default()).unwrap();
    for (length, evicted) in [
        (3, 0),
        (4, 0),
        (5, 0),
        (6, 0),
        (3, 0),
        (7, 1),
        (4, 2),
        (3, 2),
    ] {
        let (tokens, targets) = batch(97, 2, length, 0);
        step.run(&mut optimizer, (&tokens, &targets)).unwrap();
        assert_eq!(step.evicted_plans(), evicted, "{length}");
    }
    assert_eq!(step.plans().count(), Step::MAX_PLANS);
}
