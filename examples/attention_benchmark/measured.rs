//! The result of each run, and the tables of them.

use super::words::speedup_cell;
use std::ops::Deref;
use tallow::Result;
use tallow::bench::{AttentionResult, AttentionStatus};
use tallow::report::{Column, Fields, Report, Speedup, Statistics, format_mib};

/// The implementation that others are compared with.
pub const NAIVE: &str = "naive";

/// The index of forward+backward in [`AttentionResult::PHASES`].
pub const BOTH: usize = 2;

/// One implementation at one size.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    pub result: AttentionResult,
    /// The values that vary apart from implementation and size, such as `bf16, 1 head`; empty if there are none.
    pub variant: String,
}

impl Deref for Measured {
    type Target = AttentionResult;

    fn deref(&self) -> &AttentionResult {
        &self.result
    }
}

impl Measured {
    /// Returns the implementation with its variant, if it has one.
    pub fn name(&self) -> String {
        match self.variant.is_empty() {
            true => self.implementation.into(),
            false => format!("{} ({})", self.implementation, self.variant),
        }
    }

    pub fn is_layer(&self) -> bool {
        self.d_model.is_some()
    }

    /// Returns the width of a head, or of the layer.
    pub fn width(&self) -> usize {
        self.d_model.or(self.head_dim).unwrap_or_default()
    }

    /// Returns the width with its letter, such as `d 64`.
    pub fn named_width(&self) -> String {
        let letter = if self.is_layer() { "D" } else { "d" };
        format!("{letter} {}", self.width())
    }

    /// Returns the size, such as `T 4096, d 64`.
    pub fn size(&self) -> String {
        format!("T {}, {}", self.context_length, self.named_width())
    }

    pub fn is_oom(&self) -> bool {
        self.status == AttentionStatus::OutOfMemory
    }

    /// Returns the run of `implementation` and `precision` that has this size and number of heads.
    pub fn counterpart<'m>(
        &self,
        all: &'m [Self],
        implementation: &str,
        precision: &str,
    ) -> Option<&'m Self> {
        let size = |m: &Self| (m.context_length, m.width(), m.heads);
        all.iter().find(|other| {
            (other.implementation, other.precision, size(other))
                == (implementation, precision, size(self))
        })
    }

    /// Returns naive attention of the same precision, size and number of heads.
    pub fn baseline<'m>(&self, all: &'m [Self]) -> Option<&'m Self> {
        self.counterpart(all, NAIVE, self.precision)
    }

    /// Returns the times of a phase.
    pub fn times(&self, phase: usize) -> Option<&Statistics> {
        Some(&self.times.get(phase)?.statistics)
    }

    /// Returns the peak of forward and backward.
    pub fn peak_bytes(&self) -> Option<u64> {
        Some(self.memory?.peak_bytes[BOTH])
    }

    /// Returns how many times as fast a phase is as that of `before`.
    pub fn speedup_over(&self, before: &Self, phase: usize) -> Option<Speedup> {
        Speedup::new(before.times(phase)?, self.times(phase)?)
    }

    /// Returns the peak as a multiple of that of `before`.
    pub fn peak_over(&self, before: &Self) -> Option<f64> {
        let before_bytes = before.peak_bytes().filter(|bytes| *bytes > 0)?;
        Some(self.peak_bytes()? as f64 / before_bytes as f64)
    }

    /// Returns the phases side by side. A run that was not measured shows its status as the time of forward.
    fn line(&self, all: &[Self]) -> Result<Fields> {
        let naive = self.baseline(all);
        let mut line = self.rows()?.pop().unwrap_or_default();
        line.insert("forward", line.get("status").cloned());
        for (i, phase) in AttentionResult::PHASES.into_iter().enumerate() {
            let times = self.times(i);
            if let Some(times) = times {
                line.insert(phase, times.to_string());
            }
            let cell = match self.implementation == NAIVE {
                true => times.map(|_| 1.0).into(),
                false => speedup_cell(naive.and_then(|naive| self.speedup_over(naive, i))),
            };
            line.insert(format!("{phase} speed-up"), cell);
        }
        let part = naive.and_then(|naive| self.peak_over(naive));
        line.insert("saved_percent", part.map(|part| 100.0 * (1.0 - part)));
        Ok(line)
    }
}

