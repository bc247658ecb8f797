//! What CS336's handout asks of a profile (a to e), answered in words and numbers.

use crate::common::ops::short;
use tallow::Result;
use tallow::probe;
use tallow::profile::{Balance, Grouping, LineKind, ProfileReport, Recording, Row, Selection};
use tallow::report::{Fields, list_in_note};

/// From which share of forward an op is worth naming.
const NAMED_FROM_PERCENT: f64 = 1.0;

/// A run's steps, recorded and timed.
pub struct Profiled {
    pub recording: Recording,
    /// The rows of the stopwatch, without a profiler.
    pub stopwatch: Vec<Fields>,
    /// One layer's attention taken apart.
    pub apart: Recording,
}

impl Profiled {
    /// Sentences, and their numbers.
    pub fn analyse(&self) -> Result<(Vec<String>, Fields)> {
        let mut notes = Vec::new();
        let mut numbers = Fields::new();
        let balance = Balance::new(&self.recording);
        let forward = ProfileReport::new(
            &self.recording,
            &Selection::phase("forward"),
            Grouping::Name,
        )?;
        let whole = ProfileReport::new(&self.recording, &Selection::default(), Grouping::Name)?;
        notes.push(self.against_the_stopwatch(&balance, &mut numbers));
        notes.push(made_of(&balance, &mut numbers));
        notes.extend(longest(&forward, &whole, &mut numbers));
        notes.push(besides_products(&forward));
        notes.push(product_shares(&forward, &whole, &mut numbers));
        notes.extend(self.softmax_against_products(&mut numbers)?);
        notes.push(self.idle_cost(&balance, &mut numbers));
        Ok((notes, numbers))
    }

    /// (a) Does the total match the stopwatch's?
    fn against_the_stopwatch(&self, balance: &Balance, numbers: &mut Fields) -> String {
        let profiled_ms = balance.ms_per_step(balance.wall_ns);
        let timed = self.stopwatch.last();
        let stopwatch_ms = timed.and_then(|row| row.get("mean_ms")?.as_f64());
        numbers.insert("profiled_ms_per_step", profiled_ms);
        numbers.insert("stopwatch_mean_ms", stopwatch_ms);
        let Some(stopwatch_ms) = stopwatch_ms else {
            return format!("(a) {profiled_ms:.2} ms a step by the profiler.");
        };
        let phase = |row: &Fields| {
            let name = row.get("phase")?.as_str()?.to_string();
            let recorded_ns = balance.sum_ns(|line| line.phase == name);
            let ms = row.get("mean_ms")?.as_f64()?;
            (recorded_ns > 0).then(|| {
                let recorded_ms = balance.ms_per_step(recorded_ns);
                format!("{name} {recorded_ms:.2} and {ms:.2}")
            })
        };
        let phases: Vec<String> = self.stopwatch.iter().filter_map(phase).collect();
        format!(
            "(a) {profiled_ms:.2} ms a step by the profiler, {stopwatch_ms:.2} by the stopwatch without it ({:+.1}%): {}.",
            100.0 * (profiled_ms / stopwatch_ms - 1.0),
            phases.join(", ")
        )
    }

    /// (e) Softmax against the products of attention, in time and in FLOPs.
    fn softmax_against_products(&self, numbers: &mut Fields) -> Result<Vec<String>> {
        let apart = ProfileReport::new(&self.apart, &Selection::phase("forward"), Grouping::Name)?;
        let of_softmax = ["softmax", "scale", "mask"];
        let softmax = apart.sum("softmax", |row| of_softmax.contains(&row.name.as_str()));
        let products = apart.sum("products", |row| row.name == "matmul");
        let (Some(softmax_cost), Some(products_cost)) = (softmax.cost, products.cost) else {
            return Ok(Vec::new());
        };
        let ms = |row: &Row| apart.ms_per_step(row.total_ns);
        let time_ratio = ms(&products) / ms(&softmax);
        let flops_ratio = products_cost.flops() / softmax_cost.flops();
        numbers.insert("attention_softmax_ms", ms(&softmax));
        numbers.insert("attention_products_ms", ms(&products));
        numbers.insert("attention_products_over_softmax_time", time_ratio);
        numbers.insert("attention_products_over_softmax_flops", flops_ratio);
        let rate = |row: &Row| row.flops_per_s().unwrap_or(0.0) / 1e9;
        let parts = apart
            .rows
            .iter()
            .filter(|row| of_softmax.contains(&row.name.as_str()));
        let parts: Vec<String> = parts
            .map(|row| format!("{} {:.3} ms", short(&row.label()), ms(row)))
            .collect();
        Ok(vec![
            format!(
                "(e) One layer's attention, its ops apart: scores and values {:.3} ms, {}.",
                ms(&products),
                parts.join(", "),
            ),
            format!(
                "(e) There products take {time_ratio:.1}x softmax's time for {flops_ratio:.1}x its FLOPs ({:.0} and {:.0} GFLOP/s).",
                rate(&products),
                rate(&softmax),
            ),
        ])
    }

