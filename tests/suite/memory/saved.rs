//! What a graph holds, tensor by tensor.

use super::config;
use candle_core::{DType, Device, Tensor};
use rstest::rstest;
use tallow::attention::Algorithm;
use tallow::memory::{Workload, estimate, saved_tensors, watch_graphs};
use tallow::model::{TransformerConfig, TransformerLM};
use tallow::no_grad;
use tallow::precision::Precision;

const BATCH: usize = 3;

/// The graph of a loss, whole, and the sizes of what it holds as the breakdown has them.
#[rstest]
fn a_models_graph_holds_what_the_account_says(
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
    #[values(Precision::F32, Precision::BF16)] precision: Precision,
) {
    let config = TransformerConfig {
        attention,
        ..config(64, 100, 3, 500)
    };
    let model = TransformerLM::new(&config, 0, &Device::Cpu).unwrap();
    let length = config.context_length;
    let tokens = Tensor::ones((BATCH, length), DType::U32, &Device::Cpu).unwrap();
    let watch = watch_graphs();
    let loss = precision.run(|| model.loss(&tokens, &tokens)).unwrap();
    let saved = saved_tensors(&loss);
    let unwatched = {
        drop(watch);
        // Another test may watch meanwhile, but not the ops of this one.
        saved_tensors(&precision.run(|| model.loss(&tokens, &tokens)).unwrap())
    };

    let plan = estimate(
        &config,
        &Workload {
            batch_size: BATCH,
            sequence_length: length,
            attention,
            precision,
            ..Default::default()
        },
    )
    .unwrap();
    assert_eq!(saved.parameter_bytes(), plan.parameter_bytes);
    let copies = saved.residuals().filter(|t| t.what == "weight copy");
    let copies: u64 = copies.map(|tensor| tensor.bytes).sum();
    assert_eq!(copies, plan.weight_cast_bytes);
    // All but the tables of positions in half precision, which take no gradient.
    let tables = match precision {
        Precision::F32 => 0,
        _ => 4 * 3 * length as u64 * 2 * (64 / 4),
    };
    let breakdown = plan.activation_bytes + plan.logit_bytes + plan.weight_cast_bytes;
    assert!(
        breakdown - saved.residual_bytes() <= tables,
        "{breakdown} in the breakdown, {} saved",
        saved.residual_bytes()
    );

    // Sums of parts are the whole, each layer has the same, and every tensor has an op.
    let blocks = saved.by_block();
    let sum: u64 = blocks.iter().map(|(_, _, bytes)| bytes).sum();
    assert_eq!(sum, saved.residual_bytes());
    let sum: u64 = saved.by_op().iter().map(|(_, _, bytes)| bytes).sum();
    assert_eq!(sum, saved.residual_bytes());
    let of = |name: &str| blocks.iter().find(|block| block.0 == name).unwrap().2;
    assert_eq!(of("layers.0"), of("layers.1"));
    assert!(
        saved.residuals().all(|tensor| tensor.path.is_some()),
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
        let found = kept.iter().filter(|t| t.origin() == origin);
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
    assert!(text.contains("all of layers.2") && text.contains(&largest[0].origin()));

    // Without names the outputs are seen all the same.
    let outputs = |saved: &tallow::memory::SavedTensors| -> u64 {
        let outputs = saved.residuals().filter(|tensor| tensor.what == "output");
        outputs.map(|tensor| tensor.bytes).sum()
    };
    assert_eq!(outputs(&unwatched), outputs(&saved));
}

#[test]
fn recomputed_blocks_keep_nothing() {
    let saved = |checkpointing: &str| {
        let config = TransformerConfig {
            checkpointing: checkpointing.parse().unwrap(),
            ..config(64, 100, 3, 500)
        };
        let model = TransformerLM::new(&config, 0, &Device::Cpu).unwrap();
        let tokens = Tensor::ones((BATCH, 9), DType::U32, &Device::Cpu).unwrap();
        let _watch = watch_graphs();
        saved_tensors(&model.loss(&tokens, &tokens).unwrap())
    };
    let of = |saved: &tallow::memory::SavedTensors, block: &str| -> u64 {
        let blocks = saved.by_block().into_iter();
        blocks.filter(|b| b.0 == block).map(|b| b.2).sum()
    };
    let [none, block] = ["none", "block"].map(saved);
    // Blocks run again leave nothing; the last one, whose backward comes first, is not.
    assert_eq!(
        (of(&block, "layers.1"), of(&block, "layers.2")),
        (0, of(&none, "layers.2"))
    );
    let output = 4 * (BATCH * 9 * 64) as u64; // a block's, as the op that stands for it hands it on
    assert_eq!(of(&block, "checkpoint"), 2 * output);
    let scores = |saved: &tallow::memory::SavedTensors| {
        let tensors = saved.residuals();
        tensors.filter(|t| t.what == "probabilities").count()
    };
    assert_eq!((scores(&none), scores(&block)), (3, 1));
}

#[test]
fn without_a_graph_nothing_is_saved() {
    let model = TransformerLM::new(&config(64, 100, 2, 500), 0, &Device::Cpu).unwrap();
    let tokens = Tensor::ones((1, 5), DType::U32, &Device::Cpu).unwrap();
    let _watch = watch_graphs();
    let logits = no_grad(|| model.forward(&tokens)).unwrap();
    assert!(saved_tensors(&logits).tensors.is_empty());
}

#[test]
fn watches_outlast_one_another() {
    let x = candle_core::Var::ones(5, DType::F32, &Device::Cpu).unwrap();
    let first = watch_graphs();
    let _second = watch_graphs();
    drop(first);
    let saved = saved_tensors(&tallow::ops::relu(&x).unwrap());
    assert_eq!(saved.tensors[1].origin(), "relu");
}

#[test]
fn a_storage_is_counted_once() {
    let x = candle_core::Var::ones((6, 4), DType::F32, &Device::Cpu).unwrap();
    let _watch = watch_graphs();
    let y = tallow::ops::relu(&x).unwrap();
    let view = y.t().unwrap().narrow(0, 1, 2).unwrap(); // one storage
    let both = (view.sum_all().unwrap() + y.sum_all().unwrap()).unwrap();
    let saved = saved_tensors(&both);
    let of_relu: Vec<_> = saved
        .tensors
        .iter()
        .filter(|t| t.origin() == "relu")
        .collect();
    assert_eq!(of_relu.len(), 1);
    assert_eq!(
        (of_relu[0].bytes, of_relu[0].shape.as_slice()),
        (96, &[6, 4][..])
    );
    assert_eq!(saved.parameter_bytes(), 96);
    assert_eq!(saved.residual_bytes(), 96 + 3 * 4); // two sums and theirs
}
