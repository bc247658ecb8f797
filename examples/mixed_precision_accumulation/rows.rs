//! 0.01 added up a thousand times, in several precisions.

use candle_core::FloatDType;
use half::{bf16, f16};
use serde::Serialize;
use tallow::precision::accumulate::running_sum;
use tallow::report::Answer;

pub const VALUE: f64 = 0.01;
pub const COUNT: usize = 1000;
pub const EXACT: f64 = 10.0;

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
    /// The cause of most of the error, in two or three words.
    pub cause: &'static str,
    /// The cause in a sentence.
    #[serde(skip)]
    reason: &'static str,
}

/// Computes the sums: the exercise's four first, in its order.
pub fn rows() -> [Sum; 6] {
    let (half, brain) = (f16::from_f64(VALUE), bf16::from_f64(VALUE));
    let rounded_half = ("rounded terms", "the term is stored as 0.0100021362");
    [
        sum::<f32, _>(
            VALUE as f32,
            "f32",
            (
                "rounded additions",
                "each addition is rounded to f32, whose numbers near the sum are 9.54e-7 apart",
            ),
        ),
        sum::<f16, _>(
            half,
            "f16",
            (
                "rounded additions",
                "each addition is rounded to f16, whose numbers near the sum are 0.0078125 apart",
            ),
        ),
        sum::<f32, _>(half, "f16", rounded_half),
        sum::<f32, _>(half.to_f32(), "f16, cast to f32", rounded_half),
        sum::<bf16, _>(
            brain,
            "bf16",
            (
                "unchanged after 350",
                "the 350th addition is the last that changes the sum: 0.0100 is less than half of 0.03125, the \
                 distance to the next number of bf16",
            ),
        ),
        sum::<f32, _>(
            brain,
            "bf16",
            ("rounded terms", "the term is stored as 0.0100097656"),
        ),
    ]
}

fn sum<A: FloatDType, T: FloatDType>(
    term: T,
    terms: &'static str,
    (cause, reason): (&'static str, &'static str),
) -> Sum {
    let sum = running_sum::<A, T>(&[term; COUNT]).to_f64();
    let of_stored = term.to_f64() * COUNT as f64; // 24 bits times a count: exact in f64
    Sum {
        accumulator: A::DTYPE.as_str(),
        terms,
        sum,
        error: sum - EXACT,
        error_percent: 100.0 * (sum - EXACT) / EXACT,
        error_of_terms: of_stored - EXACT,
        error_of_additions: sum - of_stored,
        cause,
        reason,
    }
}

/// Returns what the exercise asks, from [`rows`].
pub fn answers(rows: &[Sum; 6]) -> [Answer; 2] {
    let [single, half, mixed, _, brain, wide] = rows.each_ref().map(|row| {
        format!(
            "{} terms in {}: {:.8} ({:+.4}%); {}.",
            row.terms, row.accumulator, row.sum, row.error_percent, row.reason
        )
    });
    [
        Answer::new(
            "How accurate are the four sums of the exercise?",
            format!(
                "{single} {half} {mixed} Casting the terms to f32 first gives the same sum: it cannot restore what f16 \
                 has rounded away."
            ),
        ),
        Answer::new(
            "What does an f32 accumulator change for bf16?",
            format!(
                "{brain} {wide} With the same terms the f32 accumulator is nearer to the exact sum, which is why \
                 matmuls in half precision accumulate in f32."
            ),
        ),
    ]
}
