//! The end-to-end benchmark of models, shared by `e2e_benchmark`, `compiled_benchmark` and `mixed_precision_benchmark`:
//! the sweep, its table and its answers. The programs differ in the defaults of their flags.

mod answers;
mod configuration;
mod isolated;
mod reasons;
mod table;
mod warmup;

use crate::common::effects::{self, Effect, only};
use crate::common::labels::Labels;
use crate::common::models::{Model, describe};
use crate::common::modes::CompileFlag;
use crate::common::runs::{GridFlags, each, title};
use crate::common::{self, Common, Output, Sweep, rates, values, words};
use answers::{of_runs, of_values};
use clap::{CommandFactory, Parser, ValueEnum};
use configuration::Configuration;
use std::process::ExitCode;
use table::{By, Compared, Row};
use tallow::Result;
use tallow::bench::{EndToEnd, Execution, alternate};
use tallow::compile::StepConfig;
use tallow::memory::Mode;
use tallow::model::flops;
use tallow::precision::Precision;
use tallow::report::{Fields, Report, counted, list_in_note};
use words::grouped;

/// The flags of the three programs.
#[derive(Parser)]
#[command(version, next_help_heading = "Model")]
#[command(mut_arg("context_length", |arg| arg.help("Tokens in a sequence; several [default: 256]")))]
pub struct Flags {
    #[command(flatten)]
    grid: GridFlags,

    /// Models as batch, tokens, width, layers, heads; several
    #[arg(long, num_args = 1.., value_delimiter = ',', value_name = "B-T-D-L-H", help_heading = "Model")]
    config: Vec<Configuration>,

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
    #[arg(
        long,
        value_enum,
        default_value = "summary",
        value_name = "NAME",
        help_heading = "Output"
    )]
    view: View,

    #[command(flatten, next_help_heading = "Output")]
    output: Output,

    #[command(flatten, next_help_heading = "Environment")]
    common: Common,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum View {
    Summary,
    Phases,
}

/// The settings in which the programs differ.
#[derive(Clone, Copy, Default)]
pub struct Program {
    /// The models that are measured if no flag names one.
    pub models: &'static [&'static str],
    /// Whether f32 is always measured, and kept casts in addition to dropped casts.
    pub compares_precisions: bool,
    /// Whether calls and memory traffic of training steps are counted.
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
    let grid = &mut flags.grid;
    grid.models.fill_context(&mut grid.context_length, &[256]);
    if flags.config.is_empty() && !grid.models.names_a_model() {
        let models = program.models.iter().filter_map(|name| name.parse().ok());
        flags.config.extend(models);
    }
    common::run(|| flags.common.around(|| flags.run(program)))
}

