//! The end-to-end benchmark of models, shared by `e2e_benchmark`, `compiled_benchmark` and `mixed_precision_benchmark`:
//! the sweep, its table and its answers. The programs differ in the defaults of their flags.

mod answers;
mod isolated;
mod reasons;
mod table;
mod warmup;

use crate::common::effects::{self, Effect, only};
use crate::common::labels::Labels;
use crate::common::models::sizes;
use crate::common::modes::CompileFlag;
use crate::common::runs::{GridFlags, each, title};
use crate::common::{self, Common, Output, Sweep, rates, stdout, values, words};
use answers::{of_runs, of_values};
use clap::{CommandFactory, Parser};
use indexmap::IndexSet;
use serde_json::Value;
use std::process::ExitCode;
use table::{Compared, Row};
use tallow::Result;
use tallow::bench::{EndToEnd, Execution, alternate};
use tallow::compile::StepConfig;
use tallow::memory::Mode;
use tallow::model::{TransformerConfig, flops};
use tallow::precision::Precision;
use tallow::report::{Fields, Report, counted, list_in_note};
use words::grouped;

/// The flags of the three programs.
#[derive(Parser)]
#[command(version, next_help_heading = "Model")]
pub struct Flags {
    #[command(flatten)]
    grid: GridFlags,

    /// Models as batch, tokens, width, layers, heads; several
    #[arg(long, num_args = 1.., value_delimiter = ',', value_name = "B-T-D-L-H", value_parser = configuration, help_heading = "Model")]
    config: Vec<EndToEnd>,

    /// Unmeasured steps before the measured ones; several
    #[arg(long, num_args = 1.., value_delimiter = ',', default_value = "5", value_name = "N", value_parser = values::count_from_0(), help_heading = "Run")]
    warmup_steps: Vec<usize>,

    /// Measured steps
    #[arg(long, default_value_t = 10, value_name = "N", value_parser = values::count(), alias = "iterations", help_heading = "Run")]
    steps: usize,

    /// Rounds in which compared runs take turns
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = values::count(), help_heading = "Run")]
    rounds: usize,

    /// Run each configuration in a new process
    #[arg(long, help_heading = "Run")]
    isolate: bool,

    /// The number of the run of such a process
    #[arg(long, hide = true)]
    isolated_run: Option<usize>,

    /// Batches of a planned step, whose gradients are averaged
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = values::count(), help_heading = "Run")]
    accumulation: usize,

    /// Most memory of a planned step's arena
    #[arg(long, value_name = "GIB", value_parser = values::gib, help_heading = "Run")]
    memory_budget_gib: Option<f64>,

    /// Planned steps update parameters in backward
    #[arg(long, help_heading = "Run")]
    optimizer_in_backward: bool,

    /// summary, or phases: all statistics of each phase
    #[arg(long, value_parser = ["summary", "phases"], default_value = "summary", value_name = "NAME", help_heading = "Output")]
    view: String,

    #[command(flatten, next_help_heading = "Output")]
    output: Output,

    #[command(flatten, next_help_heading = "Environment")]
    common: Common,
}

/// The settings in which the programs differ.
#[derive(Clone, Copy, Default)]
pub struct Program {
    /// The value of `--config` if no flag names a model.
    pub config: Option<&'static str>,
    /// Whether f32 is always measured, and kept casts in addition to dropped casts.
    pub compares_precisions: bool,
    /// Whether the calls of training steps are counted.
    pub counts: bool,
}

/// Runs a program with its help texts and its defaults, which are listed by the flags' ids.
pub fn main(
    program: Program,
    about: &'static str,
    examples: &'static str,
    defaults: &'static [(&'static str, &'static [&'static str])],
) -> ExitCode {
    let command = Flags::command().about(about).after_help(examples);
    let command = defaults.iter().fold(command, |command, (id, values)| {
        command.mut_arg(id, |arg| arg.default_values(*values))
    });
    let mut flags: Flags = effects::parse(command, |flags: &Flags| flags.effects(program));
    let models = &flags.grid.models;
    if !(models.names_a_preset() || models.names_a_single_model()) && flags.config.is_empty() {
        let config = program.config.map(configuration);
        flags.config.extend(config.into_iter().flatten());
    }
    common::run(|| flags.common.around(|| flags.run(program)))
}

impl Flags {
    fn effects(&self, program: Program) -> Vec<Effect> {
        let grid = &self.grid;
        let [eager, planned] = [Execution::Eager, Execution::Planned];
        let compares_executions = grid.has_execution(eager) && grid.has_execution(planned);
        let is_planned = grid.compile == Some(CompileFlag::Only);
        let mut effects = grid.effects();
        effects.extend([
            only(
                "without --config, or with a preset too",
                self.config.is_empty() || grid.models.names_a_preset(),
                &["batch-size", "context-length"],
            ),
            only(
                "where nothing is compared: in one precision, without --compile",
                !compares_executions && self.precisions(program).len() == 1,
                &["view"],
            ),
            only(
                "in a planned training step: with --compile and --mode train-step",
                grid.has_planned_step(),
                &["memory-budget-gib", "optimizer-in-backward"],
            ),
            only(
                "where all runs are planned training steps: with --compile=only --mode train-step",
                is_planned && grid.modes() == [Mode::TrainStep],
                &["accumulation"],
            ),
        ]);
        effects
    }

