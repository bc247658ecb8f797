//! The comparison in words.

use super::{ComparedPrecisions, PrecisionAnalysis, PrecisionSide};
use crate::precision::Precision;
use crate::report::format_mib;
use serde_json::Value;

impl PrecisionAnalysis {
    /// The same in words: how fast and how large each precision is beside f32, where kept copies of the weights cost
    /// more than the rest saves, what dropping them changes, and what fits only in half precision.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        for precision in self.precisions() {
            notes.extend(self.speed(precision));
            notes.extend(self.memory(precision));
        }
        let all = &self.configurations;
        notes.extend(all.iter().flat_map(ComparedPrecisions::copies));
        notes.extend(all.iter().flat_map(ComparedPrecisions::dropping));
        notes.extend(all.iter().filter_map(ComparedPrecisions::room));
        notes
    }

    /// `bf16 runs at 1.21x f32's speed (geometric mean), from 0.98x (tiny B4 T256 forward) to ...`.
    fn speed(&self, precision: &str) -> Option<String> {
        let found = self.values(precision, |side| side.speedup);
        let (least, most) = extremes(&found)?;
        let logs = found.iter().map(|found| found.value.ln());
        let mean = (logs.sum::<f64>() / found.len() as f64).exp();
        let start = format!("{precision} runs at {mean:.2}x the speed of f32");
        Some(match found.len() {
            1 => format!("{start} ({}), by medians", least.title),
            n => format!(
                "{start} (geometric mean of {n}), from {:.2}x ({}) to {:.2}x ({}), by medians",
                least.value, least.title, most.value, most.title
            ),
        })
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
                "{precision} takes {} memory than f32 ({})",
                words(least.value),
                least.title
            ),
            n => format!(
                "{precision} takes less memory than f32 in {fewer} of {n}: from {} ({}) to {} ({})",
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

    /// What the kept copies cost, and what everything else saves.
    fn copies(&self) -> Vec<String> {
        let Some(base) = self.f32() else {
            return Vec::new();
        };
        let sides = self.sides.iter().filter_map(|side| {
            let (whole, own) = (base.peak_bytes?, side.peak_bytes?);
            let copies = side.weight_cast_bytes?;
            let rest = i128::from(whole) - i128::from(own) + i128::from(copies);
            let copies = format_mib(copies);
            let name = &side.precision;
            let title = self.title();
            let rest = match u64::try_from(rest) {
                Ok(rest) => format!("everything else is {} smaller", format_mib(rest)),
                Err(_) => {
                    let larger = u64::try_from(-rest).unwrap_or(u64::MAX);
                    format!("everything else is {} larger", format_mib(larger))
                }
            };
            Some(match own < whole {
                true => format!(
                    "{title}: {name} saves {}: its copies of the weights take {copies}, {rest}",
                    format_mib(whole - own)
                ),
                false => format!(
                    "{title}: {name} costs {}: its copies of the weights take {copies}, {rest}",
                    format_mib(own - whole)
                ),
            })
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
                format!(", the time {:.2}x", drops / keeps)
            });
            Some(format!(
                "{}: dropping casts of the weights takes {keeping}'s peak from {} to {}{time}",
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
        (outcome != "ok").then(|| format!("{}: {outcome} ({})", self.title(), sizes.join(", ")))
    }
}
