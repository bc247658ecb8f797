//! The comparison in words, and what copies of the weights cost as a table.

use super::{ComparedPrecisions, PrecisionAnalysis, PrecisionSide};
use serde_json::Value;
use tallow::precision::Precision;
use tallow::report::{Column, Fields, PowerLaw, Report, format_mib, list_in_note};

impl PrecisionAnalysis {
    /// The same in words: how fast and how large each precision is beside f32, how that changes with the model's size,
    /// what dropping casts changes, and what fits only in half precision.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        for precision in self.precisions() {
            notes.extend(self.speed(precision));
            notes.extend(self.trends(precision));
            notes.extend(self.memory(precision));
        }
        let all = &self.configurations;
        let dropping: Vec<String> = all.iter().flat_map(ComparedPrecisions::dropping).collect();
        if !dropping.is_empty() {
            notes.push(list_in_note(
                "Dropping casts of the weights, peak and time",
                &dropping,
            ));
        }
        notes.extend(all.iter().filter_map(ComparedPrecisions::room));
        notes
    }

    /// Where half precision saves memory and where it costs some: its kept copies of the weights, and everything else,
    /// a row for each configuration and precision. `None` where no copies are kept.
    pub fn copies(&self) -> Option<Report> {
        let mib = |key: &str, title: &str| Column::mib(key, title);
        let rows: Vec<Fields> = self
            .configurations
            .iter()
            .flat_map(ComparedPrecisions::copies)
            .collect();
        let report = Report {
            title: "Memory that half precision saves beside f32".into(),
            columns: vec![
                Column::text("name", "Configuration"),
                Column::text("precision", "Precision"),
                mib("saved_bytes", "Saved"),
                mib("rest_saved_bytes", "without copies"),
                mib("weight_cast_bytes", "Copies of the weights"),
            ],
            rows,
            notes: vec!["A negative number is memory that it takes beyond that of f32.".into()],
            ..Default::default()
        };
        (!report.rows.is_empty()).then_some(report)
    }

    /// `bf16 runs at 1.21x the speed of f32 (..), from 0.98x (tiny B4 T256 forward) to ...`.
    fn speed(&self, precision: &str) -> Option<String> {
        let found = self.values(precision, |side| side.speedup);
        let (least, most) = extremes(&found)?;
        let mean = geometric_mean(&found);
        let start = format!("{precision} runs at {mean:.2}x the speed of f32");
        Some(match found.len() {
            1 => format!("{start} ({}), by medians.", least.title),
            n => format!(
                "{start} (medians; geometric mean of {n}), from {:.2}x ({}) to {:.2}x ({}).",
                least.value, least.title, most.value, most.title
            ),
        })
    }

    /// How the speed-up changes with the model's size, for each mode that three sizes were measured in.
    fn trends(&self, precision: &str) -> Vec<String> {
        let mut modes: Vec<&Value> = Vec::new();
        for mode in self
            .configurations
            .iter()
            .filter_map(|c| c.labels.get("mode"))
        {
            if !modes.contains(&mode) {
                modes.push(mode);
            }
        }
        let trend = |mode: &Value| {
            let own = self.configurations.iter();
            let own = own.filter(|c| c.labels.get("mode") == Some(mode));
            let points: Vec<(f64, f64)> = own
                .filter_map(|c| {
                    Some((
                        c.labels.get("parameters")?.as_f64()?,
                        c.side(precision)?.speedup?,
                    ))
                })
                .collect();
            let law = PowerLaw::fit(&points)?;
            let mode = mode.as_str().unwrap_or_default();
            let grows = match law.exponent {
                x if x > 0.02 => "grows with the model's size",
                x if x < -0.02 => "falls with the model's size",
                _ => "does not depend on the model's size",
            };
            Some(format!(
                "{precision}, {mode}: the speed-up {grows}, as parameters^{:.2} (least squares in logs, {} \
                 configurations).",
                law.exponent, law.points
            ))
        };
        modes.into_iter().filter_map(trend).collect()
    }

    /// `bf16 takes less memory than f32 in 3 of 4: from ...`.
    fn memory(&self, precision: &str) -> Option<String> {
        let found = self.values(precision, |side| side.memory_saved_percent);
        let (least, most) = extremes(&found)?;
        let fewer = found.iter().filter(|found| found.value > 0.0).count();
        let words = |saved: f64| match saved < 0.0 {
            true => format!("{:.1}% more", -saved),
            false => format!("{saved:.1}% less"),
        };
        Some(match found.len() {
            1 => format!(
                "{precision} takes {} memory than f32 ({}).",
                words(least.value),
                least.title
            ),
            n => format!(
                "{precision} takes less memory than f32 in {fewer} of {n}: from {} ({}) to {} ({}).",
                words(least.value),
                least.title,
                words(most.value),
                most.title
            ),
        })
    }

    /// A number of a precision in every configuration that has it, with the configuration's name.
    fn values(&self, precision: &str, of: impl Fn(&PrecisionSide) -> Option<f64>) -> Vec<Found> {
        let all = self.configurations.iter();
        let found = all.filter_map(|c| {
            Some(Found {
                value: of(c.side(precision)?)?,
                title: c.title(),
            })
        });
        found.collect()
    }
}

