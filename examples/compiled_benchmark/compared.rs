//! Planned next to eager steps of models: the table, and what the figures say in words.

use super::why::Counted;
use super::words::{self, compared};
use serde_json::Value;
use tallow::report::{
    Answer, Column, Fields, Speedup, Verdict, counted, format_mib, group_digits, mean_and_std,
    speedup,
};

/// The parts that are compared: the mode, the phase of its row, their name, and whether answers speak of them.
const PARTS: [(&str, &str, &str, bool); 7] = [
    ("forward", "forward", "forward alone", true),
    (
        "forward-backward",
        "forward+backward",
        "forward+backward",
        true,
    ),
    ("train-step", "train step", "full step", true),
    ("train-step", "forward", "step's forward", false),
    ("train-step", "backward", "step's backward", false),
    ("train-step", "optimizer", "step's optimizer", false),
    (
        "train-step",
        "backward+optimizer",
        "step's backward+optimizer",
        true,
    ),
];

/// A line for each part of a model's steps.
pub fn columns() -> Vec<Column> {
    let peak = |key, title| Column::mib(key, title).under("Peak").minor(1);
    vec![
        Column::text("configuration", "B-T-d-L-H"),
        Column::text("part", "Part"),
        Column::ms("eager", "eager"),
        Column::ms("planned", "planned"),
        Column::number("speedup", "Speed-up", "", 2),
        peak("peak_eager", "eager"),
        peak("peak_planned", "planned"),
    ]
}

/// Planned against eager in one part of a step.
#[derive(Clone, Debug)]
pub struct Compared {
    pub model: String,
    pub part: &'static str,
    pub eager_ms: f64,
    pub planned_ms: f64,
    pub speedup: Option<Speedup>,
}

/// The lines of a model from its rows, and the parts that both executions have measured.
pub fn parts(model: &str, rows: &[Fields]) -> (Vec<Fields>, Vec<Compared>) {
    let (mut lines, mut compared) = (Vec::new(), Vec::new());
    for (mode, phase, part, _) in PARTS {
        let [eager, planned] = ["eager", "planned"].map(|execution| {
            let key = [("mode", mode), ("phase", phase), ("execution", execution)];
            let is_own = |row: &&Fields| {
                key.iter()
                    .all(|(key, is)| row.get(key) == Some(&(*is).into()))
            };
            rows.iter().find(is_own)
        });
        if eager.or(planned).is_none() {
            continue;
        }
        let speedup = eager.zip(planned).and_then(|(e, p)| speedup(e, p));
        let mut line = Fields::from_iter([("configuration", model), ("part", part)]);
        for (execution, row) in [("eager", eager), ("planned", planned)] {
            line.insert(execution, row.map(mean_and_std));
            let peak = row.and_then(|row| row.get("peak_bytes"));
            line.insert(format!("peak_{execution}"), peak.cloned());
        }
        line.insert("speedup", words::speedup_cell(speedup));
        lines.push(line);
        let mean = |row: Option<&Fields>| row?.get("mean_ms").and_then(Value::as_f64);
        if let Some((eager_ms, planned_ms)) = mean(eager).zip(mean(planned)) {
            compared.push(Compared {
                model: model.into(),
                part,
                eager_ms,
                planned_ms,
                speedup,
            });
        }
    }
    (lines, compared)
}

/// The answers: how much faster, and why, by the longest step.
pub fn answers(all: &[Compared], counted: &[Counted]) -> Vec<Answer> {
    let is_answered = |c: &&Compared| PARTS.iter().any(|part| part.3 && part.2 == c.part);
    let answered: Vec<Compared> = all.iter().filter(is_answered).cloned().collect();
    let question =
        "How does compiling the model (planned) change forward, backward and the full step?";
    let speedups = speedups(&answered).map(|text| Answer::new(question, text));
    let mut answers: Vec<Answer> = speedups.into_iter().collect();
    let steps = all.iter().filter(|c| c.part == "full step");
    let longest = steps.max_by(|a, b| a.eager_ms.total_cmp(&b.eager_ms));
    let reasons = longest.and_then(|step| {
        let of = |execution: &str| {
            let mut own = counted.iter().filter(|c| c.configuration == step.model);
            own.find(|c| c.execution == execution)
        };
        Some(reasons(of("eager")?, of("planned")?, step))
    });
    let question = "What are the reasons for the difference?";
    answers.extend(reasons.map(|text| Answer::new(question, text)));
    answers
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
