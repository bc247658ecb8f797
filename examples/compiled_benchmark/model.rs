//! Whole models, eager and planned.

use crate::Flags;
use crate::common::models::with_attention;
use crate::common::{Sweep, gib_bytes, phases, words};
use crate::compared::{Compared, reasons, speedups};
use crate::configurations::Configuration;
use crate::why::{self, Counted};
use candle_core::Device;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tallow::Result;
use tallow::bench::{EndToEnd, Execution, OptimizerChoice, alternate};
use tallow::memory::Mode;
use tallow::report::{Answer, Column, Fields, Report, group_digits, mean_and_std, speedup};

const MODES: [Mode; 3] = [Mode::Forward, Mode::ForwardBackward, Mode::TrainStep];

const EXECUTIONS: [Execution; 2] = [Execution::Eager, Execution::Planned];

/// The phase of the rows that hold backward and optimizer together.
const UPDATE: &str = "backward+optimizer";

/// The parts that are compared: the mode, the phase of its row, and their name.
const PARTS: [(Mode, &str, &str); 7] = [
    (Mode::Forward, "forward", "forward alone"),
    (
        Mode::ForwardBackward,
        "forward+backward",
        "forward+backward",
    ),
    (Mode::TrainStep, "train step", "full step"),
    (Mode::TrainStep, "forward", "step's forward"),
    (Mode::TrainStep, "backward", "step's backward"),
    (Mode::TrainStep, "optimizer", "step's optimizer"),
    (Mode::TrainStep, UPDATE, "step's backward+optimizer"),
];

/// The parts that answers speak of, by their place in [`PARTS`].
const ANSWERED: [usize; 4] = [0, 1, 2, 6];

#[derive(Serialize)]
struct Line<'a> {
    configuration: &'a str,
    part: &'a str,
    eager: Option<Value>,
    planned: Option<Value>,
    speedup: Value,
    peak_eager: Value,
    peak_planned: Value,
}

/// A line for each part of a model's steps.
pub fn columns() -> Vec<Column> {
    vec![
        Column::text("configuration", "B-T-d-L-H"),
        Column::text("part", "Part"),
        Column::ms("eager", "eager"),
        Column::ms("planned", "planned"),
        Column::number("speedup", "Speed-up", "", 2),
        Column::mib("peak_eager", "eager").under("Peak").minor(1),
        Column::mib("peak_planned", "planned")
            .under("Peak")
            .minor(1),
    ]
}

/// A device with its peak in FLOP/s, where that is known.
type Machine<'d> = (&'d Device, Option<f64>);

/// Measures the models, and compares the executions of each.
pub fn report(
    flags: &Flags,
    machine: Machine<'_>,
    models: &[Configuration],
    sweep: &mut Sweep,
) -> Result<Report> {
    let mut report = Report {
        configuration: configuration(flags, models),
        columns: columns(),
        ..Default::default()
    };
    let (mut compared, mut counted) = (Vec::new(), Vec::new());
    for model in models {
        if !sweep.begins(&model.name) {
            break;
        }
        let rows = measure(flags, machine, model)?;
        for (i, (mode, phase, part)) in PARTS.into_iter().enumerate() {
            let row = |execution| find(&rows, mode, phase, execution);
            let [eager, planned] = EXECUTIONS.map(row);
            if eager.or(planned).is_none() {
                continue;
            }
            let speedup = eager.zip(planned).and_then(|(e, p)| speedup(e, p));
            let is_whole = i < MODES.len();
            let peak = |row: Option<&Fields>| match row.filter(|_| is_whole) {
                Some(row) => row.get("peak_bytes").cloned().unwrap_or_default(),
                None => "".into(),
            };
            report.lines.push(Fields::of(&Line {
                configuration: &model.name,
                part,
                eager: eager.map(mean_and_std),
                planned: planned.map(mean_and_std),
                speedup: words::speedup_cell(speedup),
                peak_eager: peak(eager),
                peak_planned: peak(planned),
            })?);
            let mean = |row: Option<&Fields>| row?.get("mean_ms")?.as_f64();
            let means = mean(eager).zip(mean(planned));
            if let Some((eager_ms, planned_ms)) = means {
                let model = model.name.clone();
                compared.push(Compared {
                    model,
                    part,
                    eager_ms,
                    planned_ms,
                    speedup,
                });
            }
        }
        for execution in EXECUTIONS {
            let step = find(&rows, Mode::TrainStep, "train step", execution);
            if let Some(step) = step.filter(|step| step.get("mean_ms").is_some()) {
                let run = run(flags, machine, model, Mode::TrainStep, execution);
                counted.push(Counted {
                    configuration: model.name.clone(),
                    memory: step.read().unwrap_or_default(),
                    ..why::count(&run, machine.0)?
                });
            }
        }
        report.rows.extend(rows);
    }
    report.notes.push(
        "Forward alone has no graph; forward+backward and the full step include the loss. Times are mean ± standard \
         deviation; speed-up is eager's mean over planned's."
            .into(),
    );
    let is_out = |row: &Fields| row.get("status") == Some(&"OOM".into());
    if report.rows.iter().any(is_out) {
        report.notes.extend(words::out_of_memory(&report.rows));
    }
    report.notes.extend(words::noisy(&report.rows));
    report.answers = answers(&compared, &counted);
    if !counted.is_empty() {
        report.details.push(why::table(machine.0, &counted)?);
    }
    Ok(report)
}

