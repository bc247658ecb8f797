//! The data of a run, the header of its report, and its memory.

use crate::common::{memory, models};
use candle_core::Device;
use std::path::Path;
use tallow::Result;
use tallow::attention::Algorithm;
use tallow::bench::{EndToEnd, Execution};
use tallow::compile::StepConfig;
use tallow::data::Tokens;
use tallow::model::TransformerConfig;
use tallow::report::{Fields, group_digits};
use tallow::train::TrainConfig;

/// Reads the bytes of a text, or of the texts in a folder.
pub fn read(path: &Path) -> Result<Tokens> {
    match path.is_dir() {
        true => Tokens::source_tree(path, &["rs", "md", "toml", "py"]),
        false => Tokens::bytes(path),
    }
}

/// Describes the data.
pub fn data(train: &Tokens, validation: &Tokens, path: &Path) -> String {
    let [train, validation] = [train, validation].map(|tokens| group_digits(tokens.len() as u64));
    let path = path.display();
    format!("{train} tokens to train, {validation} to evaluate ({path})")
}

/// Describes the run. Its precision is left to the caller.
pub fn configuration(data: String, model: &TransformerConfig, config: &TrainConfig) -> Fields {
    let (batches, windows) = (config.accumulation, config.batch_size);
    let tokens = group_digits(config.tokens_per_step() as u64);
    let length = config.sequence_length;
    let step = format!("{batches} x {windows} windows of {length}: {tokens} tokens");
    let place = ["", ", in backward"][usize::from(config.optimizer_in_backward)];
    let mut fields = Fields::from_iter([("data", data), ("model", models::sizes(model))]);
    fields
        .insert("longest context", model.context_length)
        .insert("attention", config.attention.map(Algorithm::name))
        .insert("step", step)
        .insert("steps", group_digits(config.steps as u64))
        .insert("schedule", config.schedule.to_string())
        .insert("optimizer", format!("{}{place}", config.optimizer))
        .insert("gradients' norm at most", config.max_grad_norm)
        .insert("gradients' elements at most", config.max_grad_value);
    fields
}

/// Refuses a run that does not fit in memory, before anything is allocated. `step` is that of this rank.
pub fn check_memory(
    model: &TransformerConfig,
    config: &TrainConfig,
    step: StepConfig,
    device: &Device,
) -> Result<()> {
    let mut run = EndToEnd {
        config: model.clone(),
        attention: config.attention.unwrap_or_default(),
        checkpointing: config.checkpointing.unwrap_or_default(),
        batch_size: config.batch_size,
        sequence_length: config.sequence_length,
        execution: Execution::Planned,
        step,
        ..Default::default()
    };
    // Before anything else, since it may change where blocks come from.
    run.available_bytes = memory::available_bytes(device, None, [&run])?;
    let wanted_bytes = run.estimate_bytes(device)?;
    memory::check("the training step", wanted_bytes, run.available_bytes)
}
