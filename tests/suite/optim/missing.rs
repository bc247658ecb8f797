//! Parameters without a gradient: an error, skipped as by PyTorch, or updated with zeros.

use super::{elements, named, noise, noisy_gradient, store, var};
use crate::check::refusal;
use candle_core::{DType, Device, Tensor, Var, backprop::GradStore};
use rstest::rstest;
use tallow::Error;
use tallow::optim::{
    AdamWConfig, GradScaler, GradScalerConfig, GradientAccumulator, MissingGradients, Optimizer,
    check_finite, clip_grad_norm, grad_norm,
};

const STEPS: usize = 6;

fn config(missing_gradients: MissingGradients) -> AdamWConfig {
    AdamWConfig {
        lr: 1e-2,
        weight_decay: 0.1,
        missing_gradients,
        ..Default::default()
    }
}

/// Returns two parameters of one dtype.
fn pair(dtype: DType) -> [Var; 2] {
    [var(&noise(37, 1), dtype), var(&noise(5, 2), dtype)]
}

/// Returns whether the second parameter has a gradient in this step; in the first it has none.
fn is_present(step: usize) -> bool {
    [1, 2, 5].contains(&step)
}

/// Returns the gradients of a step, with the second parameter's only where present.
fn gradients_of([a, b]: &[Var; 2], step: usize) -> GradStore {
    let of_a = (a, noisy_gradient(a, step));
    let of_b = (b, noisy_gradient(b, step + 100));
    match is_present(step) {
        true => store(&[of_a, of_b]),
        false => store(&[of_a]),
    }
}

/// PyTorch counts the steps of each parameter, so skipping equals a separate optimizer that does not step.
#[rstest]
#[case(DType::F32)]
#[case(DType::F64)]
#[case(DType::BF16)]
fn skipped_is_an_optimizer_of_its_own_that_does_not_step(#[case] dtype: DType) {
    let together = pair(dtype);
    let names = named(&[&together[0], &together[1]]);
    let mut optimizer = Optimizer::new(names, config(MissingGradients::Skip)).unwrap();
    let apart = pair(dtype);
    let mut own = apart.each_ref().map(|var| {
        let parameters = named(&[var]);
        Optimizer::new(parameters, config(MissingGradients::Error)).unwrap()
    });
    for step in 0..STEPS {
        optimizer.step(&gradients_of(&together, step)).unwrap();
        let gradients = gradients_of(&apart, step);
        own[0].step(&gradients).unwrap();
        if is_present(step) {
            own[1].step(&gradients).unwrap();
        }
        for (var, alone) in together.iter().zip(&apart) {
            assert_eq!(elements(var), elements(alone), "step {step}");
        }
    }
    assert_eq!(optimizer.steps(), STEPS);
    // The same composed of candle's ops.
    let composed = pair(dtype);
    let names = named(&[&composed[0], &composed[1]]);
    let mut reference = Optimizer::new(names, config(MissingGradients::Skip)).unwrap();
    for step in 0..STEPS {
        reference
            .step_reference(&gradients_of(&composed, step))
            .unwrap();
    }
    let off = super::relative(&elements(&composed[1]), &elements(&together[1]));
    assert!(off < 1e-2, "{off}");
}

/// `Zero` equals a gradient of zeros in the store: moments and weight decay apply.
#[rstest]
#[case(DType::F32)]
#[case(DType::BF16)]
fn zero_is_a_gradient_of_zeros(#[case] dtype: DType) {
    let found = pair(dtype);
    let names = named(&[&found[0], &found[1]]);
    let mut optimizer = Optimizer::new(names, config(MissingGradients::Zero)).unwrap();
    let wanted = pair(dtype);
    let names = named(&[&wanted[0], &wanted[1]]);
    let mut explicit = Optimizer::new(names, config(MissingGradients::Error)).unwrap();
    for step in 0..STEPS {
        let before = elements(&found[1]);
        optimizer.step(&gradients_of(&found, step)).unwrap();
        if dtype == DType::F32 {
            let moved = elements(&found[1]) != before; // in bf16 its f32 master copy does
            assert!(moved, "step {step}: it decays at least");
        }
        let mut gradients = gradients_of(&wanted, step);
        if !is_present(step) {
            gradients.insert(&wanted[1], wanted[1].zeros_like().unwrap());
        }
        explicit.step(&gradients).unwrap();
        for (found, wanted) in found.iter().zip(&wanted) {
            assert_eq!(elements(found), elements(wanted), "step {step}");
        }
    }
}

