//! Runs in processes of their own, each with a cold first step.

use crate::common::stdout;
use serde_json::Value;
use std::process::{Command, Stdio};
use tallow::report::Fields;
use tallow::{Error, Result};

/// Runs number `index` of the sweep in a child of this program, which does nothing else: it measures no peak rate.
pub fn run(index: usize) -> Result<Vec<Fields>> {
    let mut child =
        Command::new(std::env::current_exe().map_err(|e| Error::io("find", "this program", e))?);
    child.args(std::env::args_os().skip(1));
    child.args(["--isolated-run", &index.to_string()]);
    let ended = child.stdin(Stdio::null()).stderr(Stdio::inherit()).output();
    let ended = ended.map_err(|e| Error::io("run", "a process of its own", e))?;
    if !ended.status.success() {
        let message = format!(
            "run {index}, in a process of its own, ended with {}",
            ended.status
        );
        return Err(candle_core::Error::msg(message).into());
    }
    let rows: Vec<Vec<(String, Value)>> = serde_json::from_slice(&ended.stdout)
        .map_err(|e| candle_core::Error::msg(format!("rows of run {index}: {e}")))?;
    Ok(rows.into_iter().map(Fields::from_iter).collect())
}

/// What the child says: its rows, field by field.
pub fn answer(rows: &[Fields]) -> Result<()> {
    let rows: Vec<Vec<(&str, &Value)>> = rows.iter().map(|row| row.iter().collect()).collect();
    stdout::line(serde_json::to_string(&rows).unwrap_or_default())
}
