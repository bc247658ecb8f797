//! Random cases against the oracle (see `flash.rs` for their number and seed).

use super::judge::{Shares, judge};
use super::masks;
use super::oracle::Oracle;
use super::problem::{FLASH, MASKS, Problem, REFERENCE, Sizes, normal};
use candle_core::DType;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{RngSeed, TestRunner};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rstest::rstest;
use std::cell::Cell;
use std::num::NonZeroUsize;
use tallow::attention::{AttentionConfig, Mask};

/// A special feature of the inputs.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Oddity {
    Nothing,
    /// Every other query, key and value is a copy of its predecessor.
    Duplicates,
    /// All keys are equal: every probability is the same, and dq is only rounding error.
    EqualKeys,
    /// All values are equal: out is that value, and dq and dk are only rounding errors.
    EqualValues,
    /// One query has scores up to 1e4, or as large as f16 allows.
    HugeQuery,
    /// One key has such scores: where it is seen, its probability is 0 or 1.
    HugeKey,
    /// One value is a thousand times the others.
    HugeValue,
    /// A query, a key and a value are zero.
    Zeros,
    AllZeros,
}

const ODDITIES: [Oddity; 8] = [
    Oddity::Duplicates,
    Oddity::EqualKeys,
    Oddity::EqualValues,
    Oddity::HugeQuery,
    Oddity::HugeKey,
    Oddity::HugeValue,
    Oddity::Zeros,
    Oddity::AllZeros,
];

#[derive(Clone, Debug)]
struct Case {
    batch: usize,
    kv_heads: usize,
    /// H / Hkv.
    group: usize,
    queries: usize,
    keys: usize,
    head_dim: usize,
    value_dim: usize,
    mask: Mask,
    /// About the number of documents in a sequence.
    documents: usize,
    scale: Option<f64>,
    /// About the largest score.
    largest_score: f64,
    oddity: Oddity,
    /// Whether there are a key mask and a bias, of random shapes.
    masked: [bool; 2],
    by_reference: bool,
    seed: u64,
}

/// The most multiply-adds of a matmul in a case; larger cases have fewer heads, to limit the time.
const LARGEST_CASE: usize = 2_000_000;

fn cases() -> impl Strategy<Value = Case> {
    let length = || prop_oneof![3 => 1..=20usize, 6 => 21..=90usize, 1 => 91..=300usize];
    let head_dim = || {
        prop_oneof![
            5 => 1..=40usize,
            2 => 41..=128usize,
            1 => 129..=256usize,
            4 => select(vec![8usize, 16, 24, 32, 40, 64, 80, 96, 128, 256]),
        ]
    };
    let scale = prop_oneof![
        5 => Just(None),
        1 => Just(Some(0.0)),
        1 => (0.01..3.0).prop_map(Some),
        1 => (-3.0..-0.01).prop_map(Some),
    ];
    let window = (1..=150usize).prop_filter_map("no keys", NonZeroUsize::new);
    let mask = prop_oneof![
        3 => select(MASKS.to_vec()),
        1 => window.prop_map(Mask::Window),
    ];
    let largest_score = select(vec![0.1, 1.0, 4.0, 4.0, 10.0, 30.0, 100.0, 1e3, 1e4]);
    let oddity = prop_oneof![1 => Just(Oddity::Nothing), 1 => select(ODDITIES.to_vec())];
    (
        (1..=3usize, 1..=3usize, 1..=4usize),
        (length(), length(), any::<bool>()),
        (head_dim(), prop::option::weighted(0.3, head_dim())),
        (mask, prop_oneof![3 => Just(1), 1 => 2..=9usize]),
        (scale, largest_score),
        oddity,
        prop::array::uniform2(prop::bool::weighted(0.2)),
        prop::bool::weighted(0.2),
        any::<u64>(),
    )
        .prop_map(
            |(heads, lengths, widths, seen, scores, oddity, masked, by_reference, seed)| {
                let (queries, keys, alike) = lengths;
                let keys = if alike { queries } else { keys };
                let (head_dim, value_dim) = (widths.0, widths.1.unwrap_or(widths.0));
                let (mut batch, mut kv_heads, mut group) = heads;
                let mut room = LARGEST_CASE / (queries * keys * head_dim.max(value_dim));
                for heads in [&mut batch, &mut kv_heads, &mut group] {
                    *heads = room.clamp(1, *heads);
                    room /= *heads;
                }
                Case {
                    batch,
                    kv_heads,
                    group,
                    queries,
                    keys,
                    head_dim,
                    value_dim,
                    mask: seen.0,
                    documents: seen.1,
                    scale: scores.0,
                    largest_score: scores.1,
                    oddity,
                    masked,
                    by_reference,
                    seed,
                }
            },
        )
}

