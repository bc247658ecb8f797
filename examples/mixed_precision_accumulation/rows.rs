//! One number added up many times, in several precisions.

use candle_core::{DType, FloatDType};
use half::{bf16, f16};
use serde::Serialize;
use tallow::precision::accumulate::{running_sum, running_sums};
use tallow::report::{Answer, group_digits};

/// One sum and its error.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Sum {
    /// The dtype that the running sum is stored in.
    pub accumulator: &'static str,
    /// The dtype of the terms.
    pub terms: &'static str,
    pub sum: f64,
    /// `sum` less the exact sum.
    pub error: f64,
    pub error_percent: f64,
    /// The part of the error that the terms had before they were added.
    pub error_of_terms: f64,
    /// The part of the error that the additions made.
    pub error_of_additions: f64,
    /// The term as its dtype stores it.
    pub term: f64,
    /// The distance from the sum to the accumulator's next number.
    pub spacing: f64,
    /// The last addition that changed the sum, counted from 1, where later ones left it as it was.
    pub last_change: Option<usize>,
    /// The cause of most of the error, in two or three words.
    pub cause: String,
    /// The sum with its error and the reason.
    #[serde(skip)]
    explained: String,
}

/// Adds `value` up `count` times, which is not 0, in several precisions: the exercise's four sums first, in its order.
pub fn rows(value: f64, count: usize) -> [Sum; 6] {
    let (half, brain) = (f16::from_f64(value), bf16::from_f64(value));
    let [single, widened] = [value as f32, half.to_f32()].map(|term| vec![term; count]);
    let (half, brain) = (vec![half; count], vec![brain; count]);
    let exact = value * count as f64;
    [
        sum::<f32, _>(&single, "f32", exact),
        sum::<f16, _>(&half, "f16", exact),
        sum::<f32, _>(&half, "f16", exact),
        sum::<f32, _>(&widened, "f16, cast to f32", exact),
        sum::<bf16, _>(&brain, "bf16", exact),
        sum::<f32, _>(&brain, "bf16", exact),
    ]
}

fn sum<A: FloatDType, T: FloatDType>(terms: &[T], name: &'static str, exact: f64) -> Sum {
    let (sum, term) = (running_sum::<A, T>(terms).to_f64(), terms[0].to_f64());
    let of_stored = term * terms.len() as f64; // 24 bits times a count: exact in f64
    let epsilon = match A::DTYPE {
        DType::BF16 => bf16::EPSILON.to_f64(),
        DType::F16 => f16::EPSILON.to_f64(),
        _ => f64::from(f32::EPSILON),
    };
    let (error_of_terms, error_of_additions) = (of_stored - exact, sum - of_stored);
    let accumulator = A::DTYPE.as_str();
    let spacing = epsilon * 2f64.powf(sum.abs().log2().floor());
    let apart = match spacing {
        wide if wide >= 1e-4 => wide.to_string(),
        narrow => format!("{narrow:.2e}"),
    };
    let last_change = last_change::<A, T>(terms);
    let (cause, reason) = match last_change {
        _ if !sum.is_finite() => (
            "overflow".into(),
            format!("the sum is over the largest number of {accumulator}"),
        ),
        _ if error_of_terms + error_of_additions == 0.0 => {
            ("none".into(), "no error is left after rounding".into())
        }
        Some(addition) => (
            format!("unchanged after {}", group_digits(addition as u64)),
            format!(
                "the {addition}th addition is the last that changes the sum: {term:.4} is less than half of {apart}, \
                 the distance to the next number of {accumulator}"
            ),
        ),
        None if error_of_terms.abs() >= error_of_additions.abs() => (
            "rounded terms".into(),
            format!("the term is stored as {term:.10}"),
        ),
        None if error_of_additions.abs() <= spacing / 2.0 => (
            "rounded result".into(),
            format!("only the result is rounded to {accumulator}"),
        ),
        None => (
            "rounded additions".into(),
            format!(
                "each addition is rounded to {accumulator}, whose numbers near the sum are {apart} apart"
            ),
        ),
    };
    let error_percent = 100.0 * (sum - exact) / exact;
    Sum {
        accumulator,
        terms: name,
        sum,
        error: sum - exact,
        error_percent,
        error_of_terms,
        error_of_additions,
        term,
        spacing,
        last_change,
        cause,
        explained: format!(
            "{name} terms in {accumulator}: {sum:.8} ({error_percent:+.4}%); {reason}."
        ),
    }
}

/// Returns the last addition that changes the sum; `None` if that is the last of all.
fn last_change<A: FloatDType, T: FloatDType>(terms: &[T]) -> Option<usize> {
    let (mut before, mut last) = (A::zero(), 0);
    for (i, sum) in running_sums::<A, T>(terms).enumerate() {
        if sum != before {
            last = i + 1;
        }
        before = sum;
    }
    (last < terms.len()).then_some(last)
}

/// Returns what the exercise asks, from [`rows`].
pub fn answers([single, half, mixed, cast, brain, wide]: &[Sum; 6]) -> [Answer; 2] {
    let mut four = [single, half, mixed]
        .map(|sum| sum.explained.clone())
        .to_vec();
    if mixed.sum == cast.sum {
        let same = "Casting the terms to f32 first gives the same sum: it cannot restore what f16 has rounded away.";
        four.push(same.into());
    }
    let conclusion = match wide.error.abs() < brain.error.abs() {
        true => {
            "With the same terms the f32 accumulator is nearer to the exact sum, which is why matmuls in half precision \
             accumulate in f32."
        }
        false => "With these terms the f32 accumulator is no nearer to the exact sum.",
    };
    let brain = format!("{} {} {conclusion}", brain.explained, wide.explained);
    [
        (
            "How accurate are the four sums of the exercise?",
            four.join(" "),
        ),
        ("What does an f32 accumulator change for bf16?", brain),
    ]
    .map(|(question, answer)| Answer::new(question, answer))
}
