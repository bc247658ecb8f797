//! One number added up many times, in several precisions, and what the sums answer. The tests read both.

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
    /// What made most of the error, in two or three words.
    pub cause: String,
}

/// `count` times `value`, added up in several precisions: the four sums of the exercise first, in its order.
pub fn rows(value: f64, count: usize) -> Vec<Sum> {
    let single = vec![value as f32; count];
    let half = vec![f16::from_f64(value); count];
    let brain = vec![bf16::from_f64(value); count];
    let widened: Vec<f32> = half.iter().map(|term| term.to_f32()).collect();
    let exact = value * count as f64;
    vec![
        sum::<f32, _>(&single, "f32", exact),
        sum::<f16, _>(&half, "f16", exact),
        sum::<f32, _>(&half, "f16", exact),
        sum::<f32, _>(&widened, "f16, cast to f32", exact),
        sum::<bf16, _>(&brain, "bf16", exact),
        sum::<f32, _>(&brain, "bf16", exact),
    ]
}

fn sum<A: FloatDType, T: FloatDType>(terms: &[T], name: &'static str, exact: f64) -> Sum {
    let sum = running_sum::<A, T>(terms);
    let sum = sum.to_f64();
    let term = terms.first().map_or(0.0, |term| term.to_f64());
    let of_stored = term * terms.len() as f64; // 24 bits times a count: exact in f64
    let epsilon = match A::DTYPE {
        DType::BF16 => bf16::EPSILON.to_f64(),
        DType::F16 => f16::EPSILON.to_f64(),
        _ => f64::from(f32::EPSILON),
    };
    let mut row = Sum {
        accumulator: A::DTYPE.as_str(),
        terms: name,
        sum,
        error: sum - exact,
        error_percent: 100.0 * (sum - exact) / exact,
        error_of_terms: of_stored - exact,
        error_of_additions: sum - of_stored,
        term,
        spacing: epsilon * 2f64.powf(sum.abs().log2().floor()),
        last_change: last_change::<A, T>(terms),
        cause: String::new(),
    };
    row.cause = row.cause();
    row
}

/// The last addition that changes the sum; `None` if that is the last of all.
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

impl Sum {
    fn cause(&self) -> String {
        let [terms, additions] = [self.error_of_terms, self.error_of_additions].map(f64::abs);
        match self.last_change {
            _ if !self.sum.is_finite() => "overflow".into(),
            _ if self.error_of_terms + self.error_of_additions == 0.0 => "none".into(),
            Some(addition) => format!("unchanged after {}", group_digits(addition as u64)),
            None if terms >= additions => "rounded terms".into(),
            None if additions <= self.spacing / 2.0 => "rounded result".into(),
            None => "rounded additions".into(),
        }
    }

    /// The sum with its error and the reason.
    fn explained(&self) -> String {
        let Sum {
            accumulator, terms, ..
        } = self;
        let spacing = match self.spacing {
            wide if wide >= 1e-4 => wide.to_string(),
            narrow => format!("{narrow:.2e}"),
        };
        let reason = match self.cause.as_str() {
            "overflow" => format!("the sum is over the largest number of {accumulator}"),
            "none" => "no error is left after rounding".into(),
            "rounded terms" => format!("the term is stored as {:.10}", self.term),
            "rounded result" => format!("only the result is rounded to {accumulator}"),
            "rounded additions" => format!(
                "each addition is rounded to {accumulator}, whose numbers near the sum are {spacing} apart"
            ),
            _ => format!(
                "the {}th addition is the last that changes the sum: {:.4} is less than half of {spacing}, the \
                 distance to the next number of {accumulator}",
                self.last_change.unwrap_or_default(),
                self.term
            ),
        };
        let (sum, percent) = (self.sum, self.error_percent);
        format!("{terms} terms in {accumulator}: {sum:.8} ({percent:+.4}%); {reason}.")
    }
}

/// What the exercise asks, from [`rows`].
pub fn answers(rows: &[Sum]) -> Vec<Answer> {
    let running = |accumulator: &str, terms: &str| {
        let mut rows = rows.iter();
        rows.find(|row| (row.accumulator, row.terms) == (accumulator, terms))
    };
    let mut answers = Vec::new();
    let four = ["f32", "f16"].map(|dtype| running(dtype, dtype));
    if let ([Some(single), Some(half)], Some(mixed), Some(cast)) = (
        four,
        running("f32", "f16"),
        running("f32", "f16, cast to f32"),
    ) {
        let mut text: Vec<String> = [single, half, mixed].map(Sum::explained).to_vec();
        text.extend((mixed.sum == cast.sum).then(|| {
            "Casting the terms to f32 first gives the same sum: it cannot restore what f16 has rounded away.".into()
        }));
        let question = "How accurate are the four sums of the exercise?";
        answers.push(Answer::new(question, text.join(" ")));
    }
    if let (Some(brain), Some(mixed)) = (running("bf16", "bf16"), running("f32", "bf16")) {
        let conclusion = match mixed.error.abs() < brain.error.abs() {
            true => {
                "With the same terms the f32 accumulator is nearer to the exact sum, which is why matmuls in half \
                 precision accumulate in f32."
            }
            false => "With these terms the f32 accumulator is no nearer to the exact sum.",
        };
        let text = format!("{} {} {conclusion}", brain.explained(), mixed.explained());
        let question = "What does an f32 accumulator change for bf16?";
        answers.push(Answer::new(question, text));
    }
    answers
}
