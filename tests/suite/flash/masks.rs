//! Masks and biases that are tensors: against the oracle in every broadcast shape, combined with everything else;
//! hidden NaNs, threads, strides, plans and refused inputs.

use super::judge::judge_each;
use super::oracle::Oracle;
use super::packed::{naive_on_test_device, naive_reference, of_lengths, window};
use super::problem::{
    Attend, DTYPES, FLASH, Problem, REFERENCE, Sizes, normal, skips_on_gpu, tensor,
};
use super::same_bits::check_threads;
use crate::check::{elements, refusal};
use candle_core::{DType, Device, Tensor, Var};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rstest::rstest;
use tallow::attention::{Algorithm, AttentionConfig, KeyMask, Mask, ScoreBias};
use tallow::ops::{self, Dropout, DropoutKey};

/// Returns the dimensions of the scores, with 1 where bit i of `which` is not set.
fn dims_of(problem: &Problem, which: usize) -> [usize; 4] {
    let Sizes {
        batch,
        heads,
        queries,
        keys,
        ..
    } = problem.sizes;
    let full = [batch, heads, queries, keys];
    [0, 1, 2, 3].map(|i| if which >> i & 1 == 1 { full[i] } else { 1 })
}

fn with_key_mask(problem: Problem, which: usize, shown: f64, seed: u64) -> Problem {
    let dims = dims_of(&problem, which);
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let data = (0..dims.iter().product()).map(|_| u8::from(random.random_bool(shown)));
    let data = data.collect();
    problem.with_key_mask(dims, data)
}

pub fn with_bias(problem: Problem, which: usize, hidden: f64, seed: u64) -> Problem {
    let dims = dims_of(&problem, which);
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut data = normal(dims.iter().product(), &mut random);
    for x in &mut data {
        if random.random_bool(hidden) {
            *x = f64::NEG_INFINITY;
        }
    }
    problem.with_bias(dims, &data)
}

pub fn with_random_key_mask(problem: Problem, seed: u64) -> Problem {
    let shown = [0.02, 0.5, 0.98][(seed >> 8) as usize % 3];
    with_key_mask(problem, seed as usize % 16, shown, seed)
}

pub fn with_random_bias(problem: Problem, seed: u64) -> Problem {
    let hidden = [0.0, 0.0, 0.5][(seed >> 12) as usize % 3];
    with_bias(problem, (seed >> 4) as usize % 16, hidden, seed)
}

/// Adds the padding mask of sequences of these lengths.
pub fn padded(problem: Problem, lengths: &[usize]) -> Problem {
    let Sizes { batch, keys, .. } = problem.sizes;
    let shown = lengths.iter();
    let shown = shown.flat_map(|length| (0..keys).map(move |key| u8::from(key < *length)));
    problem.with_key_mask([batch, 1, 1, keys], shown.collect())
}

pub fn dropout() -> Dropout {
    Dropout {
        probability: 0.3,
        key: DropoutKey::new(5, 9).unwrap(),
    }
}

/// Every broadcast shape of a key mask and of a bias, over several tiles.
#[rstest]
fn every_broadcast_shape(#[values(DType::F32, DType::F64, DType::BF16)] dtype: DType) {
    for which in 0..16 {
        judge_each(of_shape(24, which), &[dtype], FLASH);
    }
}

/// A mask, a bias and both, with the dimensions that the bits of `which` set.
pub fn of_shape(head_dim: usize, which: usize) -> [Problem; 3] {
    let sizes = Sizes::new((2, 4, 2), (130, 201), head_dim);
    let problem = Problem::random(sizes, Mask::Full, None, 60 + which as u64);
    let masked = with_key_mask(problem.clone(), which, 0.6, which as u64);
    let biased = with_bias(problem, which, 0.0, which as u64);
    let both = with_bias(masked.clone(), 15 - which, 0.2, 3);
    [masked, biased, both]
}

