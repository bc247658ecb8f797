//! Runs whose steps are planned.

use super::loss_scaling::{in_f16, start_in};
use super::*;
use candle_core::DType;
use rstest::rstest;
use tallow::attention::Algorithm;
use tallow::nn::DropoutRates;
use tallow::optim::GradScalerConfig;
use tallow::precision::{Precision, Regime};

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

/// What is dropped is the seed's and the step's: the same planned, stopped and resumed; evaluations drop nothing.
#[rstest]
#[case(1, None)]
#[case(2, Some(3))]
fn a_model_with_dropout(#[case] accumulation: usize, #[case] separator: Option<u32>) {
    let config = TrainConfig {
        accumulation,
        separator,
        ..settings()
    };
    let begin = |rate| {
        let sizes = TransformerConfig {
            dropout: DropoutRates::all(rate),
            ..sizes()
        };
        let model = TransformerLM::new(&sizes, 5, &candle_core::Device::Cpu).unwrap();
        Trainer::new(model, config.clone(), training(), validation()).unwrap()
    };
    let (mut eager, mut planned, mut without) = (begin(0.2), begin(0.2), begin(0.0));
    planned.compile().unwrap();
    assert_eq!(eager.evaluate().unwrap(), without.evaluate().unwrap());
    let wanted = take(&mut eager, 6);
    for (got, wanted) in take(&mut planned, 6).iter().zip(&wanted) {
        approx::assert_relative_eq!(got.loss, wanted.loss, max_relative = 1e-5);
    }
    assert_ne!(take(&mut without, 1)[0].loss, wanted[0].loss);

    let mut whole = begin(0.2);
    let expected = take(&mut whole, usize::MAX);
    let (_folder, path) = checkpoint();
    eager.save(&path).unwrap();
    let (sizes, device) = (eager.model().config(), candle_core::Device::Cpu);
    let resumed = Trainer::resume(
        &path,
        sizes,
        config.clone(),
        training(),
        validation(),
        &device,
    );
    let mut resumed = resumed.unwrap();
    assert_eq!(take(&mut resumed, usize::MAX), expected[6..]);
    assert_eq!(bits(&resumed), bits(&whole));
}

/// With the optimizer in backward the weights are, to the bit, those of a step that keeps its gradients, in less
/// memory; nobody sees a norm, so what needs all gradients is refused, and leaves the run eager.
#[test]
fn the_optimizer_in_backward() {
    let config = TrainConfig {
        max_grad_norm: None,
        ..settings()
    };
    let mut kept = compiled(config.clone());
    let mut freed = start(config);
    freed.compile_with_optimizer_in_backward().unwrap();
    let peak = |trainer: &Trainer| trainer.plan().unwrap().peak_bytes();
    assert!(peak(&freed) < peak(&kept));
    for (got, wanted) in take(&mut freed, usize::MAX)
        .iter()
        .zip(take(&mut kept, usize::MAX))
    {
        assert_eq!(got.loss, wanted.loss);
        assert!(got.grad_norm.is_nan() && wanted.grad_norm.is_finite());
    }
    assert_eq!(bits(&freed), bits(&kept));

    let clipped = TrainConfig {
        max_grad_norm: Some(1.0),
        ..settings()
    };
    let accumulated = TrainConfig {
        accumulation: 2,
        max_grad_norm: None,
        ..settings()
    };
    for (config, word) in [(clipped, "clip_norm"), (accumulated, "accumulation")] {
        let mut trainer = start(config);
        let error = trainer.compile_with_optimizer_in_backward().unwrap_err();
        assert!(error.to_string().contains(word), "{error}");
        assert!(trainer.plan().is_none());
    }
}

