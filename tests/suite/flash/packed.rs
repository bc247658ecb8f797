//! Packed documents and sliding windows: against the oracle over several tiles, against separate documents, and refused
//! inputs.

use super::judge::judge_each;
use super::problem::{
    Attend, DTYPES, FLASH, Problem, REFERENCE, Sizes, device, dtypes_with_kernels, on, tensor,
};
use candle_core::{DType, Device, IndexOp, Tensor};
use rstest::rstest;
use std::num::NonZeroUsize;
use tallow::attention::{self, AttentionConfig, FirstKeys, Mask};

pub fn window(keys: usize) -> Mask {
    Mask::Window(NonZeroUsize::new(keys).unwrap())
}

/// Returns the first keys of documents of these lengths, one list per sequence.
pub fn of_lengths(lengths: &[&[usize]]) -> Vec<u32> {
    let lengths: Vec<Vec<usize>> = lengths.iter().map(|lengths| lengths.to_vec()).collect();
    let first_keys = FirstKeys::of_lengths(&lengths).unwrap();
    first_keys
        .tensor()
        .flatten_all()
        .unwrap()
        .to_vec1()
        .unwrap()
}

/// Documents that end within tiles or at their ends, or fill complete tiles; with windows, and with causal masks.
pub fn problems(head_dim: usize) -> Vec<Problem> {
    let square = Sizes::new((2, 4, 2), (700, 700), head_dim);
    let documents: [&[&[usize]]; 3] = [
        &[&[64, 64, 192, 128, 252], &[1, 699]],
        &[&[700], &[100; 7]],
        &[&[1; 700], &[383, 2, 315]],
    ];
    let packed = documents.iter().flat_map(|lengths| {
        let first_keys = of_lengths(lengths);
        [Mask::Causal, window(90), Mask::Full]
            .map(|mask| Problem::random(square, mask, None, 51).with_first_keys(first_keys.clone()))
    });
    let windows = [1, 64, 200, 699, 5_000_000_000]
        .map(|keys| Problem::random(square, window(keys), None, 52));
    // Over complete tiles, queries that see no key and keys that no query sees.
    let uneven = Sizes::new((1, 2, 1), (500, 600), head_dim);
    let late: Vec<u32> = (0..500).map(|i| if i < 300 { 0 } else { 550 }).collect();
    let beyond: Vec<u32> = (0..500)
        .map(|i| if i < 100 { i } else { u32::MAX })
        .collect();
    let odd = [
        (Mask::Causal, late.clone()),
        (Mask::CausalEnd, late),
        (Mask::Full, beyond),
    ];
    let odd = odd.map(|(mask, first_keys)| {
        Problem::random(uneven, mask, None, 53).with_first_keys(first_keys)
    });
    packed.chain(windows).chain(odd).collect()
}

#[rstest]
fn over_tiles(#[values(16, 64, 80, 128, 256)] head_dim: usize) {
    if head_dim > 64 && !device().is_cuda() {
        return; // the CPU has one kernel for all head dimensions
    }
    judge_each(problems(head_dim), &DTYPES, FLASH);
}

/// Naive attention and both references, on fewer cases.
#[rstest]
fn by_others(
    #[values(REFERENCE, naive_on_test_device, naive_reference)] attend: Attend,
    #[values(DType::F32, DType::F64)] dtype: DType,
) {
    let sizes = Sizes::new((2, 4, 2), (70, 70), 8);
    let lengths: [&[usize]; 2] = [&[3, 61, 6], &[70]];
    let problems = [Mask::Causal, window(13), Mask::Full]
        .map(|mask| Problem::random(sizes, mask, None, 54).with_first_keys(of_lengths(&lengths)));
    judge_each(problems, &[dtype], attend);
}

