//! Answers to the handout's questions on attention, from the figures. Each function takes plain figures.

use super::measured::{BOTH, Growth, Measured, NAIVE, baseline, by_name};
use tallow::bench::Limit;
use tallow::memory::{MemoryKind, Term};
use tallow::report::{Answer, PowerLaw, Speedup, format_mib};

/// The answers to all questions that the figures have something to say about. `limits` are the first sizes that do not
/// fit, each with its implementation; `letter` is the width's.
pub fn answers(
    all: &[Measured],
    growth: &[Growth],
    limits: &[(String, Limit)],
    letter: &str,
) -> Vec<Answer> {
    let answers = [
        (
            "At what size does attention run out of memory?",
            Some(out_of_memory(all, limits, letter)),
        ),
        (
            "What uses the memory at such a size?",
            to_account_for(limits).map(|(name, limit)| accounting(name, limit)),
        ),
        (
            "How does the memory saved for backward change with the sequence length?",
            saved_memory(growth, limits, letter),
        ),
        (
            "What would eliminate this memory cost?",
            (letter == "d").then(|| eliminated(all)).flatten(),
        ),
    ];
    let memory = answers.into_iter();
    let memory = memory.filter_map(|(question, answer)| Some(Answer::new(question, answer?)));
    let precisions = precisions(all);
    let precisions =
        precisions.map(|answer| Answer::new("What does half precision change?", answer));
    memory
        .chain(compared_with_naive(all))
        .chain(precisions)
        .collect()
}

/// The limit whose terms are shown: naive's, where there is one.
pub fn to_account_for(limits: &[(String, Limit)]) -> Option<&(String, Limit)> {
    let naive = limits
        .iter()
        .find(|(_, limit)| limit.implementation == NAIVE);
    naive.or(limits.first())
}

/// How many sizes did not fit, and the first that would not.
pub fn out_of_memory(all: &[Measured], limits: &[(String, Limit)], letter: &str) -> String {
    let mut parts = Vec::new();
    for (name, own) in by_name(all) {
        let out: Vec<_> = own.iter().filter(|m| m.status == "OOM").collect();
        let first = out.iter().min_by_key(|m| (m.context_length, m.width));
        parts.extend(first.map(|m| {
            let (count, of, length) = (out.len(), own.len(), m.context_length);
            format!(
                "{name} at {count} of {of} sizes, the smallest T {length}, {letter} {}",
                m.width
            )
        }));
    }
    let mut text = match parts.is_empty() {
        true => format!("No run did, of {}.", all.len()),
        false => format!("Out of memory: {}.", parts.join("; ")),
    };
    if let Some((_, first)) = limits.first() {
        let available = format_mib(first.available_bytes);
        let doubled = if letter == "D" { "the width D" } else { "T" };
        let limits = limits.iter().map(|(name, limit)| {
            let (length, width) = (limit.context_length, limit.width);
            let needed = format_mib(limit.breakdown.peak_bytes());
            format!("{name} at T {length}, {letter} {width} ({needed})")
        });
        let limits: Vec<String> = limits.collect();
        text += &format!(
            " If {doubled} is doubled until the predicted peak exceeds the {available} that may be used, the first \
             size that does not fit is: {}.",
            limits.join(", ")
        );
    }
    text
}

/// The terms of a size that does not fit.
pub fn accounting(name: &str, limit: &Limit) -> String {
    let breakdown = &limit.breakdown;
    let mut text = format!("{name} attention with {breakdown}.");
    if let Some(part) = breakdown.terms.iter().max_by_key(|part| part.bytes) {
        let percent = 100.0 * part.bytes as f64 / breakdown.peak_bytes() as f64;
        text += &format!(" The largest term is {} ({percent:.0}%).", part.name);
    }
    let composed = limit
        .composed_bytes
        .filter(|_| limit.implementation == NAIVE);
    text + &composed.map_or(String::new(), |bytes| {
        format!(
            " If scores and probabilities are separate tensors, as in PyTorch, these and the output have 2BHT^2 + \
             BHTDh elements: {}.",
            format_mib(bytes)
        )
    })
}