/// Stopped, saved, resumed and compiled again, it is the run that was not stopped; evaluations change nothing.
#[rstest]
#[case(Algorithm::Naive, 1, settings())]
#[case(Algorithm::Flash, 2, settings())]
#[case(Algorithm::Naive, 2, in_bf16())]
#[case(Algorithm::Flash, 1, in_bf16())]
#[case(Algorithm::Naive, 1, in_f16(Precision::F16))]
#[case(Algorithm::Naive, 2, in_f16(Precision::F16.with_regime(Regime::CpuAutocast)))]
fn resumed_it_has_the_same_bits(
    #[case] attention: Algorithm,
    #[case] accumulation: usize,
    #[case] config: TrainConfig,
) {
    let sizes = TransformerConfig {
        attention,
        ..sizes()
    };
    let config = TrainConfig {
        accumulation,
        ..config
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
    // Norms of skipped steps are no numbers.
    assert_eq!(format!("{reports:?}"), format!("{expected:?}"));
    assert_eq!(bits(&second), bits(&whole));
    assert_eq!(second.loss_scale(), whole.loss_scale());
    assert_eq!(second.optimizer().steps(), whole.optimizer().steps());

    // Resumed eagerly it goes on too, but for rounding; which may decide what overflows.
    if config.precision.dtype() == DType::F16 {
        return;
    }
    let max_relative = tolerance(config.precision);
    let mut eager = again();
    for (got, wanted) in take(&mut eager, usize::MAX).iter().zip(&expected[5..]) {
        approx::assert_relative_eq!(got.loss, wanted.loss, max_relative = max_relative);
    }
}

/// A first scale at which everything overflows, and a second at which nothing does.
fn in_f16_overflowing_once(precision: Precision) -> TrainConfig {
    TrainConfig {
        loss_scaling: GradScalerConfig {
            init_scale: 2f64.powi(40),
            backoff_factor: 2f64.powi(-28),
            ..Default::default()
        },
        precision,
        ..settings()
    }
}

fn in_bf16() -> TrainConfig {
    TrainConfig {
        precision: Precision::BF16,
        ..settings()
    }
}

/// Of losses; of norms, ten times that.
fn tolerance(precision: Precision) -> f64 {
    if precision == Precision::F32 {
        1e-5
    } else {
        2e-3
    }
}

/// In half precision the same as eagerly too: scales, skipped steps and learning rates exactly.
#[rstest]
#[case(1, in_bf16())]
#[case(3, in_bf16())]
#[case(1, in_f16_overflowing_once(Precision::F16))]
#[case(2, in_f16_overflowing_once(Precision::F16.with_regime(Regime::CpuAutocast)))]
fn the_curve_in_half_precision(#[case] accumulation: usize, #[case] config: TrainConfig) {
    let config = TrainConfig {
        accumulation,
        ..config
    };
    let (steps, precision) = (config.steps, config.precision);
    let mut eager = start(config.clone());
    let mut planned = compiled(config);
    for _ in 0..steps {
        let scale = planned.loss_scale();
        let before = bits(&planned);
        let wanted = eager.step().unwrap().unwrap();
        let got = planned.step().unwrap().unwrap();
        assert_eq!(bits(&planned) == before, got.skipped);
        assert_eq!(got.skipped, !got.grad_norm.is_finite());
        assert_eq!(got.loss_scale, scale);
        let max_relative = tolerance(precision);
        approx::assert_relative_eq!(got.loss, wanted.loss, max_relative = max_relative);
        if !got.skipped {
            let max_relative = 10.0 * max_relative;
            approx::assert_relative_eq!(
                got.grad_norm,
                wanted.grad_norm,
                max_relative = max_relative
            );
        }
        let rest = |report: StepReport| StepReport {
            loss: 0.0,
            grad_norm: 0.0,
            ..report
        };
        assert_eq!(rest(got), rest(wanted));
    }
    let skipped = usize::from(precision.dtype() == DType::F16);
    assert_eq!(planned.history().skipped, vec![1; skipped]);
    assert_eq!(eager.history().skipped, vec![1; skipped]);
    assert_eq!(planned.optimizer().steps(), eager.optimizer().steps());
    assert_eq!(planned.loss_scale(), eager.loss_scale());
    let (wanted, got) = (eager.evaluate().unwrap(), planned.evaluate().unwrap());
    approx::assert_relative_eq!(got, wanted, max_relative = tolerance(precision));
}

/// f16 as it is, without a scale, and a scale that never suffices: errors, as eagerly.
#[test]
fn overflow_without_a_way_out() {
    let unscaled = TrainConfig {
        loss_scaling: GradScalerConfig {
            enabled: false,
            ..Default::default()
        },
        ..in_f16(Precision::F16)
    };
    let small = TrainConfig {
        loss_scaling: GradScalerConfig {
            init_scale: 1.0 / 4096.0,
            ..Default::default()
        },
        ..in_f16(Precision::F16)
    };
    for (config, words) in [
        (unscaled, "nothing was updated"),
        (small, "down to a scale of 6.1"),
    ] {
        let mut trainer = compiled(config);
        take(&mut trainer, 1);
        let parameters = trainer.model().parameters();
        let (_, norm) = parameters
            .iter()
            .find(|(n, _)| n == "ln_final.weight")
            .unwrap();
        let bad = (norm.as_tensor() * f64::NAN).unwrap();
        norm.set(&bad).unwrap();
        let before = bits(&trainer);
        let error = loop {
            match trainer.step() {
                Ok(report) => assert!(report.unwrap().skipped),
                Err(error) => break error,
            }
        };
        assert!(error.to_string().contains(words), "{error}");
        assert_eq!(bits(&trainer), before);
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
    let tokens = candle_core::Tensor::zeros((1, 11), DType::U32, &device).unwrap();
    let logits = |model: &TransformerLM| -> Vec<f32> {
        let logits = model.forward(&tokens).unwrap().flatten_all().unwrap();
        logits.to_vec1().unwrap()
    };
    assert_eq!(logits(&model), logits(trainer.model()));
    assert_eq!(take(&mut trainer, usize::MAX).len(), 7);
}

#[test]
fn what_cannot_be_planned_goes_on_eagerly() {
    let dropped = Precision::BF16.with_dropped_casts(true);
    for precision in [dropped, Precision::BF16.with_regime(Regime::Full)] {
        let mut trainer = start_in(TrainConfig {
            precision,
            ..settings()
        });
        let parts = ["precision", "f32, bf16 or f16", precision.name()];
        refusal(trainer.compile(), &parts);
        assert!(trainer.plan().is_none());
        trainer.step().unwrap().unwrap();
    }

    let vb = tallow::nn::seeded(5, DType::F64, &candle_core::Device::Cpu);
    let double = TransformerLM::from_var_builder(&sizes(), vb).unwrap();
    let mut trainer = Trainer::new(double, settings(), training(), validation()).unwrap();
    trainer.compile().unwrap(); // on the CPU f64 is planned
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

/// Documents that end with a token are the same planned and eagerly, and something else than one text.
#[test]
fn documents_are_the_same_planned() {
    for attention in Algorithm::ALL {
        let settings = TrainConfig {
            separator: Some(3),
            accumulation: 2,
            ..settings()
        };
        let run = |is_planned: bool| {
            let model = model().with_attention(attention);
            let mut trainer =
                Trainer::new(model, settings.clone(), training(), validation()).unwrap();
            if is_planned {
                trainer.compile().unwrap();
            }
            let losses: Vec<f64> = take(&mut trainer, 12)
                .iter()
                .map(|step| step.loss)
                .collect();
            (losses, trainer.evaluate().unwrap())
        };
        let ((eager, of_eager), (planned, of_planned)) = (run(false), run(true));
        let pairs = eager.iter().zip(&planned).chain([(&of_eager, &of_planned)]);
        for (eager, planned) in pairs {
            assert!(
                (eager - planned).abs() < 2e-5,
                "{attention}: {eager} {planned}"
            );
        }
        let mut whole = start(TrainConfig {
            separator: None,
            ..settings.clone()
        });
        let without = take(&mut whole, 1)[0].loss;
        assert!(
            (without - eager[0]).abs() > 1e-4,
            "{attention}: as without documents"
        );
    }
}
