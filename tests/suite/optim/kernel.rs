//! AdamW's kernel against the reference, and against itself with other numbers of threads.

use super::{elements, named, noise, noisy_gradient, relative, store, var};
use crate::check::refusal;
use candle_core::{DType, Tensor, Var};
use proptest::prelude::*;
use rstest::rstest;
use tallow::optim::{AdamWConfig, Moments, Optimizer};

/// Returns parameters and state after a few steps, by kernel or by reference.
fn run(n: usize, dtype: DType, config: AdamWConfig, seed: usize, reference: bool) -> Vec<Vec<f64>> {
    let (a, b) = (var(&noise(n, seed), dtype), var(&noise(3, seed + 1), dtype));
    let mut optimizer = Optimizer::new(named(&[&a, &b]), config).unwrap();
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
        .map(|(_, tensor)| elements(&tensor));
    [&a, &b]
        .into_iter()
        .map(|var| elements(var))
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
        // Two orders of rounding, over four steps. A half-precision parameter may round to the neighbouring number.
        let (dtype, tolerance) = [
            (DType::F64, 1e-13),
            (DType::F32, 1e-5),
            (DType::BF16, 1e-5),
            (DType::F16, 1e-5),
        ][which];
        let config = AdamWConfig { lr, betas: (beta1, beta2), eps: 1e-8, weight_decay, ..Default::default() };
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

/// Moments in bf16 are rounded with the same random bits. They differ only where the two orders of operations give
/// values on both sides of a random threshold.
#[rstest]
fn kernel_equals_reference_with_moments_in_bf16(
    #[values(DType::F32, DType::BF16, DType::F16)] dtype: DType,
) {
    let config = AdamWConfig {
        moments: Moments::Bf16 { seed: 11 },
        ..Default::default()
    };
    let kernel = run(40_001, dtype, config, 5, false);
    let reference = run(40_001, dtype, config, 5, true);
    for (i, (kernel, reference)) in kernel.iter().zip(&reference).enumerate() {
        let error = relative(kernel, reference);
        assert!(error < 1e-3, "entry {i}: {error}");
        let pairs = kernel.iter().zip(reference);
        let others = pairs.filter(|(a, b)| a != b).count();
        assert!(i < 2 || others * 100 <= kernel.len(), "entry {i}: {others}");
    }
}

/// The second moment with constant gradients: with beta2 0.999 a step covers a thousandth of the remaining distance.
/// From the third step on that is less than half the distance of two bf16 numbers. Rounding to nearest would not move
/// it.
#[test]
fn moments_in_bf16_move_as_those_in_f32() {
    let moved = |moments| {
        let weight = var(&[1.0; 4096], DType::F32);
        let config = AdamWConfig {
            moments,
            ..Default::default()
        };
        let mut optimizer = Optimizer::new(named(&[&weight]), config).unwrap();
        for _ in 0..300 {
            let gradient = Tensor::full(0.01f32, 4096, weight.device()).unwrap();
            optimizer.step(&store(&[(&weight, gradient)])).unwrap();
        }
        let state = optimizer.state();
        assert!(
            state
                .iter()
                .all(|(_, x)| x.dtype() == moments.dtype(DType::F32))
        );
        let mean = |x: &Tensor| elements(x).iter().sum::<f64>() / 4096.0;
        [&state[0].1, &state[1].1, weight.as_tensor()].map(mean)
    };
    let exact = moved(Moments::Wide);
    for seed in [0, 1] {
        let got = moved(Moments::Bf16 { seed });
        for (got, exact) in got.iter().zip(exact) {
            assert!((got - exact).abs() <= 3e-3 * exact, "{got} for {exact}");
        }
        assert_eq!(got, moved(Moments::Bf16 { seed }));
    }
    assert_ne!(
        moved(Moments::Bf16 { seed: 0 }),
        moved(Moments::Bf16 { seed: 1 })
    );
}

#[test]
fn moments_in_bf16_are_not_for_f64() {
    let weight = var(&[1.0], DType::F64);
    let config = AdamWConfig {
        moments: Moments::Bf16 { seed: 0 },
        ..Default::default()
    };
    refusal(
        Optimizer::new(named(&[&weight]), config),
        &["moments in bf16", "f64"],
    );
}

#[test]
fn the_same_bits_for_any_number_of_threads() {
    let bf16 = AdamWConfig {
        moments: Moments::Bf16 { seed: 3 },
        ..Default::default()
    };
    let wide = AdamWConfig::default();
    for (dtype, config) in [
        (DType::F32, wide),
        (DType::F64, wide),
        (DType::BF16, wide),
        (DType::F32, bf16),
        (DType::BF16, bf16),
    ] {
        let with_threads = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .build()
                .unwrap();
            pool.install(|| run(100_003, dtype, config, 5, false))
        };
        let one = with_threads(1);
        assert!(one[0].iter().any(|value| *value != 0.0));
        assert_eq!(one, with_threads(2), "{dtype:?}");
        assert_eq!(one, with_threads(3), "{dtype:?}");
    }
}

/// A step writes in place: parameters and state keep their storages.
#[test]
fn a_step_writes_in_place() {
    let weight = var(&noise(1000, 1), DType::F32);
    let view = weight.detach();
    let mut optimizer = Optimizer::new(named(&[&weight]), AdamWConfig::default()).unwrap();
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
    let untouched = elements(&gradient);
    optimizer
        .step(&store(&[(&weight, gradient.clone())]))
        .unwrap();
    let after: Vec<usize> = optimizer.state().iter().map(|(_, t)| address(t)).collect();
    assert_eq!(before, after);
    assert_eq!(address(&weight), address(&view));
    assert_eq!(elements(&view), elements(&weight));
    assert_eq!(elements(&gradient), untouched);
    assert_ne!(elements(&weight), noise(1000, 1));
}

#[test]
fn it_finds_the_bottom_of_a_bowl() {
    // (w - 1)^2, from distances 2 and 3.
    let weight: Var = var(&[3.0, -2.0], DType::F32);
    let config = AdamWConfig {
        lr: 0.05,
        weight_decay: 0.0,
        ..Default::default()
    };
    let mut optimizer = Optimizer::new(named(&[&weight]), config).unwrap();
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
    for value in elements(&weight) {
        assert!((value - 1.0).abs() < 1e-2, "{value}");
    }
}
