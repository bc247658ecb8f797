//! Lines that a table shows in place of rows, times as text, and fitted power laws.

use approx::assert_relative_eq;
use proptest::prelude::*;
use serde_json::{Value, json};
use tallow::report::{Column, Fields, Format, PowerLaw, Report, Statistics};

use super::rendered;

fn row(length: u64, phase: &str, mean_ms: Option<f64>) -> Fields {
    let mut row = Fields::from_iter([("context_length", length)]);
    row.insert("phase", phase);
    row.insert("status", if mean_ms.is_some() { "ok" } else { "OOM" });
    if let Some(mean_ms) = mean_ms {
        row.insert("mean_ms", mean_ms)
            .insert("std_ms", mean_ms / 4.0);
    }
    row
}

fn rows() -> Vec<Fields> {
    vec![
        row(256, "forward", Some(1.0)),
        row(1024, "forward+backward", None),
        row(256, "forward+backward", Some(3210.5)),
    ]
}

/// A line for each length, with the phases next to each other.
fn report() -> Report {
    let line = |length: u64, cells: &[(&str, &str)]| {
        let mut line = Fields::from_iter([("context_length", length)]);
        line.merge(cells.iter().copied().collect());
        line
    };
    Report {
        columns: vec![
            Column::number("context_length", "T", "", 0),
            Column::number("forward", "Forward", "ms", 2),
            Column::number("forward+backward", "Both", "ms", 2),
            Column::text("status", "Status"),
        ],
        rows: rows(),
        shown_rows: vec![
            line(
                256,
                &[
                    ("forward", "1.00 ± 0.25"),
                    ("forward+backward", "3,210 ± 803"),
                    ("status", "ok"),
                ],
            ),
            line(1024, &[("forward+backward", "OOM"), ("status", "OOM")]),
        ],
        ..Default::default()
    }
}

#[test]
fn a_mean_without_deviation_says_so() {
    let shown = |samples_ms: &[f64]| Statistics::new(samples_ms).unwrap().to_string();
    assert_eq!(shown(&[2.0]), "2.00 ± n/a");
    for (mean, expected) in [
        (0.0741, "0.074 ± 0.037"),
        (9.1449, "9.14 ± 4.57"),
        (117.46, "117.5 ± 58.7"),
        (3210.5, "3,210 ± 1,605"),
    ] {
        let distance = mean / 2.0 / 2f64.sqrt(); // of two samples whose deviation is half of their mean
        assert_eq!(shown(&[mean - distance, mean + distance]), expected);
    }
}

#[test]
fn people_read_lines_and_programs_rows() {
    let markdown = rendered(&report(), Format::Markdown);
    let lines: Vec<&str> = markdown.lines().collect();
    assert_eq!(lines.len(), 4, "{markdown}");
    assert_eq!(lines[2], "|  256 |  1.00 ± 0.25 | 3,210 ± 803 | ok     |");
    assert_eq!(lines[3], "| 1024 |          n/a |         OOM | OOM    |");
    let text = rendered(&report(), Format::Text);
    assert_eq!(text.matches("1.00 ± 0.25").count(), 1);

    let csv = rendered(&report(), Format::Csv);
    let lines: Vec<&str> = csv.lines().collect();
    assert_eq!(lines[0], "context_length,status,phase,mean_ms,std_ms");
    assert_eq!(lines[2], "1024,OOM,forward+backward,,");
    assert_eq!(lines.len(), 4);
    let json: Value = serde_json::from_str(&rendered(&report(), Format::Json)).unwrap();
    assert_eq!(json["rows"].as_array().unwrap().len(), 3);
    assert_eq!(json["rows"][0]["mean_ms"], json!(1.0));
    assert_eq!(json["rows"][0].get("forward"), None);
    assert_eq!(json.get("lines"), None);
}

#[test]
fn growth_needs_three_different_sizes() {
    let at = |sizes: &[f64]| -> Vec<(f64, f64)> { sizes.iter().map(|x| (*x, x * x)).collect() };
    assert_eq!(PowerLaw::fit(&[]), None);
    assert_eq!(PowerLaw::fit(&at(&[2.0, 4.0])), None);
    assert_eq!(PowerLaw::fit(&at(&[2.0, 4.0, 4.0, 2.0])), None);
    assert_eq!(PowerLaw::fit(&at(&[2.0, 4.0, 0.0, f64::NAN])), None);
    let law = PowerLaw::fit(&at(&[2.0, 4.0, 8.0, -1.0])).unwrap();
    assert_relative_eq!(law.exponent, 2.0, epsilon = 1e-12);
    assert_eq!(law.points, 3);
}

#[test]
fn noise_is_averaged_in_logarithms() {
    // By hand: x 1, 2, 4, so log x 0, 1, 2 in units of log 2; log y 0, 2, 1.
    let law = PowerLaw::fit(&[(1.0, 1.0), (2.0, 4.0), (4.0, 2.0)]).unwrap();
    assert_relative_eq!(law.exponent, 0.5, epsilon = 1e-12);
    assert_relative_eq!(law.coefficient, 2f64.powf(0.5), epsilon = 1e-12);
}

proptest! {
    #[test]
    fn an_exact_law_is_found(
        exponent in -3.0..3.0f64,
        coefficient in 1e-6..1e6f64,
        sizes in prop::collection::btree_set(1u32..100_000, 3..8),
    ) {
        let y = |x: f64| coefficient * x.powf(exponent);
        let points: Vec<(f64, f64)> = sizes.iter().map(|x| (f64::from(*x), y(f64::from(*x)))).collect();
        let law = PowerLaw::fit(&points).unwrap();
        // Sizes may be close to each other and far from 1.
        let spread = points[points.len() - 1].0 / points[0].0;
        let tolerance = 1e-11 / spread.ln();
        prop_assert!((law.exponent - exponent).abs() < tolerance, "{law:?}");
        prop_assert!((law.coefficient / coefficient - 1.0).abs() < 20.0 * tolerance, "{law:?}");
    }
}
