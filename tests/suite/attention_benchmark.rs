//! The attention benchmark: rows, refusals, the memory breakdown, and the analysis.

mod analysis;
mod memory;
mod planned;

use candle_core::{DType, Device};
use rstest::rstest;
use serde_json::Value;
use tallow::attention::{Algorithm, Mask};
use tallow::bench::{AttentionRun, AttentionTask, Execution};
use tallow::memory::{AttentionWorkload, SelfAttentionWorkload, Target, attention_breakdown};
use tallow::report::Fields;

fn quick() -> AttentionRun {
    AttentionRun {
        warmup_steps: 1,
        iterations: 3,
        peak_flops: Some(1e15),
        available_bytes: Some(1 << 30),
        ..Default::default()
    }
}

fn attention(algorithm: Algorithm) -> AttentionRun {
    AttentionRun {
        task: AttentionTask::Alone(AttentionWorkload {
            algorithm,
            batch_size: 3,
            heads: 2,
            sequence_length: 37,
            head_dim: 24,
            ..Default::default()
        }),
        ..quick()
    }
}

fn module(algorithm: Algorithm) -> AttentionRun {
    AttentionRun {
        task: AttentionTask::Layer(SelfAttentionWorkload {
            algorithm,
            batch_size: 3,
            sequence_length: 19,
            d_model: 40,
            heads: 2,
            ..Default::default()
        }),
        ..quick()
    }
}

/// Returns the workload of a run of attention alone.
fn alone(run: &mut AttentionRun) -> &mut AttentionWorkload {
    match &mut run.task {
        AttentionTask::Alone(own) => own,
        layer => panic!("{layer:?}"),
    }
}

/// Returns the workload of a run of a layer.
fn layer(run: &mut AttentionRun) -> &mut SelfAttentionWorkload {
    match &mut run.task {
        AttentionTask::Layer(own) => own,
        alone => panic!("{alone:?}"),
    }
}

fn rows(run: &AttentionRun) -> Vec<Fields> {
    let result = run.run(&Device::Cpu, |_, _| ()).unwrap();
    result.rows().unwrap()
}

/// Returns the rows of a run that must not start.
fn rows_unrun(run: &AttentionRun) -> Vec<Fields> {
    let result = run.run(&Device::Cpu, |_, _| panic!("nothing may run"));
    result.unwrap().rows().unwrap()
}

fn text(row: &Fields, key: &str) -> String {
    let value = row.get(key).and_then(Value::as_str);
    value.unwrap_or_else(|| panic!("{key} of {row:?}")).into()
}

fn number(row: &Fields, key: &str) -> f64 {
    let value = row.get(key).and_then(Value::as_f64);
    value.unwrap_or_else(|| panic!("{key} of {row:?}"))
}

fn is_missing(row: &Fields, key: &str) -> bool {
    row.get(key).is_none_or(Value::is_null)
}

/// The columns that the end-to-end benchmark's rows have too.
const SCHEMA: [&str; 20] = [
    "batch_size",
    "context_length",
    "warmup_steps",
    "phase",
    "status",
    "n",
    "mean_ms",
    "std_ms",
    "min_ms",
    "max_ms",
    "median_ms",
    "cv_percent",
    "samples_ms",
    "warmup_ms",
    "tokens_per_s",
    "flops",
    "flops_per_s",
    "mfu_percent",
    "peak_bytes",
    "estimate_bytes",
];

fn check_measured(rows: &[Fields], flops: [f64; 2], tokens: f64) {
    let phases: Vec<String> = rows.iter().map(|row| text(row, "phase")).collect();
    assert_eq!(phases, ["forward", "backward", "forward+backward"]);
    let flops = [flops[0], flops[1], flops[0] + flops[1]];
    for (row, flops) in rows.iter().zip(flops) {
        assert_eq!(text(row, "status"), "ok");
        for key in SCHEMA {
            assert!(!is_missing(row, key), "{key} of {row:?}");
        }
        assert!(is_missing(row, "reason"));
        assert_eq!(number(row, "n"), 3.0);
        assert!(number(row, "min_ms") > 0.0);
        assert_eq!(number(row, "flops"), flops);
        let seconds = number(row, "median_ms") / 1e3;
        approx::assert_relative_eq!(number(row, "tokens_per_s"), tokens / seconds);
        let mfu = 100.0 * flops / seconds / 1e15;
        approx::assert_relative_eq!(number(row, "mfu_percent"), mfu);
        assert!(number(row, "peak_bytes") >= 0.0);
    }
    // A complete step lasts at least as long as its phases.
    let parts = number(&rows[0], "min_ms") + number(&rows[1], "min_ms");
    assert!(number(&rows[2], "max_ms") >= parts);
}

