//! Complete runs of the examples: the number of rows of each kind, and the files that they write.

use super::process::{assert_refused, example, report, run};
use serde_json::Value;
use std::fs;
use std::path::Path;

/// Flags of a model of two layers, with steps of some milliseconds.
const TWO_LAYERS: &str =
    "--d-model 32 --d-ff 64 --num-layers 2 --num-heads 2 --vocab-size 50 --context-length 16";

/// Returns the number of rows that have all of these values.
fn count(report: &Value, values: &[(&str, &str)]) -> usize {
    let rows = report["rows"].as_array().unwrap().iter();
    rows.filter(|row| values.iter().all(|(key, value)| row[*key] == *value))
        .count()
}

/// Checks that a file exists, begins with `start` and contains `words`.
#[track_caller]
fn assert_file(path: &Path, start: &str, words: &str) {
    let bytes = fs::read(path).unwrap();
    let text = String::from_utf8_lossy(&bytes);
    assert!(bytes.starts_with(start.as_bytes()), "{path:?}");
    assert!(text.contains(words), "{words} is not in {path:?}");
}

#[test]
fn every_phase_is_timed() {
    let report = report(
        "e2e_benchmark --d-model 64 --d-ff 176 --num-layers 2 --num-heads 4 --vocab-size 256 --batch-size 2 \
         --context-length 32 --attention naive flash --warmup-steps 1 --steps 3 --strict",
    );
    assert_eq!(count(&report, &[("status", "ok")]), 18);
    for phase in [
        "forward",
        "backward",
        "optimizer",
        "backward+optimizer",
        "forward+backward",
        "train step",
    ] {
        assert!(count(&report, &[("phase", phase)]) >= 2, "{phase}");
    }
}

/// `benches/several_gpus.py` needs several GPUs, so nothing else runs it.
#[test]
fn the_fields_that_the_script_for_several_gpus_reads() {
    let collectives = "--part collectives --mib 1".to_string();
    let steps = format!("{TWO_LAYERS} --part steps --bucket-mib 1");
    let rates = "--product-tflops 1 --memory-gb-s 1 --reduce-gb-s 1 --gather-gb-s 1";
    let paper = format!("{TWO_LAYERS} --part paper {rates} --world-size 2");
    for (flags, fields) in [
        (collectives, ["collective", "mib", "bus_gb_s", "median_ms"]),
        (steps, ["strategy", "exchange", "median_ms", "tokens_per_s"]),
        (
            paper,
            ["strategy", "exchange", "step_seconds", "world_size"],
        ),
    ] {
        let report = report(&format!("distributed_benchmark {flags}"));
        for field in fields {
            assert!(!report["rows"][0][field].is_null(), "{field} of {flags}");
        }
    }
}

#[test]
fn checkpoints_and_precisions() {
    let line = format!(
        "e2e_benchmark {TWO_LAYERS} --steps 2 --mode train-step --checkpoint none block sqrt --precision f32 bf16"
    );
    let steps = [("phase", "train step"), ("status", "ok")];
    assert_eq!(count(&report(&line), &steps), 6);
    let line = format!("e2e_benchmark {TWO_LAYERS} --steps 2 --compile --precision f32,bf16,f16");
    let planned = [("execution", "planned"), ("status", "ok")];
    assert_eq!(count(&report(&line), &planned), 27);
}

#[test]
fn what_does_not_fit_is_a_row() {
    for (line, rows) in [
        (
            "e2e_benchmark --size 10b --mode train-step --memory-limit-gib 8",
            1,
        ),
        ("memory_profile --size 2.7b --memory-limit-gib 4", 6),
        ("compiled_benchmark --size 10b --memory-limit-gib 8", 6),
    ] {
        let found = count(&report(line), &[("status", "OOM")]);
        assert_eq!(found, rows, "{line}");
    }
}