/// Naive attention over several blocks of queries. With grouped heads, forward and backward split the queries into
/// different blocks.
#[test]
fn naive_over_blocks() {
    let documents = Sizes::new((1, 16, 4), (1024, 1024), 24);
    let documents = Problem::random(documents, Mask::Causal, None, 55);
    let documents = documents.with_first_keys(of_lengths(&[&[200, 110, 714]]));
    let windows = Sizes::new((1, 8, 4), (768, 768), 24);
    let windows = Problem::random(windows, window(300), None, 56);
    let problems = problems(24).into_iter().chain([documents, windows]);
    judge_each(problems, &DTYPES, naive_on_test_device);
}

pub fn naive_on_test_device(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    config: &AttentionConfig,
) -> tallow::Result<(Tensor, Tensor)> {
    on(&device(), attention::naive_with_lse, [q, k, v], config)
}

pub fn naive_reference(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    config: &AttentionConfig,
) -> tallow::Result<(Tensor, Tensor)> {
    let (_, lse) = naive_on_test_device(q, k, v, config)?;
    let reference: Attend = |q, k, v, config| {
        let out = attention::reference::naive(q, k, v, config)?;
        Ok((out.clone(), out))
    };
    Ok((on(&device(), reference, [q, k, v], config)?.0, lse))
}

/// Each document has the results that it has alone.
#[rstest]
fn documents_one_by_one(#[values(FLASH, REFERENCE, naive_on_test_device)] attend: Attend) {
    let lengths = [30, 1, 90, 59];
    let sizes = Sizes::new((1, 4, 2), (180, 180), 24);
    let problem = Problem::random(sizes, Mask::Causal, None, 55);
    let packed = problem.clone().with_first_keys(of_lengths(&[&lengths]));
    let found = packed.run(DType::F32, attend);
    let mut first = 0;
    for length in lengths {
        let cut = |x: &[f64]| -> Vec<f64> {
            let heads = x.chunks(180 * 24);
            heads
                .flat_map(|head| head[first * 24..(first + length) * 24].to_vec())
                .collect()
        };
        let alone = Problem {
            sizes: Sizes::new((1, 4, 2), (length, length), 24),
            q: cut(&problem.q),
            k: cut(&problem.k),
            v: cut(&problem.v),
            d_out: cut(&problem.d_out),
            ..problem.clone()
        };
        let alone = alone.run(DType::F32, attend);
        for (name, packed, alone) in [
            ("out", &found.out, &alone.out),
            ("dq", &found.dq, &alone.dq),
            ("dk", &found.dk, &alone.dk),
            ("dv", &found.dv, &alone.dv),
        ] {
            for (a, b) in cut(packed).iter().zip(alone) {
                assert!((a - b).abs() <= 2e-5, "{name} of {length}: {a} {b}");
            }
        }
        first += length;
    }
}

/// Values in a document have no effect on other documents, whatever they are.
#[rstest]
fn what_is_not_finite_stays_in_its_document(#[values(FLASH, REFERENCE)] attend: Attend) {
    if super::problem::skips_on_gpu(
        "its products are of whole tiles, with zeros where the mask hides",
    ) {
        return;
    }
    let sizes = Sizes::new((1, 2, 1), (200, 200), 8);
    let problem = Problem::random(sizes, Mask::Causal, None, 56);
    let problem = problem.with_first_keys(of_lengths(&[&[70, 60, 70]]));
    let clean = problem.run(DType::F32, attend);
    for value in [f64::NAN, f64::INFINITY] {
        let mut sick = problem.clone();
        for x in [&mut sick.q, &mut sick.k, &mut sick.v, &mut sick.d_out] {
            for head in x.chunks_mut(200 * 8) {
                head[100 * 8] = value;
            }
        }
        let found = sick.run(DType::F32, attend);
        for ((name, found), (_, clean)) in found.named().into_iter().zip(clean.named()) {
            let width = if name == "lse" { 1 } else { 8 };
            for (i, (found, clean)) in found.iter().zip(clean).enumerate() {
                let position = i / width % 200;
                let same = (found - clean).abs() <= 1e-5;
                assert!(
                    same || (70..130).contains(&position),
                    "{name} {position}: {found} {clean}"
                );
            }
        }
    }
}

