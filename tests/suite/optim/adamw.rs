//! AdamW's step: its numbers, its state's dtype, and its errors.

use super::{elements, named, noise, noisy_gradient, relative, store, var};
use crate::check::refusal;
use candle_core::{DType, Device, Tensor, Var};
use rstest::rstest;
use tallow::Error;
use tallow::optim::{AdamWConfig, MissingGradients, Moments, Optimizer};

const CONFIG: AdamWConfig = AdamWConfig {
    lr: 1e-2,
    betas: (0.9, 0.95),
    eps: 1e-8,
    weight_decay: 0.1,
    moments: Moments::Wide,
    missing_gradients: MissingGradients::Error,
};

/// Returns the textbook recurrence for one number, with named corrected moments and without simplifications. `round` is
/// applied to every result.
fn recurrence(start: f64, gradients: &[f64], config: &AdamWConfig, round: fn(f64) -> f64) -> f64 {
    let (beta1, beta2) = config.betas;
    let (mut p, mut m, mut v) = (start, 0.0, 0.0);
    for (i, g) in gradients.iter().enumerate() {
        let t = (i + 1) as i32;
        m = round(round(round(beta1) * m) + round(round(1.0 - beta1) * g));
        v = round(round(round(beta2) * v) + round(round(1.0 - beta2) * round(g * g)));
        let m_hat = round(m / round(1.0 - beta1.powi(t)));
        let v_hat = round(v / round(1.0 - beta2.powi(t)));
        p = round(p * round(1.0 - config.lr * config.weight_decay));
        let denominator = round(round(v_hat.sqrt()) + config.eps);
        p = round(p - round(round(config.lr) * round(m_hat / denominator)));
    }
    p
}

/// In f64 the optimizer equals the recurrence; in f32 its error is at most twice that of the recurrence in f32.
#[rstest]
#[case(DType::F64)]
#[case(DType::F32)]
fn follows_the_recurrence(#[case] dtype: DType) {
    let (n, steps) = (1003, 25);
    let weight = var(&noise(n, 0), dtype);
    let start = elements(&weight);
    let gradients: Vec<Tensor> = (0..steps).map(|t| noisy_gradient(&weight, t + 1)).collect();
    let mut optimizer = Optimizer::new(named(&[&weight]), CONFIG).unwrap();
    for gradient in &gradients {
        let gradients = store(&[(&weight, gradient.clone())]);
        optimizer.step(&gradients).unwrap();
    }
    assert_eq!(optimizer.steps(), steps);
    let gradients: Vec<Vec<f64>> = gradients.iter().map(elements).collect();
    let by_hand = |round: fn(f64) -> f64| -> Vec<f64> {
        let own = |i: usize| gradients.iter().map(|g| g[i]).collect::<Vec<_>>();
        let all = start.iter().enumerate();
        all.map(|(i, p)| recurrence(*p, &own(i), &CONFIG, round))
            .collect()
    };
    let exact = by_hand(|x| x);
    let limit = match dtype {
        DType::F64 => 1e-14,
        _ => 2.0 * relative(&by_hand(|x| f64::from(x as f32)), &exact),
    };
    let error = relative(&elements(&weight), &exact);
    assert!(error <= limit, "{error} against {limit}");
    assert!(relative(&elements(&weight), &start) > 1e-2, "it has moved");
}

/// PyTorch's values after five steps.
#[rstest]
#[case(DType::F64, 1e-14)]
#[case(DType::F32, 2e-7)]
fn agrees_with_pytorch(#[case] dtype: DType, #[case] tolerance: f64) {
    let weight = var(&[0.5, -1.25, 2.0], dtype);
    let mut optimizer = Optimizer::new(named(&[&weight]), CONFIG).unwrap();
    for t in 1..=5 {
        let sign = if t % 2 == 0 { 0.3 } else { -0.3 };
        let gradient = Tensor::new(&[0.1 * f64::from(t), -0.2, sign], &Device::Cpu).unwrap();
        let gradient = gradient.to_dtype(dtype).unwrap();
        optimizer.step(&store(&[(&weight, gradient)])).unwrap();
    }
    let state = optimizer.state();
    let expected = [
        (
            weight.as_tensor(),
            [0.44975197026706476, -1.193862390051244, 2.0043248829950775],
        ),
        (
            &state[0].1,
            [
                0.13144099999999997,
                -0.08190199999999999,
                -0.025112999999999993,
            ],
        ),
        (
            &state[1].1,
            [
                0.026283253125000024,
                0.009048762500000009,
                0.020359715625000014,
            ],
        ),
    ];
    for (got, expected) in expected {
        let error = relative(&elements(got), &expected);
        assert!(error < tolerance, "{error}");
    }
}

