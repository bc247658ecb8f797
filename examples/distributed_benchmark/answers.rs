//! The handout's questions on collectives, data parallelism and sharding, answered from figures.

use super::common::words::compared;
use serde::Serialize;
use tallow::distributed::Exchange;
use tallow::report::{Answer, Speedup, Statistics, Verdict, format_mib};

/// An all-reduce that was timed.
#[derive(Clone, Debug)]
pub struct Collected {
    pub mib: usize,
    pub time: Statistics,
    pub bus_gb_s: f64,
}

/// A step that was timed.
#[derive(Clone, Debug)]
pub struct Measured {
    /// What is divided; `alone` without an exchange.
    pub strategy: &'static str,
    pub exchange: Option<Exchange>,
    pub step: Statistics,
}

impl Measured {
    /// The exchange in a sentence: `an exchange in buckets of 10 MiB`.
    fn name(&self) -> String {
        match self.exchange {
            Some(exchange @ Exchange::Overlapped { bucket_bytes: 1.. }) => {
                format!("an exchange in {exchange}")
            }
            Some(exchange) => format!("an exchange {exchange}"),
            None => "no exchange".into(),
        }
    }
}

/// A rank's memory, in bytes.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Held {
    pub strategy: &'static str,
    pub init_bytes: u64,
    pub peak_bytes: u64,
    pub after_bytes: u64,
    pub state_bytes: u64,
}

/// distributed_communication_single_node: how the time of an all-reduce grows with its size, and the ring it is.
pub fn collectives(ranks: usize, reduced: &[Collected]) -> Vec<Answer> {
    let (Some(small), Some(large)) = (reduced.first(), reduced.last()) else {
        return Vec::new();
    };
    if small.mib == large.mib {
        return Vec::new();
    }
    let times = |a: f64, b: f64| format!("{:.1} times", b / a);
    let slowed = Speedup::new(&large.time, &small.time);
    let bytes = large.mib as f64 / small.mib as f64;
    let growth = match slowed.filter(Speedup::is_clear) {
        Some(slowed) if slowed.ratio + slowed.error < bytes => {
            "less than in proportion: the fixed cost of a call weighs on small buffers"
        }
        Some(slowed) if slowed.ratio - slowed.error > bytes => {
            "more than in proportion: large buffers do not stay in a cache"
        }
        Some(_) => "in proportion to the bytes",
        None => {
            "but their spread is too large to say how fast; more steps on a quiet machine would"
        }
    };
    vec![
        Answer::new(
            "How does an all-reduce scale with the size of its buffer?",
            format!(
                "From {} to {} MiB ({}) its time grows from {:.2} to {:.2} ms ({}), {growth}. The bus rate goes from \
                 {:.2} to {:.2} GB/s.",
                small.mib,
                large.mib,
                times(small.mib as f64, large.mib as f64),
                small.time.mean_ms,
                large.time.mean_ms,
                times(small.time.mean_ms, large.time.mean_ms),
                small.bus_gb_s,
                large.bus_gb_s
            ),
        ),
        Answer::new(
            "Which ring does an all-reduce of S bytes need?",
            format!(
                "Reduce-scatter and all-gather in turn send 2 (N - 1) / N S bytes a rank. A ring that passes whole \
                 buffers around sends (N - 1) S, N / 2 times as much: {:.1} times with {ranks} ranks.",
                ranks as f64 / 2.0
            ),
        ),
    ]
}

/// naive_ddp, minimal_ddp_flat, ddp_overlap and ddp_bucketed, and what dividing optimizer and weights costs in time.
pub fn steps(model: &str, ranks: usize, measured: &[Measured]) -> Vec<Answer> {
    let replicated = |is_it: fn(Exchange) -> bool| {
        let own = measured.iter().filter(|m| m.strategy == "replicated");
        own.filter(move |m| m.exchange.is_some_and(is_it))
    };
    let alone = measured.iter().find(|m| m.exchange.is_none());
    let naive = replicated(|e| e == Exchange::PerParameter).next();
    let flat = replicated(|e| e == Exchange::Flat).next();
    let overlapped = replicated(|e| e == Exchange::Overlapped { bucket_bytes: 0 }).next();
    let is_bucket = |e| matches!(e, Exchange::Overlapped { bucket_bytes } if bucket_bytes > 0);
    let buckets: Vec<&Measured> = replicated(is_bucket).collect();
    let mut answers = Vec::new();
    if ranks == 1 {
        return answers;
    }
    if let Some((alone, naive)) = alone.zip(naive) {
        answers.push(Answer::new(
            format!("{model}: how long is a step of naive DDP, and which part is communication?"),
            format!("{}.", added(&alone.step, &naive.step)),
        ));
    }
    for (question, after, name, other) in [
        (
            "what does one all-reduce of all gradients change?",
            flat,
            "a flat exchange",
            "one of each parameter by itself",
        ),
        (
            "what does overlapping communication with backward change?",
            overlapped,
            "an overlapped exchange",
            "one after backward",
        ),
    ] {
        let both = naive.zip(after);
        let speedup = both.and_then(|(naive, after)| Speedup::new(&naive.step, &after.step));
        let answer = speedup.map(|speedup| sentence(&compared(name, other, speedup)) + ".");
        answers.extend(answer.map(|text| Answer::new(format!("{model}: {question}"), text)));
    }
    answers.extend(bucketed(model, overlapped, &buckets));
    for strategy in ["sharded optimizer", "fully shard"] {
        let best = |name: &str| {
            let own = measured.iter().filter(|m| m.strategy == name);
            own.min_by(|a, b| a.step.mean_ms.total_cmp(&b.step.mean_ms))
        };
        if let Some((before, after)) = best("replicated").zip(best(strategy))
            && let Some(speedup) = Speedup::new(&before.step, &after.step)
        {
            answers.push(Answer::new(
                format!("{model}: what does {strategy} cost in time?"),
                format!(
                    "Each with its fastest exchange ({} and {}): {}.",
                    after.name(),
                    before.name(),
                    compared(strategy, "replicated", speedup)
                ),
            ));
        }
    }
    answers
}