/// A number and the configuration that has it.
struct Found {
    value: f64,
    title: String,
}

fn geometric_mean(found: &[Found]) -> f64 {
    let logs = found.iter().map(|found| found.value.ln());
    (logs.sum::<f64>() / found.len() as f64).exp()
}

/// The least and the greatest.
fn extremes(found: &[Found]) -> Option<(&Found, &Found)> {
    let order = |a: &&Found, b: &&Found| a.value.total_cmp(&b.value);
    Some((found.iter().min_by(order)?, found.iter().max_by(order)?))
}

impl ComparedPrecisions {
    /// `tiny B4 T256 forward`.
    fn title(&self) -> String {
        let label = |key: &str| match self.labels.get(key) {
            Some(Value::String(text)) => text.clone(),
            Some(value) => value.to_string(),
            None => String::new(),
        };
        let attention = match label("attention").as_str() {
            "naive" | "" => String::new(),
            other => format!(" {other}"),
        };
        let size = label("size");
        format!(
            "{size} B{} T{}{attention} {}",
            label("batch_size"),
            label("context_length"),
            label("mode")
        )
        .trim()
        .to_string()
    }

    /// What the kept copies cost, and what everything else saves: a row for each precision that keeps some.
    fn copies(&self) -> Vec<Fields> {
        let base = self.f32();
        let sides = self.sides.iter().filter_map(|side| {
            let (whole, own) = (base?.peak_bytes? as f64, side.peak_bytes? as f64);
            let copies = side.weight_cast_bytes?;
            let mut row = Fields::from_iter([("name", self.title())]);
            row.insert("precision", side.precision.as_str());
            row.insert("saved_bytes", whole - own);
            row.insert("rest_saved_bytes", whole - own + copies as f64);
            row.insert("weight_cast_bytes", copies);
            Some(row)
        });
        sides.collect()
    }

    /// A precision that drops its casts beside the one that keeps them.
    fn dropping(&self) -> Vec<String> {
        let dropping = self.sides.iter().filter_map(|side| {
            let precision: Precision = side.precision.parse().ok()?;
            let keeping = precision.with_dropped_casts(false);
            let keeps = self.side(keeping.name()).filter(|_| precision != keeping)?;
            let (from, to) = (keeps.peak_bytes?, side.peak_bytes?);
            let time = keeps.median_ms.zip(side.median_ms);
            let time = time.map_or(String::new(), |(keeps, drops)| {
                format!(" {:.2}x", drops / keeps)
            });
            Some(format!(
                "{} {keeping} {} to {}{time}",
                self.title(),
                format_mib(from),
                format_mib(to)
            ))
        });
        dropping.collect()
    }

    /// What ran out of memory, and what did not.
    fn room(&self) -> Option<String> {
        let outcome = self.outcome();
        let sizes = |side: &PrecisionSide| {
            let bytes = side.peak_bytes.or(side.estimate_bytes);
            let size = bytes.map_or("unknown".into(), format_mib);
            let verb = if side.fits() { "took" } else { "wants" };
            format!("{} {verb} {size}", side.precision)
        };
        let sizes: Vec<String> = self.sides.iter().map(sizes).collect();
        (outcome != "ok").then(|| format!("{}: {outcome} ({}).", self.title(), sizes.join(", ")))
    }
}