/// A step of 1e-3 is a quarter of the distance from 1 to the next smaller bf16 number.
#[rstest]
#[case(DType::BF16)]
#[case(DType::F16)]
fn half_precision_moves_as_f32_does(#[case] dtype: DType) {
    let start = [1.0, -2.0, 0.5, 100.0];
    let (half, full) = (var(&start, dtype), var(&start, DType::F32));
    let config = AdamWConfig::default();
    let mut halves = Optimizer::new(named(&[&half]), config).unwrap();
    let mut fulls = Optimizer::new(named(&[&full]), config).unwrap();
    for _ in 0..50 {
        let gradient = Tensor::new(&[1f32, -1.0, 0.25, 3.0], &Device::Cpu).unwrap();
        let narrow = gradient.to_dtype(dtype).unwrap();
        halves.step(&store(&[(&half, narrow)])).unwrap();
        fulls.step(&store(&[(&full, gradient)])).unwrap();
    }
    assert_eq!(half.dtype(), dtype);
    for (name, tensor) in halves.state() {
        assert_eq!(tensor.dtype(), DType::F32, "{name}");
    }
    assert!((elements(&full)[0] - 0.95).abs() < 1e-3);
    let rounded = full.to_dtype(dtype).unwrap();
    assert_eq!(elements(&half), elements(&rounded));
}

#[test]
fn a_half_precision_parameter_set_from_outside_starts_from_there() {
    let weight = var(&[1.0, 1.0], DType::BF16);
    let mut optimizer = Optimizer::new(named(&[&weight]), AdamWConfig::default()).unwrap();
    let gradient = Tensor::new(&[1f32, 1.0], &Device::Cpu).unwrap();
    let gradients = store(&[(&weight, gradient)]);
    optimizer.step(&gradients).unwrap();
    weight.set(&var(&[8.0, 1.0], DType::BF16)).unwrap();
    optimizer.step(&gradients).unwrap();
    let master = elements(&optimizer.state()[2].1);
    assert!((master[0] - 8.0).abs() < 2e-3, "set: {master:?}");
    assert!((master[1] - 0.998).abs() < 1e-4, "not set: {master:?}");
}

#[test]
fn gradients_of_other_dtypes_and_layouts_are_read() {
    let shape = (3, 5);
    let gradient = noise(15, 3);
    let dense = Tensor::from_vec(gradient.clone(), shape, &Device::Cpu).unwrap();
    let transposed = dense.t().unwrap().contiguous().unwrap().t().unwrap();
    assert!(!transposed.is_contiguous());
    let start = Tensor::from_vec(noise(15, 4), shape, &Device::Cpu).unwrap();
    for parameter in [DType::F64, DType::F32, DType::BF16, DType::F16] {
        for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
            let run = |gradient: &Tensor| {
                let weight = Var::from_tensor(&start.to_dtype(parameter).unwrap()).unwrap();
                let mut optimizer = Optimizer::new(named(&[&weight]), CONFIG).unwrap();
                let gradient = gradient.to_dtype(dtype).unwrap();
                optimizer.step(&store(&[(&weight, gradient)])).unwrap();
                (elements(&weight), elements(&optimizer.state()[0].1))
            };
            assert_eq!(run(&dense), run(&transposed), "{parameter:?} {dtype:?}");
            let (_, exp_avg) = run(&dense);
            let expected: Vec<f64> = gradient.iter().map(|g| g * 0.1).collect();
            assert!(
                relative(&exp_avg, &expected) < 4e-3,
                "{parameter:?} {dtype:?}"
            );
        }
    }
}

/// A gradient may share storage with its parameter, with another parameter, or with the state, because it is read
/// before anything is written.
#[test]
fn gradients_that_share_storage_with_what_is_written() {
    let (a, b) = (var(&[1.0, 2.0], DType::F32), var(&[3.0, 4.0], DType::F32));
    let mut optimizer = Optimizer::new(named(&[&a, &b]), CONFIG).unwrap();
    let (own, neighbour) = (a.detach(), a.detach());
    optimizer
        .step(&store(&[(&a, own), (&b, neighbour)]))
        .unwrap();
    let state = optimizer.state();
    for (name, tensor) in [&state[0], &state[2]] {
        let error = relative(&elements(tensor), &[0.1, 0.2]);
        assert!(error < 1e-6, "{name}: {:?}", elements(tensor));
    }
    let momentum = state[0].1.clone();
    optimizer
        .step(&store(&[(&a, momentum.clone()), (&b, momentum)]))
        .unwrap();
    assert!(relative(&elements(&optimizer.state()[0].1), &[0.1, 0.2]) < 1e-6);
}

#[test]
fn a_missing_gradient_is_named_and_nothing_changes() {
    let vars: Vec<Var> = (0..3).map(|i| var(&noise(5, i), DType::F32)).collect();
    let before: Vec<Vec<f64>> = vars.iter().map(|var| elements(var)).collect();
    let parameters = ["first", "second", "last"]
        .map(String::from)
        .into_iter()
        .zip(vars.clone());
    let mut optimizer = Optimizer::new(parameters, CONFIG).unwrap();
    let loss = (vars[0].sqr().unwrap() + vars[1].sqr().unwrap())
        .unwrap()
        .sum_all()
        .unwrap();
    let error = optimizer.step(&loss.backward().unwrap()).unwrap_err();
    assert!(
        matches!(&error, Error::MissingGradient { parameter, .. } if parameter == "last"),
        "{error}"
    );
    assert_eq!(optimizer.steps(), 0);
    for (var, before) in vars.iter().zip(before) {
        assert_eq!(elements(var), before);
    }
    for (_, tensor) in optimizer.state() {
        assert_eq!(elements(&tensor), [0.0; 5]);
    }
}

