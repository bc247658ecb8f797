//! The code that the examples share: the allocator, common flags, the report's header, errors and exit codes.
#![allow(dead_code)] // each example uses its part

pub mod effects;
pub mod labels;
pub mod memory;
pub mod models;
pub mod modes;
pub mod ops;
pub mod outputs;
pub mod precision;
pub mod ranks;
pub mod rates;
pub mod runs;
pub mod stdout;
pub mod sweep;
pub mod values;
pub mod ways;
pub mod words;

#[allow(unused_imports)] // train prints no table
pub use outputs::Output;
#[allow(unused_imports)]
pub use sweep::Sweep;

use clap::Args;
use std::fmt::Display;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::process::{Command, ExitCode};
use tallow::memory::tracker::Tracker;
use tallow::ops::KernelPolicy;
use tallow::report::Fields;
use tallow::{Error, Result};

/// The name of this example, with which errors about its flags begin.
pub const PROGRAM: &str = env!("CARGO_CRATE_NAME");

/// candle's CPU backend allocates for every op, so the allocator's handling of freed pages is a large part of a step
/// (benches/RESULTS.md has the figures).
#[global_allocator]
static GLOBAL: Tracker<mimalloc::MiMalloc> = Tracker::new(mimalloc::MiMalloc);

/// Options of mimalloc 3, which the bindings do not have: `mi_option_purge_delay` and `mi_option_disallow_arena_alloc`.
const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;
const DISALLOW_ARENA_ALLOC: libmimalloc_sys::mi_option_t = 26;

/// Makes mimalloc take each block from the system instead of an arena: for planned steps alone, which free nothing that
/// another step could reuse, and if memory is tight. In an arena a block occupies up to an eighth more, and huge pages
/// make that resident (170 MiB for a small model's weights and state).
pub fn take_blocks_from_the_system() {
    // SAFETY: sets an option, which mimalloc reads atomically.
    unsafe { libmimalloc_sys::mi_option_set(DISALLOW_ARENA_ALLOC, 1) };
}

/// Returns the allocator and its setting, for the header.
fn allocator() -> &'static str {
    // SAFETY: reads an option.
    match unsafe { libmimalloc_sys::mi_option_get(DISALLOW_ARENA_ALLOC) } {
        0 => "mimalloc, keeping freed pages, tracked",
        _ => "mimalloc, blocks from the system, tracked",
    }
}

/// Flags of every example that runs ops.
#[derive(Args, Clone, Debug)]
pub struct Common {
    /// cpu, cuda:0 or metal:0
    #[arg(long, default_value = "cpu")]
    pub device: String,

    /// Compute f32 matmuls in TF32 (NVIDIA GPUs)
    #[arg(long)]
    pub tf32: bool,

    /// Seed of weights and data
    #[arg(long, default_value_t = 0)]
    pub seed: u64,

    /// Emit NVTX ranges (feature nvtx)
    #[arg(long, hide_short_help = true)]
    pub nvtx: bool,

    /// Refuse ops without a kernel for device and dtype
    #[arg(long, hide_short_help = true)]
    pub strict: bool,
}

impl Common {
    /// Returns the device of the flags, with TF32 set as requested.
    pub fn device(&self) -> Result<candle_core::Device> {
        let device = tallow::device(&self.device)?;
        tallow::hardware::set_tf32(&device, self.tf32)?;
        Ok(device)
    }

    /// Runs `f` with the requested kernel policy and NVTX ranges.
    pub fn around<T>(&self, f: impl FnOnce() -> Result<T>) -> Result<T> {
        let _emitting = self.nvtx.then(tallow::profile::emit_nvtx).transpose()?;
        let policy = match self.strict {
            true => KernelPolicy::Strict,
            false => KernelPolicy::Prefer,
        };
        tallow::ops::with_kernel_policy(policy, f)
    }

    /// Returns the report's header, with the seed and the ops that have run their reference implementation so far.
    pub fn environment(&self, device: &candle_core::Device) -> Fields {
        let mut fields = environment(device);
        fields
            .insert("seed", self.seed)
            .insert("reference ops", fallbacks());
        fields
    }
}

