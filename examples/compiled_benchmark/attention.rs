//! Part (a): attention, eager naive beside the same planned, and flash.

use crate::analysis::{Analysis, Speedup};
use crate::common::values::{self, TimeBudget};
use crate::common::words;
use crate::{Setting, common, geometric_mean, number, text};
use clap::Args;
use tallow::Result;
use tallow::attention::{Algorithm, Mask};
use tallow::bench::{AttentionRun, Execution, Sampling};
use tallow::memory::AttentionWorkload;
use tallow::report::{Column, Fields, Report, counted, list_in_note, mean_and_std};

/// What is compared, as the rows name it.
const IMPLEMENTATIONS: [&str; 3] = ["naive", "planned", "flash"];

#[derive(Args)]
#[command(next_help_heading = "Attention")]
pub struct AttentionFlags {
    /// Sequences in a batch of attention alone
    #[arg(long, default_value_t = 8)]
    attention_batch_size: usize,

    /// Attention heads
    #[arg(long, default_value_t = 1)]
    heads: usize,

    /// The dimension of a head; several allowed [default: 16 64; with --full 16 32 64 128]
    #[arg(long, num_args = 1.., value_delimiter = ',')]
    head_dim: Vec<usize>,

    /// Tokens in a sequence; several allowed [default: 256 1024; with --full 4096, 8192 and 16384 too]
    #[arg(long, num_args = 1.., value_delimiter = ',')]
    sequence_length: Vec<usize>,

    /// Let each query see the keys up to its own position only
    #[arg(long)]
    causal: bool,

    /// Passes that are measured; fewer, at least 2, where the time budget ends first
    #[arg(long, default_value_t = 100, value_parser = values::count())]
    iterations: usize,

    /// The time that one implementation may take for one shape, in ms; none for as long as it takes [default: 1500;
    /// with --full 60000]
    #[arg(long, value_parser = values::time_budget)]
    time_budget_ms: Option<TimeBudget>,
}

impl AttentionFlags {
    /// The flags' long names.
    pub const NAMES: &[&str] = &[
        "attention-batch-size",
        "heads",
        "head-dim",
        "sequence-length",
        "causal",
        "iterations",
        "time-budget-ms",
    ];

    /// Whether a default is left that --full changes.
    pub fn has_defaults(&self) -> bool {
        self.head_dim.is_empty() || self.sequence_length.is_empty() || self.time_budget_ms.is_none()
    }

    /// Measures every shape of the grid, the three implementations one after the other.
    pub fn report(&self, setting: &Setting) -> Result<Report> {
        let mut rows = Vec::new();
        let shapes = self.shapes(setting.full);
        for (i, &(head_dim, length)) in shapes.iter().enumerate() {
            let (number, count) = (i + 1, shapes.len());
            common::progress(format!(
                "attention {number}/{count}: T {length}, d {head_dim}"
            ));
            for name in IMPLEMENTATIONS {
                let run = self.run(setting, name, head_dim, length);
                rows.extend(run.run(&setting.device, |_, _| ())?);
            }
        }
        let analysis = Analysis::of(&rows, "head_dim");
        let mut report = Report {
            title: "Attention".into(),
            configuration: self.configuration(setting),
            columns: columns(),
            lines: shapes
                .iter()
                .map(|shape| line(&rows, &analysis, *shape))
                .collect(),
            notes: notes(&rows, &analysis),
            ..Default::default()
        };
        if let Ok(serde_json::Value::Object(parts)) = serde_json::to_value(&analysis) {
            report.analysis = parts.into_iter().collect();
        }
        report.rows = rows;
        Ok(report)
    }

    /// Head dimensions and lengths.
    fn shapes(&self, full: bool) -> Vec<(usize, usize)> {
        let given = |list: &[usize], quick: &[usize], all: &[usize]| match (list, full) {
            ([], false) => quick.to_vec(),
            ([], true) => all.to_vec(),
            (list, _) => list.to_vec(),
        };
        let lengths = given(
            &self.sequence_length,
            &[256, 1024],
            &[256, 1024, 4096, 8192, 16_384],
        );
        let head_dims = given(&self.head_dim, &[16, 64], &[16, 32, 64, 128]);
        let shapes = head_dims.iter().flat_map(|&head_dim| {
            let lengths = lengths.iter();
            lengths.map(move |&length| (head_dim, length))
        });
        shapes.collect()
    }

    fn run(&self, setting: &Setting, name: &str, head_dim: usize, length: usize) -> AttentionRun {
        let time_budget_ms = match (self.time_budget_ms, setting.full) {
            (Some(TimeBudget(ms)), _) => ms,
            (None, true) => Some(60_000.0),
            (None, false) => Some(1_500.0),
        };
        let available = || tallow::hardware::available_bytes_on(&setting.device);
        let available_bytes = setting.limit_bytes.or_else(available);
        AttentionRun {
            workload: AttentionWorkload {
                algorithm: match name {
                    "flash" => Algorithm::Flash,
                    _ => Algorithm::Naive,
                },
                batch_size: self.attention_batch_size,
                heads: self.heads,
                sequence_length: length,
                head_dim,
                mask: self.mask(),
                documents: 1,
                dropout: 0.0,
                dtype: setting.precision.dtype(),
            },
            sampling: Sampling {
                warmup_steps: 3,
                iterations: self.iterations,
                time_budget_ms,
                seed: setting.seed,
                peak_flops: setting.peak_flops,
                available_bytes,
            },
            execution: match name {
                "planned" => Execution::Planned,
                _ => Execution::Eager,
            },
        }
    }

