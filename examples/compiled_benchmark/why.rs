//! What a training step does beside its arithmetic: calls, bytes that they read and write, allocations.

use crate::Setting;
use candle_core::Device;
use tallow::bench::{EndToEnd, Execution, Step};
use tallow::memory::{self, RecordConfig, Recorder};
use tallow::profile::{Profiler, Recording, Span};
use tallow::report::{Column, Fields, Report};
use tallow::{Error, Result};

/// The step's memory, as the rows name it.
pub const MEMORY: [&str; 4] = [
    "peak_bytes",
    "resident_peak_bytes",
    "reserved_peak_bytes",
    "estimate_bytes",
];

/// What was counted, a row for each execution of a model.
pub fn table(setting: &Setting, rows: Vec<Fields>) -> Report {
    // What the process holds beside tensors; on a GPU, what its pool does.
    let held = match setting.device.is_cpu() {
        true => Column::mib("resident_peak_bytes", "Resident peak"),
        false => Column::mib("reserved_peak_bytes", "Reserved peak"),
    };
    Report {
        title: "What a training step does".into(),
        columns: vec![
            Column::text("configuration", "B-T-d-L-H"),
            Column::text("execution", "Execution"),
            Column::count("calls", "Calls"),
            Column::number("operand_bytes", "Operands", "MB", 0)
                .scaled(1e6)
                .grouped(),
            Column::count("allocations", "Allocations"),
            Column::mib("allocated_bytes", "Allocated"),
            Column::mib("peak_bytes", "Peak"),
            Column::mib("estimate_bytes", "Predicted").minor(1),
            held.minor(3),
            Column::ms("plan_ms", "Planning").minor(2),
        ],
        rows,
        notes: NOTES.map(String::from).to_vec(),
        ..Default::default()
    }
}

/// How to read the columns.
const NOTES: [&str; 3] = [
    "Calls are ops forward and backward of this crate, or kernel calls of the plan.",
    "Operands are the bytes that these read and write, each tensor once a call; what candle's graph does between ops \
     (zeros, \
     sums of gradients) is not in the eager ones.",
    "Allocations are blocks asked for in a step, allocated the bytes of those from 4 KiB up.",
];

/// Steps that a profiler listens to.
const LISTENED: usize = 3;

/// What was counted in a step.
pub struct Counted {
    calls: usize,
    operand_bytes: f64,
    allocations: Option<usize>,
    allocated_bytes: Option<u64>,
    /// Why a GPU's allocations are not known, if they are not.
    pub unrecorded: Option<String>,
}

impl Counted {
    pub fn fields(&self) -> Fields {
        let mut fields = Fields::new();
        fields.insert("calls", self.calls);
        fields.insert("operand_bytes", self.operand_bytes);
        fields.insert("allocations", self.allocations);
        fields.insert("allocated_bytes", self.allocated_bytes);
        fields
    }
}

/// Allocated bytes are summed from blocks of this size on.
const COUNTED_FROM_BYTES: u64 = 4096;

/// Between the steps of one run: a step whose blocks are recorded, and some that are profiled.
#[derive(Default)]
struct Watch {
    recorder: Option<Recorder>,
    unrecorded: Option<String>,
    allocations: Option<usize>,
    allocated_bytes: Option<u64>,
    profiler: Option<Profiler>,
    problem: Option<Error>,
}

impl Watch {
    /// After step number `taken`.
    fn after(&mut self, taken: usize, device: &Device) -> Result<()> {
        match taken {
            2 => {
                let every = RecordConfig {
                    threshold_bytes: 1,
                    ..Default::default()
                };
                match memory::record_on(device, every) {
                    Ok(recorder) => self.recorder = Some(recorder),
                    Err(error) if device.is_cpu() => return Err(error),
                    Err(error) => self.unrecorded = Some(error.to_string()),
                }
            }
            3 => {
                if let Some(recorder) = self.recorder.take() {
                    let recording = recorder.finish();
                    let taken = recording.blocks().iter().filter(|b| b.taken_at.is_some());
                    let bytes: Vec<u64> = taken.map(|block| block.bytes).collect();
                    self.allocations = Some(bytes.len());
                    let large = bytes.into_iter().filter(|b| *b >= COUNTED_FROM_BYTES);
                    self.allocated_bytes = Some(large.sum());
                }
                self.profiler = Some(Profiler::start()?);
            }
            _ => {}
        }
        Ok(())
    }
}

/// Counts what a training step does, in a run of its own.
pub fn count(run: &EndToEnd, device: &Device) -> Result<Counted> {
    let run = EndToEnd {
        warmup_steps: 0,
        steps: 3 + LISTENED,
        ..run.clone()
    };
    let mut watch = Watch::default();
    run.run(device, |step: Step, _| {
        if let Err(error) = watch.after(step.index + 1, device) {
            watch.problem.get_or_insert(error);
        }
    })?;
    if let Some(problem) = watch.problem {
        return Err(problem);
    }
    let recording = match watch.profiler {
        Some(profiler) => profiler.finish()?,
        None => Recording::default(),
    };
    let steps = LISTENED as f64;
    let ops = || recording.spans.iter().filter(|span| span.is_op());
    let operand_bytes = match run.execution {
        Execution::Eager => {
            let costs = ops().filter_map(Span::cost);
            costs.map(|cost| cost.bytes()).sum::<f64>() / steps
        }
        Execution::Planned => {
            let plan = run.plan(device)?;
            let calls = plan.calls().iter().enumerate();
            calls
                .filter_map(|(i, call)| Some(plan.times(i) as f64 * plan.bytes_moved(call)? as f64))
                .sum()
        }
    };
    Ok(Counted {
        calls: ops().count() / LISTENED,
        operand_bytes,
        allocations: watch.allocations,
        allocated_bytes: watch.allocated_bytes,
        unrecorded: watch.unrecorded,
    })
}
