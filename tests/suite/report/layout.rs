//! Tables in a given width: columns that move into the header, and columns that are left out.

use proptest::prelude::*;
use tallow::bench::Execution;
use tallow::report::{Column, Fields, Format, Layout, Report};

use super::rendered;

fn within(width: usize) -> Layout {
    Layout {
        width: Some(width),
        hint: " (--columns all shows them)".into(),
        ..Default::default()
    }
}

/// Names that agree move into the header, unless it says so already; quantities do not, and those without a value go.
#[test]
fn what_agrees_moves_into_the_header() {
    let row = |length: u64| {
        let mut row = Fields::from_iter([("size", "tiny"), ("precision", "f32")]);
        row.insert("length", length)
            .insert("ms", 1.5)
            .insert("mfu", None::<f64>);
        row
    };
    let report = Report {
        configuration: Fields::from_iter([("model tiny", "d_model 128"), ("data", "null")]),
        columns: vec![
            Column::text("size", "Model"),
            Column::text("length", "T"),
            Column::text("precision", "Precision"),
            Column::number("ms", "Mean", "ms", 1),
            Column::number("mfu", "MFU", "%", 1),
        ],
        rows: vec![row(1), row(2)],
        ..Default::default()
    };
    let expected = "\
Configuration: model tiny: d_model 128; data null; precision f32

T  Mean (ms)
─  ─────────
1        1.5
2        1.5
";
    assert_eq!(report.to_text(&Layout::default()), expected);
    let all = Layout {
        every_column: true,
        ..Default::default()
    };
    let text = report.to_text(&all);
    assert!(
        text.contains("Model  T  Precision  Mean (ms)  MFU (%)"),
        "{text}"
    );
    // A single row keeps its first column, because there is no other row to compare with.
    let one = Report {
        rows: vec![row(1)],
        ..report
    };
    let text = one.to_text(&Layout::default());
    assert!(
        text.contains("Model  Mean (ms)\n─────  ─────────\ntiny"),
        "{text}"
    );
}

#[test]
fn needed_words_are_cut_before_a_needed_column_goes() {
    let row = |origin: &str, cause: &str| {
        let mut row = Fields::from_iter([("origin", origin), ("cause", cause)]);
        row.insert("bytes", 1u64 << 20);
        row
    };
    let report = Report {
        columns: vec![
            Column::text("origin", "Origin"),
            Column::text("cause", "Cause"),
            Column::mib("bytes", "Size"),
        ],
        rows: vec![
            row("layers.0/attn/q_proj/split_heads", "what forward keeps"),
            row("lm_head", "short"),
        ],
        ..Default::default()
    };
    let expected = "\
Origin                Cause               Size (MiB)
────────────────────  ──────────────────  ──────────
…n/q_proj/split_heads  what forward keeps         1.0
";
    let text = report.to_text(&within(53));
    assert_eq!(
        text.lines().next(),
        Some("Origin                 Cause               Size (MiB)"),
        "{text}"
    );
    assert_eq!(text.lines().nth(2), expected.lines().nth(2), "{text}");
    assert!(!text.contains("Left out"), "{text}");
}

#[test]
fn columns_are_chosen_by_name() {
    let choose = |names: &[&str]| {
        let mut report = crate::end_to_end::report(&crate::end_to_end::BOTH);
        let names: Vec<String> = names.iter().map(|name| name.to_string()).collect();
        report.select(&names).map(|()| report)
    };
    let chosen = choose(&["time", "t"]).unwrap();
    let headings: Vec<String> = chosen.columns.iter().map(Column::heading).collect();
    assert_eq!(
        headings,
        [
            "Phase",
            "Time eager (ms)",
            "Time planned (ms)",
            "Time speed-up",
            "T"
        ],
        "what tells rows apart stays"
    );
    assert!(
        rendered(&chosen, Format::Csv).contains("mean_ms"),
        "CSV keeps every field"
    );
    let error = choose(&["T", "nonsense"]).unwrap_err().to_string();
    assert!(
        error.contains("nonsense") && error.contains("Time speed-up"),
        "{error}"
    );

    // Names that a detail has and the table has not are the detail's.
    let mut report = crate::end_to_end::report(&[Execution::Eager]);
    report.details.push(Report {
        columns: vec![
            Column::text("origin", "Origin"),
            Column::mib("bytes", "Size"),
        ],
        ..Default::default()
    });
    report.select(&["origin".into()]).unwrap();
    assert!(report.columns.len() > 1);
    assert_eq!(report.details[0].columns.len(), 1);
}

#[test]
fn details_are_in_every_format() {
    let detail = Report {
        title: "Largest allocations".into(),
        columns: vec![Column::text("origin", "Origin")],
        rows: vec![Fields::from_iter([("origin", "lm_head")])],
        notes: vec!["A note.".into()],
        ..Default::default()
    };
    let report = Report {
        details: vec![detail],
        ..super::nasty()
    };
    for format in [Format::Text, Format::Markdown, Format::Json, Format::Latex] {
        let text = rendered(&report, format);
        for part in ["Largest allocations", "lm", "A note."] {
            assert!(text.contains(part), "{format}: {part} in {text}");
        }
    }
    let json: serde_json::Value = serde_json::from_str(&rendered(&report, Format::Json)).unwrap();
    assert_eq!(json["details"][0]["rows"][0]["origin"], "lm_head");
    assert!(
        !rendered(&report, Format::Csv).contains("lm_head"),
        "one CSV is one table"
    );
    let folder = tempfile::tempdir().unwrap();
    report
        .save(Format::Csv, folder.path().join("rows.csv"))
        .unwrap();
    let saved = std::fs::read_to_string(folder.path().join("rows-largest-allocations.csv"));
    assert_eq!(saved.unwrap(), "origin\nlm_head\n");
}

proptest! {
    /// No line of any table is longer than the width.
    #[test]
    fn no_line_exceeds_the_width(
        width in 1usize..120,
        cells in proptest::collection::vec(proptest::collection::vec("[a-z/ é]{0,30}", 5), 0..4),
        minors in proptest::collection::vec(0u8..3, 5),
        groups in proptest::collection::vec("(|Group|Another one)", 5),
        note in "[a-z ]{0,80}",
    ) {
        let column = |i: usize| {
            let column = match i % 2 {
                0 => Column::text(i.to_string(), format!("Words {i}")),
                _ => Column::number(i.to_string(), format!("Figures {i}"), "ms", 1),
            };
            column.drop_rank(minors[i]).group(groups[i].as_str())
        };
        let row = |row: &Vec<String>| row.iter().enumerate().map(|(i, c)| (i.to_string(), c.as_str())).collect();
        let report = Report {
            title: "Title".into(),
            columns: (0..5).map(column).collect(),
            rows: cells.iter().map(row).collect(),
            notes: vec![note],
            ..Default::default()
        };
        let report = Report { details: vec![report.clone()], ..report };
        let text = report.to_text(&within(width));
        for line in text.lines() {
            // A note's number and a header's indent have a minimum width.
            let room = width.max(4);
            prop_assert!(line.chars().count() <= room, "{width}: {line:?} in\n{text}");
        }
    }
}
