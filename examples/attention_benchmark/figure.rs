//! Time and memory over T as a picture.

use super::measured::{BOTH, Measured};
use super::words::grouped;
use tallow::report::bytes_to_mib;
use tallow::report::plot::{Chart, Series};

/// Draws time of forward and backward, and peak memory where it was measured, over T, double logarithmic. Each
/// implementation has a colour and each width a dash; crosses mark the sizes that ran out of memory.
pub fn figure(all: &[Measured], mut caption: Vec<String>) -> Vec<Chart> {
    let (names, widths) = (
        grouped(all, |m| m.name()),
        grouped(all, |m| m.named_width()),
    );
    let chart = |title: &str, y_label: &str, of: fn(&Measured) -> Option<f64>| {
        let mut series = Vec::new();
        for (width, _) in &widths {
            for (name, own) in &names {
                let own = || own.iter().filter(|m| m.named_width() == *width);
                let x = |m: &Measured| m.context_length as f64;
                series.push(Series {
                    name: format!("{name}, {width}"),
                    points: own().filter_map(|m| Some((x(m), of(m)?))).collect(),
                    crosses: own().filter(|m| m.is_oom()).map(|m| x(m)).collect(),
                    colour: None,
                });
            }
        }
        Chart {
            title: title.into(),
            x_label: "sequence length T".into(),
            y_label: y_label.into(),
            log_x: true,
            log_y: true,
            series,
            colours: Some(names.len()),
            ..Default::default()
        }
    };
    let time = |m: &Measured| Some(m.times(BOTH)?.mean_ms);
    let mut charts = vec![chart("Forward and backward", "mean time (ms)", time)];
    if all.iter().any(|m| m.peak_bytes().is_some()) {
        let peak = |m: &Measured| m.peak_bytes().map(bytes_to_mib);
        charts.push(chart("Peak memory", "peak (MiB)", peak));
    }
    if all.iter().any(Measured::is_oom) {
        caption.push("A cross marks a size that runs out of memory.".into());
    }
    charts.last_mut().unwrap().caption = caption;
    charts
}