impl Flags {
    fn effects(&self, program: Program) -> Vec<Effect> {
        let grid = &self.grid;
        let executions = [Execution::Eager, Execution::Planned].into_iter();
        let executions = executions.filter(|one| grid.has_execution(*one)).count();
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
                executions == 1 && self.precisions(program).len() == 1,
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
        let (models, mut runs) = self.runs(&precisions)?;
        if let Some(index) = self.isolated_run {
            runs = runs.into_iter().skip(index).take(1).collect();
        }
        if !self.isolate {
            self.grid.set_available_memory(&mut runs, &device)?;
        }
        if self.isolated_run.is_some() {
            let rows = alternate(&runs, self.rounds, &device, |_, _, _| ())?;
            return isolated::answer(&rows.concat());
        }
        let compared = self.compared(&runs);
        let mut report = Report {
            environment: self.common.environment(&device),
            configuration: self.configuration(&models),
            columns: compared.columns(),
            ..Default::default()
        };
        let groups = groups(&runs, &compared);
        let mut sweep = Sweep::new(groups.len())?;
        let mut rows: Vec<Row> = Vec::new();
        for group in &groups {
            let first = &runs[group[0]];
            if !sweep.begins(format_args!(
                "{}, warm-up {}",
                title(first),
                first.warmup_steps
            )) {
                break;
            }
            let measured = match self.isolate {
                true => group
                    .iter()
                    .map(|&i| isolated::run(i))
                    .collect::<Result<_>>()?,
                false => {
                    let own: Vec<_> = group.iter().map(|&i| runs[i].clone()).collect();
                    alternate(&own, self.rounds, &device, |_, _, _| ())?
                }
            };
            for (&i, own) in group.iter().zip(measured) {
                for row in own {
                    let is_step = row.phase == "train step" && row.time.is_some();
                    let counted = match is_step && program.counts && compared.is_any() {
                        true => reasons::count(&runs[i], &device)?,
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
        let rates = rates::of_precisions(&device, &precisions)?;
        for Row { row, .. } in &mut rows {
            let rate = rates.as_ref();
            let rate = rate.and_then(|rates| rates.matmul_rate(row.precision.dtype()));
            if let Some(time) = &mut row.time {
                time.set_mfu(rate);
            }
        }
        compared.show(&rows, &mut report);
        let rates = rates.as_ref().map(|rates| rates.to_string());
        report.configuration.insert("measured rates", rates);
        report.environment = self.common.environment(&device);
        report.notes = self.notes(&precisions, &rows, &report.rows);
        report.notes.extend(sweep.note());
        let comparisons = compared.comparisons(&rows);
        report.answers = of_runs(&rows);
        if self.is_about_warmup() {
            let answers = warmup::answers(&rows, self.isolate);
            report.answers.extend(answers);
        }
        report.answers.extend(of_values(&comparisons, &compared));
        report.details.extend(reasons::table(&comparisons));
        self.output.publish(&report)
    }

    fn is_about_warmup(&self) -> bool {
        self.isolate || self.warmup_steps.len() > 1
    }

    /// Returns the precisions of the flags. If the program compares precisions, f32 comes first, and each precision
    /// that drops casts follows the one that keeps them.
    fn precisions(&self, program: Program) -> Vec<Precision> {
        let named = self.grid.precision.precisions();
        if !program.compares_precisions {
            return named;
        }
        let mut all = vec![Precision::F32];
        for precision in named {
            for one in [precision.with_dropped_casts(false), precision] {
                if !all.contains(&one) {
                    all.push(one);
                }
            }
        }
        all
    }

    fn compared(&self, runs: &[EndToEnd]) -> Compared {
        let distinct = |name: fn(&EndToEnd) -> &'static str| {
            let groups = grouped(runs, |run| name(run)).into_iter();
            groups.map(|(name, _)| name).collect()
        };
        let executions = distinct(|run| run.execution.name());
        let precisions = distinct(|run| run.step.precision.name());
        Compared::new(executions, precisions, self.view == View::Phases)
    }

    /// Returns the notes on how to read the table, and on its rows.
    fn notes(&self, precisions: &[Precision], rows: &[Row], fields: &[Fields]) -> Vec<String> {
        let modes = self.grid.modes();
        let mut notes = vec![format!(
            "Times are mean ± standard deviation of {}. Speed-ups and ratios are ratios of means; unclear: their two \
             standard errors exceed 20%.",
            counted(self.steps * self.rounds, "step")
        )];
        if modes.iter().any(|mode| *mode != Mode::Forward) {
            notes.push(
                "Forward alone computes no loss and records no graph; in the other modes it does both. F+B is forward, \
                 loss and backward; Backward is its part if F+B ran. B+O is backward and optimizer."
                    .into(),
            );
        }
        if modes.contains(&Mode::ForwardBackward) && self.grid.has_execution(Execution::Planned) {
            notes.push(
                "A planned F+B is a training step without its update: its memory includes the optimizer's state."
                    .into(),
            );
        }
        if modes.len() > 1 {
            notes.push(
                "Memory and tokens/s are of the longest mode in the line, for instance of the training step."
                    .into(),
            );
        }
        if rows.iter().any(|row| {
            row.time
                .as_ref()
                .is_some_and(|time| time.mfu_percent.is_some())
        }) {
            let note = "MFU is relative to the measured rate of matmuls in the row's precision.";
            notes.push(note.into());
        }
        notes.extend(self.grid.not_planned(precisions));
        let is_skipped = |row: &Row| {
            row.loss_scaling
                .as_ref()
                .is_some_and(|own| own.skipped_steps > 0)
        };
        let names = words::names(fields).into_iter().zip(rows);
        let skipped: Vec<String> = names
            .filter(|(_, row)| is_skipped(row))
            .map(|(name, _)| name)
            .collect();
        if !skipped.is_empty() {
            let start =
                "f16 gradients overflowed at the loss scale, so these made steps without an update";
            notes.push(list_in_note(start, &skipped));
        }
        if rows.iter().any(|row| row.time.is_none()) {
            notes.extend(words::out_of_memory(fields));
        }
        notes
    }

    /// Returns the models, and every combination of the flags' lists.
    fn runs(&self, precisions: &[Precision]) -> Result<(Vec<Model>, Vec<EndToEnd>)> {
        let mut models = match self.config.is_empty() || self.grid.models.names_a_preset() {
            true => self.grid.models()?,
            false => Vec::new(),
        };
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
        let mut runs = self.grid.runs(&models, precisions, &base);
        for own in &self.config {
            let grid = GridFlags {
                batch_size: vec![own.batch_size],
                context_length: vec![own.model.context_length],
                ..self.grid.clone()
            };
            let config = grid.models.resized(own.model.clone());
            config.validate()?;
            models.push(Model {
                name: own.name.clone(),
                config,
            });
            runs.extend(grid.runs(&models[models.len() - 1..], precisions, &base));
        }
        let runs = each(runs, &self.warmup_steps, |run, n| run.warmup_steps = *n);
        Ok((models, runs))
    }

    fn configuration(&self, models: &[Model]) -> Fields {
        let mut optimizer = self.grid.optimizer.name().to_string();
        if self.optimizer_in_backward {
            optimizer += "; in backward where a train step is planned";
        }
        let mut fields = describe(models);
        fields
            .insert("optimizer", optimizer)
            .insert("steps", self.steps)
            .insert("rounds", self.rounds)
            .insert(
                "accumulation",
                (self.accumulation > 1).then_some(self.accumulation),
            )
            .insert("FLOPs", flops::FORMULA);
        fields
    }
}

/// Groups the indices of runs that differ only in the compared label.
fn groups(runs: &[EndToEnd], compared: &Compared) -> Vec<Vec<usize>> {
    let groups = grouped(0..runs.len(), |i| {
        let mut labels = Labels::of(&runs[*i]);
        match compared.by {
            By::Execution => labels.execution = Execution::Eager,
            By::Precision => labels.precision = Precision::F32,
        }
        (labels, runs[*i].warmup_steps)
    });
    groups.into_iter().map(|(_, group)| group).collect()
}