/// Masks that hide complete tiles; with all other options.
pub fn combined(head_dim: usize) -> Vec<Problem> {
    let sizes = Sizes::new((2, 4, 2), (424, 424), head_dim);
    let lengths: [&[usize]; 2] = [&[64, 3, 192, 165], &[1, 423]];
    let masks = [Mask::Full, Mask::Causal, Mask::CausalEnd, window(90)];
    let problems = masks.map(|mask| {
        let problem = Problem::random(sizes, mask, Some(0.3), 61);
        [
            padded(problem.clone(), &[424, 130]),
            padded(problem.clone(), &[0, 1]),
            with_bias(padded(problem, &[300, 192]), 0b1110, 0.0, 4),
        ]
    });
    let packed = Problem::random(sizes, Mask::Causal, None, 62);
    let packed = packed.with_first_keys(of_lengths(&lengths));
    let packed = with_bias(padded(packed, &[260, 424]), 0b1010, 0.1, 5);
    let capped = |problem: Problem| {
        let config = AttentionConfig {
            soft_cap: Some(1.5),
            ..problem.config
        };
        Problem { config, ..problem }
    };
    let others = [
        packed.clone(),
        capped(packed.clone()),
        packed.clone().with_dropout(dropout()),
        capped(packed.with_dropout(dropout())),
    ];
    problems.into_iter().flatten().chain(others).collect()
}

#[test]
fn combined_with_all_options() {
    judge_each(combined(16), &DTYPES, FLASH);
}

#[rstest]
fn by_others(
    #[values(REFERENCE, naive_on_test_device, naive_reference)] attend: Attend,
    #[values(DType::F32, DType::F64)] dtype: DType,
) {
    let sizes = Sizes::new((2, 4, 2), (70, 67), 8);
    let problems = (0..16).flat_map(|which| {
        let problem = Problem::random(sizes, Mask::CausalEnd, None, 63 + which as u64);
        let masked = with_key_mask(problem.clone(), which, 0.5, 8);
        let biased = with_bias(problem, which, 0.3, 9);
        let both = with_bias(masked.clone(), 15 - which, 0.0, 3);
        [masked, biased, both.clone(), both.with_dropout(dropout())]
    });
    judge_each(problems, &[dtype], attend);
}

/// A query that sees nothing has an output and gradients of zero, exactly, whatever it holds; so has a hidden key.
#[rstest]
fn what_is_hidden_has_no_effect(
    #[values(FLASH, REFERENCE)] attend: Attend,
    #[values(f64::NAN, f64::INFINITY)] poison: f64,
    #[values(false, true)] by_bias: bool,
) {
    if skips_on_gpu("its products are of whole tiles, with zeros where the mask hides") {
        return;
    }
    let (queries, keys, dim) = (140, 201, 5);
    let sizes = Sizes::new((1, 2, 1), (queries, keys), dim);
    let problem = Problem::random(sizes, Mask::Full, None, 64);
    let is_blind = |query: usize| query % 7 == 3;
    let is_hidden = |key: usize| key % 5 == 2 || (64..140).contains(&key);
    let pairs = || (0..queries * keys).map(|i| (i / keys, i % keys));
    let shows = |(query, key)| !is_blind(query) && !is_hidden(key);
    let dims = [1, 1, queries, keys];
    let clean = match by_bias {
        false => problem.with_key_mask(dims, pairs().map(|pair| u8::from(shows(pair))).collect()),
        true => {
            let term = |pair| if shows(pair) { 0.5 } else { f64::NEG_INFINITY };
            let terms: Vec<f64> = pairs().map(term).collect();
            problem.with_bias(dims, &terms)
        }
    };
    let mut sick = clean.clone();
    let set = |x: &mut [f64], is_it: &dyn Fn(usize) -> bool, rows: usize| {
        let rows = x
            .chunks_mut(dim)
            .enumerate()
            .filter(|(row, _)| is_it(row % rows));
        rows.for_each(|(_, x)| x.fill(poison));
    };
    set(&mut sick.q, &is_blind, queries);
    set(&mut sick.d_out, &is_blind, queries);
    set(&mut sick.k, &is_hidden, keys);
    set(&mut sick.v, &is_hidden, keys);
    for dtype in DTYPES {
        let [clean, sick] = [&clean, &sick].map(|problem| problem.run(dtype, attend));
        for ((name, one), (_, other)) in clean.named().into_iter().zip(sick.named()) {
            let near = one
                .iter()
                .zip(other)
                .all(|(a, b)| a == b || (a - b).abs() < 1e-5);
            assert!(
                near || dtype != DType::F32 && dtype != DType::F64,
                "{dtype:?}: {name}"
            );
            assert!(other.iter().all(|x| !x.is_nan()), "{dtype:?}: {name}");
        }
        for (row, (out, dq)) in sick.out.chunks(dim).zip(sick.dq.chunks(dim)).enumerate() {
            let zeros = out.iter().chain(dq).all(|x| *x == 0.0);
            assert_eq!(zeros, is_blind(row % queries), "{dtype:?}, query {row}");
        }
        for (row, (dk, dv)) in sick.dk.chunks(dim).zip(sick.dv.chunks(dim)).enumerate() {
            let zeros = dk.iter().chain(dv).all(|x| *x == 0.0);
            assert_eq!(zeros, is_hidden(row), "{dtype:?}, key {row}");
        }
    }
}

