//! What CS336's handout asks of a profile (a to e), answered in words and numbers: of a GPU's kernels where they were
//! recorded, else of ops, and of the products and softmaxes inside them.

use tallow::Result;
use tallow::probe;
use tallow::profile::{
    Balance, Grouping, LineKind, Parts, ProfileReport, Recording, Row, Selection,
};
use tallow::report::{Fields, list_in_note};

/// From which share of the time something is worth naming.
const NAMED_FROM_PERCENT: f64 = 1.0;

/// A run's steps, recorded and timed.
pub struct Profiled {
    pub recording: Recording,
    /// The rows of the stopwatch, without a profiler.
    pub stopwatch: Vec<Fields>,
    /// One layer's attention taken apart, where its kernels do products and softmax in one.
    pub apart: Option<Recording>,
}

/// The summaries that the answers are from.
struct Summaries {
    forward: ProfileReport,
    /// `None` where the run is a forward alone.
    backward: Option<ProfileReport>,
    whole: ProfileReport,
}

impl Profiled {
    /// Sentences, and their numbers.
    pub fn analyse(&self) -> Result<(Vec<String>, Fields)> {
        let mut notes = Vec::new();
        let mut numbers = Fields::new();
        let balance = Balance::new(&self.recording);
        let grouping = match self.has_kernels() {
            true => Grouping::Kernel,
            false => Grouping::Name,
        };
        let of = |selection: &Selection| ProfileReport::new(&self.recording, selection, grouping);
        let summaries = Summaries {
            forward: of(&Selection::phase("forward"))?,
            backward: of(&Selection::phase("backward")).ok(), // a forward alone has none
            whole: of(&Selection::default())?,
        };
        notes.extend(self.against_the_stopwatch(&balance, &mut numbers));
        notes.push(made_of(&balance, &mut numbers));
        notes.extend(longest(&summaries, &mut numbers));
        notes.push(others(
            "(c) Besides products, of forward",
            &summaries.forward,
        ));
        notes.extend(product_shares(&summaries, &mut numbers));
        notes.extend(self.softmax_against_products(&mut numbers)?);
        notes.push(self.idle_cost(&balance, &mut numbers));
        Ok((notes, numbers))
    }

    fn has_kernels(&self) -> bool {
        !self.recording.kernels.is_empty()
    }

    /// (a) Does the total match the stopwatch's?
    fn against_the_stopwatch(&self, balance: &Balance, numbers: &mut Fields) -> Vec<String> {
        let profiled_ms = balance.ms_per_step(balance.wall_ns);
        let timed = self.stopwatch.last();
        let stopwatch_ms = timed.and_then(|row| row.get("mean_ms")?.as_f64());
        numbers.insert("profiled_ms_per_step", profiled_ms);
        numbers.insert("stopwatch_mean_ms", stopwatch_ms);
        let Some(stopwatch_ms) = stopwatch_ms else {
            return vec![format!("(a) {profiled_ms:.2} ms a step by the profiler.")];
        };
        let mut notes = Vec::new();
        if self.has_kernels() {
            let idle_ns = balance.sum_ns(|line| line.kind == LineKind::Idle);
            let kernels_ms = balance.ms_per_step(balance.wall_ns - idle_ns);
            numbers.insert("kernels_ms_per_step", kernels_ms);
            notes.push(format!(
                "(a) Kernels run {kernels_ms:.2} ms a step, {:+.1}% against the {stopwatch_ms:.2} by the stopwatch; \
                 the GPU is idle for {:.2}.",
                100.0 * (kernels_ms / stopwatch_ms - 1.0),
                balance.ms_per_step(idle_ns),
            ));
        }
        let phase = |row: &Fields| {
            let name = row.get("phase")?.as_str()?.to_string();
            let recorded_ns = balance.sum_ns(|line| line.phase == name);
            let ms = row.get("mean_ms")?.as_f64()?;
            let recorded_ms = balance.ms_per_step(recorded_ns);
            (recorded_ns > 0).then(|| format!("{name} {recorded_ms:.2} and {ms:.2}"))
        };
        // The last row is the whole, of which a planned step's recording has a phase too.
        let phases = self
            .stopwatch
            .split_last()
            .map_or(&[][..], |(_, phases)| phases);
        let phases: Vec<String> = phases.iter().filter_map(phase).collect();
        let whole = format!(
            "(a) {profiled_ms:.2} ms a step by the profiler, {stopwatch_ms:.2} by the stopwatch without it ({:+.1}%)",
            100.0 * (profiled_ms / stopwatch_ms - 1.0),
        );
        notes.push(match phases.is_empty() {
            true => format!("{whole}."),
            false => format!("{whole}: {}.", phases.join(", ")),
        });
        notes
    }