/// Returns the report's header for a program that draws no random numbers.
pub fn environment(device: &candle_core::Device) -> Fields {
    let mut fields = tallow::bench::environment(device);
    fields.insert("candle", candle_version());
    fields.insert("allocator", allocator());
    fields.insert("commit", commit());
    fields
}

/// Converts GiB to bytes.
pub fn gib_bytes(gib: f64) -> u64 {
    (gib * 2f64.powi(30)) as u64
}

/// Returns the ops that ran their reference implementation, for the header.
pub fn fallbacks() -> String {
    let fallbacks = tallow::ops::fallbacks().into_iter();
    let names = fallbacks.map(|f| format!("{} ({} on {})", f.op, f.dtype, f.device));
    let names = names.collect::<Vec<_>>().join(", ");
    match names.is_empty() {
        true => "none".into(),
        false => names,
    }
}

/// Prints a line to stderr; an error of writing is ignored.
pub fn print_progress(text: impl Display) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Prints progress to stderr, if that is a terminal.
pub fn progress(text: impl Display) {
    if std::io::stderr().is_terminal() {
        print_progress(text);
    }
}

/// Prints that a file was written.
pub fn wrote(path: &Path) {
    print_progress(format_args!("wrote {}", path.display()));
}

/// Runs an example. An error is printed to stderr and sets the exit code.
pub fn run(example: impl FnOnce() -> Result<()>) -> ExitCode {
    // SAFETY: sets an option, which mimalloc reads atomically. By default it returns freed pages to the system after a
    // while, and a later step faults them in again.
    unsafe { libmimalloc_sys::mi_option_set(PURGE_DELAY, -1) };
    tallow::init();
    // This must precede any thread pool: it checks the number of threads that the environment requests.
    let ended = tallow::device("cpu").and_then(|_| example());
    code_of(ended.map(|()| match sweep::is_stopped() {
        true => ExitCode::from(130),
        false => ExitCode::SUCCESS,
    }))
}

/// Returns the exit code, after printing an error to stderr. A closed stdout is no error: its reader has seen enough
/// (`| head`).
fn code_of(result: Result<ExitCode>) -> ExitCode {
    let error = match result {
        Ok(code) => return code,
        Err(error) if stdout::is_closed(&error) => return ExitCode::SUCCESS,
        Err(error) => error.to_string(),
    };
    let program = concat!(env!("CARGO_CRATE_NAME"), ": "); // once: errors about flags begin with it
    let error = error.strip_prefix(program).unwrap_or(&error);
    print_progress(format_args!("error: {program}{error}"));
    ExitCode::FAILURE
}

/// Returns the error of a flag with an invalid value.
pub fn refusal(
    field: &'static str,
    expected: impl Into<String>,
    got: impl Display,
    hint: &str,
) -> Error {
    Error::Config {
        config: PROGRAM,
        field,
        expected: expected.into(),
        got: got.to_string(),
        hint: hint.into(),
    }
}

/// Returns the version of candle in Cargo.lock.
fn candle_version() -> Option<String> {
    let lock = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.lock"));
    let (_, version) = lock.split_once("name = \"candle-core\"")?;
    Some(version.split('"').nth(1)?.to_string())
}

/// Returns the commit of the sources, marked if they were modified.
fn commit() -> Option<String> {
    let mut git = Command::new("git");
    // Otherwise `status` may rewrite the index, under a lock that blocks other git processes.
    git.args(["--no-optional-locks", "-C", env!("CARGO_MANIFEST_DIR")]);
    git.args(["status", "--porcelain=v2", "--branch", "-uno"]); // -uno: not untracked files
    let status = String::from_utf8(git.output().ok()?.stdout).ok()?;
    let (_, commit) = status.split_once("# branch.oid ")?;
    let is_modified = status.lines().any(|line| !line.starts_with('#'));
    let modified = ["", ", modified"][usize::from(is_modified)];
    Some(format!("{}{modified}", commit.get(..8)?))
}
