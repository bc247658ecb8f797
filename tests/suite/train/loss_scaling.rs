//! Training in f16: the loss is scaled, and steps that overflow are skipped.

use super::*;
use candle_core::{DType, Device};
use tallow::optim::GradScalerConfig;
use tallow::precision::{Precision, Regime};
use tallow::train::Checkpoint;

/// Returns a scale at which the first steps overflow. It falls until they do not, and grows until they overflow again.
fn too_large() -> GradScalerConfig {
    GradScalerConfig {
        init_scale: 2f64.powi(26),
        growth_interval: 3,
        ..Default::default()
    }
}

pub(super) fn in_f16(precision: Precision) -> TrainConfig {
    TrainConfig {
        precision,
        loss_scaling: too_large(),
        steps: 24,
        ..settings()
    }
}

pub(super) fn f16_regimes() -> [Precision; 2] {
    [Regime::CudaAutocast, Regime::CpuAutocast].map(|regime| Precision::F16.with_regime(regime))
}

#[test]
fn an_overflow_skips_its_step_and_no_other() {
    for precision in f16_regimes() {
        let mut trainer = start(in_f16(precision));
        let (mut scale, mut good) = (2f64.powi(26), 0);
        let mut skipped = Vec::new();
        assert_eq!(trainer.loss_scale(), Some(scale));
        for step in 1..=24 {
            let before = bits(&trainer);
            let report = trainer.step().unwrap().unwrap();
            assert_eq!(report.step, step);
            assert_eq!(report.loss_scale, Some(scale), "{precision}");
            assert_eq!(report.skipped, !report.grad_norm.is_finite());
            assert_eq!(bits(&trainer) == before, report.skipped, "{precision}");
            if report.skipped {
                (scale, good) = (scale / 2.0, 0);
                skipped.push(step);
            } else {
                good += 1;
                if good == 3 {
                    (scale, good) = (scale * 2.0, 0);
                }
            }
        }
        assert!(trainer.step().unwrap().is_none(), "skipped steps count");
        assert_eq!(trainer.history().skipped, skipped);
        assert_eq!(trainer.optimizer().steps(), 24 - skipped.len());
        assert_eq!(skipped[0], 1, "{precision}: {skipped:?}");
        let backed_off = skipped.iter().zip(1..).take_while(|(s, i)| *s == i);
        let backed_off = backed_off.count();
        // Steps overflowed again after others had succeeded.
        assert!(
            backed_off < skipped.len() && skipped.len() < 16,
            "{precision}: {skipped:?}"
        );
    }
}

#[test]
fn a_step_is_near_that_of_f32_whatever_the_scale() {
    let norm = |precision, init_scale| {
        let loss_scaling = GradScalerConfig {
            init_scale,
            ..Default::default()
        };
        let config = TrainConfig {
            precision,
            loss_scaling,
            ..settings()
        };
        let report = start(config).step().unwrap().unwrap();
        assert!(!report.skipped);
        report.grad_norm
    };
    let exact = norm(Precision::F32, 65536.0);
    for precision in f16_regimes() {
        for scale in [128.0, 1024.0] {
            let error = norm(precision, scale) / exact - 1.0;
            assert!(error.abs() < 2e-3, "{precision} {scale}: {error:.1e}");
        }
        // With a scale far too small, gradients underflow. So the scale is part of the graph, and is not just divided
        // out.
        assert!(norm(precision, 6e-8) < 0.9 * exact, "{precision}");
    }
}

