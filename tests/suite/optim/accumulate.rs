//! Gradient accumulation.

use super::{elements, named, noise, relative, store, var};
use candle_core::{DType, Device, Tensor, Var};
use rstest::rstest;
use tallow::Error;
use tallow::optim::{AdamWConfig, GradientAccumulator, Optimizer};

/// Returns the mean of (x w + b)^2 for a matrix w and a bias b.
fn loss(x: &Tensor, weight: &Var, bias: &Var) -> Tensor {
    let y = x.matmul(weight).unwrap().broadcast_add(bias).unwrap();
    y.sqr().unwrap().mean_all().unwrap()
}

fn setup(dtype: DType, rows: usize) -> (Tensor, Var, Var) {
    let x = Tensor::from_vec(noise(rows * 5, 1), (rows, 5), &Device::Cpu).unwrap();
    let weight = Tensor::from_vec(noise(15, 2), (5, 3), &Device::Cpu).unwrap();
    let weight = Var::from_tensor(&weight.to_dtype(dtype).unwrap()).unwrap();
    (x.to_dtype(dtype).unwrap(), weight, var(&noise(3, 3), dtype))
}

#[rstest]
#[case(DType::F64, 1e-14)]
#[case(DType::F32, 1e-6)]
fn parts_make_the_whole_batch(#[case] dtype: DType, #[case] tolerance: f64) {
    let (x, weight, bias) = setup(dtype, 12);
    let whole = loss(&x, &weight, &bias).backward().unwrap();
    // Equal parts by their mean, unequal ones by weights, divided losses by their sum.
    let parameters = named(&[&weight, &bias]);
    let mut equal = GradientAccumulator::new(parameters.clone());
    let mut weighted = GradientAccumulator::new(parameters.clone());
    let mut divided = GradientAccumulator::new(parameters);
    for i in 0..3 {
        let part = loss(&x.narrow(0, i * 4, 4).unwrap(), &weight, &bias);
        equal.add(part.backward().unwrap()).unwrap();
        divided
            .add((part / 3.0).unwrap().backward().unwrap())
            .unwrap();
    }
    for (start, rows) in [(0, 7), (7, 1), (8, 4)] {
        let part = loss(&x.narrow(0, start, rows).unwrap(), &weight, &bias);
        weighted
            .add_weighted(part.backward().unwrap(), rows as f64)
            .unwrap();
    }
    assert_eq!((equal.total_weight(), weighted.total_weight()), (3.0, 12.0));
    let stores = [equal.mean(), weighted.mean(), divided.sum()];
    for store in stores {
        let store = store.unwrap();
        for var in [&weight, &bias] {
            let error = relative(
                &elements(store.get(var).unwrap()),
                &elements(whole.get(var).unwrap()),
            );
            assert!(error < tolerance, "{error}");
        }
        assert_eq!(store.get_ids().count(), 2, "parameters' gradients alone");
    }
}

#[test]
fn half_precision_is_summed_in_f32() {
    let weight = var(&[1.0], DType::BF16);
    let mut accumulator = GradientAccumulator::new(named(&[&weight]));
    // In bf16 a sum of ones would stop at 256.
    for _ in 0..1000 {
        let one = Tensor::ones(1, DType::BF16, &Device::Cpu).unwrap();
        accumulator.add(store(&[(&weight, one)])).unwrap();
    }
    let sum = accumulator.sum().unwrap();
    let gradient = sum.get(&weight).unwrap();
    assert_eq!(
        (gradient.dtype(), elements(gradient)),
        (DType::F32, vec![1000.0])
    );
    let mut optimizer = Optimizer::new(named(&[&weight]), AdamWConfig::default()).unwrap();
    optimizer.step(&sum).unwrap();
}

#[test]
fn it_starts_anew_after_each_result() {
    let weight = var(&[1.0], DType::F32);
    let mut accumulator = GradientAccumulator::new(named(&[&weight]));
    for expected in [3.0, 5.0] {
        let gradient = Tensor::new(&[expected as f32], &Device::Cpu).unwrap();
        accumulator
            .add(store(&[(&weight, gradient.copy().unwrap())]))
            .unwrap();
        accumulator.add(store(&[(&weight, gradient)])).unwrap();
        let mean = accumulator.mean().unwrap();
        assert_eq!(elements(mean.get(&weight).unwrap()), [expected]);
    }
    let error = accumulator.mean().unwrap_err();
    assert!(matches!(error, Error::Data { .. }), "{error}");
}

#[test]
fn shared_and_strided_gradients_are_summed_apart() {
    let (a, b) = (var(&[0.0; 2], DType::F32), var(&[0.0; 2], DType::F32));
    let c = Var::zeros((2, 2), DType::F32, &Device::Cpu).unwrap();
    let shared = Tensor::new(&[1f32, 2.0], &Device::Cpu).unwrap();
    let strided = Tensor::new(&[[1f32, 2.0], [3.0, 4.0]], &Device::Cpu)
        .unwrap()
        .t()
        .unwrap();
    let mut accumulator = GradientAccumulator::new(named(&[&a, &b, &c]));
    for _ in 0..3 {
        let gradients = [
            (&a, shared.clone()),
            (&b, shared.clone()),
            (&c, strided.clone()),
        ];
        accumulator.add(store(&gradients)).unwrap();
    }
    let sum = accumulator.sum().unwrap();
    assert_eq!(elements(sum.get(&a).unwrap()), [3.0, 6.0]);
    assert_eq!(elements(sum.get(&b).unwrap()), [3.0, 6.0]);
    assert_eq!(elements(sum.get(&c).unwrap()), [3.0, 9.0, 6.0, 12.0]);
    assert_eq!(elements(&shared), [1.0, 2.0]);
}

#[test]
fn a_missing_gradient_is_named_and_nothing_is_added() {
    let (a, b) = (var(&[2.0], DType::F32), var(&[3.0], DType::F32));
    let mut accumulator = GradientAccumulator::new(named(&[&a, &b]));
    let both = (&*a * &*b).unwrap().sum_all().unwrap();
    accumulator.add(both.backward().unwrap()).unwrap();
    let error = accumulator
        .add(a.sum_all().unwrap().backward().unwrap())
        .unwrap_err();
    assert!(
        matches!(&error, Error::MissingGradient { parameter, .. } if parameter == "b"),
        "{error}"
    );
    for bad in [0.0, -1.0, f64::NAN] {
        let error = accumulator
            .add_weighted(both.backward().unwrap(), bad)
            .unwrap_err();
        assert!(
            matches!(
                error,
                Error::Config {
                    field: "weight",
                    ..
                }
            ),
            "{error}"
        );
    }
    let mean = accumulator.mean().unwrap();
    assert_eq!(elements(mean.get(&a).unwrap()), [3.0]);
    assert_eq!(elements(mean.get(&b).unwrap()), [2.0]);
}
