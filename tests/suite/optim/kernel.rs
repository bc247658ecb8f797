//! The kernel against the reference, and against itself with other numbers of threads.

use super::{named, noise, noisy_gradient, relative, store, values, var};
use candle_core::{DType, Tensor, Var};
use proptest::prelude::*;
use tallow::optim::{AdamW, AdamWConfig};

/// Parameters and state after a few steps, by kernel or by reference.
fn run(n: usize, dtype: DType, config: AdamWConfig, seed: usize, reference: bool) -> Vec<Vec<f64>> {
    let (a, b) = (var(&noise(n, seed), dtype), var(&noise(3, seed + 1), dtype));
    let mut optimizer = AdamW::new(named(&[&a, &b]), config).unwrap();
    for t in 0..4 {
        let gradients = [&a, &b].map(|var| (var, noisy_gradient(var, seed + t)));
        let gradients = store(&gradients);
        if reference {
            optimizer.step_reference(&gradients).unwrap();
        } else {
            optimizer.step(&gradients).unwrap();
        }
    }
    let state = optimizer
        .state()
        .into_iter()
        .map(|(_, tensor)| values(&tensor));
    [&a, &b]
        .into_iter()
        .map(|var| values(var))
        .chain(state)
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn kernel_equals_reference(
        n in prop_oneof![1usize..70, 500usize..530, 16_380usize..16_390, Just(40_001)],
        seed in 0usize..1000,
        lr in 1e-5f64..0.1,
        beta1 in 0f64..0.99,
        beta2 in 0.5f64..0.9999,
        weight_decay in 0f64..0.5,
        which in 0usize..4,
    ) {
        // Two orders of rounding, four steps long. A half-precision parameter may round to the neighbouring number.
        let (dtype, tolerance) = [
            (DType::F64, 1e-13),
            (DType::F32, 1e-5),
            (DType::BF16, 1e-5),
            (DType::F16, 1e-5),
        ][which];
        let config = AdamWConfig { lr, betas: (beta1, beta2), eps: 1e-8, weight_decay };
        let kernel = run(n, dtype, config, seed, false);
        let reference = run(n, dtype, config, seed, true);
        for (i, (kernel, reference)) in kernel.iter().zip(&reference).enumerate() {
            let is_rounded = i < 2 && matches!(dtype, DType::BF16 | DType::F16);
            let tolerance = if is_rounded { 1e-3 } else { tolerance };
            let error = relative(kernel, reference);
            prop_assert!(error < tolerance, "entry {i}, {dtype:?}: {error}");
        }
    }
}

#[test]
fn the_same_bits_for_any_number_of_threads() {
    for dtype in [DType::F32, DType::F64, DType::BF16] {
        let with_threads = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .build()
                .unwrap();
            pool.install(|| run(100_003, dtype, AdamWConfig::default(), 5, false))
        };
        let one = with_threads(1);
        assert!(one[0].iter().any(|value| *value != 0.0));
        assert_eq!(one, with_threads(2), "{dtype:?}");
        assert_eq!(one, with_threads(3), "{dtype:?}");
    }
}

/// A step writes where parameters and state lie: their storages are the same before and after.
#[test]
fn a_step_writes_in_place() {
    let weight = var(&noise(1000, 1), DType::F32);
    let view = weight.detach();
    let mut optimizer = AdamW::new(named(&[&weight]), AdamWConfig::default()).unwrap();
    let state = optimizer.state();
    let address = |tensor: &Tensor| {
        let (storage, _) = tensor.storage_and_layout();
        match &*storage {
            candle_core::Storage::Cpu(cpu) => cpu.as_slice::<f32>().unwrap().as_ptr().addr(),
            _ => unreachable!("a CPU tensor"),
        }
    };
    let before: Vec<usize> = state.iter().map(|(_, t)| address(t)).collect();
    let gradient = noisy_gradient(&weight, 2);
    let untouched = values(&gradient);
    optimizer
        .step(&store(&[(&weight, gradient.clone())]))
        .unwrap();
    let after: Vec<usize> = optimizer.state().iter().map(|(_, t)| address(t)).collect();
    assert_eq!(before, after);
    assert_eq!(address(&weight), address(&view));
    assert_eq!(values(&view), values(&weight));
    assert_eq!(values(&gradient), untouched);
    assert_ne!(values(&weight), noise(1000, 1));
}

#[test]
fn it_finds_the_bottom_of_a_bowl() {
    // (w - 1)^2, from 2 and 3 away.
    let weight: Var = var(&[3.0, -2.0], DType::F32);
    let config = AdamWConfig {
        lr: 0.05,
        weight_decay: 0.0,
        ..Default::default()
    };
    let mut optimizer = AdamW::new(named(&[&weight]), config).unwrap();
    for _ in 0..400 {
        let loss = weight
            .affine(1.0, -1.0)
            .unwrap()
            .sqr()
            .unwrap()
            .sum_all()
            .unwrap();
        optimizer.step(&loss.backward().unwrap()).unwrap();
    }
    for value in values(&weight) {
        assert!((value - 1.0).abs() < 1e-2, "{value}");
    }
}