#[rstest]
fn attention_has_a_row_for_each_phase(
    #[values(Algorithm::Naive, Algorithm::Flash)] algorithm: Algorithm,
    #[values(Mask::Full, Mask::Causal)] mask: Mask,
    #[values(DType::F32, DType::F64, DType::BF16, DType::F16)] dtype: DType,
) {
    let mut run = attention(algorithm);
    (alone(&mut run).mask, alone(&mut run).dtype) = (mask, dtype);
    let rows = rows(&run);
    let pairs = match mask {
        Mask::Full => 37.0 * 37.0,
        _ => 37.0 * 38.0 / 2.0,
    };
    let forward = 4.0 * 6.0 * 24.0 * pairs;
    check_measured(&rows, [forward, 2.0 * forward], 3.0 * 37.0);
    assert_eq!(text(&rows[0], "implementation"), algorithm.name());
    assert_eq!(text(&rows[0], "dtype"), dtype.as_str());
    assert_eq!(number(&rows[0], "head_dim"), 24.0);
    assert!(!is_missing(&rows[0], "before_backward_bytes"));
}

#[rstest]
fn the_module_has_them_too(#[values(Algorithm::Naive, Algorithm::Flash)] algorithm: Algorithm) {
    let rows = rows(&module(algorithm));
    let attention = 4.0 * 3.0 * 40.0 * (19.0 * 20.0 / 2.0);
    let product = 2.0 * 3.0 * 19.0 * 40.0 * 40.0;
    // Four matmuls in forward; in backward one for each of the four weights and one for the output projection's input.
    let flops = [4.0 * product + attention, 5.0 * product + 2.0 * attention];
    check_measured(&rows, flops, 3.0 * 19.0);
    for key in [
        "model_bytes",
        "model_forward_bytes",
        "model_forward_backward_bytes",
        "forward_bytes",
        "backward_bytes",
    ] {
        assert!(!is_missing(&rows[0], key), "{key}");
    }
}

#[test]
fn steps_are_reported() {
    let mut seen = Vec::new();
    attention(Algorithm::Naive)
        .run(&Device::Cpu, |step, _| seen.push(step.to_string()))
        .unwrap();
    assert_eq!(seen, ["warm-up 1/1", "step 1/3", "step 2/3", "step 3/3"]);
}

#[test]
fn what_does_not_fit_is_a_row_with_its_sum() {
    let mut run = attention(Algorithm::Naive);
    alone(&mut run).sequence_length = 16_384;
    run.available_bytes = Some(1 << 20);
    let rows = rows_unrun(&run);
    assert_eq!(rows.len(), 1);
    let row = &rows[0];
    assert_eq!(
        (text(row, "phase"), text(row, "status")),
        ("forward+backward".into(), "OOM".into())
    );
    assert!(is_missing(row, "mean_ms") && is_missing(row, "n"));
    // 3 x 2 x 16,384^2 x 4 bytes, and the sum of all terms.
    let reason = text(row, "reason");
    assert!(
        reason.contains("probabilities BHT^2 6,144.0 MiB"),
        "{reason}"
    );
    assert!(reason.ends_with("1.0 MiB available"), "{reason}");
    assert_eq!(number(row, "available_bytes"), (1u64 << 20) as f64);
    let parts = row.get("breakdown").unwrap()["parts"].as_array().unwrap();
    let sum: f64 = parts.iter().map(|p| p["bytes"].as_f64().unwrap()).sum();
    assert_eq!(sum, number(row, "estimate_bytes"));
    let scores = 6.0 * 16_384.0 * 16_384.0;
    let out = 6.0 * 16_384.0 * 24.0;
    assert_eq!(number(row, "composed_bytes"), 4.0 * (2.0 * scores + out));

    // Flash attention needs far less.
    alone(&mut run).algorithm = Algorithm::Flash;
    let flash = attention_breakdown(alone(&mut run), Target::Cpu)
        .unwrap()
        .peak_bytes();
    assert!(50 * flash < sum as u64, "{flash}");
}

