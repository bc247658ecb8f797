//! Calls in the wrong order, and impossible settings and states.

use super::*;
use crate::check::refusal;
use rstest::rstest;
use tallow::Error;

#[test]
fn calls_in_the_wrong_order() {
    let weight = var(&[1.0], DType::F32);
    let parameters = || named(&[&weight]);
    let mut optimizer = adamw(&[&weight]);
    let mut scaler = scaler();
    let is_order = |error: Error| assert!(matches!(error, Error::Order { .. }), "{error:?}");

    let parts = [
        "GradScaler::update",
        "no gradient was unscaled",
        "call step first",
    ];
    is_order(refusal(scaler.update(), &parts));

    let mut gradients = gradient(&weight, &[65536.0], DType::F32);
    scaler.unscale(&mut gradients, &parameters()).unwrap();
    let parts = [
        "GradScaler::unscale",
        "parameter a is already unscaled",
        "once in a step",
    ];
    is_order(refusal(
        scaler.unscale(&mut gradients, &parameters()),
        &parts,
    ));
    assert_eq!(
        elements(gradients.get(&weight).unwrap()),
        [1.0],
        "as it was"
    );

    assert!(scaler.step(&mut optimizer, &mut gradients).unwrap());
    let moved = elements(&weight);
    let parts = [
        "GradScaler::step",
        "parameter a was already stepped",
        "call update",
    ];
    is_order(refusal(scaler.step(&mut optimizer, &mut gradients), &parts));
    let parts = ["GradScaler::unscale", "parameter a was already stepped"];
    is_order(refusal(
        scaler.unscale(&mut gradients, &parameters()),
        &parts,
    ));
    assert_eq!(elements(&weight), moved);
    assert_eq!(optimizer.steps(), 1);

    scaler.update().unwrap();
    is_order(refusal(scaler.update(), &["no gradient was unscaled"]));
    let mut gradients = gradient(&weight, &[65536.0], DType::F32);
    assert!(scaler.step(&mut optimizer, &mut gradients).unwrap());
}

/// In a step before backward gradients are missing; nothing is unscaled or counted.
#[test]
fn a_parameter_without_a_gradient() {
    let (a, b) = (var(&[1.0], DType::F32), var(&[1.0], DType::F32));
    let mut gradients = gradient(&a, &[65536.0], DType::F32);
    let mut scaler = scaler();
    let result = scaler.step(&mut adamw(&[&a, &b]), &mut gradients);
    let error = refusal(result, &["GradScaler::step", "parameter b has no gradient"]);
    assert!(matches!(error, Error::MissingGradient { .. }), "{error:?}");
    assert_eq!(elements(gradients.get(&a).unwrap()), [65536.0]);
    refusal(
        scaler.unscale(&mut gradients, &named(&[&a, &b])),
        &["GradScaler::unscale", "parameter b has no gradient"],
    );
    refusal(scaler.update(), &["no gradient was unscaled"]);
    scaler.unscale(&mut gradients, &named(&[&a])).unwrap();
    assert_eq!(elements(gradients.get(&a).unwrap()), [1.0]);
}

#[test]
fn no_parameters_and_no_floats() {
    let weight = var(&[1.0], DType::F32);
    let mut gradients = gradient(&weight, &[1.0], DType::F32);
    let parts = [
        "GradScaler::unscale",
        "parameters must be at least one",
        "model.parameters()",
    ];
    refusal(scaler().unscale(&mut gradients, &[]), &parts);
    let count = Tensor::new(3u32, &Device::Cpu).unwrap();
    let error = refusal(scaler().scale(&count), &["GradScaler::scale", "got u32"]);
    assert!(matches!(error, Error::DType { .. }), "{error:?}");
}

