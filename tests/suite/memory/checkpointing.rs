//! Memory under checkpointing: estimated, measured, and recommended.

use super::precisions::wrong_of;
use super::{MODES, config};
use crate::check::refusal;
use crate::child;
use tallow::attention::Algorithm;
use tallow::memory::{Mode, Workload, estimate, least_memory_checkpointing, measure, recommend};
use tallow::model::TransformerConfig;
use tallow::nn::Checkpointing;
use tallow::precision::{Precision, Regime};

/// All strategies except `none`, which other tests measure.
const STRATEGIES: [&str; 4] = ["block", "every-2", "every-3", "sqrt"];

/// Returns the workload with a strategy.
fn by(checkpointing: Checkpointing, workload: &Workload) -> Workload {
    Workload {
        checkpointing,
        ..workload.clone()
    }
}

#[test]
fn every_strategy_takes_what_is_predicted() {
    if child::ran("memory::checkpointing::every_strategy_takes_what_is_predicted") {
        return;
    }
    let configs = [
        (config(64, 160, 9, 300), 8),
        (config(128, 352, 5, 1000), 2),
        (config(64, 256, 2, 8000), 2), // logits dominate
        (config(256, 700, 7, 500), 1), // weights dominate
        (config(64, 128, 1, 300), 16), // one block
    ];
    let precisions = [
        Precision::F32,
        Precision::BF16,
        Precision::BF16.with_dropped_casts(true),
        Precision::F16.with_regime(Regime::Full),
    ];
    let mut wrong = Vec::new();
    for (index, (config, batch_size)) in configs.iter().enumerate() {
        // The first model runs all combinations; the others alternate between those that differ most.
        let (precisions, modes, attentions) = match index {
            0 => (&precisions[..], &MODES[..], &Algorithm::ALL[..]),
            _ => (
                &precisions[..2],
                &[Mode::ForwardKeepingGraph, Mode::TrainStep][..],
                &Algorithm::ALL[index % 2..][..1],
            ),
        };
        for &attention in attentions {
            for &precision in precisions {
                for name in STRATEGIES {
                    let at = |mode| {
                        let workload = Workload {
                            batch_size: *batch_size,
                            sequence_length: config.context_length,
                            mode,
                            attention,
                            precision,
                            ..Default::default()
                        };
                        by(name.parse().unwrap(), &workload)
                    };
                    for &mode in modes {
                        let workload = at(mode);
                        let measured = measure(config, &workload).unwrap();
                        wrong.extend(wrong_of(config, &workload, &measured));
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn peak(strategy: Checkpointing, config: &TransformerConfig, workload: &Workload) -> u64 {
    estimate(config, &by(strategy, workload))
        .unwrap()
        .peak_bytes
}

/// Activations are O(L) without checkpointing and the blocks' inputs with recomputed blocks. With segments of sqrt(L)
/// blocks they are about 2 sqrt(L) at the peak.
#[test]
fn residuals_grow_with_the_root_of_the_depth() {
    let workload = Workload {
        batch_size: 64,
        sequence_length: 128,
        mode: Mode::ForwardBackward,
        ..Default::default()
    };
    let activations = |name: &str, layers| {
        let config = config(64, 256, layers, 10);
        let workload = by(name.parse().unwrap(), &workload);
        estimate(&config, &workload).unwrap().activation_bytes as f64
    };
    let stream = (4 * 64 * 128 * 64) as f64;
    let one = activations("none", 3) - activations("none", 2);
    let rest = activations("none", 1) - one + 4.0 * stream;
    for root in [4, 8, 16, 32] {
        let (layers, root) = (root * root, root as f64);
        let depth = layers as f64;
        assert!(activations("none", layers) > depth * one);
        let blocks = activations("block", layers);
        assert!(blocks > depth * stream && blocks < (depth * stream) + one + rest);
        // One segment's blocks, each with copies of its input and output, and each segment's input.
        let sqrt = activations("sqrt", layers);
        let most = root * (one + 3.0 * stream) + rest;
        assert!(
            sqrt > root * one && sqrt < most,
            "{layers} layers: {sqrt}, {most}"
        );
    }
}

/// Equal layers add equal memory, if there are many. (With few layers the peak may be at another point in time.)
#[test]
fn every_layer_adds_the_same() {
    for attention in Algorithm::ALL {
        for precision in [Precision::F32, Precision::F16.with_dropped_casts(true)] {
            for mode in MODES {
                for (name, first, step) in
                    [("none", 105, 1), ("block", 107, 1), ("every-3", 313, 3)]
                {
                    let peak = |layers| {
                        let workload = Workload {
                            batch_size: 16,
                            sequence_length: 128,
                            mode,
                            attention,
                            precision,
                            ..Default::default()
                        };
                        let strategy = name.parse().unwrap();
                        peak(strategy, &config(64, 128, layers, 100), &workload)
                    };
                    let added = peak(first + step) - peak(first);
                    for times in [1, 2, 20] {
                        let more = peak(first + times * step) - peak(first);
                        assert_eq!(more, times as u64 * added, "{name} {precision} {mode:?}");
                    }
                }
            }
        }
    }
}

/// The recommendation recomputes the fewest blocks of all strategies that fit, compared with trying all.
#[test]
fn the_cheapest_that_fits_is_recommended() {
    for (layers, vocab_size) in [(1, 300), (2, 300), (7, 300), (12, 5000), (12, 50)] {
        let config = config(64, 160, layers, vocab_size);
        let workload = Workload {
            batch_size: 8,
            sequence_length: 128,
            ..Default::default()
        };
        let names = ["none", "block"].map(String::from).into_iter();
        let every = (2..=layers).map(|blocks| format!("every-{blocks}"));
        let all: Vec<Checkpointing> = names
            .chain(every)
            .map(|name| name.parse().unwrap())
            .collect();
        let peaks: Vec<u64> = all.iter().map(|s| peak(*s, &config, &workload)).collect();
        let least = *peaks.iter().min().unwrap();
        for available_bytes in peaks.iter().flat_map(|peak| [*peak, peak - 1]) {
            let found = recommend(&config, &workload, available_bytes).unwrap();
            let fits = all
                .iter()
                .zip(&peaks)
                .filter(|(_, peak)| **peak <= available_bytes);
            let fewest = fits.map(|(s, _)| s.recomputed_blocks(layers)).min();
            assert_eq!(found.map(|s| s.recomputed_blocks(layers)), fewest);
            assert!(found.is_none_or(|s| peak(s, &config, &workload) <= available_bytes));
            assert_eq!(found.is_none(), available_bytes < least);
        }
        let all_of_it = recommend(&config, &workload, u64::MAX).unwrap();
        assert_eq!(all_of_it, Some(Checkpointing::None));
    }
    let no_model = TransformerConfig {
        d_ff: 0,
        ..Default::default()
    };
    assert!(recommend(&no_model, &Workload::default(), 1 << 30).is_err());
}

#[test]
fn least_memory_checkpointing_is_the_minimum() {
    for (layers, vocab_size) in [(1, 300), (2, 300), (7, 300), (12, 5000), (12, 50)] {
        let config = config(64, 160, layers, vocab_size);
        let workload = Workload {
            batch_size: 8,
            sequence_length: 128,
            ..Default::default()
        };
        let every = (1..=layers).map(|blocks| format!("every-{blocks}"));
        let all = std::iter::once("none".into()).chain(every);
        let peaks = all.map(|name| peak(name.parse().unwrap(), &config, &workload));
        let (strategy, peak_bytes) = least_memory_checkpointing(&config, &workload).unwrap();
        assert_eq!(Some(peak_bytes), peaks.min());
        assert_eq!(peak(strategy, &config, &workload), peak_bytes);
    }
}

#[test]
fn many_layers() {
    let config = config(64, 160, 100, 300);
    let workload = Workload {
        batch_size: 64,
        sequence_length: 128,
        ..Default::default()
    };
    let (strategy, peak_bytes) = least_memory_checkpointing(&config, &workload).unwrap();
    assert!(peak_bytes < peak(Checkpointing::Block, &config, &workload));
    assert!(peak_bytes < peak(Checkpointing::None, &config, &workload) / 4);
    assert_eq!(peak(strategy, &config, &workload), peak_bytes);
    assert!(recommend(&config, &workload, peak_bytes).unwrap().is_some());
}

#[test]
fn too_many_layers() {
    let of = |layers| config(64, 160, layers, 300);
    let workload = Workload {
        batch_size: 8,
        sequence_length: 128,
        ..Default::default()
    };
    assert!(estimate(&of(4096), &workload).unwrap().peak_bytes > 1 << 30);
    refusal(
        estimate(&of(4097), &workload),
        &["num_layers must be at most 4096"],
    );
    // More parameters than can be addressed.
    let estimate = estimate(&of(2_000_000_000), &workload).unwrap();
    assert_eq!(estimate.peak_bytes, u64::MAX);
}

/// A workload from before this field existed.
#[test]
fn workloads_without_it_keep_the_graph() {
    let mut json = serde_json::to_value(Workload::default()).unwrap();
    assert_eq!(json["checkpointing"], "none");
    json.as_object_mut().unwrap().remove("checkpointing");
    let workload: Workload = serde_json::from_value(json).unwrap();
    assert_eq!(workload, Workload::default());
}
