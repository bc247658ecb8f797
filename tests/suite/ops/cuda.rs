//! Ops on a GPU, by CUDA kernels or by references where there are none, against f64 on the CPU.

use super::case::{Case, KERNEL, LAYOUTS, Layout, REFERENCE, bits, normal};
use super::cases::{self, MASKS};
use super::compare::{assert_close, assert_no_worse, assert_rounded_once};
use super::every;
use candle_core::{DType, Device, Tensor, Var};
use rstest::rstest;
use tallow::ops::{self, Gelu, KernelPolicy};
use tallow::precision::Autocast;
use tallow::{Result, autocast};

/// Returns cases of ops with kernels. Rows are aligned to 16 bytes or not, and have one element or many blocks.
fn with_kernels() -> Vec<Case> {
    let mut cases = vec![
        cases::dropout(&[3, 1031], 0.3, 1),
        cases::swiglu(&[1], 2),
        cases::swiglu(&[3, 1031], 2),
        cases::swiglu(&[257, 4096], 2),
        cases::geglu(Gelu::Erf, &[3, 1031], 2),
        cases::geglu(Gelu::Tanh, &[1], 2),
        cases::geglu(Gelu::Tanh, &[3, 1031], 2),
        cases::geglu(Gelu::Tanh, &[257, 4096], 2),
        cases::soft_cap(&[1], 2.0, 2),
        cases::soft_cap(&[257, 1031], 2.0, 2),
        cases::rope(&[2], 33, 24, 5),
        cases::rope_by_halves(&[2], 33, 24, 5),
        cases::rope(&[3], 123, 40, 5),
        cases::rope_by_halves(&[3], 123, 40, 5),
        cases::rope(&[2], 1, 1026, 5),
        cases::rope_by_halves(&[2], 1, 1026, 5),
        cases::rope(&[2, 3], 64, 64, 5),
        cases::rope_by_halves(&[2, 3], 64, 64, 5),
        cases::rope(&[5], 7, 2, 5),
        cases::rope_by_halves(&[5], 7, 2, 5),
        cases::embedding(&[1], 5, 1, 9),
        cases::embedding(&[3, 123], 17, 33, 9),
        cases::embedding(&[257], 5, 1031, 9), // some ids have more positions than a bucket
        cases::embedding(&[4, 256], 1000, 512, 9),
        cases::linear(&[2, 3], 5, 4, 21),
        cases::linear(&[3, 123], 257, 301, 22),
        cases::linear(&[1], 512, 1031, 23),
        cases::linear(&[1031], 512, 1, 24),
        cases::matmul(&[7, 5], [65, 24, 123], 25),
        cases::matmul(&[1], [257, 131, 301], 26),
        cases::matmul_transposed(&[2, 3], [4, 5, 3], 27),
        cases::matmul_transposed(&[5], [257, 40, 123], 28),
        cases::split_heads([3, 123, 5, 40], 29),
        cases::split_heads([2, 33, 3, 7], 30), // vectors of one element
        cases::split_heads([1, 5, 2, 1031], 31),
        cases::merge_heads([3, 123, 5, 40], 32),
        cases::merge_heads([2, 33, 3, 7], 33),
        cases::linear_bias(&[2, 3], 5, 4, 34),
        cases::linear_bias(&[3, 123], 257, 301, 35),
        cases::linear_bias(&[40_000], 8, 33, 36), // rows in many blocks
        cases::repeated_heads(&[3, 5, 33, 40], 3, 37),
        cases::repeated_heads(&[2, 3, 7, 5], 2, 38), // vectors of one element
    ];
    for dims in [&[1][..], &[3, 1031], &[257, 4096]] {
        cases.extend(cases::activations(dims, 39));
    }
    for (rows, width) in [
        (1, 1),
        (33, 65),
        (123, 257),
        (37, 1031),
        (2, 1536),
        (1000, 768),
        (3, 8176),
    ] {
        cases.push(cases::rms_norm(&[rows], width, 3));
        cases.push(cases::offset_rms_norm(&[rows], width, 3));
        cases.push(cases::layer_norm(&[rows], width, 4));
    }
    cases.push(cases::layer_norm(&[300], 8192, 4)); // the widest; several rows per block
    for (rows, width) in [
        (1, 2),
        (33, 65),
        (123, 257),
        (37, 1031),
        (2, 50_257),
        (300, 10_000),
    ] {
        for ignoring in [false, true] {
            cases.push(cases::cross_entropy(&[rows], width, 2.0, ignoring, 12));
        }
    }
    for dims in [[1, 1, 1], [33, 41, 65], [3, 5, 1031], [1000, 8, 1]] {
        cases.extend(cases::selections(dims, 41));
    }
    for (rows, width) in [(1, 2), (33, 65), (3, 50_257)] {
        let mut options = cases::cross_entropy_options(rows, width, 42);
        options.retain(|case| case.name.starts_with("cross_entropy"));
        cases.extend(options);
    }
    cases.extend(cases::losses(&[33, 65], 43));
    for (dims, over) in [
        (&[3, 1031][..], &[1][..]),
        (&[40_001, 7], &[1]),
        (&[3, 100_003], &[1]), // each row in chunks
        (&[257, 4096], &[0]),
        (&[100_003, 5], &[0]), // columns in chunks
        (&[33, 41, 65], &[1]),
        (&[33, 41, 65], &[0, 2]),
        (&[33, 41, 65], &[0, 1, 2]),
    ] {
        cases.extend(cases::reductions(dims, over, 40));
    }
    for mask in MASKS {
        for sizes in [
            (1, 1),
            (33, 41),
            (41, 33),
            (7, 1031),
            (123, 257),
            (256, 256),
            (3, 40_001),
        ] {
            cases.push(cases::softmax(&[2], sizes, (0.5, 2.0), mask, 14));
        }
        cases.push(cases::softmax(&[2], (41, 33), (-0.5, 2.0), mask, 15));
    }
    cases
}