/// The growth of memory before backward and of time, each an exponent of T.
pub fn saved_memory(growth: &[Growth], limits: &[(String, Limit)], letter: &str) -> Option<String> {
    let exponent = |law: Option<PowerLaw>| match law {
        Some(law) if law.fits() => format!("T^{:.2} (R^2 {:.3})", law.exponent, law.r_squared),
        Some(law) => format!("unclear (R^2 {:.2})", law.r_squared),
        None => "not measured".into(),
    };
    let laws = growth.iter().map(|g| {
        let (memory, time) = (exponent(g.before_backward), exponent(g.time));
        let (name, width, from, to) = (&g.name, g.width, g.shortest, g.longest);
        format!(" {name}: memory {memory}, time {time}, {letter} {width}, T {from} to {to}.")
    });
    let mut text =
        String::from("Memory before backward, and time of forward and backward, grow as follows.");
    text += &laws.collect::<String>();
    if text.contains("unclear") {
        text += " Unclear: no power of T fits; longer sequences would decide.";
    }
    if let Some((name, limit)) = to_account_for(limits) {
        let is_quadratic =
            |part: &&Term| part.kind < MemoryKind::Gradients && part.formula.contains("T^2");
        if let Some(part) = limit.breakdown.terms.iter().find(is_quadratic) {
            let (what, formula) = (&part.name, &part.formula);
            text += &format!(
                " {name} saves {what}, {formula} elements: where this term dominates, memory is quadratic in T."
            );
        }
    }
    (!growth.is_empty()).then_some(text)
}

/// What flash attention holds before backward and what naive does, at the largest size of both.
pub fn eliminated(all: &[Measured]) -> Option<String> {
    let flash = || all.iter().filter(|m| m.implementation == "flash");
    let at = |m: &Measured| format!("T {}, d {}", m.context_length, m.width);
    let held = flash().filter_map(|m| {
        let naive = baseline(all, m)?;
        Some((m, m.before_backward_bytes?, naive.before_backward_bytes?))
    });
    let largest = held.max_by_key(|(m, ..)| (m.context_length, m.width));
    let mut text = String::from(
        "Not to save any (T, T) matrix. Flash attention computes scores and probabilities tile by tile, and again in \
         backward.",
    );
    if let Some((m, flash, naive)) = largest {
        let (flash_mib, naive_mib, at) = (format_mib(flash), format_mib(naive), at(m));
        text += &match flash < naive {
            true => format!(
                " At {at} it holds {flash_mib} before backward, naive {naive_mib}: {:.0}% less.",
                100.0 * (1.0 - flash as f64 / naive as f64)
            ),
            false => format!(
                " At {at} it holds {flash_mib} before backward, naive {naive_mib}: no less. Longer sequences would \
                 show the difference."
            ),
        };
    }
    let beyond = flash().filter(|m| {
        m.status == "ok" && baseline(all, m).is_some_and(|naive| naive.status == "OOM")
    });
    let beyond = beyond.max_by_key(|m| (m.context_length, m.width));
    if let Some(m) = beyond {
        let peak = m.peak_bytes.map(format_mib);
        let peak = peak.map_or(String::new(), |peak| format!(" with a peak of {peak}"));
        text += &format!(
            " It ran at {}{peak}, where naive runs out of memory.",
            at(m)
        );
    }
    (largest.is_some() || beyond.is_some()).then_some(text)
}

/// Two measurements of one size: before, after.
type Pair<'m> = (&'m Measured, &'m Measured);

/// An answer for each other implementation: its times and memory against naive's, over all sizes and at the shortest
/// and the longest T; of several variants, the mean of each.
pub fn compared_with_naive(all: &[Measured]) -> Vec<Answer> {
    let mut by_implementation: Vec<(&str, String)> = Vec::new();
    for (name, own) in by_name(all) {
        let others = own.iter().filter(|m| m.implementation != NAIVE);
        let pairs = others.filter_map(|m| Some((baseline(all, m)?, *m)));
        let pairs: Vec<Pair> = pairs.filter(|(naive, m)| is_timed(naive, m)).collect();
        let lengths = || pairs.iter().map(|(_, m)| m.context_length);
        let (Some(shortest), Some(longest)) = (lengths().min(), lengths().max()) else {
            continue;
        };
        let implementation = own[0].implementation.as_str();
        if !own[0].variant.is_empty() {
            let text = format!("{name} {}; ", together(&pairs));
            match by_implementation
                .iter_mut()
                .find(|(other, _)| *other == implementation)
            {
                Some((_, others)) => others.push_str(&text),
                None => by_implementation.push((implementation, text)),
            }
            continue;
        }
        let mut text = by_phase(&pairs);
        for length in [shortest, longest]
            .into_iter()
            .filter(|_| shortest < longest)
        {
            let at = pairs.iter().filter(|(_, m)| m.context_length == length);
            let at: Vec<Pair> = at.copied().collect();
            text += &format!("; at T {length} {}", by_phase(&at));
        }
        by_implementation.push((implementation, text));
    }
    let answers = by_implementation.into_iter().map(|(implementation, text)| {
        let question = format!("How does {implementation} compare with naive attention?");
        Answer::new(question, explained(&text))
    });
    answers.collect()
}