#[test]
fn misfits_are_refused_by_name() {
    let weight = var(&[1.0, 2.0], DType::F32);
    let mut optimizer = Optimizer::new([("w.x".to_string(), weight.clone())], CONFIG).unwrap();
    let wide = Tensor::zeros(3, DType::F32, &Device::Cpu).unwrap();
    let error = refusal(optimizer.step(&store(&[(&weight, wide)])), &["w.x", "[3]"]);
    assert!(matches!(error, Error::Shape { .. }), "{error}");
    let integers = Tensor::zeros(2, DType::U32, &Device::Cpu).unwrap();
    let error = refusal(
        optimizer.step(&store(&[(&weight, integers)])),
        &["w.x", "u32"],
    );
    assert!(matches!(error, Error::DType { .. }), "{error}");
    optimizer.set_learning_rate(f64::NAN);
    let gradient = Tensor::zeros(2, DType::F32, &Device::Cpu).unwrap();
    let error = optimizer.step(&store(&[(&weight, gradient)])).unwrap_err();
    assert!(
        matches!(error, Error::Config { field: "lr", .. }),
        "{error}"
    );
    assert_eq!((elements(&weight), optimizer.steps()), (vec![1.0, 2.0], 0));

    let ids = Var::zeros(2, DType::U32, &Device::Cpu).unwrap();
    refusal(
        Optimizer::new([("ids".to_string(), ids)], CONFIG),
        &["ids", "u32"],
    );
    let error = Optimizer::new([], CONFIG).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Config {
                field: "parameters",
                ..
            }
        ),
        "{error}"
    );
}

#[rstest]
#[case("lr", AdamWConfig { lr: -1.0, ..CONFIG })]
#[case("lr", AdamWConfig { lr: f64::INFINITY, ..CONFIG })]
#[case("betas.0", AdamWConfig { betas: (1.0, 0.9), ..CONFIG })]
#[case("betas.1", AdamWConfig { betas: (0.9, -0.1), ..CONFIG })]
#[case("betas.1", AdamWConfig { betas: (0.9, f64::NAN), ..CONFIG })]
#[case("eps", AdamWConfig { eps: -1e-8, ..CONFIG })]
#[case("eps", AdamWConfig { eps: 0.0, ..CONFIG })] // 0 / 0 where a gradient is 0
#[case("eps", AdamWConfig { eps: 1e-50, ..CONFIG })] // 0 in f32
#[case("eps", AdamWConfig { eps: f64::NAN, ..CONFIG })]
#[case("weight_decay", AdamWConfig { weight_decay: f64::NAN, ..CONFIG })]
#[case("weight_decay", AdamWConfig { weight_decay: 1e300, ..CONFIG })] // infinite in f32
#[case("weight_decay", AdamWConfig { lr: 1e20, weight_decay: 1e20, ..CONFIG })] // their product is infinite in f32
#[case("lr", AdamWConfig { lr: 1e300, ..CONFIG })]
#[case("lr", AdamWConfig { lr: 3e38, betas: (0.9, 0.999), ..CONFIG })] // the first step's rate is infinite in f32
#[case("eps", AdamWConfig { eps: 1e300, ..CONFIG })]
fn a_bad_configuration_names_its_field(#[case] wanted: &str, #[case] config: AdamWConfig) {
    let error = Optimizer::new(named(&[&var(&[1.0], DType::F32)]), config).unwrap_err();
    assert!(
        matches!(&error, Error::Config { field, .. } if *field == wanted),
        "{error}"
    );
}

#[test]
fn the_smallest_eps_leaves_a_weight_without_a_gradient_finite() {
    let config = AdamWConfig {
        eps: AdamWConfig::MIN_EPS,
        weight_decay: 0.0,
        ..CONFIG
    };
    let weight = var(&[1.0, -2.0], DType::F32);
    let mut optimizer = Optimizer::new(named(&[&weight]), config).unwrap();
    let gradients = store(&[(&weight, weight.zeros_like().unwrap())]);
    optimizer.step(&gradients).unwrap();
    assert_eq!(weight.to_vec1::<f32>().unwrap(), [1.0, -2.0]);
}

#[test]
fn scalars_and_empty_tensors_are_parameters_too() {
    let scalar = Var::new(2f32, &Device::Cpu).unwrap();
    let empty = Var::zeros((0, 3), DType::F32, &Device::Cpu).unwrap();
    let mut optimizer = Optimizer::new(named(&[&scalar, &empty]), AdamWConfig::default()).unwrap();
    let one = Tensor::new(1f32, &Device::Cpu).unwrap();
    let gradients = store(&[(&scalar, one), (&empty, empty.detach())]);
    optimizer.step(&gradients).unwrap();
    let expected = 2.0 * (1.0 - 1e-5) - 1e-3;
    assert!((f64::from(scalar.to_scalar::<f32>().unwrap()) - expected).abs() < 1e-6);
}
