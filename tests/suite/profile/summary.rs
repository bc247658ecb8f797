//! Rows of a report, and their sums.

use super::{STEPS, record};
use crate::check::refusal;
use crate::settings::with_mask;
use rstest::rstest;
use tallow::attention::Algorithm;
use tallow::ops::{KernelPolicy, with_kernel_policy};
use tallow::precision::Precision;
use tallow::probe::Kind;
use tallow::profile::{Grouping, ProfileReport, Row, Selection};
use tallow::report::Format;

fn within(part: &str) -> Selection {
    Selection {
        within: Some(part.into()),
        ..Default::default()
    }
}

#[rstest]
fn rows_add_up(
    #[values(Grouping::Name, Grouping::Path, Grouping::Layer)] grouping: Grouping,
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
) {
    let recording = record(attention, Precision::F32);
    let sum = |report: &ProfileReport| report.rows.iter().map(|row| row.total_ns).sum::<u64>();
    let of = |selection: &Selection| ProfileReport::new(&recording, selection, grouping).unwrap();
    let all = of(&Selection::default());
    assert_eq!(sum(&all), all.whole_ns);
    let percent: f64 = all.rows.iter().map(|row| all.percent(row)).sum();
    assert!((percent - 100.0).abs() < 1e-6);

    let mut phases_ns = 0;
    for phase in ["forward", "backward", "optimizer"] {
        let report = of(&Selection::phase(phase));
        assert_eq!(sum(&report), report.whole_ns, "{phase}");
        phases_ns += report.whole_ns;
    }
    let between = all
        .rows
        .iter()
        .filter(|row| row.name.ends_with("between phases"));
    assert_eq!(
        phases_ns + between.map(|row| row.total_ns).sum::<u64>(),
        all.whole_ns
    );

    let parts = [
        "token_embeddings",
        "layers.0",
        "layers.1",
        "layers.2",
        "ln_final",
        "lm_head",
    ];
    let parts_ns: u64 = parts.iter().map(|part| of(&within(part)).whole_ns).sum();
    let optimizers_ns: u64 = ["clip_grad_norm", "adamw"]
        .iter()
        .map(|op| of(&within(op)).whole_ns)
        .sum();
    let ops = all.rows.iter().filter(|row| row.kind.is_some());
    assert_eq!(
        parts_ns + optimizers_ns,
        ops.map(|row| row.total_ns).sum::<u64>()
    );
}

#[test]
fn instances_are_those_of_a_model() {
    let recording = record(Algorithm::Naive, Precision::F32);
    let per_step = |grouping, selection: &Selection, name: &str| {
        let report = ProfileReport::new(&recording, selection, grouping).unwrap();
        let row = report.rows.iter().find(|row| row.name == name);
        let row = row.unwrap_or_else(|| panic!("no {name} in {:?}", report.rows));
        assert_eq!(row.statistics.as_ref().unwrap().n, row.instances);
        report.instances_per_step(row).unwrap()
    };
    let (name, path, layer) = (Grouping::Name, Grouping::Path, Grouping::Layer);
    let all = Selection::default();
    assert_eq!(per_step(name, &all, "linear"), 15.0); // q, k, v, output and w2 of three blocks
    assert_eq!(per_step(name, &all, "linear backward"), 15.0);
    assert_eq!(per_step(name, &within("layers.1"), "linear"), 5.0);
    assert_eq!(per_step(name, &within("attn"), "linear"), 12.0);
    assert_eq!(per_step(name, &within("layers.1/attn"), "linear"), 4.0);
    assert_eq!(per_step(path, &all, "layers.2/ffn/w2/linear backward"), 1.0);
    assert_eq!(per_step(layer, &all, "layers.*/ffn/w2/linear"), 3.0);
    assert_eq!(per_step(name, &Selection::phase("optimizer"), "adamw"), 1.0);
    let modules = Selection {
        kinds: vec![Kind::Module],
        ..Default::default()
    };
    assert_eq!(per_step(layer, &modules, "layers.*"), 3.0);
    let steps = Selection {
        kinds: vec![Kind::Step],
        ..Default::default()
    };
    assert_eq!(per_step(name, &steps, "step"), 1.0);
}

