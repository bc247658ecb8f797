//! What a training step does: its calls, and the bytes that they read and write.

use super::table::Comparison;
use super::words::compared;
use candle_core::Device;
use serde::Serialize;
use tallow::Result;
use tallow::bench::{EndToEnd, Execution, time_once};
use tallow::profile::{Profiler, Span};
use tallow::report::{Column, Fields, Report, Verdict, counted};

/// The counts of a training step, and the time of planning.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Counted {
    pub calls: usize,
    pub operand_bytes: f64,
    pub plan_ms: Option<f64>,
}

/// Returns the table of counts, a row for each execution of a model; `None` if nothing was counted.
pub fn table(all: &[Comparison]) -> Option<Report> {
    let columns = vec![
        Column::text("configuration", "Run"),
        Column::text("execution", "Step"),
        Column::count("calls", "Calls"),
        Column::mib("operand_bytes", "Operands"),
        Column::mib("peak_bytes", "Peak"),
        Column::ms("plan_ms", "Plan"),
        Column::mib("estimate_bytes", "Predicted"),
        Column::mib("resident_peak_bytes", "Resident peak"),
        Column::mib("reserved_peak_bytes", "Reserved peak"),
    ];
    let rows = all
        .iter()
        .flat_map(|own| own.rows.iter().map(|row| (&own.name, row)));
    let rows = rows.filter_map(|(name, row)| {
        let mut fields = row.fields();
        fields.merge(Fields::of(row.counted.as_ref()?).ok()?);
        let name = name.trim_end_matches("train step").trim_end(); // all are training steps
        fields.insert("configuration", name);
        let keys = columns.iter().map(|column| column.key.as_str());
        Some(keys.map(|key| (key, fields.get(key).cloned())).collect())
    });
    let rows: Vec<Fields> = rows.collect();
    (!rows.is_empty()).then(|| Report {
        title: "What a training step does".into(),
        columns,
        rows,
        notes: vec![
            "Calls are ops of an eager step, kernel calls of a planned one. Operands are the bytes that they read and \
             write; of eager steps what candle's graph adds between ops is not counted."
                .into(),
        ],
        ..Default::default()
    })
}

/// The number of steps that a profiler records.
const PROFILED: usize = 3;

/// Counts calls and bytes of a training step, in a separate run, whose first step is not profiled; `None` if it is out
/// of memory.
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
    let ops = || recording.spans.iter().filter(|span| span.is_op());
    let bytes = ops().filter_map(Span::cost).map(|cost| cost.bytes());
    let mut counted = Counted {
        calls: ops().count() / PROFILED,
        operand_bytes: bytes.sum::<f64>() / PROFILED as f64,
        plan_ms: None,
    };
    if run.execution == Execution::Planned {
        let ((plan, _), plan_ms) = time_once(device, || run.plan(device))?;
        counted.operand_bytes = plan.traffic_bytes();
        counted.plan_ms = Some(plan_ms);
    }
    Ok(Some(counted))
}

/// Describes whether the longest training step is faster when planned, why, and after how many steps the time of
/// planning is regained; `None` if no step was counted.
pub fn reasons(all: &[Comparison]) -> Option<String> {
    let counted_steps = all.iter().filter_map(|own| {
        let (eager, planned) = (own.of("eager")?, own.of("planned")?);
        let plan_ms = planned.counted.as_ref()?.plan_ms?;
        let [eager_ms, planned_ms] = [eager.statistics()?.mean_ms, planned.statistics()?.mean_ms];
        Some((own, eager_ms, eager_ms - planned_ms, plan_ms))
    });
    let longest = counted_steps.max_by(|a, b| a.1.total_cmp(&b.1));
    let (own, _, gain_ms, plan_ms) = longest?;
    let speedup = own.speedup("eager", "planned")?;
    let verdict = compared("a planned step", "an eager one", speedup);
    let mut text = format!("{}: {verdict}.", own.name);
    if speedup.verdict() == Verdict::Faster {
        let steps = counted((plan_ms / gain_ms).ceil() as usize, "step");
        let plan_ms = Column::ms("", "").cell(Some(&plan_ms.into()));
        text += &format!(
            " It runs fused kernels in one arena: the table What a training step does has calls and bytes of both. \
             Planning took {plan_ms} ms: the gain of {steps}."
        );
    }
    Some(text)
}
