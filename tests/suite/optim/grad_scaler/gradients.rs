//! The effects of a scaler on losses and gradients.

use super::*;
use crate::settings::scaler_from;
use rstest::rstest;
use tallow::optim::GradientAccumulator;

/// Unscaled gradients of a scaled loss equal those of the loss.
#[rstest]
#[case(DType::F32, DType::F32)]
#[case(DType::F64, DType::F64)]
#[case(DType::BF16, DType::BF16)]
#[case(DType::F16, DType::F32)]
fn unscaling_undoes_scaling(#[case] dtype: DType, #[case] unscaled: DType) {
    let weight = var(&[0.5, -0.25, 0.125], dtype);
    let loss = || weight.sqr().unwrap().sum_all().unwrap();
    let mut scaler = scaler_from(1024.0);
    let scaled = scaler.scale(&loss()).unwrap();
    let wide = if dtype == DType::F64 {
        dtype
    } else {
        DType::F32
    };
    assert_eq!(scaled.dtype(), wide);
    assert_eq!(elements(&scaled), [1024.0 * elements(&loss())[0]]);
    let mut gradients = scaled.backward().unwrap();
    assert_eq!(
        elements(gradients.get(&weight).unwrap()),
        [1024.0, -512.0, 256.0]
    );
    scaler.unscale(&mut gradients, &named(&[&weight])).unwrap();
    let gradient = gradients.get(&weight).unwrap();
    assert_eq!(elements(gradient), [1.0, -0.5, 0.25]);
    assert_eq!(gradient.dtype(), unscaled);
    assert_eq!(scaler.non_finite(), None);
}

/// Gradients that underflow in f16 survive with the scale, and are still nonzero after unscaling.
#[test]
fn small_gradients_survive() {
    let weight = var(&[1.0], DType::F16);
    let tiny = 1e-9;
    let loss = |factor: f64| {
        // The gradient passes through f16 on its way to the weight.
        let wide = weight.to_dtype(DType::F32).unwrap().sum_all().unwrap();
        (wide * factor).unwrap()
    };
    let lost = loss(tiny).backward().unwrap();
    assert_eq!(elements(lost.get(&weight).unwrap()), [0.0]);
    let mut scaler = scaler();
    let scaled = scaler.scale(&loss(tiny)).unwrap();
    let mut gradients = scaled.backward().unwrap();
    scaler.unscale(&mut gradients, &named(&[&weight])).unwrap();
    let kept = elements(gradients.get(&weight).unwrap())[0];
    assert!((kept / tiny - 1.0).abs() < 1e-3, "{kept}");
    assert!(scaler.step(&mut adamw(&[&weight]), &mut gradients).unwrap());
}

#[test]
fn gradients_are_overwritten_only_where_nobody_else_sees_them() {
    let (a, b) = (var(&[1.0; 2], DType::F32), var(&[1.0; 2], DType::F32));
    let (c, d) = (var(&[1.0; 2], DType::BF16), var(&[1.0; 2], DType::F32));
    let e = Var::zeros((2, 2), DType::F32, &Device::Cpu).unwrap();
    let shared = tensor(&[65536.0, 131072.0], DType::F32);
    let alone = tensor(&[-65536.0, 0.0], DType::BF16);
    let strided = Tensor::new(&[[65536f32, 131072.0], [196608.0, 0.0]], &Device::Cpu).unwrap();
    let mut gradients = store(&[
        (&a, shared.clone()),
        (&b, shared.clone()),
        (&c, alone.clone()),
        (&d, d.detach()), // a gradient that is its parameter
        (&e, strided.t().unwrap()),
    ]);
    let all = [&a, &b, &c, &d, &e];
    let mut scaler = scaler();
    scaler.unscale(&mut gradients, &named(&all)).unwrap();
    let got = all.map(|var| elements(gradients.get(var).unwrap()));
    assert_eq!(got[..2], [vec![1.0, 2.0], vec![1.0, 2.0]]);
    assert_eq!(got[2], [-1.0, 0.0]);
    assert_eq!(got[3], [1.0 / 65536.0; 2]);
    assert_eq!(got[4], [1.0, 3.0, 2.0, 0.0]);
    assert_eq!(elements(&shared), [65536.0, 131072.0]);
    assert_eq!(elements(&alone), [-1.0, 0.0], "in place");
    assert_eq!(elements(&d), [1.0, 1.0]);
    assert_eq!(elements(&strided)[1], 131072.0);
}