#[test]
fn a_part_is_of_whole_names() {
    let recording = record(Algorithm::Naive, Precision::F32);
    for part in ["layer", "layers.0/ffn/w1", "attn/layers.0", "layers.01"] {
        let refused = ProfileReport::new(&recording, &within(part), Grouping::Name);
        refusal(
            refused,
            &[&format!("{part:?}"), "[forward, backward, optimizer]"],
        );
    }
    let refused = ProfileReport::new(&recording, &Selection::phase("lunch"), Grouping::Name);
    assert!(refused.unwrap_err().to_string().contains("\"lunch\""));
}

#[test]
fn fused_rows_say_what_is_inside_and_references_take_it_apart() {
    let labels = |policy| {
        let recording = with_kernel_policy(policy, || record(Algorithm::Naive, Precision::F32));
        let report =
            ProfileReport::new(&recording, &Selection::phase("forward"), Grouping::Name).unwrap();
        report.rows.iter().map(Row::label).collect::<Vec<_>>()
    };
    let fused = labels(KernelPolicy::Prefer);
    let inside = "attention::naive (scores, scale, mask, softmax and values inside)";
    assert!(fused.iter().any(|label| label == inside), "{fused:?}");
    let apart = labels(KernelPolicy::Reference);
    for name in [
        "softmax", "scale", "mask", "matmul", "linear", "rms_norm", "rope", "swiglu",
    ] {
        assert!(
            apart.iter().any(|label| label == name),
            "{name} in {apart:?}"
        );
    }
    for name in [
        "split_heads",
        "merge_heads",
        "embedding",
        "cross_entropy",
        "add",
    ] {
        assert!(
            apart.iter().any(|label| label == name),
            "{name} in {apart:?}"
        );
    }
}

#[test]
fn softmax_as_an_op_of_its_own_says_that_scale_and_mask_are_inside() {
    use candle_core::{DType, Device, Tensor};
    use tallow::attention::{Mask, reference};
    use tallow::profile::Profiler;

    let q = Tensor::ones((2, 3, 5, 8), DType::F32, &Device::Cpu).unwrap();
    let config = with_mask(Mask::Causal);
    let _lock = super::exclusive();
    let profiler = Profiler::start_on_this_thread().unwrap();
    reference::naive(&q, &q, &q, &config).unwrap();
    let recording = profiler.finish().unwrap();
    let report = ProfileReport::new(&recording, &Selection::default(), Grouping::Path).unwrap();
    let mut ops: Vec<String> = report
        .rows
        .iter()
        .filter(|r| r.kind.is_some())
        .map(Row::label)
        .collect();
    ops.sort();
    assert_eq!(
        ops,
        [
            "scores/matmul",
            "softmax (scale and mask inside)",
            "values/matmul"
        ]
    );
    let products = report.sum("products", Row::is_matmul);
    assert_eq!(
        products.cost.unwrap().matmul_flops,
        2.0 * 2.0 * (2 * 3 * 5 * 5 * 8) as f64
    );
    assert_eq!(report.steps, None);
}

#[test]
fn tables_hold_every_row() {
    let recording = record(Algorithm::Naive, Precision::F32);
    let report = ProfileReport::new(&recording, &Selection::default(), Grouping::Name).unwrap();
    let mut json = Vec::new();
    report.table().write_to(Format::Json, &mut json).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
    let rows = json["rows"].as_array().unwrap();
    assert_eq!(rows.len(), report.rows.len());
    let linear = rows.iter().find(|row| row["name"] == "linear").unwrap();
    assert_eq!(linear["instances"], 15 * STEPS);
    assert_eq!(linear["instances_per_step"], 15.0);
    let candle = rows
        .iter()
        .find(|row| row["name"].as_str().unwrap().contains("gradient sums"));
    assert!(candle.unwrap()["instances"].is_null());
    let mut text = Vec::new();
    report.table().write_to(Format::Text, &mut text).unwrap();
    let text = String::from_utf8(text).unwrap();
    for heading in ["Time (%)", "Std (ms)", "Rate (GFLOP/s)", "Memory (GB/s)"] {
        assert!(text.contains(heading), "{heading} in {text}");
    }
}
