//! Memory of examples under a limit just above their estimate.

use super::process::{Outcome, example, run};
use serde_json::Value;

/// Memory of a process of two threads outside its steps: code, stacks, and the threads' buffers for matmuls.
const PROCESS_MIB: f64 = 40.0;

#[test]
#[cfg(target_os = "linux")]
fn tight_memory_holds_what_was_estimated() {
    for way in [
        "",
        "--precision bf16 --attention flash",
        "--compile=only",
        "--compile=only --precision bf16 --attention flash",
    ] {
        let limited_to = |mib: f64| {
            let line = format!(
                "e2e_benchmark --d-model 512 --num-layers 4 --batch-size 1 --context-length 32 --mode train-step \
                 --steps 2 --warmup-steps 1 {way} --format json --memory-limit-gib {}",
                mib / 1024.0
            );
            let mut command = example(&line);
            command.env("RAYON_NUM_THREADS", "2");
            command.env("CANDLE_NUM_THREADS", "1");
            run(command)
        };
        let estimate = mib(&limited_to(4096.0), "ok", "estimate_bytes");
        let limit = 1.02 * estimate;
        let resident = mib(&limited_to(limit), "ok", "resident_peak_bytes");
        assert!(
            resident < limit + PROCESS_MIB,
            "{way}: {resident} MiB are resident, {estimate} were estimated"
        );
    }
}

/// Returns a value of the last row, in MiB, and checks that row's status.
fn mib(ended: &Outcome, status: &str, key: &str) -> f64 {
    assert_eq!(ended.status, Some(0), "{}", ended.err);
    let report: Value = serde_json::from_str(&ended.out).unwrap();
    let row = report["rows"].as_array().unwrap().last().unwrap();
    assert_eq!(row["status"], status, "{row}");
    row[key].as_f64().unwrap() / f64::from(1 << 20)
}
