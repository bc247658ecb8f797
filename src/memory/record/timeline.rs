//! A recording as a picture.

use super::{MemoryKind, MemoryRecording};
use crate::report::plot::{AreaChart, AreaLayer, TimeSpan};

/// At most so many moments are drawn: of those between, the one with the most alive.
const MOMENTS: usize = 1200;

/// What was alive over time, stacked by what it was there for, with the phases marked:
/// [`save`](AreaChart::save) writes it.
///
/// A chart has room for about a thousand moments. Where there were more, each that is drawn stands for a stretch of
/// events, and is the worst one in it: the peak is always drawn.
pub fn timeline(recording: &MemoryRecording, title: impl Into<String>) -> AreaChart {
    let holdings = recording.holdings();
    let stretch = holdings.len().div_ceil(MOMENTS).max(1);
    let moments: Vec<usize> = (0..holdings.len())
        .step_by(stretch)
        .map(|from| {
            let stretch = from..(from + stretch).min(holdings.len());
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
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    // The lasting at the bottom, what comes and goes on top.
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
    let is_there = |kind: &MemoryKind| holdings.iter().any(|held| held.bytes_of(*kind) > 0);
    let layers = order.into_iter().filter(is_there).map(|kind| AreaLayer {
        name: kind.name().into(),
        values: moments
            .iter()
            .map(|event| mib(holdings[*event].bytes_of(kind)))
            .collect(),
    });
    let spans = recording.phases.iter().map(|phase| TimeSpan {
        name: phase.name.into(),
        from: ms(phase.begins_at),
        to: ms(phase.ends_at),
    });
    AreaChart {
        title: title.into(),
        x_label: "time (ms)".into(),
        y_label: "alive (MiB)".into(),
        x: moments.iter().map(|event| ms(*event)).collect(),
        layers: layers.collect(),
        spans: spans.collect(),
    }
}