    fn mask(&self) -> Mask {
        match self.causal {
            true => Mask::Causal,
            false => Mask::Full,
        }
    }

    fn configuration(&self, setting: &Setting) -> Fields {
        let mut fields = Fields::new();
        fields.insert("measured", "attention on q, k, v (B, H, T, d)");
        fields.insert("precision", setting.precision.name());
        fields.insert("batch size", self.attention_batch_size);
        fields.insert("heads", self.heads);
        fields.insert("mask", if self.causal { "causal" } else { "full" });
        fields.insert("iterations", self.iterations);
        let run = self.run(setting, "naive", 1, 1);
        let budget = run.sampling.time_budget_ms.map(|ms| format!("{ms} ms"));
        fields.insert("time budget", budget);
        fields
    }
}

/// A line a shape, eager and planned side by side, and flash beside them.
pub fn columns() -> Vec<Column> {
    let mut columns = vec![
        Column::text("head_dim", "d"),
        Column::text("context_length", "T"),
    ];
    let time = |name: &str, phase: &str, title: &str, under: &str| {
        Column::ms(format!("{name} {phase}"), title).under(under)
    };
    let speedup = |name: &str, phase: &str, under: &str| {
        Column::number(format!("speedup {name} {phase}"), "speed-up", "", 2).under(under)
    };
    for (phase, title) in [("forward", "Forward"), ("backward", "Backward")] {
        columns.push(time("naive", phase, "naive", title));
        columns.push(time("planned", phase, "planned", title));
        columns.push(speedup("planned", phase, title));
    }
    for (key, title, minor) in [
        ("before backward", "Before backward", 2),
        ("peak", "Peak", 1),
    ] {
        for name in IMPLEMENTATIONS {
            columns.push(
                Column::mib(format!("{name} {key}"), name)
                    .under(title)
                    .minor(minor),
            );
            if (key, name) == ("peak", "planned") {
                let saved = Column::number("planned saved", "saved", "%", 1);
                columns.push(saved.under(title).minor(minor));
            }
        }
    }
    for (phase, title) in [("forward", "Flash forward"), ("backward", "Flash backward")] {
        columns.push(time("flash", phase, "flash", title).minor(3));
        columns.push(speedup("flash", phase, title).minor(3));
    }
    columns
}

/// Times, how many times as long eager naive takes, and bytes; the status where there is no time.
fn line(rows: &[Fields], analysis: &Analysis, (head_dim, length): (usize, usize)) -> Fields {
    let mut line = Fields::new();
    line.insert("head_dim", head_dim);
    line.insert("context_length", length);
    let here = rows.iter().filter(|row| {
        let at = |key, size: usize| number(row, key) == Some(size as f64);
        at("head_dim", head_dim) && at("context_length", length)
    });
    for row in here {
        let (Some(name), Some(phase)) = (text(row, "implementation"), text(row, "phase")) else {
            continue;
        };
        let is_measured = number(row, "mean_ms").is_some();
        let phase = if is_measured { phase } else { "forward" };
        if phase != "forward+backward" {
            line.insert(format!("{name} {phase}"), mean_and_std(row));
            continue;
        }
        line.insert(
            format!("{name} before backward"),
            number(row, "before_backward_bytes"),
        );
        line.insert(format!("{name} peak"), number(row, "peak_bytes"));
    }
    for s in &analysis.speedups {
        if (s.width, s.context_length) == (head_dim as u64, length as u64) {
            let name = &s.implementation;
            line.insert(format!("speedup {name} forward"), s.forward);
            line.insert(format!("speedup {name} backward"), s.backward);
            let saved = s.peak.map(|ratio| 100.0 * (1.0 - 1.0 / ratio));
            line.insert(format!("{name} saved"), saved);
        }
    }
    line
}

fn notes(rows: &[Fields], analysis: &Analysis) -> Vec<String> {
    let mut notes = vec![
        "naive is eager, op by op, with candle's graph; planned is the same mathematics for a shape known \
         beforehand; flash \
         keeps no probabilities."
            .to_string(),
        "planned's peak is its whole arena, before backward what of it is read later; saved is what its peak is less \
         than \
         naive's."
            .into(),
        "Times are mean ± standard deviation, speed-ups over naive those of medians.".into(),
    ];
    notes.extend(analysis.by_length());
    for name in &IMPLEMENTATIONS[1..] {
        let own = || {
            analysis
                .speedups
                .iter()
                .filter(|s| s.implementation == *name)
        };
        let mean = |of: fn(&Speedup) -> Option<f64>| geometric_mean(own().filter_map(of));
        if let (Some(forward), Some(backward)) = (mean(|s| s.forward), mean(|s| s.backward)) {
            notes.push(format!(
                "Average speed-up of {name} over naive: forward {forward:.2}x, backward {backward:.2}x (geometric \
                 mean of {}).",
                counted(own().count(), "shape")
            ));
        }
    }
    let mut reasons: Vec<&str> = Vec::new();
    for status in rows.iter().filter_map(|row| text(row, "status")) {
        if status != "ok" && !reasons.contains(&status) {
            reasons.push(status);
        }
    }
    let named: Vec<(&Fields, String)> = rows.iter().zip(words::names(rows)).collect();
    notes.extend(reasons.into_iter().map(|status| {
        let rows = named
            .iter()
            .filter(|(row, _)| text(row, "status") == Some(status));
        let rows: Vec<String> = rows.map(|(_, name)| name.clone()).collect();
        list_in_note(status, &rows)
    }));
    notes.extend(words::noisy(rows));
    notes
}
