//! The runs of a sweep: every combination of size, batch, length, attention, checkpointing, precision and mode.

use super::effects::{Effect, only};
use super::labels::Labels;
use super::models::{Model, ModelFlags, VariantFlags};
use super::modes::{CompileFlag, ModeFlag, OptimizerFlag, can_plan, executions, modes};
use super::precision::PrecisionFlags;
use super::{values, words};
use candle_core::Device;
use clap::Args;
use tallow::Result;
use tallow::bench::{EndToEnd, Execution};
use tallow::memory::Mode;
use tallow::nn::Checkpointing;
use tallow::precision::Precision;
use tallow::report::{Column, Fields, Report};

/// Flags of every example that runs a grid of configurations. A program sets the help of `--context-length` and the
/// default of `--mode`.
#[derive(Args, Clone, Debug)]
pub struct GridFlags {
    #[command(flatten)]
    pub models: ModelFlags,

    #[command(flatten)]
    pub variants: VariantFlags,

    /// Sequences in a batch; several
    #[arg(long, num_args = 1.., value_delimiter = ',', default_value = "4", value_name = "N")]
    pub batch_size: Vec<usize>,

    /// Tokens in a sequence; several
    #[arg(long, num_args = 1.., value_delimiter = ',', value_name = "N", alias = "sequence-length")]
    pub context_length: Vec<usize>,

    #[command(flatten, next_help_heading = "Run")]
    pub precision: PrecisionFlags,

    /// forward, forward-backward, train-step, all
    #[arg(long, value_enum, num_args = 1.., value_delimiter = ',', value_name = "NAME", help_heading = "Run")]
    pub mode: Vec<ModeFlag>,

    /// adamw, adamw-bf16 with running means in bf16, sgd, lion or muon
    #[arg(
        long,
        value_enum,
        default_value = "adamw",
        value_name = "NAME",
        help_heading = "Run"
    )]
    pub optimizer: OptimizerFlag,

    /// Planned steps too, or alone with =only
    #[arg(long, value_enum, num_args = 0..=1, require_equals = true, default_missing_value = "both", value_name = "HOW", help_heading = "Run")]
    pub compile: Option<CompileFlag>,

    /// Memory that may be used [default: what is available]
    #[arg(long, value_name = "GIB", value_parser = values::gib, help_heading = "Run")]
    pub memory_limit_gib: Option<f64>,
}

/// A run, with the name of its model.
#[derive(Clone)]
pub struct Run {
    pub size: String,
    pub run: EndToEnd,
}

impl GridFlags {
    /// Returns what the flags' effects depend on.
    pub fn effects(&self) -> Vec<Effect> {
        let trains = self.modes().contains(&Mode::TrainStep);
        let is_planned = self.has_execution(Execution::Planned);
        vec![
            only("in a training step", trains, &["optimizer"]),
            only("with a backward", self.has_backward(), &["checkpoint"]),
            only(
                "where a step can be planned: in f32, or f32 parameters with kept copies",
                is_planned,
                &["compile"],
            ),
        ]
    }

    pub fn modes(&self) -> Vec<Mode> {
        modes(&self.mode)
    }

    pub fn has_backward(&self) -> bool {
        self.modes().iter().any(|mode| *mode != Mode::Forward)
    }

    /// Returns whether any run has this execution.
    pub fn has_execution(&self, execution: Execution) -> bool {
        let mut all = self.precision.precisions().into_iter();
        all.any(|precision| executions(self.compile, precision).contains(&execution))
    }

    /// Returns whether any run is a planned training step.
    pub fn has_planned_step(&self) -> bool {
        self.modes().contains(&Mode::TrainStep) && self.has_execution(Execution::Planned)
    }

    /// Returns the note for rows that could not be planned.
    pub fn not_planned(&self, precisions: &[Precision]) -> Option<String> {
        let eager = precisions.iter().filter(|p| !can_plan(**p));
        let names: Vec<&str> = eager.map(|precision| precision.name()).collect();
        (self.compile.is_some() && !names.is_empty()).then(|| {
            format!(
                "Steps are planned in f32, bf16 and f16 with f32 parameters and a kept copy of each weight: {} ran \
                 eagerly.",
                names.join(", ")
            )
        })
    }

