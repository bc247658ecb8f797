//! The trace and the flame graph.

use super::balance::invented_recording;
use super::{record, span};
use crate::child;
use serde_json::Value;
use std::collections::HashMap;
use tallow::attention::Algorithm;
use tallow::precision::Precision;
use tallow::probe::{Kind, Path};
use tallow::profile::{self, Profiler, Recording};

/// Checks the properties that viewers rely on. Returns the number of complete events of each thread.
fn validate(trace: &Value) -> HashMap<u64, usize> {
    let events = trace["traceEvents"].as_array().unwrap();
    let mut names = HashMap::new();
    let mut open: HashMap<u64, Vec<(i64, i64)>> = HashMap::new();
    let mut last_start: HashMap<u64, i64> = HashMap::new();
    let mut last_sample = 0;
    let mut counts = HashMap::new();
    let ns = |value: &Value| (value.as_f64().unwrap() * 1e3).round() as i64;
    for event in events {
        let thread = event["tid"].as_u64().unwrap();
        assert_eq!(event["pid"], 1);
        match event["ph"].as_str().unwrap() {
            "M" => {
                let name = event["args"]["name"].as_str().unwrap();
                assert!(!name.is_empty());
                if event["name"] == "thread_name" {
                    assert!(
                        names.insert(thread, name).is_none(),
                        "thread {thread} has two names"
                    );
                }
            }
            "C" => {
                let at = ns(&event["ts"]);
                assert!(at >= last_sample, "the counter goes back at {at}");
                last_sample = at;
                assert!(event["args"]["bytes"].as_u64().unwrap() > 0);
            }
            "X" => {
                assert!(names.contains_key(&thread), "thread {thread} has no name");
                let (start, length) = (ns(&event["ts"]), ns(&event["dur"]));
                let last = last_start.insert(thread, start).unwrap_or(0);
                assert!(start >= last && length >= 0, "not monotone: {event}");
                // Each event is inside its parent, or after it.
                let around = open.entry(thread).or_default();
                while around.last().is_some_and(|(_, end)| *end <= start) {
                    around.pop();
                }
                if let Some((_, end)) = around.last() {
                    assert!(start + length <= *end, "overlaps: {event}");
                }
                around.push((start, start + length));
                assert!(event["args"]["path"].is_string());
                *counts.entry(thread).or_insert(0) += 1;
            }
            other => panic!("unknown event {other}"),
        }
    }
    counts
}

fn read(recording: &Recording) -> Value {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    recording.save_trace(&path).unwrap();
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

#[test]
fn a_steps_trace_validates() {
    for attention in [Algorithm::Naive, Algorithm::Flash] {
        let recording = record(attention, Precision::F32);
        let trace = read(&recording);
        let counts = validate(&trace);
        assert_eq!(counts, HashMap::from([(0, recording.spans.len())]));
        let events = trace["traceEvents"].as_array().unwrap();
        let backward = events.iter().find(|event| {
            let path = &event["args"]["path"];
            event["name"] == "linear backward" && path == "layers.1/ffn/w2/linear"
        });
        let backward = &backward.unwrap()["args"];
        assert_eq!(backward["phase"], "backward");
        assert_eq!(
            backward["inputs"],
            serde_json::json!(["2x7x20 f32", "12x20 f32"])
        );
        assert_eq!(backward["output"], "2x7x12 f32");
        assert_eq!(backward["product_flops"], 4.0 * 14.0 * 12.0 * 20.0);
        // The suite's allocator counts, so there is a memory counter.
        let samples = events.iter().filter(|event| event["ph"] == "C").count();
        assert_eq!(samples, recording.spans.len());
    }
}

#[test]
#[should_panic(expected = "overlaps")]
fn the_validation_sees_overlaps() {
    let recording = Recording {
        spans: vec![
            span(Kind::Range, "a", "", (0, 10), None),
            span(Kind::Range, "b", "", (5, 15), None),
        ],
        threads: vec!["main".into()],
        duration_ns: 20,
        ..Default::default()
    };
    validate(&recording.trace());
}

/// All threads are recorded, so this runs in a process without other tests.
#[test]
fn threads_are_apart() {
    if child::ran("profile::pictures::threads_are_apart") {
        return;
    }
    let profiler = Profiler::start().unwrap();
    let work = || {
        let _outer = profile::range("outer");
        for _ in 0..50 {
            let _inner = profile::range("inner");
            std::hint::black_box(vec![0u8; 100]);
        }
    };
    std::thread::scope(|scope| {
        let builder = std::thread::Builder::new().name("second".into());
        builder.spawn_scoped(scope, work).unwrap();
        work();
    });
    let recording = profiler.finish().unwrap();
    assert!(recording.threads.contains(&"second".to_string()));
    let counts = validate(&read(&recording));
    assert_eq!(counts, HashMap::from([(0, 51), (1, 51)]));
    for span in &recording.spans {
        let parent = span.parent.map(|parent| recording.spans[parent].thread);
        assert!(parent.is_none_or(|thread| thread == span.thread));
    }
}

#[test]
fn a_flame_graph_holds_every_place_once() {
    let mut recording = invented_recording();
    let name = "a<b & \"c\"";
    recording.spans[4].path = Path::ROOT.child("layers.0").child(name);
    let svg = recording.flame_graph();
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
    assert!(svg.contains("one step: 0.00 ms"));
    let shares = [
        ("all", "100.00%"),
        ("forward", "30.00%"),
        ("layers.0", "20.00%"), // in forward
        ("a&lt;b &amp; &quot;c&quot;", "20.00%"),
        ("candle: its own ops and bookkeeping", "10.00%"),
        ("backward", "40.00%"),
        ("layers.0", "30.00%"),
        ("linear", "20.00%"), // including the cast inside it
        ("cast", "2.00%"),
        ("relu", "10.00%"),
        ("sorting the graph", "0.50%"),
        ("gradient sums and bookkeeping", "4.00%"),
        ("freeing the graph", "5.50%"),
        ("optimizer", "10.00%"),
        ("adamw", "9.80%"),
        ("unexplained", "0.20%"),
        ("in no phase", "20.00%"),
        ("unexplained", "20.00%"),
    ];
    let lines: Vec<&str> = svg.lines().filter(|line| line.starts_with("<g>")).collect();
    assert_eq!(lines.len(), shares.len());
    for (name, share) in shares {
        let is_it = |line: &&&str| {
            line.starts_with(&format!("<g><title>{name}: "))
                && line.contains(&format!(", {share}</title>"))
        };
        assert_eq!(
            lines.iter().filter(is_it).count(),
            1,
            "{name} {share} in {svg}"
        );
    }

    // No rectangle leaves the picture, and those of a row do not overlap.
    let attribute = |line: &str, name: &str| -> f64 {
        let value = line.split(&format!(" {name}=\"")).nth(1).unwrap();
        value.split('"').next().unwrap().parse().unwrap()
    };
    let mut rows: HashMap<String, Vec<(f64, f64)>> = HashMap::new();
    for line in lines {
        let (x, width) = (attribute(line, "x"), attribute(line, "width"));
        assert!(x >= 9.99 && x + width <= 1390.01, "{line}");
        let row = rows.entry(attribute(line, "y").to_string()).or_default();
        row.push((x, width));
    }
    for row in rows.values_mut() {
        row.sort_by(|a, b| a.0.total_cmp(&b.0));
        assert!(
            row.windows(2).all(|w| w[0].0 + w[0].1 <= w[1].0 + 0.02),
            "{row:?}"
        );
    }
}
