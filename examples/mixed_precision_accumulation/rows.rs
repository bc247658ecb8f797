//! The table's rows: one number added up many times, in every way. The tests read these rows too.

use candle_core::{DType, FloatDType};
use half::{bf16, f16};
use tallow::precision::accumulate::{kahan_sum, pairwise_sum, running_sum, running_sums};
use tallow::report::Fields;

/// `count` times `value`, added up in every way: the four sums of the exercise first, in its order.
pub fn rows(value: f64, count: usize) -> Vec<Fields> {
    let single = vec![value as f32; count];
    let half = vec![f16::from_f64(value); count];
    let brain = vec![bf16::from_f64(value); count];
    let widened: Vec<f32> = half.iter().map(|term| term.to_f32()).collect();
    let wanted = value * count as f64;
    vec![
        row::<f32, _>(&single, "f32", Method::Running, wanted),
        row::<f16, _>(&half, "f16", Method::Running, wanted),
        row::<f32, _>(&half, "f16", Method::Running, wanted),
        row::<f32, _>(&widened, "f16, cast to f32", Method::Running, wanted),
        row::<bf16, _>(&brain, "bf16", Method::Running, wanted),
        row::<f32, _>(&brain, "bf16", Method::Running, wanted),
        row::<f32, _>(&single, "f32", Method::Kahan, wanted),
        row::<f16, _>(&half, "f16", Method::Kahan, wanted),
        row::<bf16, _>(&brain, "bf16", Method::Kahan, wanted),
        row::<f32, _>(&single, "f32", Method::Pairwise, wanted),
        row::<f16, _>(&half, "f16", Method::Pairwise, wanted),
        row::<bf16, _>(&brain, "bf16", Method::Pairwise, wanted),
    ]
}

#[derive(Clone, Copy, PartialEq)]
enum Method {
    Running,
    Kahan,
    Pairwise,
}

impl Method {
    fn name(self) -> &'static str {
        match self {
            Self::Running => "one by one",
            Self::Kahan => "Kahan",
            Self::Pairwise => "pairwise",
        }
    }
}

fn row<A: FloatDType, T: FloatDType>(
    terms: &[T],
    terms_name: &str,
    method: Method,
    wanted: f64,
) -> Fields {
    let sum = match method {
        Method::Running => running_sum::<A, T>(terms),
        Method::Kahan => kahan_sum::<A, T>(terms),
        Method::Pairwise => pairwise_sum::<A, T>(terms),
    };
    let sum = sum.to_f64();
    let term = terms.first().map_or(0.0, |term| term.to_f64());
    let exact = term * terms.len() as f64; // of the terms as they are: 24 bits times a count, exact in f64
    let stopped_at = match method {
        Method::Running => last_change::<A, T>(terms),
        _ => None,
    };
    let found = Found {
        accumulator: A::DTYPE,
        terms: terms.len(),
        term,
        term_dtype: terms_name.chars().take_while(|c| *c != ',').collect(),
        sum,
        of_terms: exact - wanted,
        of_additions: sum - exact,
        stopped_at,
    };
    let mut fields = Fields::new();
    fields.insert("accumulator", A::DTYPE.as_str());
    fields.insert("terms", terms_name);
    fields.insert("method", method.name());
    fields.insert("sum", sum);
    fields.insert("error", sum - wanted);
    fields.insert("error_percent", 100.0 * (sum - wanted) / wanted);
    fields.insert("error_of_terms", found.of_terms);
    fields.insert("error_of_additions", found.of_additions);
    fields.insert("stopped_at", stopped_at);
    fields.insert("cause", found.cause());
    fields
}

/// The addition after which the sum stands still; `None` where it moves to the end.
fn last_change<A: FloatDType, T: FloatDType>(terms: &[T]) -> Option<usize> {
    let mut before = A::zero();
    let mut last = 0;
    for (i, sum) in running_sums::<A, T>(terms).enumerate() {
        if sum != before {
            last = i + 1;
        }
        before = sum;
    }
    (last < terms.len()).then_some(last)
}

/// A sum with what is known of its error.
struct Found {
    accumulator: DType,
    terms: usize,
    term: f64,
    term_dtype: String,
    sum: f64,
    of_terms: f64,
    of_additions: f64,
    stopped_at: Option<usize>,
}

impl Found {
    /// What made most of the error, in words and numbers.
    fn cause(&self) -> String {
        let accumulator = self.accumulator.as_str();
        if !self.sum.is_finite() {
            return format!("past the largest number of {accumulator}");
        }
        if self.of_terms + self.of_additions == 0.0 {
            let exact = self.sum - self.of_additions;
            return format!("none: the terms' sum, {exact:.8}, rounds to it");
        }
        let spacing = match self.spacing() {
            wide if wide >= 1e-4 => wide.to_string(),
            narrow => format!("{narrow:.2e}"),
        };
        if let Some(addition) = self.stopped_at {
            return format!(
                "stands still from addition {addition} on, where {accumulator} has a number every {spacing}"
            );
        }
        if self.of_terms.abs() >= self.of_additions.abs() {
            return format!("the term is {:.10} in {}", self.term, self.term_dtype);
        }
        if self.of_additions.abs() <= self.spacing() / 2.0 {
            return format!("the result is rounded to {accumulator}, to a multiple of {spacing}");
        }
        format!(
            "{} additions are each rounded to {accumulator}, the last to a multiple of {spacing}",
            self.terms
        )
    }

    /// From the sum to the accumulator's next number.
    fn spacing(&self) -> f64 {
        let epsilon = match self.accumulator {
            DType::BF16 => bf16::EPSILON.to_f64(),
            DType::F16 => f16::EPSILON.to_f64(),
            _ => f64::from(f32::EPSILON),
        };
        epsilon * 2f64.powf(self.sum.abs().log2().floor())
    }
}
