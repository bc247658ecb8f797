//! The analysis in words, and as tables.

use super::{Analysis, Extremes, Growth, Place, Speedup, different};
use crate::report::{Column, Fields, Report, counted, format_mib, list_in_note};

impl Analysis {
    /// Sentences: what ran out of memory, what takes the most, how many times as fast others are as naive; `width` is
    /// what the width is called, `d` say. [`tables`](Self::tables) have the rest.
    pub fn notes(&self, width: &str) -> Vec<String> {
        let out_of_memory = self.out_of_memory.iter();
        let counts = out_of_memory.map(|o| format!("{} {} of {}", o.implementation, o.count, o.of));
        let mut notes = vec![list_in_note("Out of memory", &counts.collect::<Vec<_>>())];
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
        notes
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
        let mean = |of: fn(&Speedup) -> Option<f64>| {
            let logs: Vec<f64> = own.iter().filter_map(|s| of(s)).map(f64::ln).collect();
            (!logs.is_empty()).then(|| (logs.iter().sum::<f64>() / logs.len() as f64).exp())
        };
        Some(format!(
            "naive takes {:.2}x as long as {name} forward, {:.2}x backward, {:.2}x together (medians; geometric mean of {}).",
            mean(|s| s.forward)?,
            mean(|s| s.backward)?,
            mean(|s| s.forward_backward)?,
            counted(own.len(), "configuration")
        ))
    }
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