#[test]
fn the_same_bits_on_any_number_of_threads() {
    let problem = problems(32).swap_remove(0);
    let runs = [1, 2, 7].map(|threads| {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        pool.install(|| problem.run(DType::F32, FLASH).bits())
    });
    assert!(runs[0] == runs[1] && runs[0] == runs[2]);
}

/// One document per sequence has the bits of attention without first keys.
#[test]
fn one_document_is_no_first_keys() {
    let sizes = Sizes::new((2, 2, 1), (130, 130), 16);
    let problem = Problem::random(sizes, Mask::Causal, None, 57);
    let one = problem
        .clone()
        .with_first_keys(of_lengths(&[&[130], &[130]]));
    for dtype in dtypes_with_kernels() {
        let [problem, one] = [&problem, &one].map(|x| x.run(dtype, FLASH).bits());
        assert!(problem == one, "{dtype:?}");
    }
}

#[test]
fn made_of_tokens() {
    let tokens = Tensor::new(&[[0u32, 0, 3, 0], [1, 2, 3, 4]], &Device::Cpu).unwrap();
    let wanted = [[0u32, 1, 2, 2], [0; 4]];
    for tokens in [tokens.clone(), tokens.to_dtype(DType::I64).unwrap()] {
        let first_keys = FirstKeys::of_documents(&tokens, 0).unwrap();
        assert_eq!(first_keys.tensor().to_vec2::<u32>().unwrap(), wanted);
    }
    let view = tokens.i((.., 1..)).unwrap();
    let first_keys = FirstKeys::of_documents(&view, 0).unwrap();
    assert_eq!(
        first_keys.tensor().to_vec2::<u32>().unwrap(),
        [[0, 1, 1], [0; 3]]
    );
}

#[test]
fn what_is_refused() {
    let u32s =
        |values: &[u32], shape: &[usize]| Tensor::from_slice(values, shape, &Device::Cpu).unwrap();
    let refused = |error: tallow::Error, named: &str| {
        let text = error.to_string();
        assert!(text.contains(named), "{text}");
    };
    let falling = u32s(&[0, 1, 1, 0, 2, 1], &[2, 3]);
    let named = "in sequence 1 the first key of query 2 is 1, that of query 1 is 2";
    refused(FirstKeys::new(&falling).unwrap_err(), named);
    refused(
        FirstKeys::new(&tensor(&[0.0], &[1], DType::F32)).unwrap_err(),
        "u32",
    );
    refused(FirstKeys::new(&u32s(&[0], &[])).unwrap_err(), "a scalar");
    refused(
        FirstKeys::of_documents(&u32s(&[0], &[1]), 0).unwrap_err(),
        "(B, T)",
    );
    let text = tensor(&[0.0], &[1, 1], DType::F32);
    refused(FirstKeys::of_documents(&text, 0).unwrap_err(), "u32 or i64");
    let lengths = [vec![2, 1], vec![4]];
    refused(FirstKeys::of_lengths(&lengths).unwrap_err(), "3, 4");
    refused(
        FirstKeys::of_lengths(&[vec![usize::MAX, 2]]).unwrap_err(),
        "too many",
    );
    assert_eq!(FirstKeys::of_lengths(&[]).unwrap().tensor().dims(), [0, 0]);

    let sizes = Sizes::new((2, 2, 1), (3, 3), 8);
    let [q, k, v] = Problem::random(sizes, Mask::Causal, None, 58).operands(DType::F32);
    let config = AttentionConfig {
        first_keys: Some(FirstKeys::new(&u32s(&[0; 3], &[3])).unwrap()),
        ..Default::default()
    };
    for attend in [
        attention::flash,
        attention::naive,
        attention::reference::naive,
    ] {
        refused(attend(&q, &k, &v, &config).unwrap_err(), "[2, 3]");
    }
    refused(
        attention::naive_with_lse(&q, &k, &v, &config).unwrap_err(),
        "[2, 3]",
    );
    refused(
        attention::reference::flash(&q, &k, &v, &config).unwrap_err(),
        "[2, 3]",
    );
}