/// A NaN that is seen reaches what depends on it, and nothing else.
#[rstest]
fn nan_reaches_what_sees_it(#[values(FLASH, REFERENCE)] attend: Attend) {
    if skips_on_gpu("its products are of whole tiles, with zeros where the mask hides") {
        return;
    }
    let sizes = Sizes::new((1, 2, 1), (70, 135), 5);
    let problem = with_key_mask(Problem::random(sizes, Mask::Full, None, 65), 0b1100, 0.3, 1);
    type Input = fn(&mut Problem) -> &mut Vec<f64>;
    let inputs: [Input; 4] = [|p| &mut p.q, |p| &mut p.k, |p| &mut p.v, |p| &mut p.d_out];
    for (i, input) in inputs.into_iter().enumerate() {
        let mut sick = problem.clone();
        input(&mut sick)[33 * 5 + 2] = f64::NAN;
        let (wanted, found) = (Oracle::of(&sick).results, sick.run(DType::F32, attend));
        for ((name, wanted), (_, found)) in wanted.named().into_iter().zip(found.named()) {
            for (at, (wanted, found)) in wanted.iter().zip(found).enumerate() {
                assert_eq!(wanted.is_nan(), found.is_nan(), "input {i}: {name}[{at}]");
            }
        }
    }
}

#[rstest]
fn threads_do_not_change_a_bit(#[values(DType::F32, DType::BF16)] dtype: DType) {
    let problems: Vec<Problem> = combined(24).into_iter().step_by(2).collect();
    check_threads(&problems, dtype);
}

/// Gradients in f64 against differences, by the chain of ops of naive attention and by flash attention.
#[rstest]
fn gradients_are_differences(#[values(Algorithm::Naive, Algorithm::Flash)] algorithm: Algorithm) {
    if skips_on_gpu("f64") {
        return;
    }
    let sizes = Sizes::new((2, 2, 1), (4, 5), 3);
    let problem = with_key_mask(Problem::random(sizes, Mask::Full, None, 66), 0b1001, 0.7, 2);
    let problem = with_bias(problem, 0b1010, 0.0, 3);
    let config = AttentionConfig {
        soft_cap: Some(2.0),
        ..problem.config.clone()
    };
    let loss = |problem: &Problem, bias: &Tensor| -> Tensor {
        let [q, k, v] = problem.operands(DType::F64);
        let config = AttentionConfig {
            bias: Some(ScoreBias::new(bias).unwrap()),
            ..config.clone()
        };
        let out = algorithm.attend(&q, &k, &v, &config).unwrap();
        ops::sum(&ops::mul(&out, &problem.d_out(DType::F64)).unwrap()).unwrap()
    };
    let bias = problem.bias.clone().unwrap();
    let var = Var::from_tensor(&tensor(&bias.data, &bias.dims, DType::F64)).unwrap();
    let value = |x: Tensor| x.to_scalar::<f64>().unwrap();
    for backward in [
        |x: Tensor| tallow::backward(x).unwrap(),
        |x: Tensor| x.backward().unwrap(),
    ] {
        let gradients = backward(loss(&problem, &var));
        let gradient = elements(gradients.get(&var).unwrap());
        for (i, gradient) in gradient.iter().enumerate() {
            let at = |step: f64| {
                let mut moved = bias.data.clone();
                moved[i] += step;
                value(loss(&problem, &tensor(&moved, &bias.dims, DType::F64)))
            };
            let difference = (at(1e-5) - at(-1e-5)) / 2e-5;
            assert!(
                (gradient - difference).abs() < 1e-8,
                "{gradient}, not {difference}"
            );
        }
    }
}

