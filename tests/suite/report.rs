//! Statistics, tables, charts and the stopwatch.

mod charts;
mod files;
mod formats;
mod layout;
mod lines;
mod statistics;
mod stopwatch;
mod tables;

use serde_json::{Value, json};
use tallow::report::{Answer, Column, Fields, Format, Report};

fn rendered(report: &Report, format: Format) -> String {
    let mut out = Vec::new();
    report.write_to(format, &mut out).unwrap();
    String::from_utf8(out).unwrap()
}

/// Returns a report with every character that has a meaning in some format, a missing value, a null, and a field that
/// no column shows.
fn nasty() -> Report {
    let mut first = Fields::new();
    first.insert(
        "name",
        "a|b & c_d_ 5% #1 $x$ {y} ~z ^w \\ back\"q\", `t` *s* <u> [v] --n",
    );
    first.insert("mean_ms", 1234.5678);
    first.insert("samples_ms", vec![1234.0, 1235.1356]);
    let mut second = Fields::new();
    second.insert("name", "two\nlines é");
    second.insert("mean_ms", None::<f64>);
    second.insert("peak_bytes", 3u64 << 29);
    Report {
        environment: Fields::from_iter([("device", "cpu\n0"), ("d_head", "64%")]),
        configuration: [("sizes", json!(["tiny", "xl"])), ("seed", Value::Null)]
            .into_iter()
            .collect(),
        columns: vec![
            Column::text("name", "Name & co"),
            Column::number("mean_ms", "Mean", "ms", 2),
            Column::mib("peak_bytes", "Peak"),
        ],
        rows: vec![first, second],
        answers: vec![Answer::new("Which?", "50% & more.")],
        notes: vec!["6N|12".into()],
        ..Default::default()
    }
}
