//! The runs of a sweep: their names, labels and files.

use tallow::bench::EndToEnd;
use tallow::report::{Fields, Report};

/// One run of the sweep.
pub struct Run {
    pub size: String,
    pub run: EndToEnd,
}

impl Run {
    fn mode(&self) -> &'static str {
        self.run.mode.name()
    }

    pub fn title(&self) -> String {
        let EndToEnd {
            batch_size,
            sequence_length,
            config,
            precision,
            execution,
            ..
        } = &self.run;
        format!(
            "{} B{batch_size} T{sequence_length}, {}, {precision}, {}, {}",
            self.size,
            config.attention,
            execution.name(),
            self.mode()
        )
    }

    pub fn labelled(&self, status: &str, rest: Fields) -> Fields {
        let mut row = Fields::new();
        row.insert("size", self.size.as_str());
        row.insert("batch_size", self.run.batch_size);
        row.insert("context_length", self.run.sequence_length);
        row.insert("attention", self.run.config.attention.name());
        row.insert("precision", self.run.precision.name());
        row.insert("execution", self.run.execution.name());
        row.insert("mode", self.mode());
        row.insert("status", status);
        row.merge(rest);
        row
    }
}

/// Adds a run that does not fit.
pub fn add_oom(report: &mut Report, run: &Run, refusal: &Fields) {
    let keys = ["estimate_bytes", "available_bytes"].into_iter();
    let bytes = keys.map(|key| (key, refusal.get(key).cloned()));
    let row = run.labelled("OOM", bytes.collect());
    report.lines.push(row.clone());
    report.rows.push(row);
}
