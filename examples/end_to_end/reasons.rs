//! Counts of a training step: calls, bytes that they read and write, allocations.

use super::answers::Pair;
use super::words::{self, compared};
use candle_core::Device;
use serde::Serialize;
use tallow::bench::{EndToEnd, EndToEndRow, Execution, Step, time_once};
use tallow::memory::{self, RecordConfig, Recorder};
use tallow::profile::{Profiler, Recording, Span};
use tallow::report::{Column, Fields, Report, Verdict, counted};
use tallow::{Error, Result};

/// The counts of a training step, its memory, and the time of planning.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Counted {
    /// The name of the configuration and its training step.
    pub configuration: String,
    pub execution: &'static str,
    pub calls: usize,
    pub operand_bytes: f64,
    pub allocations: Option<usize>,
    pub allocated_bytes: Option<u64>,
    pub peak_bytes: Option<u64>,
    pub resident_peak_bytes: Option<u64>,
    pub reserved_peak_bytes: Option<u64>,
    pub estimate_bytes: u64,
    pub plan_ms: Option<f64>,
}

/// Returns the table of counts, a row for each execution of a model.
pub fn table(device: &Device, counted: &[Counted]) -> Result<Report> {
    // The memory of the process, which includes more than tensors; on a GPU, that of its pool.
    let held = match device.is_cpu() {
        true => Column::mib("resident_peak_bytes", "Resident peak"),
        false => Column::mib("reserved_peak_bytes", "Reserved peak"),
    };
    Ok(Report {
        title: "What a training step does".into(),
        columns: vec![
            Column::text("configuration", "Run"),
            Column::text("execution", "Step"),
            Column::count("calls", "Calls"),
            Column::mib("operand_bytes", "Operands"),
            Column::count("allocations", "Allocations"),
            Column::mib("allocated_bytes", "Allocated"),
            Column::mib("peak_bytes", "Peak"),
            Column::ms("plan_ms", "Plan"),
            Column::mib("estimate_bytes", "Predicted"),
            held,
        ],
        rows: counted.iter().map(row).collect::<Result<_>>()?,
        notes: vec![
            "Calls are ops of an eager step, kernel calls of a planned one. Operands are the bytes that they read and \
             write; of eager steps what candle's graph adds between ops is not counted."
                .into(),
            "Allocations are the blocks that a step allocates. Allocated is the sum of those from 4 KiB up.".into(),
        ],
        ..Default::default()
    })
}

/// Returns a row, named by its configuration: all are of training steps.
fn row(counted: &Counted) -> Result<Fields> {
    let mut row = Fields::of(counted)?;
    let name = counted.configuration.trim_end_matches("train step");
    row.insert("configuration", name.trim_end());
    Ok(row)
}

/// The number of steps that a profiler records.
const PROFILED: usize = 3;

/// The smallest block that counts towards allocated bytes.
const COUNTED_FROM_BYTES: u64 = 4096;

/// Counts calls, bytes and allocations of the training step of `row`, in a separate run. The third step is recorded
/// block by block, and the next [`PROFILED`] are profiled. Without recorded blocks on a GPU, allocations are `None`.
pub fn count(run: &EndToEnd, row: &EndToEndRow, device: &Device) -> Result<Counted> {
    let counting = EndToEnd {
        warmup_steps: 0,
        steps: 3 + PROFILED,
        ..run.clone()
    };
    let mut counted = Counted {
        execution: run.execution.name(),
        peak_bytes: row.peak_bytes(),
        resident_peak_bytes: row.memory.as_ref().and_then(|own| own.resident_peak_bytes),
        reserved_peak_bytes: row.memory.as_ref().and_then(|own| own.reserved_peak_bytes),
        estimate_bytes: row.estimate_bytes,
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
                let taken = recording
                    .blocks()
                    .iter()
                    .filter(|b| b.allocated_at.is_some());
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
        let ((plan, _), plan_ms) = time_once(device, || run.plan(device))?;
        counted.operand_bytes = plan.traffic_bytes();
        counted.plan_ms = Some(plan_ms);
    }
    Ok(counted)
}

/// Describes whether a planned training step is faster than an eager one, why, and after how many steps the time of
/// planning is regained.
pub fn reasons(plan_ms: Option<f64>, step: &Pair) -> Option<String> {
    let speedup = step.speedup?;
    let verdict = compared("a planned step", "an eager one", speedup);
    let mut text = format!("{}: {verdict}.", step.name);
    if speedup.verdict() == Verdict::Faster {
        text += " It runs fused kernels in one arena: the table What a training step does has calls, bytes and \
                 allocations of both.";
        if let Some(plan_ms) = plan_ms {
            let steps = (plan_ms / (step.before_ms - step.after_ms)).ceil();
            text += &format!(
                " Planning took {} ms: the gain of {}.",
                words::ms(plan_ms),
                counted(steps as usize, "step")
            );
        }
    }
    Some(text)
}