    fn run(&self, program: Program) -> Result<()> {
        if self.grid.compile == Some(CompileFlag::Only) {
            common::take_blocks_from_the_system();
        }
        self.output.check_with([])?;
        let device = self.common.device()?;
        let precisions = self.precisions(program);
        let mut runs = self.runs(&precisions)?;
        if let Some(index) = self.isolated_run {
            runs = runs.into_iter().skip(index).take(1).collect();
        }
        if !self.isolate || self.isolated_run.is_some() {
            self.grid.set_available_memory(&mut runs, &device)?; // of isolated runs each process does
        }
        if self.isolated_run.is_some() {
            let rows = alternate(&runs, self.rounds, &device, |_, _, _| ())?;
            let rows = serde_json::to_string(&rows.concat());
            return stdout::line(rows.unwrap_or_default());
        }
        let compared = self.compared(&runs);
        let mut report = Report {
            environment: self.common.environment(&device),
            configuration: self.configuration(&runs),
            columns: compared.columns(),
            ..Default::default()
        };
        // Runs that differ only in the compared label take turns.
        let groups = grouped(runs.into_iter().enumerate(), |(_, run)| {
            let mut labels = Labels::of(run).fields();
            labels.insert(compared.by.key(), Value::Null);
            (labels, run.warmup_steps)
        });
        let mut sweep = Sweep::new(groups.len())?;
        let mut rows: Vec<Row> = Vec::new();
        for ((_, warmup_steps), group) in groups {
            let (indices, runs): (Vec<usize>, Vec<EndToEnd>) = group.into_iter().unzip();
            let indices = indices.into_iter();
            if !sweep.begins(format!("{}, warm-up {warmup_steps}", title(&runs[0]))) {
                break;
            }
            let measured = match self.isolate {
                true => indices.map(isolated::run).collect::<Result<_>>()?,
                false => alternate(&runs, self.rounds, &device, |_, _, _| ())?,
            };
            for (run, own) in runs.iter().zip(measured) {
                for row in own {
                    let is_step = row.phase == "train step" && row.time.is_some();
                    let counted = match is_step && program.counts && compared.is_any() {
                        true => reasons::count(run, &device)?,
                        false => None,
                    };
                    rows.push(Row { row, counted });
                }
            }
            if self.output.output.is_some() {
                compared.show(&rows, &mut report);
                self.output.save_so_far(&report)?;
            }
        }
        // Runs must not find the machine warmed up by this measurement.
        if let Some(rates) = rates::of_precisions(&device, &precisions)? {
            for Row { row, .. } in &mut rows {
                if let Some(time) = &mut row.time {
                    time.set_mfu(rates.matmul_rate(row.precision.dtype()));
                }
            }
            let configuration = &mut report.configuration;
            configuration.insert("measured rates", rates.to_string());
        }
        compared.show(&rows, &mut report);
        report.environment = self.common.environment(&device);
        report.notes = self.notes(&compared, &precisions, &rows, &report.rows);
        report.notes.extend(sweep.note());
        let comparisons = compared.comparisons(&rows);
        report.answers = of_runs(&rows);
        if self.isolate || self.warmup_steps.len() > 1 {
            let answers = warmup::answers(&rows, self.isolate);
            report.answers.extend(answers);
        }
        report.answers.extend(of_values(&comparisons, &compared));
        self.output.publish(&report)
    }

    /// Returns the precisions of the flags. If the program compares precisions, f32 comes first, and each precision
    /// that drops casts follows the one that keeps them.
    fn precisions(&self, program: Program) -> Vec<Precision> {
        let named = self.grid.precision.precisions();
        if !program.compares_precisions {
            return named;
        }
        let pairs = named.into_iter();
        let pairs = pairs.flat_map(|one| [one.with_dropped_casts(false), one]);
        let all: IndexSet<_> = [Precision::F32].into_iter().chain(pairs).collect();
        all.into_iter().collect()
    }

