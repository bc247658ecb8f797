//! The analysis in words, and as tables.

use super::{Analysis, Extremes, Growth, NAIVE, Place, Speedup, different};
use tallow::report::{Column, Fields, Report, counted, format_mib, list_in_note};

impl Analysis {
    /// Sentences: what ran out of memory, what takes the most, how many times as fast others are as naive; `width` is
    /// what the width is called, `d` say. [`tables`](Self::tables) have the rest.
    pub fn notes(&self, width: &str) -> Vec<String> {
        let out_of_memory = self.out_of_memory.iter();
        let counts = out_of_memory.map(|o| format!("{} {} of {}", o.implementation, o.count, o.of));
        let mut notes = vec![list_in_note("Out of memory", &counts.collect::<Vec<_>>())];
        notes.extend(self.beyond_naive_notes(width));
        let peaks = self.peaks.iter().map(|p| {
            let (bytes, length) = (format_mib(p.peak_bytes), p.context_length);
            format!(
                "{} {bytes} (T {length}, {width} {})",
                p.implementation, p.width
            )
        });
        if !self.peaks.is_empty() {
            notes.push(list_in_note("Most memory", &peaks.collect::<Vec<_>>()));
        }
        let others = different(self.speedups.iter().map(|s| s.implementation.as_str()));
        notes.extend(
            others
                .into_iter()
                .filter_map(|name| self.mean_speedup(name)),
        );
        notes.extend(self.by_length());
        notes.extend(self.without_scores(width));
        notes
    }

    /// A sentence for each other implementation that ran where naive ran out of memory.
    fn beyond_naive_notes(&self, width: &str) -> Vec<String> {
        let others = different(self.beyond_naive.iter().map(|b| b.implementation.as_str()));
        let sentence = |name: &str| {
            let own = self
                .beyond_naive
                .iter()
                .filter(|b| b.implementation == name);
            let places = own.map(|b| {
                let place = &b.place;
                let memory = b
                    .peak_bytes
                    .map_or(String::new(), |bytes| format!(", {}", format_mib(bytes)));
                format!(
                    "T {} {width} {} ({:.0} ms{memory})",
                    place.context_length, place.width, place.mean_ms
                )
            });
            let start = format!("Naive ran out of memory where {name} ran (F+B, peak)");
            list_in_note(&start, &places.collect::<Vec<_>>())
        };
        others.into_iter().map(sentence).collect()
    }

    /// A sentence for each other implementation: how fast and how large it is beside naive at the smallest and the
    /// largest T where both were measured (geometric means over the widths).
    pub fn by_length(&self) -> Vec<String> {
        let others = different(self.speedups.iter().map(|s| s.implementation.as_str()));
        let sentence = |name: &str| {
            let own = || self.speedups.iter().filter(|s| s.implementation == name);
            let lengths = || own().map(|s| s.context_length);
            let (shortest, longest) = (lengths().min()?, lengths().max()?);
            let at = |length: u64| {
                let here: Vec<&Speedup> = own().filter(|s| s.context_length == length).collect();
                let speed = geometric_mean(here.iter().filter_map(|s| s.forward_backward))?;
                let speed = match speed {
                    x if x < 0.98 => format!("slower ({x:.2}x)"),
                    x if x > 1.02 => format!("faster ({x:.2}x)"),
                    x => format!("as fast ({x:.2}x)"),
                };
                let memory = geometric_mean(here.iter().filter_map(|s| s.peak));
                let memory = memory.map(|ratio| 100.0 * (1.0 - 1.0 / ratio));
                let memory = memory.map_or(String::new(), |saved| match saved < 0.0 {
                    true => format!(" with {:.0}% more memory", -saved),
                    false => format!(" with {saved:.0}% less memory"),
                });
                Some(format!("at T {length} {speed}{memory}"))
            };
            let both = format!("{name} beside naive: {}, {}.", at(shortest)?, at(longest)?);
            (shortest < longest).then_some(both)
        };
        others.into_iter().filter_map(sentence).collect()
    }

    /// What would avoid naive's memory, where flash takes less of it: nothing of (T, T).
    fn without_scores(&self, width: &str) -> Option<String> {
        let own = self.speedups.iter().filter(|s| s.implementation == "flash");
        let at = own.max_by_key(|s| (s.context_length, s.width))?;
        let saved = 100.0 * (1.0 - 1.0 / at.before_backward.filter(|ratio| *ratio > 1.0)?);
        let exponent = |name: &str| {
            let mut own = self
                .growth
                .iter()
                .filter(|g| g.implementation == name && g.width == at.width);
            Some(own.next()?.before_backward?.exponent)
        };
        let growth = exponent(NAIVE).zip(exponent("flash"));
        let growth = growth.map_or(String::new(), |(naive, flash)| {
            format!("; what naive holds grows as T^{naive:.2}, what flash holds as T^{flash:.2}")
        });
        Some(format!(
            "What would avoid naive's memory: to keep nothing of size (T, T). So flash holds {saved:.0}% less before \
             backward at T {}, {width} {}{growth}.",
            at.context_length, at.width
        ))
    }

