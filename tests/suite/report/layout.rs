//! Tables in a given width: columns that move into the header, and tables that are divided into blocks.

use proptest::prelude::*;
use tallow::report::{Column, Fields, Format, Report};

use super::rendered;

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
    assert_eq!(report.to_text(None), expected);
    // A single row keeps its first column, because there is no other row to compare with.
    let one = Report {
        rows: vec![row(1)],
        ..report
    };
    let text = one.to_text(None);
    assert!(
        text.contains("Model  Mean (ms)\n─────  ─────────\ntiny"),
        "{text}"
    );
}

#[test]
fn words_are_cut_where_no_column_fits_next_to_them() {
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
Origin                Cause
────────────────────  ──────────────────
…/q_proj/split_heads  what forward keeps
lm_head               short

Origin                        Size (MiB)
────────────────────────────  ──────────
…s.0/attn/q_proj/split_heads         1.0
lm_head                              1.0
";
    assert_eq!(report.to_text(Some(40)), expected);
}

/// A GPU's matmul kernels have names as long as a line.
#[test]
fn a_long_name_is_cut_rather_than_repeated_for_each_figure() {
    let row = |kernel: &str, ms: f64| {
        let mut row = Fields::from_iter([("kernel", kernel)]);
        row.insert("mean", ms).insert("count", 12);
        row
    };
    let report = Report {
        columns: vec![
            Column::text("kernel", "Kernel"),
            Column::ms("mean", "Mean"),
            Column::count("count", "A step"),
        ],
        rows: vec![
            row("sm80_xmma_gemm_f32f32_tilesize128x64x8_stage3", 1.5),
            row("adamw_f32", 0.25),
        ],
        ..Default::default()
    };
    let expected = "\
Kernel                    Mean (ms)  A step
────────────────────────  ─────────  ──────
sm80_xmma_gemm_f32f32_t…       1.50      12
adamw_f32                     0.250      12
";
    assert_eq!(report.to_text(Some(43)), expected);
}

/// Each block begins with the columns that tell all rows apart, and columns under one heading stay together.
#[test]
fn a_wide_table_is_divided_into_blocks() {
    let row = |length: u64, phase: &str, ms: f64| {
        let mut row = Fields::from_iter([("phase", phase)]);
        row.insert("length", length).insert("note", "a note");
        row.insert("eager", ms).insert("planned", ms / 2.0);
        row.insert("peak", 1u64 << 20);
        row
    };
    let mut report = Report {
        columns: vec![
            Column::text("length", "T"),
            Column::text("phase", "Phase"),
            Column::mib("peak", "Peak"),
            Column::ms("eager", "eager").group("Time"),
            Column::ms("planned", "planned").group("Time"),
        ],
        rows: vec![
            row(256, "forward", 1.0),
            row(256, "backward", 2.0),
            row(1024, "forward", 8.0),
        ],
        ..Default::default()
    };
    let expected = "\
   T  Phase     Peak (MiB)
────  ────────  ──────────
 256  forward          1.0
 256  backward         1.0
1024  forward          1.0

                Time (ms) ────
   T  Phase     eager  planned
────  ────────  ─────  ───────
 256  forward    1.00    0.500
 256  backward   2.00     1.00
1024  forward    8.00     4.00
";
    assert_eq!(report.to_text(Some(34)).trim_start(), expected);
    assert_eq!(report.to_text(None).lines().count(), 6);

    let latex = |report: &Report| {
        rendered(report, Format::Latex)
            .matches("\\begin{table}")
            .count()
    };
    assert_eq!(latex(&report), 1);
    for i in 0..4 {
        report
            .columns
            .push(Column::ms("eager", format!("Time {i}")));
    }
    assert_eq!(latex(&report), 2);
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
        groups in proptest::collection::vec("(|Group|Another one)", 5),
        note in "[a-z ]{0,80}",
    ) {
        let column = |i: usize| {
            let column = match i % 2 {
                0 => Column::text(i.to_string(), format!("Words {i}")),
                _ => Column::number(i.to_string(), format!("Figures {i}"), "ms", 1),
            };
            column.group(groups[i].as_str())
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
        let text = report.to_text(Some(width));
        for line in text.lines() {
            // A note's number and a header's indent have a minimum width.
            let room = width.max(4);
            prop_assert!(line.chars().count() <= room, "{width}: {line:?} in\n{text}");
        }
    }
}