/// The limit of inputs and gradients, below the largest finite f16, 65504.
const F16_LIMIT: f64 = 3e4;

fn scale_by(values: &mut [f64], factor: f64) {
    values.iter_mut().for_each(|x| *x *= factor);
}

impl Case {
    /// Returns the case's inputs, rounded to `dtype`.
    fn problem(&self, dtype: DType) -> Problem {
        let heads = (self.batch, self.kv_heads * self.group, self.kv_heads);
        let sizes = Sizes::new(heads, (self.queries, self.keys), self.head_dim);
        let sizes = sizes.with_value_dim(self.value_dim);
        let config = AttentionConfig {
            mask: self.mask,
            scale: self.scale,
            ..Default::default()
        };
        let scale = config.scale_for(self.head_dim).abs();
        let mut random = ChaCha8Rng::seed_from_u64(self.seed);
        let mut draw = |shape: [usize; 4]| normal(shape.iter().product(), &mut random);
        let mut problem = Problem {
            q: draw(sizes.q_shape()),
            k: draw(sizes.k_shape()),
            v: draw(sizes.v_shape()),
            d_out: draw(sizes.out_shape()),
            sizes,
            config,
            first_keys: Vec::new(),
            factors: Vec::new(),
            key_mask: None,
            bias: None,
        };
        if self.documents > 1 {
            problem = problem.with_first_keys(self.first_keys());
        }
        let [hides, adds] = self.masked;
        if hides {
            problem = masks::with_random_key_mask(problem, self.seed);
        }
        if adds {
            problem = masks::with_random_bias(problem, self.seed);
        }
        // A score is a sum of Dh products, and the largest of some thousand is at about 3.5 standard deviations.
        if scale > 0.0 {
            let deviation = 3.5 * scale * (self.head_dim as f64).sqrt();
            let spread = (self.largest_score / deviation).sqrt();
            scale_by(&mut problem.q, spread);
            scale_by(&mut problem.k, spread);
        }
        self.make_odd(&mut problem);
        if dtype == DType::F16 {
            let inputs = [&mut problem.q, &mut problem.k, &mut problem.v];
            for x in inputs.into_iter().flatten() {
                *x = x.clamp(-F16_LIMIT, F16_LIMIT);
            }
        }
        problem.rounded_to(dtype)
    }

    /// Returns random first keys: documents that begin anywhere, some after keys that no query sees, some beyond all
    /// keys.
    fn first_keys(&self) -> Vec<u32> {
        let mut random = ChaCha8Rng::seed_from_u64(!self.seed);
        let mut drawn = |below: usize| random.random_range(0..=below);
        let sequences = (0..self.batch).flat_map(|_| {
            let mut places: Vec<(usize, usize)> = (1..self.documents)
                .map(|_| (drawn(self.queries), drawn(self.keys + 2)))
                .collect();
            places.sort_unstable();
            let mut first_keys = vec![0; self.queries];
            let mut first = 0;
            for (from, key) in places {
                first = first.max(if key % 3 == 0 { key } else { from } as u32);
                first_keys[from..].fill(first);
            }
            first_keys
        });
        sequences.collect()
    }

