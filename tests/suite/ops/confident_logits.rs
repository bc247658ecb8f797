//! Cross-entropy with large logits and small losses: a loss is a difference of numbers that are hundreds of times
//! larger.

use super::case::{Case, Input, KERNEL, Layout, REFERENCE, cast};
use super::compare::{error, magnitude};
use candle_core::{D, DType, Device, Tensor};
use rstest::rstest;
use tallow::ops::{self, KernelPolicy};

/// The errors of PyTorch 2.15 in f32 on a CPU against itself in f64, |a - b| / |b| by norm, for `cross_entropy(x @
/// W.T)` of [`inputs`]: loss, dx and dW.
const PYTORCH_OF_BOTH: [f64; 3] = [1.6e-6, 2.2e-6, 2.0e-6];
/// PyTorch's errors for `cross_entropy(logits)`: loss and dlogits.
const PYTORCH_OF_LOGITS: [f64; 2] = [4.3e-8, 8.3e-8];

/// Returns a tensor of numbers k / `unit`, rounded to f32 and converted to f64.
fn spread(dims: (usize, usize), [step, start, count]: [usize; 3], unit: f64) -> Tensor {
    let number = |i: usize| ((i * step + start) % count) as f64 - (count / 2) as f64;
    let numbers: Vec<f64> = (0..dims.0 * dims.1).map(|i| number(i) / unit).collect();
    let tensor = Tensor::from_vec(numbers, dims, &Device::Cpu).unwrap();
    cast(&cast(&tensor, DType::F32), DType::F64)
}

/// Returns x (16, 8), W (64, 8), their logits up to 220, and targets: the largest logit of each row.
fn inputs() -> (Tensor, Tensor, Tensor, Tensor) {
    let x = spread((16, 8), [7919, 13, 1009], 64.0);
    let weight = spread((64, 8), [6151, 5, 997], 60.0);
    let logits = x.matmul(&weight.t().unwrap()).unwrap();
    assert_eq!(magnitude(&logits).max.round(), 220.0);
    let targets = logits.argmax(D::Minus1).unwrap();
    let logits = cast(&cast(&logits, DType::F32), DType::F64);
    (x, weight, logits, targets)
}

/// Checks loss and gradients in f32 against f64: the error is at most three times PyTorch's, or 1e-6.
fn judge(case: &Case, device: &Device, policy: KernelPolicy, pytorch: &[f64]) {
    let exact = case.run(DType::F64, REFERENCE);
    let run = case.run_on(device, DType::F32, policy, Layout::Contiguous);
    let gradients = run.gradients.iter().zip(&exact.gradients);
    let gradients = gradients.map(|((name, found), (_, exact))| (*name, found, exact));
    let all: Vec<_> = std::iter::once(("loss", &run.out, &exact.out))
        .chain(gradients)
        .collect();
    assert_eq!(all.len(), pytorch.len());
    for ((what, found, exact), pytorch) in all.into_iter().zip(pytorch) {
        let distance = error(found, exact).norm / magnitude(exact).norm;
        let allowed = (3.0 * pytorch).max(1e-6);
        assert!(distance <= allowed, "{}: {what}: {distance:.1e}", case.name);
    }
}

/// Returns a case of each op, with PyTorch's errors.
fn both() -> [(Case, &'static [f64]); 2] {
    let (x, weight, logits, targets) = inputs();
    let ids = targets.clone();
    let of_both = Case::new(
        "linear_cross_entropy",
        vec![Input::new("x", x), Input::new("weight", weight)],
        move |x| ops::linear_cross_entropy(&x[0], &x[1], &ids),
    );
    let of_logits = Case::new(
        "cross_entropy",
        vec![Input::new("logits", logits)],
        move |x| ops::cross_entropy(&x[0], &targets),
    );
    let d_loss = Tensor::new(1f64, &Device::Cpu).unwrap();
    let with_d_loss = |case| Case {
        d_out: Some(d_loss.clone()),
        ..case
    };
    [
        (with_d_loss(of_both), &PYTORCH_OF_BOTH),
        (with_d_loss(of_logits), &PYTORCH_OF_LOGITS),
    ]
}

#[rstest]
fn losses_and_gradients_keep_their_digits(#[values(KERNEL, REFERENCE)] policy: KernelPolicy) {
    for (case, pytorch) in both() {
        judge(&case, &Device::Cpu, policy, pytorch);
    }
}

#[cfg(feature = "cuda")]
#[test]
#[ignore = "needs a CUDA device"]
fn losses_and_gradients_keep_their_digits_on_a_gpu() {
    let gpu = crate::gpu();
    for (case, pytorch) in both() {
        judge(&case, &gpu, KERNEL, pytorch);
    }
}
