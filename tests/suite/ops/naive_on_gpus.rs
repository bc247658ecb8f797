//! Naive attention as one op on a GPU, against f64 and against its reference of three ops, in every dtype: fully masked
//! blocks, and heads in groups.

use super::case::{KERNEL, LAYOUTS, Layout, REFERENCE, bits, elements};
use super::cases::{self, MASKS};
use super::compare::{assert_no_worse, error, magnitude};
use crate::compile::attention::planned;
use crate::settings::with_mask;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::Init;
use rstest::rstest;
use tallow::attention::{self, Algorithm, AttentionConfig, Mask, reference};
use tallow::memory::{AttentionWorkload, MemoryKind, Target, attention_breakdown};
use tallow::nn::seeded;
use tallow::ops::{KernelPolicy, with_kernel_policy};

/// ((H, Hkv), (Tq, Tk), (Dh of q and k, Dh of v)): groups, odd sizes, sizes of one.
type Sizes = ((usize, usize), (usize, usize), (usize, usize));

#[rstest]
#[ignore = "needs a CUDA device"]
fn as_near_as_in_three_ops(
    #[values(DType::F32, DType::F16, DType::BF16)] dtype: DType,
    #[values(
        ((1, 1), (1, 1), (1, 1)),
        ((2, 2), (5, 7), (24, 24)),
        ((4, 2), (33, 41), (6, 17)),
        ((3, 1), (123, 257), (40, 24)),
        ((2, 1), (257, 64), (64, 65)),
        ((2, 2), (200, 130), (128, 128)),
    )]
    (heads, lengths, dims): Sizes,
) {
    let gpu = crate::gpu();
    for mask in MASKS {
        for scale in [None, Some(-0.4)] {
            let case = cases::grouped_attention(&[2], heads, lengths, dims, (scale, mask), 7);
            let case = case.rounded_to(dtype);
            let exact = case.run(DType::F64, KERNEL);
            let judge = case.run_on(&gpu, dtype, REFERENCE, Layout::Contiguous);
            let found = case.run_on(&gpu, dtype, KERNEL, Layout::Contiguous);
            assert_no_worse(&case, &found, &judge, &exact);
            for layout in LAYOUTS {
                // Other layouts, and a repetition, have the same bits.
                let again = case.run_on(&gpu, dtype, KERNEL, layout);
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

type Attend = fn(&Tensor, &Tensor, &Tensor, &AttentionConfig) -> tallow::Result<Tensor>;

/// Returns the output and the gradients of q, k and v, on the CPU.
fn run(attend: Attend, inputs: &[Tensor; 4], config: &AttentionConfig) -> Vec<Tensor> {
    let [q, k, v] = [0, 1, 2].map(|i| Var::from_tensor(&inputs[i]).unwrap());
    let out = with_kernel_policy(KernelPolicy::Strict, || attend(&q, &k, &v, config)).unwrap();
    let loss = (&out * &inputs[3]).unwrap().sum_all().unwrap();
    let store = loss.backward().unwrap();
    let gradients = [&q, &k, &v].map(|x| store.get(x).unwrap().clone());
    let here = |x: &Tensor| x.to_device(&Device::Cpu).unwrap();
    std::iter::once(&out).chain(&gradients).map(here).collect()
}

/// Checks one op against three in f32, where only the order of sums differs: errors are at most `limit` of each head's
/// norm.
fn agree(gpu: &Device, shapes: [(usize, usize, usize); 2], mask: Mask, limit: f64) {
    let [q, k] = shapes;
    let builder = seeded(5, DType::F32, gpu);
    let init = Init::Randn {
        mean: 0.0,
        stdev: 1.0,
    };
    let draw = |(name, shape)| builder.get_with_hints(shape, name, init).unwrap();
    let inputs = [("q", q), ("k", k), ("v", k), ("d_out", q)].map(draw);
    let config = with_mask(mask);
    let found = run(attention::naive, &inputs, &config);
    let reference: Attend = |q, k, v, config| {
        with_kernel_policy(KernelPolicy::Prefer, || reference::naive(q, k, v, config))
    };
    let wanted = run(reference, &inputs, &config);
    for ((found, wanted), what) in found.iter().zip(&wanted).zip(["out", "dq", "dk", "dv"]) {
        for head in 0..found.dims()[0] {
            let [found, wanted] = [found, wanted].map(|x| x.get(head).unwrap());
            let (error, size) = (error(&found, &wanted).norm, magnitude(&wanted).norm);
            assert!(
                error <= limit * size,
                "{what}, head {head} of {q:?}, {k:?}, {mask:?}: {error:.1e} of {size:.1e}"
            );
        }
    }
}

/// Several blocks of queries and keys, equal or different in number. Masks hide some blocks of keys completely, and
/// some queries see nothing.
#[rstest]
#[ignore = "needs a CUDA device"]
fn blocks(
    #[values((2049, 2049), (1100, 2500), (2500, 1100))] (queries, keys): (usize, usize),
    #[values((2, 2), (4, 2))] (heads, kv_heads): (usize, usize),
) {
    let gpu = crate::gpu();
    for mask in MASKS {
        agree(
            &gpu,
            [(heads, queries, 24), (kv_heads, keys, 24)],
            mask,
            5e-5,
        );
    }
}

/// Seven heads in groups of four, the last group smaller: scratch memory holds the score gradients of four heads.
#[rstest]
#[ignore = "needs a CUDA device"]
fn heads_in_turns(#[values(Mask::Full, Mask::Causal)] mask: Mask) {
    let workload = AttentionWorkload {
        batch_size: 1,
        heads: 7,
        sequence_length: 8100,
        head_dim: 16,
        mask,
        ..Default::default()
    };
    let of_scores = 4 * 8100 * 8100;
    let scratch = attention_breakdown(&workload, Target::Cuda)
        .unwrap()
        .bytes_of(MemoryKind::Scratch);
    assert!(
        (3 * of_scores..5 * of_scores).contains(&scratch),
        "{scratch}"
    );
    let gpu = crate::gpu();
    // Sums of 8,100 terms that mostly cancel, in another order.
    agree(&gpu, [(7, 8100, 16), (7, 8100, 16)], mask, 5e-5);
}

/// A mask hides keys that are NaN, and a query that sees no key has an output of 0.
#[test]
#[ignore = "needs a CUDA device"]
fn masked_keys_have_no_effect() {
    let gpu = crate::gpu();
    let config = with_mask(Mask::CausalEnd);
    let q = Tensor::ones((1, 5, 4), DType::BF16, &gpu).unwrap();
    let k = Tensor::ones((1, 3, 4), DType::BF16, &gpu).unwrap();
    let out = attention::naive(&q, &k, &k, &config).unwrap();
    let out = elements(&out.to_device(&Device::Cpu).unwrap());
    assert_eq!(out, [[0.0; 8].as_slice(), &[1.0; 12]].concat());

    // The last key's score is NaN; the rows before it do not see it.
    let mut rows = vec![1f32; 12];
    rows[8] = f32::NAN;
    let k = Tensor::from_vec(rows, (1, 3, 4), &gpu).unwrap();
    let v = Tensor::ones((1, 3, 4), DType::F32, &gpu).unwrap();
    let q = Tensor::ones((1, 3, 4), DType::F32, &gpu).unwrap();
    let out = attention::naive(&q, &k, &v, &config).unwrap();
    let out = elements(&out.to_device(&Device::Cpu).unwrap());
    assert_eq!(out[..8], [1.0; 8]);
    assert!(out[8..].iter().all(|x| x.is_nan()));
}

/// Scores around 100 in half precision, where rounding a score would be off by a quarter. Errors stay at a few
/// roundings of the operands, eager and planned.
#[rstest]
#[ignore = "needs a CUDA device"]
fn wide_scores(
    #[values(DType::F16, DType::BF16)] dtype: DType,
    #[values(Mask::Full, Mask::Causal)] mask: Mask,
) {
    let gpu = crate::gpu();
    let builder = seeded(6, DType::F64, &Device::Cpu);
    let init = Init::Randn {
        mean: 0.0,
        stdev: 1.0,
    };
    let draw = |(name, spread): (&str, f64)| {
        let x: Tensor = builder.get_with_hints((2, 3, 65, 32), name, init).unwrap();
        (x * spread).unwrap().to_dtype(dtype).unwrap()
    };
    let inputs = [("q", 25.0), ("k", 1.0), ("v", 1.0), ("d_out", 1.0)].map(draw);
    let config = with_mask(mask);
    let exact = run(
        attention::naive,
        &inputs.each_ref().map(|x| x.to_dtype(DType::F64).unwrap()),
        &config,
    );
    let on_gpu = inputs.each_ref().map(|x| x.to_device(&gpu).unwrap());
    let eager = run(attention::naive, &on_gpu, &config);

    let [q, k, v] = [0, 1, 2].map(|i| Var::from_tensor(&on_gpu[i]).unwrap());
    let mut planned = planned(Algorithm::Naive, [&q, &k, &v], &config);
    let planned = crate::compile::attention::run(&mut planned, &on_gpu[3]);
    let planned = planned.map(|x| x.to_device(&Device::Cpu).unwrap());
    for found in [&eager[..], &planned] {
        for ((found, exact), what) in found.iter().zip(&exact).zip(["out", "dq", "dk", "dv"]) {
            let (error, size) = (error(found, exact).norm, magnitude(exact).norm);
            let limit = if dtype == DType::BF16 { 8e-3 } else { 1e-3 };
            assert!(error <= limit * size, "{what}: {:.1e}", error / size);
        }
    }
}
