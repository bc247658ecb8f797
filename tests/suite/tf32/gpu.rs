//! The TF32 switch belongs to the process, so each test that sets it runs in its own process.

use crate::child;
use crate::compile::distance;
use crate::flash::problem::{normal, tensor};
use candle_core::{DType, Device, Tensor, Var};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use tallow::bench::environment;
use tallow::hardware::{set_tf32, tf32};
use tallow::ops;

/// Computes y = x W^T and its gradients on `device`: y, dx, dW.
fn product(device: &Device, dtype: DType) -> [Tensor; 3] {
    // Numbers that use all digits of f32, the same each time.
    let mut random = ChaCha8Rng::seed_from_u64(95);
    let mut matrix = |rows: usize, columns: usize| {
        let numbers = tensor(
            &normal(rows * columns, &mut random),
            &[rows, columns],
            DType::F32,
        );
        let numbers = numbers.to_dtype(dtype).and_then(|x| x.to_device(device));
        numbers.unwrap()
    };
    let [x, w] = [matrix(256, 512), matrix(384, 512)].map(|x| Var::from_tensor(&x).unwrap());
    let y = ops::linear(&x, &w).unwrap(); // (256, 384)
    let loss = (&y * matrix(256, 384)).and_then(|y| y.sum_all());
    let gradients = loss.and_then(|loss| loss.backward()).unwrap();
    let of = |x: &Var| gradients.get(x).unwrap().clone();
    [y.detach(), of(&x), of(&w)].map(|x| x.to_device(&Device::Cpu).unwrap())
}

#[test]
#[ignore = "needs a CUDA device"]
fn products_follow_the_switch() {
    if child::ran("tf32::gpu::products_follow_the_switch") {
        return;
    }
    let gpu = crate::gpu();
    let wanted = product(&Device::Cpu, DType::F64);
    let header = || environment(&gpu).get("f32 matmuls").cloned().unwrap();
    let errors = || {
        let found = product(&gpu, DType::F32);
        [0, 1, 2].map(|i| distance(&found[i], &wanted[i]))
    };
    assert!(!tf32(&gpu), "off to begin with");
    assert_eq!(header(), "exact");
    let exact = errors();
    // Statistical roundings of at most 512 terms.
    let of_f32 = 512f64.sqrt() * f64::from(f32::EPSILON);
    assert!(exact.iter().all(|error| *error < of_f32), "{exact:?}");

    set_tf32(&gpu, true).unwrap();
    assert!(tf32(&gpu) && candle_core::cuda::gemm_reduced_precision_f32());
    assert!(!tf32(&Device::Cpu));
    assert_eq!(header(), "TF32");
    let rounded = errors();
    let of_tf32 = 2f64.powi(-15)..2f64.powi(-10); // far above f32's; each factor is off by up to 2^-11
    assert!(
        rounded.iter().all(|error| of_tf32.contains(error)),
        "{rounded:?}"
    );
    let on_cpu = product(&Device::Cpu, DType::F32);
    let of_cpu = [0, 1, 2].map(|i| distance(&on_cpu[i], &wanted[i]));
    assert!(of_cpu.iter().all(|error| *error < of_f32), "{of_cpu:?}");
    set_tf32(&Device::Cpu, false).unwrap();
    assert!(tf32(&gpu), "the CPU's is no business of the GPU's");

    set_tf32(&gpu, false).unwrap();
    assert_eq!(errors(), exact);
    println!("exact {exact:?}, TF32 {rounded:?}");
}
