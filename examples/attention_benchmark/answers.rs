//! Answers to the handout's questions on attention, from the figures.

use super::measured::{BOTH, Measured, NAIVE};
use super::words::{UNCLEAR, geometric_mean, grouped, mean_speedup};
use tallow::bench::Limit;
use tallow::memory::{MemoryKind, Term};
use tallow::report::{Answer, PowerLaw, format_mib};

/// Returns the answers to all questions that the figures have something to say about. `limits` are the first sizes that
/// do not fit, each with its implementation; `letter` is the width's.
pub fn answers(all: &[Measured], limits: &[(String, Limit)], letter: &str) -> Vec<Answer> {
    let mut answers = Vec::new();
    for (question, answer) in [
        (
            "At what size does attention run out of memory?",
            Some(out_of_memory(all, limits, letter)),
        ),
        (
            "What uses the memory at such a size?",
            to_account_for(limits).map(|(name, limit)| accounting(name, limit, letter)),
        ),
        (
            "How does the memory saved for backward change with the sequence length?",
            saved_memory(all, limits, letter),
        ),
        (
            "What would eliminate this memory cost?",
            eliminated(all).filter(|_| letter == "d"),
        ),
    ] {
        answers.extend(answer.map(|answer| Answer::new(question, answer)));
    }
    answers.extend(compared_with_naive(all));
    let question = "What does half precision change?";
    answers.extend(precisions(all).map(|answer| Answer::new(question, answer)));
    answers
}

/// Returns the limit whose terms are shown: naive's, if there is one.
pub fn to_account_for(limits: &[(String, Limit)]) -> Option<&(String, Limit)> {
    let mut naive = limits.iter();
    let naive = naive.find(|(_, limit)| limit.implementation == NAIVE);
    naive.or(limits.first())
}

