//! What becomes of layer norm's statistics in few bits: numbers, and the paragraph that they add up to.

use candle_core::FloatDType;
use half::{bf16, f16};
use tallow::model::ToyModel;
use tallow::precision::accumulate::running_sum;
use tallow::report::Fields;

/// Elements of a row: a model's usual width.
const WIDTH: usize = 1024;

/// Activations: their name, mean and standard deviation.
const ACTIVATIONS: [(&str, f64, f64); 4] = [
    ("ordinary", 0.0, 1.0),
    ("large", 0.0, 300.0),
    ("offset", 100.2, 1.0),
    ("small", 0.0, 1e-4),
];

/// Layer norm of each kind of activations, stored in f16 and in bf16 (as autocast hands them over), computed in that
/// type throughout, with its sums in f32, and in f32: the variance, and how far it and the output are from f64's.
pub fn rows() -> Vec<Fields> {
    let mut rows = Vec::new();
    for (name, mean, std) in ACTIVATIONS {
        let values = normal(mean, std);
        rows.extend(stored_as::<f16>(name, &values));
        rows.extend(stored_as::<bf16>(name, &values));
    }
    rows
}

fn stored_as<T: FloatDType>(name: &str, values: &[f64]) -> [Fields; 3] {
    let stored: Vec<T> = values.iter().map(|value| T::from_f64(*value)).collect();
    let single: Vec<f32> = stored.iter().map(|value| value.to_f64() as f32).collect();
    let double: Vec<f64> = stored.iter().map(|value| value.to_f64()).collect();
    let wanted = layer_norm::<f64, f64>(&double);
    let dtype = T::DTYPE.as_str();
    [
        (dtype.to_string(), layer_norm::<T, T>(&stored)),
        (
            format!("{dtype}, sums in f32"),
            layer_norm::<T, f32>(&stored),
        ),
        ("f32".to_string(), layer_norm::<f32, f32>(&single)),
    ]
    .map(|(computed_in, got)| {
        let mut row = Fields::new();
        row.insert("activations", name);
        row.insert("stored", dtype);
        row.insert("computed", computed_in);
        row.insert("variance", number(got.variance));
        row.insert("exact_variance", number(wanted.variance));
        let error = (got.variance - wanted.variance) / wanted.variance;
        row.insert("variance_error_percent", 100.0 * error);
        row.insert("output_error_percent", 100.0 * distance(&got.y, &wanted.y));
        row
    })
}

/// To six digits; infinity by name, for JSON has no number for it.
fn number(value: f64) -> String {
    match value.is_finite() {
        true => format!("{value:.6e}"),
        false => value.to_string(),
    }
}

struct Normalised {
    variance: f64,
    y: Vec<f64>,
}

/// `(x - mean) / sqrt(variance + eps)`, every result rounded to `T`, sums kept in `S`.
fn layer_norm<T: FloatDType, S: FloatDType>(x: &[T]) -> Normalised {
    let mean_of = |x: &[T]| T::from_f64(running_sum::<S, T>(x).to_f64() / x.len() as f64);
    let mean = mean_of(x);
    let centred: Vec<T> = x.iter().map(|x| *x - mean).collect();
    let squares: Vec<T> = centred.iter().map(|c| *c * *c).collect();
    let variance = mean_of(&squares);
    let root = T::from_f64((variance + T::from_f64(ToyModel::EPS)).to_f64().sqrt());
    let rstd = T::from_f64(1.0) / root;
    Normalised {
        variance: variance.to_f64(),
        y: centred.iter().map(|c| (*c * rstd).to_f64()).collect(),
    }
}

/// |a - b| / |b|.
fn distance(a: &[f64], b: &[f64]) -> f64 {
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|v| v * v).sum::<f64>().sqrt();
    norm(&mut a.iter().zip(b).map(|(a, b)| a - b)) / norm(&mut b.iter().copied())
}

