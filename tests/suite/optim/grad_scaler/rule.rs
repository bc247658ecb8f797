//! The changes of the scale, against a second implementation of the rule and against PyTorch.

use super::*;
use crate::check::refusal;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tallow::optim::GradScalerState;

/// Ten thousand steps overflow at random, in a random element and way; the last ones are at f32's limit.
#[test]
fn follows_the_rule_over_ten_thousand_steps() {
    const INTERVAL: usize = 7;
    let (a, b) = (var(&[1.0; 5], DType::F32), var(&[1.0; 3], DType::F64));
    let parameters = named(&[&a, &b]);
    let config = GradScalerConfig {
        growth_interval: INTERVAL,
        ..Default::default()
    };
    let mut scaler = GradScaler::new(config).unwrap();
    let mut random = ChaCha8Rng::seed_from_u64(7);
    let (mut scale, mut tracker) = (65536f32, 0);
    let (mut skipped, mut kept, mut grown) = (0, 0, 0);
    for step in 0..10_000 {
        // Overflows are frequent where the scale is large, as in real training, and rare at the end, so that the scale
        // reaches its limit.
        let rate = match (step < 8000, scale > 65536.0) {
            (true, true) => 0.25,
            (true, false) => 0.05,
            (false, _) => 0.01,
        };
        let overflow = random.random_bool(rate);
        let mut ga = [3.0, -1.0, 0.5, 2.0, 1e-3].map(|g| g * f64::from(scale).min(1e30));
        let mut gb = [1.0, 0.0, -7.0].map(|g| g * f64::from(scale));
        let before = (ga, gb);
        if overflow {
            let bad = [f64::INFINITY, f64::NEG_INFINITY, f64::NAN][random.random_range(0..3)];
            match random.random_range(0..8) {
                at @ 0..5 => ga[at] = bad,
                at => gb[at - 5] = bad,
            }
        }
        let mut gradients = store(&[(&a, tensor(&ga, DType::F32)), (&b, tensor(&gb, DType::F64))]);
        if random.random_bool(0.5) {
            scaler.unscale(&mut gradients, &parameters).unwrap();
        }
        let mut called = false;
        let stepped = scaler
            .step_with(&mut gradients, &parameters, |_| {
                called = true;
                Ok(())
            })
            .unwrap();
        assert_eq!((stepped, called), (!overflow, !overflow), "step {step}");
        if stepped {
            let divide = |g: &f64| (*g as f32 * (1.0 / f64::from(scale)) as f32).into();
            let expected: Vec<f64> = before.0.iter().map(divide).collect();
            assert_eq!(
                elements(gradients.get(&a).unwrap()),
                expected,
                "step {step}"
            );
            assert_eq!(elements(gradients.get(&b).unwrap()), [1.0, 0.0, -7.0]);
        }
        scaler.update().unwrap();

        if overflow {
            (scale, tracker) = (scale * 0.5, 0);
            skipped += 1;
        } else {
            tracker += 1;
            if tracker == INTERVAL {
                tracker = 0;
                match (scale * 2.0).is_finite() {
                    true => (scale, grown) = (scale * 2.0, grown + 1),
                    false => kept += 1,
                }
            }
        }
        let state = scaler.state();
        assert_eq!(
            (state.scale, state.growth_tracker),
            (f64::from(scale), tracker),
            "step {step}"
        );
    }
    // Every part of the rule was exercised.
    assert!(
        skipped > 500 && grown > 500 && kept > 50,
        "{skipped} {grown} {kept}"
    );
}

