//! Tensors that a graph saves for backward.

use super::config;
use candle_core::{DType, Device};
use rstest::rstest;
use tallow::attention::Algorithm;
use tallow::graph::{Target, trace};
use tallow::memory::{Mode, Workload, estimate, saved_tensors};
use tallow::ops;
use tallow::precision::Precision;

const BATCH: usize = 3;

/// The complete graph of a loss saves the sizes that the breakdown reports.
#[rstest]
fn a_models_graph_holds_what_the_account_says(
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
    #[values(Precision::F32, Precision::BF16)] precision: Precision,
) {
    let config = config(64, 100, 3, 500);
    let workload = Workload {
        batch_size: BATCH,
        sequence_length: config.context_length,
        attention,
        precision,
        ..Default::default()
    };
    let saved = saved_tensors(&workload.trace(&config).unwrap());
    let plan = estimate(&config, &workload).unwrap();
    let length = config.context_length;
    assert_eq!(saved.parameter_bytes(), plan.parameter_bytes);
    let copies = saved.residuals().filter(|t| t.op == "weight_cast");
    let copies: u64 = copies.map(|tensor| tensor.bytes).sum();
    assert_eq!(copies, plan.weight_cast_bytes);
    let breakdown = plan.activation_bytes + plan.logit_bytes + plan.weight_cast_bytes;
    assert_eq!(saved.residual_bytes(), breakdown);

    // The parts sum to the total, each layer saves the same, and every tensor has an op.
    let blocks = saved.by_module();
    let sum: u64 = blocks.iter().map(|(_, _, bytes)| bytes).sum();
    assert_eq!(sum, saved.residual_bytes());
    let of = |name: &str| blocks.iter().find(|block| block.0 == name).unwrap().2;
    // The rotary tables rounded to half precision are created once.
    let tables = match precision {
        Precision::F32 => 0,
        _ => 2 * 4 * length as u64 * (64 / 4 / 2),
    };
    assert_eq!(of("layers.0"), of("layers.1") + tables);
    assert_eq!(of("layers.1"), of("layers.2"));
    assert!(
        saved.residuals().all(|tensor| !tensor.op.is_empty()),
        "{saved:?}"
    );

    let wide = 4 * (BATCH * 4 * length) as u64;
    let (name, what, each) = match attention {
        Algorithm::Naive => ("attention::naive", "probabilities", wide * length as u64),
        Algorithm::Flash if precision == Precision::F32 => ("attention::flash", "lse", 2 * wide),
        Algorithm::Flash => ("attention::flash", "lse", wide),
    };
    let kept: Vec<_> = saved.tensors.iter().filter(|t| t.what == what).collect();
    assert!(kept.len() >= 3);
    for layer in 0..3 {
        let origin = format!("layers.{layer}/attn/{name}");
        let found = kept.iter().filter(|t| t.path == origin);
        assert_eq!(found.map(|t| t.bytes).collect::<Vec<_>>(), [each]);
    }
    let largest = saved.largest(5);
    assert!(largest.is_sorted_by_key(|tensor| std::cmp::Reverse(tensor.bytes)));
    let mut text = Vec::new();
    saved
        .report()
        .write_to(tallow::report::Format::Text, &mut text)
        .unwrap();
    let text = String::from_utf8(text).unwrap();
    assert!(text.contains("all of layers.2") && text.contains(&largest[0].path));
}

#[test]
fn recomputed_blocks_keep_nothing() {
    let saved = |checkpointing: &str| {
        let workload = Workload {
            batch_size: BATCH,
            sequence_length: 9,
            checkpointing: checkpointing.parse().unwrap(),
            ..Default::default()
        };
        saved_tensors(&workload.trace(&config(64, 100, 3, 500)).unwrap())
    };
    let of = |saved: &tallow::memory::SavedTensors, block: &str| -> u64 {
        let blocks = saved.by_module().into_iter();
        blocks.filter(|b| b.0 == block).map(|b| b.2).sum()
    };
    let [none, block] = ["none", "block"].map(saved);
    // Recomputed blocks save nothing; the last one, whose backward comes first, is not recomputed.
    assert_eq!(
        (of(&block, "layers.1"), of(&block, "layers.2")),
        (0, of(&none, "layers.2"))
    );
    let output = 4 * (BATCH * 9 * 64) as u64; // a block's output, returned by its checkpoint op
    assert_eq!(of(&block, "checkpoint"), 2 * output);
    let scores = |saved: &tallow::memory::SavedTensors| {
        let tensors = saved.residuals();
        tensors.filter(|t| t.what == "probabilities").count()
    };
    assert_eq!((scores(&none), scores(&block)), (3, 1));
}

#[test]
fn without_a_graph_nothing_is_saved() {
    let workload = Workload {
        batch_size: 1,
        sequence_length: 5,
        mode: Mode::Forward,
        ..Default::default()
    };
    let graph = workload.trace(&config(64, 100, 2, 500)).unwrap();
    assert!(saved_tensors(&graph).tensors.is_empty());
}

#[test]
fn a_storage_is_counted_once() {
    let x = candle_core::Var::ones((6, 4), DType::F32, &Device::Cpu).unwrap();
    let graph = trace(Target::Cpu, || {
        let y = ops::relu(&x)?;
        let view = y.t()?.narrow(0, 1, 2)?; // shares the storage
        ops::add(&ops::sum(&view)?, &ops::sum(&y)?)
    });
    let saved = saved_tensors(&graph.unwrap());
    let mut of_relu = saved.tensors.iter().filter(|t| t.path == "relu");
    let relu = of_relu.next().unwrap();
    assert_eq!((relu.bytes, relu.shape.as_slice()), (96, &[6, 4][..]));
    assert!(of_relu.next().is_none());
    assert_eq!(saved.parameter_bytes(), 96);
    let copy = 2 * 6 * 4; // of the view, because sum reads its elements in order
    assert_eq!(saved.residual_bytes(), 96 + copy + 3 * 4); // two sums and their sum
}
