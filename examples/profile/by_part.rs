//! Matmuls and softmax by the part of the model that they are in, eager and planned alike.

use serde::Serialize;
use tallow::Result;
use tallow::profile::{Grouping, ProfileReport, Recording, Row, Selection};
use tallow::report::{Column, Fields, Report};

/// A part of the model: `layers.*/attn/scores`, `layers.*/ffn/w1, w3`, `lm_head`.
struct Part {
    name: String,
    /// In forward and in backward, over all steps.
    ns: [u64; 2],
}

/// A part's time in a step.
#[derive(Serialize)]
struct Line<'p> {
    part: &'p str,
    forward_ms_per_step: Option<f64>,
    backward_ms_per_step: Option<f64>,
    percent: f64,
}

/// The parts' time a step, the longest first, of the run called `title`.
pub fn table(title: &str, recording: &Recording) -> Result<Report> {
    let whole = ProfileReport::new(recording, &Selection::default(), Grouping::Layer)?;
    let mut parts: Vec<Part> = Vec::new();
    for (i, phase) in ["forward", "backward"].into_iter().enumerate() {
        // A forward alone has no backward.
        let report = ProfileReport::new(recording, &Selection::phase(phase), Grouping::Layer);
        let rows = report.map(|report| report.rows).unwrap_or_default();
        for (name, ns) in rows.iter().flat_map(of_row) {
            match parts.iter_mut().find(|part| part.name == name) {
                Some(part) => part.ns[i] += ns,
                None => {
                    let mut part = Part { name, ns: [0; 2] };
                    part.ns[i] = ns;
                    parts.push(part);
                }
            }
        }
    }
    parts.sort_by_key(|part| std::cmp::Reverse(part.ns[0] + part.ns[1]));
    let ms = |ns: u64| (ns > 0).then(|| whole.ms_per_step(ns));
    let rows = parts.iter().map(|part| {
        Fields::of(&Line {
            part: &part.name,
            forward_ms_per_step: ms(part.ns[0]),
            backward_ms_per_step: ms(part.ns[1]),
            percent: 100.0 * (part.ns[0] + part.ns[1]) as f64 / whole.whole_ns.max(1) as f64,
        })
    });
    Ok(Report {
        title: format!("{title}: matmuls and softmax by part of the model"),
        columns: vec![
            Column::text("part", "Part"),
            Column::ms("forward_ms_per_step", "forward").under("A step"),
            Column::ms("backward_ms_per_step", "backward").under("A step"),
            Column::number("percent", "Time", "%", 1),
        ],
        rows: rows.collect::<Result<_>>()?,
        notes: notes(&parts),
        ..Default::default()
    })
}

/// How the parts' names are read.
fn notes(parts: &[Part]) -> Vec<String> {
    let mut notes = Vec::new();
    if parts.iter().any(|part| part.name.ends_with("scores")) {
        notes.push(
            "scores: q k^T and the gradients of q and k. values: p v and the gradients of p and v."
                .into(),
        );
    }
    let is_of_forward = |part: &&Part| part.name == "lm_head" && part.ns[1] == 0;
    let has_backward = parts.iter().any(|part| part.ns[1] > 0);
    if has_backward && parts.iter().any(|part| is_of_forward(&part)) {
        notes.push("A planned head computes its gradients in forward, with the loss.".into());
    }
    notes
}

/// The parts that an op's matmuls and softmax belong to. Attention's matmuls are scores and values; where a GPU's
/// kernels do not tell these apart, they are one part, and so is all of flash attention there.
fn of_row(row: &Row) -> Vec<(String, u64)> {
    if row.is_gap() {
        return Vec::new();
    }
    let (place, op) = row.name.rsplit_once('/').unwrap_or(("", &row.name));
    let inside = |name: &str| {
        format!("{place}/{name}")
            .trim_start_matches('/')
            .to_string()
    };
    let parts = row.parts;
    let products = match op.contains("attention") {
        true => inside("scores, values"),
        false if place.is_empty() => op.to_string(),
        false => place.to_string(),
    };
    let told_ns = parts.scores_ns + parts.values_ns;
    // A rest that scaling has rounded away is no part.
    let rest_ns = match told_ns {
        0 => parts.products_ns,
        _ => 0,
    };
    let all = [
        (inside("scores"), parts.scores_ns),
        (inside("values"), parts.values_ns),
        (inside("softmax"), parts.softmax_ns),
        (inside("attention"), parts.fused_ns),
        (products, rest_ns),
    ];
    all.into_iter().filter(|(_, ns)| *ns > 0).collect()
}
