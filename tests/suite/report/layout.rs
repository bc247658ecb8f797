//! Tables limited to a width: moved and omitted columns, and the exact text of the end-to-end summary.

use crate::words;
use proptest::prelude::*;
use serde_json::json;
use tallow::report::{Column, Fields, Format, Layout, Report};

use super::rendered;

#[path = "../../../examples/e2e_benchmark/answers.rs"]
mod answers;
#[path = "../../../examples/common/phases.rs"]
mod phases;
#[path = "../../../examples/e2e_benchmark/summary.rs"]
mod summary;
#[path = "../../../examples/e2e_benchmark/warmup.rs"]
mod warmup;

use answers::Measured;

fn within(width: usize) -> Layout {
    Layout {
        width: Some(width),
        hint: " (--columns all shows them)".into(),
        ..Default::default()
    }
}

/// Returns the rows of a configuration in all modes, as the benchmark measures it.
fn measured(length: u64, execution: &str, ms: f64) -> Vec<Fields> {
    let phases = [
        ("forward", "forward", 1.0),
        ("forward-backward", "forward", 1.1),
        ("forward-backward", "backward", 1.9),
        ("forward-backward", "forward+backward", 3.0),
        ("train-step", "forward", 1.2),
        ("train-step", "backward", 1.8),
        ("train-step", "optimizer", 0.5),
        ("train-step", "train step", 3.5),
    ];
    let row = |(mode, phase, times): (&str, &str, f64)| {
        let mut row = Fields::from_iter([("size", "tiny"), ("mode", mode), ("phase", phase)]);
        row.insert("batch_size", 4).insert("context_length", length);
        row.insert("attention", "naive")
            .insert("checkpointing", "none");
        row.insert("precision", "f32")
            .insert("execution", execution);
        row.insert("warmup_steps", 5)
            .insert("status", "ok")
            .insert("device", "cpu");
        row.insert("mean_ms", ms * times)
            .insert("std_ms", ms / 20.0)
            .insert("n", 10);
        let samples: Vec<f64> = [-1.0, 1.0]
            .iter()
            .cycle()
            .take(10)
            .map(|d| ms * (times + d / 20.0))
            .collect();
        row.insert("samples_ms", samples);
        row.insert("tokens_per_s", 12_345.6)
            .insert("mfu_percent", 41.5);
        row.insert("peak_bytes", length << 20)
            .insert("allocated_bytes", 3 << 20);
        row
    };
    let mut rows = phases.map(row).to_vec();
    let update = phases::update(&rows).unwrap();
    rows.insert(rows.len() - 1, update);
    rows
}

#[test]
fn backward_and_optimizer_are_added_step_by_step() {
    let rows = measured(256, "eager", 10.0);
    let update = phases::update(&rows).unwrap();
    let number = |key: &str| update.get(key).unwrap().as_f64().unwrap();
    approx::assert_relative_eq!(number("mean_ms"), 23.0, epsilon = 1e-9);
    approx::assert_relative_eq!(number("max_ms"), 24.0, epsilon = 1e-9); // each maximum is half a ms above its mean
    assert_eq!(update.get("phase"), Some(&json!("backward+optimizer")));
    assert_eq!(update.get("tokens_per_s"), None);
    let no_step: Vec<Fields> = rows
        .into_iter()
        .filter(|row| row.get("mode") != Some(&json!("train-step")))
        .collect();
    assert_eq!(phases::update(&no_step), None);
}

fn end_to_end(executions: &[&str]) -> Report {
    let mut rows = Vec::new();
    for length in [256, 1024] {
        for (i, execution) in executions.iter().enumerate() {
            rows.extend(measured(
                length,
                execution,
                length as f64 / (20.0 + 10.0 * i as f64),
            ));
        }
    }
    let executions = executions.iter().map(|name| name.to_string()).collect();
    let compared = summary::Compared::new(executions, vec!["f32".into()], false);
    Report {
        columns: compared.columns(false, false),
        lines: compared.lines(&rows),
        rows,
        ..Default::default()
    }
}