    /// What the ranges cost while nobody listens: those of a step, at what one takes in a loop.
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
            "{ranges:.0} ranges a step; while no profiler runs one takes {range_ns:.1} ns, together {percent:.5}% of a step."
        )
    }
}

/// What the wall time is made of.
fn made_of(balance: &Balance, numbers: &mut Fields) -> String {
    let percent = |ns: u64| 100.0 * ns as f64 / balance.wall_ns.max(1) as f64;
    let ops = percent(balance.sum_ns(|line| line.kind == LineKind::Ops));
    let unexplained = percent(balance.sum_ns(|line| line.kind == LineKind::Unexplained));
    let candle = 100.0 - ops - unexplained;
    numbers.insert("ops_percent", ops);
    numbers.insert("candle_percent", candle);
    numbers.insert("unexplained_percent", unexplained);
    format!(
        "Ops take {ops:.1}% of the time, candle between them {candle:.1}%, unexplained is {unexplained:.2}%."
    )
}

/// (b) Which op takes the most time in forward, how often it runs there, and which does in all.
fn longest(forward: &ProfileReport, whole: &ProfileReport, numbers: &mut Fields) -> Option<String> {
    let first = |report: &ProfileReport| report.rows.iter().find(|row| row.kind.is_some()).cloned();
    let (in_forward, in_all) = (first(forward)?, first(whole)?);
    numbers.insert("longest_in_forward", in_forward.name.as_str());
    numbers.insert("longest_in_all", in_all.name.as_str());
    Some(format!(
        "(b) Most of forward: {}, {:.1}%, {:.0} times a step; most of all: {}, {:.1}%, {:.0} times.",
        short(&in_forward.label()),
        forward.percent(&in_forward),
        forward.instances_per_step(&in_forward).unwrap_or(0.0),
        short(&in_all.label()),
        whole.percent(&in_all),
        whole.instances_per_step(&in_all).unwrap_or(0.0),
    ))
}

/// (c) What else takes a part of forward worth naming.
fn besides_products(forward: &ProfileReport) -> String {
    let rows = forward.rows.iter().filter(|row| !row.is_product());
    let named = rows.filter(|row| forward.percent(row) >= NAMED_FROM_PERCENT);
    let named: Vec<String> = named
        .map(|row| format!("{} {:.1}%", short(&row.label()), forward.percent(row)))
        .collect();
    match named.is_empty() {
        true => format!("(c) Besides products, nothing takes {NAMED_FROM_PERCENT}% of forward."),
        false => list_in_note("(c) Besides products, of forward", &named),
    }
}

/// (d) Products' share of forward, and of the whole.
fn product_shares(forward: &ProfileReport, whole: &ProfileReport, numbers: &mut Fields) -> String {
    let share = |report: &ProfileReport| report.percent(&report.sum("products", Row::is_product));
    let (of_forward, of_whole) = (share(forward), share(whole));
    numbers.insert("products_percent_of_forward", of_forward);
    numbers.insert("products_percent_of_whole", of_whole);
    format!(
        "(d) Ops that multiply matrices, with what is inside them, take {of_forward:.1}% of forward, {of_whole:.1}% of the whole."
    )
}
