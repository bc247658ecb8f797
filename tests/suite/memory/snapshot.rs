//! Memory snapshots, read by PyTorch's own script.

use super::{config, run};
use crate::child;
use candle_core::Device;
use std::path::{Path, PathBuf};
use std::process::Command;
use tallow::Error;
use tallow::memory::{Mode, RecordConfig, Snapshot, record, timeline};
use tallow::report::plot;

/// Checks that every block is inside its segment and every event is known, and prints a summary. `_memory_viz.py` is
/// loaded as a file, because importing torch needs seconds, and CUDA.
const CHECK: &str = r#"
import importlib.util, json, pickle, sys
spec = importlib.util.spec_from_file_location("viz", sys.argv[1])
viz = importlib.util.module_from_spec(spec); spec.loader.exec_module(viz)
with open(sys.argv[2], "rb") as f: data = pickle.load(f)
with open(sys.argv[3]) as f: same = json.load(f)
def plain(x):
    if isinstance(x, dict): return {k: plain(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)): return [plain(v) for v in x]
    return x
assert plain(data) == same
segment, = data["segments"]
at = segment["address"]
for block in segment["blocks"]:
    assert block["address"] == at and block["size"] > 0, (block, at)
    at += block["size"]
assert at == segment["address"] + segment["total_size"] < 2**53
alive, frames, most, now = {}, set(), 0, 0
trace, = data["device_traces"]
for event in trace:
    at, size = event["addr"], event["size"]
    assert segment["address"] <= at and at + size <= segment["address"] + segment["total_size"]
    if event["action"] == "alloc":
        assert at not in alive; alive[at] = size
        now += size; most = max(most, now)
    elif event["action"] == "free_completed":
        now -= alive.pop(at, size)
    frames |= {(frame["name"], frame["filename"]) for frame in event["frames"]}
times = [event["time_us"] for event in trace]
assert times == sorted(times)
active = {b["address"] for b in segment["blocks"] if b["state"] == "active_allocated"}
assert set(alive) <= active
for frame in [("linear", "layers.1/attn/q_proj"), ("layers.1", "model"), ("forward", "step"), ("backward", "step")]:
    assert frame in frames, (frame, frames)
print(len(viz.segsum(data)), len(viz.trace(data)), len(viz.trace_plot(data)), len(viz.segment_plot(data)))
print("active", segment["active_size"], "most", most)
"#;

/// Returns the path of PyTorch's script, if a Python with torch is installed.
fn memory_viz() -> Option<PathBuf> {
    let find =
        "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])";
    let output = Command::new("python3").args(["-c", find]).output().ok()?;
    let folder = String::from_utf8(output.stdout).ok()?;
    let path = Path::new(folder.trim()).join("cuda/_memory_viz.py");
    (output.status.success() && path.is_file()).then_some(path)
}

#[test]
fn pytorch_reads_the_snapshot() {
    if child::ran("memory::snapshot::pytorch_reads_the_snapshot") {
        return;
    }
    let step = run(&config(64, 128, 2, 300), 2, Mode::TrainStep);
    let (_, profile) = step
        .profile_memory(&Device::Cpu, Default::default())
        .unwrap();
    let snapshot = Snapshot::new(&profile.unwrap().recording);
    let folder = tempfile::tempdir().unwrap();
    let [pickle, json] = ["step.pickle", "step.json"].map(|name| folder.path().join(name));
    snapshot.save_pickle(&pickle).unwrap();
    snapshot.save_json(&json).unwrap();
    // Parameters and the optimizer's state are live at the end, with their names.
    let text = std::fs::read_to_string(&json).unwrap();
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    let parameters = 4 * step.config.num_parameters() as u64;
    let active = value["segments"][0]["active_size"].as_u64().unwrap();
    let expected = 3 * parameters..3 * parameters + 200_000;
    assert!(expected.contains(&active), "{active} in {expected:?}");
    assert!(text.contains("layers.1.attn.q_proj.weight") && text.contains("exp_avg_sq.ln_final"));

    let Some(script) = memory_viz() else {
        println!("no PyTorch here: its reader was not tried");
        return;
    };
    let mut python = Command::new("python3");
    let output = python
        .args(["-c", CHECK])
        .args([&script, &pickle, &json])
        .output()
        .unwrap();
    let [out, err] = [output.stdout, output.stderr].map(|s| String::from_utf8(s).unwrap());
    assert!(output.status.success(), "{out}{err}");
    println!("{out}");
    for action in ["stats", "trace"] {
        let mut python = Command::new("python3");
        let output = python
            .arg(&script)
            .arg(action)
            .arg(&pickle)
            .output()
            .unwrap();
        assert!(
            output.status.success() && output.stdout.len() > 100,
            "{action}"
        );
    }
}

#[test]
fn what_cannot_be_written_is_an_error() {
    if child::ran("memory::snapshot::what_cannot_be_written_is_an_error") {
        return;
    }
    let recorder = record(RecordConfig::default()).unwrap();
    std::hint::black_box(vec![1u8; 10_000]);
    let recording = recorder.finish();
    let path = Path::new("/nowhere/at/all/step.pickle");
    let snapshot = Snapshot::new(&recording);
    for refused in [
        snapshot.save_pickle(path),
        snapshot.save_json(path),
        plot::save(&[timeline(&recording, "")], path),
    ] {
        let error = refused.unwrap_err();
        assert!(
            matches!(&error, Error::Io { path: named, .. } if named == path),
            "{error}"
        );
    }
    // The disk is full during the write.
    if cfg!(target_os = "linux") {
        let full = Path::new("/dev/full");
        let error = snapshot.save_json(full).unwrap_err();
        assert!(matches!(error, Error::Io { .. }), "{error}");
    }
}
