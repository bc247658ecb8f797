//! The comparison as a picture.

use crate::analysis::{ComparedPrecisions, PrecisionAnalysis, PrecisionSide};
use tallow::report::plot::{Figure, LineChart, Series};

const MIB: f64 = (1u64 << 20) as f64;

/// Time and peak memory, double logarithmic: over parameters where models of several sizes were measured, else over the
/// context length. A colour for each configuration, a dash for each precision.
pub fn figure(analysis: &PrecisionAnalysis) -> Figure {
    let all = &analysis.configurations;
    let number = |c: &ComparedPrecisions, key: &str| c.labels.get(key)?.as_f64();
    let several = |key| all.iter().any(|c| number(c, key) != number(&all[0], key));
    let (x_key, x_label, other) = match several("parameters") {
        true => ("parameters", "parameters", "context_length"),
        false => ("context_length", "sequence length T", "batch_size"),
    };
    // What does not vary along x tells lines apart.
    let line_of = |c: &ComparedPrecisions| {
        let label = |key| c.labels.get(key).map(|v| v.to_string().replace('"', ""));
        let parts = ["mode", "attention", other].map(|key| label(key).unwrap_or_default());
        let letter = if other == "batch_size" { "B" } else { "T" };
        format!("{}, {}, {letter} {}", parts[0], parts[1], parts[2])
    };
    let mut lines: Vec<String> = Vec::new();
    for line in all.iter().map(line_of) {
        if !lines.contains(&line) {
            lines.push(line);
        }
    }
    let chart = |title: &str, y_label: &str, y: &dyn Fn(&PrecisionSide) -> Option<f64>| {
        let mut series = Vec::new();
        for precision in analysis.precisions() {
            for line in &lines {
                let own = all.iter().filter(|c| line_of(c) == *line);
                let points = own.filter_map(|c| Some((number(c, x_key)?, y(c.side(precision)?)?)));
                series.push(Series::new(
                    format!("{precision}, {line}"),
                    points.collect(),
                ));
            }
        }
        LineChart {
            title: title.into(),
            x_label: x_label.into(),
            y_label: y_label.into(),
            log_x: true,
            log_y: true,
            series,
            colours: Some(lines.len()),
        }
    };
    let time = chart("Time of a step", "median time (ms)", &|side| side.median_ms);
    let memory = chart("Peak memory", "peak (MiB)", &|side| {
        Some(side.peak_bytes? as f64 / MIB)
    });
    let measured = |chart: &LineChart| chart.series.iter().any(|line| !line.points.is_empty());
    Figure {
        charts: [time, memory].into_iter().filter(measured).collect(),
    }
}
