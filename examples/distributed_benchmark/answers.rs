//! Answers to the handout's questions on collectives, data parallelism and sharding.

use super::common::ways::{Strategy, Way};
use super::common::words::{answered, compared};
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

/// Returns what communication adds to the step alone, in ms; `None` if the step is not clearly slower.
pub fn exposed_ms(alone: &Statistics, step: &Statistics) -> Option<f64> {
    let speedup = Speedup::new(alone, step)?;
    (speedup.verdict() == Verdict::Slower).then_some(step.mean_ms - alone.mean_ms)
}

/// Answers distributed_communication_single_node: how the time of an all-reduce grows with its size, and its ring.
pub fn collectives(ranks: usize, collected: &[Collected]) -> Vec<Answer> {
    let reduced = collected.iter().filter(|c| c.collective == "all_reduce");
    let reduced = reduced.filter_map(|c| Some((c.mib, &c.time, c.bus_gb_s?)));
    let [(from_mib, small, from_rate), .., (to_mib, large, to_rate)] =
        reduced.collect::<Vec<_>>()[..]
    else {
        return Vec::new();
    };
    let bytes = to_mib as f64 / from_mib as f64;
    let growth = match Speedup::new(large, small).filter(Speedup::is_clear) {
        None => "but the spread is too large to say how fast: measure more steps",
        Some(slowed) if slowed.ratio + slowed.error < bytes => {
            "less than in proportion: small buffers bear the fixed cost of a call"
        }
        Some(slowed) if slowed.ratio - slowed.error > bytes => {
            "more than in proportion: large buffers do not stay in a cache"
        }
        Some(_) => "in proportion to the bytes",
    };
    let (from_ms, to_ms) = (small.mean_ms, large.mean_ms);
    let scaling = format!(
        "From {from_mib} to {to_mib} MiB ({bytes:.1}x) its time grows from {from_ms:.2} to {to_ms:.2} ms ({:.1}x), \
         {growth}. The bus rate goes from {from_rate:.2} to {to_rate:.2} GB/s.",
        to_ms / from_ms
    );
    let ring = format!(
        "Reduce-scatter, then all-gather: 2 (N - 1) / N S bytes a rank. A ring of whole buffers sends (N - 1) S, N / 2 \
         times as much: {:.1} times with {ranks} ranks.",
        ranks as f64 / 2.0
    );
    vec![
        Answer::new("How does an all-reduce scale with its size?", scaling),
        Answer::new("Which ring does an all-reduce of S bytes need?", ring),
    ]
}

/// Answers naive_ddp, minimal_ddp_flat, ddp_overlap and ddp_bucketed, and what sharding costs in time.
pub fn steps(model: &str, ranks: usize, measured: &[(Way, Statistics)]) -> Vec<Answer> {
    if ranks == 1 {
        return Vec::new();
    }
    let mut by_time: Vec<_> = measured.iter().collect();
    by_time.sort_by(|(_, a), (_, b)| a.mean_ms.total_cmp(&b.mean_ms));
    let step = |way| Some(&by_time.iter().find(|(own, _)| *own == way)?.1);
    let replicated = |exchange| step(Way::Exchanged(Strategy::Replicated, exchange));
    let naive = replicated(Exchange::PerParameter);
    let flat = replicated(Exchange::Flat);
    let overlapped = replicated(Exchange::Overlapped { bucket_bytes: 0 });
    let changed = |after: Option<&Statistics>, name, other| {
        Some(compared(name, other, Speedup::new(naive?, after?)?))
    };
    let fastest = |name: &str| by_time.iter().find(|(way, _)| way.strategy() == name);
    let cost = |name: &str| {
        let ((other, before), (own, after)) = (fastest("replicated")?, fastest(name)?);
        let text = compared(name, "replicated", Speedup::new(before, after)?);
        let (own, other) = (own.exchange(), other.exchange());
        let exchanges = format!("each with its fastest exchange ({own} and {other})");
        Some(format!("{exchanges}: {text}"))
    };
    let questions = [
        "how long is a step of naive DDP, and which part is communication?",
        "what does one all-reduce of all gradients change?",
        "what does overlapping communication with backward change?",
        "which bucket size, and why?",
        "what does sharded optimizer cost in time?",
        "what does fully shard cost in time?",
    ];
    let answers = [
        step(Way::Alone).zip(naive).map(added),
        changed(flat, "a flat exchange", "one of each parameter by itself"),
        changed(overlapped, "an overlapped exchange", "one after backward"),
        buckets(&by_time, overlapped),
        cost("sharded optimizer"),
        cost("fully shard"),
    ];
    let answers = questions.into_iter().zip(answers);
    answered(answers.map(|(question, text)| (format!("{model}: {question}"), text.map(sentence))))
}