#[test]
fn the_summary_in_80_characters() {
    let expected = "\
Configuration: model tiny; B 4; attention naive; checkpointing none; warm-up 5;
  precision f32; execution eager; device cpu

   T  Forward (ms)      F+B (ms)  Ratio     Step (ms)  Backward (ms)
────  ────────────  ────────────  ─────  ────────────  ─────────────
 256  12.80 ± 0.64  38.40 ± 0.64   3.00  44.80 ± 0.64   23.04 ± 0.64
1024  51.20 ± 2.56   153.6 ± 2.6   3.00   179.2 ± 2.6   92.16 ± 2.56

1. Left out for the width (--columns all shows them): Optimizer (ms), Peak
   (MiB), B+O (ms), Tokens/s, MFU (%), After the step (MiB).
";
    assert_eq!(end_to_end(&["eager"]).to_text(&within(80)), expected);
}

#[test]
fn the_summary_in_100_characters() {
    let text = end_to_end(&["eager"]).to_text(&within(100));
    let expected = "   T  Forward (ms)      F+B (ms)  Ratio     Step (ms)  Backward (ms)  Optimizer (ms)  Peak (MiB)";
    assert_eq!(text.lines().nth(3), Some(expected), "{text}");
}

#[test]
fn the_summary_in_160_characters() {
    let text = end_to_end(&["eager"]).to_text(&within(160));
    let expected = "   T  Forward (ms)      F+B (ms)  Ratio     Step (ms)  Backward (ms)  Optimizer (ms)      B+O (ms)  Peak (MiB)  Tokens/s  MFU (%)  After the step (MiB)";
    assert_eq!(text.lines().nth(2), Some(expected), "{text}");
    assert!(!text.contains("Left out"), "{text}");
}

#[test]
fn what_is_compared_stands_together_with_its_speedup() {
    let expected = "\
Configuration: model tiny; B 4; attention naive; checkpointing none; warm-up 5; precision f32;
  device cpu

                                            Time (ms) ──────────────────────────  Peak (MiB) ─────
   T  Mode              Phase                      eager       planned  speed-up    eager  planned
────  ────────────────  ──────────────────  ────────────  ────────────  ────────  ───────  ───────
 256  forward           forward             12.80 ± 0.64   8.53 ± 0.43      1.50    256.0    256.0
 256  forward-backward  forward             14.08 ± 0.64   9.39 ± 0.43      1.50    256.0    256.0
 256  forward-backward  backward            24.32 ± 0.64  16.21 ± 0.43      1.50    256.0    256.0
 256  forward-backward  forward+backward    38.40 ± 0.64  25.60 ± 0.43      1.50    256.0    256.0
 256  train-step        forward             15.36 ± 0.64  10.24 ± 0.43      1.50    256.0    256.0
 256  train-step        backward            23.04 ± 0.64  15.36 ± 0.43      1.50    256.0    256.0
 256  train-step        optimizer            6.40 ± 0.64   4.27 ± 0.43      1.50    256.0    256.0
 256  train-step        backward+optimizer  29.44 ± 1.35  19.63 ± 0.90      1.50    256.0    256.0
 256  train-step        train step          44.80 ± 0.64  29.87 ± 0.43      1.50    256.0    256.0
";
    let report = end_to_end(&["eager", "planned"]);
    let text = report.to_text(&within(100));
    assert!(
        text.starts_with(expected) && !text.contains("Left out"),
        "{text}"
    );
    let markdown = rendered(&report, Format::Markdown);
    assert!(markdown.contains("| Time speed-up |"), "{markdown}");
}

