//! Part (b): whole models, eager and planned.

use crate::common::{phases, values, words};
use crate::configurations::{Configuration, PRESETS, SEED};
use crate::why;
use crate::{Setting, common, geometric_mean, number, text};
use clap::Args;
use tallow::Result;
use tallow::attention::Algorithm;
use tallow::bench::{EndToEnd, Execution, OptimizerChoice, alternate, time_once};
use tallow::memory::Mode;
use tallow::model::TransformerConfig;
use tallow::report::{Column, Fields, Report, group_digits, mean_and_std};

/// The modes, with the name of their row, and the columns' letters.
const MODES: [(Mode, &str, &str); 3] = [
    (Mode::Forward, "forward", "F"),
    (Mode::ForwardBackward, "forward+backward", "FB"),
    (Mode::TrainStep, "train step", "S"),
];

const EXECUTIONS: [Execution; 2] = [Execution::Eager, Execution::Planned];

#[derive(Args)]
#[command(next_help_heading = "Models")]
pub struct ModelFlags {
    /// Models as batch-tokens-width-layers-heads; several allowed [default: 4-256-256-4-8; with --full the course
    /// report's four]
    #[arg(long, num_args = 1.., value_delimiter = ',', value_name = "B-T-D-L-H")]
    config: Vec<Configuration>,

    /// Presets, tiny to 10b; several allowed [default: none; with --full all]
    #[arg(long, num_args = 1.., value_delimiter = ',')]
    size: Vec<String>,

    /// How many token ids the models have [default: 10000]
    #[arg(long)]
    vocab_size: Option<usize>,

    /// The width of their feed-forward networks [default: of a --config 4 D, of a preset its own]
    #[arg(long)]
    d_ff: Option<usize>,

    /// Sequences in a preset's batch
    #[arg(long, default_value_t = 4)]
    batch_size: usize,

    /// Tokens in a preset's sequence
    #[arg(long, default_value_t = 256)]
    context_length: usize,

    /// What computes attention in the models, naive or flash
    #[arg(long = "model-attention", default_value_t = Algorithm::Naive)]
    algorithm: Algorithm,

    /// Steps that are run and not counted, in each round
    #[arg(long, default_value_t = 1, value_parser = values::count_from_0())]
    warmup_steps: usize,

    /// Steps that are measured, in each round
    #[arg(long, default_value_t = 5, value_parser = values::count())]
    steps: usize,

    /// Rounds: eager and planned are measured in turns
    #[arg(long, default_value_t = 2, value_parser = values::count())]
    rounds: usize,
}

impl ModelFlags {
    /// The flags' long names.
    pub const NAMES: &[&str] = &[
        "config",
        "size",
        "vocab-size",
        "d-ff",
        "batch-size",
        "context-length",
        "model-attention",
        "warmup-steps",
        "steps",
        "rounds",
    ];

    /// Whether the models are the default ones, which --full changes.
    pub fn has_defaults(&self) -> bool {
        self.config.is_empty() && self.size.is_empty()
    }

    /// Whether presets are among the models.
    pub fn has_presets(&self, full: bool) -> bool {
        !self.size.is_empty() || (full && self.has_defaults())
    }

    /// Measures every model.
    pub fn report(&self, setting: &Setting) -> Result<Report> {
        let configurations = self.configurations(setting.full)?;
        let mut report = Report {
            title: "Models".into(),
            configuration: self.configuration(setting, &configurations),
            columns: columns(),
            ..Default::default()
        };
        let mut counts = Vec::new();
        for (i, configuration) in configurations.iter().enumerate() {
            let (number, count) = (i + 1, configurations.len());
            common::progress(format!("model {number}/{count}: {}", configuration.name));
            counts.extend(self.one(setting, configuration, &mut report)?);
        }
        report.notes.push(
            "F is forward without a graph; FB forward, loss and backward; S the training step. Times are mean ± \
             standard \
             deviation, speed-ups those of medians."
                .into(),
        );
        report.notes.push(
            "B+O is backward and optimizer of the steps that S is of: never more than S.".into(),
        );
        report.notes.push(averages(&report.lines));
        report.notes.extend(words::noisy(&report.rows));
        report.details.push(why::table(setting, counts));
        Ok(report)
    }

