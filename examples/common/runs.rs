//! The runs of a sweep: every combination of size, batch, length, attention, checkpointing, precision and mode.

use super::effects::{Effect, only};
use super::labels::Labels;
use super::models::{Model, ModelFlags};
use super::modes::{CompileFlag, ModeFlag, OptimizerFlag, can_plan};
use super::precision::PrecisionFlags;
use super::{values, words};
use candle_core::Device;
use clap::Args;
use tallow::Result;
use tallow::attention::Algorithm;
use tallow::bench::{EndToEnd, Execution};
use tallow::memory::Mode;
use tallow::nn::Checkpointing;
use tallow::precision::Precision;
use tallow::report::{Column, Fields, Report};

/// Flags of every example that runs a grid of configurations. A program sets the default of `--mode`.
#[derive(Args, Clone, Debug)]
pub struct GridFlags {
    #[command(flatten)]
    pub models: ModelFlags,

    /// naive or flash; several
    #[arg(long, num_args = 1.., value_delimiter = ',', default_value = "naive", value_name = "NAME")]
    pub attention: Vec<Algorithm>,

    /// Checkpointing: none, block, every-N, sqrt; several
    #[arg(long, num_args = 1.., value_delimiter = ',', default_value = "none", value_name = "NAME")]
    pub checkpoint: Vec<Checkpointing>,

    /// Sequences in a batch; several
    #[arg(long, num_args = 1.., value_delimiter = ',', default_value = "4", value_name = "N")]
    pub batch_size: Vec<usize>,

    /// Tokens in a sequence; several
    #[arg(long, num_args = 1.., value_delimiter = ',', default_value = "256", default_value_if("handout", "2026", "512"), value_name = "N", alias = "sequence-length")]
    pub context_length: Vec<usize>,

    #[command(flatten, next_help_heading = "Run")]
    pub precision: PrecisionFlags,

    /// forward, forward-backward, train-step, all
    #[arg(long, value_enum, num_args = 1.., value_delimiter = ',', value_name = "NAME", help_heading = "Run")]
    pub mode: Vec<ModeFlag>,

    /// adamw, adamw-bf16 with running means in bf16, sgd, lion or muon
    #[arg(long, value_enum, default_value_t = OptimizerFlag::Adamw, value_name = "NAME", help_heading = "Run")]
    pub optimizer: OptimizerFlag,

    /// Planned steps too, or alone with =only
    #[arg(long, value_enum, num_args = 0..=1, require_equals = true, default_missing_value = "both", value_name = "HOW", help_heading = "Run")]
    pub compile: Option<CompileFlag>,

    /// Memory that may be used [default: what is available]
    #[arg(long, value_name = "GIB", value_parser = values::gib, help_heading = "Run")]
    pub memory_limit_gib: Option<f64>,
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

    /// Returns the requested modes, in the order of the flags.
    pub fn modes(&self) -> Vec<Mode> {
        let all = [Mode::Forward, Mode::ForwardBackward, Mode::TrainStep];
        let modes = self.mode.iter().flat_map(|flag| match flag {
            ModeFlag::Forward => &all[..1],
            ModeFlag::ForwardBackward => &all[1..2],
            ModeFlag::TrainStep => &all[2..],
            ModeFlag::All => &all,
        });
        modes.copied().collect()
    }

    pub fn has_backward(&self) -> bool {
        self.modes().iter().any(|mode| *mode != Mode::Forward)
    }

    /// Returns whether any run has this execution.
    pub fn has_execution(&self, execution: Execution) -> bool {
        let mut all = self.precision.precisions().into_iter();
        all.any(|precision| self.runs_in(execution, precision))
    }

    /// Returns whether steps in this precision have this execution. They are eager if they cannot be planned.
    fn runs_in(&self, execution: Execution, precision: Precision) -> bool {
        let planned = self.compile.filter(|_| can_plan(precision));
        match execution {
            Execution::Eager => planned != Some(CompileFlag::Only),
            Execution::Planned => planned.is_some(),
        }
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
        let longest = longest.unwrap_or_default(); // clap requires a length
        self.models.models(longest, &self.attention)
    }

