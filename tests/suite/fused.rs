//! Fused ops have the values and gradients of the ops that they replace, and the same bits with any number of threads.

use crate::check::distance;
use candle_core::{DType, Device, Tensor, Var};
use rand::{Rng, SeedableRng};
use rstest::rstest;
use tallow::ops::{self, KernelPolicy, with_kernel_policy};

fn var(seed: u64, shape: &[usize], dtype: DType) -> Var {
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
    let values: Vec<f64> = (0..shape.iter().product())
        .map(|_| rng.random_range(-1.5..1.5))
        .collect();
    let tensor = Tensor::from_vec(values, shape, &Device::Cpu).unwrap();
    Var::from_tensor(&tensor.to_dtype(dtype).unwrap()).unwrap()
}

fn ids(shape: &[usize], vocab: u32) -> Tensor {
    let n: usize = shape.iter().product();
    let ids: Vec<u32> = (0..n as u32).map(|i| (i * 37 + 5) % vocab).collect();
    Tensor::from_vec(ids, shape, &Device::Cpu).unwrap()
}

/// Returns the value and every variable's gradient, under a loss that weights each element.
fn run(vars: &[Var], f: impl Fn() -> tallow::Result<Tensor>) -> Vec<Tensor> {
    let y = f().unwrap();
    let weights = var(99, y.dims(), y.dtype());
    let gradients = (&y * weights.as_detached_tensor())
        .unwrap()
        .sum_all()
        .unwrap()
        .backward()
        .unwrap();
    let mut all = vec![y.detach()];
    all.extend(
        vars.iter()
            .map(|var| gradients.get(var).expect("a gradient").clone()),
    );
    all
}

#[rstest]
fn swiglu_linear_is_its_parts(
    #[values((&[7usize][..], 5, 3), (&[2, 13][..], 24, 37), (&[1, 1][..], 1, 1), (&[3, 100][..], 40, 130))]
    sizes: (&[usize], usize, usize),
    #[values((DType::F64, 1e-13), (DType::F32, 1e-6))] precision: (DType, f64),
) {
    let ((leading, d, f), (dtype, bound)) = (sizes, precision);
    let shape = [leading, &[d]].concat();
    let vars = [
        var(1, &shape, dtype),
        var(2, &[f, d], dtype),
        var(3, &[f, d], dtype),
    ];
    let fused = run(&vars, || ops::swiglu_linear(&vars[0], &vars[1], &vars[2]));
    let parts = run(&vars, || {
        ops::reference::swiglu_linear(&vars[0], &vars[1], &vars[2])
    });
    let plain = with_kernel_policy(KernelPolicy::Reference, || {
        run(&vars, || ops::swiglu_linear(&vars[0], &vars[1], &vars[2]))
    });
    for ((fused, parts), plain) in fused.iter().zip(&parts).zip(&plain) {
        assert!(distance(fused, parts) < bound, "{}", distance(fused, parts));
        assert!(distance(fused, plain) < bound, "{}", distance(fused, plain));
    }
}

#[rstest]
fn linear_cross_entropy_is_its_parts(
    #[values((&[7usize][..], 5, 3), (&[2, 13][..], 24, 61), (&[1, 1][..], 1, 2), (&[3, 100][..], 40, 257))]
    sizes: (&[usize], usize, usize),
    #[values((DType::F64, 1e-13), (DType::F32, 1e-6))] precision: (DType, f64),
) {
    let ((leading, d, v), (dtype, bound)) = (sizes, precision);
    let shape = [leading, &[d]].concat();
    let vars = [var(1, &shape, dtype), var(2, &[v, d], dtype)];
    let targets = ids(leading, v as u32);
    let fused = run(&vars, || {
        ops::linear_cross_entropy(&vars[0], &vars[1], &targets)
    });
    let parts = run(&vars, || {
        ops::reference::linear_cross_entropy(&vars[0], &vars[1], &targets, None)
    });
    let plain = with_kernel_policy(KernelPolicy::Reference, || {
        run(&vars, || {
            ops::linear_cross_entropy(&vars[0], &vars[1], &targets)
        })
    });
    for ((fused, parts), plain) in fused.iter().zip(&parts).zip(&plain) {
        assert!(distance(fused, parts) < bound, "{}", distance(fused, parts));
        assert!(distance(fused, plain) < bound, "{}", distance(fused, plain));
    }
}

