//! The estimate against the tracker, in every precision.

use super::{MODES, config};
use crate::child;
use candle_core::{Device, Storage};
use tallow::attention::Algorithm;
use tallow::memory::{Measured, Mode, Workload, estimate, measure};
use tallow::model::TransformerConfig;
use tallow::nn::Checkpointing;
use tallow::precision::{Precision, Regime};

pub(super) fn every_precision() -> Vec<Precision> {
    let mut all = vec![Precision::F32];
    for half in [Precision::BF16, Precision::F16] {
        for regime in [Regime::CudaAutocast, Regime::CpuAutocast] {
            let kept = half.with_regime(regime);
            all.extend([kept, kept.with_dropped_casts(true)]);
        }
        all.push(half.with_regime(Regime::Full));
    }
    all
}

#[test]
fn every_precision_takes_what_is_predicted() {
    if child::ran("memory::precisions::every_precision_takes_what_is_predicted") {
        return;
    }
    let configs = [
        (config(128, 352, 3, 1000), 4),
        (config(64, 256, 2, 8000), 2), // logits dominate
        (config(256, 700, 4, 500), 1), // weights dominate
        (config(64, 128, 1, 300), 16), // naive attention's probabilities dominate
    ];
    let mut wrong = Vec::new();
    for (index, (config, batch_size)) in configs.into_iter().enumerate() {
        let precisions = match index {
            0 => every_precision(),
            _ => vec![
                Precision::F32,
                Precision::BF16,
                Precision::BF16.with_regime(Regime::Full),
                Precision::F16.with_regime(Regime::Full),
            ],
        };
        let workload = |attention, precision, mode| Workload {
            batch_size,
            sequence_length: config.context_length,
            mode,
            attention,
            precision,
            ..Default::default()
        };
        for attention in Algorithm::ALL {
            for &precision in &precisions {
                for mode in MODES {
                    let workload = workload(attention, precision, mode);
                    let measured = measure(&config, &workload).unwrap();
                    wrong.extend(wrong_of(&config, &workload, &measured));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The bytes of a tensor in addition to its elements: candle's record with storage and device, which is larger in
/// builds with GPUs.
const RECORD_BYTES: usize = 223 + size_of::<Storage>() + size_of::<Device>();

/// Returns a description if estimate and measurement disagree.
pub(crate) fn wrong_of(
    config: &TransformerConfig,
    workload: &Workload,
    measured: &Measured,
) -> Option<String> {
    let plan = estimate(config, workload).unwrap();
    let pairs = [
        (
            plan.after_forward_bytes as f64,
            measured.after_forward_bytes as f64,
        ),
        (plan.peak_bytes as f64, measured.peak_bytes as f64),
    ];
    let line = format!("{pairs:?} {:?}", (config, workload));
    println!("{line}");
    // Records of tensors and ops; more where a segment has a record of each weight that it reads.
    let of_segments = usize::from(workload.checkpointing != Checkpointing::None) * 32;
    let records = config.num_layers.max(4) * (64 + of_segments);
    let records = (records * RECORD_BYTES) as f64;
    // The estimate includes the scratch memory of all threads; on a busy machine some may be idle.
    let idle = 1048576.0 * rayon::current_num_threads() as f64;
    let slack = [
        (0.001 * pairs[0].1 + records, 0.0),
        (0.01 * pairs[1].1 + records, idle),
    ];
    let mut differences = pairs.iter().zip(slack);
    let fits = differences.all(|((predicted, found), (slack, above))| {
        found - predicted <= slack && predicted - found <= slack + above
    });
    (!fits).then_some(line)
}

/// Activations match the formulas in the documentation.
#[test]
fn half_precision_follows_the_formulas() {
    let config = config(64, 100, 3, 500);
    let (l, b, t, d, f, h, v) = (3, 2, 128, 64, 100, 4, 500);
    let n = b * t;
    let tables = l * 2 * t * d / h;
    for attention in Algorithm::ALL {
        let (scores, rounded) = match attention {
            Algorithm::Naive => (b * h * t * t, 0),
            Algorithm::Flash => (b * h * t, n * d),
        };
        let plan = |precision| {
            let workload = Workload {
                batch_size: b as usize,
                sequence_length: t as usize,
                mode: Mode::TrainStep,
                attention,
                precision,
                ..Default::default()
            };
            estimate(&config, &workload).unwrap()
        };
        let p = config.num_parameters() as u64;
        let linear = p - v * d - 7 * d;

        let full = plan(Precision::F16.with_regime(Regime::Full));
        let in_half = l * (16 * n * d + 3 * n * f + rounded) + 2 * n * d;
        let in_f32 = l * (scores + 2 * n) + n + tables;
        assert_eq!(full.activation_bytes, 2 * in_half + 4 * in_f32);
        assert_eq!(full.parameter_bytes, 2 * p);
        assert_eq!(full.gradient_bytes, 2 * p);
        assert_eq!(full.optimizer_bytes, 12 * p);
        assert_eq!(full.weight_cast_bytes, 0);
        assert_eq!(full.logit_bytes, 2 * n * v + 4 * (2 * n + 1));

        for dropped in [false, true] {
            let autocast = plan(Precision::BF16.with_dropped_casts(dropped));
            let in_half = l * (14 * n * d + 3 * n * f + rounded) + n * d;
            let tables = if dropped { tables } else { t * d / h }; // one pair for all layers
            let in_f32 = l * (6 * n * d + 2 * n + scores) + 2 * n * d + n + tables;
            assert_eq!(autocast.activation_bytes, 2 * in_half + 4 * in_f32);
            assert_eq!(autocast.parameter_bytes, 4 * p);
            assert_eq!(autocast.gradient_bytes, 4 * p);
            assert_eq!(autocast.optimizer_bytes, 8 * p);
            let copied = if dropped { 0 } else { 2 * linear };
            assert_eq!(autocast.weight_cast_bytes, copied);
            assert_eq!(autocast.logit_bytes, 2 * n * v + 4 * (2 * n + 1));
        }
    }
}

#[test]
fn every_layer_adds_the_same() {
    for precision in every_precision() {
        for mode in MODES {
            let peak = |num_layers| {
                let config = TransformerConfig {
                    num_layers,
                    ..config(256, 1024, 1, 100)
                };
                let workload = Workload {
                    batch_size: 2,
                    sequence_length: 32,
                    mode,
                    precision,
                    ..Default::default()
                };
                let plan = estimate(&config, &workload).unwrap();
                assert_eq!(plan.breakdown.peak_bytes(), plan.peak_bytes);
                plan.peak_bytes
            };
            let added = peak(3) - peak(2);
            for layers in [3, 4, 9, 300] {
                assert_eq!(
                    peak(layers + 1) - peak(layers),
                    added,
                    "{precision} {mode:?}"
                );
            }
        }
    }
}

#[test]
fn the_account_is_a_table_with_formulas() {
    let workload = Workload {
        batch_size: 4,
        sequence_length: 256,
        precision: Precision::BF16,
        ..Default::default()
    };
    let plan = estimate(&TransformerConfig::preset("small").unwrap(), &workload).unwrap();
    assert!(plan.breakdown.terms.is_sorted_by_key(|part| part.kind));
    let text = plan.to_string();
    let line = |what: &str| {
        let mut lines = text.lines();
        let found = lines.find(|line| line.contains(what));
        found
            .unwrap_or_else(|| panic!("{what}: {text}"))
            .to_string()
    };
    for (what, words) in [
        ("probabilities", ["activations", "BHT^2", "144.0"]),
        ("gate", ["activations", "BTF", "72.0"]),
        ("exp_avg_sq", ["optimizer", "2VD", "490.7"]),
        ("ffn.w1.weight", ["weight casts", "FD", "54.0"]),
    ] {
        let line = line(what);
        for word in words {
            assert!(line.contains(word), "{word}: {line}");
        }
    }
    assert!(text.contains("B 4, T 256, D 768, F 3072, H 12, V 10000, L 12"));
}