fn check(case: &Case, policy: KernelPolicy, layout: Layout) {
    let gpu = crate::gpu();
    let exact = case.run(DType::F64, REFERENCE);
    let judge = case.run(DType::F32, REFERENCE);
    assert_no_worse(
        case,
        &case.run_on(&gpu, DType::F32, policy, layout),
        &judge,
        &exact,
    );
}

#[test]
#[ignore = "needs a CUDA device"]
fn kernels_in_f32() {
    for case in with_kernels() {
        check(&case, KERNEL, Layout::Contiguous);
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn kernels_take_any_strides() {
    for case in [
        cases::swiglu(&[33, 65], 2),
        cases::rms_norm(&[33], 65, 3),
        cases::layer_norm(&[33], 65, 4),
        cases::rope(&[2], 33, 24, 5),
        cases::rope_by_halves(&[2], 33, 24, 5),
        cases::linear(&[3, 11], 24, 65, 6),
        cases::swiglu_linear(&[3, 11], 24, 65, 7),
        cases::geglu(Gelu::Tanh, &[33, 65], 2),
        cases::geglu_linear(&[3, 11], 24, 65, 7),
        cases::matmul(&[2, 3], [33, 8, 65], 8),
        cases::matmul_transposed(&[2, 3], [33, 8, 65], 9),
        cases::split_heads([2, 33, 4, 8], 10),
        cases::merge_heads([2, 33, 4, 8], 11),
        cases::linear_bias(&[3, 11], 24, 65, 12),
        cases::repeated_heads(&[2, 3, 4, 8], 2, 13),
        cases::activations(&[33, 65], 14).remove(3),
    ] {
        for layout in LAYOUTS {
            check(&case, KERNEL, layout);
        }
    }
}

/// Here a variance computed as the mean of squares minus the squared mean would lose all digits.
#[rstest]
#[ignore = "needs a CUDA device"]
fn layer_norm_far_from_zero(#[values(1e2, 1e4)] mean: f64) {
    let mut case = cases::layer_norm(&[33], 123, 12);
    case.inputs[0].value = (&case.inputs[0].value + mean).unwrap();
    check(&case.rounded_to(DType::F32), KERNEL, Layout::Contiguous);
}

/// Rows that are not aligned to vectors, although their width is a multiple of one.
#[rstest]
#[ignore = "needs a CUDA device"]
fn rows_begin_anywhere(#[values(1, 2, 3)] offset: usize) {
    let gpu = crate::gpu();
    let (rows, classes) = (5, 512);
    let values = normal(&[offset + rows * classes], 7)
        .to_dtype(DType::F32)
        .unwrap();
    let targets = cases::ids(&[rows], classes, 8);
    let gradient = |device: &Device| {
        let base = Var::from_tensor(&values.to_device(device).unwrap()).unwrap();
        let logits = base.narrow(0, offset, rows * classes).unwrap();
        let logits = logits.reshape((rows, classes)).unwrap();
        let loss = ops::cross_entropy(&logits, &targets).unwrap();
        let gradients = loss.backward().unwrap();
        gradients
            .get(&base)
            .unwrap()
            .to_device(&Device::Cpu)
            .unwrap()
    };
    assert_close("gradient", &gradient(&gpu), &gradient(&Device::Cpu), 1e-6);
}

fn variable(device: &Device, dims: &[usize], seed: u64) -> Var {
    let values = normal(dims, seed).to_dtype(DType::F32).unwrap();
    Var::from_tensor(&values.to_device(device).unwrap()).unwrap()
}

/// Head and loss: the gradient overwrites the logits, so a second backward recomputes them.
#[test]
#[ignore = "needs a CUDA device"]
fn head_and_loss_have_the_gradients_of_the_cpu_twice() {
    let gpu = crate::gpu();
    let run = |device: &Device| {
        let x = variable(device, &[3, 11, 24], 7);
        let weight = variable(device, &[65, 24], 8);
        let targets = cases::ids(&[3, 11], 65, 9);
        let loss = ops::linear_cross_entropy(&x, &weight, &targets).unwrap();
        let [first, second] = [(), ()].map(|()| loss.backward().unwrap());
        let gradients = [&first, &second].map(|gradients| {
            [&x, &weight].map(|variable| gradients.get(variable).unwrap().clone())
        });
        let [[dx, dw], [dx_again, dw_again]] = gradients;
        [loss, dx, dw, dx_again, dw_again].map(|x| x.to_device(&Device::Cpu).unwrap())
    };
    for (on_gpu, on_cpu) in run(&gpu).iter().zip(&run(&Device::Cpu)) {
        assert_close("loss, dx, dw and once more", on_gpu, on_cpu, 1e-5);
    }
}

/// Two matmuls and the gate between them, each of which rounds.
#[test]
#[ignore = "needs a CUDA device"]
fn the_gated_maps() {
    let gpu = crate::gpu();
    for (rows, depth, out) in [(1, 5, 3), (33, 65, 41), (123, 257, 301), (1024, 64, 176)] {
        let case = || cases::swiglu_linear(&[rows], depth, out, 34);
        check(&case(), KERNEL, Layout::Contiguous);
        for dtype in [DType::F16, DType::BF16] {
            let case = case().rounded_to(dtype);
            let exact = case.run(DType::F64, REFERENCE);
            let judge = case.run(dtype, KERNEL);
            let half = case.run_on(&gpu, dtype, KERNEL, Layout::Contiguous);
            assert_no_worse(&case, &half, &judge, &exact);
        }
    }
}

type Elementwise = fn(&Tensor, &Tensor) -> Result<Tensor>;

/// Ops and compositions of two inputs (37, 65) each.
const PLAIN: [(&str, Elementwise); 27] = [
    ("add", |a, b| ops::add(a, b)),
    ("sub", |a, b| ops::sub(a, b)),
    ("mul", |a, b| ops::mul(a, b)),
    ("div", |a, b| ops::div(a, &ops::exp(b)?)),
    ("add_scaled", |a, b| ops::add_scaled(a, b, 0.3)),
    ("a row added", |a, b| ops::add(a, &b.narrow(0, 1, 1)?)),
    ("a column multiplied", |a, b| {
        ops::mul(&b.narrow(1, 1, 1)?, a)
    }),
    ("divided by a number", |a, b| {
        ops::div(a, &ops::exp(&b.narrow(0, 0, 1)?.narrow(1, 0, 1)?)?)
    }),
    ("exp", |a, _| ops::exp(a)),
    ("log", |a, _| ops::log(&ops::exp(a)?)),
    ("pow", |a, _| ops::pow(&ops::exp(a)?, 1.7)),
    ("rsqrt", |a, _| ops::rsqrt(&ops::exp(a)?)),
    ("sqrt", |a, _| ops::sqrt(&ops::exp(a)?)),
    ("abs", |a, _| ops::abs(a)),
    ("clamp", |a, _| ops::clamp(a, -0.5, 1.0)),
    ("affine", |a, _| ops::affine(a, -1.5, 0.3)),
    ("sum", |a, _| ops::sum(a)),
    ("mean", |a, _| ops::mean(a)),
    ("sum over rows", |a, _| ops::sum_over(a, 0)),
    ("max over rows", |a, _| ops::max_over(a, 0)),
    ("min over columns", |a, _| ops::min_keepdim(a, 1)),
    ("logsumexp", |a, _| ops::logsumexp(a, 1)),
    ("var", |a, _| ops::var(a, 0, 1)),
    ("mean over columns", |a, _| ops::mean_keepdim(a, 1)),
    ("log_softmax", |a, _| ops::log_softmax(a)),
    ("relu and concat", |a, b| {
        ops::concat(&[&ops::relu(a)?, b, a], 1)
    }),
    ("columns in order", |a, b| {
        ops::mul(&ops::contiguous(&a.t()?)?, &ops::contiguous(&b.t()?)?)
    }),
];

/// Kernels and `tallow::backward`, also on views, have the CPU's results.
#[rstest]
#[ignore = "needs a CUDA device"]
fn plain_calls_are_those_of_the_cpu(#[values(DType::F32, DType::F16, DType::BF16)] dtype: DType) {
    let gpu = crate::gpu();
    let close = match dtype {
        DType::F32 => 2e-6,
        DType::F16 => 2e-3,
        _ => 1.6e-2,
    };
    for (name, op) in PLAIN {
        let run = |device: &Device| {
            let [a, b] = [1, 2].map(|seed| {
                let x = normal(&[37, 65], seed).to_dtype(dtype).unwrap();
                Var::from_tensor(&x.to_device(device).unwrap()).unwrap()
            });
            ops::with_kernel_policy(KernelPolicy::Strict, || {
                let y = op(&a, &b).unwrap();
                let dy = normal(y.dims(), 3).to_dtype(dtype).unwrap();
                let value = y.detach();
                let dy = dy.to_device(device).unwrap();
                let gradients = tallow::backward_from(y, &dy).unwrap();
                let gradients = [&a, &b].map(|x| gradients.get(x).cloned());
                [Some(value)]
                    .into_iter()
                    .chain(gradients)
                    .flatten()
                    .collect::<Vec<_>>()
            })
        };
        let (found, wanted) = (run(&gpu), run(&Device::Cpu));
        assert_eq!(found.len(), wanted.len(), "{name}");
        for (found, wanted) in found.iter().zip(&wanted) {
            let [found, wanted] = [found, wanted].map(|x| {
                let x = x
                    .to_device(&Device::Cpu)
                    .unwrap()
                    .to_dtype(DType::F64)
                    .unwrap();
                x.flatten_all().unwrap().to_vec1::<f64>().unwrap()
            });
            let scale = wanted.iter().fold(1.0, |most: f64, x| most.max(x.abs()));
            for (found, wanted) in found.iter().zip(&wanted) {
                let far = (found - wanted).abs();
                assert!(
                    far <= close * scale,
                    "{name} {dtype:?}: {found} for {wanted}"
                );
            }
        }
    }
}

/// In an autocast region matmuls read the cast weights, cached or not. The weights' gradients are unrounded f32 sums
/// and equal the CPU's.
#[rstest]
#[ignore = "needs a CUDA device"]
fn weights_in_a_region_have_the_gradients_of_the_cpu(
    #[values(DType::F16, DType::BF16)] dtype: DType,
    #[values(false, true)] keeps: bool,
) {
    let gpu = crate::gpu();
    let run = |device: &Device| {
        let x = variable(device, &[3, 11, 24], 7);
        let [w1, w3, head] = [8, 9, 10].map(|seed| variable(device, &[65, 24], seed));
        let bias = variable(device, &[65], 12);
        let targets = cases::ids(&[3, 11], 65, 11);
        let policy = Autocast::cuda(dtype).with_weight_cache(keeps);
        let [linear, biased, gated, loss] = autocast(policy, || {
            Ok([
                ops::linear(&x, &w1)?,
                ops::linear_bias(&x, &w1, &bias)?,
                ops::swiglu_linear(&x, &w1, &w3)?,
                ops::linear_cross_entropy(&x, &head, &targets)?,
            ])
        })
        .unwrap();
        assert_eq!([&linear, &biased, &gated].map(Tensor::dtype), [dtype; 3]);
        let mut found = Vec::new();
        for (out, weights) in [
            (&linear, vec![&w1]),
            (&biased, vec![&bias, &w1]),
            (&gated, vec![&w1, &w3]),
            (&loss, vec![&head]),
        ] {
            let gradients = out.backward().unwrap();
            for variable in weights.into_iter().chain([&x]) {
                let gradient = gradients.get(variable).unwrap();
                assert_eq!(gradient.dtype(), DType::F32);
                found.push(gradient.to_device(&Device::Cpu).unwrap());
            }
            let out = out.to_dtype(DType::F32).unwrap();
            found.push(out.to_device(&Device::Cpu).unwrap());
        }
        found
    };
    let (on_gpu, on_cpu) = (run(&gpu), run(&Device::Cpu));
    // With linear only the output is rounded; with the others, also the tensors between matmuls.
    assert_close("linear's dw", &on_gpu[0], &on_cpu[0], 1e-6);
    assert_close("linear_bias's db", &on_gpu[3], &on_cpu[3], 1e-6);
    assert_close("linear_bias's dw", &on_gpu[4], &on_cpu[4], 1e-6);
    for (on_gpu, on_cpu) in on_gpu.iter().zip(&on_cpu) {
        let once = if dtype == DType::BF16 { 8e-3 } else { 1e-3 };
        assert_close("outputs and gradients", on_gpu, on_cpu, once);
    }
}

/// Weights without rows, and matmuls over an empty dimension.
#[test]
#[ignore = "needs a CUDA device"]
fn nothing_is_multiplied() {
    let gpu = crate::gpu();
    let zeros = |dims: &[usize]| Tensor::zeros(dims, DType::F32, &gpu).unwrap();
    let y = ops::linear(&zeros(&[3, 5]), &zeros(&[0, 5])).unwrap();
    assert_eq!(y.dims(), [3, 0]);
    let y = ops::linear_bias(&zeros(&[3, 5]), &zeros(&[0, 5]), &zeros(&[0])).unwrap();
    assert_eq!(y.dims(), [3, 0]);
    let c = ops::matmul(&zeros(&[2, 3, 5]), &zeros(&[2, 5, 0])).unwrap();
    assert_eq!(c.dims(), [2, 3, 0]);
    let y = ops::swiglu_linear(&zeros(&[3, 5]), &zeros(&[0, 5]), &zeros(&[0, 5])).unwrap();
    assert_eq!(y.dims(), [3, 0]);
}

/// Every op, including those that run their reference on a GPU.
#[test]
#[ignore = "needs a CUDA device"]
fn every_op_in_f32() {
    for case in every::small().into_iter().chain(every::large()) {
        check(&case, KernelPolicy::Prefer, Layout::Contiguous);
    }
}

#[rstest]
#[ignore = "needs a CUDA device"]
fn kernels_in_half_precision_round_once(#[values(DType::F16, DType::BF16)] dtype: DType) {
    let gpu = crate::gpu();
    for case in with_kernels() {
        let case = case.rounded_to(dtype);
        let exact = case.run(DType::F64, REFERENCE);
        let half = case.run_on(&gpu, dtype, KERNEL, Layout::Contiguous);
        assert_rounded_once(&case, &half, &exact);
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn the_same_bits_every_time() {
    let gpu = crate::gpu();
    for case in with_kernels() {
        let run = || case.run_on(&gpu, DType::F32, KERNEL, Layout::Contiguous);
        let (first, second) = (run(), run());
        assert_eq!(bits(&first.out), bits(&second.out), "{}", case.name);
        for ((name, a), (_, b)) in first.gradients.iter().zip(&second.gradients) {
            assert_eq!(bits(a), bits(b), "{}: {name}", case.name);
        }
    }
}

/// Sizes ((H, Hkv), (Tq, Tk)): tails, groups, one tile and several.
const OF_FLASH: [((usize, usize), (usize, usize)); 5] = [
    ((2, 2), (5, 7)), // rows that see one key have gradients of exactly 0, computed as rounding errors
    ((4, 2), (33, 41)),
    ((3, 1), (200, 130)),
    ((2, 1), (64, 257)),
    ((2, 2), (300, 300)),
];

/// Flash attention on tensor cores: every compiled head dimension and others between, tails, masks, groups.
#[rstest]
#[ignore = "needs a CUDA device"]
fn flash_in_half_precision(
    #[values(DType::F16, DType::BF16)] dtype: DType,
    #[values(8, 16, 24, 32, 64, 80, 96, 128, 200, 256)] head_dim: usize,
) {
    let gpu = crate::gpu();
    for mask in MASKS {
        for (heads, lengths) in OF_FLASH {
            let case = cases::grouped_flash(&[2], heads, lengths, head_dim, mask, 7);
            let case = case.rounded_to(dtype);
            let exact = case.run(DType::F64, KERNEL);
            let half = case.run_on(&gpu, dtype, KERNEL, Layout::Contiguous);
            let turned = case.run_on(&gpu, dtype, KERNEL, Layout::Transposed);
            let again = case.run_on(&gpu, dtype, KERNEL, Layout::Contiguous);
            let judge = case.run(dtype, KERNEL);
            assert_no_worse(&case, &half, &judge, &exact);
            assert_no_worse(&case, &turned, &judge, &exact);
            assert_eq!(bits(&half.out), bits(&again.out), "{}", case.name);
            for ((name, a), (_, b)) in half.gradients.iter().zip(&again.gradients) {
                assert_eq!(bits(a), bits(b), "{}: {name}", case.name);
            }
        }
    }
}

/// Flash attention in f32 against its reference in f32, which materializes scores and probabilities.
#[rstest]
#[ignore = "needs a CUDA device"]
fn flash_in_f32(
    #[values(4, 8, 16, 20, 32, 60, 64, 80, 96, 100, 128, 200, 252, 256)] head_dim: usize,
) {
    let gpu = crate::gpu();
    for mask in MASKS {
        for (heads, lengths) in OF_FLASH {
            let case = cases::grouped_flash(&[2], heads, lengths, head_dim, mask, 7);
            let case = case.rounded_to(DType::F32);
            let exact = case.run(DType::F64, KERNEL);
            let judge = case.run(DType::F32, REFERENCE);
            let run = |layout| case.run_on(&gpu, DType::F32, KERNEL, layout);
            let found = run(Layout::Contiguous);
            assert_no_worse(&case, &found, &judge, &exact);
            for layout in LAYOUTS {
                // Other layouts, and a repetition, have the same bits.
                let again = run(layout);
                assert_eq!(
                    bits(&found.out),
                    bits(&again.out),
                    "{} {layout:?}",
                    case.name
                );
                for ((name, a), (_, b)) in found.gradients.iter().zip(&again.gradients) {
                    assert_eq!(bits(a), bits(b), "{} {layout:?}: {name}", case.name);
                }
            }
        }
    }
}
