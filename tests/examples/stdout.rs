//! Stdout that is full, and stdout that nobody reads.

use super::process::{assert_refused, example, run_into};
use std::fs::{self, File};
use std::process::Stdio;

/// Every example, with flags for a short run.
pub const SHORT: [&str; 12] = [
    "attention_benchmark --sequence-length 8 --head-dim 8 --iterations 2 --warmup-steps 0",
    "compiled_benchmark --config 1-8-16-1-2 --steps 2 --rounds 1",
    "custom_model --steps 2",
    "e2e_benchmark SMALL --mode forward --steps 2 --warmup-steps 0",
    "memory_estimate SMALL",
    "memory_profile SMALL --mode forward",
    "mixed_precision_accumulation",
    "mixed_precision_benchmark SMALL --mode forward --steps 2 --rounds 1",
    "precision_curves SMALL --data DATA --steps 2",
    "profile SMALL --mode forward --steps 2 --warmup-steps 0",
    "toy_model_dtypes",
    "train SMALL --data DATA --steps 2 --sample 2",
];

#[cfg(target_os = "linux")]
#[test]
fn a_full_stdout_is_an_error() {
    for line in SHORT {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let ended = run_into(example(line), full.into());
        assert_refused(line, &ended, 1, "stdout: cannot write");
    }
}

/// A pipe whose reader has stopped (`| head`) ends the run without a message.
#[cfg(unix)]
#[test]
fn a_closed_stdout_ends_a_run_quietly() {
    let forever = "train SMALL --data DATA --steps 1000000000";
    for line in SHORT.into_iter().chain([forever]) {
        let ended = run_into(example(line), Stdio::piped());
        assert_eq!((ended.status, ended.err.as_str()), (Some(0), ""), "{line}");
    }
}

/// A run that writes files continues without a reader.
#[cfg(unix)]
#[test]
fn a_closed_stdout_does_not_cost_the_files() {
    let folder = tempfile::tempdir().unwrap();
    let [rows, run] = ["rows.csv", "run.safetensors"].map(|name| folder.path().join(name));
    for (line, file) in [
        (
            "e2e_benchmark SMALL --mode forward --steps 2 --output",
            &rows,
        ),
        ("train SMALL --data DATA --steps 2 --checkpoint", &run),
    ] {
        let line = format!("{line} {}", file.display());
        let ended = run_into(example(&line), Stdio::piped());
        let is_reported =
            ended.err.is_empty() || ended.err == format!("wrote {}\n", file.display());
        assert!(ended.status == Some(0) && is_reported, "{line}: {ended:?}");
        assert!(fs::metadata(file).unwrap().len() > 0, "{line}");
    }
}
