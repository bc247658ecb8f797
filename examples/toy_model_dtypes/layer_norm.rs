//! Layer norm's statistics in few bits.

use candle_core::FloatDType;
use half::{bf16, f16};
use serde::Serialize;
use tallow::model::ToyModel;
use tallow::precision::accumulate::running_sum;
use tallow::report::Answer;

/// Elements of a row: a usual model width.
const WIDTH: usize = 1024;

/// Activations: their name, mean and standard deviation.
const ACTIVATIONS: [(&str, f64, f64); 4] = [
    ("ordinary", 0.0, 1.0),
    ("large", 0.0, 300.0),
    ("offset", 100.2, 1.0),
    ("small", 0.0, 1e-4),
];

/// The error of layer norm of one kind of activations in one arithmetic, from f64 on the same stored numbers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Norm {
    pub activations: &'static str,
    /// The dtype of the activations.
    pub stored: &'static str,
    /// The dtype of the computation.
    pub computed: String,
    /// In digits, because JSON has no number for infinity.
    pub variance: String,
    pub exact_variance: String,
    pub variance_error_percent: f64,
    pub output_error_percent: f64,
}

/// Returns a row for each kind of activations, stored in f16 and in bf16, and computed in that dtype, in that dtype
/// with sums in f32, and in f32.
pub fn rows() -> Vec<Norm> {
    let mut rows = Vec::new();
    for (name, mean, std) in ACTIVATIONS {
        let values = normal(mean, std);
        rows.extend(stored_as::<f16>(name, &values));
        rows.extend(stored_as::<bf16>(name, &values));
    }
    rows
}

fn stored_as<T: FloatDType>(activations: &'static str, values: &[f64]) -> [Norm; 3] {
    let stored: Vec<T> = values.iter().map(|value| T::from_f64(*value)).collect();
    let double: Vec<f64> = stored.iter().map(|value| value.to_f64()).collect();
    let single: Vec<f32> = double.iter().map(|value| *value as f32).collect();
    let (exact, exact_y) = layer_norm::<f64, f64>(&double);
    let dtype = T::DTYPE.as_str();
    let sums_in_f32 = format!("{dtype}, sums in f32");
    [
        (dtype.to_string(), layer_norm::<T, T>(&stored)),
        (sums_in_f32, layer_norm::<T, f32>(&stored)),
        ("f32".to_string(), layer_norm::<f32, f32>(&single)),
    ]
    .map(|(computed, (variance, y))| Norm {
        activations,
        stored: dtype,
        computed,
        variance: digits(variance),
        exact_variance: digits(exact),
        variance_error_percent: 100.0 * (variance - exact) / exact,
        output_error_percent: 100.0 * distance(&y, &exact_y),
    })
}

fn digits(value: f64) -> String {
    match value.is_finite() {
        true => format!("{value:.6e}"),
        false => value.to_string(),
    }
}

/// Returns the variance, and `(x - mean) / sqrt(variance + eps)`. Results are rounded to `T`, sums are in `S`.
fn layer_norm<T: FloatDType, S: FloatDType>(x: &[T]) -> (f64, Vec<f64>) {
    let mean_of = |x: &[T]| T::from_f64(running_sum::<S, T>(x).to_f64() / x.len() as f64);
    let mean = mean_of(x);
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

/// Returns what the exercise asks about layer norm, from [`rows`].
pub fn answers(rows: &[Norm]) -> [Answer; 2] {
    let of = |activations: &str, stored: &str, computed: &str| {
        let mut own = rows
            .iter()
            .filter(|row| row.activations == activations && row.stored == stored);
        own.find(|row| row.computed == computed)
            .expect("rows have every combination")
    };
    let [large, small, half] =
        ["large", "small", "offset"].map(|activations| of(activations, "f16", "f16, sums in f32"));
    let brain = of("offset", "bf16", "bf16, sums in f32");
    let sums = of("ordinary", "bf16", "bf16");
    let sensitive = format!(
        "The variance, because it is a sum of squares. In f16, activations with a standard deviation of 300 have squares \
         near 90,000, which are over its largest number, 65,504: the variance is {} and the output is off by {:.2}%. \
         Activations near 1e-4 have squares near 1e-8, under f16's smallest number: the variance is off by {:.2}%. \
         Computed in f32 from the same f16 activations, both variances are off by at most 0.01%.",
        large.variance,
        large.output_error_percent.abs(),
        small.variance_error_percent.abs(),
    );
    let bf16_too = format!(
        "For its range, no: bf16 has the exponents of f32, so that these squares neither overflow nor vanish. For its \
         accuracy, yes: bf16 has 8 significant bits and f16 has 11. For activations with mean 100.2 the output is off by \
         {:.2}% in bf16, {:.2}% in f16 (sums in f32), and less than 0.01% when layer norm computes in f32 from the bf16 \
         numbers. With sums in bf16 as well, the variance of ordinary activations is off by {:.2}%. PyTorch's policy for \
         CUDA therefore computes layer norm in f32 for both dtypes.",
        brain.output_error_percent.abs(),
        half.output_error_percent.abs(),
        sums.variance_error_percent.abs(),
    );
    [
        Answer::new(
            "Which parts of layer norm are sensitive to mixed precision?",
            sensitive,
        ),
        Answer::new(
            "Does layer norm need to be treated differently with bf16?",
            bf16_too,
        ),
    ]
}