#[test]
fn a_tied_weight_is_unscaled_once() {
    let weight = var(&[1.0], DType::F32);
    let mut gradients = gradient(&weight, &[65536.0], DType::F32);
    let mut scaler = scaler();
    let twice = named(&[&weight, &weight]);
    scaler.unscale(&mut gradients, &twice).unwrap();
    assert_eq!(elements(gradients.get(&weight).unwrap()), [1.0]);
}

/// Gradients accumulate while they are scaled, and are unscaled once.
#[test]
fn accumulated_gradients_are_unscaled_once() {
    let weight = var(&[2.0], DType::F32);
    let mut scaler = scaler();
    let mut accumulator = GradientAccumulator::new(named(&[&weight]));
    for x in [1.0, 2.0, 6.0] {
        let loss = (weight.sum_all().unwrap() * x).unwrap();
        let scaled = scaler.scale(&loss).unwrap();
        accumulator.add(scaled.backward().unwrap()).unwrap();
    }
    let mut gradients = accumulator.mean().unwrap();
    scaler.unscale(&mut gradients, &named(&[&weight])).unwrap();
    assert_eq!(elements(gradients.get(&weight).unwrap()), [3.0]);
}

/// With two optimizers, the one without an overflow steps, and the common scale falls.
#[test]
fn an_overflow_skips_the_optimizer_that_has_it() {
    let (a, b) = (var(&[1.0], DType::F32), var(&[1.0], DType::F32));
    let (mut first, mut second) = (adamw(&[&a]), adamw(&[&b]));
    let mut scaler = scaler();
    let mut gradients = store(&[
        (&a, tensor(&[f64::INFINITY], DType::F32)),
        (&b, tensor(&[65536.0], DType::F32)),
    ]);
    assert!(!scaler.step(&mut first, &mut gradients).unwrap());
    assert_eq!(scaler.non_finite(), Some("a"));
    assert!(scaler.step(&mut second, &mut gradients).unwrap());
    assert_eq!((first.steps(), second.steps()), (0, 1));
    assert_eq!(elements(&a), [1.0]);
    assert!(elements(&b)[0] < 1.0);
    scaler.update().unwrap();
    assert_eq!(scaler.loss_scale(), 32768.0);
    assert_eq!(scaler.non_finite(), None);
}

/// A gradient may be finite while scaled, and overflow when it is divided by a scale below 1.
#[test]
fn an_overflow_by_unscaling_counts() {
    let weight = var(&[1.0], DType::F32);
    let mut scaler = scaler_from(2f64.powi(-20));
    let mut gradients = gradient(&weight, &[1e35], DType::F32);
    assert!(!scaler.step(&mut adamw(&[&weight]), &mut gradients).unwrap());
    assert_eq!(elements(&weight), [1.0]);
}

#[test]
fn switched_off_it_hands_everything_on() {
    let weight = var(&[1.0], DType::F32);
    let config = GradScalerConfig {
        enabled: false,
        ..Default::default()
    };
    let mut scaler = GradScaler::new(config).unwrap();
    assert_eq!(scaler.loss_scale(), 1.0);
    let loss = weight.sqr().unwrap().sum_all().unwrap();
    let scaled = scaler.scale(&loss).unwrap();
    assert_eq!(elements(&scaled), elements(&loss));
    let mut gradients = scaled.backward().unwrap();
    for _ in 0..2 {
        scaler.unscale(&mut gradients, &named(&[&weight])).unwrap();
        assert_eq!(elements(gradients.get(&weight).unwrap()), [2.0]);
        assert!(scaler.step(&mut adamw(&[&weight]), &mut gradients).unwrap());
        scaler.update().unwrap();
    }
    let before = scaler.state();
    assert_eq!(before.growth_tracker, 0);
}