    /// (e) Softmax against the products of attention, in time and in FLOPs.
    fn softmax_against_products(&self, numbers: &mut Fields) -> Result<Vec<String>> {
        let forward = Selection::phase("forward");
        let of = |recording| ProfileReport::new(recording, &forward, Grouping::Path);
        let attention = Attention::of(&of(&self.recording)?);
        let (attention, place) = match (&self.apart, attention.parts.fused_ns) {
            (Some(apart), 1..) => (
                Attention::of(&of(apart)?),
                "One layer's attention, its ops apart",
            ),
            _ => (attention, "Attention in forward, all layers"),
        };
        let Parts {
            products_ns,
            scores_ns,
            values_ns,
            softmax_ns,
            ..
        } = attention.parts;
        if products_ns == 0 || softmax_ns == 0 {
            return Ok(Vec::new());
        }
        let steps = attention.steps;
        let ms = |ns: u64| ns as f64 / 1e6 / steps;
        let softmax_flops = attention.flops - attention.product_flops;
        let time_ratio = products_ns as f64 / softmax_ns as f64;
        let flops_ratio = attention.product_flops / softmax_flops;
        numbers.insert("attention_softmax_ms", ms(softmax_ns));
        numbers.insert("attention_products_ms", ms(products_ns));
        let is_told = scores_ns + values_ns > 0;
        numbers.insert("attention_scores_ms", is_told.then(|| ms(scores_ns)));
        numbers.insert("attention_values_ms", is_told.then(|| ms(values_ns)));
        numbers.insert("attention_mask_ms", attention.mask_ns.map(ms));
        numbers.insert("attention_products_over_softmax_time", time_ratio);
        numbers.insert("attention_products_over_softmax_flops", flops_ratio);
        let rate = |flops: f64, ns: u64| flops / ns as f64; // in GFLOP/s
        let mask = match attention.mask_ns {
            Some(ns) => format!("scale and mask {:.3}", ms(ns)),
            None => "scale and mask in the softmax".into(),
        };
        let products = match is_told {
            true => format!(
                "scores {:.3} ms a step, values {:.3}",
                ms(scores_ns),
                ms(values_ns)
            ),
            false => format!("scores and values {:.3} ms a step", ms(products_ns)),
        };
        Ok(vec![
            format!(
                "(e) {place}: {products}, softmax {:.3}, {mask}, the rest {:.3}.",
                ms(softmax_ns),
                ms(attention.rest_ns),
            ),
            format!(
                "(e) There products take {time_ratio:.2}x softmax's time for {flops_ratio:.1}x its FLOPs \
                 ({:.1} and {:.1} GFLOP/s).",
                rate(attention.product_flops, products_ns),
                rate(softmax_flops, softmax_ns),
            ),
        ])
    }

    /// What the ranges cost without a listener: those of a step, at what one takes in a loop.
    fn idle_cost(&self, balance: &Balance, numbers: &mut Fields) -> String {
        const TIMES: u32 = 1_000_000;
        let start = std::time::Instant::now();
        for _ in 0..TIMES {
            drop(std::hint::black_box(probe::module(|| "idle")));
        }
        let range_ns = start.elapsed().as_secs_f64() * 1e9 / f64::from(TIMES);
        let ranges = self.recording.spans.len() as f64 / balance.steps.unwrap_or(1) as f64;
        let step_ns = balance.ms_per_step(balance.wall_ns) * 1e6;
        let percent = 100.0 * ranges * range_ns / step_ns;
        numbers.insert("ranges_per_step", ranges);
        numbers.insert("idle_range_ns", range_ns);
        numbers.insert("idle_percent", percent);
        format!(
            "{ranges:.0} ranges a step; while no profiler runs one takes {range_ns:.1} ns, together {percent:.5}% of a \
             step."
        )
    }
}

