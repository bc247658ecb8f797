//! The estimate against measurements of the fifty configurations, as far as they are cheap.

#[path = "../../../examples/memory_estimate/answers.rs"]
#[allow(dead_code)] // belongs to the example
mod answers;
#[path = "../../../examples/memory_profile/answers.rs"]
#[allow(dead_code)]
mod profiled;

use super::cases;
use crate::check::refusal;
use crate::words;
use cases::{COUNT, case, is_outside};
use tallow::attention::Algorithm;
use tallow::bench::{EndToEndRow, StepMemory};
use tallow::memory::{Mode, Workload, estimate, measure};
use tallow::model::TransformerConfig;
use tallow::nn::Checkpointing;
use tallow::precision::Precision;

/// The limit of a cheap configuration's memory.
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
fn checkpointing_is_answered_by_its_figures() {
    let strategy = |name: &str, recomputed_blocks, mib: u64| answers::Strategy {
        name: name.into(),
        recomputed_blocks,
        peak_bytes: mib << 20,
        ..Default::default()
    };
    let strategies = [
        strategy("none", 0, 1000),
        strategy("block", 11, 600),
        strategy("every-6", 6, 800),
    ];
    let text = answers::checkpointing(&strategies, 12).unwrap().answer;
    let least = "block uses the least: 600.0 MiB instead of 1,000.0 MiB (40.0% less). It runs 11 of 12 blocks a second \
                 time in backward.";
    assert_eq!(text, least);
    let answer = answers::checkpointing(&strategies[..1], 12).unwrap();
    assert!(
        answer.answer.starts_with("No strategy saves memory"),
        "{answer:?}"
    );
    let nested = answers::nested(16, 1 << 20, 100 << 20).answer;
    for part in [
        "L a = 1,600.0 MiB",
        "this is 404.0 MiB: O(sqrt L)",
        "= 104.0 MiB: O(log L)",
        "at most 64",
    ] {
        assert!(nested.contains(part), "{part}: {nested}");
    }
}

/// Flash attention saves two f32 for each row of each head, in every block.
#[test]
fn flash_saves_two_numbers_a_row() {
    let medium = TransformerConfig::preset("medium").unwrap();
    let of = |attention| {
        let workload = Workload {
            attention,
            batch_size: 4,
            sequence_length: 1024,
            mode: Mode::ForwardBackward,
            ..Default::default()
        };
        estimate(&medium, &workload).unwrap().activation_bytes
    };
    let rows = (medium.num_layers * 4 * medium.num_heads * 1024) as u64;
    let saved_bytes = of(Algorithm::Flash) - (of(Algorithm::Naive) - rows * 1024 * 4);
    assert_eq!(saved_bytes, 2 * rows * 4);
}

#[test]
fn a_profile_answers_by_its_rows() {
    let row = |precision, checkpointing, mib: u64| profiled::Row {
        run: EndToEndRow {
            precision,
            checkpointing,
            phase: "train step".into(),
            memory: Some(StepMemory {
                peak_bytes: Some(mib << 20),
                ..Default::default()
            }),
            ..Default::default()
        },
        recorded: Some(profiled::Recorded {
            forward_peak_bytes: Some((mib - 2) << 20),
            backward_peak_bytes: Some(mib << 20),
            optimizer_peak_bytes: Some((mib - 4) << 20),
            ..Default::default()
        }),
        ..Default::default()
    };
    let rows = [
        row(Precision::F32, Checkpointing::None, 100),
        row(Precision::BF16, Checkpointing::None, 120),
        row(Precision::F32, Checkpointing::Block, 60),
    ];
    let names = ["first", "second", "third"].map(String::from);
    let answers = profiled::answers(&rows, &names);
    let text: Vec<&str> = answers
        .iter()
        .map(|answer| answer.answer.as_str())
        .collect();
    for part in [
        "first: backward is highest (forward 98.0 MiB, backward 100.0 MiB, optimizer 96.0 MiB)",
        "first 100.0 MiB; second 120.0 MiB; third 60.0 MiB.",
        "Peak of bf16: checkpointing none train step 20.0% more (120.0 MiB, f32 100.0 MiB).",
        "f32 train step: block uses the least (block 60.0 MiB (40.0% less); none 100.0 MiB)",
    ] {
        assert!(
            text.iter().any(|text| text.contains(part)),
            "{part}: {text:#?}"
        );
    }
    // Peaks alone do not tell whether memory falls in backward.
    assert!(!text.iter().any(|text| text.contains("falls")), "{text:#?}");
    let oom = EndToEndRow {
        estimate_bytes: 1 << 30,
        ..Default::default()
    };
    let oom = profiled::Row::new(oom, None);
    let text = &profiled::answers(&[oom], &names[..1])[0].answer;
    assert_eq!(text, "first OOM (needs 1,024.0 MiB).");
}

#[test]
fn what_cannot_be_run_is_refused_before_it_is() {
    let config = TransformerConfig::default();
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
        ..Default::default()
    };
    refusal(measure(&nothing, &workload(1, 8)), &["vocab_size"]);
}

#[cfg(not(feature = "cuda"))] // there candle's records of tensors, which estimates omit, are larger
mod near {
    use super::super::config;
    use super::{cheap, is_outside};
    use crate::child;
    use tallow::attention::Algorithm;
    use tallow::memory::{Mode, Workload, estimate, measure};
    use tallow::precision::Precision;

    /// Runs in its own process, because the tracker counts per process. One thread always allocates the estimated
    /// scratch memory; of several threads on a busy machine some may be idle.
    #[test]
    fn estimates_are_near_on_a_sample() {
        if child::ran("memory::verification::near::estimates_are_near_on_a_sample") {
            return;
        }
        // One pool for all cases, since a thread that ends frees its matmul buffers.
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

    /// Without a graph a segment's input is freed with the segment, while copies of weights accumulate.
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
            // Records of tensors and ops; one block's copies of weights have 94,208 bytes.
            let records = 12 * 1024 * layers as u64;
            assert!(
                plan.peak_bytes.abs_diff(measured.peak_bytes) < records,
                "{layers} {strategy}: {} {measured:?}",
                plan.peak_bytes
            );
        }
    }
}