/// Numbers spread as a normal distribution's, the same every time: Box and Muller's on a lattice of low discrepancy.
fn normal(mean: f64, std: f64) -> Vec<f64> {
    const GOLDEN: f64 = 0.618_033_988_749_894_9;
    (0..WIDTH)
        .map(|i| {
            let radius = (-2.0 * ((i as f64 + 0.5) / WIDTH as f64).ln()).sqrt();
            let angle = std::f64::consts::TAU * (i as f64 * GOLDEN).fract();
            mean + std * radius * angle.cos()
        })
        .collect()
}

/// Why layer norm is kept in f32, and what bf16 changes, in sentences with the numbers of `rows`.
pub fn answer(rows: &[Fields]) -> Vec<String> {
    let find = |key: &str, activations: &str, stored: &str, computed: &str| {
        let is = |row: &&Fields, key: &str, value: &str| row.get(key) == Some(&value.into());
        let row = rows.iter().find(|row| {
            is(row, "activations", activations)
                && is(row, "stored", stored)
                && is(row, "computed", computed)
        });
        row.and_then(|row| row.get(key))
            .cloned()
            .unwrap_or_default()
    };
    let percent = |key, activations, stored, computed| {
        let value = find(key, activations, stored, computed);
        match value.as_f64().map(f64::abs) {
            None => "n/a".to_string(),
            Some(percent) if percent < 0.01 => "under 0.01%".to_string(),
            Some(percent) => format!("{percent:.2}%"),
        }
    };
    let text = |key, activations, stored, computed| {
        let value = find(key, activations, stored, computed);
        value.as_str().unwrap_or("n/a").to_string()
    };
    let (f16_sums, bf16_sums) = ("f16, sums in f32", "bf16, sums in f32");
    vec![
        "Layer norm subtracts a mean, takes the mean of squares and divides by its root: each of these is \
         sensitive.".into(),
        format!(
            "In f16, activations of standard deviation 300 have squares of 90,000, past f16's largest number of {}: \
             the \
             variance is {} even with sums in f32, and the output is off by {}.",
            f16::MAX,
            text("variance", "large", "f16", f16_sums),
            percent("output_error_percent", "large", "f16", f16_sums),
        ),
        format!(
            "Activations of 1e-4 have squares of 1e-8, under f16's smallest: the variance is off by {}, which only eps \
             makes harmless.",
            percent("variance_error_percent", "small", "f16", f16_sums),
        ),
        format!(
            "So autocast computes layer norm in f32, from f16 activations: the variances are off by {} and {}.",
            percent("variance_error_percent", "large", "f16", "f32"),
            percent("variance_error_percent", "small", "f16", "f32"),
        ),
        "bf16 has f32's range: nothing overflows or vanishes, and for the range layer norm need not be treated \
         apart.".into(),
        format!(
            "But bf16 has 8 bits where f16 has 11: ordinary activations' variance is off by {} with sums in bf16, \
             which \
             stand still once a term is too small for them.",
            percent("variance_error_percent", "ordinary", "bf16", "bf16"),
        ),
        format!(
            "With sums in f32 the output is still off by {} (f16: {}), and by {} for activations of mean 100.2 (f16: \
             {}); \
             in f32 from the same bf16 numbers by {}.",
            percent("output_error_percent", "ordinary", "bf16", bf16_sums),
            percent("output_error_percent", "ordinary", "f16", f16_sums),
            percent("output_error_percent", "offset", "bf16", bf16_sums),
            percent("output_error_percent", "offset", "f16", f16_sums),
            percent("output_error_percent", "offset", "bf16", "f32"),
        ),
        "So f32 stays for accuracy: PyTorch's CUDA policy keeps layer norm in f32 for both.".into(),
        "Its CPU policy lets layer norm follow its input, which saves memory and not accuracy: the kernel, there as \
         here, \
         computes statistics in f32 and rounds the output alone."
            .into(),
    ]
}