/// Answers for times that are clear, noisy or contradictory.
#[test]
fn end_to_end_answers_follow_from_the_figures() {
    let report = end_to_end(&["eager", "planned"]);
    let executions = vec!["eager".into(), "planned".into()];
    let compared = summary::Compared::new(executions, vec!["f32".into()], false);
    let all = compared.measured(&report.rows);
    let said = answers::answers(&all, Some("How do they compare?"));
    let answer = |i: usize| said[i].answer.as_str();
    for (i, words) in [
        (
            0,
            "T 256 eager: forward with loss 14.08 ± 0.67 ms, backward 24.32 ± 0.67 ms; backward takes 1.73x as long",
        ),
        (
            1,
            "is 1.5% to 10.5% of the mean (most: T 1024 eager: optimizer of train-step): over 5% in 8 of 36 times.",
        ),
        (
            2,
            "T 256, forward: eager 12.80 ± 0.67 ms with a peak of 256.0 MiB, planned 8.53 ± 0.45 ms with a peak of 256.0 MiB; planned is 1.50x as fast as eager",
        ),
        (
            2,
            "T 256, backward+optimizer: eager 29.44 ± 1.35 ms, planned 19.63 ± 0.90 ms; planned is 1.50x as fast as eager",
        ),
        (2, "T 256, train step: eager 44.80 ± 0.67 ms with a peak"),
        (2, "and 2 more in the table."),
    ] {
        assert!(answer(i).contains(words), "{words} in {}", answer(i));
    }

    let run = |value: &str, samples: &[f64]| Measured {
        value: value.into(),
        samples_ms: samples.to_vec(),
        ..steps(5, &[], &[])
    };
    let compare = |eager: &[f64], planned: &[f64]| {
        let both = [run("eager", eager), run("planned", planned)];
        answers::comparison(&both.iter().collect::<Vec<_>>()).unwrap()
    };
    let alike = compare(&[10.0, 10.2, 9.8], &[10.1, 9.9, 10.0]);
    assert!(
        alike.contains("planned is as fast as eager (1.00x)"),
        "{alike}"
    );
    let noisy = compare(&[10.0, 90.0, 11.0], &[10.1, 9.9, 10.0]);
    assert!(
        noisy.contains("these figures do not decide whether planned is faster"),
        "{noisy}"
    );
    let slower = compare(&[5.0, 5.1, 4.9], &[10.1, 9.9, 10.0]);
    assert!(
        slower.contains("planned is 0.50x as fast as eager"),
        "{slower}"
    );
    let steady = run("", &[10.0, 10.1, 9.9]);
    let variability = answers::variability(&[&steady]).unwrap();
    assert!(variability.contains("small, at most 5%"), "{variability}");
}

/// Returns training steps after some warm-up steps.
fn steps(warmup_steps: usize, warmup_ms: &[f64], samples_ms: &[f64]) -> Measured {
    Measured {
        mode: "train-step".into(),
        phase: "train step".into(),
        warmup_steps,
        warmup_ms: warmup_ms.to_vec(),
        samples_ms: samples_ms.to_vec(),
        ..Default::default()
    }
}

