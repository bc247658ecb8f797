//! Answers to the handout's questions on attention, from the figures.

use super::measured::{BOTH, Measured, NAIVE};
use super::words::{UNCLEAR, answered, geometric_mean, grouped, mean_speedup};
use std::cmp::Reverse;
use tallow::memory::{MemoryKind, Term};
use tallow::report::{Answer, PowerLaw, format_mib};

/// Returns the answers to all questions that the figures have something to say about. `limits` are the first sizes that
/// do not fit, one of each implementation.
pub fn answers(all: &[Measured], limits: &[Measured]) -> Vec<Answer> {
    let mut answers = answered([
        (
            "At what size does attention run out of memory?",
            Some(out_of_memory(all, limits)),
        ),
        (
            "What uses the memory at such a size?",
            to_account_for(limits).and_then(accounting),
        ),
        (
            "How does the memory saved for backward change with the sequence length?",
            saved_memory(all, limits),
        ),
        ("What would eliminate this memory cost?", eliminated(all)),
    ]);
    answers.extend(compared_with_naive(all));
    answers.extend(answered([(
        "What does half precision change?",
        precisions(all),
    )]));
    answers
}

/// Returns the limit whose terms are shown: naive's, if there is one.
pub fn to_account_for(limits: &[Measured]) -> Option<&Measured> {
    limits.iter().min_by_key(|m| m.implementation != NAIVE)
}

/// Counts the sizes that did not fit, and names the first that would not.
pub fn out_of_memory(all: &[Measured], limits: &[Measured]) -> String {
    let mut parts = Vec::new();
    for (name, own) in grouped(all, |m| m.name()) {
        let out: Vec<_> = own.iter().filter(|m| m.is_oom()).collect();
        if let Some(first) = out.iter().min_by_key(|m| (m.context_length, m.width())) {
            let (count, of, size) = (out.len(), own.len(), first.size());
            parts.push(format!(
                "{name} at {count} of {of} sizes, the smallest {size}"
            ));
        }
    }
    let mut text = match parts.is_empty() {
        true => format!("No run did, of {}.", all.len()),
        false => format!("Out of memory: {}.", parts.join("; ")),
    };
    if let Some(first) = limits.first() {
        let doubled = if first.is_layer() { "the width D" } else { "T" };
        let available = format_mib(first.available_bytes.unwrap_or_default());
        let limits = limits.iter().filter_map(|limit| {
            let needed = format_mib(limit.breakdown.as_ref()?.peak_bytes());
            Some(format!("{} at {} ({needed})", limit.name(), limit.size()))
        });
        text += &format!(
            " If {doubled} is doubled until the predicted peak exceeds the {available} that may be used, the first \
             size that does not fit is: {}.",
            limits.collect::<Vec<_>>().join(", ")
        );
    }
    text
}

/// Lists the terms of a size that does not fit.
pub fn accounting(limit: &Measured) -> Option<String> {
    let breakdown = limit.breakdown.as_ref()?;
    let mut text = format!("{} attention with {breakdown}.", limit.name());
    if let Some(part) = breakdown.terms.iter().max_by_key(|part| part.bytes) {
        let percent = 100.0 * part.bytes as f64 / breakdown.peak_bytes() as f64;
        text += &format!(" The largest term is {} ({percent:.0}%).", part.name);
    }
    if let (NAIVE, Some(bytes)) = (limit.implementation, limit.composed_bytes) {
        text += &format!(
            " If scores and probabilities are separate tensors, as in PyTorch, these and the output have 2BHT^2 + \
             BHTDh elements: {}.",
            format_mib(bytes)
        );
    }
    Some(text)
}

/// Says how memory before backward and time grow with T, at the largest width that each implementation was measured at;
/// `None` where none was at three lengths.
pub fn saved_memory(all: &[Measured], limits: &[Measured]) -> Option<String> {
    let exponent = |law: Option<PowerLaw>| match law {
        Some(law) if law.fits() => format!("T^{:.2} (R^2 {:.3})", law.exponent, law.r_squared),
        Some(law) => format!("unclear (R^2 {:.2})", law.r_squared),
        None => "not measured".into(),
    };
    let mut laws = String::new();
    let timed = all.iter().filter(|m| m.times(BOTH).is_some());
    for (name, mut own) in grouped(timed, |m| m.name()) {
        let widest = own.iter().max_by_key(|m| m.width())?.named_width();
        own.retain(|m| m.named_width() == widest);
        own.sort_by_key(|m| m.context_length);
        let law = |of: fn(&Measured) -> Option<f64>| {
            let points = own.iter();
            let points = points.filter_map(|m| Some((m.context_length as f64, of(m)?)));
            PowerLaw::fit(&points.collect::<Vec<_>>())
        };
        let memory = law(|m| Some(m.memory?.before_backward_bytes as f64));
        let time = law(|m| Some(m.times(BOTH)?.mean_ms));
        if let ([from, .., to], true) = (&own[..], memory.or(time).is_some()) {
            let (memory, time) = (exponent(memory), exponent(time));
            let [from, to] = [from, to].map(|m| m.context_length);
            laws += &format!(" {name}: memory {memory}, time {time}, {widest}, T {from} to {to}.");
        }
    }
    let mut text =
        format!("Memory before backward, and time of forward and backward, grow as follows.{laws}");
    if text.contains("unclear") {
        text += " Unclear: no power of T fits; longer sequences would decide.";
    }
    if let Some(limit) = to_account_for(limits) {
        let terms = limit.breakdown.iter().flat_map(|b| &b.terms);
        let is_quadratic =
            |part: &&Term| part.kind < MemoryKind::Gradients && part.formula.contains("T^2");
        if let Some(Term { name, formula, .. }) = terms.into_iter().find(is_quadratic) {
            let implementation = limit.name();
            text += &format!(
                " {implementation} saves {name}, {formula} elements: where this term dominates, memory is quadratic in T."
            );
        }
    }
    (!laws.is_empty()).then_some(text)
}

