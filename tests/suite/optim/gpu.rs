//! Norms and checks of gradients on a GPU, against the CPU's.

use super::{elements, named, noise, store};
use crate::check::{bits, refusal};
use crate::gpu;
use candle_core::{DType, Device, Tensor, Var};
use rstest::rstest;
use tallow::optim::{
    GradScaler, GradScalerConfig, Optimizer, check_finite, clip_grad_norm, grad_norm,
};

/// Returns gradients of three parameters on `device`, one of them transposed, with `wrong` as an element of the second.
fn gradients(dtype: DType, wrong: Option<f64>, device: &Device) -> Vec<(Var, Tensor)> {
    let shapes = [(700, 30), (1, 3), (123, 457)];
    let with_gradient = |(i, shape): (usize, (usize, usize))| {
        let mut values = noise(shape.0 * shape.1, i);
        if let (1, Some(wrong)) = (i, wrong) {
            values[2] = wrong;
        }
        let gradient = Tensor::from_vec(values, (shape.1, shape.0), &Device::Cpu).unwrap();
        let gradient = gradient.to_dtype(dtype).unwrap(); // rounded once, on the CPU
        let gradient = gradient.to_device(device).unwrap().t().unwrap();
        let gradient = match i {
            2 => gradient,
            _ => gradient.contiguous().unwrap(),
        };
        (Var::zeros(shape, dtype, device).unwrap(), gradient)
    };
    shapes.into_iter().enumerate().map(with_gradient).collect()
}

#[rstest]
#[ignore = "needs a CUDA device"]
fn norms_are_the_cpus(#[values(DType::F32, DType::BF16, DType::F16, DType::F64)] dtype: DType) {
    let of = |device: &Device| {
        let all = gradients(dtype, None, device);
        let pairs: Vec<(&Var, Tensor)> = all.iter().map(|(var, g)| (var, g.clone())).collect();
        let vars: Vec<&Var> = all.iter().map(|(var, _)| var).collect();
        let mut gradients = store(&pairs);
        let norm = clip_grad_norm(&mut gradients, &named(&vars), 1.0).unwrap();
        let clipped = grad_norm(&gradients, &named(&vars)).unwrap();
        (norm, clipped)
    };
    let [(norm, clipped), (on_gpu, clipped_on_gpu)] = [of(&Device::Cpu), of(&gpu())];
    assert!((on_gpu / norm - 1.0).abs() < 1e-12, "{on_gpu} {norm}");
    let rounding = if dtype == DType::F64 { 1e-12 } else { 1e-3 };
    assert!((clipped_on_gpu / clipped - 1.0).abs() < rounding);
}

#[rstest]
#[ignore = "needs a CUDA device"]
fn what_is_not_finite_is_named(
    #[values(DType::F32, DType::BF16, DType::F16)] dtype: DType,
    #[values(f64::NAN, f64::INFINITY)] wrong: f64,
) {
    let gpu = gpu();
    let loss = Tensor::zeros((), DType::F32, &gpu).unwrap();
    for wrong in [None, Some(wrong)] {
        let all = gradients(dtype, wrong, &gpu);
        let pairs: Vec<(&Var, Tensor)> = all.iter().map(|(var, g)| (var, g.clone())).collect();
        let vars: Vec<&Var> = all.iter().map(|(var, _)| var).collect();
        let parameters = named(&vars);
        let mut gradients = store(&pairs);
        let checked = check_finite(&loss, &gradients, &parameters);
        let mut scaler = GradScaler::new(GradScalerConfig::default()).unwrap();
        scaler.unscale(&mut gradients, &parameters).unwrap();
        let scale = scaler.loss_scale();
        let unscaled = elements(gradients.get(vars[0]).unwrap());
        let expected = elements(&all[0].1);
        for (got, expected) in unscaled.iter().zip(expected) {
            assert!((got * scale - expected).abs() <= expected.abs() * 1e-6);
        }
        match wrong {
            None => {
                checked.unwrap();
                assert_eq!(scaler.non_finite(), None);
            }
            Some(_) => {
                refusal(checked, &[&parameters[1].0]);
                assert_eq!(scaler.non_finite(), Some(parameters[1].0.as_str()));
            }
        }
    }
}

#[rstest]
#[ignore = "needs a CUDA device"]
fn clips_by_value(#[values(DType::F64, DType::F32, DType::BF16, DType::F16)] dtype: DType) {
    super::clip::clips_by_value(&gpu(), dtype);
}

/// Steps of each rule with a kernel have the CPU's bits.
#[rstest]
#[ignore = "needs a CUDA device"]
fn rules_have_the_bits_of_the_cpu(
    #[values(DType::F32, DType::BF16, DType::F16)] dtype: DType,
    #[values(false, true)] gradients_in_f32: bool,
) {
    let to = |values: Vec<f64>, dtype: DType, device: &Device| {
        let values = Tensor::new(values, &Device::Cpu).unwrap();
        let values = values.to_dtype(dtype).unwrap(); // rounded once, on the CPU
        values.to_device(device).unwrap()
    };
    for rule in super::rules::rules() {
        let of = |device: &Device| {
            let vars = [3, 20_001].map(|n| to(noise(n, n), dtype, device));
            let vars = vars.map(|values| Var::from_tensor(&values).unwrap());
            let mut optimizer = Optimizer::new(named(&vars.each_ref()), rule).unwrap();
            for t in 0..4 {
                let dtype = if gradients_in_f32 { DType::F32 } else { dtype };
                let gradients = vars.each_ref();
                let gradients =
                    gradients.map(|var| (var, to(noise(var.elem_count(), t), dtype, device)));
                optimizer.step(&store(&gradients)).unwrap();
            }
            let state = optimizer.state().into_iter().map(|(_, state)| state);
            let vars = vars.iter().map(|var| var.as_tensor().clone());
            let all: Vec<_> = vars.chain(state).map(|x| bits(&x)).collect();
            all
        };
        assert!(of(&gpu()) == of(&Device::Cpu), "{rule}");
    }
}
