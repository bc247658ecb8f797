//! The data of a run, and the header of its report.

use crate::common::models;
use std::path::Path;
use tallow::Result;
use tallow::attention::Algorithm;
use tallow::data::Tokens;
use tallow::model::TransformerConfig;
use tallow::report::{Fields, group_digits};
use tallow::train::TrainConfig;

/// Extensions of the files that are read from a folder.
const EXTENSIONS: [&str; 4] = ["rs", "md", "toml", "py"];

/// Reads the bytes of a text, or of the texts in a folder.
pub fn read(path: &Path) -> Result<Tokens> {
    match path.is_dir() {
        true => Tokens::source_tree(path, &EXTENSIONS),
        false => Tokens::bytes(path),
    }
}

/// Describes the data.
pub fn data(train: &Tokens, validation: &Tokens, path: &Path) -> String {
    let [train, validation] = [train, validation].map(|tokens| group_digits(tokens.len() as u64));
    format!(
        "{train} tokens to train, {validation} to evaluate ({})",
        path.display()
    )
}

/// Describes the run. Its precision is left to the caller.
pub fn configuration(data: String, model: &TransformerConfig, config: &TrainConfig) -> Fields {
    let (batches, windows, length) = (
        config.accumulation,
        config.batch_size,
        config.sequence_length,
    );
    let [tokens, steps] =
        [config.tokens_per_step(), config.steps].map(|count| group_digits(count as u64));
    let step = format!("{batches} x {windows} windows of {length}: {tokens} tokens");
    let place = ["", ", in backward"][usize::from(config.optimizer_in_backward)];
    let mut fields = Fields::from_iter([("data", data), ("model", models::sizes(model))]);
    fields
        .insert("longest context", model.context_length)
        .insert("attention", config.attention.map(Algorithm::name))
        .insert("step", step)
        .insert("steps", steps)
        .insert("schedule", config.schedule.to_string())
        .insert("optimizer", format!("{}{place}", config.optimizer))
        .insert("gradients' norm at most", config.max_grad_norm)
        .insert("gradients' elements at most", config.max_grad_value);
    fields
}