/// Counts the sizes that did not fit, and names the first that would not.
pub fn out_of_memory(all: &[Measured], limits: &[(String, Limit)], letter: &str) -> String {
    let mut parts = Vec::new();
    for (name, own) in grouped(all, |m| m.name()) {
        let out: Vec<_> = own.iter().filter(|m| m.is_oom()).collect();
        if let Some(first) = out.iter().min_by_key(|m| (m.context_length, m.width)) {
            let (count, of, length, width) =
                (out.len(), own.len(), first.context_length, first.width);
            parts.push(format!(
                "{name} at {count} of {of} sizes, the smallest T {length}, {letter} {width}"
            ));
        }
    }
    let mut text = match parts.is_empty() {
        true => format!("No run did, of {}.", all.len()),
        false => format!("Out of memory: {}.", parts.join("; ")),
    };
    if let Some((_, first)) = limits.first() {
        let available = format_mib(first.available_bytes);
        let doubled = if letter == "D" { "the width D" } else { "T" };
        let limits = limits.iter().map(|(name, limit)| {
            let (length, width) = (limit.attention.sequence_length, limit.width);
            let needed = format_mib(limit.breakdown.peak_bytes());
            format!("{name} at T {length}, {letter} {width} ({needed})")
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
pub fn accounting(name: &str, limit: &Limit, letter: &str) -> String {
    let breakdown = &limit.breakdown;
    let mut text = format!("{name} attention with {breakdown}.");
    if let Some(part) = breakdown.terms.iter().max_by_key(|part| part.bytes) {
        let percent = 100.0 * part.bytes as f64 / breakdown.peak_bytes() as f64;
        text += &format!(" The largest term is {} ({percent:.0}%).", part.name);
    }
    if limit.implementation == NAIVE && letter == "d" {
        text += &format!(
            " If scores and probabilities are separate tensors, as in PyTorch, these and the output have 2BHT^2 + \
             BHTDh elements: {}.",
            format_mib(limit.attention.composed_bytes())
        );
    }
    text
}

/// Says how memory before backward and time grow with T, at the largest width that each implementation was measured at;
/// `None` where none was at three lengths.
pub fn saved_memory(all: &[Measured], limits: &[(String, Limit)], letter: &str) -> Option<String> {
    let exponent = |law: Option<PowerLaw>| match law {
        Some(law) if law.fits() => format!("T^{:.2} (R^2 {:.3})", law.exponent, law.r_squared),
        Some(law) => format!("unclear (R^2 {:.2})", law.r_squared),
        None => "not measured".into(),
    };
    let mut laws = String::new();
    for (name, own) in grouped(all.iter().filter(|m| m.status == "ok"), |m| m.name()) {
        let width = own.iter().map(|m| m.width).max()?;
        let at = || own.iter().filter(|m| m.width == width);
        let law = |of: fn(&Measured) -> Option<f64>| {
            let points = at().filter_map(|m| Some((m.context_length as f64, of(m)?)));
            PowerLaw::fit(&points.collect::<Vec<_>>())
        };
        let memory = law(|m| Some(m.before_backward_bytes? as f64));
        let time = law(|m| m.mean_ms(BOTH));
        if memory.is_none() && time.is_none() {
            continue;
        }
        let (memory, time) = (exponent(memory), exponent(time));
        let from = at().map(|m| m.context_length).min()?;
        let to = at().map(|m| m.context_length).max()?;
        laws +=
            &format!(" {name}: memory {memory}, time {time}, {letter} {width}, T {from} to {to}.");
    }
    let mut text =
        format!("Memory before backward, and time of forward and backward, grow as follows.{laws}");
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
    (!laws.is_empty()).then_some(text)
}

/// Two measurements of one size: before, after.
type Pair<'m> = (&'m Measured, &'m Measured);

/// Compares the memory that flash attention and naive hold before backward, at the largest size of both.
pub fn eliminated(all: &[Measured]) -> Option<String> {
    let flash = all.iter().filter(|m| m.implementation == "flash");
    let mut pairs: Vec<Pair> = flash.filter_map(|m| Some((m.baseline(all)?, m))).collect();
    pairs.sort_by_key(|(_, m)| std::cmp::Reverse((m.context_length, m.width)));
    let held = pairs
        .iter()
        .find_map(|(naive, m)| Some((m, naive.before_backward_bytes?, m.before_backward_bytes?)));
    let beyond = pairs
        .iter()
        .find(|(naive, m)| naive.is_oom() && m.status == "ok");
    let at = |m: &Measured| format!("T {}, d {}", m.context_length, m.width);
    let mut text = String::from(
        "Not to save any (T, T) matrix. Flash attention computes scores and probabilities tile by tile, and again in \
         backward.",
    );
    if let Some((m, naive, flash)) = held {
        let less = match flash < naive {
            true => format!("{:.0}% less.", 100.0 * (1.0 - flash as f64 / naive as f64)),
            false => "no less. Longer sequences would show the difference.".into(),
        };
        let (at, flash, naive) = (at(m), format_mib(flash), format_mib(naive));
        text += &format!(" At {at} it holds {flash} before backward, naive {naive}: {less}");
    }
    if let Some((_, m)) = beyond {
        let peak = m.peak_bytes.map_or(String::new(), |bytes| {
            format!(" with a peak of {}", format_mib(bytes))
        });
        let at = at(m);
        text += &format!(" It ran at {at}{peak}, where naive runs out of memory.");
    }
    (held.is_some() || beyond.is_some()).then_some(text)
}

/// Returns an answer for each other implementation: its times and memory against naive's, over all sizes and at the
/// shortest and the longest T; of several variants, the mean of each.
pub fn compared_with_naive(all: &[Measured]) -> Vec<Answer> {
    let mut answers = Vec::new();
    let others = all.iter().filter(|m| m.implementation != NAIVE);
    for (implementation, own) in grouped(others, |m| m.implementation.clone()) {
        let mut parts = Vec::new();
        for (name, own) in grouped(own, |m| m.name()) {
            let pairs = timed(&own, |m| m.baseline(all));
            if pairs.is_empty() {
                continue;
            }
            if name != implementation {
                parts.push(format!("{name} {}", by_phase(&pairs)));
                continue;
            }
            parts.push(by_phase(&pairs));
            let mut lengths: Vec<u64> = pairs.iter().map(|(_, m)| m.context_length).collect();
            lengths.sort();
            lengths.dedup();
            if let [shortest, .., longest] = lengths[..] {
                for length in [shortest, longest] {
                    let at = pairs.iter().filter(|(_, m)| m.context_length == length);
                    let at: Vec<Pair> = at.copied().collect();
                    parts.push(format!("at T {length} {}", by_phase(&at)));
                }
            }
        }
        let question = format!("How does {implementation} compare with naive attention?");
        answers.extend(explained("", &parts).map(|text| Answer::new(question, text)));
    }
    answers
}

/// Compares every other precision with the first, for each implementation.
pub fn precisions(all: &[Measured]) -> Option<String> {
    let first = &all.first()?.precision;
    let is_first = |m: &Measured| m.precision == *first;
    let rest = |m: &Measured| m.variant.strip_prefix(&m.precision).map(String::from);
    let mut parts = Vec::new();
    for (name, own) in grouped(all.iter().filter(|m| !is_first(m)), |m| m.name()) {
        let pairs = timed(&own, |m| {
            all.iter().find(|other| {
                let is_same = other.implementation == m.implementation && other.is_at(m);
                is_first(other) && is_same && rest(other) == rest(m)
            })
        });
        if !pairs.is_empty() {
            parts.push(format!("{name} {}", by_phase(&pairs)));
        }
    }
    explained(&format!("against {first}, "), &parts)
}

/// Pairs figures with those `before`, where both have times to compare.
fn timed<'m>(
    own: &[&'m Measured],
    before: impl Fn(&Measured) -> Option<&'m Measured>,
) -> Vec<Pair<'m>> {
    let pairs = own.iter().filter_map(|m| Some((before(m)?, *m)));
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
    let peaks = pairs.iter().filter_map(|(before, after)| {
        Some(after.peak_bytes? as f64 / before.peak_bytes.filter(|b| *b > 0)? as f64)
    });
    let memory = match geometric_mean(peaks).map(|ratio| 100.0 * (ratio - 1.0)) {
        Some(more) if more >= 0.5 => format!(" with {more:.0}% more peak memory"),
        Some(less) if less <= -0.5 => format!(" with {:.0}% less peak memory", -less),
        Some(_) => " with the same peak memory".into(),
        None => String::new(),
    };
    let [forward, backward, both] = [0, 1, BOTH].map(|phase| phase_speedup(pairs, phase));
    format!("forward {forward}, backward {backward}, together {both}{memory}")
}

fn phase_speedup(pairs: &[Pair], phase: usize) -> String {
    let speedups = pairs
        .iter()
        .filter_map(|(before, after)| after.speedup_over(before, phase));
    mean_speedup(&speedups.collect::<Vec<_>>())
}
