//! A recording as tables, and as a chart.

use super::{Block, BytesByKind, MemoryKind, MemoryRecording};
use crate::probe::Path;
use crate::report::plot::{Chart, Series, TimeSpan};
use crate::report::{Column, Report, bytes_to_mib};
use serde_json::json;

impl Block {
    /// Returns its origin, for tables: its label, its path, or `candle` for what candle allocates between ops.
    pub fn origin(&self) -> String {
        match (&self.name, self.path) {
            (Some(name), _) => name.clone(),
            (None, Path::ROOT) if self.allocated_at.is_none() => "before the recording".into(),
            (None, Path::ROOT) => "candle".into(),
            (None, path) => path.to_string(),
        }
    }
}

impl MemoryRecording {
    /// Returns the peak of each phase as a table, and the bytes alive then by use.
    pub fn phase_report(&self) -> Report {
        let by_kind = self
            .phases
            .iter()
            .map(|phase| self.bytes_by_kind_at(self.peak_event_in(phase)));
        let by_kind: Vec<BytesByKind> = by_kind.collect();
        let has_bytes = |kind: &MemoryKind| by_kind.iter().any(|held| held.bytes_of(*kind) > 0);
        let kinds: Vec<MemoryKind> = MemoryKind::ALL.into_iter().filter(has_bytes).collect();
        let mut columns = vec![
            Column::text("phase", "Phase"),
            Column::mib("peak_bytes", "Peak"),
        ];
        columns.extend(kinds.iter().map(|kind| {
            let key = format!("{}_bytes", kind.name().replace(' ', "_"));
            Column::mib(key, kind.name()).group("By kind")
        }));
        let rows = self.phases.iter().zip(&by_kind).map(|(phase, held)| {
            let mut row = vec![json!(phase.name), json!(self.peak_bytes_in(phase))];
            row.extend(kinds.iter().map(|kind| json!(held.bytes_of(*kind))));
            row.into()
        });
        Report {
            notes: self.notes(),
            ..Report::table(columns, rows)
        }
    }

    /// Returns the `count` largest blocks allocated during the recording, with their origin; equal blocks are one row.
    pub fn largest_report(&self, count: usize) -> Report {
        let mut alike: Vec<(&Block, usize)> = Vec::new();
        for block in self.largest(usize::MAX) {
            let same = |(known, _): &&mut (&Block, usize)| {
                known.bytes == block.bytes
                    && (known.path, known.phase, known.kind)
                        == (block.path, block.phase, block.kind)
            };
            match alike.iter_mut().find(same) {
                Some((_, blocks)) => *blocks += 1,
                None => alike.push((block, 1)),
            }
        }
        let rows = alike.into_iter().take(count).map(|(block, blocks)| {
            json!([
                block.bytes,
                blocks,
                block.kind.name(),
                block.phase,
                block.origin()
            ])
        });
        let columns = vec![
            Column::mib("bytes", "Each"),
            Column::count("blocks", "Blocks"),
            Column::text("holds", "Holds"),
            Column::text("phase", "Phase"),
            Column::text("origin", "Origin"),
        ];
        Report {
            notes: self.notes(),
            ..Report::table(columns, rows)
        }
    }

    /// Returns caveats about the sums: lost events and blocks of unknown size.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if self.lost_events > 0 {
            notes.push(format!(
                "{} events exceed the capacity of {}: sums by origin are incomplete; record with a larger \
                 capacity",
                self.lost_events, self.config.capacity
            ));
        }
        if self.unknown_blocks > 0 {
            notes.push(format!(
                "{} freed blocks have an unknown size, since they were allocated before the recording: sums after them \
                 are too large; label them",
                self.unknown_blocks
            ));
        }
        notes
    }
}

/// Returns the colour of a kind in every timeline, as a [`Series::colour`]; a plan's memory map uses the same.
fn colour(kind: MemoryKind) -> usize {
    match kind {
        MemoryKind::Other => 0,
        MemoryKind::Activations => 1,
        MemoryKind::Gradients => 2,
        MemoryKind::Weights => 3,
        MemoryKind::Logits => 4,
        MemoryKind::Optimizer => 5,
        MemoryKind::Scratch => 6,
        MemoryKind::WeightCasts => 7,
        MemoryKind::Inputs => 8,
    }
}

/// The most points in time drawn. Each is the one with the most bytes alive in its stretch of events.
const MOMENTS: usize = 1200;

/// Returns a chart of the bytes alive over time, stacked by use, with the phases marked.
/// [`plot::save`](crate::report::plot::save) writes it.
///
/// The chart has at most 1,200 points in time. With more events, each point stands for a stretch of events and shows
/// its worst, so the peak is always drawn.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use std::alloc::System;
/// use tallow::memory::{self, RecordConfig, tracker::Tracker};
///
/// #[global_allocator]
/// static ALLOCATOR: Tracker<System> = Tracker::new(System);
///
/// let recorder = memory::record(RecordConfig::default())?;
/// let x = Tensor::zeros((512, 1024), DType::F32, &Device::Cpu)?;
/// drop(x);
/// let chart = memory::timeline(&recorder.finish(), "A tensor");
/// assert_eq!(chart.y_label, "memory in use (MiB)");
/// assert!(tallow::report::plot::to_svg(&[chart])?.contains("A tensor"));
/// # Ok::<(), tallow::Error>(())
/// ```
pub fn timeline(recording: &MemoryRecording, title: impl Into<String>) -> Chart {
    let by_kind = recording.bytes_by_kind();
    let stretch = by_kind.len().div_ceil(MOMENTS).max(1);
    let moments: Vec<usize> = (0..by_kind.len())
        .step_by(stretch)
        .map(|from| {
            let stretch = from..(from + stretch).min(by_kind.len());
            let worst = stretch.rev().max_by_key(|event| recording.bytes_at(*event));
            worst.unwrap_or(from)
        })
        .collect();
    let ms = |event: usize| {
        recording
            .curve
            .get(event)
            .map_or(0.0, |sample| sample.at_ns as f64 / 1e6)
    };
    // Long-lived memory at the bottom, short-lived memory on top.
    let order = [
        MemoryKind::Other,
        MemoryKind::Weights,
        MemoryKind::Optimizer,
        MemoryKind::Inputs,
        MemoryKind::WeightCasts,
        MemoryKind::Gradients,
        MemoryKind::Activations,
        MemoryKind::Logits,
        MemoryKind::Scratch,
    ];
    let has_bytes = |kind: &MemoryKind| by_kind.iter().any(|held| held.bytes_of(*kind) > 0);
    let areas = order.into_iter().filter(has_bytes).map(|kind| {
        let mib = |event: &usize| bytes_to_mib(by_kind[*event].bytes_of(kind));
        Series {
            name: kind.name().into(),
            points: moments
                .iter()
                .map(|event| (ms(*event), mib(event)))
                .collect(),
            colour: Some(colour(kind)),
            ..Default::default()
        }
    });
    let spans = recording.phases.iter().map(|phase| TimeSpan {
        name: phase.name.into(),
        from: ms(phase.begins_at),
        to: ms(phase.ends_at),
    });
    Chart {
        title: title.into(),
        x_label: "time (ms)".into(),
        y_label: "memory in use (MiB)".into(),
        stacked: true,
        series: areas.collect(),
        spans: spans.collect(),
        ..Default::default()
    }
}
