//! The largest sizes that fit in memory, and the smallest at which half precision saves memory.

use super::config;
use crate::check::refusal;
use crate::child;
use candle_core::Device;
use rstest::rstest;
use tallow::attention::Algorithm;
use tallow::bench::{EndToEnd, Execution, Status};
use tallow::memory::{
    Mode, Workload, estimate, largest_batch_size, recommend, smallest_sequence_not_fitting, tracker,
};
use tallow::model::TransformerConfig;
use tallow::nn::Checkpointing;
use tallow::precision::Precision;

fn peak(config: &TransformerConfig, workload: &Workload) -> u64 {
    estimate(config, workload).unwrap().peak_bytes
}

#[rstest]
fn the_largest_batch_is_the_last_that_fits(
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
    #[values(1, 4)] num_heads: usize,
    #[values(Precision::F32, Precision::BF16)] precision: Precision,
) {
    let config = TransformerConfig {
        num_heads,
        ..config(64, 128, 3, 300)
    };
    let at = |batch_size| Workload {
        batch_size,
        sequence_length: 700,
        attention,
        precision,
        ..Default::default()
    };
    for wanted in [1, 2, 3, 5, 7, 8, 9, 100] {
        let available_bytes = peak(&config, &at(wanted));
        let found = largest_batch_size(&config, &at(0), available_bytes).unwrap();
        let largest = (1..300)
            .rev()
            .find(|b| peak(&config, &at(*b)) <= available_bytes);
        assert_eq!(found, largest);
        assert!(found >= Some(wanted));
    }
    assert_eq!(largest_batch_size(&config, &at(4), 1000).unwrap(), None);
    // For sizes beyond any machine, each sequence adds the same memory.
    let added = peak(&config, &at(1001)) - peak(&config, &at(1000));
    let most = largest_batch_size(&config, &at(4), u64::MAX)
        .unwrap()
        .unwrap();
    let ratio = most as f64 / (u64::MAX / added) as f64;
    assert!((0.99..1.01).contains(&ratio), "{most}: {ratio}");
}

#[rstest]
fn the_smallest_sequence_beyond_is_the_first_that_does_not_fit(
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
    #[values(Mode::Forward, Mode::TrainStep)] mode: Mode,
) {
    let config = config(64, 128, 3, 300);
    let at = |sequence_length| Workload {
        batch_size: 1,
        sequence_length,
        attention,
        mode,
        ..Default::default()
    };
    for available_bytes in [8 << 20, 100 << 20, 1 << 40] {
        let beyond = smallest_sequence_not_fitting(&config, &at(7), available_bytes).unwrap();
        assert!(peak(&config, &at(beyond)) > available_bytes);
        assert!(peak(&config, &at(beyond - 1)) <= available_bytes);
    }
    assert_eq!(
        smallest_sequence_not_fitting(&config, &at(7), 0).unwrap(),
        1
    );
    let beyond = smallest_sequence_not_fitting(&config, &at(7), u64::MAX).unwrap();
    assert_eq!(peak(&config, &at(beyond)), u64::MAX);
    assert!(peak(&config, &at(beyond - beyond / 100)) < u64::MAX);
}

#[test]
fn what_is_no_model_fits_nowhere() {
    let config = TransformerConfig {
        d_ff: 0,
        ..Default::default()
    };
    let workload = Workload::default();
    let errors = [
        largest_batch_size(&config, &workload, 1 << 30).map(|_| ()),
        smallest_sequence_not_fitting(&config, &workload, 1 << 30).map(|_| ()),
    ];
    for error in errors {
        refusal(error, &["d_ff"]);
    }
}

/// Sizes beyond any machine, alone and combined, give a result or an error, without allocations of that size.
#[test]
fn predictions_allocate_nothing_for_the_sizes() {
    if child::ran("memory::fit::predictions_allocate_nothing_for_the_sizes") {
        return;
    }
    let small = config(64, 128, 3, 300);
    let mut configs = vec![(small.clone(), 1, 1)];
    for large in [1_000_000_000, usize::MAX / 2, usize::MAX] {
        let c = &small;
        #[rustfmt::skip]
        configs.extend([
            (c.clone(), large, 8),
            (c.clone(), 1, large),
            (c.clone(), large, large),
            (TransformerConfig { num_layers: large, ..c.clone() }, 1, 8),
            (TransformerConfig { vocab_size: large, ..c.clone() }, 1, 8),
            (TransformerConfig { d_ff: large, ..c.clone() }, 1, 8),
            (TransformerConfig { d_model: large, ..c.clone() }, 1, 8),
            (TransformerConfig { d_model: large - large % 4, ..c.clone() }, 1, 8),
            (TransformerConfig { head_dim: Some(large - large % 2), ..c.clone() }, 1, 8),
            (TransformerConfig { num_heads: large, d_model: large, ..c.clone() }, 1, 8),
            (TransformerConfig { context_length: large, ..c.clone() }, 1, 8),
            (TransformerConfig { context_length: large, ..c.clone() }, large, large),
        ]);
    }
    for (config, batch_size, sequence_length) in &configs {
        for checkpointing in [Checkpointing::None, Checkpointing::Block] {
            let workload = Workload {
                batch_size: *batch_size,
                sequence_length: *sequence_length,
                checkpointing,
                ..Default::default()
            };
            let what = format!("{config:?} {workload:?}");
            within(&what, || drop(estimate(config, &workload)));
            within(&what, || {
                drop(largest_batch_size(config, &workload, 1 << 30))
            });
            within(&what, || {
                drop(smallest_sequence_not_fitting(config, &workload, 1 << 30))
            });
            within(&what, || drop(recommend(config, &workload, 1 << 30)));
        }
        for execution in [Execution::Eager, Execution::Planned] {
            for mode in [Mode::Forward, Mode::TrainStep] {
                let run = EndToEnd {
                    batch_size: *batch_size,
                    sequence_length: *sequence_length,
                    execution,
                    available_bytes: Some(1 << 16),
                    ..super::run(config, 1, mode)
                };
                within(&format!("{run:?}"), || {
                    if let Ok(rows) = run.run(&Device::Cpu, |_, _| panic!("nothing may run")) {
                        assert_eq!(rows[0].status, Status::OutOfMemory, "{run:?}");
                    }
                });
            }
        }
    }
}

/// Calls `f` and checks that it allocates less than 16 MiB at its peak.
fn within(what: &str, f: impl FnOnce()) {
    let before = tracker::current_bytes().unwrap();
    tracker::reset_peak();
    f();
    let taken = tracker::peak_bytes().unwrap() - before;
    assert!(taken < 16 << 20, "{what} took {taken} bytes");
}
