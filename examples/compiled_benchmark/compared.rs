//! What the figures say about compiled models, in words. Each function takes plain figures.

use super::why::Counted;
use super::words::compared;
use tallow::report::{Column, Speedup, Verdict, counted, format_mib, group_digits};

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
            let unclear = if speedup.is_clear() { "" } else { "unclear, " };
            let [planned, eager] = [c.planned_ms, c.eager_ms].map(ms);
            return Some(format!(" {part}: {unclear}{speedup} ({planned} against {eager} ms)."));
        }
        let mut clear: Vec<_> = own.iter().filter(|(_, s)| s.is_clear()).collect();
        clear.sort_by(|a, b| a.1.ratio.total_cmp(&b.1.ratio));
        let logs: f64 = clear.iter().map(|(_, speedup)| speedup.ratio.ln()).sum();
        let mean = (logs / clear.len() as f64).exp();
        let count = own.len();
        match (&clear[..], 2 * clear.len() >= count) {
            ([(least, low), .., (most, high)], true) => Some(format!(
                " {part}: {mean:.2}x, the geometric mean of {} of {count} models, from {low} ({}) to {high} ({}).",
                clear.len(),
                least.model,
                most.model
            )),
            _ if count == 0 => None,
            _ => {
                let unclear = count - clear.len();
                Some(format!(" {part}: unclear for {unclear} of {count} models."))
            }
        }
    });
    let mut text: String = sentences.collect();
    if text.contains("unclear") {
        text += " Unclear: the spread of these times is too large; more steps on a quiet machine would decide.";
    }
    let start = "Speed-ups of planned over eager, as ratios of mean times.";
    (!text.is_empty()).then(|| format!("{start}{text}"))
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
        match planned / eager {
            ratio if ratio < 0.98 => less.push(text),
            ratio if ratio > 1.02 => not_less.push(text),
            _ => {}
        }
    };
    let both = |of: fn(&Counted) -> Option<f64>| of(eager).zip(of(planned));
    // What candle's graph does between eager ops is not counted: more in a planned step shows nothing.
    let traffic = both(|c| Some(c.operand_bytes)).filter(|(eager, planned)| planned < eager);
    compare("memory traffic", traffic, true);
    compare("allocations", both(|c| Some(c.allocations? as f64)), false);
    compare(
        "bytes allocated",
        both(|c| Some(c.allocated_bytes? as f64)),
        true,
    );
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
    text += match (is_faster, less.is_empty()) {
        (true, false) => {
            " This agrees with a faster step; the counts do not tell how much each contributes."
        }
        (true, true) => " These counts do not explain the faster step.",
        (false, _) => "",
    };
    let gain_ms = step.eager_ms - step.planned_ms;
    if let Some(plan_ms) = planned.plan_ms.filter(|_| is_faster) {
        text += &format!(
            " Planning took {} ms: the gain of {}.",
            ms(plan_ms),
            counted((plan_ms / gain_ms).ceil() as usize, "step")
        );
    }
    text
}

fn ms(ms: f64) -> String {
    Column::ms("", "").cell(Some(&ms.into()))
}
