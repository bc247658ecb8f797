//! Properties common to the formats: schema, missing values, alignment, rounding.

use rstest::rstest;
use serde_json::{Value, json};
use tallow::bench::Timing;
use tallow::report::{Column, Fields, Format, Report};

use super::{nasty, rendered};

#[test]
fn csv_reads_back() {
    let text = rendered(&nasty(), Format::Csv);
    let mut reader = csv::Reader::from_reader(text.as_bytes());
    assert_eq!(
        reader.headers().unwrap(),
        vec!["name", "mean_ms", "peak_bytes", "samples_ms"]
    );
    let records: Vec<_> = reader.records().map(Result::unwrap).collect();
    assert_eq!(records.len(), 2);
    assert_eq!(
        Some(&records[0][0]),
        nasty().rows[0].get("name").unwrap().as_str()
    );
    assert_eq!(&records[1][0], "two\nlines é");
}

#[test]
fn json_has_the_schema_of_every_example() {
    let timing = Timing {
        samples_ms: vec![2.0, 4.0],
        warmup_ms: vec![9.0],
    };
    let mut measured = Fields::from_iter([("phase", "forward"), ("status", "ok")]);
    measured.merge(timing.statistics().unwrap().fields());
    measured.merge(Fields::of(&timing).unwrap());
    measured.insert("tokens_per_s", 341.3);
    measured.insert("flops", 1u64 << 60);
    let refused = Fields::from_iter([("phase", "backward"), ("status", "OOM")]);
    let report = Report {
        environment: Fields::from_iter([("device", "cpu")]),
        configuration: Fields::from_iter([("steps", 2)]),
        rows: vec![measured, refused],
        ..Default::default()
    };
    let json: Value = serde_json::from_str(&rendered(&report, Format::Json)).unwrap();
    assert_eq!(json["environment"]["device"], "cpu");
    assert_eq!(json["configuration"]["steps"], 2);
    assert_eq!(json["notes"], json!([]));
    let rows = json["rows"].as_array().unwrap();
    assert_eq!(rows[0]["mean_ms"], 3.0);
    assert_eq!(rows[0]["samples_ms"], json!([2.0, 4.0]));
    assert_eq!(rows[0]["flops"].as_u64(), Some(1 << 60));
    let keys = |row: &Value| row.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(keys(&rows[0]), keys(&rows[1]));
    for key in [
        "n",
        "mean_ms",
        "std_ms",
        "cv_percent",
        "samples_ms",
        "flops",
    ] {
        assert_eq!(rows[1][key], Value::Null, "{key}");
    }
}

#[test]
fn an_empty_report_is_still_a_document() {
    let empty = Report::default();
    let json: Value = serde_json::from_str(&rendered(&empty, Format::Json)).unwrap();
    assert_eq!(json["rows"], json!([]));
    for format in [Format::Text, Format::Markdown, Format::Csv, Format::Latex] {
        assert_eq!(rendered(&empty, format), "", "{format}");
    }
    let no_rows = Report {
        columns: vec![Column::text("size", "Size")],
        ..Default::default()
    };
    assert_eq!(rendered(&no_rows, Format::Csv), "size\n");
    assert_eq!(rendered(&no_rows, Format::Markdown), "| Size |\n| ---- |\n");
}

#[test]
fn columns_that_agree_stay_and_numbers_stand_right() {
    let row = |length: Value, seed: Value| -> Fields {
        [("size", json!("tiny")), ("length", length), ("seed", seed)]
            .into_iter()
            .collect()
    };
    let report = Report {
        columns: vec![
            Column::text("size", "Size"),
            Column::text("length", "T"),
            Column::text("seed", "Seed"),
        ],
        rows: vec![
            row(json!(256), json!(null)),
            row(json!(1024), json!("none")),
        ],
        ..Default::default()
    };
    assert_eq!(
        rendered(&report, Format::Markdown),
        "| Size |    T | Seed |\n| ---- | ---: | ---- |\n| tiny |  256 | n/a  |\n| tiny | 1024 | none |\n"
    );
}

#[rstest]
#[case(Column::number("x", "X", "ms", 2), json!(-0.001), "0.00")]
#[case(Column::number("x", "X", "ms", 1), json!(-1.25), "-1.2")]
#[case(Column::number("x", "X", "", 0).grouped(), json!(-1234567), "-1,234,567")]
#[case(Column::count("x", "X"), json!(9_007_199_254_740_993u64), "9,007,199,254,740,993")]
#[case(Column::number("x", "X", "GFLOP", 1).scaled(1e9), json!(2_560_000_000u64), "2.6")]
#[case(Column::number("x", "X", "%", 1).scaled(0.01), json!(0.415), "41.5")]
#[case(Column::number("x", "X", "ms", 1), json!("OOM"), "OOM")]
#[case(Column::number("x", "X", "ms", 1), json!(null), "n/a")]
#[case(Column::mib("x", "X"), json!(0), "0.0")]
#[case(Column::text("x", "X"), json!(true), "true")]
#[case(Column::text("x", "X"), json!([1, 2]), "1, 2")]
#[case(Column::text("x", "X"), json!({"a": [1]}), r#"{"a":[1]}"#)]
fn cells(#[case] column: Column, #[case] value: Value, #[case] expected: &str) {
    assert_eq!(column.cell(Some(&value)), expected);
}

#[test]
fn not_a_number_is_missing() {
    let row = Fields::from_iter([("a", f64::NAN), ("b", f64::INFINITY), ("c", 0.0)]);
    assert_eq!(
        serde_json::to_string(&row).unwrap(),
        r#"{"a":null,"b":null,"c":0.0}"#
    );
}

/// More decimals than the formatter supports are limited to those that a number has.
#[test]
fn decimals_without_end() {
    for decimals in [70_000, usize::MAX] {
        let cell = Column::number("x", "X", "", decimals).cell(Some(&json!(0.5)));
        assert!(cell.starts_with("0.500") && cell.len() < 2000, "{cell}");
        let smallest = f64::from_bits(1);
        let cell = Column::number("x", "X", "", decimals).cell(Some(&json!(smallest)));
        assert_eq!(cell.parse::<f64>(), Ok(smallest));
    }
}