/// A bias and a mask of any strides, rank and with a bias in f32 next to half precision.
#[rstest]
fn strides_and_dtypes(#[values(Algorithm::Naive, Algorithm::Flash)] algorithm: Algorithm) {
    let sizes = Sizes::new((2, 3, 3), (20, 30), 8);
    let problem = Problem::random(sizes, Mask::Full, None, 67);
    let mut random = ChaCha8Rng::seed_from_u64(1);
    let terms = tensor(&normal(1800, &mut random), &[30, 20, 3], DType::F32);
    let turned = terms.permute((2, 1, 0)).unwrap(); // (H, Tq, Tk)
    let shown = tensor(&[0.0, 1.0, 1.0], &[3], DType::U8);
    let shown = shown.broadcast_as((20, 10, 3)).unwrap().t().unwrap(); // by strides of 0
    let shown = shown.contiguous().unwrap().reshape((20, 30)).unwrap();
    let config = |bias: &Tensor, shown: &Tensor| AttentionConfig {
        bias: Some(ScoreBias::new(bias).unwrap()),
        key_mask: Some(KeyMask::new(shown).unwrap()),
        ..Default::default()
    };
    for dtype in [DType::F32, DType::BF16] {
        let [q, k, v] = problem.operands(dtype);
        let run = |config: &AttentionConfig| {
            let out = algorithm.attend(&q, &k, &v, config).unwrap();
            assert_eq!(out.dtype(), dtype);
            elements(&out)
        };
        let strided = run(&config(
            &turned,
            &shown.t().unwrap().contiguous().unwrap().t().unwrap(),
        ));
        let plain = turned.contiguous().unwrap().unsqueeze(0).unwrap();
        assert_eq!(strided, run(&config(&plain, &shown)));
    }
    // The gradient of a permuted bias has its own layout.
    let var = Var::from_tensor(&terms).unwrap();
    let [q, k, v] = problem.operands(DType::F32);
    let of_var = config(&var.permute((2, 1, 0)).unwrap(), &shown);
    let out = algorithm.attend(&q, &k, &v, &of_var).unwrap();
    let gradients = tallow::backward(ops::sum(&ops::mul(&out, &out).unwrap()).unwrap()).unwrap();
    assert_eq!(gradients.get(&var).unwrap().dims(), [30, 20, 3]);
}

/// Shapes with several leading dimensions, or without heads.
#[rstest]
fn leading_dimensions(#[values(Algorithm::Naive, Algorithm::Flash)] algorithm: Algorithm) {
    let x = Tensor::randn(0f32, 1.0, (2, 3, 2, 6, 8), &Device::Cpu).unwrap();
    let shown = Tensor::from_vec(
        (0..36).map(|i| u8::from(i % 4 != 1)).collect(),
        (2, 3, 6),
        &Device::Cpu,
    );
    let shown = shown.unwrap();
    let with = |key_mask: KeyMask| AttentionConfig {
        key_mask: Some(key_mask),
        ..Default::default()
    };
    let padding = with(KeyMask::padding(&shown).unwrap());
    let out = algorithm.attend(&x, &x, &x, &padding).unwrap();
    let four = x.reshape((6, 2, 6, 8)).unwrap();
    let flat = with(KeyMask::padding(&shown.reshape((6, 6)).unwrap()).unwrap());
    let wanted = algorithm.attend(&four, &four, &four, &flat).unwrap();
    assert_eq!(elements(&out), elements(&wanted));
    let pairs = with(KeyMask::new(&shown.reshape((2, 3, 1, 1, 6)).unwrap()).unwrap());
    assert_eq!(
        elements(&algorithm.attend(&x, &x, &x, &pairs).unwrap()),
        elements(&wanted)
    );

    let one = x.reshape((72, 8)).unwrap().narrow(0, 0, 6).unwrap();
    let key_mask = KeyMask::padding(&shown.flatten_all().unwrap().narrow(0, 0, 6).unwrap());
    let out = algorithm
        .attend(&one, &one, &one, &with(key_mask.unwrap()))
        .unwrap();
    let first = wanted.narrow(0, 0, 1).unwrap().narrow(1, 0, 1).unwrap();
    assert_eq!(elements(&out), elements(&first));
}