/// The number of skipped steps is part of the state: a restored run continues with the same bits.
#[test]
fn skipped_steps_are_saved() {
    let vars = pair(DType::F32);
    let parameters = || named(&[&vars[0], &vars[1]]);
    let mut optimizer = Optimizer::new(parameters(), config(MissingGradients::Skip)).unwrap();
    for step in 0..4 {
        optimizer.step(&gradients_of(&vars, step)).unwrap();
    }
    let state: Vec<(String, Tensor)> = optimizer.state();
    let copies = state
        .iter()
        .map(|(name, x)| (name.clone(), x.copy().unwrap()));
    let state: Vec<(String, Tensor)> = copies.collect();
    let (name, skipped) = state.last().unwrap();
    assert_eq!(
        (name.as_str(), skipped.to_scalar::<i64>().unwrap()),
        ("skipped.b", 2)
    );
    let weights = vars.each_ref().map(|var| var.copy().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("optimizer.safetensors");
    optimizer.save(&path).unwrap();
    let rest = |optimizer: &mut Optimizer| {
        for (var, weight) in vars.iter().zip(&weights) {
            var.set(weight).unwrap();
        }
        for step in 4..STEPS {
            optimizer.step(&gradients_of(&vars, step)).unwrap();
        }
        vars.each_ref().map(|var| elements(var))
    };
    let wanted = rest(&mut optimizer);

    let mut other = Optimizer::new(parameters(), config(MissingGradients::Skip)).unwrap();
    other.load_state(state.clone(), 4).unwrap();
    assert_eq!(rest(&mut other), wanted);
    let mut other = Optimizer::new(parameters(), config(MissingGradients::Skip)).unwrap();
    other.load(&path).unwrap();
    assert_eq!(rest(&mut other), wanted);

    for damaged in [
        Tensor::new(-1i64, &Device::Cpu),
        Tensor::new(5i64, &Device::Cpu),
    ] {
        let mut state = state.clone();
        state.last_mut().unwrap().1 = damaged.unwrap();
        refusal(other.load_state(state, 4), &["skipped.b"]);
    }
    let mut state = state;
    state.last_mut().unwrap().1 = Tensor::new(2f32, &Device::Cpu).unwrap();
    refusal(other.load_state(state, 4), &["skipped.b"]);
}

/// The norm covers the present gradients, and only they are scaled, whatever the setting.
#[rstest]
fn clipping(#[values(MissingGradients::Skip, MissingGradients::Zero)] missing: MissingGradients) {
    let vars = pair(DType::F64);
    let parameters = named(&[&vars[0], &vars[1]]);
    let mut found = gradients_of(&vars, 0);
    let error = refusal(
        MissingGradients::Error.with_gradients(&found, &parameters),
        &["missing_gradients"],
    );
    assert!(
        matches!(&error, Error::MissingGradient { parameter, .. } if parameter == "b"),
        "{error}"
    );
    let present = missing.with_gradients(&found, &parameters).unwrap();
    let names: Vec<&str> = present.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["a"]);
    let norm = elements(&noisy_gradient(&vars[0], 0));
    let norm = norm.iter().map(|g| g * g).sum::<f64>().sqrt();
    let close = |a: f64, b: f64| (a - b).abs() < 1e-5 * b;
    assert!(close(grad_norm(&found, &present).unwrap(), norm));
    assert!(close(
        clip_grad_norm(&mut found, &present, 0.5).unwrap(),
        norm
    ));
    assert!(close(grad_norm(&found, &present).unwrap(), 0.5));
    let loss = Tensor::new(1f64, &Device::Cpu).unwrap();
    check_finite(&loss, &found, &present).unwrap();
}

