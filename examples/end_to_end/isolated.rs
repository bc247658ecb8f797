//! Runs in separate processes, each with a cold first step. A child prints its rows as JSON.

use std::process::{Command, Stdio};
use tallow::bench::EndToEndRow;
use tallow::{Error, Result};

/// Runs number `index` of the sweep in a child process of this program, which does not measure the device's rates.
pub fn run(index: usize) -> Result<Vec<EndToEndRow>> {
    let program = std::env::current_exe().map_err(|e| Error::io("find", "this program", e))?;
    let mut child = Command::new(program);
    child.args(std::env::args_os().skip(1));
    child.args(["--isolated-run", &index.to_string()]);
    let ended = child.stdin(Stdio::null()).stderr(Stdio::inherit()).output();
    let ended = ended.map_err(|e| Error::io("run", "a new process", e))?;
    if !ended.status.success() {
        let message = format!("run {index}, in a new process, ended with {}", ended.status);
        return Err(candle_core::Error::msg(message).into());
    }
    serde_json::from_slice(&ended.stdout)
        .map_err(|e| candle_core::Error::msg(format!("rows of run {index}: {e}")).into())
}