/// The mean of a step with an exchange, and what that adds to the step alone.
fn added(alone: &Statistics, step: &Statistics) -> String {
    let part = step.mean_ms - alone.mean_ms;
    let verdict = Speedup::new(alone, step).map(|speedup| speedup.verdict());
    match verdict {
        Some(Verdict::Slower) => format!(
            "A step takes {:.1} ms, {part:.1} ms of them ({:.0}%) communication that the step alone ({:.1} ms) does not have",
            step.mean_ms,
            100.0 * part / step.mean_ms,
            alone.mean_ms
        ),
        _ => format!(
            "A step takes {:.1} ms with the exchange and {:.1} ms without: their spread hides what communication \
             adds. More steps on a quiet machine would show it",
            step.mean_ms, alone.mean_ms
        ),
    }
}

/// ddp_bucketed: the fastest bucket size, where the figures tell sizes apart, and the model of its overhead.
fn bucketed(model: &str, overlapped: Option<&Measured>, buckets: &[&Measured]) -> Option<Answer> {
    let by_time = |a: &&&Measured, b: &&&Measured| a.step.mean_ms.total_cmp(&b.step.mean_ms);
    let fastest = buckets.iter().min_by(by_time)?;
    let slowest = buckets.iter().max_by(by_time)?;
    let speedup = Speedup::new(&slowest.step, &fastest.step).filter(|_| buckets.len() > 1);
    let measured = match speedup.map(|speedup| (speedup, speedup.verdict())) {
        Some((speedup, Verdict::Faster)) => format!(
            "{} is fastest, {speedup} as fast as {}",
            sentence(&fastest.name()),
            slowest.name()
        ),
        _ => "These figures do not tell the bucket sizes apart".into(),
    };
    let against = overlapped.and_then(|each| {
        let speedup = Speedup::new(&each.step, &fastest.step)?;
        let is_decided = speedup.verdict() != Verdict::Unclear;
        is_decided.then(|| format!("; {}", compared("it", "one exchange a parameter", speedup)))
    });
    Some(Answer::new(
        format!("{model}: which bucket size, and why?"),
        format!(
            "{measured}{}. With S bytes of gradients in n buckets, a rate w and a cost o a call, what is left after \
             backward is (S / n) / w + n o: least for n = sqrt(S / (w o)), a bucket of sqrt(S w o) bytes.",
            against.unwrap_or_default()
        ),
    ))
}

/// optimizer_state_sharding_accounting (a) and (c), and FSDP's memory.
pub fn memory(model: &str, ranks: usize, held: &[Held]) -> Vec<Answer> {
    let of = |strategy: &str| held.iter().find(|held| held.strategy == strategy);
    let Some(replicated) = of("replicated") else {
        return Vec::new();
    };
    let mib = format_mib;
    let mut answers = Vec::new();
    for strategy in ["sharded optimizer", "fully shard"] {
        let Some(own) = of(strategy) else { continue };
        answers.push(Answer::new(
            format!("{model}: how much memory does a rank use with and without {strategy}?"),
            format!(
                "After init {} instead of {}, at a step's peak {} instead of {}, after it {} instead of {}. Of these \
                 the optimizer's state is {} instead of {}, with {ranks} ranks.",
                mib(own.init_bytes),
                mib(replicated.init_bytes),
                mib(own.peak_bytes),
                mib(replicated.peak_bytes),
                mib(own.after_bytes),
                mib(replicated.after_bytes),
                mib(own.state_bytes),
                mib(replicated.state_bytes)
            ),
        ));
    }
    if of("sharded optimizer").is_some() {
        answers.push(Answer::new(
            "How does this sharding differ from ZeRO stage 1?",
            "Both divide AdamW's state, 8 bytes a parameter, among N ranks, and send about 2 S bytes a step for S \
             bytes of gradients. ZeRO-1 cuts a flat buffer into equal shards: reduce-scatter, update, all-gather. \
             Here a rank owns whole parameters: each gradient is reduced to its owner, which broadcasts the weight. \
             So shards are equal only as far as the sizes of parameters allow.",
        ));
    }
    answers
}

/// The text with a capital letter first.
fn sentence(text: &str) -> String {
    let mut chars = text.chars();
    let first = chars.next().map(|c| c.to_uppercase().to_string());
    first.unwrap_or_default() + chars.as_str()
}
