//! Half precision compared with f32: a table line for each configuration, and answers. The tests read both.

use super::words::{change, counts, memory, speedup_cell};
use serde::Deserialize;
use tallow::report::{
    Answer, Fields, PowerLaw, Speedup, Verdict, counted, format_mib, mean_and_std, speedup,
};

/// The row of one step as a whole, in one precision.
#[derive(Clone, Debug, Deserialize)]
pub struct Measured {
    pub size: String,
    pub batch_size: usize,
    pub context_length: usize,
    pub attention: String,
    #[serde(default)]
    pub checkpointing: String,
    pub mode: String,
    pub phase: String,
    pub precision: String,
    pub status: String,
    pub parameters: Option<u64>,
    pub tokens_per_s: Option<f64>,
    pub peak_bytes: Option<u64>,
    pub reserved_peak_bytes: Option<u64>,
    pub estimate_bytes: Option<u64>,
    /// Copies of the weights in half precision, part of the peak.
    pub weight_cast_bytes: Option<u64>,
}

/// One configuration in every precision that it was run in.
#[derive(Clone, Debug)]
pub struct Configuration(Vec<(Measured, Fields)>);

/// The configurations of whole steps among `rows`; rows of phases are passed over.
pub fn configurations(rows: &[Fields]) -> Vec<Configuration> {
    let mut all: Vec<Configuration> = Vec::new();
    for row in rows {
        let Some(own) = row.read::<Measured>().filter(Measured::is_whole_step) else {
            continue;
        };
        let side = (own, row.clone());
        match all.iter_mut().find(|c| c.first().title() == side.0.title()) {
            Some(configuration) => configuration.0.push(side),
            None => all.push(Configuration(vec![side])),
        }
    }
    all
}

impl Measured {
    fn is_whole_step(&self) -> bool {
        let phase = match self.mode.as_str() {
            "forward-backward" => "forward+backward",
            "train-step" => "train step",
            _ => "forward",
        };
        self.phase == phase
    }

    /// `tiny B4 T256 forward`.
    fn title(&self) -> String {
        let variant = match self.variant() {
            naive if naive == "naive" => String::new(),
            other => format!(" {other}"),
        };
        let (b, t) = (self.batch_size, self.context_length);
        format!("{} B{b} T{t}{variant} {}", self.size, self.mode)
    }

    /// The attention, and the checkpointing if there is any.
    pub fn variant(&self) -> String {
        match self.checkpointing.as_str() {
            "" | "none" => self.attention.clone(),
            strategy => format!("{}, checkpointing {strategy},", self.attention),
        }
    }
}

impl Configuration {
    /// What every side shares: sizes, attention, mode.
    pub fn first(&self) -> &Measured {
        &self.0[0].0
    }

    pub fn sides(&self) -> impl Iterator<Item = &Measured> {
        self.0.iter().map(|(own, _)| own)
    }

    pub fn side(&self, precision: &str) -> Option<&Measured> {
        self.sides().find(|side| side.precision == precision)
    }

    /// How many times as fast `precision` is as `other`.
    pub fn speedup(&self, other: &str, precision: &str) -> Option<Speedup> {
        let row = |name: &str| self.0.iter().find(|(own, _)| own.precision == name);
        speedup(&row(other)?.1, &row(precision)?.1)
    }

    /// The peaks in bytes of `other` and of `precision`.
    fn peaks(&self, other: &str, precision: &str) -> Option<(u64, u64)> {
        let peak = |name: &str| self.side(name)?.peak_bytes;
        Some((peak(other)?, peak(precision)?))
    }

    /// `ok`, or which precisions run out of memory: `bf16 avoids OOM` where f32 alone does.
    pub fn outcome(&self) -> String {
        let names = |fits: bool| {
            let sides = self.sides().filter(|side| (side.status == "ok") == fits);
            let names: Vec<&str> = sides.map(|side| side.precision.as_str()).collect();
            names.join(", ")
        };
        let f32_fits = self.side("f32").is_none_or(|side| side.status == "ok");
        match (names(true).as_str(), names(false).as_str()) {
            (_, "") => "ok".into(),
            ("", _) => "OOM in all".into(),
            (fits, _) if !f32_fits => format!("{fits} avoids OOM"),
            (_, fails) => format!("{fails} OOM"),
        }
    }

    /// A line of the table, with the keys of [`key`].
    pub fn line(&self) -> Fields {
        let mut line = self.0[0].1.clone();
        for (own, row) in &self.0 {
            let name = own.precision.as_str();
            line.insert(key("time", name), mean_and_std(row));
            line.insert(key("peak", name), own.peak_bytes);
            line.insert(key("copies", name), own.weight_cast_bytes);
            line.insert(key("reserved", name), own.reserved_peak_bytes);
            line.insert(key("tokens", name), own.tokens_per_s);
            line.insert(key("predicted", name), own.estimate_bytes);
            let peaks = self.peaks("f32", name);
            let change = peaks.map(|(before, after)| change(before, after));
            line.insert(key("change", name), change);
            let speedup = self.speedup("f32", name).filter(|_| name != "f32");
            line.insert(key("speed-up", name), speedup_cell(speedup));
        }
        line.insert("outcome", self.outcome());
        line
    }
}

/// The key of a precision's quantity in a line.
pub fn key(quantity: &str, precision: &str) -> String {
    format!("{quantity} {precision}")
}

/// Every precision there is, in the order in which they come.
pub fn precisions(all: &[Configuration]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for side in all.iter().flat_map(Configuration::sides) {
        if !names.contains(&side.precision) {
            names.push(side.precision.clone());
        }
    }
    names
}

