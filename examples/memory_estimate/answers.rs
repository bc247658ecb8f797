//! Answers to the handout's questions about memory. Functions take plain figures, so that tests can call them.

use super::words::change;
use serde::Serialize;
use tallow::report::{Answer, format_mib};

/// A checkpointing strategy, the number of blocks that it recomputes, and its predicted memory.
#[derive(Default, Serialize)]
pub struct Strategy {
    pub name: String,
    pub recomputed_blocks: usize,
    pub after_forward_bytes: u64,
    pub peak_bytes: u64,
}

/// Describes which strategy needs the least memory. The first element of `strategies` must be no checkpointing.
pub fn checkpointing(strategies: &[Strategy], layers: usize) -> Option<Answer> {
    let none = strategies.first()?;
    let least = strategies.iter().min_by_key(|s| s.peak_bytes)?;
    let text = match least.peak_bytes < none.peak_bytes {
        true => format!(
            "{} uses the least: {} instead of {} ({}). It runs {} of {layers} blocks a second time in backward.",
            least.name,
            format_mib(least.peak_bytes),
            format_mib(none.peak_bytes),
            change(none.peak_bytes, least.peak_bytes),
            least.recomputed_blocks
        ),
        false => format!(
            "No strategy saves memory here: the peak is {} without checkpointing.",
            format_mib(none.peak_bytes)
        ),
    };
    let question = "Activation checkpointing (a): which strategy uses the least memory, and what does it cost?";
    Some(Answer::new(question, text))
}

/// Describes checkpointing in segments and nested, for `layers` blocks with inputs of `input_bytes` and graphs of
/// `graph_bytes` each.
pub fn nested(layers: usize, input_bytes: u64, graph_bytes: u64) -> Answer {
    let (l, r, a) = (layers as f64, input_bytes as f64, graph_bytes as f64);
    let mib = |bytes: f64| format_mib(bytes as u64);
    let (root, levels) = (l.sqrt(), l.log2().ceil());
    let text = format!(
        "Without it the graphs of L blocks of a = {} each exist together: L a = {}. In segments of s blocks, the inputs of \
         L/s segments (r = {} each) and the graph of one segment exist: (L/s) r + s a. With s = sqrt(L) = {root:.1} this is \
         {}: O(sqrt L), for at most one more forward. If each segment is split in halves again, one input a level and the \
         graph of one block exist: log2(L) r + a = {}: O(log L), for O(L log L) recomputed blocks (at most {:.0}). These \
         figures follow from the formulas; tallow has one level.",
        mib(a),
        mib(l * a),
        mib(r),
        mib(root * (r + a)),
        mib(levels * r + a),
        l * levels,
    );
    let question = "Activation checkpointing (b): how does memory grow with depth in segments, and when nested?";
    Answer::new(question, text)
}
