//! What the rows of several precisions say together: the numbers here, the sentences and a table in `words`.

mod words;

use serde::Serialize;
use serde_json::Value;
use tallow::precision::Precision;
use tallow::report::Fields;

/// Half precision beside f32, from the rows of [`EndToEnd`](tallow::bench::EndToEnd), any number of runs together.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct PrecisionAnalysis {
    /// In the order in which the rows come.
    pub configurations: Vec<ComparedPrecisions>,
}

/// One configuration in every precision that it was run in.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ComparedPrecisions {
    /// What it is: `size` (if the rows have it), `d_model`, `num_layers`, `parameters`, `batch_size`, `context_length`,
    /// `attention`, `mode`.
    pub labels: Fields,
    /// The precisions, as they come.
    pub sides: Vec<PrecisionSide>,
}

/// One configuration in one precision: its step as a whole.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct PrecisionSide {
    /// Its name, as [`Precision::name`].
    pub precision: String,
    /// `ok` or `OOM`.
    pub status: String,
    /// The step's mean.
    pub mean_ms: Option<f64>,
    /// The standard deviation of its times.
    pub std_ms: Option<f64>,
    /// The step's median.
    pub median_ms: Option<f64>,
    /// Tokens a second at the median.
    pub tokens_per_s: Option<f64>,
    /// The most alive at once, measured.
    pub peak_bytes: Option<u64>,
    /// The most that the GPU's pool held, used or not.
    pub reserved_peak_bytes: Option<u64>,
    /// The peak, predicted.
    pub estimate_bytes: Option<u64>,
    /// What kept copies of the weights in half precision take of it.
    pub weight_cast_bytes: Option<u64>,
    /// f32's median over this one.
    pub speedup: Option<f64>,
    /// `100 (1 - peak / f32's peak)`; negative where it takes more.
    pub memory_saved_percent: Option<f64>,
    /// The same of the predictions.
    pub predicted_saved_percent: Option<f64>,
}

/// What rows must agree in to be compared.
const LABELS: [&str; 8] = [
    "size",
    "d_model",
    "num_layers",
    "parameters",
    "batch_size",
    "context_length",
    "attention",
    "mode",
];

impl PrecisionAnalysis {
    /// Reads the rows of whole steps, and passes over those of phases. Rows of one configuration may stand apart; the
    /// last of several with one precision counts.
    pub fn of(rows: &[Fields]) -> Self {
        let mut analysis = Self::default();
        for row in rows.iter().filter(|row| is_whole_step(row)) {
            let labels = LABELS.iter();
            let labels: Fields = labels
                .filter_map(|key| Some((*key, row.get(key)?.clone())))
                .collect();
            let all = &mut analysis.configurations;
            let place = all.iter().position(|c| c.labels == labels);
            let place = place.unwrap_or_else(|| {
                let sides = Vec::new();
                all.push(ComparedPrecisions { labels, sides });
                all.len() - 1
            });
            let side = PrecisionSide::read(row);
            let sides = &mut all[place].sides;
            match sides.iter_mut().find(|s| s.precision == side.precision) {
                Some(earlier) => *earlier = side,
                None => sides.push(side),
            }
        }
        for configuration in &mut analysis.configurations {
            configuration.compare();
        }
        analysis
    }

    /// Every precision there is, in the order in which they come.
    pub fn precisions(&self) -> Vec<&str> {
        let mut names = Vec::new();
        for side in self.configurations.iter().flat_map(|c| &c.sides) {
            if !names.contains(&side.precision.as_str()) {
                names.push(side.precision.as_str());
            }
        }
        names
    }
}

impl ComparedPrecisions {
    /// The side with that precision.
    pub fn side(&self, precision: &str) -> Option<&PrecisionSide> {
        self.sides.iter().find(|side| side.precision == precision)
    }

    /// What fits: `ok` where all do; else who does not, and who does all the same, `bf16 avoids OOM`.
    pub fn outcome(&self) -> String {
        let names = |fits: bool| {
            let sides = self.sides.iter().filter(|side| side.fits() == fits);
            let names: Vec<&str> = sides.map(|side| side.precision.as_str()).collect();
            (!names.is_empty()).then(|| names.join(", "))
        };
        match (names(true), names(false)) {
            (_, None) => "ok".into(),
            (None, Some(_)) if self.sides.len() > 1 => "OOM in all".into(),
            (None, Some(_)) => "OOM".into(),
            (Some(fits), Some(_)) if self.f32().is_some_and(|side| !side.fits()) => {
                let verb = if fits.contains(',') {
                    "avoid"
                } else {
                    "avoids"
                };
                format!("{fits} {verb} OOM")
            }
            (_, Some(fails)) => format!("{fails} OOM"),
        }
    }

    fn f32(&self) -> Option<&PrecisionSide> {
        self.side(Precision::F32.name())
    }

    /// Holds every other side against f32.
    fn compare(&mut self) {
        let Some(base) = self.f32().cloned() else {
            return;
        };
        let saved = |base: Option<u64>, own: Option<u64>| {
            let (base, own) = (base? as f64, own? as f64);
            (base > 0.0).then(|| 100.0 * (1.0 - own / base))
        };
        for side in &mut self.sides {
            if side.precision == base.precision {
                continue;
            }
            side.speedup = base
                .median_ms
                .zip(side.median_ms)
                .map(|(base, own)| base / own);
            side.memory_saved_percent = saved(base.peak_bytes, side.peak_bytes);
            side.predicted_saved_percent = saved(base.estimate_bytes, side.estimate_bytes);
        }
    }
}

impl PrecisionSide {
    fn read(row: &Fields) -> Self {
        let text = |key: &str| {
            let text = row.get(key).and_then(Value::as_str);
            text.unwrap_or_default().to_string()
        };
        let number = |key: &str| row.get(key).and_then(Value::as_f64);
        let bytes = |key: &str| row.get(key).and_then(Value::as_u64);
        Self {
            precision: text("precision"),
            status: text("status"),
            mean_ms: number("mean_ms"),
            std_ms: number("std_ms"),
            median_ms: number("median_ms"),
            tokens_per_s: number("tokens_per_s"),
            peak_bytes: bytes("peak_bytes"),
            reserved_peak_bytes: bytes("reserved_peak_bytes"),
            estimate_bytes: bytes("estimate_bytes"),
            weight_cast_bytes: bytes("weight_cast_bytes"),
            ..Self::default()
        }
    }

    fn fits(&self) -> bool {
        self.status == "ok"
    }
}

/// Whether a row is its mode's own, not one phase of it.
fn is_whole_step(row: &Fields) -> bool {
    let text = |key: &str| row.get(key).and_then(Value::as_str);
    let whole = match text("mode") {
        Some("forward" | "forward-keeping-graph") => "forward",
        Some("forward-backward") => "forward+backward",
        Some("train-step") => "train step",
        _ => return false,
    };
    text("phase") == Some(whole)
}