/// Answers from the figures about speed, its trend over sizes, memory, and what fits.
pub fn answers(all: &[Configuration]) -> Vec<Answer> {
    let mut answers = Vec::new();
    for name in precisions(all).iter().filter(|name| *name != "f32") {
        let speedups: Vec<(String, Speedup)> = all
            .iter()
            .filter_map(|c| Some((c.first().title(), c.speedup("f32", name)?)))
            .collect();
        if !speedups.is_empty() {
            let question = format!("Is {name} faster than f32?");
            answers.push(Answer::new(question, speed(name, &speedups)));
            let question = format!("How does the speed-up of {name} change with the model's size?");
            let few = "A trend needs three sizes of model (--size tiny small medium).";
            let trend = trends(all, name).unwrap_or_else(|| few.into());
            answers.push(Answer::new(question, trend));
        }
        let peaks: Vec<(String, u64, u64)> = all
            .iter()
            .filter_map(|c| {
                let (before, after) = c.peaks("f32", name)?;
                Some((c.first().title(), before, after))
            })
            .collect();
        let copies = all
            .iter()
            .filter_map(|c| c.side(name)?.weight_cast_bytes)
            .max();
        if !peaks.is_empty() {
            let question = format!("Does {name} use less memory than f32?");
            answers.push(Answer::new(question, memory(name, &peaks, copies)));
        }
    }
    let oom = all.iter().filter(|c| c.outcome() != "ok").map(|c| {
        let needed = c.sides().filter(|side| side.status != "ok").map(|side| {
            let bytes = side.estimate_bytes.map_or("unknown".into(), format_mib);
            format!("{} needs {bytes}", side.precision)
        });
        let needed: Vec<String> = needed.collect();
        let (title, outcome) = (c.first().title(), c.outcome());
        format!("{title}: {outcome} ({})", needed.join(", "))
    });
    let oom: Vec<String> = oom.collect();
    if !oom.is_empty() {
        let question = "What fits in one precision only?";
        answers.push(Answer::new(question, oom.join("; ") + "."));
    }
    answers
}

/// In how many configurations `name` is faster than f32, and the range.
pub fn speed(name: &str, found: &[(String, Speedup)]) -> String {
    let verdict = |(_, speedup): &(String, Speedup)| match speedup.verdict() {
        Verdict::Faster => "faster than f32",
        Verdict::Slower => "slower than f32",
        Verdict::AsFast => "as fast as f32",
        Verdict::Unclear => "undecided",
    };
    let counts = counts(found.iter().map(verdict));
    let mut clear: Vec<_> = found.iter().filter(|(_, s)| s.is_clear()).collect();
    clear.sort_by(|a, b| a.1.ratio.total_cmp(&b.1.ratio));
    let range = match clear[..] {
        [(title, only)] => format!(" The ratio of means is {only} ({title})."),
        [(slowest, least), .., (fastest, most)] => {
            format!(" The ratio of means goes from {least} ({slowest}) to {most} ({fastest}).")
        }
        [] => String::new(),
    };
    let undecided = match clear.len() < found.len() {
        true => " Undecided is where the spread is too large: take more steps on a quiet machine.",
        false => "",
    };
    let total = counted(found.len(), "configuration");
    format!("Of {total}, {name} is {counts}.{range}{undecided}")
}

/// A sentence for each group of configurations that differ in the model's size alone.
fn trends(all: &[Configuration], name: &str) -> Option<String> {
    let group = |c: &Configuration| {
        let own = c.first();
        format!("{} {}, T {}", own.variant(), own.mode, own.context_length)
    };
    let mut groups: Vec<String> = all.iter().map(group).collect();
    groups.sort();
    groups.dedup();
    let sentences = groups.iter().map(|own| {
        let points = all
            .iter()
            .filter(|c| group(c) == *own)
            .filter_map(|c| Some((c.first().parameters? as f64, c.speedup("f32", name)?)));
        (own, points.collect::<Vec<_>>())
    });
    let sentences: Vec<String> = sentences
        .filter_map(|(own, points)| Some(format!("{own}: {}.", trend(&points)?)))
        .collect();
    (!sentences.is_empty()).then(|| sentences.join(" "))
}

/// What speed-ups at several numbers of parameters show together; `None` for fewer than three sizes.
pub fn trend(points: &[(f64, Speedup)]) -> Option<String> {
    let mut points = points.to_vec();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    let ratios: Vec<(f64, f64)> = points.iter().map(|(size, s)| (*size, s.ratio)).collect();
    let law = PowerLaw::fit(&ratios)?;
    let shown: Vec<String> = points.iter().map(|(_, s)| s.to_string()).collect();
    let shown = format!(
        "{} from the smallest model to the largest",
        shown.join(", ")
    );
    let extreme = |f: fn(f64, f64) -> f64| ratios.iter().map(|(_, r)| *r).reduce(f);
    let (least, most) = (extreme(f64::min)?, extreme(f64::max)?);
    Some(match law.exponent {
        _ if points.iter().any(|(_, s)| !s.is_clear()) => {
            format!("{shown}; the spread is too large for a trend (take more steps)")
        }
        _ if most < 1.1 * least => format!("{shown}: it does not depend on the size"),
        _ if !law.fits() => {
            format!(
                "{shown}; no trend: a power law has R^2 {:.2}",
                law.r_squared
            )
        }
        exponent => format!(
            "{shown}: it {} as parameters^{exponent:.2} (R^2 {:.2})",
            if exponent > 0.0 { "grows" } else { "falls" },
            law.r_squared
        ),
    })
}