/// Returns the table of all runs: its columns and lines. A layer's memory is shown in more detail.
pub fn table(all: &[Measured]) -> Result<Report> {
    let is_layer = all.iter().any(Measured::is_layer);
    let memory = |key: &str, title| Column::mib(key, title).group("Memory");
    let alive = |key: &str, title| Column::mib(key, title).group("Alive after");
    let added = |key: &str, title| Column::mib(key, title).group("Added by");
    let speedup = |phase: &str, title| {
        Column::number(format!("{phase} speed-up"), title, "", 2).group("Speed-up")
    };
    let width = match is_layer {
        true => Column::text("d_model", "D"),
        false => Column::text("head_dim", "d"),
    };
    let mut columns = vec![
        Column::text("batch_size", "B"),
        width,
        Column::text("context_length", "T"),
        Column::text("implementation", "Attention"),
        Column::text("precision", "Precision"),
        Column::text("heads", "Heads"),
        Column::ms("forward", "Forward"),
        Column::ms("backward", "Backward"),
        Column::ms("forward+backward", "F+B"),
        speedup("forward+backward", "F+B"),
        memory("before_backward_bytes", "before B"),
        memory("peak_bytes", "peak"),
        Column::number("saved_percent", "saved", "%", 1).group("Memory"),
        speedup("forward", "F"),
        speedup("backward", "B"),
        Column::text("status", "Status"),
        Column::count("n", "n"),
    ];
    if is_layer {
        columns.retain(|column| column.key != "before_backward_bytes");
        columns.extend([
            alive("model_bytes", "model"),
            alive("model_forward_bytes", "forward"),
            alive("model_forward_backward_bytes", "backward"),
            added("forward_bytes", "forward"),
            added("backward_bytes", "backward"),
        ]);
    }
    let lines = all.iter().map(|m| m.line(all));
    Ok(Report {
        columns,
        shown_rows: lines.collect::<Result<_>>()?,
        ..Default::default()
    })
}

/// Returns notes on the columns, and on the runs that were not measured or in fewer steps than requested.
pub fn notes(all: &[Measured]) -> Vec<String> {
    let memory = match all.iter().any(Measured::is_layer) {
        true => {
            "Model is the weights and the input. After backward the gradients are alive and what forward saved is \
             freed."
        }
        false => {
            "Memory before B is what is allocated between forward and backward, inputs included; of planned \
             attention, what backward still reads."
        }
    };
    let mut notes = [
        "Times are mean ± standard deviation. Speed-up is naive's mean over the row's; unclear: its spread is too large \
         for a ratio. Forward keeps what backward needs.",
        "Peak is the largest amount of memory in a step; saved is how far it is below naive's.",
        memory,
    ]
    .map(String::from)
    .to_vec();
    if let Some(planned) = all.iter().find(|m| m.implementation.starts_with("planned")) {
        let mut terms = planned.breakdown.iter().flat_map(|own| &own.terms);
        let of_matmuls = terms.find(|term| term.name == "workspace"); // on a GPU
        let workspace = of_matmuls.map_or(String::new(), |term| {
            let size = format_mib(term.bytes);
            format!(
                " and {size} of workspace for matmuls (that of eager ones is cuBLAS's, and not counted)"
            )
        });
        notes.push(format!(
            "Planned attention is compiled for its shape before it runs. Its memory includes the plan's \
             buffer{workspace}."
        ));
    }
    for m in all {
        let reason = m.reason.as_deref().unwrap_or_default();
        let note = match m.status {
            AttentionStatus::Ok if !reason.is_empty() => {
                format!(
                    "Some rows have fewer than {} steps: the time budget ended them.",
                    m.iterations
                )
            }
            AttentionStatus::Ok | AttentionStatus::OutOfMemory => continue,
            AttentionStatus::Unsupported => format!("unsupported: {reason}."),
            AttentionStatus::OverTimeBudget => format!("over time budget: {reason}."),
        };
        if !notes.contains(&note) {
            notes.push(note);
        }
    }
    notes
}
