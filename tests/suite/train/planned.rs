//! Runs whose steps are planned.

use super::*;
use rstest::rstest;
use tallow::attention::Algorithm;
use tallow::precision::Precision;

fn compiled(config: TrainConfig) -> Trainer {
    let mut trainer = start(config);
    trainer.compile().unwrap();
    trainer
}

/// The same losses, norms and learning rates as eager steps, and the same evaluations.
#[rstest]
#[case(1, Some(1.0))]
#[case(3, Some(0.5))]
#[case(2, None)]
fn the_curve_is_the_eager_one(#[case] accumulation: usize, #[case] max_grad_norm: Option<f64>) {
    let config = TrainConfig {
        accumulation,
        max_grad_norm,
        ..settings()
    };
    let mut eager = start(config.clone());
    let mut planned = compiled(config);
    assert!(eager.plan().is_none() && planned.plan().is_some());
    for _ in 0..12 {
        let wanted = eager.step().unwrap().unwrap();
        let got = planned.step().unwrap().unwrap();
        approx::assert_relative_eq!(got.loss, wanted.loss, max_relative = 1e-5);
        approx::assert_relative_eq!(got.grad_norm, wanted.grad_norm, max_relative = 1e-4);
        let rest = StepReport {
            loss: wanted.loss,
            grad_norm: wanted.grad_norm,
            ..got
        };
        assert_eq!(rest, wanted);
    }
    assert!(planned.step().unwrap().is_none());
    let (wanted, got) = (eager.evaluate().unwrap(), planned.evaluate().unwrap());
    approx::assert_relative_eq!(got, wanted, max_relative = 1e-5);
    assert_eq!(planned.history().losses.len(), 12);
    assert_eq!(planned.optimizer().steps(), 12);
}

/// Stopped, saved, resumed and compiled again, it is the run that was not stopped; evaluations change nothing.
#[rstest]
#[case(Algorithm::Naive, 1)]
#[case(Algorithm::Flash, 2)]
fn resumed_it_has_the_same_bits(#[case] attention: Algorithm, #[case] accumulation: usize) {
    let sizes = TransformerConfig {
        attention,
        ..sizes()
    };
    let config = TrainConfig {
        accumulation,
        ..settings()
    };
    let device = candle_core::Device::Cpu;
    let begin = || {
        let model = TransformerLM::new(&sizes, 5, &device).unwrap();
        Trainer::new(model, config.clone(), training(), validation()).unwrap()
    };
    let mut whole = begin();
    whole.compile().unwrap();
    let expected = take(&mut whole, usize::MAX);
    let (_folder, path) = checkpoint();
    let mut first = begin();
    first.compile().unwrap();
    let mut reports = take(&mut first, 5);
    first.evaluate().unwrap();
    first.save(&path).unwrap();
    let again = || {
        Trainer::resume(
            &path,
            &sizes,
            config.clone(),
            training(),
            validation(),
            &device,
        )
        .unwrap()
    };
    let mut second = again();
    second.compile().unwrap();
    reports.extend(take(&mut second, usize::MAX));
    assert_eq!(reports, expected);
    assert_eq!(bits(&second), bits(&whole));

    // Resumed eagerly it goes on too, but for rounding.
    let mut eager = again();
    for (got, wanted) in take(&mut eager, usize::MAX).iter().zip(&expected[5..]) {
        approx::assert_relative_eq!(got.loss, wanted.loss, max_relative = 1e-5);
    }
}

/// A run may be compiled in its middle, and its weights are still its model's.
#[test]
fn from_the_middle_on() {
    let mut trainer = start(settings());
    take(&mut trainer, 4);
    let model = trainer.model().clone();
    trainer.compile().unwrap();
    let before = bits(&trainer);
    take(&mut trainer, 1);
    assert!(bits(&trainer) != before);
    let device = candle_core::Device::Cpu;
    let tokens = candle_core::Tensor::zeros((1, 11), candle_core::DType::U32, &device).unwrap();
    let logits = |model: &TransformerLM| -> Vec<f32> {
        let logits = model.forward(&tokens).unwrap().flatten_all().unwrap();
        logits.to_vec1().unwrap()
    };
    assert_eq!(logits(&model), logits(trainer.model()));
    assert_eq!(take(&mut trainer, usize::MAX).len(), 7);
}

#[test]
fn what_cannot_be_planned_goes_on_eagerly() {
    let config = TrainConfig {
        precision: Precision::BF16,
        ..settings()
    };
    let mut trainer = start(config);
    let parts = ["precision", "f32, where steps are planned", "bf16"];
    refusal(trainer.compile(), &parts);
    assert!(trainer.plan().is_none());
    trainer.step().unwrap().unwrap();

    let vb = tallow::nn::seeded(5, candle_core::DType::F64, &candle_core::Device::Cpu);
    let double = TransformerLM::from_var_builder(&sizes(), vb).unwrap();
    let mut trainer = Trainer::new(double, settings(), training(), validation()).unwrap();
    refusal(trainer.compile(), &["parameters in f32", "f64"]);
    trainer.step().unwrap().unwrap();
}

/// A step that fails changes nothing.
#[test]
fn gradients_that_are_not_finite_change_nothing() {
    let mut trainer = compiled(settings());
    take(&mut trainer, 2);
    let parameters = trainer.model().parameters();
    let (_, norm) = parameters
        .iter()
        .find(|(name, _)| name == "layers.1.ln2.weight")
        .unwrap();
    let good = norm.as_tensor().copy().unwrap();
    norm.set(&(&good * f64::INFINITY).unwrap()).unwrap();
    let before = bits(&trainer);
    refusal(
        trainer.step(),
        &["the gradient of parameter", "nothing was updated"],
    );
    assert_eq!((bits(&trainer), trainer.steps_taken()), (before, 2));
    norm.set(&good).unwrap();
    assert_eq!(trainer.step().unwrap().unwrap().step, 3);
}
