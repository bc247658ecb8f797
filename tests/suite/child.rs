//! Tests that need a process of their own.

use std::process::Command;

/// Runs the ignored test called `name` alone in a fresh process, and fails with its output.
pub fn run(name: &str) {
    let executable = std::env::current_exe().unwrap();
    let arguments = [
        name,
        "--exact",
        "--ignored",
        "--nocapture",
        "--test-threads=1",
    ];
    let output = Command::new(executable).args(arguments).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{out}{err}");
    assert!(out.contains("1 passed"), "no test called {name}: {out}");
}
