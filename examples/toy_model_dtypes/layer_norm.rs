//! Layer norm's statistics in few bits: the figures, and what they answer. The tests read both.

use candle_core::FloatDType;
use half::{bf16, f16};
use serde::Serialize;
use tallow::model::ToyModel;
use tallow::precision::accumulate::running_sum;
use tallow::report::{Answer, group_digits};

/// Elements of a row: a usual model width.
const WIDTH: usize = 1024;

/// Activations: their name, mean and standard deviation.
const ACTIVATIONS: [(&str, f64, f64); 4] = [
    ("ordinary", 0.0, 1.0),
    ("large", 0.0, 300.0),
    ("offset", 100.2, 1.0),
    ("small", 0.0, 1e-4),
];

/// Layer norm of one kind of activations in one arithmetic, compared with f64 on the same stored numbers.
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

/// Each kind of activations, stored in f16 and in bf16, computed in that dtype, with sums in f32, and in f32.
pub fn rows() -> Vec<Norm> {
    let rows = ACTIVATIONS.into_iter().flat_map(|(name, mean, std)| {
        let values = normal(mean, std);
        let rows = [
            stored_as::<f16>(name, &values),
            stored_as::<bf16>(name, &values),
        ];
        rows.into_iter().flatten()
    });
    rows.collect()
}

fn stored_as<T: FloatDType>(name: &'static str, values: &[f64]) -> [Norm; 3] {
    let stored: Vec<T> = values.iter().map(|value| T::from_f64(*value)).collect();
    let single: Vec<f32> = stored.iter().map(|value| value.to_f64() as f32).collect();
    let double: Vec<f64> = stored.iter().map(|value| value.to_f64()).collect();
    let (exact, exact_y) = layer_norm::<f64, f64>(&double);
    let dtype = T::DTYPE.as_str();
    [
        (dtype.to_string(), layer_norm::<T, T>(&stored)),
        (
            format!("{dtype}, sums in f32"),
            layer_norm::<T, f32>(&stored),
        ),
        ("f32".to_string(), layer_norm::<f32, f32>(&single)),
    ]
    .map(|(computed, (variance, y))| Norm {
        activations: name,
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

/// The variance, and `(x - mean) / sqrt(variance + eps)`: every result is rounded to `T`, sums are in `S`.
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

/// Normally distributed numbers, the same every time: Box and Muller's on a lattice of low discrepancy.
fn normal(mean: f64, std: f64) -> Vec<f64> {
    const GOLDEN: f64 = 0.618_033_988_749_894_9;
    let values = (0..WIDTH).map(|i| {
        let radius = (-2.0 * ((i as f64 + 0.5) / WIDTH as f64).ln()).sqrt();
        let angle = std::f64::consts::TAU * (i as f64 * GOLDEN).fract();
        mean + std * radius * angle.cos()
    });
    values.collect()
}

/// What the exercise asks about layer norm, from [`rows`]; nothing where one of the rows is missing.
pub fn answers(rows: &[Norm]) -> Vec<Answer> {
    sensitive_parts(rows)
        .into_iter()
        .chain(bf16_too(rows))
        .collect()
}

fn find<'r>(rows: &'r [Norm], activations: &str, stored: &str, computed: &str) -> Option<&'r Norm> {
    let is_it = |row: &&Norm| {
        (row.activations, row.stored, row.computed.as_str()) == (activations, stored, computed)
    };
    rows.iter().find(is_it)
}

fn percent(value: f64) -> String {
    match value.abs() {
        small if small < 0.01 => "less than 0.01%".into(),
        value => format!("{value:.2}%"),
    }
}

fn sensitive_parts(rows: &[Norm]) -> Option<Answer> {
    let of = |activations, computed| find(rows, activations, "f16", computed);
    let large = of("large", "f16, sums in f32")?;
    let small = of("small", "f16, sums in f32")?;
    let wide = ["large", "small"].map(|activations| of(activations, "f32"));
    let worst = wide
        .iter()
        .flatten()
        .map(|row| row.variance_error_percent.abs());
    let overflow = match large.variance.as_str() {
        "inf" => format!(
            "are over its largest number, {}: the variance is inf and the output is off by {}",
            group_digits(f16::MAX.to_f32() as u64),
            percent(large.output_error_percent)
        ),
        variance => format!("still fit: the variance is {variance}"),
    };
    let text = format!(
        "The variance, because it is a sum of squares. In f16, activations with a standard deviation of 300 have squares \
         near 90,000, which {overflow}. Activations near 1e-4 have squares near 1e-8, under f16's smallest number: the \
         variance is off by {}. Computed in f32 from the same f16 activations, both variances are off by at most {}.",
        percent(small.variance_error_percent),
        percent(worst.fold(0.0, f64::max)).replace("less than ", ""),
    );
    let question = "Which parts of layer norm are sensitive to mixed precision?";
    Some(Answer::new(question, text))
}

fn bf16_too(rows: &[Norm]) -> Option<Answer> {
    let of =
        |activations, dtype: &str| find(rows, activations, dtype, &format!("{dtype}, sums in f32"));
    let range = ["large", "small"].map(|activations| of(activations, "bf16"));
    let in_range = range
        .iter()
        .flatten()
        .all(|row| row.variance_error_percent.abs() < 1.0);
    let [brain, half] = ["bf16", "f16"].map(|dtype| of("offset", dtype));
    let [brain, half] = [brain?, half?].map(|row| row.output_error_percent);
    let sums = find(rows, "ordinary", "bf16", "bf16")?.variance_error_percent;
    let wide = find(rows, "offset", "bf16", "f32")?.output_error_percent;
    let start = match in_range {
        true => {
            "For its range, no: bf16 has the exponents of f32, so that these squares neither overflow nor vanish."
        }
        false => "Yes: with these activations the variance is wrong in bf16 as well.",
    };
    let accuracy = match wide < brain {
        true => "For its accuracy, yes",
        false => "For its accuracy, these figures show no need",
    };
    let text = format!(
        "{start} {accuracy}: bf16 has 8 significant bits and f16 has 11. For activations with mean 100.2 the output is \
         off by {} in bf16, {} in f16 (sums in f32), and {} when layer norm computes in f32 from the bf16 numbers. With \
         sums in bf16 as well, the variance of ordinary activations is off by {}. PyTorch's policy for CUDA therefore \
         computes layer norm in f32 for both dtypes.",
        percent(brain),
        percent(half),
        percent(wide),
        percent(sums),
    );
    let question = "Does layer norm need to be treated differently with bf16?";
    Some(Answer::new(question, text))
}