    /// Returns every combination of the flags' lists in these precisions, with the other settings of `base`.
    pub fn runs(
        &self,
        models: &[Model],
        precisions: &[Precision],
        base: &EndToEnd,
    ) -> Vec<EndToEnd> {
        let runs = each(vec![base.clone()], models, |run, model| {
            (run.size, run.config) = (model.name.clone(), model.config.clone());
        });
        let lengths = &self.context_length;
        let runs = each(runs, &self.batch_size, |run, b| run.batch_size = *b);
        let runs = each(runs, lengths, |run, t| run.sequence_length = *t);
        self.variants(runs, precisions)
    }

    /// Returns each of the runs with every combination of the flags' attention, checkpointing, mode and execution, in
    /// these precisions.
    pub fn variants(&self, runs: Vec<EndToEnd>, precisions: &[Precision]) -> Vec<EndToEnd> {
        let runs = each(runs, &self.attention, |run, own| run.attention = *own);
        let runs = each(runs, &self.checkpoint, |run, own| run.checkpointing = *own);
        let runs = each(runs, precisions, |run, own| run.step.precision = *own);
        let runs = each(runs, &self.modes(), |run, mode| run.mode = *mode);
        let both = [Execution::Eager, Execution::Planned];
        let mut runs = each(runs, &both, |run, own| run.execution = *own);
        runs.retain(|run| self.runs_in(run.execution, run.step.precision));
        for run in &mut runs {
            if !run.execution.is_planned_step(run.mode) {
                run.step = run.step.precision.into(); // without the settings of planned training steps
            }
            run.step.optimizer = self.optimizer.rule(run.seed);
        }
        runs
    }

    /// Sets the available memory of each run, and prepares the process if that is tight.
    pub fn set_available_memory(&self, runs: &mut [EndToEnd], device: &Device) -> Result<()> {
        let limit = self.memory_limit_gib;
        let available_bytes = super::memory::available_bytes(device, limit, &*runs)?;
        for run in runs {
            run.available_bytes = available_bytes;
        }
        Ok(())
    }
}

/// Returns each of the runs with each of the values, which `set` sets.
pub fn each<V>(
    runs: Vec<EndToEnd>,
    values: &[V],
    set: impl Fn(&mut EndToEnd, &V),
) -> Vec<EndToEnd> {
    let mut all = Vec::new();
    for run in &runs {
        for value in values {
            let mut run = run.clone();
            set(&mut run, value);
            all.push(run);
        }
    }
    all
}

/// Returns a run's name in progress messages and file names.
pub fn title(run: &EndToEnd) -> String {
    let checkpointing = match run.checkpointing {
        Checkpointing::None => String::new(),
        strategy => format!("checkpointing {strategy}, "),
    };
    let (size, b, t) = (&run.size, run.batch_size, run.sequence_length);
    let (attention, precision) = (run.attention, run.step.precision);
    let (execution, mode) = (run.execution.name(), run.mode.name());
    format!("{size} B{b} T{t}, {attention}, {checkpointing}{precision}, {execution}, {mode}")
}

/// Returns the names of runs: the values in which they differ, and their mode.
pub fn names<'r>(runs: impl IntoIterator<Item = &'r EndToEnd>) -> Vec<String> {
    let labels = runs.into_iter().map(|run| {
        let mut labels = Labels::of(run).fields();
        labels.insert("phase", run.mode.name()); // names end in it
        labels
    });
    words::names(&labels.collect::<Vec<_>>())
}

/// Appends the table of a run to that of all runs. Rows begin with the run's name, and their fields end with its labels.
pub fn append(all: &mut Report, name: &str, run: &EndToEnd, own: Report) {
    all.columns = [vec![Column::text("run", "Run")], own.columns].concat();
    for note in own.notes {
        if !all.notes.contains(&note) {
            all.notes.push(note);
        }
    }
    for row in own.rows {
        let mut named = Fields::from_iter([("run", name)]);
        named.merge(row).merge(Labels::of(run).fields());
        all.rows.push(named);
    }
}
