//! The values inside a region equal those of explicit casts.

use super::*;
use tallow::attention::{self, AttentionConfig, Mask};
use tallow::{Result, autocast, ops};

const BF16: DType = DType::BF16;

fn bf16(x: &Tensor) -> Tensor {
    x.to_dtype(BF16).unwrap()
}

fn under_cuda(f: impl FnOnce() -> Result<Tensor>) -> Tensor {
    autocast(Autocast::cuda(BF16), f).unwrap()
}

#[test]
fn each_class_is_a_cast_by_hand() {
    let (x, w) = (
        numbers(&[2, 3, 6], DType::F32, 1),
        numbers(&[6, 6], DType::F32, 2),
    );
    let (half, half_w) = (bf16(&x), bf16(&w));
    let wide = half.to_dtype(DType::F32).unwrap();
    same(
        &under_cuda(|| ops::linear(&x, &w)),
        &ops::linear(&half, &half_w).unwrap(),
    );
    same(
        &under_cuda(|| ops::swiglu_linear(&x, &w, &w)),
        &ops::swiglu_linear(&half, &half_w, &half_w).unwrap(),
    );
    same(
        &under_cuda(|| ops::matmul_transposed(&x, &x)),
        &ops::matmul_transposed(&half, &half).unwrap(),
    );
    let softmax = |x: &Tensor| ops::softmax(x, 0.7, Mask::Causal);
    same(&under_cuda(|| softmax(&half)), &softmax(&wide).unwrap());
    let row = numbers(&[6], DType::F32, 3);
    let layer_norm = |x: &Tensor| ops::layer_norm(x, &row, &row, 1e-5);
    same(
        &under_cuda(|| layer_norm(&half)),
        &layer_norm(&wide).unwrap(),
    );
    // Computed in f32 with the unrounded weight, and rounded once.
    let rms_norm = |x: &Tensor| ops::rms_norm(x, &row, 1e-5);
    same(
        &under_cuda(|| rms_norm(&half)),
        &bf16(&rms_norm(&wide).unwrap()),
    );
    same(&under_cuda(|| rms_norm(&x)), &rms_norm(&x).unwrap());
    let on_cpu = autocast(Autocast::cpu(BF16), || layer_norm(&half)).unwrap();
    same(&on_cpu, &bf16(&layer_norm(&wide).unwrap()));

    let targets = Tensor::new(&[[1u32, 5, 0], [2, 2, 3]], &Device::Cpu).unwrap();
    let logits = ops::linear(&half, &half_w).unwrap();
    let by_hand = ops::cross_entropy(&logits.to_dtype(DType::F32).unwrap(), &targets).unwrap();
    for loss in [
        under_cuda(|| ops::cross_entropy(&logits, &targets)),
        under_cuda(|| ops::linear_cross_entropy(&x, &w, &targets)),
    ] {
        assert_eq!(loss.dtype(), DType::F32);
        let (loss, by_hand) = (elements(&loss)[0], elements(&by_hand)[0]);
        assert!((loss - by_hand).abs() < 1e-6 * by_hand, "{loss} {by_hand}");
    }

    let q = numbers(&[1, 2, 5, 8], DType::F32, 4);
    let config = AttentionConfig::default();
    for attend in [attention::naive, attention::flash] {
        let half_q = bf16(&q);
        let by_hand = attend(&half_q, &half_q, &half_q, &config).unwrap();
        same(&under_cuda(|| attend(&q, &q, &q, &config)), &by_hand);
    }
}

/// Gradients are those of the half-precision op, in f32; a weight's gradient is never rounded to half precision.
#[test]
fn gradients_are_those_of_the_cast() {
    let (x, w) = (var(&[4, 6], DType::F32, 1), var(&[5, 6], DType::F32, 2));
    let y = under_cuda(|| ops::linear(&x, &w));
    let gradients = y.backward().unwrap();
    let (half, half_w) = (
        Var::from_tensor(&bf16(&x)).unwrap(),
        Var::from_tensor(&bf16(&w)).unwrap(),
    );
    let by_hand = ops::linear(&half, &half_w).unwrap().backward().unwrap();
    let wanted = by_hand.get(&half).unwrap().to_dtype(DType::F32).unwrap();
    same(gradients.get(&x).unwrap(), &wanted);
    let dw = gradients.get(&w).unwrap();
    same(&bf16(dw), by_hand.get(&half_w).unwrap());
    let dy = Tensor::ones((5, 4), DType::F32, &Device::Cpu).unwrap();
    same(dw, &dy.matmul(&half.to_dtype(DType::F32).unwrap()).unwrap());
}

#[test]
fn cast_is_differentiable_and_rounds_to_nearest() {
    let x = Var::new(&[1.0f32, 1.001, 3.0e38, 65_519.0], &Device::Cpu).unwrap();
    let half = ops::cast(&x, DType::F16).unwrap();
    assert_eq!(
        elements(&half),
        [1.0, 1.0009765625, f64::INFINITY, 65_504.0]
    );
    let upstream = Tensor::new(&[1.0f32, 2.0, 3.0, 0.1], &Device::Cpu).unwrap();
    let upstream = upstream.to_dtype(DType::F16).unwrap();
    let loss = (half * &upstream).unwrap();
    let gradient = loss.backward().unwrap().get(&x).unwrap().clone();
    same(&gradient, &upstream.to_dtype(DType::F32).unwrap());
    assert_eq!(ops::cast(&x, DType::F32).unwrap().id(), x.id()); // already f32
    assert!(!tallow::no_grad(|| ops::cast(&x, BF16)).unwrap().track_op());
}

/// `cast_for` gives plain candle ops the casts of a region; outside of regions it returns its inputs.
#[test]
fn cast_for_plain_candle_ops() {
    let (a, b) = (
        numbers(&[2, 3], DType::F32, 1),
        numbers(&[3, 2], DType::F16, 2),
    );
    let [c, d] = ops::cast_for("matmul", [&a, &b]).unwrap();
    assert_eq!((c.id(), d.id()), (a.id(), b.id()));
    let product = under_cuda(|| {
        let [a, b] = ops::cast_for("matmul", [&a, &b])?;
        Ok(a.matmul(&b)?)
    });
    same(&product, &bf16(&a).matmul(&bf16(&b)).unwrap());
    let [ids] = autocast(Autocast::cuda(BF16), || {
        ops::cast_for("softmax", [&Tensor::new(&[1u32], &Device::Cpu)?])
    })
    .unwrap();
    assert_eq!(ids.dtype(), DType::U32);
}
