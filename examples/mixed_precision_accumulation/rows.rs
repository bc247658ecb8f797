//! 0.01 added up a thousand times, in several precisions.

use candle_core::FloatDType;
use half::{bf16, f16};
use serde_json::Value;
use tallow::precision::accumulate::running_sums;
use tallow::report::{Answer, Fields};

pub const VALUE: f64 = 0.01;
pub const COUNT: usize = 1000;
pub const EXACT: f64 = 10.0;

/// Computes the sums and their errors: the exercise's four first, in its order.
pub fn rows() -> [Fields; 6] {
    let (half, brain) = (f16::from_f64(VALUE), bf16::from_f64(VALUE));
    [
        sum::<f32, _>("f32", VALUE as f32),
        sum::<f16, _>("f16", half),
        sum::<f32, _>("f16", half),
        sum::<f32, _>("f16, cast to f32", half.to_f32()),
        sum::<bf16, _>("bf16", brain),
        sum::<f32, _>("bf16", brain),
    ]
}

/// Returns a sum in `A`, with its error in two parts: that of the terms before they are added, and that of the
/// additions.
fn sum<A: FloatDType, T: FloatDType>(terms: &str, term: T) -> Fields {
    let sums: Vec<A> = running_sums(&[term; COUNT]).collect();
    let sum = sums[COUNT - 1].to_f64();
    let of_stored = term.to_f64() * COUNT as f64; // 24 bits times a count: exact in f64
    let (error_of_terms, error_of_additions) = (of_stored - EXACT, sum - of_stored);
    let changes = sums.iter().take_while(|partial| partial.to_f64() != sum);
    let cause = match changes.count() + 1 {
        COUNT if error_of_terms.abs() > error_of_additions.abs() => "rounded terms".into(),
        COUNT => "rounded additions".into(),
        last => format!("unchanged after {last}"),
    };
    let mut row = Fields::from_iter([("accumulator", A::DTYPE.as_str()), ("terms", terms)]);
    row.insert("sum", sum)
        .insert("error_percent", 100.0 * (sum - EXACT) / EXACT)
        .insert("error_of_terms", error_of_terms)
        .insert("error_of_additions", error_of_additions)
        .insert("cause", cause);
    row
}

/// Returns what the exercise asks, with the figures of [`rows`].
pub fn answers(rows: &[Fields; 6]) -> [Answer; 2] {
    let [single, half, mixed, _, brain, wide] = rows.each_ref().map(|row| {
        let number = |key: &str| row.get(key).and_then(Value::as_f64).unwrap_or(f64::NAN);
        format!("{:.8} ({:+.4}%)", number("sum"), number("error_percent"))
    });
    let half_term = f16::from_f64(VALUE).to_f64();
    let brain_term = bf16::from_f64(VALUE).to_f64();
    let four = format!(
        "f32 terms in f32: {single}; each addition is rounded to f32, whose numbers near the sum are 9.54e-7 apart. f16 \
         terms in f16: {half}; each addition is rounded to f16, whose numbers near the sum are 0.0078125 apart. f16 terms \
         in f32: {mixed}; the term is stored as {half_term:.10}. Casting the terms to f32 first gives the same sum: it \
         cannot restore what f16 has rounded away."
    );
    let in_bf16 = format!(
        "bf16 terms in bf16: {brain}; the 350th addition is the last that changes the sum: {brain_term:.4} is less than \
         half of 0.03125, the distance to the next number of bf16. bf16 terms in f32: {wide}; the term is stored as \
         {brain_term:.10}. With the same terms the f32 accumulator is nearer to the exact sum, which is why matmuls in \
         half precision accumulate in f32."
    );
    [
        Answer::new("How accurate are the four sums of the exercise?", four),
        Answer::new("What does an f32 accumulator change for bf16?", in_bf16),
    ]
}