fn answers(compared: &[Compared], counted: &[Counted]) -> Vec<Answer> {
    let parts = ANSWERED.map(|place| PARTS[place].2);
    let own = compared.iter().filter(|c| parts.contains(&c.part));
    let question =
        "How does compiling the model (planned) change forward, backward and the full step?";
    let speedups = speedups(&own.cloned().collect::<Vec<_>>());
    let mut answers: Vec<Answer> = Vec::new();
    answers.extend(speedups.map(|text| Answer::new(question, text)));
    let steps = compared.iter().filter(|c| c.part == "full step");
    let longest = steps.max_by(|a, b| a.eager_ms.total_cmp(&b.eager_ms));
    let of = |execution: Execution| {
        let is_own = |c: &&Counted| {
            c.execution == execution.name() && longest.is_some_and(|l| l.model == c.configuration)
        };
        counted.iter().find(is_own)
    };
    if let (Some(step), [Some(eager), Some(planned)]) = (longest, EXECUTIONS.map(of)) {
        let question = "What are the reasons for the difference?";
        answers.push(Answer::new(question, reasons(eager, planned, step)));
    }
    answers
}

/// The rows of all modes and executions of a model, with one for backward and optimizer together.
fn measure(flags: &Flags, machine: Machine<'_>, model: &Configuration) -> Result<Vec<Fields>> {
    let runs = EXECUTIONS
        .iter()
        .flat_map(|execution| MODES.map(|mode| run(flags, machine, model, mode, *execution)));
    let runs: Vec<EndToEnd> = runs.collect();
    let measured = alternate(&runs, flags.measurement.rounds, machine.0, |_, _, _| ())?;
    let mut rows = Vec::new();
    for (run, mut own) in runs.iter().zip(measured) {
        let update = phases::update(&own).filter(|_| run.mode == Mode::TrainStep);
        if let Some((update, row)) = update.zip(own.first()) {
            let labels = row.iter().take_while(|(key, _)| *key != "n");
            let mut row: Fields = labels.map(|(key, value)| (key, value.clone())).collect();
            row.insert("phase", UPDATE).merge(update);
            own.push(row);
        }
        rows.extend(own.into_iter().map(|row| {
            let mut named = Fields::from_iter([("configuration", model.name.as_str())]);
            named.merge(row);
            named
        }));
    }
    Ok(rows)
}

fn find<'r>(
    rows: &'r [Fields],
    mode: Mode,
    phase: &str,
    execution: Execution,
) -> Option<&'r Fields> {
    #[derive(Deserialize)]
    struct Key {
        mode: String,
        phase: String,
        execution: String,
    }
    rows.iter().find(|row| {
        row.read::<Key>().is_some_and(|key| {
            (
                key.mode.as_str(),
                key.phase.as_str(),
                key.execution.as_str(),
            ) == (mode.name(), phase, execution.name())
        })
    })
}

fn run(
    flags: &Flags,
    machine: Machine<'_>,
    model: &Configuration,
    mode: Mode,
    execution: Execution,
) -> EndToEnd {
    let limit_bytes = flags.measurement.memory_limit_gib.map(gib_bytes);
    let available = || tallow::hardware::available_bytes_on(machine.0);
    EndToEnd {
        config: with_attention(&model.model, flags.attention),
        batch_size: model.batch_size,
        sequence_length: model.sequence_length,
        mode,
        precision: flags.precision,
        warmup_steps: flags.measurement.warmup_steps,
        steps: flags.measurement.steps,
        optimizer: OptimizerChoice::AdamW(Default::default()),
        execution,
        optimizer_in_backward: false,
        memory_budget_bytes: None,
        seed: flags.common.seed,
        peak_flops: machine.1,
        available_bytes: limit_bytes.or_else(available),
    }
}

fn configuration(flags: &Flags, models: &[Configuration]) -> Fields {
    let distinct = |of: fn(&Configuration) -> usize| {
        let mut sizes: Vec<String> = models.iter().map(|m| group_digits(of(m) as u64)).collect();
        sizes.dedup();
        sizes.join("; ")
    };
    let mut fields = Fields::new();
    fields.insert(
        "measured",
        "models: batch B, tokens T, width d, layers L, heads H",
    );
    fields.insert("vocabulary", distinct(|m| m.model.vocab_size));
    fields.insert("d_ff", distinct(|m| m.model.d_ff));
    fields.insert("precision", flags.precision.name());
    fields.insert("attention", flags.attention.name());
    fields.insert("optimizer", "adamw");
    fields.insert("warm-up steps", flags.measurement.warmup_steps);
    fields.insert("steps", flags.measurement.steps);
    fields.insert("rounds", flags.measurement.rounds);
    fields
}