    fn configurations(&self, full: bool) -> Result<Vec<Configuration>> {
        let mut configurations = self.config.clone();
        let mut presets: Vec<&str> = self.size.iter().map(String::as_str).collect();
        if configurations.is_empty() && presets.is_empty() {
            let own = if full { &SEED[..] } else { &SEED[..1] };
            for name in own {
                configurations.push(name.parse()?);
            }
            presets = if full { PRESETS.to_vec() } else { Vec::new() };
        }
        for name in presets {
            let preset = Configuration::preset(name, self.batch_size, self.context_length)?;
            configurations.push(preset);
        }
        for Configuration { model, .. } in &mut configurations {
            model.vocab_size = self.vocab_size.unwrap_or(model.vocab_size);
            model.d_ff = self.d_ff.unwrap_or(model.d_ff);
            model.validate()?;
        }
        Ok(configurations)
    }

    /// Adds a model's rows and its line, and counts what its executions do.
    fn one(
        &self,
        setting: &Setting,
        configuration: &Configuration,
        report: &mut Report,
    ) -> Result<Vec<Fields>> {
        let runs: Vec<EndToEnd> = MODES
            .iter()
            .flat_map(|(mode, ..)| EXECUTIONS.map(|execution| (*mode, execution)))
            .map(|(mode, execution)| self.run(setting, configuration, mode, execution))
            .collect();
        let measured = alternate(&runs, self.rounds, &setting.device, |_, _, _| ())?;
        let mut lines = Vec::new();
        for execution in EXECUTIONS {
            let step = self.run(setting, configuration, Mode::TrainStep, execution);
            let mut rows: Vec<Fields> = runs
                .iter()
                .zip(&measured)
                .filter(|(run, _)| run.execution == execution)
                .flat_map(|(_, rows)| rows.iter().map(|row| named(configuration, row)))
                .collect();
            let fits = rows.last().and_then(|row| text(row, "status")) == Some("ok");
            let mut line = line(configuration, execution, &rows);
            if let Some(update) = phases::update(&rows) {
                line.insert("B+O", mean_and_std(&update));
                line.insert("median B+O", number(&update, "median_ms"));
                let own = ["mean_ms", "std_ms", "median_ms"];
                let own = own.map(|key| (format!("backward_update_{key}"), number(&update, key)));
                add_to_step(&mut rows, own.into_iter().collect());
            }
            if execution == Execution::Planned {
                match time_once(&setting.device, || step.plan(&setting.device)) {
                    Err(error) if error.is_out_of_memory() => {
                        let note = format!("{}: {error}", configuration.name);
                        report.notes.push(note);
                    }
                    planned => {
                        let (plan, plan_ms) = planned?;
                        line.insert("plan_ms", plan_ms);
                        line.insert("arena_bytes", plan.peak_bytes());
                    }
                }
            }
            if fits {
                let counted = why::count(&step, &setting.device)?;
                line.merge(counted.fields());
                add_to_step(&mut rows, counted.fields());
                let unrecorded = counted.unrecorded.filter(|why| !report.notes.contains(why));
                report.notes.extend(unrecorded);
            }
            lines.push(line);
            report.rows.extend(rows);
        }
        report.lines.push(side_by_side(configuration, &lines));
        Ok(lines)
    }

    fn run(
        &self,
        setting: &Setting,
        configuration: &Configuration,
        mode: Mode,
        execution: Execution,
    ) -> EndToEnd {
        EndToEnd {
            config: common::models::with_attention(&configuration.model, self.algorithm),
            batch_size: configuration.batch_size,
            sequence_length: configuration.sequence_length,
            mode,
            precision: setting.precision,
            warmup_steps: self.warmup_steps,
            steps: self.steps,
            optimizer: OptimizerChoice::AdamW(Default::default()),
            execution,
            optimizer_in_backward: false,
            memory_budget_bytes: None,
            seed: setting.seed,
            peak_flops: setting.peak_flops,
            available_bytes: setting
                .limit_bytes
                .or_else(|| tallow::hardware::available_bytes_on(&setting.device)),
        }
    }