/// What attention takes: its ops, or those that it is made of where it runs as references.
#[derive(Default)]
struct Attention {
    parts: Parts,
    /// Where scale and mask are ops.
    mask_ns: Option<u64>,
    rest_ns: u64,
    flops: f64,
    product_flops: f64,
    steps: f64,
}

impl Attention {
    /// From rows by path.
    fn of(report: &ProfileReport) -> Self {
        let mut sum = Self {
            steps: report.steps.unwrap_or(1) as f64,
            ..Default::default()
        };
        for row in report.rows.iter().filter(|row| !row.is_gap()) {
            let mut names = row.name.rsplit('/');
            let (op, around) = (names.next().unwrap_or_default(), names.next());
            let is_product = op == "matmul" && matches!(around, Some("scores" | "values"));
            if matches!(op, "scale" | "mask") {
                *sum.mask_ns.get_or_insert(0) += row.total_ns;
            } else if op.contains("attention") || is_product || op == "softmax" {
                sum.parts += row.parts;
                match around {
                    _ if !is_product => {}
                    Some("scores") => sum.parts.scores_ns += row.parts.products_ns,
                    _ => sum.parts.values_ns += row.parts.products_ns,
                }
                sum.rest_ns += row.rest_ns();
            } else {
                continue;
            }
            sum.flops += row.cost.map_or(0.0, |cost| cost.flops());
            sum.product_flops += row.cost.map_or(0.0, |cost| cost.product_flops);
        }
        sum
    }
}

/// What the wall time is made of.
fn made_of(balance: &Balance, numbers: &mut Fields) -> String {
    let percent = |wanted: &dyn Fn(LineKind) -> bool| {
        100.0 * balance.sum_ns(|line| wanted(line.kind)) as f64 / balance.wall_ns.max(1) as f64
    };
    let ops = percent(&|kind| kind == LineKind::Ops);
    let idle = percent(&|kind| kind == LineKind::Idle);
    let plan = percent(&|kind| kind == LineKind::Plan);
    let unexplained = percent(&|kind| kind == LineKind::Unexplained);
    let candle = (100.0 - ops - idle - plan - unexplained).max(0.0);
    numbers.insert("ops_percent", ops);
    numbers.insert("candle_percent", candle);
    numbers.insert("gpu_idle_percent", idle);
    numbers.insert("between_calls_percent", plan);
    numbers.insert("unexplained_percent", unexplained);
    let is_planned = balance.lines.iter().any(|line| line.kind == LineKind::Plan);
    let has_gpu = balance.lines.iter().any(|line| line.kind == LineKind::Idle);
    let between = match is_planned {
        true => format!("the plan between them {plan:.1}%"),
        false => format!("what is between them {candle:.1}%"),
    };
    match has_gpu {
        true => format!(
            "Kernels of ops take {ops:.1}% of the time, {between}, the GPU is idle for {idle:.1}%."
        ),
        false => {
            format!("Ops take {ops:.1}% of the time, {between}, unexplained is {unexplained:.2}%.")
        }
    }
}

/// (b) What takes the most time in forward and how often it runs there, and what does in forward and backward.
fn longest(summaries: &Summaries, numbers: &mut Fields) -> Vec<String> {
    let Summaries {
        forward,
        backward,
        whole,
    } = summaries;
    let first = |report: &ProfileReport| report.rows.iter().find(|row| !row.is_gap()).cloned();
    let (Some(in_forward), Some(in_all)) = (first(forward), first(whole)) else {
        return Vec::new();
    };
    numbers.insert("longest_in_forward", in_forward.name.as_str());
    numbers.insert("longest_in_all", in_all.name.as_str());
    let times = |report: &ProfileReport, row: &Row| report.instances_per_step(row).unwrap_or(0.0);
    let name = |row: &Row| match &row.launches {
        None => row.name.clone(),
        Some(launches) => {
            let op = launches.ops.first().map_or("", |(op, _)| op.as_str());
            format!("{} (of {op})", row.short_name())
        }
    };
    let mut notes = vec![format!(
        "(b) Most of forward: {}, {:.1}%, {:.0} times a step.",
        name(&in_forward),
        forward.percent(&in_forward),
        times(forward, &in_forward),
    )];
    if let Some(backward) = backward {
        let of_name = |report: &ProfileReport, row: &Row| {
            report.sum("", |other| other.name == row.name && other.kind == row.kind)
        };
        let both = |row: &Row| {
            let (f, b) = (of_name(forward, row), of_name(backward, row));
            let ns = f.total_ns + b.total_ns;
            let share = 100.0 * ns as f64 / (forward.whole_ns + backward.whole_ns).max(1) as f64;
            (ns, share, times(forward, &f) + times(backward, &b))
        };
        let rows = forward.rows.iter().chain(&backward.rows);
        let rows = rows.rev().filter(|row| !row.is_gap()); // the last of the longest is taken
        if let Some(row) = rows.max_by_key(|row| both(row).0) {
            let (_, share, count) = both(row);
            numbers.insert("longest_in_forward_backward", row.name.as_str());
            notes.push(format!(
                "(b) Most of forward and backward: {}, {share:.1}%, {count:.0} times; forward's runs {:.0} times \
                 there.",
                name(row),
                both(&in_forward).2,
            ));
        }
    }
    notes
}