/// A NaN in a weight makes every loss and gradient NaN: steps are skipped, and finally there is an error.
#[test]
fn a_scale_that_never_suffices_is_an_error() {
    let config = TrainConfig {
        precision: Precision::F16,
        steps: 100,
        ..settings()
    };
    let mut trainer = start(config.clone());
    take(&mut trainer, 2);
    let head = trainer.model().parameters().pop().unwrap().1;
    let whole = head.as_tensor().copy().unwrap();
    head.set(&whole.affine(f64::NAN, 0.0).unwrap()).unwrap();
    // From 2^16 down to 2^-14.
    for step in 3..=32 {
        let report = trainer.step().unwrap().unwrap();
        assert!(report.skipped && report.loss.is_nan(), "{report:?}");
        assert_eq!(report.step, step);
    }
    let before = bits(&trainer);
    for _ in 0..2 {
        let parts = [
            "the gradient of parameter token_embeddings.weight in step 33",
            "finite numbers at some loss scale",
            "down to a scale of 6.103515625e-5",
            "learning rate",
        ];
        let error = refusal(trainer.step(), &parts);
        assert!(matches!(error, Error::Data { .. }), "{error:?}");
        assert_eq!(trainer.steps_taken(), 32);
        assert_eq!(trainer.loss_scale(), Some(2f64.powi(-14)));
        assert_eq!(bits(&trainer), before);
    }
    // Weights that are NaN are not saved; losses that are NaN can be saved, tabulated and charted.
    let (_folder, path) = checkpoint();
    refusal(
        trainer.save(&path),
        &["weight lm_head.weight", "NaN at element 0"],
    );
    head.set(&whole).unwrap();
    trainer.save(&path).unwrap();
    let history = Checkpoint::read(&path).unwrap().history;
    assert_eq!(history.skipped, (3..=32).collect::<Vec<_>>());
    assert_eq!(history.losses.len(), 32);
    assert!(history.losses[1].is_finite() && history.losses[2..].iter().all(|l| l.is_nan()));
    assert_eq!(history.chart().series[0].points.len(), 2);
    assert_eq!(history.report().rows.len(), 32);
    // With the weight restored, the run continues.
    assert!(!trainer.step().unwrap().unwrap().skipped);
}

/// No other precision is scaled, and scaling of f16 is optional; without it overflow is an error.
#[test]
fn only_f16_is_scaled() {
    for precision in [Precision::F32, Precision::BF16] {
        let mut scaled = start(TrainConfig {
            loss_scaling: too_large(),
            precision,
            ..settings()
        });
        let mut plain = start(TrainConfig {
            precision,
            ..settings()
        });
        let reports = take(&mut scaled, 5);
        assert!(reports.iter().all(|r| r.loss_scale.is_none() && !r.skipped));
        assert_eq!(reports, take(&mut plain, 5));
        assert_eq!(bits(&scaled), bits(&plain));
    }
    let off = GradScalerConfig {
        enabled: false,
        ..Default::default()
    };
    let mut trainer = start(TrainConfig {
        precision: Precision::F16,
        loss_scaling: off,
        ..settings()
    });
    assert_eq!(take(&mut trainer, 1)[0].loss_scale, None);
    let head = trainer.model().parameters().pop().unwrap().1;
    head.set(&head.affine(f64::NAN, 0.0).unwrap()).unwrap();
    refusal(
        trainer.step(),
        &["the gradient of parameter", "a norm of NaN"],
    );
}

#[test]
fn models_of_another_dtype_than_the_precisions() {
    let of = |dtype| {
        let vb = tallow::nn::seeded(5, dtype, &Device::Cpu);
        TransformerLM::from_var_builder(&sizes(), vb).unwrap()
    };
    let new = |dtype, precision| {
        let config = TrainConfig {
            precision,
            ..settings()
        };
        Trainer::new(of(dtype), config, training(), validation())
    };
    for (dtype, precision, parts) in [
        (
            DType::BF16,
            Precision::F32,
            [
                "parameters in f32, for precision f32",
                "in bf16",
                "backward",
            ],
        ),
        (
            DType::F16,
            Precision::F16,
            ["parameters in f32", "in f16", "backward"],
        ),
        (
            DType::F64,
            Precision::BF16,
            ["parameters in f32", "in f64", "TransformerLM::new"],
        ),
    ] {
        let error = refusal(new(dtype, precision), &parts);
        assert!(matches!(error, Error::DType { .. }), "{error:?}");
    }
    let mut double = new(DType::F64, Precision::F32).unwrap();
    assert_eq!(take(&mut double, 2).len(), 2);
}