/// Two measurements of one size: before, after.
type Pair<'m> = (&'m Measured, &'m Measured);

/// Compares the memory that flash attention and naive hold before backward, at the largest size of both.
pub fn eliminated(all: &[Measured]) -> Option<String> {
    let flash = all.iter().filter(|m| m.implementation == "flash");
    let flash = flash.filter(|m| !m.is_layer());
    let mut pairs: Vec<Pair> = flash.filter_map(|m| Some((m.baseline(all)?, m))).collect();
    pairs.sort_by_key(|(_, m)| Reverse((m.context_length, m.width())));
    let mut text = String::from(
        "Not to save any (T, T) matrix. Flash attention computes scores and probabilities tile by tile, and again in \
         backward.",
    );
    let held = pairs.iter().find_map(|(naive, m)| {
        let bytes = |m: &Measured| Some(m.memory?.before_backward_bytes);
        Some((m.size(), bytes(m)?, bytes(naive)?))
    });
    if let Some((size, flash, naive)) = &held {
        let less = match flash < naive {
            true => format!(
                "{:.0}% less.",
                100.0 * (1.0 - *flash as f64 / *naive as f64)
            ),
            false => "no less. Longer sequences would show the difference.".into(),
        };
        let [flash, naive] = [*flash, *naive].map(format_mib);
        text += &format!(" At {size} it holds {flash} before backward, naive {naive}: {less}");
    }
    let beyond = pairs
        .iter()
        .find(|(naive, m)| naive.is_oom() && m.times(BOTH).is_some());
    if let Some((_, m)) = beyond {
        let peak = m.peak_bytes().map_or("unknown".into(), format_mib);
        let size = m.size();
        text +=
            &format!(" It ran at {size} with a peak of {peak}, where naive runs out of memory.");
    }
    (held.is_some() || beyond.is_some()).then_some(text)
}

/// Returns an answer for each other implementation: its times and memory against naive's, over all sizes and at the
/// shortest and the longest T; of several variants, the mean of each.
pub fn compared_with_naive(all: &[Measured]) -> Vec<Answer> {
    let others = all.iter().filter(|m| m.implementation != NAIVE);
    let answers = grouped(others, |m| m.implementation).into_iter();
    let answers = answers.map(|(implementation, own)| {
        let mut parts = Vec::new();
        for (variant, pairs) in grouped(timed(own, |m| m.baseline(all)), |(_, m)| &m.variant) {
            if !variant.is_empty() {
                parts.push(format!("{} {}", pairs[0].1.name(), by_phase(&pairs)));
                continue;
            }
            parts.push(by_phase(&pairs));
            let mut by_length = grouped(pairs, |(_, m)| m.context_length);
            by_length.sort_by_key(|(length, _)| *length);
            if let [shortest, .., longest] = &by_length[..] {
                for (length, pairs) in [shortest, longest] {
                    parts.push(format!("at T {length} {}", by_phase(pairs)));
                }
            }
        }
        let question = format!("How does {implementation} compare with naive attention?");
        (question, explained("", &parts))
    });
    answered(answers)
}

/// Compares every other precision with the first, for each implementation.
pub fn precisions(all: &[Measured]) -> Option<String> {
    let first = all.first()?.result.precision;
    let others = all.iter().filter(|m| m.precision != first);
    let pairs = timed(others, |m| m.counterpart(all, m.implementation, first));
    let parts = grouped(pairs, |(_, m)| m.name()).into_iter();
    let parts = parts.map(|(name, pairs)| format!("{name} {}", by_phase(&pairs)));
    explained(&format!("against {first}, "), &parts.collect::<Vec<_>>())
}

/// Pairs figures with those `before`, where both have times to compare.
fn timed<'m>(
    own: impl IntoIterator<Item = &'m Measured>,
    before: impl Fn(&Measured) -> Option<&'m Measured>,
) -> Vec<Pair<'m>> {
    let pairs = own.into_iter().filter_map(|m| Some((before(m)?, m)));
    let is_timed = |(before, m): &Pair| m.speedup_over(before, BOTH).is_some();
    pairs.filter(is_timed).collect()
}

/// Joins comparisons into a paragraph that explains its words; `None` if there are none.
fn explained(start: &str, parts: &[String]) -> Option<String> {
    let parts = (!parts.is_empty()).then(|| parts.join("; "))?;
    let mut text = format!("Speed-ups, geometric means over the sizes: {start}{parts}.");
    if text.contains("unclear") {
        text += UNCLEAR;
    }
    Some(text)
}

/// `forward 1.08x, backward 1.23x, together 1.13x with 6% more peak memory`.
fn by_phase(pairs: &[Pair]) -> String {
    let peaks = pairs
        .iter()
        .filter_map(|(before, after)| after.peak_over(before));
    let memory = match geometric_mean(peaks).map(|ratio| 100.0 * (ratio - 1.0)) {
        Some(more) if more >= 0.5 => format!(" with {more:.0}% more peak memory"),
        Some(less) if less <= -0.5 => format!(" with {:.0}% less peak memory", -less),
        Some(_) => " with the same peak memory".into(),
        None => String::new(),
    };
    let [forward, backward, both] = [0, 1, BOTH].map(|phase| {
        let pairs = pairs.iter();
        let speedups = pairs.filter_map(|(before, after)| after.speedup_over(before, phase));
        mean_speedup(&speedups.collect::<Vec<_>>())
    });
    format!("forward {forward}, backward {backward}, together {both}{memory}")
}
