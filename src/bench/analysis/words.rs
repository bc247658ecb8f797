//! The analysis in words.

use super::{Analysis, Extremes, Growth, Place, Speedup, different};
use crate::report::format_mib;

impl Analysis {
    /// The same in words, a sentence or a few lines each; `width` is what the width is called, `d` say.
    pub fn notes(&self, width: &str) -> Vec<String> {
        let mut notes = vec![self.counts()];
        let implementations = different(self.extremes.iter().map(|e| e.implementation.as_str()));
        for name in implementations {
            let own = self.extremes.iter().filter(|e| e.implementation == name);
            let lines: Vec<String> = own.map(|e| e.words(width)).collect();
            notes.push(format!("{name}: {}", lines.join("; ")));
        }
        notes.extend(self.peaks.iter().map(|p| {
            format!(
                "{}: most memory {}, at T {}, {width} {}",
                p.implementation,
                format_mib(p.peak_bytes),
                p.context_length,
                p.width
            )
        }));
        notes.extend(self.growth.iter().map(|g| g.words(width)));
        let others = different(self.speedups.iter().map(|s| s.implementation.as_str()));
        notes.extend(
            others
                .into_iter()
                .filter_map(|name| self.mean_speedup(name)),
        );
        notes
    }

    fn counts(&self) -> String {
        let out_of_memory = self.statuses.get("OOM").copied().unwrap_or_default();
        let mut text = format!(
            "Out of memory: {out_of_memory} of {} configurations",
            self.configurations
        );
        for (status, count) in &self.statuses {
            if status != "ok" && status != "OOM" {
                text.push_str(&format!("; {status}: {count}"));
            }
        }
        text
    }

    /// The geometric means over the configurations of one implementation.
    fn mean_speedup(&self, name: &str) -> Option<String> {
        let own: Vec<&Speedup> = self
            .speedups
            .iter()
            .filter(|s| s.implementation == name)
            .collect();
        let mean = |of: fn(&Speedup) -> Option<f64>| {
            let logs: Vec<f64> = own.iter().filter_map(|s| of(s)).map(f64::ln).collect();
            (!logs.is_empty()).then(|| (logs.iter().sum::<f64>() / logs.len() as f64).exp())
        };
        Some(format!(
            "naive takes {:.2}x as long as {name} forward, {:.2}x backward, {:.2}x together (geometric means over {} configurations, by medians)",
            mean(|s| s.forward)?,
            mean(|s| s.backward)?,
            mean(|s| s.forward_backward)?,
            own.len()
        ))
    }
}

impl Extremes {
    fn words(&self, width: &str) -> String {
        let place = |p: &Place| {
            format!(
                "{:.3} ms (T {}, {width} {})",
                p.mean_ms, p.context_length, p.width
            )
        };
        format!(
            "fastest {} {}, slowest {}",
            self.phase,
            place(&self.fastest),
            place(&self.slowest)
        )
    }
}

impl Growth {
    fn words(&self, width: &str) -> String {
        let laws = [
            ("time", self.time),
            ("memory before backward", self.before_backward),
            ("peak", self.peak),
        ];
        let laws: Vec<String> = laws
            .iter()
            .filter_map(|(what, law)| Some((what, law.as_ref()?)))
            .map(|(what, law)| format!("{what} as T^{:.2}", law.exponent))
            .collect();
        let points = [self.time, self.before_backward, self.peak];
        let points = points.iter().flatten().map(|law| law.points).max();
        format!(
            "{}, {width} {}: {} (fitted to {} points, T {} to {})",
            self.implementation,
            self.width,
            laws.join(", "),
            points.unwrap_or_default(),
            self.shortest,
            self.longest
        )
    }
}
