//! The estimate against measured configurations: those of `memory_estimate --verify` that are cheap.

#[path = "../../../examples/memory_estimate/cases.rs"]
mod cases;

use crate::check::refusal;
use cases::{COUNT, case, is_outside};
use tallow::attention::Algorithm;
use tallow::memory::{Mode, Workload, estimate, measure};
use tallow::model::TransformerConfig;

/// Those that take less than so much.
const CHEAP_BYTES: u64 = 64 << 20;

fn cheap() -> Vec<(usize, TransformerConfig, Workload)> {
    let all = (0..COUNT).map(|i| (i, case(i)));
    let all = all.map(|(i, (config, workload))| (i, config, workload));
    all.filter(|(_, config, workload)| estimate(config, workload).unwrap().peak_bytes < CHEAP_BYTES)
        .collect()
}

#[test]
fn the_sample_has_something_of_everything() {
    let sample = cheap();
    assert!((20..COUNT).contains(&sample.len()), "{}", sample.len());
    for attention in Algorithm::ALL {
        for mode in [Mode::Forward, Mode::ForwardBackward, Mode::TrainStep] {
            let of = |w: &Workload| w.attention == attention && w.mode == mode;
            assert!(sample.iter().any(|(.., w)| of(w)), "{attention} {mode:?}");
        }
    }
    for i in 0..COUNT {
        let (_, workload) = case(i);
        let alike = |w: &Workload| w.precision == workload.precision;
        assert!(sample.iter().any(|(.., w)| alike(w)));
        let alike = |w: &Workload| w.checkpointing == workload.checkpointing;
        assert!(sample.iter().any(|(.., w)| alike(w)));
        assert!((0..i).all(|j| case(j) != case(i)), "{i} twice");
    }
}

#[test]
fn near_is_two_percent_or_a_mib_and_hardly_below() {
    let mib = 1 << 20;
    for (predicted, measured, outside) in [
        (100 * mib, 100 * mib, false),
        (102 * mib, 100 * mib, false),
        (102 * mib + 1, 100 * mib, true),
        (98 * mib, 100 * mib, false),
        (98 * mib - 1, 100 * mib, true),
        (3 * mib, 2 * mib, false),
        (3 * mib + 1, 2 * mib, true),
        (19 * mib / 10, 2 * mib, true),
    ] {
        assert_eq!(
            is_outside(predicted, measured),
            outside,
            "{predicted} {measured}"
        );
    }
}

#[test]
fn what_cannot_be_run_is_refused_before_it_is() {
    let config = TransformerConfig::tiny();
    let workload = |batch_size, sequence_length| Workload {
        batch_size,
        sequence_length,
        ..Default::default()
    };
    for (batch_size, sequence_length, word) in [
        (0, 8, "batch_size must be positive"),
        (8, 0, "sequence_length must be positive"),
        (1 << 40, 1 << 20, "are available"),
        (usize::MAX, usize::MAX, "are available"),
    ] {
        refusal(
            measure(&config, &workload(batch_size, sequence_length)),
            &[word],
        );
    }
    let nothing = TransformerConfig {
        vocab_size: 0,
        ..TransformerConfig::tiny()
    };
    refusal(measure(&nothing, &workload(1, 8)), &["vocab_size"]);
}

#[cfg(not(feature = "cuda"))] // where candle's records of tensors are larger, which predictions leave out
mod near {
    use super::super::config;
    use super::{cheap, is_outside};
    use crate::child;
    use tallow::attention::Algorithm;
    use tallow::memory::{Mode, Workload, estimate, measure};
    use tallow::precision::Precision;

    /// Alone in its process, since the counts are the process's. One thread holds what the breakdown says it does; of
    /// several, on a busy machine, not all may at the same time.
    #[test]
    fn estimates_are_near_on_a_sample() {
        if child::ran("memory::verification::near::estimates_are_near_on_a_sample") {
            return;
        }
        // One pool for all: a thread that ends gives back what its products kept.
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build();
        let wrong = pool.unwrap().install(|| {
            let mut wrong = Vec::new();
            for (i, config, workload) in cheap() {
                let plan = estimate(&config, &workload).unwrap();
                let measured = measure(&config, &workload).unwrap();
                let line = format!("case {i}: predicted {}, {measured:?}", plan.peak_bytes);
                println!("{line}");
                if is_outside(plan.peak_bytes, measured.peak_bytes)
                    || is_outside(plan.after_forward_bytes, measured.after_forward_bytes)
                {
                    wrong.push(line);
                }
            }
            wrong
        });
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }

    /// Without a graph a segment's input goes with the segment, while copies of weights go on growing.
    #[test]
    fn segments_without_a_graph_take_what_is_predicted() {
        if child::ran("memory::verification::near::segments_without_a_graph_take_what_is_predicted")
        {
            return;
        }
        for (layers, strategy) in [(3, "every-2"), (9, "every-2"), (9, "sqrt"), (9, "every-5")] {
            let config = config(64, 160, layers, 300);
            let workload = Workload {
                batch_size: 8,
                sequence_length: 128,
                mode: Mode::Forward,
                attention: Algorithm::Flash,
                precision: Precision::BF16,
                checkpointing: strategy.parse().unwrap(),
                ..Default::default()
            };
            let plan = estimate(&config, &workload).unwrap();
            let measured = measure(&config, &workload).unwrap();
            println!("{layers} {strategy}: {} {measured:?}", plan.peak_bytes);
            // Of tensors and ops; a block's copies of weights have 94,208 bytes.
            let records = 12 * 1024 * layers as u64;
            assert!(
                plan.peak_bytes.abs_diff(measured.peak_bytes) < records,
                "{layers} {strategy}: {} {measured:?}",
                plan.peak_bytes
            );
        }
    }
}
