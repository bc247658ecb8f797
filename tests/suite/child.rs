//! Tests that need their own process, for example because the memory tracker and the pool's counters are per process.

use std::process::Command;

/// The environment variable that names the test of a process started here.
const NAME: &str = "TALLOW_TEST_ALONE";

/// Runs the test `name` in a new process and returns true; that test calls this function first. In the new process it
/// returns false, and the test continues. A failure there fails here too, with its output.
///
/// The new process has a pool of two threads on any machine, since the buffers that threads keep are counted. candle's
/// own pool has one thread, because its threads spin while they wait and would slow the tests that run at the same
/// time. Errors have no backtrace: each would read the binary's debug information, tens of MiB.
pub fn ran(name: &str) -> bool {
    ran_by(|| Command::new(std::env::current_exe().unwrap()), name)
}

/// Does the same as [`ran`], with an address space limited to `kib` KiB.
#[cfg(target_os = "linux")]
pub fn ran_within(kib: u64, name: &str) -> bool {
    let shell = || {
        let mut shell = Command::new("sh");
        let script = format!("ulimit -v {kib} && exec \"$@\"");
        shell.args(["-c", &script, "sh"]);
        shell.arg(std::env::current_exe().unwrap());
        shell
    };
    ran_by(shell, name)
}

fn ran_by(command: impl FnOnce() -> Command, name: &str) -> bool {
    if std::env::var(NAME).is_ok_and(|alone| alone == name) {
        return false;
    }
    let arguments = [
        name,
        "--exact",
        "--include-ignored",
        "--nocapture",
        "--test-threads=1",
    ];
    let mut command = command();
    let command = command.args(arguments).env(NAME, name);
    let command = command.env("RAYON_NUM_THREADS", "2");
    let command = command.env("CANDLE_NUM_THREADS", "1");
    let output = command.env("RUST_LIB_BACKTRACE", "0").output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{out}{err}");
    assert!(out.contains("1 passed"), "no test called {name}: {out}");
    true
}
