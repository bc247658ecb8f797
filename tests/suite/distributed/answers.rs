//! The sentences of `distributed_benchmark`, for figures that are clear, noisy or contradictory.

mod common {
    pub(super) use super::ways;
    pub(super) use crate::words;
}

#[path = "../../../examples/distributed_benchmark/answers.rs"]
mod sentences;
#[path = "../../../examples/common/ways.rs"]
#[allow(dead_code)] // the settings of steps
mod ways;

use sentences::{Collected, Held};
use tallow::distributed::Exchange;
use tallow::report::{Answer, Statistics};
use ways::{Strategy, Way};

const BUCKET: Exchange = Exchange::Overlapped {
    bucket_bytes: 10 << 20,
};

/// Returns step times around `mean` ms, at most `spread` from it.
fn times(mean: f64, spread: f64) -> Statistics {
    let samples = [-1.0, -0.5, 0.0, 0.5, 1.0].map(|x| mean + spread * x);
    Statistics::new(&samples).unwrap()
}

fn replicated(exchange: Exchange) -> Way {
    Way::Exchanged(Strategy::Replicated, exchange)
}

/// Returns all steps of a report, each exchange a tenth faster than the previous one.
fn steps(spread: f64) -> Vec<(Way, Statistics)> {
    let each = Exchange::Overlapped { bucket_bytes: 0 };
    let small = Exchange::Overlapped {
        bucket_bytes: 1 << 20,
    };
    let means = [
        (Way::Alone, 80.0),
        (replicated(Exchange::PerParameter), 120.0),
        (replicated(Exchange::Flat), 110.0),
        (replicated(each), 100.0),
        (replicated(small), 98.0),
        (replicated(BUCKET), 88.0),
        (Way::Exchanged(Strategy::FullyShard, BUCKET), 99.0),
    ];
    means.map(|(way, mean)| (way, times(mean, spread))).to_vec()
}

fn text(answers: &[Answer], question: &str) -> String {
    let mut found = answers.iter().filter(|a| a.question.contains(question));
    let answer = found
        .next()
        .unwrap_or_else(|| panic!("{question}: {answers:?}"));
    answer.answer.clone()
}

#[test]
fn of_clear_steps() {
    let answers = sentences::steps("tiny", 2, &steps(0.5));
    let naive = text(&answers, "naive DDP");
    assert!(
        naive.contains("120.0 ms, and 80.0 ms without the exchange: 40.0 ms (33%)"),
        "{naive}"
    );
    let flat = text(&answers, "one all-reduce of all gradients");
    assert!(
        flat.starts_with("A flat exchange is 1.09x as fast"),
        "{flat}"
    );
    let overlapped = text(&answers, "overlapping");
    assert!(overlapped.contains("1.20x as fast"), "{overlapped}");
    let buckets = text(&answers, "bucket size");
    assert!(
        buckets.starts_with(
            "An exchange in buckets of 10 MiB is 1.11x as fast as one in buckets of 1 MiB"
        ),
        "{buckets}"
    );
    let sharded = text(&answers, "fully shard");
    assert!(
        sharded.contains("fully shard is 0.89x as fast as replicated"),
        "{sharded}"
    );
}

#[test]
fn of_noisy_steps() {
    let answers = sentences::steps("tiny", 2, &steps(60.0));
    assert!(text(&answers, "naive DDP").contains("the spread hides communication"));
    for question in ["one all-reduce", "overlapping", "fully shard"] {
        let answer = text(&answers, question).to_lowercase();
        assert!(answer.contains("these figures do not decide"), "{answer}");
    }
    assert!(text(&answers, "bucket size").starts_with("These figures do not decide"));
}

/// If a step with an exchange is faster than one without, the report gives no share of communication.
#[test]
fn of_steps_that_contradict() {
    let naive = replicated(Exchange::PerParameter);
    let measured = [(Way::Alone, times(120.0, 1.0)), (naive, times(100.0, 1.0))];
    let answer = text(&sentences::steps("tiny", 2, &measured), "naive DDP");
    assert!(
        answer.contains("the spread hides communication") && !answer.contains('%'),
        "{answer}"
    );
    assert_eq!(sentences::steps("tiny", 1, &steps(0.5)), []);
}

#[test]
fn of_collectives() {
    let of = |large: Statistics| {
        let reduced = |mib, time, bus_gb_s| Collected {
            collective: "all_reduce",
            mib,
            time,
            bus_gb_s: Some(bus_gb_s),
        };
        let all = [reduced(1, times(1.0, 0.01), 1.0), reduced(16, large, 2.0)];
        text(&sentences::collectives(4, &all), "scale")
    };
    assert!(of(times(8.0, 0.1)).contains("fixed cost of a call"));
    assert!(of(times(16.0, 0.5)).contains("in proportion to the bytes"));
    assert!(of(times(32.0, 0.5)).contains("more than in proportion"));
    assert!(of(times(16.0, 15.0)).contains("spread is too large"));
    assert_eq!(sentences::collectives(4, &[]), []);
}

#[test]
fn of_memory() {
    let held = |part: u64| Held {
        init_bytes: (8 + 8 * part) << 20,
        peak_bytes: (80 + 8 * part) << 20,
        after_bytes: (70 + 8 * part) << 20,
        state_bytes: (8 * part) << 20,
        predicted_bytes: 80 << 20,
    };
    let sharded = Way::Exchanged(Strategy::ShardedOptimizer, BUCKET);
    let measured = [(replicated(BUCKET), held(2)), (sharded, held(1))];
    let answers = sentences::memory("tiny", 2, &measured);
    let answer = text(&answers, "sharded optimizer");
    for part in [
        "16.0 MiB instead of 24.0",
        "88.0 MiB instead of 96.0",
        "8.0 MiB instead of 16.0",
    ] {
        assert!(answer.contains(part), "{answer}");
    }
    assert_eq!(sentences::memory("tiny", 2, &measured[1..]), []);
}
