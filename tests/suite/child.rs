//! Tests that need a process of their own.

use std::process::Command;

/// Runs the ignored test called `name` alone in a fresh process, and fails with its output. Its pool has two threads,
/// whatever the machine has: what threads hold for themselves is counted.
pub fn run(name: &str) {
    let executable = std::env::current_exe().unwrap();
    run_by(Command::new(executable), name);
}

/// As [`run`], where addresses end at so many KiB.
#[cfg(target_os = "linux")]
pub fn run_within(kib: u64, name: &str) {
    let mut shell = Command::new("sh");
    let script = format!("ulimit -v {kib} && exec \"$@\"");
    shell.args(["-c", &script, "sh"]);
    shell.arg(std::env::current_exe().unwrap());
    run_by(shell, name);
}

fn run_by(mut command: Command, name: &str) {
    let arguments = [
        name,
        "--exact",
        "--ignored",
        "--nocapture",
        "--test-threads=1",
    ];
    let command = command.args(arguments).env("RAYON_NUM_THREADS", "2");
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{out}{err}");
    assert!(out.contains("1 passed"), "no test called {name}: {out}");
}