#[rstest]
fn a_scaler(#[values(MissingGradients::Skip, MissingGradients::Zero)] missing: MissingGradients) {
    let scaler = || {
        GradScaler::new(GradScalerConfig {
            init_scale: 8.0,
            ..Default::default()
        })
    };
    let scaled = |vars: &[Var; 2], step: usize| {
        let mut gradients = gradients_of(vars, step);
        for var in vars {
            if let Some(gradient) = gradients.remove(var) {
                gradients.insert(var, (gradient * 8.0).unwrap());
            }
        }
        gradients
    };
    let [found, wanted] = [pair(DType::F32), pair(DType::F32)];
    let optimizer_of =
        |vars: &[Var; 2]| Optimizer::new(named(&[&vars[0], &vars[1]]), config(missing));
    let (mut optimizer, mut plain) = (
        optimizer_of(&found).unwrap(),
        optimizer_of(&wanted).unwrap(),
    );
    let mut scaler = scaler().unwrap();
    for step in 0..STEPS {
        let mut gradients = scaled(&found, step);
        if step % 2 == 1 {
            let parameters = named(&[&found[0], &found[1]]);
            let present = missing.with_gradients(&gradients, &parameters).unwrap();
            scaler.unscale(&mut gradients, &present).unwrap();
        }
        assert!(scaler.step(&mut optimizer, &mut gradients).unwrap());
        scaler.update().unwrap();
        let unscaled = gradients_of(&wanted, step);
        plain.step(&unscaled).unwrap();
        for (found, wanted) in found.iter().zip(&wanted) {
            assert_eq!(elements(found), elements(wanted), "step {step}");
        }
    }
    // An overflow in the present gradients counts, and leaves the counters unchanged.
    let before = (optimizer.steps(), optimizer.state().len());
    let infinite = Tensor::full(f32::INFINITY, 37, &Device::Cpu).unwrap();
    let mut gradients = store(&[(&found[0], infinite)]);
    assert!(!scaler.step(&mut optimizer, &mut gradients).unwrap());
    assert_eq!((optimizer.steps(), optimizer.state().len()), before);
    scaler.update().unwrap();
    // Without any gradient, whether it overflowed is unknown.
    let error = scaler.step(&mut optimizer, &mut store(&[])).unwrap_err();
    assert!(matches!(error, Error::MissingGradient { .. }), "{error}");
}

/// A micro-batch without a gradient adds nothing, and counts in the mean.
#[test]
fn accumulation() {
    let (a, b, c) = (
        var(&[2.0], DType::F32),
        var(&[3.0], DType::F32),
        var(&[4.0], DType::F32),
    );
    let one = |x: f32| Tensor::new(&[x], &Device::Cpu).unwrap();
    let mean = |missing: MissingGradients| {
        let accumulator = GradientAccumulator::new(named(&[&a, &b, &c]));
        let mut accumulator = accumulator.with_missing(missing);
        accumulator.add(store(&[(&a, one(1.0))])).unwrap();
        accumulator
            .add(store(&[(&a, one(2.0)), (&b, one(8.0))]))
            .unwrap();
        accumulator
            .add_weighted(store(&[(&b, one(1.0))]), 2.0)
            .unwrap();
        let mean = accumulator.mean().unwrap();
        let mean = [&a, &b, &c].map(|var| mean.get(var).map(elements));
        // Nothing of one batch remains in the next.
        accumulator.add(store(&[(&c, one(5.0))])).unwrap();
        let next = accumulator.mean().unwrap();
        assert_eq!(next.get(&c).map(elements), Some(vec![5.0]));
        assert_eq!(next.get(&a).is_some(), missing == MissingGradients::Zero);
        mean
    };
    let [of_a, of_b] = [Some(vec![0.75]), Some(vec![2.5])];
    let skipped = [of_a.clone(), of_b.clone(), None];
    assert_eq!(mean(MissingGradients::Skip), skipped);
    assert_eq!(mean(MissingGradients::Zero), [of_a, of_b, Some(vec![0.0])]);
}
