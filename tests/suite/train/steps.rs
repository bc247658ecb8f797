//! The steps of a training run equal those of a plain loop.

use super::eager_loop::EagerLoop;
use super::loss_scaling::in_f16;
use super::*;
use crate::check::distance;
use candle_core::DType;
use rstest::rstest;
use tallow::attention::Algorithm;
use tallow::nn::DropoutRates;
use tallow::optim::GradScalerConfig;
use tallow::precision::{Precision, Regime};

/// Losses, norms, learning rates and evaluations equal those of eager steps.
#[rstest]
#[case(1, Some(1.0), None)]
#[case(3, Some(0.5), None)]
#[case(2, None, None)]
#[case(1, None, Some(1e-3))]
fn the_curve_is_the_eager_one(
    #[case] accumulation: usize,
    #[case] max_grad_norm: Option<f64>,
    #[case] max_grad_value: Option<f64>,
) {
    let config = TrainConfig {
        accumulation,
        max_grad_norm,
        max_grad_value,
        ..settings()
    };
    let mut eager = EagerLoop::new(model(), config.clone());
    let mut planned = start(config);
    for _ in 0..12 {
        let wanted = eager.step();
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
    for ((name, got), (_, wanted)) in planned.model().parameters().iter().zip(eager.parameters()) {
        let relative = distance(got, wanted);
        assert!(relative < 1e-4, "{name}: {relative:e}");
    }
    let (wanted, got) = (eager.evaluate(), planned.evaluate().unwrap());
    approx::assert_relative_eq!(got, wanted, max_relative = 1e-5);
    assert_eq!(planned.history().losses.len(), 12);
    assert_eq!(planned.optimizer().steps(), 12);
}

/// Dropout depends on seed and step only: the same planned, stopped and resumed. Evaluations drop nothing.
#[rstest]
#[case(1, None)]
#[case(2, Some(3))]
fn a_model_with_dropout(#[case] accumulation: usize, #[case] separator: Option<u32>) {
    let config = TrainConfig {
        accumulation,
        separator,
        ..settings()
    };
    let model = |rate| {
        let sizes = TransformerConfig {
            dropout: DropoutRates::all(rate),
            ..sizes()
        };
        TransformerLM::new(&sizes, 5, &candle_core::Device::Cpu).unwrap()
    };
    let begin = |rate| Trainer::new(model(rate), config.clone(), training(), validation()).unwrap();
    let mut eager = EagerLoop::new(model(0.2), config.clone());
    let (mut planned, mut without) = (begin(0.2), begin(0.0));
    assert_eq!(planned.evaluate().unwrap(), without.evaluate().unwrap());
    let wanted = eager.steps(6);
    for (got, wanted) in take(&mut planned, 6).iter().zip(&wanted) {
        approx::assert_relative_eq!(got.loss, wanted.loss, max_relative = 1e-5);
    }
    let difference = (take(&mut without, 1)[0].loss - wanted[0].loss).abs();
    assert!(difference > 1e-3, "nothing was dropped");

    let mut whole = begin(0.2);
    let expected = take(&mut whole, usize::MAX);
    let (_folder, path) = checkpoint();
    planned.save(&path).unwrap();
    let (sizes, device) = (planned.model().config(), candle_core::Device::Cpu);
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

/// With the optimizer in backward the weights have the bits of a step that keeps its gradients, with less memory. There
/// is no norm, so options that need all gradients are refused.
#[test]
fn the_optimizer_in_backward() {
    let config = TrainConfig {
        max_grad_norm: None,
        ..settings()
    };
    let mut kept = start(config.clone());
    let mut freed = start(TrainConfig {
        optimizer_in_backward: true,
        ..config
    });
    let peak = |trainer: &mut Trainer| trainer.plan().unwrap().arena_bytes();
    assert!(peak(&mut freed) < peak(&mut kept));
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
    let scaled = TrainConfig {
        max_grad_norm: None,
        precision: Precision::F16,
        ..settings()
    };
    for (config, word) in [
        (clipped, "max_grad_norm"),
        (accumulated, "accumulation"),
        (scaled, "loss_scaling"),
    ] {
        let config = TrainConfig {
            optimizer_in_backward: true,
            ..config
        };
        let refused = Trainer::new(model(), config, training(), validation());
        let error = refusal(refused, &[word]);
        assert!(matches!(error, Error::Config { .. }), "{error:?}");
    }
}

/// A run that is stopped, saved and resumed equals an uninterrupted one, and evaluations change nothing.
#[rstest]
#[case(Algorithm::Naive, 1, settings())]
#[case(Algorithm::Flash, 2, settings())]
#[case(Algorithm::Naive, 2, in_precision(Precision::BF16))]
#[case(Algorithm::Flash, 1, in_precision(Precision::BF16))]
#[case(Algorithm::Naive, 1, in_f16(Precision::F16))]
#[case(Algorithm::Naive, 2, in_f16(Precision::F16.with_regime(Regime::CpuAutocast)))]
fn resumed_it_has_the_same_bits(
    #[case] attention: Algorithm,
    #[case] accumulation: usize,
    #[case] config: TrainConfig,
) {
    let config = TrainConfig {
        attention: Some(attention),
        accumulation,
        ..config
    };
    let begin = || start(config.clone());
    let mut whole = begin();
    let expected = take(&mut whole, usize::MAX);
    let (_folder, path) = checkpoint();
    let mut first = begin();
    let mut reports = take(&mut first, 5);
    first.evaluate().unwrap();
    first.save(&path).unwrap();
    let mut second = resume(&path, config).unwrap();
    reports.extend(take(&mut second, usize::MAX));
    // Norms of skipped steps are NaN, so text is compared.
    assert_eq!(format!("{reports:?}"), format!("{expected:?}"));
    assert_eq!(bits(&second), bits(&whole));
    assert_eq!(second.loss_scale(), whole.loss_scale());
    assert_eq!(second.optimizer().steps(), whole.optimizer().steps());
}

/// Returns settings whose first loss scale overflows everywhere, and whose second one nowhere.
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

fn in_precision(precision: Precision) -> TrainConfig {
    TrainConfig {
        precision,
        ..settings()
    }
}

/// The tolerance of losses; that of norms is ten times larger.
fn tolerance(precision: Precision) -> f64 {
    if precision == Precision::F32 {
        1e-5
    } else {
        2e-3
    }
}

/// In half precision scales, skipped steps and learning rates are equal exactly.
#[rstest]
#[case(1, in_precision(Precision::BF16))]
#[case(3, in_precision(Precision::BF16))]
#[case(1, in_f16_overflowing_once(Precision::F16))]
#[case(2, in_f16_overflowing_once(Precision::F16.with_regime(Regime::CpuAutocast)))]
fn the_curve_in_half_precision(#[case] accumulation: usize, #[case] config: TrainConfig) {
    let config = TrainConfig {
        accumulation,
        ..config
    };
    let (steps, precision) = (config.steps, config.precision);
    let mut eager = EagerLoop::new(model(), config.clone());
    let mut planned = start(config);
    for _ in 0..steps {
        let scale = planned.loss_scale();
        let before = bits(&planned);
        let wanted = eager.step();
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
    assert_eq!(planned.optimizer().steps(), eager.updates());
    assert_eq!(planned.loss_scale(), eager.loss_scale());
    let (wanted, got) = (eager.evaluate(), planned.evaluate().unwrap());
    approx::assert_relative_eq!(got, wanted, max_relative = tolerance(precision));
}

/// Overflow in f16 without a scaler, or with a scale that never suffices, is an error.
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
        let mut trainer = start(config);
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

/// A clone of the model shares its weights, and is trained with it.
#[test]
fn a_clone_of_the_model_is_trained() {
    let mut trainer = start(settings());
    let model = trainer.model().clone();
    let before = bits(&trainer);
    take(&mut trainer, 4);
    assert!(bits(&trainer) != before);
    let device = candle_core::Device::Cpu;
    let tokens = candle_core::Tensor::zeros((1, 11), DType::U32, &device).unwrap();
    let logits = |model: &TransformerLM| -> Vec<f32> {
        let logits = model.forward(&tokens).unwrap().flatten_all().unwrap();
        logits.to_vec1().unwrap()
    };
    assert_eq!(logits(&model), logits(trainer.model()));
}

/// Precisions that cannot be planned are refused; f64 on the CPU is planned.
#[test]
fn what_cannot_be_planned() {
    let dropped = Precision::BF16.with_dropped_casts(true);
    for precision in [dropped, Precision::BF16.with_regime(Regime::Full)] {
        let refused = Trainer::new(model(), in_precision(precision), training(), validation());
        let parts = [
            "precision",
            "f32, bf16 or f16",
            precision.name(),
            "backward",
        ];
        refusal(refused, &parts);
    }

    let vb = tallow::nn::seeded(5, DType::F64, &candle_core::Device::Cpu);
    let double = TransformerLM::from_var_builder(&sizes(), vb).unwrap();
    let mut trainer = Trainer::new(double, settings(), training(), validation()).unwrap();
    trainer.step().unwrap().unwrap();
}

/// A memory budget that no plan can meet is refused; one that a plan can meet is kept.
#[test]
fn a_memory_budget() {
    let within = |memory_budget_bytes| {
        start(TrainConfig {
            memory_budget_bytes,
            ..settings()
        })
    };
    let wanted = within(None).plan().unwrap().arena_bytes();
    let mut small = within(Some(wanted - 1));
    assert!(small.plan().unwrap().arena_bytes() < wanted);
    take(&mut small, 2);
    refusal(within(Some(1)).step(), &["memory_budget_bytes"]);
}

#[test]
fn gradients_that_are_not_finite_change_nothing() {
    let mut trainer = start(settings());
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

/// Documents that end with a separator give other losses than one continuous text.
#[test]
fn documents_are_those_of_a_plain_loop() {
    for attention in Algorithm::ALL {
        let settings = TrainConfig {
            attention: Some(attention),
            separator: Some(3),
            accumulation: 2,
            ..settings()
        };
        let model = model().with_attention(attention).unwrap();
        let mut eager = EagerLoop::new(model, settings.clone());
        let mut planned = start(settings.clone());
        let steps = take(&mut planned, 12);
        let losses = steps.iter().map(|step| step.loss);
        let wanted: Vec<f64> = eager.steps(12).iter().map(|step| step.loss).collect();
        let of_planned = planned.evaluate().unwrap();
        let pairs = losses.zip(wanted.clone());
        for (planned, eager) in pairs.chain([(of_planned, eager.evaluate())]) {
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
            (without - wanted[0]).abs() > 1e-4,
            "{attention}: as without documents"
        );
    }
}
