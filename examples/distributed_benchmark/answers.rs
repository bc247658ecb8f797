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
        None => "but their spread is too large to say how fast; more steps would",
        Some(slowed) if slowed.ratio + slowed.error < bytes => {
            "less than in proportion: the fixed cost of a call weighs on small buffers"
        }
        Some(slowed) if slowed.ratio - slowed.error > bytes => {
            "more than in proportion: large buffers do not stay in a cache"
        }
        Some(_) => "in proportion to the bytes",
    };
    let (from_ms, to_ms) = (small.mean_ms, large.mean_ms);
    let scaling = format!(
        "From {from_mib} to {to_mib} MiB ({bytes:.1} times) its time grows from {from_ms:.2} to {to_ms:.2} ms ({:.1} \
         times), {growth}. The bus rate goes from {from_rate:.2} to {to_rate:.2} GB/s.",
        to_ms / from_ms
    );
    let ring = format!(
        "Reduce-scatter and all-gather in turn send 2 (N - 1) / N S bytes a rank. A ring that passes whole buffers \
         around sends (N - 1) S, N / 2 times as much: {:.1} times with {ranks} ranks.",
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
    let alone = step(Way::Alone).zip(naive);
    let questions = [
        "how long is a step of naive DDP, and which part is communication?",
        "what does one all-reduce of all gradients change?",
        "what does overlapping communication with backward change?",
        "which bucket size, and why?",
        "what does sharded optimizer cost in time?",
        "what does fully shard cost in time?",
    ];
    let answers = [
        alone.map(|(alone, naive)| added(alone, naive)),
        changed(flat, "a flat exchange", "one of each parameter by itself"),
        changed(overlapped, "an overlapped exchange", "one after backward"),
        buckets(&by_time, overlapped),
        cost("sharded optimizer"),
        cost("fully shard"),
    ];
    let answers = questions.into_iter().zip(answers);
    answered(answers.map(|(question, text)| (format!("{model}: {question}"), text.map(sentence))))
}

/// Compares the buckets of replicated training, and the fastest with an overlapped exchange of each parameter.
fn buckets(by_time: &[&(Way, Statistics)], each: Option<&Statistics>) -> Option<String> {
    use Exchange::Overlapped;
    let mut buckets = by_time.iter().filter(|(way, _)| {
        matches!(
            way,
            Way::Exchanged(Strategy::Replicated, Overlapped { bucket_bytes: 1.. })
        )
    });
    let (best, fastest) = buckets.next()?;
    let slower = buckets.next_back().and_then(|(worst, slowest)| {
        let speedup = Speedup::new(slowest, fastest)?;
        (speedup.verdict() == Verdict::Faster).then(|| (worst.exchange(), speedup))
    });
    let sizes = match slower {
        Some((worst, speedup)) => {
            let best = best.exchange();
            format!("an exchange in {best} is fastest, {speedup} as fast as {worst}")
        }
        None => "these figures do not tell the bucket sizes apart".into(),
    };
    let each = each.and_then(|each| {
        let speedup = Speedup::new(each, fastest)?;
        let compared = compared("the fastest bucket", "one exchange a parameter", speedup);
        Some(format!("; {compared}"))
    });
    let each = each.unwrap_or_default();
    Some(format!(
        "{sizes}{each}. With S bytes of gradients in n buckets, a rate w and a cost o a call, what is left after \
         backward is (S / n) / w + n o: least for n = sqrt(S / (w o)), a bucket of sqrt(S w o) bytes"
    ))
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
        let (_, held) = measured
            .iter()
            .find(|(way, _)| way.strategy() == strategy)?;
        let bytes = [
            held.init_bytes,
            held.peak_bytes,
            held.after_bytes,
            held.state_bytes,
        ];
        Some(bytes.map(format_mib))
    };
    let both = |name| held(name).zip(held("replicated"));
    let saved = ["sharded optimizer", "fully shard"].map(|name| {
        let text = both(name).map(|([init, peak, after, state], other)| {
            format!(
                "After init {init} instead of {}, at a step's peak {peak} instead of {}, after it {after} instead of \
                 {}. Of these the optimizer's state is {state} instead of {}, with {ranks} ranks.",
                other[0], other[1], other[2], other[3]
            )
        });
        (format!("{model}: how much memory does a rank use with and without {name}?"), text)
    });
    let zero_1 = both("sharded optimizer").map(|_| {
        "Both divide AdamW's state, 8 bytes a parameter, among N ranks, and send about 2 S bytes a step for S bytes of \
         gradients. ZeRO-1 cuts a flat buffer into equal shards: reduce-scatter, update, all-gather. Here a rank owns \
         whole parameters: each gradient is reduced to its owner, which broadcasts the weight. So shards are equal \
         only as far as the sizes of parameters allow."
            .into()
    });
    let question = "How does this sharding differ from ZeRO stage 1?";
    answered(saved.into_iter().chain([(question.into(), zero_1)]))
}

/// Returns the text as a sentence: with a capital letter and a full stop.
fn sentence(text: String) -> String {
    let mut chars = text.chars();
    let first = chars.next().map(|c| c.to_uppercase().to_string());
    format!("{}{}.", first.unwrap_or_default(), chars.as_str())
}