#[test]
fn the_module_runs_out_of_memory_in_a_row_too() {
    let mut run = module(Algorithm::Naive);
    layer(&mut run).d_model = 16_384;
    let rows = rows_unrun(&run);
    assert_eq!(rows.len(), 1);
    assert_eq!(text(&rows[0], "status"), "OOM");
    let reason = text(&rows[0], "reason");
    assert!(reason.contains("weights 4D^2 4,096.0 MiB"), "{reason}");
}

#[test]
fn heads_too_wide_for_flash_are_a_row() {
    let mut run = attention(Algorithm::Flash);
    alone(&mut run).head_dim = 257;
    let mut wide = module(Algorithm::Flash);
    (layer(&mut wide).d_model, layer(&mut wide).heads) = (512, 1);
    let module = rows(&wide);
    let planned = AttentionRun {
        execution: Execution::Planned,
        ..run.clone()
    };
    for rows in [rows(&run), rows(&planned), module] {
        assert_eq!(rows.len(), 1);
        assert_eq!(text(&rows[0], "status"), "unsupported");
        assert!(text(&rows[0], "reason").contains("at most 256"));
        assert!(is_missing(&rows[0], "mean_ms"));
    }
    alone(&mut run).head_dim = 256;
    assert_eq!(rows(&run).len(), 3);
    layer(&mut wide).heads = 2;
    assert_eq!(rows(&wide).len(), 3);
}

#[test]
fn a_time_budget_leaves_fewer_samples_and_says_so() {
    let mut run = attention(Algorithm::Flash);
    run.iterations = 1000;
    run.warmup_steps = 100;
    run.peak_flops = None;
    run.time_budget_ms = Some(1e-6);
    for row in rows(&run) {
        assert_eq!(text(&row, "status"), "ok");
        assert_eq!(number(&row, "n"), 2.0);
        assert_eq!(number(&row, "iterations"), 1000.0);
        assert!(text(&row, "reason").contains("time budget"));
        assert_eq!(row.get("samples_ms").unwrap().as_array().unwrap().len(), 2);
        assert_eq!(row.get("warmup_ms").unwrap().as_array().unwrap().len(), 1);
    }
}

#[test]
fn what_cannot_be_done_in_time_is_not_tried() {
    let mut run = attention(Algorithm::Naive);
    let flops = 12.0 * 6.0 * 24.0 * 37.0 * 37.0;
    run.peak_flops = Some(flops); // one step per second
    run.time_budget_ms = Some(999.0);
    let refused = rows(&run);
    assert_eq!(refused.len(), 1);
    assert_eq!(text(&refused[0], "status"), "over time budget");
    let reason = text(&refused[0], "reason");
    assert!(
        reason.contains("1000 ms") && reason.contains("999 ms"),
        "{reason}"
    );
    run.time_budget_ms = Some(1001.0);
    assert_eq!(rows(&run).len(), 3);
}

#[rstest]
#[case("batch_size", |run: &mut AttentionRun| alone(run).batch_size = 0)]
#[case("heads", |run: &mut AttentionRun| alone(run).heads = 0)]
#[case("sequence_length", |run: &mut AttentionRun| alone(run).sequence_length = 0)]
#[case("head_dim", |run: &mut AttentionRun| alone(run).head_dim = 0)]
#[case("iterations", |run: &mut AttentionRun| run.iterations = 0)]
fn nothing_to_measure_is_an_error(#[case] field: &str, #[case] break_it: fn(&mut AttentionRun)) {
    let mut run = attention(Algorithm::Naive);
    break_it(&mut run);
    let error = run.run(&Device::Cpu, |_, _| ()).unwrap_err().to_string();
    assert!(
        error.contains(&format!("{field} must be at least 1")),
        "{error}"
    );
}

#[test]
fn a_module_needs_heads_that_divide_it() {
    let mut run = module(Algorithm::Naive);
    layer(&mut run).heads = 3;
    let error = run.run(&Device::Cpu, |_, _| ()).unwrap_err().to_string();
    assert!(error.contains("divisible by num_heads 3"), "{error}");
    layer(&mut run).heads = 0;
    let error = run.run(&Device::Cpu, |_, _| ()).unwrap_err().to_string();
    assert!(error.contains("heads must be at least 1"), "{error}");
}