/// If the optimizer fails, it has not stepped, and the call can be repeated.
#[test]
fn an_update_that_fails_may_be_repeated() {
    let weight = var(&[1.0], DType::F32);
    let mut optimizer = adamw(&[&weight]);
    let mut gradients = gradient(&weight, &[65536.0], DType::F32);
    let mut scaler = scaler();
    optimizer.set_learning_rate(-1.0);
    refusal(scaler.step(&mut optimizer, &mut gradients), &["lr must be"]);
    assert_eq!(elements(gradients.get(&weight).unwrap()), [1.0]);
    optimizer.set_learning_rate(1e-3);
    assert!(scaler.step(&mut optimizer, &mut gradients).unwrap());
    assert_eq!(
        elements(gradients.get(&weight).unwrap()),
        [1.0],
        "not unscaled again"
    );
}

type Change = fn(&mut GradScalerConfig);

#[rstest]
#[case(|c: &mut GradScalerConfig| c.init_scale = 0.0, "init_scale must be a normal number of f32")]
#[case(
    |c: &mut GradScalerConfig| c.init_scale = -1.0,
    "init_scale must be a normal number of f32, 1.2e-38 to 3.4e38, got -1"
)]
#[case(|c: &mut GradScalerConfig| c.init_scale = 1e39, "init_scale")]
#[case(|c: &mut GradScalerConfig| c.init_scale = f64::NAN, "init_scale")]
#[case(|c: &mut GradScalerConfig| c.growth_factor = 1.0, "growth_factor must be finite and over 1, got 1")]
#[case(|c: &mut GradScalerConfig| c.growth_factor = f64::INFINITY, "growth_factor")]
#[case(|c: &mut GradScalerConfig| c.backoff_factor = 1.0, "backoff_factor must be over 0 and under 1, got 1")]
#[case(|c: &mut GradScalerConfig| c.backoff_factor = 0.0, "backoff_factor")]
#[case(|c: &mut GradScalerConfig| c.growth_interval = 0, "growth_interval must be at least 1, got 0")]
fn settings_that_cannot_work(#[case] change: Change, #[case] text: &str) {
    let mut config = GradScalerConfig::default();
    config.validate().unwrap();
    change(&mut config);
    let error = refusal(GradScaler::new(config), &["GradScalerConfig", text]);
    assert!(matches!(error, Error::Config { .. }), "{error:?}");
}

#[rstest]
#[case(
    "\"scale\": 65536.0",
    "\"scale\": 0.0",
    "scale must be a normal number of f32"
)]
#[case(
    "\"scale\": 65536.0",
    "\"scale\": \"large\"",
    "invalid type: string \"large\""
)]
#[case("\"scale\": 65536.0, ", "", "missing field `scale`")]
#[case("\"scale\"", "\"size\"", "unknown field `size`")]
#[case(
    "\"growth_factor\": 2.0",
    "\"growth_factor\": 0.5",
    "growth_factor must be"
)]
#[case(
    "\"backoff_factor\": 0.5",
    "\"backoff_factor\": 2.0",
    "backoff_factor must be"
)]
#[case(
    "\"growth_interval\": 2000",
    "\"growth_interval\": -3",
    "invalid value: integer `-3`"
)]
#[case(
    "\"_growth_tracker\": 5",
    "\"_growth_tracker\": 2000",
    "growth_tracker must be under growth_interval, 2000, got 2000"
)]
#[case("}", "", "EOF")]
#[case("{", "scaler: {", "expected value")]
fn states_that_cannot_be(#[case] from: &str, #[case] to: &str, #[case] text: &str) {
    let whole = r#"{"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000,
        "_growth_tracker": 5}"#;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("scaler.json");
    let mut scaler = scaler();
    std::fs::write(&path, whole).unwrap();
    scaler.load(&path).unwrap();
    let before = scaler.state();
    assert_eq!(before.growth_tracker, 5);

    let changed = whole.replacen(from, to, 1);
    assert_ne!(changed, whole);
    std::fs::write(&path, changed).unwrap();
    let error = refusal(
        scaler.load(&path),
        &["scaler.json", text, "GradScaler::save"],
    );
    assert!(matches!(error, Error::Format { .. }), "{error:?}");
    assert_eq!(scaler.state(), before);
}

#[test]
fn a_file_that_is_not_there() {
    let error = refusal(
        scaler().load("no/such/file"),
        &["no/such/file", "cannot read"],
    );
    assert!(matches!(error, Error::Io { .. }), "{error:?}");
}