    fn make_odd(&self, problem: &mut Problem) {
        let Problem { q, k, v, .. } = problem;
        let (dim, value_dim) = (self.head_dim, self.value_dim);
        let row = |x: &[f64], dim: usize| {
            let rows = x.len() / dim;
            let row = self.seed as usize % rows;
            row * dim..(row + 1) * dim
        };
        let equal_rows = |x: &mut [f64], dim: usize| {
            let first = x[..dim].to_vec();
            x.chunks_mut(dim)
                .for_each(|row| row.copy_from_slice(&first));
        };
        let (q_row, k_row, v_row) = (row(q, dim), row(k, dim), row(v, value_dim));
        match self.oddity {
            Oddity::Nothing => {}
            Oddity::Duplicates => {
                for (x, dim) in [(q, dim), (k, dim), (v, value_dim)] {
                    for pair in x.chunks_exact_mut(2 * dim) {
                        pair.copy_within(..dim, dim);
                    }
                }
            }
            Oddity::EqualKeys => equal_rows(k, dim),
            Oddity::EqualValues => equal_rows(v, value_dim),
            Oddity::HugeQuery => scale_by(&mut q[q_row], 1e4 / self.largest_score),
            Oddity::HugeKey => scale_by(&mut k[k_row], 1e4 / self.largest_score),
            Oddity::HugeValue => scale_by(&mut v[v_row], 1e3),
            Oddity::Zeros => {
                scale_by(&mut q[q_row], 0.0);
                scale_by(&mut k[k_row], 0.0);
                scale_by(&mut v[v_row], 0.0);
            }
            Oddity::AllZeros => [q, k, v].into_iter().for_each(|x| scale_by(x, 0.0)),
        }
    }

    fn check(&self, dtype: DType) -> Result<Shares, String> {
        let mut problem = self.problem(dtype);
        let mut oracle = Oracle::of(&problem);
        if dtype == DType::F16 {
            let Oracle { results, .. } = &oracle;
            let gradients = [&results.dq, &results.dk, &results.dv];
            let largest = gradients.into_iter().flatten();
            let largest = largest.fold(0.0f64, |a, x| a.max(x.abs()));
            if largest > F16_LIMIT {
                scale_by(&mut problem.d_out, F16_LIMIT / largest);
                problem = problem.rounded_to(dtype);
                oracle = Oracle::of(&problem);
            }
        }
        let attend = if self.by_reference { REFERENCE } else { FLASH };
        judge(&problem, &oracle, dtype, attend)
    }
}

/// Returns a number from the environment.
fn setting(name: &str, default: u64) -> u64 {
    let parse = |text: String| text.parse().unwrap_or_else(|_| panic!("{name}={text}"));
    std::env::var(name).map_or(default, parse)
}

/// All dtypes together run the requested number of cases. f32, which has the tightest bounds, runs half of them.
#[rstest]
#[case::f32(DType::F32, 50)]
#[case::f16(DType::F16, 20)]
#[case::bf16(DType::BF16, 20)]
#[case::f64(DType::F64, 10)]
fn drawn_cases(#[case] dtype: DType, #[case] percent: u64) {
    let cases_wanted = (setting("TALLOW_PROPTEST_CASES", 600) * percent).div_ceil(100);
    let mut runner = TestRunner::new(ProptestConfig {
        cases: u32::try_from(cases_wanted).expect("as many cases as a u32 counts"),
        // The same cases each time, because a test that fails at random is hard to reproduce.
        rng_seed: RngSeed::Fixed(setting("TALLOW_PROPTEST_SEED", 20_230_717)),
        failure_persistence: None,
        max_shrink_iters: 300,
        ..ProptestConfig::default()
    });
    let (count, largest) = (Cell::new(0u64), Cell::new(Shares::default()));
    let outcome = runner.run(&cases(), |case| {
        let shares = case.check(dtype).map_err(TestCaseError::fail)?;
        let mut so_far = largest.get();
        so_far.keep_largest(shares);
        largest.set(so_far);
        count.set(count.get() + 1);
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{}: {error}", dtype.as_str());
    }
    assert_eq!(count.get(), cases_wanted);
    println!(
        "{}: {cases_wanted} cases, largest error over its bound, out lse dq dk dv d_bias: {:.2?}",
        dtype.as_str(),
        largest.get().0
    );
}
