//! Layer norm's statistics in few bits.

use candle_core::FloatDType;
use half::{bf16, f16};
use serde_json::Value;
use tallow::model::ToyModel;
use tallow::precision::accumulate::running_sum;
use tallow::report::{Answer, Column, Fields};

/// Elements of a row: a usual model width.
const WIDTH: usize = 1024;

/// Activations: their name, mean and standard deviation.
const ACTIVATIONS: [(&str, f64, f64); 4] = [
    ("ordinary", 0.0, 1.0),
    ("large", 0.0, 300.0),
    ("offset", 100.2, 1.0),
    ("small", 0.0, 1e-4),
];

/// Returns six rows for each kind of activations: stored in f16 and in bf16, and computed in that dtype, in that dtype
/// with sums in f32, and in f32.
pub fn rows() -> Vec<Fields> {
    let of_kind = |(name, mean, std)| {
        let values = &normal(mean, std);
        [
            row::<f16, f16, f16>(name, values),
            row::<f16, f16, f32>(name, values),
            row::<f16, f32, f32>(name, values),
            row::<bf16, bf16, bf16>(name, values),
            row::<bf16, bf16, f32>(name, values),
            row::<bf16, f32, f32>(name, values),
        ]
    };
    ACTIVATIONS.into_iter().flat_map(of_kind).collect()
}

/// Computes layer norm of activations stored in `A`, with results in `T` and sums in `S`. Errors are measured from f64 on
/// the same stored numbers.
fn row<A: FloatDType, T: FloatDType, S: FloatDType>(kind: &str, values: &[f64]) -> Fields {
    let stored: Vec<f64> = values.iter().map(|x| A::from_f64(*x).to_f64()).collect();
    let (exact, exact_y) = layer_norm::<f64, f64>(&stored);
    let (variance, y) = layer_norm::<T, S>(&stored);
    let [stored, computed, sums] = [A::DTYPE, T::DTYPE, S::DTYPE].map(|dtype| dtype.as_str());
    let computed = match computed == sums {
        true => computed.into(),
        false => format!("{computed}, sums in {sums}"),
    };
    let digits = match variance.is_finite() {
        true => format!("{variance:.6e}"),
        false => variance.to_string(), // JSON has no number for infinity
    };
    let mut row = Fields::from_iter([("activations", kind), ("stored", stored)]);
    row.insert("computed", computed)
        .insert("variance", digits)
        .insert("variance_error_percent", 100.0 * (variance - exact) / exact)
        .insert("output_error_percent", 100.0 * distance(&y, &exact_y));
    row
}

/// Returns the variance, and `(x - mean) / sqrt(variance + eps)`. Results are rounded to `T`, sums are in `S`.
fn layer_norm<T: FloatDType, S: FloatDType>(x: &[f64]) -> (f64, Vec<f64>) {
    let mean_of = |x: &[T]| T::from_f64(running_sum::<S, T>(x).to_f64() / x.len() as f64);
    let x: Vec<T> = x.iter().map(|x| T::from_f64(*x)).collect();
    let mean = mean_of(&x);
    let centred: Vec<T> = x.iter().map(|x| *x - mean).collect();
    let squares: Vec<T> = centred.iter().map(|c| *c * *c).collect();
    let variance = mean_of(&squares);
    let root = T::from_f64((variance + T::from_f64(ToyModel::EPS)).to_f64().sqrt());
    let rstd = T::from_f64(1.0) / root;
    let y = centred.iter().map(|c| (*c * rstd).to_f64()).collect();
    (variance.to_f64(), y)
}

/// |a - b| / |b|.
fn distance(a: &[f64], b: &[f64]) -> f64 {
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|v| v * v).sum::<f64>().sqrt();
    norm(&mut a.iter().zip(b).map(|(a, b)| a - b)) / norm(&mut b.iter().copied())
}

/// Returns fixed, normally distributed numbers: Box and Muller's on a lattice of low discrepancy.
fn normal(mean: f64, std: f64) -> Vec<f64> {
    const GOLDEN: f64 = 0.618_033_988_749_894_9;
    let values = (0..WIDTH).map(|i| {
        let radius = (-2.0 * ((i as f64 + 0.5) / WIDTH as f64).ln()).sqrt();
        let angle = std::f64::consts::TAU * (i as f64 * GOLDEN).fract();
        mean + std * radius * angle.cos()
    });
    values.collect()
}

/// Returns what the exercise asks about layer norm, with the figures of [`rows`].
pub fn answers(rows: &[Fields]) -> [Answer; 2] {
    let percent = |[activations, stored, computed]: [&str; 3], key: &str| {
        let labels = [
            ("activations", activations),
            ("stored", stored),
            ("computed", computed),
        ];
        let is_own = |row: &&Fields| {
            labels
                .iter()
                .all(|(key, label)| row.get(key) == Some(&(*label).into()))
        };
        let value = rows
            .iter()
            .find(is_own)
            .and_then(|row| row.get(key)?.as_f64());
        Column::number("", "", "%", 2).cell(value.map(f64::abs).map(Value::from).as_ref())
    };
    let [f16, bf16] = ["f16, sums in f32", "bf16, sums in f32"];
    let large = percent(["large", "f16", f16], "output_error_percent");
    let small = percent(["small", "f16", f16], "variance_error_percent");
    let half = percent(["offset", "f16", f16], "output_error_percent");
    let brain = percent(["offset", "bf16", bf16], "output_error_percent");
    let sums = percent(["ordinary", "bf16", "bf16"], "variance_error_percent");
    let sensitive = format!(
        "The variance, because it is a sum of squares. f16 ends at 65,504, and activations with a standard deviation of \
         300 have squares near 90,000: the variance is inf and the output is off by {large}%. Activations near 1e-4 have \
         squares near 1e-8, under f16's smallest number: the variance is off by {small}%. Computed in f32 from the same \
         f16 activations, both variances are off by at most 0.01%."
    );
    let with_bf16 = format!(
        "For its range, no: bf16 has the exponents of f32, so that these squares neither overflow nor vanish. For its \
         accuracy, yes: bf16 has 8 significant bits and f16 has 11. For activations with mean 100.2 the output is off by \
         {brain}% in bf16, {half}% in f16 (sums in f32), and less than 0.01% in f32. With sums in bf16 as well, the \
         variance of ordinary activations is off by {sums}%. PyTorch's policy for CUDA therefore computes layer norm in \
         f32 for both dtypes."
    );
    [
        Answer::new(
            "Which parts of layer norm are sensitive to mixed precision?",
            sensitive,
        ),
        Answer::new(
            "Does layer norm need to be treated differently with bf16?",
            with_bf16,
        ),
    ]
}
