//! Models so deep that candle's recursion overflows the stack.

use crate::check::refusal;
use crate::child;
use candle_core::{DType, Device, Tensor};
use tallow::model::{TransformerConfig, TransformerLM};
use tallow::nn::Checkpointing;
use tallow::no_grad;

const LAYERS: usize = 5000;

fn on_stack<T: Send + 'static>(bytes: usize, f: impl FnOnce() -> T + Send + 'static) -> T {
    let thread = std::thread::Builder::new().stack_size(bytes);
    thread.spawn(f).unwrap().join().unwrap()
}

/// Runs forward and backward, and drops the graph.
fn step(checkpointing: Checkpointing, keeps_graph: bool) -> tallow::Result<()> {
    let config = TransformerConfig {
        vocab_size: 3,
        context_length: 2,
        d_model: 2,
        num_layers: LAYERS,
        num_heads: 1,
        d_ff: 2,
        ..Default::default()
    };
    let model = TransformerLM::new(&config, 0, &Device::Cpu)?;
    let model = model.with_checkpointing(checkpointing);
    let tokens = Tensor::zeros((1, 2), DType::U32, &Device::Cpu)?;
    match keeps_graph {
        true => model.loss(&tokens, &tokens)?.backward().map(|_| ())?,
        false => no_grad(|| model.loss(&tokens, &tokens)).map(|_| ())?,
    }
    Ok(())
}

/// Runs in its own process, because a stack overflow would end it.
#[test]
fn a_graph_too_deep_for_the_stack_is_refused() {
    if child::ran("model::depth::a_graph_too_deep_for_the_stack_is_refused") {
        return;
    }
    for checkpointing in [Checkpointing::None, Checkpointing::Block] {
        let error = on_stack(2 << 20, move || step(checkpointing, true));
        refusal(error, &["num_layers must be at most"]);
        on_stack(2 << 20, move || step(checkpointing, false)).unwrap();
        on_stack(64 << 20, move || step(checkpointing, true)).unwrap();
    }
}
