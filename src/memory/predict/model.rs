//! A model's pass: its graph, what is there before it, and what its sizes are called.

use super::letters::{Letter, Letters, other_head_dim};
use super::lifetimes::{Buffer, Lifetimes, elements};
use super::workload::{is_beyond, optimizer_state, place, reaching};
use super::{MemoryKind, Mode, Workload};
use crate::Result;
use crate::graph::Graph;
use crate::model::TransformerConfig;
use crate::nn::Architecture;

/// What is there before a pass of the model: more than its graph reads. A forward has targets beside it, and tables of
/// angles are as long as the model takes sequences.
pub(super) fn residents(config: &TransformerConfig, workload: &Workload) -> Vec<Buffer> {
    let width = workload.precision.parameter_dtype().size_in_bytes();
    let all = config.parameters_formula();
    let parameters = config.num_parameters() as f64;
    let mut residents = vec![Buffer::new(
        MemoryKind::Weights,
        "weights",
        all,
        parameters,
        width,
    )];
    if workload.mode == Mode::TrainStep {
        let state = optimizer_state(width, workload.moments);
        residents.extend(
            state.map(|(what, width)| {
                Buffer::new(MemoryKind::Optimizer, what, all, parameters, width)
            }),
        );
    }
    let ids = elements(&[workload.batch_size, workload.sequence_length]);
    let ids = Buffer::new(MemoryKind::Inputs, "tokens, targets", "BT", ids, 4);
    residents.extend([ids, ids]);
    if config.architecture != Architecture::Gpt2 {
        let angles = elements(&[config.context_length, config.head_dim()]);
        let (what, formula) = ("cos, sin", "context_length Dh");
        residents.push(Buffer::new(
            MemoryKind::Inputs,
            what,
            formula,
            angles,
            width,
        ));
    }
    residents
}

/// What the letters stand for.
pub(super) fn sizes(config: &TransformerConfig, workload: &Workload) -> String {
    let (c, w) = (config, workload);
    let heads = c.num_kv_heads.map(|heads| format!(", Hkv {heads}"));
    format!(
        "B {}, T {}, D {}, F {}, H {}{}, V {}, L {}, Dh {}; {}",
        w.batch_size,
        w.sequence_length,
        c.d_model,
        c.d_ff,
        c.num_heads,
        heads.unwrap_or_default(),
        c.vocab_size,
        c.num_layers,
        c.head_dim(),
        place(w.kernels)
    )
}

/// What the dimensions of a pass are called. `graph` is that of the pass.
pub(super) fn letters(config: &TransformerConfig, workload: &Workload, graph: &Graph) -> Letters {
    let (c, w) = (config, workload);
    let [of_b, of_t, of_v, of_f, of_d, of_h, of_hkv, of_context] = [3, 5, 7, 11, 13, 17, 19, 23];
    let (head_dim, of_head_dim) = other_head_dim(c.head_dim());
    let (num_heads, of_heads) = match c.num_kv_heads {
        Some(_) => (c.num_heads * of_h * of_hkv, vec![(of_h, 1), (of_hkv, 1)]), // as many for each of Hkv
        None => (c.num_heads * of_h, vec![(of_h, 1)]),
    };
    let (d_model, of_d_model) = match c.head_dim {
        Some(_) => (c.d_model * of_d, vec![(of_d, 1)]),
        None => (
            num_heads * head_dim,
            [&of_heads[..], &[of_head_dim]].concat(),
        ),
    };
    let other = TransformerConfig {
        vocab_size: c.vocab_size * of_v,
        context_length: c.context_length.saturating_mul(of_context), // which has no letter
        d_ff: c.d_ff * of_f,
        d_model,
        num_heads,
        num_kv_heads: c.num_kv_heads.map(|heads| heads * of_hkv),
        head_dim: c.head_dim.map(|_| head_dim),
        ..c.clone()
    };
    let others = Workload {
        batch_size: w.batch_size * of_b,
        sequence_length: w.sequence_length * of_t,
        ..w.clone()
    };
    let letters = [
        Letter::new("B", w.batch_size, &[(of_b, 1)]),
        Letter::new("H", c.num_heads, &of_heads),
        Letter::new("T", w.sequence_length, &[(of_t, 1)]),
        Letter::new("D", c.d_model, &of_d_model),
        Letter::new("F", c.d_ff, &[(of_f, 1)]),
        Letter::new("V", c.vocab_size, &[(of_v, 1)]),
        Letter::new("Dh", c.head_dim(), &[of_head_dim]),
    ];
    let kv_heads = c
        .num_kv_heads
        .map(|heads| Letter::new("Hkv", heads, &[(of_hkv, 1)]));
    let letters = letters.into_iter().chain(kv_heads).collect();
    Letters::new(graph, letters, others.trace(&other).ok())
}

/// The most that a pass has alive at once. In f64, which goes on where bytes in 64 bits end.
///
/// # Errors
/// Those of the trace.
pub(super) fn peak_bytes(config: &TransformerConfig, workload: &Workload) -> Result<f64> {
    if is_beyond(config, workload) {
        return Ok(f64::INFINITY);
    }
    let graph = workload.trace(config)?;
    let residents = residents(&reaching(config, workload.sequence_length), workload);
    let lifetimes = Lifetimes::of(&graph, workload.mode, residents);
    Ok(lifetimes.peak_bytes)
}
