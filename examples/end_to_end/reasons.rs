//! The calls of a training step, and the time of planning it.

use super::table::Comparison;
use super::words::compared;
use candle_core::Device;
use serde::Serialize;
use tallow::Result;
use tallow::bench::{EndToEnd, Execution, time_once};
use tallow::profile::Profiler;
use tallow::report::{Column, Verdict, counted, group_digits};

/// The counts of a training step, and the time of planning.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Counted {
    /// The number of ops of an eager step, or of kernel calls of a planned one.
    pub calls: usize,
    pub plan_ms: Option<f64>,
}

/// The number of steps that a profiler records.
const PROFILED: usize = 3;

/// Counts the calls of a training step, in a separate run, whose first step is not profiled; `None` if it is out of
/// memory.
pub fn count(run: &EndToEnd, device: &Device) -> Result<Option<Counted>> {
    let counting = EndToEnd {
        warmup_steps: 0,
        steps: 1 + PROFILED,
        ..run.clone()
    };
    let mut profiler = None;
    counting.run(device, |_, _| {
        profiler.get_or_insert_with(Profiler::start);
    })?;
    let Some(profiler) = profiler else {
        return Ok(None);
    };
    let recording = profiler?.finish()?;
    let calls = recording.spans.iter().filter(|span| span.is_op()).count() / PROFILED;
    let plan_ms = match run.execution {
        Execution::Eager => None,
        Execution::Planned => Some(time_once(device, || run.plan(device))?.1),
    };
    Ok(Some(Counted { calls, plan_ms }))
}

/// Describes whether the longest training step is faster when planned, what it runs instead of ops, and after how many
/// steps the time of planning is regained; `None` if no step was counted.
pub fn reasons(all: &[Comparison]) -> Option<String> {
    let counted_steps = all.iter().filter_map(|own| {
        let (eager, planned) = (own.of("eager")?, own.of("planned")?);
        let counts = [eager, planned].map(|row| row.counted.as_ref());
        let [eager_ms, planned_ms] = [eager.statistics()?.mean_ms, planned.statistics()?.mean_ms];
        Some((
            own,
            eager_ms,
            eager_ms - planned_ms,
            counts[0].zip(counts[1])?,
        ))
    });
    let longest = counted_steps.max_by(|a, b| a.1.total_cmp(&b.1));
    let (own, _, gain_ms, (eager, planned)) = longest?;
    let speedup = own.speedup("eager", "planned")?;
    let verdict = compared("a planned step", "an eager one", speedup);
    let [ops, calls] = [eager, planned].map(|counts| group_digits(counts.calls as u64));
    let mut text = format!(
        "{}: {verdict}. It makes {calls} calls of fused kernels in one arena; the eager step runs {ops} ops, allocates \
         the result of each, and records them in candle's graph.",
        own.name
    );
    if let (Verdict::Faster, Some(plan_ms)) = (speedup.verdict(), planned.plan_ms) {
        let steps = counted((plan_ms / gain_ms).ceil() as usize, "step");
        let plan_ms = Column::ms("", "").cell(Some(&plan_ms.into()));
        text += &format!(" Planning took {plan_ms} ms: the gain of {steps}.");
    }
    Some(text)
}