/// Every other precision against the first, for each implementation.
pub fn precisions(all: &[Measured]) -> Option<String> {
    let first = &all.first()?.precision;
    let rest = |m: &Measured| m.variant.strip_prefix(&m.precision).map(String::from);
    let sentences = by_name(all).into_iter().filter_map(|(name, own)| {
        let pairs = own.into_iter().filter(|m| m.precision != *first);
        let pairs = pairs.filter_map(|m| {
            let is_same = |other: &&Measured| {
                other.precision == *first
                    && other.implementation == m.implementation
                    && rest(other) == rest(m)
                    && other.is_at(m)
            };
            let before = all.iter().find(is_same)?;
            is_timed(before, m).then_some((before, m))
        });
        let pairs: Vec<Pair> = pairs.collect();
        (!pairs.is_empty()).then(|| format!("{name} {}; ", together(&pairs)))
    });
    let text: String = sentences.collect();
    (!text.is_empty()).then(|| explained(&format!("against {first}, {text}")))
}

fn is_timed(before: &Measured, after: &Measured) -> bool {
    after.speedup_over(before, BOTH).is_some()
}

/// The comparisons as a paragraph, with what its words mean.
pub fn explained(text: &str) -> String {
    let text = text.trim_end_matches("; ");
    let mut text = format!("Speed-ups, geometric means over the sizes: {text}.");
    if text.contains("unclear") {
        text += " Unclear: the spread of these times is too large; more steps on a quiet machine would decide.";
    }
    text
}

/// `1.13x with 6% more peak memory`: forward and backward together.
fn together(pairs: &[Pair]) -> String {
    format!("{}{}", phase_speedup(pairs, BOTH), memory(pairs))
}

/// `forward 1.08x, backward 1.23x, together 1.13x with 6% more peak memory`.
fn by_phase(pairs: &[Pair]) -> String {
    let [forward, backward] = [0, 1].map(|phase| phase_speedup(pairs, phase));
    format!(
        "forward {forward}, backward {backward}, together {}",
        together(pairs)
    )
}

fn phase_speedup(pairs: &[Pair], phase: usize) -> String {
    let speedups = pairs
        .iter()
        .filter_map(|(before, after)| after.speedup_over(before, phase));
    mean_speedup(&speedups.collect::<Vec<_>>())
}

fn memory(pairs: &[Pair]) -> String {
    let peaks = pairs.iter().filter_map(|(before, after)| {
        Some(after.peak_bytes? as f64 / before.peak_bytes.filter(|b| *b > 0)? as f64)
    });
    match geometric_mean(peaks).map(|ratio| 100.0 * (ratio - 1.0)) {
        Some(more) if more >= 0.5 => format!(" with {more:.0}% more peak memory"),
        Some(less) if less <= -0.5 => format!(" with {:.0}% less peak memory", -less),
        Some(_) => " with the same peak memory".into(),
        None => String::new(),
    }
}

/// The geometric mean of speed-ups: `1.24x`; `unclear` where more than half of them are not clear.
pub fn mean_speedup(speedups: &[Speedup]) -> String {
    let clear: Vec<f64> = speedups
        .iter()
        .filter(|speedup| speedup.is_clear())
        .map(|speedup| speedup.ratio)
        .collect();
    let unclear = speedups.len() - clear.len();
    match geometric_mean(clear.iter().copied()) {
        Some(mean) if unclear == 0 => format!("{mean:.2}x"),
        Some(mean) if unclear <= clear.len() => {
            format!("{mean:.2}x ({unclear} of {} unclear)", speedups.len())
        }
        _ => "unclear".into(),
    }
}

/// `None` of none.
pub fn geometric_mean(ratios: impl Iterator<Item = f64>) -> Option<f64> {
    let logs: Vec<f64> = ratios.map(f64::ln).collect();
    (!logs.is_empty()).then(|| (logs.iter().sum::<f64>() / logs.len() as f64).exp())
}