    /// The fastest and the slowest of each implementation and phase, and how time and memory grow with T: the tables
    /// that have rows.
    pub fn tables(&self, width: &str) -> Vec<Report> {
        let extremes = Report {
            title: "Fastest and slowest configuration, by mean time".into(),
            columns: Extremes::columns(width),
            rows: self.extremes.iter().map(Extremes::fields).collect(),
            ..Default::default()
        };
        let growth = Report {
            title: "Growth: x in T^x, fitted to medians".into(),
            columns: Growth::columns(width),
            rows: self.growth.iter().map(Growth::fields).collect(),
            ..Default::default()
        };
        let tables = [extremes, growth].into_iter();
        tables.filter(|table| !table.rows.is_empty()).collect()
    }

    /// The geometric means over the configurations of one implementation.
    fn mean_speedup(&self, name: &str) -> Option<String> {
        let own: Vec<&Speedup> = self
            .speedups
            .iter()
            .filter(|s| s.implementation == name)
            .collect();
        let mean =
            |of: fn(&Speedup) -> Option<f64>| geometric_mean(own.iter().filter_map(|s| of(s)));
        Some(format!(
            "naive takes {:.2}x as long as {name} forward, {:.2}x backward, {:.2}x together (medians; geometric mean \
             of {}).",
            mean(|s| s.forward)?,
            mean(|s| s.backward)?,
            mean(|s| s.forward_backward)?,
            counted(own.len(), "configuration")
        ))
    }
}

/// `None` of none.
fn geometric_mean(ratios: impl Iterator<Item = f64>) -> Option<f64> {
    let logs: Vec<f64> = ratios.map(f64::ln).collect();
    (!logs.is_empty()).then(|| (logs.iter().sum::<f64>() / logs.len() as f64).exp())
}

impl Extremes {
    fn columns(width: &str) -> Vec<Column> {
        let mut columns = vec![
            Column::text("implementation", "Implementation"),
            Column::text("phase", "Phase"),
        ];
        for of in ["Fastest", "Slowest"] {
            let key = |field: &str| format!("{}_{field}", of.to_lowercase());
            columns.push(Column::ms(key("ms"), "time").under(of));
            columns.push(Column::number(key("context_length"), "T", "", 0).under(of));
            columns.push(Column::number(key("width"), width, "", 0).under(of));
        }
        columns
    }

    fn fields(&self) -> Fields {
        let mut fields = Fields::new();
        fields.insert("implementation", self.implementation.as_str());
        fields.insert("phase", self.phase.as_str());
        let mut add = |of: &str, place: &Place| {
            fields.insert(format!("{of}_ms"), place.mean_ms);
            fields.insert(format!("{of}_context_length"), place.context_length);
            fields.insert(format!("{of}_width"), place.width);
        };
        add("fastest", &self.fastest);
        add("slowest", &self.slowest);
        fields
    }
}

impl Growth {
    fn columns(width: &str) -> Vec<Column> {
        vec![
            Column::text("implementation", "Implementation"),
            Column::text("width", width),
            Column::number("time_exponent", "Time", "", 2),
            Column::number("before_backward_exponent", "Memory before backward", "", 2),
            Column::number("peak_exponent", "Peak", "", 2),
            Column::number("points", "Points", "", 0),
            Column::number("shortest", "From T", "", 0),
            Column::number("longest", "to T", "", 0),
        ]
    }

    fn fields(&self) -> Fields {
        let laws = [
            ("time_exponent", self.time),
            ("before_backward_exponent", self.before_backward),
            ("peak_exponent", self.peak),
        ];
        let mut fields = Fields::new();
        fields.insert("implementation", self.implementation.as_str());
        fields.insert("width", self.width);
        for (key, law) in laws {
            fields.insert(key, law.map(|law| law.exponent));
        }
        let points = laws
            .iter()
            .filter_map(|(_, law)| Some(law.as_ref()?.points));
        fields.insert("points", points.max());
        fields.insert("shortest", self.shortest);
        fields.insert("longest", self.longest);
        fields
    }
}
