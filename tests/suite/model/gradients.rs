//! Gradients of the complete model: each parameter has one, and it is correct.

use super::*;
use rstest::rstest;
use tallow::ops::{KernelPolicy, with_kernel_policy};

/// Returns [`mini`] with a context of `length` tokens.
fn long(length: usize) -> TransformerConfig {
    TransformerConfig {
        context_length: length,
        ..mini()
    }
}

fn batch(length: usize) -> (Tensor, Tensor) {
    let both = ids(29, 2, 2 * length);
    let half = |start| both.narrow(1, start, length).unwrap().contiguous().unwrap();
    (half(0), half(length))
}

#[rstest]
fn every_parameter_has_one(
    #[values(DType::F32, DType::F64, DType::BF16, DType::F16)] dtype: DType,
    #[values(KernelPolicy::Prefer, KernelPolicy::Reference)] policy: KernelPolicy,
    #[values(7, 123)] length: usize,
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
) {
    let model = attending(attention, &long(123), 1, dtype);
    let (tokens, targets) = batch(length);
    let (loss, gradients) =
        with_kernel_policy(policy, || loss_and_gradients(&model, &tokens, &targets));
    alive(&gradients);
    assert_eq!(gradients.len(), 2 * 9 + 3);
    let wanted = if dtype == DType::F64 {
        DType::F64
    } else {
        DType::F32
    };
    assert_eq!(loss.dtype(), wanted);
    for ((name, gradient), (_, var)) in gradients.iter().zip(model.parameters()) {
        assert_eq!(gradient.dtype(), var.dtype(), "{name}");
    }
}

/// With one token there is one key, whose probability is 1, so the gradients of q and k are zeros.
#[test]
fn one_token() {
    let model = model_of(&long(1), 1, DType::F64);
    let (tokens, targets) = batch(1);
    let (_, gradients) = loss_and_gradients(&model, &tokens, &targets);
    let (scores, rest): (Vec<_>, Vec<_>) = gradients
        .into_iter()
        .partition(|(name, _)| name.contains("q_proj") || name.contains("k_proj"));
    assert_eq!(scores.len(), 4);
    for (name, gradient) in scores {
        assert!(elements(&gradient).iter().all(|g| *g == 0.0), "{name}");
    }
    alive(&rest);
}

/// The embedding's gradient is zero for absent tokens; no row of the head's gradient is zero.
#[test]
fn rows_of_tokens_that_were_not_there() {
    let model = mini_model(1);
    let tokens = Tensor::new(&[[3u32, 5, 3, 28]], &CPU).unwrap();
    let (_, gradients) = loss_and_gradients(&model, &tokens, &tokens);
    for (name, gradient) in [&gradients[0], gradients.last().unwrap()] {
        for (token, row) in gradient.to_vec2::<f32>().unwrap().iter().enumerate() {
            let zero = row.iter().all(|g| *g == 0.0);
            let absent = ![3, 5, 28].contains(&token);
            assert_eq!(zero, absent && name.starts_with("token"), "{name} {token}");
        }
    }
}

#[rstest]
fn kernels_agree_with_their_references(
    #[values(1, 2, 13, 123)] length: usize,
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
) {
    let model = attending(attention, &long(130), 1, DType::F64);
    let (tokens, targets) = batch(length);
    let run = |policy| with_kernel_policy(policy, || loss_and_gradients(&model, &tokens, &targets));
    let (loss, gradients) = run(KernelPolicy::Strict);
    let (wanted_loss, wanted) = run(KernelPolicy::Reference);
    close("loss", &loss, &wanted_loss, 1e-13);
    for ((name, got), (_, wanted)) in gradients.iter().zip(&wanted) {
        let size: f64 = elements(wanted).iter().map(|g| g.abs()).sum();
        if length == 1 && size < 1e-12 {
            continue; // q and k, whose gradients are zeros (see `one_token`)
        }
        close(name, got, wanted, 1e-11);
    }
}

/// d loss / d (parameter + h direction), for one direction of each parameter, by central differences.
#[rstest]
fn finite_differences(
    #[values(2, 13, 57)] length: usize,
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
) {
    const H: f64 = 1e-5;

    let model = attending(attention, &long(64), 1, DType::F64);
    let (tokens, targets) = batch(length);
    let loss_at = |var: &Var, point: &Tensor| {
        var.set(point).unwrap();
        let logits = model.forward(&tokens).unwrap();
        elements(&ops::cross_entropy(&logits, &targets).unwrap())[0]
    };
    let (_, gradients) = loss_and_gradients(&model, &tokens, &targets);
    for (salt, ((name, gradient), (_, var))) in gradients.iter().zip(model.parameters()).enumerate()
    {
        let here = var.as_tensor().copy().unwrap().detach();
        let direction = numbers(var.dims(), DType::F64, salt as u64);
        let step = (&direction * H).unwrap();
        let up = loss_at(&var, &(&here + &step).unwrap());
        let down = loss_at(&var, &(&here - &step).unwrap());
        var.set(&here).unwrap();
        let by_difference = (up - down) / (2.0 * H);
        let along = elements(gradient).into_iter().zip(elements(&direction));
        let by_backward: f64 = along.map(|(g, d)| g * d).sum();
        let error = (by_difference - by_backward).abs();
        // The truncation error is of order H^2, the rounding error of order 1e-16 / H.
        assert!(
            error < 1e-8 * (1.0 + by_backward.abs()),
            "{name}: {by_backward} backward, {by_difference} by differences"
        );
        assert!(
            by_backward.abs() > 1e-5,
            "{name}: a direction that shows nothing"
        );
    }
}

#[rstest]
fn backward_repeats(#[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm) {
    let model = attending(attention, &mini(), 1, DType::F32);
    let (tokens, targets) = batch(7);
    let logits = model.forward(&tokens).unwrap();
    let loss = ops::cross_entropy(&logits, &targets).unwrap();
    let first = gradients_of(&loss, model.parameters());
    let second = gradients_of(&loss, model.parameters());
    for ((name, a), (_, b)) in first.iter().zip(&second) {
        assert_eq!(bits(a), bits(b), "{name}");
    }
}

/// Twenty steps of plain gradient descent on one batch reduce its loss.
#[test]
fn descent_descends() {
    let model = mini_model(1);
    let (tokens, targets) = batch(7);
    let mut losses = Vec::new();
    for _ in 0..20 {
        let (loss, gradients) = loss_and_gradients(&model, &tokens, &targets);
        losses.push(elements(&loss)[0]);
        for ((_, gradient), (_, var)) in gradients.iter().zip(model.parameters()) {
            let step = (gradient * 0.1).unwrap();
            var.set(&(var.as_tensor() - step).unwrap().detach())
                .unwrap();
        }
    }
    assert!(losses[19] < 0.5 * losses[0], "{losses:?}");
}