/// Scale, tracker and parameter equal those of PyTorch's scaler after each step, with the same overflows.
#[test]
fn agrees_with_pytorch() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/grad_scaler.json");
    let file: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    for name in ["usual", "uneven", "limit"] {
        let case = &file[name];
        let number = |key: &str| case[key].as_f64().unwrap();
        let list = |key: &str| case[key].as_array().unwrap();
        let config = GradScalerConfig {
            enabled: true,
            init_scale: number("init_scale"),
            growth_factor: number("growth_factor"),
            backoff_factor: number("backoff_factor"),
            growth_interval: number("growth_interval") as usize,
        };
        let mut scaler = GradScaler::new(config).unwrap();
        let weight = var(&[1.0], DType::F32);
        let mut optimizer: candle_nn::SGD =
            candle_nn::Optimizer::new(vec![weight.clone()], 0.25).unwrap();
        for (step, overflow) in list("overflows").iter().enumerate() {
            let factor = match overflow.as_bool().unwrap() {
                true => [f64::INFINITY, f64::NAN][step % 2],
                false => 1.0,
            };
            let loss = (weight.sum_all().unwrap() * (factor * 0.5)).unwrap();
            let mut gradients = scaler.scale(&loss).unwrap().backward().unwrap();
            scaler
                .step_with(&mut gradients, &named(&[&weight]), |gradients| {
                    Ok(candle_nn::Optimizer::step(&mut optimizer, gradients)?)
                })
                .unwrap();
            scaler.update().unwrap();
            let state = scaler.state();
            let at = format!("{name}, step {step}");
            assert_eq!(state.scale, list("scale")[step].as_f64().unwrap(), "{at}");
            let tracker = list("growth_tracker")[step].as_u64().unwrap();
            assert_eq!(state.growth_tracker as u64, tracker, "{at}");
            let parameter = list("parameter")[step].as_f64().unwrap();
            assert_eq!(elements(&weight), [parameter], "{at}");
        }
    }
}

#[test]
fn grows_at_the_interval_and_not_before() {
    let weight = var(&[1.0], DType::F32);
    let config = GradScalerConfig {
        growth_interval: 4,
        init_scale: 8.0,
        ..Default::default()
    };
    let mut scaler = GradScaler::new(config).unwrap();
    let scales: Vec<f64> = (0..9)
        .map(|_| {
            let mut gradients = gradient(&weight, &[1.0], DType::F32);
            scaler.unscale(&mut gradients, &named(&[&weight])).unwrap();
            scaler.update().unwrap();
            scaler.loss_scale()
        })
        .collect();
    assert_eq!(scales, [8.0, 8.0, 8.0, 16.0, 16.0, 16.0, 16.0, 32.0, 32.0]);
}

/// If every step overflows, there is an error at the end.
#[test]
fn a_scale_that_falls_for_ever_is_an_error() {
    let weight = var(&[1.0], DType::F32);
    let mut scaler = scaler();
    let overflow = |scaler: &mut GradScaler| {
        let mut gradients = gradient(&weight, &[f64::NAN], DType::F32);
        scaler.unscale(&mut gradients, &named(&[&weight])).unwrap();
        scaler.update()
    };
    for _ in 0..16 + 126 {
        overflow(&mut scaler).unwrap();
    }
    assert_eq!(scaler.loss_scale(), f64::from(f32::MIN_POSITIVE));
    let before = scaler.state();
    refusal(
        overflow(&mut scaler),
        &[
            "GradScaler",
            "1.1754943508222875e-38",
            "diverged",
            "checkpoint",
        ],
    );
    assert_eq!(scaler.state(), before);
}

#[test]
fn a_saved_state_goes_on_where_it_stood() {
    let weight = var(&[1.0], DType::F32);
    let config = GradScalerConfig {
        growth_interval: 5,
        growth_factor: 1.7,
        ..Default::default()
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("scaler.json");
    let mut whole = GradScaler::new(config).unwrap();
    let mut parts = whole.clone();
    for step in 0..40 {
        for scaler in [&mut whole, &mut parts] {
            let number = if step % 13 == 12 { f64::INFINITY } else { 1.0 };
            let mut gradients = gradient(&weight, &[number], DType::F32);
            scaler.unscale(&mut gradients, &named(&[&weight])).unwrap();
            scaler.update().unwrap();
        }
        parts.save(&path).unwrap();
        parts = scaler(); // with other settings: the state includes its own
        parts.load(&path).unwrap();
        assert_eq!(parts.state(), whole.state());
    }
    assert_ne!(whole.state(), GradScaler::new(config).unwrap().state());
}

/// The state has the keys of PyTorch's `state_dict`.
#[test]
fn the_state_is_pytorchs() {
    let json = serde_json::to_value(scaler().state()).unwrap();
    let expected = serde_json::json!({
        "scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 0
    });
    assert_eq!(json, expected);
    let text = expected.to_string().replace("_growth", "growth");
    let state: GradScalerState = serde_json::from_str(&text).unwrap();
    assert_eq!(state, scaler().state());
}