/// Rows are measured, out of memory or unsupported; the report has the growth with T, and the plot is written.
#[test]
fn attention_by_context_length() {
    let folder = tempfile::tempdir().unwrap();
    let plot = folder.path().join("plot.svg");
    let report_of = report(&format!(
        "attention_benchmark --context-length 32 64 128 4096 --head-dim 8 --steps 3 --warmup-steps 1 \
         --memory-limit-gib 0.1 --compare naive flash planned planned-flash --strict --plot {}",
        plot.display()
    ));
    assert_eq!(count(&report_of, &[("status", "ok")]), 42);
    assert_eq!(count(&report_of, &[("status", "OOM")]), 2);
    assert!(report_of.to_string().contains("memory T^"));
    assert_file(&plot, "<svg", "</svg>");
    let report = report(
        "attention_benchmark --module --num-heads 1 --context-length 16 --d-model 64 512 --steps 3 --warmup-steps 1",
    );
    assert!(count(&report, &[("status", "unsupported")]) > 0);
}

/// The exercise's four sums, and the values in the toy model's table.
#[test]
fn mixed_precision() {
    let sums = run(example("mixed_precision_accumulation")).out;
    for sum in ["10.00013351", "9.95312500", "10.00213623", "4.00000000"] {
        assert!(sums.contains(sum), "{sum}");
    }
    let table = run(example("toy_model_dtypes --format csv")).out;
    assert!(
        table
            .lines()
            .any(|line| line == "layer norm,f32,f32,f16,bf16")
    );
    let details = report("toy_model_dtypes").to_string();
    assert_eq!(details.matches(r#""variance":"inf""#).count(), 3);
    let line = format!(
        "mixed_precision_benchmark {TWO_LAYERS} --rounds 1 --steps 2 --precision bf16-dropping-casts"
    );
    assert!(report(&line).to_string().contains("bf16-dropping-casts"));
}

#[test]
fn profiles() {
    let folder = tempfile::tempdir().unwrap();
    let [trace, flame] = ["trace.json", "flame.svg"].map(|name| folder.path().join(name));
    let line = format!("profile {TWO_LAYERS} --steps 2 --mode train-step");
    let ops = report(&format!(
        "{line} --trace {} --flame-graph {}",
        trace.display(),
        flame.display()
    ));
    assert!(ops.to_string().contains("swiglu_linear"));
    assert_file(&trace, "{", "traceEvents");
    assert_file(&flame, "<", "</svg>");
    let planned = report(&format!("{line} --compile=only --floor"));
    assert!(count(&planned, &[("execution", "planned")]) > 0);
    let sum = |key: &str| {
        let rows = planned["rows"].as_array().unwrap().iter();
        rows.map(|row| row[key].as_f64().unwrap()).sum::<f64>()
    };
    let [measured, floor, lost] = ["ms_per_step", "floor_ms_per_step", "lost_ms_per_step"].map(sum);
    assert!(floor > 0.0 && ((floor + lost) / measured - 1.0).abs() < 1e-9);
    let steps = report(&format!(
        "e2e_benchmark {TWO_LAYERS} --steps 2 --mode train-step --compile=only --accumulation 4"
    ));
    let rows = steps["rows"].as_array().unwrap().iter();
    assert!(rows.clone().count() > 0);
    for row in rows {
        assert_eq!(row["accumulation"], 4);
    }
}

/// Measured and estimated memory, with the files of the measurement.
#[test]
fn memory() {
    let folder = tempfile::tempdir().unwrap();
    let [timeline, snapshot] = ["step.png", "step.json"].map(|name| folder.path().join(name));
    let report_of = report(&format!(
        "memory_profile {TWO_LAYERS} --mode train-step --checkpoint block --timeline {} --snapshot {}",
        timeline.display(),
        snapshot.display()
    ));
    assert_eq!(
        count(&report_of, &[("mode", "train-step"), ("status", "ok")]),
        1
    );
    assert!(fs::read(&timeline).unwrap().starts_with(b"\x89PNG"));
    assert_file(&snapshot, "{", "device_traces");
    let estimate = report("memory_estimate --size small --memory-limit-gib 8");
    assert!(estimate.to_string().contains("residual"));
    // A planned step's moments in bf16 take half the memory.
    let state = |optimizer: &str| {
        let planned = format!("memory_estimate --size tiny --compile=only --optimizer {optimizer}");
        report(&planned)["rows"][0]["optimizer"].as_f64().unwrap()
    };
    assert!(state("adamw-bf16") < 0.51 * state("adamw"));
    let planned = report("memory_estimate SMALL --compile=only --memory-limit-gib 0.01");
    let answers = planned["answers"].to_string();
    for question in ["residual stream", "which strategy"] {
        assert!(answers.contains(question), "{question}: {answers}");
    }
    assert_eq!(planned["configuration"]["available memory"], "10.2 MiB");
    let row = &planned["rows"][0];
    let [largest_batch, largest_length] =
        ["largest_batch_size", "largest_context_length"].map(|key| row[key].as_u64());
    assert!(
        largest_batch >= Some(1) && largest_length >= Some(8),
        "{row}"
    );
}

#[test]
fn planned_next_to_eager() {
    let report_of = report("compiled_benchmark --config 2-16-32-2-2 --steps 2 --rounds 1");
    assert_eq!(count(&report_of, &[("status", "ok")]), 18);
    for words in [
        "Speed-ups of planned over eager",
        "What are the reasons for the difference?",
    ] {
        assert!(report_of.to_string().contains(words), "{words}");
    }
}

/// Efficiency and tokens a second follow from the estimated step.
#[test]
fn estimated_steps_of_several_ranks() {
    let report_of = report(
        "distributed_benchmark --d-model 64 --d-ff 256 --num-layers 4 --num-heads 4 --vocab-size 1000 --batch-size 2 \
         --context-length 32 --part paper --world-size 1 8 --product-tflops 1 --memory-gb-s 100 --reduce-gb-s 10 \
         --gather-gb-s 5",
    );
    let rows = report_of["rows"].as_array().unwrap();
    assert!(rows.len() >= 2, "{report_of}");
    for row in rows {
        let figure = |key: &str| row[key].as_f64().unwrap();
        let (world_size, step_seconds) = (figure("world_size"), figure("step_seconds"));
        let tokens_per_second = world_size * 2.0 * 32.0 / step_seconds;
        assert!((figure("tokens_per_second") / tokens_per_second - 1.0).abs() < 1e-9);
        let efficiency = figure("efficiency_percent");
        assert!(efficiency < 100.0 || world_size == 1.0, "{row}");
    }
}

/// A custom model has the same last loss eager and planned.
#[test]
fn a_model_of_ones_own() {
    let loss = |way: &str| {
        let report = report(&format!("custom_model {way} --steps 3"));
        let rows = report.to_string();
        let (_, after) = rows.split_once(r#""last loss":"#).unwrap();
        after.split([',', '}']).next().unwrap().to_string()
    };
    assert_eq!(loss(""), loss("--planned"));
}

/// A run continues from its checkpoint.
#[test]
fn training_resumes() {
    let folder = tempfile::tempdir().unwrap();
    let line = format!(
        "train --d-model 32 --num-layers 1 --num-heads 2 --sample 20 --schedule-steps 10 --checkpoint {}",
        folder.path().join("run.safetensors").display()
    );
    let first = run(example(&format!("{line} --steps 10")));
    assert_eq!(first.status, Some(0), "{first:?}");
    assert!(first.out.contains("% of floor"), "{first:?}");
    let again = format!("{line} --steps 12");
    assert_refused(&again, &run(example(&again)), 1, "run.safetensors");
    let on = run(example(&format!("{again} --resume")));
    assert_eq!(on.status, Some(0), "{on:?}");
}
