//! The complete model with every checkpointing strategy.

use super::{CPU, bits};
use crate::settings::{meta_of, with_weights};
use candle_core::{DType, Tensor};
use rstest::rstest;
use tallow::attention::Algorithm;
use tallow::model::{TransformerConfig, TransformerLM};
use tallow::nn::{self, Checkpointing};
use tallow::ops::{KernelPolicy, with_kernel_policy};
use tallow::precision::{Precision, Regime};

const STRATEGIES: [&str; 6] = [
    "block",
    "every-2",
    "every-3",
    "every-4",
    "every-100",
    "sqrt",
];

fn config(layers: usize) -> TransformerConfig {
    TransformerConfig {
        vocab_size: 29,
        context_length: 33,
        d_model: 18,
        num_layers: layers,
        num_heads: 3,
        d_ff: 25,
        ..Default::default()
    }
}

/// Returns a meta model.
pub fn meta(layers: usize, attention: Algorithm) -> TransformerLM {
    meta_of(&config(layers), attention)
}

/// Returns the model with a strategy and the same weights each time.
fn model(meta: &TransformerLM, strategy: &str, precision: Precision) -> TransformerLM {
    let weights = nn::seeded(3, precision.parameter_dtype(), &CPU);
    with_weights(meta, weights).with_checkpointing(strategy.parse().unwrap())
}

fn batch() -> [Tensor; 2] {
    let ids = |salt: u32| {
        (0..66)
            .map(move |i| (i * i + 7 * salt) % 29)
            .collect::<Vec<u32>>()
    };
    [1, 2].map(|salt| Tensor::from_vec(ids(salt), (2, 33), &CPU).unwrap())
}

/// Returns the bits of the loss and of every parameter's gradient.
fn step(model: &TransformerLM, precision: Precision) -> (Vec<u64>, Vec<(String, Vec<u64>)>) {
    let [tokens, targets] = batch();
    let loss = precision.run(|| model.loss(&tokens, &targets)).unwrap();
    let gradients = loss.backward().unwrap();
    let gradients = model.parameters().into_iter().map(|(name, var)| {
        let gradient = gradients.get(&var);
        let gradient = gradient.unwrap_or_else(|| panic!("{name} has no gradient"));
        let all = bits(gradient);
        assert!(
            all.iter().any(|bits| f64::from_bits(*bits) != 0.0),
            "{name}"
        );
        (name, all)
    });
    (bits(&loss), gradients.collect())
}

#[rstest]
fn gradients_have_the_same_bits(
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
    #[values(1, 2, 5, 7)] layers: usize,
    #[values(
        Precision::F32,
        Precision::BF16,
        Precision::BF16.with_dropped_casts(true),
        Precision::F16.with_regime(Regime::CpuAutocast),
        Precision::F16.with_regime(Regime::Full),
        Precision::BF16.with_regime(Regime::Full)
    )]
    precision: Precision,
) {
    let meta = meta(layers, attention);
    let plain = step(&model(&meta, "none", precision), precision);
    for strategy in STRATEGIES {
        let found = step(&model(&meta, strategy, precision), precision);
        assert!(found == plain, "{strategy}, {layers} layers, {precision}");
    }
}

/// Recomputation uses forward's kernel policy, here the references, although backward runs without one.
#[test]
fn the_kernel_policy_holds_again() {
    let meta = meta(3, Algorithm::Naive);
    let (precision, reference) = (Precision::F32, KernelPolicy::Reference);
    let loss = |strategy| {
        let model = model(&meta, strategy, precision);
        let [tokens, targets] = batch();
        let loss = with_kernel_policy(reference, || model.loss(&tokens, &targets));
        let gradients = loss.unwrap().backward().unwrap();
        let parameters = model.parameters().into_iter();
        let gradients = parameters.map(|(_, var)| bits(gradients.get(&var).unwrap()));
        gradients.collect::<Vec<_>>()
    };
    let plain = loss("none");
    let kernels = step(&model(&meta, "none", precision), precision).1;
    assert!(kernels.into_iter().map(|(_, bits)| bits).ne(plain.clone()));
    for strategy in STRATEGIES {
        assert!(loss(strategy) == plain, "{strategy}");
    }
}

#[test]
fn without_a_graph_nothing_changes() {
    let meta = meta(5, Algorithm::Flash);
    let logits = |strategy| {
        let model = model(&meta, strategy, Precision::BF16);
        let forward = || Precision::BF16.run(|| model.forward(&batch()[0]));
        let (recorded, quiet) = (forward().unwrap(), tallow::no_grad(forward).unwrap());
        assert!(recorded.track_op() && !quiet.track_op());
        assert_eq!(bits(&recorded), bits(&quiet));
        bits(&quiet)
    };
    let plain = logits("none");
    for strategy in STRATEGIES {
        assert_eq!(logits(strategy), plain, "{strategy}");
    }
}

/// Several threads train one model at the same time.
#[test]
fn threads_do_not_meet() {
    let meta = meta(5, Algorithm::Naive);
    let plain = step(&model(&meta, "none", Precision::BF16), Precision::BF16);
    for strategy in ["block", "sqrt"] {
        let model = model(&meta, strategy, Precision::BF16);
        std::thread::scope(|scope| {
            let steps: Vec<_> = (0..4)
                .map(|_| scope.spawn(|| step(&model, Precision::BF16)))
                .collect();
            for found in steps {
                assert!(found.join().unwrap() == plain, "{strategy}");
            }
        });
    }
}

/// Several threads run backward through one graph at the same time.
#[test]
fn threads_share_a_graph() {
    let meta = meta(5, Algorithm::Naive);
    let plain = step(&model(&meta, "none", Precision::F32), Precision::F32);
    let model = model(&meta, "every-2", Precision::F32);
    let blocks = model.checkpointing().recomputed_blocks(5);
    assert_eq!(blocks, 4);
    let [tokens, targets] = batch();
    let loss = model.loss(&tokens, &targets).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..3 {
                    let gradients = loss.backward().unwrap();
                    for ((name, var), (_, wanted)) in model.parameters().iter().zip(&plain.1) {
                        assert!(bits(gradients.get(var).unwrap()) == *wanted, "{name}");
                    }
                }
            });
        }
    });
}

/// A configuration from when it was a field.
#[test]
fn configurations_with_it_keep_the_graph() {
    let mut json = serde_json::to_value(config(2)).unwrap();
    assert!(json.get("checkpointing").is_none());
    json["checkpointing"] = "block".into();
    let read: TransformerConfig = serde_json::from_value(json).unwrap();
    assert_eq!(read, config(2));
    let model = TransformerLM::new(&read, 0, &CPU).unwrap();
    assert_eq!(model.checkpointing(), Checkpointing::None);
}

#[test]
fn f64_models_too() {
    let of = |strategy: &str| {
        let weights = nn::seeded(3, DType::F64, &CPU);
        let model = with_weights(&meta(3, Algorithm::Flash), weights);
        let model = model.with_checkpointing(strategy.parse().unwrap());
        step(&model, Precision::F32)
    };
    assert!(of("block") == of("none"));
}