#[test]
fn warm_up_is_judged_by_spread() {
    let steady = [10.0, 10.1, 9.9, 10.0];
    let longest = steps(5, &[90.0, 14.0, 10.0, 10.0, 10.0], &steady);
    let cold = Measured {
        first_step_page_faults: Some(1000),
        later_step_page_faults: Some(2.0),
        first_step_threads: Some(1),
        ..steps(0, &[], &[100.0, 10.0, 10.1, 9.9])
    };
    let one = steps(1, &[90.0], &[12.0, 12.1, 11.9, 12.0]);
    let two = steps(2, &[90.0, 12.0], &steady);
    let runs = [cold.clone(), one, two, longest.clone()];
    let without = warmup::without(&runs, true).unwrap();
    for words in [
        "It took 100.00 ms, 10.0 times the mean of the others",
        "10.00 ± 0.10 ms into 32.50 ± 45.00 ms",
    ] {
        assert!(without.contains(words), "{without}");
    }
    let why = warmup::why(&runs).unwrap();
    assert!(
        why.contains("touched 1,000 new memory pages (2 in a later step), started 1 thread"),
        "{why}"
    );
    let few = warmup::after_few(&runs).unwrap();
    for words in [
        "step 2 took 14.00 ms",
        "after 1 12.00 ± 0.08 ms (longer)",
        "(no difference), after 5",
    ] {
        assert!(few.contains(words), "{few}");
    }
    let enough = |runs: &[Measured]| warmup::enough(runs).unwrap();
    let decided = enough(&runs);
    assert!(
        decided.starts_with("2, of those tried") && decided.contains("after 1 1.20x as long"),
        "{decided}"
    );
    let alike = enough(&[steps(0, &[], &steady), longest.clone()]);
    assert!(
        alike.starts_with("0, of those tried: the means do not differ"),
        "{alike}"
    );

    // One outlier decides nothing. After a clear difference, whether the longest warm-up is enough stays open.
    let outlier = steps(5, &[90.0; 5], &[10.0, 10.0, 10.0, 80.0]);
    assert!(
        enough(&[steps(2, &[90.0; 2], &steady), outlier])
            .starts_with("These figures do not decide")
    );
    let slower = steps(2, &[90.0; 2], &[15.0, 15.1, 14.9]);
    assert!(enough(&[slower, longest]).starts_with("More than 2: after 2 1.50x as long"));
    let warm = steps(0, &[], &[10.0, 10.1, 9.9, 10.0]);
    assert!(
        warmup::without(&[warm], false)
            .unwrap()
            .contains("--isolate")
    );
    let unexplained = warmup::why(&[steps(0, &[], &[100.0, 10.0, 10.0])]).unwrap();
    assert!(unexplained.contains("do not explain it"), "{unexplained}");
    // Each mode has its own answers.
    let forward = Measured {
        mode: "forward".into(),
        phase: "forward".into(),
        ..cold.clone()
    };
    let all = warmup::answers(&[forward, cold], true);
    assert!(
        all.iter().any(|own| own.question.ends_with("(train step)")),
        "{all:?}"
    );
}

/// A run that did not fit has its status in place of its time, and no ratio.
#[test]
fn what_did_not_run_says_so_in_its_place() {
    let mut rows = measured(256, "eager", 10.0);
    let mut refused = measured(1024, "eager", 10.0);
    refused.retain(|row| {
        ["forward", "train step"].contains(&row.get("phase").unwrap().as_str().unwrap())
    });
    refused.remove(1);
    refused.truncate(1);
    for row in &mut refused {
        row.insert("status", "OOM").insert("mean_ms", None::<f64>);
    }
    rows.extend(refused);
    let compared = summary::Compared::new(vec!["eager".into()], vec!["f32".into()], false);
    let lines = compared.lines(&rows);
    assert_eq!(lines.len(), 2);
    assert_eq!(lines[1].get("Forward"), Some(&json!("OOM")));
    assert_eq!(lines[1].get("Ratio"), Some(&json!(null)));
    assert_eq!(lines[0].get("Ratio"), Some(&json!(3.0)));
}

/// Equal names move into the header, unless it has them already. Equal quantities stay, and columns without values are
/// omitted.
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
        let mut report = end_to_end(&["eager", "planned"]);
        let names: Vec<String> = names.iter().map(|name| name.to_string()).collect();
        report.select(&names).map(|()| report)
    };
    let chosen = choose(&["time", "t"]).unwrap();
    let headings: Vec<String> = chosen.columns.iter().map(Column::heading).collect();
    assert_eq!(
        headings,
        ["Time eager (ms)", "Time planned (ms)", "Time speed-up", "T"]
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

    // Column names that only a detail has are selected in that detail.
    let mut report = end_to_end(&["eager"]);
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
            column.minor(minors[i]).under(groups[i].as_str())
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