    /// Returns the models, with the longest sequence as their context length.
    pub fn models(&self) -> Result<Vec<Model>> {
        let longest = self.context_length.iter().copied().max();
        let longest = longest.unwrap_or_default();
        self.models.models(longest, &self.variants.attention)
    }

    /// Returns every combination of the flags' lists in these precisions, with the other settings of `base`.
    pub fn runs(&self, models: &[Model], precisions: &[Precision], base: &EndToEnd) -> Vec<Run> {
        let optimizer = self.optimizer.rule(base.seed);
        let modes = self.modes();
        let mut runs = Vec::new();
        for Model { name, config } in models {
            for &batch_size in &self.batch_size {
                for &sequence_length in &self.context_length {
                    for (attention, checkpointing) in self.variants.variants() {
                        for &precision in precisions {
                            let executions = executions(self.compile, precision);
                            let all = modes
                                .iter()
                                .flat_map(|mode| executions.iter().map(|e| (*mode, *e)));
                            runs.extend(all.map(|(mode, execution)| Run {
                                size: name.clone(),
                                run: EndToEnd {
                                    config: config.clone(),
                                    attention,
                                    checkpointing,
                                    batch_size,
                                    sequence_length,
                                    mode,
                                    precision,
                                    optimizer,
                                    execution,
                                    ..base.clone()
                                },
                            }));
                        }
                    }
                }
            }
        }
        runs
    }

    /// Sets the available memory of each run, and prepares the process if that is tight.
    pub fn set_available_memory(&self, runs: &mut [Run], device: &Device) -> Result<()> {
        let all = runs.iter().map(|run| &run.run);
        let available_bytes = super::memory::available_bytes(device, self.memory_limit_gib, all)?;
        for Run { run, .. } in runs {
            run.available_bytes = available_bytes;
        }
        Ok(())
    }
}

impl Run {
    /// Returns the run's name in progress messages and file names.
    pub fn title(&self) -> String {
        let EndToEnd {
            attention,
            checkpointing,
            batch_size: b,
            sequence_length: t,
            mode,
            precision,
            execution,
            ..
        } = &self.run;
        let checkpointing = match checkpointing {
            Checkpointing::None => String::new(),
            strategy => format!("checkpointing {strategy}, "),
        };
        let (size, execution, mode) = (&self.size, execution.name(), mode.name());
        format!("{size} B{b} T{t}, {attention}, {checkpointing}{precision}, {execution}, {mode}")
    }

    pub fn labels(&self) -> Labels {
        let run = &self.run;
        Labels {
            size: self.size.clone(),
            batch_size: run.batch_size,
            context_length: run.sequence_length,
            attention: run.attention,
            checkpointing: run.checkpointing,
            precision: run.precision,
            execution: run.execution,
            mode: run.mode,
        }
    }

    pub fn is_planned(&self) -> bool {
        self.run.execution == Execution::Planned
    }
}

/// Returns the names of runs: the values in which they differ, and their mode.
pub fn names<'r>(runs: impl IntoIterator<Item = &'r Run>) -> Vec<String> {
    let labels = runs.into_iter().map(|run| {
        let mut labels = run.labels().fields();
        labels.insert("phase", run.run.mode.name()); // names end in it
        labels
    });
    words::names(&labels.collect::<Vec<_>>())
}

/// Appends the table of a run to that of all runs. Rows begin with the run's name, and their fields end with its labels.
pub fn append(all: &mut Report, name: &str, run: &Run, own: Report) {
    all.columns = [vec![Column::text("run", "Run")], own.columns].concat();
    for note in own.notes {
        if !all.notes.contains(&note) {
            all.notes.push(note);
        }
    }
    all.rows.extend(own.rows.into_iter().map(|row| {
        let mut named = Fields::from_iter([("run", name)]);
        named.merge(row).merge(run.labels().fields());
        named
    }));
}
