//! Answers to the handout's questions on collectives, data parallelism and sharding.

use super::common::ways::Way;
use super::common::words::compared;
use serde::Serialize;
use tallow::distributed::Exchange;
use tallow::report::{Answer, Speedup, Statistics, Verdict, format_mib};

/// A collective's time at a size of its buffer.
#[derive(Serialize)]
pub struct Collected {
    pub collective: &'static str,
    pub mib: usize,
    #[serde(flatten)]
    pub time: Statistics,
    /// `None` for one rank, which sends nothing.
    pub bus_gb_s: Option<f64>,
}

/// The memory of a rank, in bytes.
#[derive(Serialize)]
pub struct Held {
    pub init_bytes: u64,
    pub peak_bytes: u64,
    pub after_bytes: u64,
    pub state_bytes: u64,
    pub predicted_bytes: u64,
}

/// Whether a step is clearly slower than the step alone: the difference is communication.
pub fn is_slower(alone: &Statistics, step: &Statistics) -> bool {
    let speedup = Speedup::new(alone, step);
    speedup.is_some_and(|speedup| speedup.verdict() == Verdict::Slower)
}

/// Answers distributed_communication_single_node: how the time of an all-reduce grows with its size, and its ring.
pub fn collectives(ranks: usize, collected: &[Collected]) -> Vec<Answer> {
    let reduced = collected.iter().filter(|c| c.collective == "all_reduce");
    let reduced = reduced.filter_map(|c| Some((c.mib, &c.time, c.bus_gb_s?)));
    let reduced: Vec<_> = reduced.collect();
    let [(from_mib, small, from_rate), .., (to_mib, large, to_rate)] = reduced[..] else {
        return Vec::new();
    };
    let bytes = to_mib as f64 / from_mib as f64;
    let growth = match Speedup::new(large, small).filter(Speedup::is_clear) {
        None => {
            "but their spread is too large to say how fast; more steps on a quiet machine would"
        }
        Some(slowed) if slowed.ratio + slowed.error < bytes => {
            "less than in proportion: the fixed cost of a call weighs on small buffers"
        }
        Some(slowed) if slowed.ratio - slowed.error > bytes => {
            "more than in proportion: large buffers do not stay in a cache"
        }
        Some(_) => "in proportion to the bytes",
    };
    let (from_ms, to_ms) = (small.mean_ms, large.mean_ms);
    vec![
        Answer::new(
            "How does an all-reduce scale with the size of its buffer?",
            format!(
                "From {from_mib} to {to_mib} MiB ({bytes:.1} times) its time grows from {from_ms:.2} to {to_ms:.2} ms \
                 ({:.1} times), {growth}. The bus rate goes from {from_rate:.2} to {to_rate:.2} GB/s.",
                to_ms / from_ms
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

/// Answers naive_ddp, minimal_ddp_flat, ddp_overlap and ddp_bucketed, and what sharding costs in time.
pub fn steps(model: &str, ranks: usize, measured: &[(Way, Statistics)]) -> Vec<Answer> {
    let mut answers = Vec::new();
    if ranks == 1 {
        return answers;
    }
    let mut answer = |question: &str, text: String| {
        answers.push(Answer::new(format!("{model}: {question}"), sentence(&text)));
    };
    let mut by_time: Vec<_> = measured.iter().collect();
    by_time.sort_by(|(_, a), (_, b)| a.mean_ms.total_cmp(&b.mean_ms));
    let of = |strategy| {
        let by_time = by_time.iter();
        by_time.filter(move |(way, _)| way.strategy == strategy)
    };
    let step = |strategy, exchange| {
        let step = of(strategy).find(|(way, _)| way.exchange == exchange);
        step.map(|(_, step)| step)
    };
    let naive = step("replicated", Some(Exchange::PerParameter));
    let flat = step("replicated", Some(Exchange::Flat));
    let overlapped = step("replicated", Some(Exchange::Overlapped { bucket_bytes: 0 }));
    if let (Some(alone), Some(naive)) = (step("alone", None), naive) {
        let question = "how long is a step of naive DDP, and which part is communication?";
        answer(question, added(alone, naive));
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
        if let Some(speedup) = both.and_then(|(naive, after)| Speedup::new(naive, after)) {
            answer(question, compared(name, other, speedup));
        }
    }
    let buckets = of("replicated").filter(|(way, _)| way.is_bucket());
    let buckets: Vec<_> = buckets.collect();
    if let (Some((best, fastest)), Some((worst, slowest))) = (buckets.first(), buckets.last()) {
        let speedup = Speedup::new(slowest, fastest).filter(|_| buckets.len() > 1);
        let mut text = match speedup.filter(|speedup| speedup.verdict() == Verdict::Faster) {
            Some(speedup) => {
                let (best, worst) = (best.name(), worst.name());
                format!("{best} is fastest, {speedup} as fast as {worst}")
            }
            None => "these figures do not tell the bucket sizes apart".into(),
        };
        let each = overlapped.and_then(|each| Speedup::new(each, fastest));
        if let Some(speedup) = each.filter(|speedup| speedup.verdict() != Verdict::Unclear) {
            text += &format!(
                "; {}",
                compared("the fastest bucket", "one exchange a parameter", speedup)
            );
        }
        text += ". With S bytes of gradients in n buckets, a rate w and a cost o a call, what is left after backward \
                 is (S / n) / w + n o: least for n = sqrt(S / (w o)), a bucket of sqrt(S w o) bytes";
        answer("which bucket size, and why?", text);
    }
    for strategy in ["sharded optimizer", "fully shard"] {
        let both = of("replicated").next().zip(of(strategy).next());
        let Some(((other, before), (own, after))) = both else {
            continue;
        };
        if let Some(speedup) = Speedup::new(before, after) {
            let (own, other) = (own.name(), other.name());
            let text = compared(strategy, "replicated", speedup);
            let text = format!("each with its fastest exchange ({own} and {other}): {text}");
            answer(&format!("what does {strategy} cost in time?"), text);
        }
    }
    answers
}

/// Says what an exchange adds to the step alone.
fn added(alone: &Statistics, step: &Statistics) -> String {
    let (alone_ms, step_ms) = (alone.mean_ms, step.mean_ms);
    let part = step_ms - alone_ms;
    match is_slower(alone, step) {
        true => format!(
            "a step takes {step_ms:.1} ms, {part:.1} ms of them ({:.0}%) communication that the step alone \
             ({alone_ms:.1} ms) does not have",
            100.0 * part / step_ms
        ),
        false => format!(
            "a step takes {step_ms:.1} ms with the exchange and {alone_ms:.1} ms without: their spread hides what \
             communication adds. More steps on a quiet machine would show it"
        ),
    }
}

/// Answers optimizer_state_sharding_accounting (a) and (c), and fsdp_accounting.
pub fn memory(model: &str, ranks: usize, measured: &[(Way, Held)]) -> Vec<Answer> {
    let held = |strategy: &str| {
        let found = measured.iter().find(|(way, _)| way.strategy == strategy);
        found.map(|(_, held)| held)
    };
    let mut answers = Vec::new();
    let Some(replicated) = held("replicated") else {
        return answers;
    };
    for strategy in ["sharded optimizer", "fully shard"] {
        let Some(own) = held(strategy) else { continue };
        let both = |bytes: fn(&Held) -> u64| {
            let [own, other] = [own, replicated].map(|held| format_mib(bytes(held)));
            format!("{own} instead of {other}")
        };
        answers.push(Answer::new(
            format!("{model}: how much memory does a rank use with and without {strategy}?"),
            format!(
                "After init {}, at a step's peak {}, after it {}. Of these the optimizer's state is {}, with {ranks} \
                 ranks.",
                both(|held| held.init_bytes),
                both(|held| held.peak_bytes),
                both(|held| held.after_bytes),
                both(|held| held.state_bytes)
            ),
        ));
    }
    if held("sharded optimizer").is_some() {
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

/// Returns the text as a sentence: with a capital letter and a full stop.
fn sentence(text: &str) -> String {
    let mut chars = text.chars();
    let first = chars.next().map(|c| c.to_uppercase().to_string());
    format!("{}{}.", first.unwrap_or_default(), chars.as_str())
}