/// What takes a part worth naming that is no product: the rest of ops that hold some.
fn others(title: &str, report: &ProfileReport) -> String {
    let share = |ns: u64| 100.0 * ns as f64 / report.whole_ns.max(1) as f64;
    let mut parts: Vec<(u64, String)> = Vec::new();
    for row in report.rows.iter().filter(|row| !row.is_gap()) {
        let name = row.short_name().to_string();
        let is_whole = row.rest_ns() == row.total_ns;
        if row.parts.fused_ns > 0 {
            parts.push((
                row.parts.fused_ns,
                format!("{name} (products and softmax in one)"),
            ));
        }
        match row.launches.is_some() || name == "softmax" {
            true => parts.push((row.parts.softmax_ns, name.clone())),
            false => parts.push((row.parts.softmax_ns, format!("{name}'s softmax"))),
        }
        match is_whole || row.launches.is_some() {
            true => parts.push((row.rest_ns(), name)),
            false => parts.push((row.rest_ns(), format!("{name}'s rest"))),
        }
    }
    parts.retain(|(ns, _)| share(*ns) >= NAMED_FROM_PERCENT);
    parts.sort_by_key(|(ns, _)| std::cmp::Reverse(*ns));
    let named: Vec<String> = parts
        .iter()
        .map(|(ns, name)| format!("{name} {:.1}%", share(*ns)))
        .collect();
    match named.is_empty() {
        true => format!("{title}: nothing takes {NAMED_FROM_PERCENT}%."),
        false => list_in_note(title, &named),
    }
}

/// (d) Products' share of forward, and of the whole; what else there is in the whole.
fn product_shares(summaries: &Summaries, numbers: &mut Fields) -> Vec<String> {
    let parts = |report: &ProfileReport| report.sum("", |row| !row.is_gap()).parts;
    let share = |report: &ProfileReport, part: fn(&Parts) -> u64| {
        100.0 * part(&parts(report)) as f64 / report.whole_ns.max(1) as f64
    };
    let both = |part| [&summaries.forward, &summaries.whole].map(|report| share(report, part));
    let products = both(|parts| parts.products_ns);
    let softmax = both(|parts| parts.softmax_ns);
    let fused = both(|parts| parts.fused_ns);
    numbers.insert("products_percent_of_forward", products[0]);
    numbers.insert("products_percent_of_whole", products[1]);
    numbers.insert("softmax_percent_of_forward", softmax[0]);
    numbers.insert("softmax_percent_of_whole", softmax[1]);
    numbers.insert("attention_kernels_percent_of_forward", fused[0]);
    numbers.insert("attention_kernels_percent_of_whole", fused[1]);
    let mut notes = vec![format!(
        "(d) Matrix products alone take {:.1}% of forward and {:.1}% of the whole, softmax {:.1}% and {:.1}%.",
        products[0], products[1], softmax[0], softmax[1],
    )];
    if fused[1] > 0.0 {
        notes.push(format!(
            "(d) Flash attention's kernels, products and softmax in one, take {:.1}% of forward and {:.1}% of the \
             whole.",
            fused[0], fused[1],
        ));
    }
    if summaries.backward.is_some() {
        notes.push(others(
            "(d) Besides products, of the whole",
            &summaries.whole,
        ));
    }
    notes
}