    fn configuration(&self, setting: &Setting, configurations: &[Configuration]) -> Fields {
        let mut fields = Fields::new();
        let what = "models: batch B, tokens T, width d, layers L, heads H";
        fields.insert("measured", what);
        let distinct = |of: fn(&TransformerConfig) -> usize| {
            let mut sizes: Vec<String> = Vec::new();
            for Configuration { model, .. } in configurations {
                let size = group_digits(of(model) as u64);
                if !sizes.contains(&size) {
                    sizes.push(size);
                }
            }
            sizes.join("; ")
        };
        fields.insert("vocabulary", distinct(|model| model.vocab_size));
        fields.insert("d_ff", distinct(|model| model.d_ff));
        fields.insert("precision", setting.precision.name());
        fields.insert("attention", self.algorithm.name());
        fields.insert("optimizer", "adamw");
        fields.insert("warm-up", self.warmup_steps);
        fields.insert("steps", self.steps);
        fields.insert("rounds", self.rounds);
        fields
    }
}

fn named(configuration: &Configuration, row: &Fields) -> Fields {
    let mut named = Fields::new();
    named.insert("configuration", configuration.name.as_str());
    named.merge(row.clone());
    named
}

/// What was counted belongs to the row of the whole step.
fn add_to_step(rows: &mut [Fields], fields: Fields) {
    let mut rows = rows.iter_mut().rev();
    if let Some(step) = rows.find(|row| text(row, "phase") == Some("train step")) {
        step.merge(fields);
    }
}

/// The times of one execution, and its memory; the status where there are none.
fn line(configuration: &Configuration, execution: Execution, rows: &[Fields]) -> Fields {
    let mut line = Fields::new();
    line.insert("configuration", configuration.name.as_str());
    line.insert("parameters", configuration.model.num_parameters());
    line.insert("execution", execution.name());
    for (mode, phase, letters) in MODES {
        let is_own = |row: &&Fields| {
            text(row, "mode") == Some(mode.name()) && text(row, "phase") == Some(phase)
        };
        let Some(row) = rows.iter().find(is_own) else {
            continue;
        };
        line.insert(letters, mean_and_std(row));
        line.insert(format!("median {letters}"), number(row, "median_ms"));
        if mode == Mode::TrainStep {
            for key in why::MEMORY {
                line.insert(key, number(row, key));
            }
        }
    }
    line
}

/// The executions' times and peaks in one line, and how many times as long eager takes.
fn side_by_side(configuration: &Configuration, executions: &[Fields]) -> Fields {
    let mut line = Fields::from_iter([("configuration", configuration.name.as_str())]);
    for letters in MODES
        .map(|(.., letters)| letters)
        .into_iter()
        .chain(["B+O"])
    {
        for execution in executions {
            let name = text(execution, "execution").unwrap_or_default();
            line.insert(format!("{letters} {name}"), execution.get(letters).cloned());
        }
        let median = format!("median {letters}");
        let medians: Vec<f64> = executions
            .iter()
            .filter_map(|e| number(e, &median))
            .collect();
        if let [eager, planned] = medians[..] {
            line.insert(format!("{letters} speed-up"), eager / planned);
        }
    }
    for execution in executions {
        let name = text(execution, "execution").unwrap_or_default();
        line.insert(format!("peak {name}"), execution.get("peak_bytes").cloned());
    }
    line
}

fn averages(lines: &[Fields]) -> String {
    let mean = |letters: &str| {
        let key = format!("{letters} speed-up");
        let mean = geometric_mean(lines.iter().filter_map(|line| number(line, &key)));
        mean.map_or("n/a".into(), |mean| format!("{mean:.2}x"))
    };
    format!(
        "Average speed-ups of planned over eager (geometric means): forward {}, forward+backward {}, full step {}, \
         backward+optimizer {}.",
        mean("F"),
        mean("FB"),
        mean("S"),
        mean("B+O")
    )
}

/// A line a model, its executions side by side.
pub fn columns() -> Vec<Column> {
    let mut columns = vec![Column::text("configuration", "B-T-d-L-H")];
    for (letters, minor) in [("F", 3), ("FB", 1), ("S", 0), ("B+O", 4)] {
        for execution in EXECUTIONS {
            let name = execution.name();
            columns.push(
                Column::ms(format!("{letters} {name}"), name)
                    .under(letters)
                    .minor(minor),
            );
        }
        let speedup = Column::number(format!("{letters} speed-up"), "speed-up", "", 2);
        columns.push(speedup.under(letters).minor(minor));
    }
    let peaks = EXECUTIONS.map(|e| Column::mib(format!("peak {}", e.name()), e.name()));
    columns.extend(peaks.map(|peak| peak.under("Peak").minor(2)));
    columns
}