    fn compared(&self, runs: &[EndToEnd]) -> Compared {
        let distinct = |name: fn(&EndToEnd) -> &'static str| {
            let names: IndexSet<_> = runs.iter().map(name).collect();
            names.into_iter().collect()
        };
        let executions = distinct(|run| run.execution.name());
        let precisions = distinct(|run| run.step.precision.name());
        Compared::new(executions, precisions, self.view == "phases")
    }

    /// Returns the notes on how to read the table, and on its rows.
    fn notes(
        &self,
        compared: &Compared,
        precisions: &[Precision],
        rows: &[Row],
        fields: &[Fields],
    ) -> Vec<String> {
        let modes = self.grid.modes();
        let has_mfu = |row: &Row| row.time.as_ref().is_some_and(|t| t.mfu_percent.is_some());
        let plans_f_b =
            modes.contains(&Mode::ForwardBackward) && self.grid.has_execution(Execution::Planned);
        let times = format!(
            "Times are mean ± standard deviation of {}. Speed-ups and ratios are ratios of means; unclear: their two \
             standard errors exceed 20%.",
            counted(self.steps * self.rounds, "step")
        );
        let notes = [
            (true, &times[..]),
            (
                self.grid.has_backward(),
                "Forward alone computes no loss and records no graph; in the other modes it does both. F+B is forward, \
                 loss and backward; Backward is its part if F+B ran. B+O is backward and optimizer.",
            ),
            (
                plans_f_b,
                "A planned F+B is a training step without its update: its memory includes the optimizer's state.",
            ),
            (
                modes.len() > 1 && !compared.by_phase,
                "Memory and tokens/s are of the longest mode in the line, for instance of the training step.",
            ),
            (
                !compared.is_any() && rows.iter().any(has_mfu),
                "MFU is relative to the measured rate of matmuls in the row's precision.",
            ),
        ];
        let notes = notes.into_iter().filter(|(holds, _)| *holds);
        let mut notes: Vec<String> = notes.map(|(_, note)| note.into()).collect();
        notes.extend(self.grid.not_planned(precisions));
        let skips = |row: &Row| row.loss_scaling.as_ref().map_or(0, |own| own.skipped_steps) > 0;
        let named = words::names(fields).into_iter().zip(rows);
        let skipped = named.filter_map(|(name, row)| skips(row).then_some(name));
        let skipped: Vec<String> = skipped.collect();
        if !skipped.is_empty() {
            let start =
                "f16 gradients overflowed at the loss scale, so these made steps without an update";
            notes.push(list_in_note(start, &skipped));
        }
        notes.extend(words::out_of_memory(fields));
        notes
    }

    /// Returns every combination of the flags' lists.
    fn runs(&self, precisions: &[Precision]) -> Result<Vec<EndToEnd>> {
        let grid = &self.grid;
        let base = EndToEnd {
            steps: self.steps,
            seed: self.common.seed,
            step: StepConfig {
                accumulation: self.accumulation,
                optimizer_in_backward: self.optimizer_in_backward,
                memory_budget_bytes: self.memory_budget_gib.map(common::gib_bytes),
                ..Default::default()
            },
            ..Default::default()
        };
        let mut runs = match self.config.is_empty() || grid.models.names_a_preset() {
            true => grid.runs(&grid.models()?, precisions, &base),
            false => Vec::new(),
        };
        for own in &self.config {
            let run = EndToEnd {
                size: own.size.clone(),
                config: grid.models.resized(own.config.clone()),
                batch_size: own.batch_size,
                sequence_length: own.sequence_length,
                ..base.clone()
            };
            run.config.validate()?;
            runs.extend(grid.variants(vec![run], precisions));
        }
        let warmups = &self.warmup_steps;
        Ok(each(runs, warmups, |run, n| run.warmup_steps = *n))
    }

    fn configuration(&self, runs: &[EndToEnd]) -> Fields {
        let mut optimizer = self.grid.optimizer.name().unwrap_or_default();
        if self.optimizer_in_backward {
            optimizer += "; in backward where a train step is planned";
        }
        let accumulation = Some(self.accumulation).filter(|batches| *batches > 1);
        let models = runs
            .iter()
            .map(|run| (format!("model {}", run.size), sizes(&run.config)));
        let mut fields: Fields = models.collect();
        fields
            .insert("optimizer", optimizer)
            .insert("steps", self.steps)
            .insert("rounds", self.rounds)
            .insert("accumulation", accumulation)
            .insert("FLOPs", flops::FORMULA);
        fields
    }
}

/// Parses `B-T-D-L-H`: batch, tokens, width, layers, heads. The feed-forward network is four times as wide as the model.
fn configuration(name: &str) -> std::result::Result<EndToEnd, String> {
    let sizes: Option<Vec<usize>> = name.split('-').map(|size| size.parse().ok()).collect();
    let Some(&[batch_size, context_length, d_model, num_layers, num_heads]) = sizes.as_deref()
    else {
        return Err("expected batch-tokens-width-layers-heads, such as 4-256-256-4-8".into());
    };
    if !(1..1 << 32).contains(&batch_size) {
        return Err("the batch must be at least 1 and under 2^32".into());
    }
    let config = TransformerConfig {
        context_length,
        d_model,
        d_ff: d_model.saturating_mul(4),
        num_layers,
        num_heads,
        ..Default::default()
    };
    config.validate().map_err(|error| error.to_string())?;
    Ok(EndToEnd {
        size: name.into(),
        config,
        batch_size,
        sequence_length: context_length,
        ..Default::default()
    })
}
