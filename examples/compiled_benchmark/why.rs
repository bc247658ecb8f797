//! What a training step does besides its arithmetic: calls, bytes that they read and write, allocations.

use candle_core::Device;
use serde::{Deserialize, Serialize};
use tallow::bench::{EndToEnd, Execution, Step, time_once};
use tallow::memory::{self, RecordConfig, Recorder};
use tallow::profile::{Profiler, Recording, Span};
use tallow::report::{Column, Fields, Report};
use tallow::{Error, Result};

/// What was counted in a step, with its memory and the time that planning took.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Counted {
    pub configuration: String,
    pub execution: &'static str,
    pub calls: usize,
    pub operand_bytes: f64,
    pub allocations: Option<usize>,
    pub allocated_bytes: Option<u64>,
    #[serde(flatten)]
    pub memory: StepMemory,
    pub plan_ms: Option<f64>,
}

/// The memory of a step, from its row.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct StepMemory {
    pub peak_bytes: Option<u64>,
    pub resident_peak_bytes: Option<u64>,
    pub reserved_peak_bytes: Option<u64>,
    pub estimate_bytes: Option<u64>,
}

/// A row for each execution of a model.
pub fn table(device: &Device, counted: &[Counted]) -> Result<Report> {
    // What the process holds in addition to tensors; on a GPU, what its pool does.
    let held = match device.is_cpu() {
        true => Column::mib("resident_peak_bytes", "Resident peak"),
        false => Column::mib("reserved_peak_bytes", "Reserved peak"),
    };
    Ok(Report {
        title: "What a training step does".into(),
        columns: vec![
            Column::text("configuration", "B-T-d-L-H"),
            Column::text("execution", "Step"),
            Column::count("calls", "Calls"),
            Column::mib("operand_bytes", "Operands"),
            Column::count("allocations", "Allocations"),
            Column::mib("allocated_bytes", "Allocated"),
            Column::mib("peak_bytes", "Peak"),
            Column::ms("plan_ms", "Plan").minor(1),
            Column::mib("estimate_bytes", "Predicted").minor(2),
            held.minor(3),
        ],
        rows: counted.iter().map(Fields::of).collect::<Result<_>>()?,
        notes: vec![
            "Calls are ops of an eager step, kernel calls of a planned one. Operands are the bytes that they read and \
             write; of eager steps what candle's graph adds between ops is not counted."
                .into(),
            "Allocations are the blocks that a step allocates. Allocated is the sum of those from 4 KiB up.".into(),
        ],
        ..Default::default()
    })
}

/// Steps that a profiler records.
const PROFILED: usize = 3;

/// Allocated bytes are summed over blocks of this size and larger.
const COUNTED_FROM_BYTES: u64 = 4096;

/// Counts what a training step does, in a run of its own: of the first steps the third is recorded block by block, and
/// some after it are profiled. On a GPU that records no blocks, allocations stay unknown.
pub fn count(run: &EndToEnd, device: &Device) -> Result<Counted> {
    let counting = EndToEnd {
        warmup_steps: 0,
        steps: 3 + PROFILED,
        ..run.clone()
    };
    let mut counted = Counted {
        execution: run.execution.name(),
        ..Default::default()
    };
    let mut recorder: Option<Recorder> = None;
    let mut profiler = None;
    let mut problem: Option<Error> = None;
    counting.run(device, |step: Step, _| match step.index + 1 {
        2 => {
            let every = RecordConfig {
                threshold_bytes: 1,
                ..Default::default()
            };
            match memory::record_on(device, every) {
                Ok(started) => recorder = Some(started),
                Err(error) if device.is_cpu() => problem = Some(error),
                Err(_) => {}
            }
        }
        3 => {
            if let Some(recording) = recorder.take().map(Recorder::finish) {
                let taken = recording.blocks().iter().filter(|b| b.taken_at.is_some());
                let bytes: Vec<u64> = taken.map(|block| block.bytes).collect();
                counted.allocations = Some(bytes.len());
                let large = bytes.into_iter().filter(|b| *b >= COUNTED_FROM_BYTES);
                counted.allocated_bytes = Some(large.sum());
            }
            match Profiler::start() {
                Ok(started) => profiler = Some(started),
                Err(error) => problem = Some(error),
            }
        }
        _ => {}
    })?;
    if let Some(problem) = problem {
        return Err(problem);
    }
    let recording = profiler.map_or(Ok(Recording::default()), Profiler::finish)?;
    let ops = || recording.spans.iter().filter(|span| span.is_op());
    counted.calls = ops().count() / PROFILED;
    let costs = ops().filter_map(Span::cost);
    counted.operand_bytes = costs.map(|cost| cost.bytes()).sum::<f64>() / PROFILED as f64;
    if run.execution == Execution::Planned {
        let (plan, plan_ms) = time_once(device, || run.plan(device))?;
        let calls = plan.calls().iter().enumerate();
        let bytes = calls
            .filter_map(|(i, call)| Some(plan.times(i) as f64 * plan.bytes_moved(call)? as f64));
        counted.operand_bytes = bytes.sum();
        counted.plan_ms = Some(plan_ms);
    }
    Ok(counted)
}