/// Compares the fastest bucket of replicated training with the slowest, and with an exchange of `each` parameter.
fn buckets(by_time: &[&(Way, Statistics)], each: Option<&Statistics>) -> Option<String> {
    use Exchange::Overlapped;
    let mut buckets = by_time.iter().filter(|(way, _)| {
        matches!(
            way,
            Way::Exchanged(Strategy::Replicated, Overlapped { bucket_bytes: 1.. })
        )
    });
    let (best, fastest) = buckets.next()?;
    let best = format!("an exchange in {}", best.exchange());
    let than = |other: &str, time| Some(compared(&best, other, Speedup::new(time, fastest)?));
    let slowest = buckets.next_back();
    let slowest = slowest.and_then(|(way, time)| than(&format!("one in {}", way.exchange()), time));
    let each = each.and_then(|time| than("one of each parameter", time));
    let why = "of S bytes of gradients in n buckets, with rate w and cost o a call, (S / n) / w + n o is left after \
               backward: least for n = sqrt(S / (w o)), buckets of sqrt(S w o) bytes";
    let all = [slowest, each, Some(why.into())].into_iter().flatten();
    Some(all.collect::<Vec<_>>().join("; "))
}

/// Says what an exchange adds to the step alone.
fn added((alone, step): (&Statistics, &Statistics)) -> String {
    let (alone_ms, step_ms) = (alone.mean_ms, step.mean_ms);
    let times = format!("a step takes {step_ms:.1} ms, and {alone_ms:.1} ms without the exchange");
    match exposed_ms(alone, step) {
        Some(ms) => {
            let percent = 100.0 * ms / step_ms;
            format!("{times}: {ms:.1} ms ({percent:.0}%) are communication")
        }
        None => format!("{times}: the spread hides communication; measure more steps"),
    }
}

/// Answers optimizer_state_sharding_accounting (a) and (c), and fsdp_accounting.
pub fn memory(model: &str, ranks: usize, measured: &[(Way, Held)]) -> Vec<Answer> {
    if ranks == 1 {
        return Vec::new();
    }
    let held = |strategy: &str| {
        let (_, held) = measured
            .iter()
            .find(|(way, _)| way.strategy() == strategy)?;
        Some([
            ("after init", held.init_bytes),
            ("at a step's peak", held.peak_bytes),
            ("after it", held.after_bytes),
            ("of that optimizer state", held.state_bytes),
        ])
    };
    let compared = |name: &str| {
        let parts = held(name)?.into_iter().zip(held("replicated")?);
        let parts = parts.map(|((when, own), (_, other))| {
            let [own, other] = [own, other].map(format_mib);
            format!("{when} {own} instead of {other}")
        });
        let parts = parts.collect::<Vec<_>>().join(", ");
        Some(format!("With {ranks} ranks: {parts}."))
    };
    let [zero_1, fsdp] = ["sharded optimizer", "fully shard"].map(compared);
    let difference = zero_1.is_some().then(|| {
        "Both divide AdamW's state, 8 bytes a parameter, among N ranks and send about 2 S bytes for S bytes of \
         gradients. ZeRO-1 cuts a flat buffer into equal shards: reduce-scatter, update, all-gather. Here a rank owns \
         whole parameters, so shards are less equal: each gradient is reduced to its owner, which broadcasts the \
         weight."
            .into()
    });
    let used = |name| format!("{model}: how much memory does a rank use with and without {name}?");
    let zero_1_question = "How does this sharding differ from ZeRO stage 1?";
    answered([
        (used("sharded optimizer"), zero_1),
        (used("fully shard"), fsdp),
        (zero_1_question.into(), difference),
    ])
}

/// Returns the text as a sentence: with a capital letter and a full stop.
fn sentence(text: String) -> String {
    let mut chars = text.chars();
    let first = chars.next().map(|c| c.to_uppercase().to_string());
    format!("{}{}.", first.unwrap_or_default(), chars.as_str())
}