#[test]
fn nothing_to_attend_to() {
    let q = Tensor::zeros((2, 1, 3, 4), DType::F32, &Device::Cpu).unwrap();
    let k = Tensor::zeros((2, 1, 0, 4), DType::F32, &Device::Cpu).unwrap();
    let bias = Var::zeros((1, 1, 3, 1), DType::F32, &Device::Cpu).unwrap();
    let config = AttentionConfig {
        key_mask: Some(KeyMask::of_lengths(&[0, 0], 0).unwrap()),
        bias: Some(ScoreBias::new(&bias).unwrap()),
        ..Default::default()
    };
    for algorithm in Algorithm::ALL {
        let out = algorithm.attend(&q, &k, &k, &config).unwrap();
        assert_eq!(elements(&out), vec![0.0; 24]);
        let gradients = tallow::backward(ops::sum(&out).unwrap()).unwrap();
        assert_eq!(elements(gradients.get(&bias).unwrap()), [0.0; 3]);
    }
}

fn ones(dims: &[usize], dtype: DType) -> Tensor {
    Tensor::ones(dims, dtype, &Device::Cpu).unwrap()
}

#[test]
fn constructors_refuse() {
    let (f32s, u8s) = (DType::F32, DType::U8);
    refusal(
        KeyMask::padding(&ones(&[2, 3], f32s)),
        &["attention::KeyMask", "u8", "f32", "ScoreBias"],
    );
    refusal(
        KeyMask::new(&ones(&[3], u8s)),
        &["(Tq, Tk)", "[3]", "padding"],
    );
    refusal(KeyMask::padding(&ones(&[], u8s)), &["(B, Tk)", "[]"]);
    refusal(KeyMask::of_lengths(&[2, 4], 3), &["at most 3", "4"]);
    refusal(
        ScoreBias::new(&ones(&[2, 3], u8s)),
        &["attention::ScoreBias", "f32", "u8", "KeyMask"],
    );
    refusal(ScoreBias::new(&ones(&[3], f32s)), &["(Tq, Tk)", "[3]"]);
}

#[rstest]
fn shapes_and_dtypes_are_refused(
    #[values(FLASH, REFERENCE, naive_on_test_device, naive_reference)] attend: Attend,
) {
    let (q, k) = (
        ones(&[2, 4, 3, 8], DType::F32),
        ones(&[2, 2, 5, 8], DType::F32),
    );
    let config = AttentionConfig::default;
    let mask = |dims: &[usize]| AttentionConfig {
        key_mask: Some(KeyMask::new(&ones(dims, DType::U8)).unwrap()),
        ..config()
    };
    let refused = |config: AttentionConfig, parts: &[&str]| {
        refusal(attend(&q, &k, &k, &config), parts);
    };
    for dims in [
        &[3, 4][..],
        &[2, 5],
        &[2, 3, 5],
        &[3, 4, 3, 5],
        &[1, 2, 4, 3, 5],
    ] {
        refused(
            mask(dims),
            &["key_mask", &format!("{dims:?}"), "[2, 4, 3, 5]"],
        );
        let bias = ScoreBias::new(&ones(dims, DType::F32)).unwrap();
        let biased = AttentionConfig {
            bias: Some(bias),
            ..config()
        };
        refused(biased, &["bias", &format!("{dims:?}"), "[2, 4, 3, 5]"]);
    }
    for dims in [&[2, 3][..], &[5], &[1, 5], &[2, 1, 1, 5]] {
        let padding = AttentionConfig {
            key_mask: Some(KeyMask::padding(&ones(dims, DType::U8)).unwrap()),
            ..config()
        };
        refused(padding, &["padding mask [2, 5]", &format!("{dims:?}")]);
    }
    for dtype in [DType::F64, DType::BF16] {
        let biased = AttentionConfig {
            bias: Some(ScoreBias::new(&ones(&[3, 5], dtype)).unwrap()),
            ..config()
        };
        refused(biased, &["bias", dtype.as_str(), "f32"]);
    }
}
