//! What the figures say about compiled models, in words. Each function takes plain figures.

use super::answers::mean_speedup;
use super::why::Counted;
use super::words::compared;
use tallow::report::{Speedup, Verdict, format_mib, group_digits};

/// Planned against eager in one part of a step.
#[derive(Clone, Debug)]
pub struct Compared {
    pub model: String,
    pub part: &'static str,
    pub eager_ms: f64,
    pub planned_ms: f64,
    pub speedup: Option<Speedup>,
}

/// How each part of a step changes: of one model with its times, of several by their mean and extremes.
pub fn speedups(all: &[Compared]) -> Option<String> {
    let mut parts: Vec<&str> = Vec::new();
    for own in all {
        if !parts.contains(&own.part) {
            parts.push(own.part);
        }
    }
    let sentences = parts.into_iter().filter_map(|part| {
        let own = all.iter().filter(|c| c.part == part);
        let own: Vec<(&Compared, Speedup)> = own.filter_map(|c| Some((c, c.speedup?))).collect();
        if let [(c, speedup)] = own[..] {
            let (eager, planned) = (c.eager_ms, c.planned_ms);
            let compared = compared("planned", "eager", speedup);
            return Some(format!(
                "{part}: {compared}; {planned:.3} and {eager:.3} ms."
            ));
        }
        let ratios: Vec<Speedup> = own.iter().map(|(_, speedup)| *speedup).collect();
        let clear = || own.iter().filter(|(_, speedup)| speedup.is_clear());
        let by_ratio =
            |a: &&(&Compared, Speedup), b: &&(&Compared, Speedup)| a.1.ratio.total_cmp(&b.1.ratio);
        let extremes = clear().min_by(by_ratio).zip(clear().max_by(by_ratio));
        let extremes = extremes.map_or(String::new(), |((least, least_is), (most, most_is))| {
            format!(
                ", from {least_is} ({}) to {most_is} ({})",
                least.model, most.model
            )
        });
        let (mean, count) = (mean_speedup(&ratios), ratios.len());
        (count > 0).then(|| format!("{part}: {mean} (geometric mean of {count} models){extremes}."))
    });
    let sentences: Vec<String> = sentences.collect();
    let start = match all.iter().any(|c| c.model != all[0].model) {
        true => "Eager mean time over planned. ",
        false => "",
    };
    (!sentences.is_empty()).then(|| format!("{start}{}", sentences.join(" ")))
}

/// What a planned training step does less of than an eager one, and whether it is faster.
pub fn reasons(eager: &Counted, planned: &Counted, step: &Compared) -> String {
    let mut less = Vec::new();
    let mut not_less = Vec::new();
    let mut compare = |what: &str, pair: Option<(f64, f64)>, is_mib: bool| {
        let Some((eager, planned)) = pair else {
            return;
        };
        let show = |x: f64| match is_mib {
            true => format_mib(x as u64),
            false => group_digits(x as u64),
        };
        let text = format!("{what} {} instead of {}", show(planned), show(eager));
        match planned < eager {
            true => less.push(text),
            false => not_less.push(text),
        }
    };
    let both = |of: fn(&Counted) -> Option<f64>| of(eager).zip(of(planned));
    compare(
        "kernels read and write",
        both(|c| Some(c.operand_bytes)),
        true,
    );
    compare("allocations", both(|c| Some(c.allocations? as f64)), false);
    compare("allocated", both(|c| Some(c.allocated_bytes? as f64)), true);
    compare(
        "peak memory",
        both(|c| Some(c.memory.peak_bytes? as f64)),
        true,
    );
    let mut text = format!("{}: ", step.model);
    text += &match step.speedup {
        Some(speedup) => compared("a planned step", "an eager one", speedup),
        None => "the steps' times cannot be compared".into(),
    };
    text += ".";
    if !less.is_empty() {
        text += &format!(" Less in a planned step: {}.", less.join(", "));
    }
    if !not_less.is_empty() {
        text += &format!(" Not less: {}.", not_less.join(", "));
    }
    let is_faster = step.speedup.map(|speedup| speedup.verdict()) == Some(Verdict::Faster);
    match (is_faster, less.is_empty()) {
        (true, false) => {
            text +=
                " This agrees with a faster step; the counts do not say how much each contributes.";
        }
        (true, true) => text += " These counts do not explain it.",
        (false, _) => text += " These times show no faster step, whatever the counts.",
    }
    let gain_ms = step.eager_ms - step.planned_ms;
    if let Some(plan_ms) = planned.plan_ms.filter(|_| is_faster) {
        text += &format!(
            " Planning took {plan_ms:.0} ms: the gain of {:.0} steps.",
            (plan_ms / gain_ms).ceil()
        );
    }
    text
}