#[rstest]
fn linear_cross_entropy_ignoring_is_its_parts(
    #[values((&[7usize][..], 5, 3), (&[2, 13][..], 24, 61), (&[3, 100][..], 40, 257))] sizes: (
        &[usize],
        usize,
        usize,
    ),
    #[values((DType::F64, 1e-13), (DType::F32, 1e-6))] precision: (DType, f64),
) {
    let ((leading, d, v), (dtype, bound)) = (sizes, precision);
    let shape = [leading, &[d]].concat();
    let vars = [var(1, &shape, dtype), var(2, &[v, d], dtype)];
    let targets = ids(leading, v as u32);
    let ignored = 5 % v as i64; // the first target's id, and that of others
    let joined = || ops::linear_cross_entropy_ignoring(&vars[0], &vars[1], &targets, ignored);
    let fused = run(&vars, joined);
    let parts = run(&vars, || {
        let logits = ops::linear(&vars[0], &vars[1])?;
        ops::cross_entropy_ignoring(&logits, &targets, ignored)
    });
    let plain = with_kernel_policy(KernelPolicy::Reference, || run(&vars, joined));
    for ((fused, parts), plain) in fused.iter().zip(&parts).zip(&plain) {
        assert!(distance(fused, parts) < bound, "{}", distance(fused, parts));
        assert!(distance(fused, plain) < bound, "{}", distance(fused, plain));
    }
}

/// Sizes with several panels in every matmul.
#[test]
fn threads_do_not_matter() {
    let bits = |threads: usize| -> Vec<Vec<u32>> {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        pool.install(|| {
            let vars = [
                var(1, &[2, 150, 260], DType::F32),
                var(2, &[700, 260], DType::F32),
                var(3, &[700, 260], DType::F32),
            ];
            let targets = ids(&[2, 150], 700);
            let mut all = run(&vars, || ops::swiglu_linear(&vars[0], &vars[1], &vars[2]));
            all.extend(run(&vars[..2], || {
                ops::linear_cross_entropy(&vars[0], &vars[1], &targets)
            }));
            let flat = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            all.iter()
                .map(|t| flat(t).into_iter().map(f32::to_bits).collect())
                .collect()
        })
    };
    let one = bits(1);
    assert_eq!(one, bits(2));
    assert_eq!(one, bits(3));
}

#[test]
fn misfits_are_refused_by_name() {
    let (x, w) = (var(1, &[2, 3, 4], DType::F32), var(2, &[5, 4], DType::F32));
    let narrow = var(3, &[5, 3], DType::F32);
    let text = |result: tallow::Result<Tensor>| result.unwrap_err().to_string();
    let error = text(ops::swiglu_linear(&x, &w, &narrow));
    assert!(
        error.contains("swiglu_linear: expected x (..., 4), w1 and w3 (F, 4)"),
        "{error}"
    );
    let error = text(ops::linear_cross_entropy(&x, &narrow, &ids(&[2, 3], 5)));
    assert!(
        error.contains("linear_cross_entropy: expected x (..., D) and weight (V, D)"),
        "{error}"
    );
    let error = text(ops::linear_cross_entropy(&x, &w, &ids(&[3, 2], 5)));
    assert!(error.contains("leading dimensions, [2, 3]"), "{error}");
    let error = text(ops::linear_cross_entropy(&x, &w, &ids(&[2, 3], 700)));
    assert!(error.contains("outside the vocabulary of 5"), "{error}");
}
