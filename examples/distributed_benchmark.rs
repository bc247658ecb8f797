//! Times collectives and training steps of several ranks, measures a rank's memory, and estimates steps of more GPUs.
//!
//! The second half of Stanford CS336's second assignment. Ranks are threads of this process, or with `--gpus`,
//! torchrun, srun or mpirun processes. Each has its own batch. Times are rank 0's. `--help` has examples.

#![deny(clippy::print_stdout, clippy::print_stderr)] // common::stdout and common::print_progress do not panic

#[path = "distributed_benchmark/accounting.rs"]
mod accounting;
#[path = "distributed_benchmark/answers.rs"]
mod answers;
#[path = "distributed_benchmark/collectives.rs"]
mod collectives;
mod common;
#[path = "distributed_benchmark/memory.rs"]
mod memory;
#[path = "distributed_benchmark/paper.rs"]
mod paper;
#[path = "distributed_benchmark/steps.rs"]
mod steps;

use accounting::AccountingFlags;
use clap::{Args, CommandFactory, Parser, ValueEnum};
use common::effects::{self, Effect, names_gpu, only, only_group};
use common::models::{Model, ModelFlags, describe};
use common::precision::PrecisionFlags;
use common::ranks::RankFlags;
use common::ways::Way;
use common::{Common, Output, Sweep, gib_bytes, values};
use paper::PaperFlags;
use serde::Serialize;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::mpsc::channel;
use steps::Ways;
use tallow::attention::Algorithm;
use tallow::bench::Stopwatch;
use tallow::compile::StepConfig;
use tallow::distributed::{self, Communicator, Ranks};
use tallow::report::{Column, Fields, Report, Statistics, counted};
use tallow::{Error, Result};

/// Times collectives and training steps of several ranks, and measures their memory
#[derive(Parser)]
#[command(version, after_help = EXAMPLES)]
struct Flags {
    /// collectives, steps, memory, paper, accounting; several
    #[arg(long, value_enum, num_args = 1.., value_delimiter = ',', default_values = ["collectives", "steps"],
          value_name = "PART")]
    part: Vec<Part>,

    /// Ranks as threads, on the CPU [default: 2]
    #[arg(long, value_name = "N", conflicts_with = "gpus")]
    ranks: Option<NonZeroUsize>,

    /// Sizes of a rank's buffer in collectives
    #[arg(long, num_args = 1.., value_delimiter = ',', default_values_t = [1, 10, 100, 1024], value_name = "MIB")]
    mib: Vec<usize>,

    #[command(flatten)]
    models: ModelFlags,

    #[command(flatten)]
    precision: PrecisionFlags,

    /// naive or flash
    #[arg(long, default_value_t = Algorithm::Naive, value_name = "NAME")]
    attention: Algorithm,

    /// Sequences in a rank's batch
    #[arg(long, default_value_t = 4, value_name = "B", value_parser = values::count())]
    batch_size: usize,

    /// Tokens in a sequence
    #[arg(long, default_value_t = 256, overrides_with = "context_length", default_value_if("handout", "2026", "512"), value_name = "T", alias = "sequence-length", value_parser = values::count())]
    context_length: usize,

    #[command(flatten)]
    ways: Ways,

    /// Steps before those that are timed
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = values::count_from_0())]
    warmup_steps: usize,

    /// Steps that are timed
    #[arg(long, default_value_t = 10, value_name = "N", alias = "iterations", value_parser = values::count())]
    steps: usize,

    /// Save a trace of rank 0's steps for Perfetto, a file for each row
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,

    #[command(flatten)]
    paper: PaperFlags,

    #[command(flatten)]
    accounting: AccountingFlags,

    #[command(flatten)]
    processes: RankFlags,

    #[command(flatten)]
    output: Output,

    #[command(flatten)]
    common: Common,
}

const EXAMPLES: &str = "\
Examples:
  distributed_benchmark --ranks 2 --part steps --bucket-mib 1 10 100
  distributed_benchmark --ranks 2 --part memory --strategy replicated sharded-optimizer fully-shard
  distributed_benchmark --part accounting
  distributed_benchmark --part paper --product-tflops 600 --memory-gb-s 4000 \\
    --reduce-gb-s 330 150 120 --gather-gb-s 190 --strategy replicated sharded-optimizer fully-shard";

/// The values of `--part`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    Collectives,
    Steps,
    Memory,
    Paper,
    Accounting,
}
use Part::{Accounting, Collectives, Memory, Paper, Steps};

/// Parts that run on ranks.
const MEASURED: [Part; 3] = [Collectives, Steps, Memory];

/// Parts that plan training steps.
const OF_STEPS: [Part; 3] = [Steps, Memory, Paper];

/// Parts about models.
const OF_MODELS: [Part; 4] = [Steps, Memory, Paper, Accounting];

/// Returns the condition that one of these parts is given.
fn in_words(parts: &[Part]) -> String {
    let names = parts.iter().map(|part| format!("{part:?}").to_lowercase());
    format!("with --part {}", names.collect::<Vec<_>>().join(" or "))
}

fn main() -> ExitCode {
    let flags = effects::parse(Flags::command(), Flags::effects);
    match flags.processes.launched() {
        Some(code) => code,
        None => common::run(|| flags.run()),
    }
}

impl Flags {
    /// Returns what the flags' effects depend on.
    fn effects(&self) -> Vec<Effect> {
        let with = |parts: &[Part], flags: &[&str]| only(in_words(parts), self.has(parts), flags);
        let on_threads = matches!(self.ranks_as_threads(), Ok(Some(_)));
        let mut effects = self.processes.effects(&self.common);
        effects.extend([
            only(
                "on the CPU, without torchrun, srun or mpirun",
                on_threads,
                &["ranks"],
            ),
            with(&MEASURED, &["ranks"]),
            with(&[Collectives], &["mib"]),
            with(&[Steps, Memory], &["without-alone", "seed"]),
            with(&[Collectives, Steps], &["warmup-steps", "steps"]),
            with(&[Steps], &["trace"]),
            with(&OF_MODELS, &["batch-size", "context-length"]),
            self.with_group::<ModelFlags>(&OF_MODELS),
            with(&OF_STEPS, &["attention"]),
            self.with_group::<PrecisionFlags>(&OF_STEPS),
            self.with_group::<Ways>(&OF_STEPS),
            self.with_group::<PaperFlags>(&[Paper]),
            self.with_group::<AccountingFlags>(&[Accounting]),
        ]);
        effects
    }

    fn with_group<G: Args>(&self, parts: &[Part]) -> Effect {
        only_group::<G>(in_words(parts), self.has(parts))
    }

    /// Returns the B and T of a rank.
    fn sizes(&self) -> [usize; 2] {
        [self.batch_size, self.context_length]
    }

    /// Whether one of these parts is measured.
    fn has(&self, parts: &[Part]) -> bool {
        self.part.iter().any(|part| parts.contains(part))
    }

    /// Returns the number of ranks that are threads of this process; `None` where ranks are processes or GPUs.
    fn ranks_as_threads(&self) -> Result<Option<usize>> {
        let are_processes = Ranks::from_env()?.is_some() || self.processes.gpus.is_some();
        let ranks = self.ranks.map_or(2, NonZeroUsize::get);
        Ok((!are_processes && !names_gpu(&self.common)).then_some(ranks))
    }

    fn run(&self) -> Result<()> {
        let Some(ranks) = self.ranks_as_threads()? else {
            return self.run_rank(self.processes.join(&self.common)?);
        };
        let ranks = distributed::threads(ranks)?;
        let (sender, ended) = channel();
        std::thread::scope(|scope| {
            for rank in ranks {
                let sender = sender.clone();
                scope.spawn(move || sender.send(self.run_rank(rank)));
            }
        });
        drop(sender);
        // A rank that fails takes the others with it: its own error says why.
        let errors = ended.into_iter().filter_map(Result::err);
        let first = errors.min_by_key(|error| matches!(error, Error::Rank { .. }));
        first.map_or(Ok(()), Err)
    }

    /// Runs all parts as one rank. Rank 0 prints them.
    fn run_rank(&self, communicator: Communicator) -> Result<()> {
        self.common.around(|| {
            let is_first = communicator.rank() == 0;
            if is_first {
                self.output.check_with([&self.trace])?;
            }
            let rank = Rank {
                flags: self,
                communicator,
                are_threads: self.ranks_as_threads()?.is_some(),
                models: self.models.models(self.context_length, &[self.attention])?,
                step: StepConfig {
                    precision: self.precision.precision()?,
                    memory_budget_bytes: self.ways.memory_budget_gib.map(gib_bytes),
                    ..Default::default()
                },
            };
            let reports = self.part.iter().map(|part| match part {
                Collectives => rank.collectives(),
                Steps => rank.training_steps(),
                Memory => rank.memory(),
                Paper => rank.paper(),
                Accounting => Ok(rank.accounting()),
            });
            let mut reports = reports.collect::<Result<Vec<Report>>>()?;
            let report = Report {
                environment: self.common.environment(rank.communicator.device()),
                configuration: rank.configuration()?,
                details: reports.split_off(1),
                ..reports.remove(0)
            };
            match is_first {
                true => self.output.publish(&report),
                false => Ok(()), // all ranks have the same tables
            }
        })
    }
}

/// Returns a table without rows.
fn table(title: &str, columns: Vec<Column>, notes: &[&str]) -> Report {
    Report {
        title: title.into(),
        columns,
        notes: notes.iter().map(|note| note.to_string()).collect(),
        ..Default::default()
    }
}

/// Returns the row of a measurement: the model, the way and the figures.
fn row(model: &Model, way: Way, figures: &impl Serialize) -> Result<Fields> {
    let mut row = Fields::from_iter([("model", model.name.as_str())]);
    row.insert("strategy", way.strategy())
        .insert("exchange", way.exchange())
        .merge(Fields::of(figures)?);
    Ok(row)
}

/// A rank of the job, which measures the parts.
struct Rank<'f> {
    flags: &'f Flags,
    communicator: Communicator,
    /// Whether ranks are threads of this process.
    are_threads: bool,
    models: Vec<Model>,
    step: StepConfig,
}

/// A model with what was measured of each way.
type Measured<'m, T> = (&'m Model, Vec<(Way, T)>);

impl Rank<'_> {
    /// Returns the sweep of `runs` runs, of which rank 0 shows the progress.
    fn sweep(&self, runs: usize) -> Sweep {
        Sweep::of_rank(runs, self.communicator.rank() == 0)
    }

    fn timed(&self, work: impl FnMut() -> Result<()>) -> Result<Statistics> {
        let stopwatch = Stopwatch::new(self.communicator.device());
        let mut stopwatch = stopwatch.warmup(self.flags.warmup_steps);
        stopwatch.measure(self.flags.steps, work)?.statistics()
    }

    /// Measures each model with each strategy and exchange.
    fn measure<T>(
        &self,
        part: &str,
        measure: impl Fn(&Model, Way) -> Result<T>,
    ) -> Result<Vec<Measured<'_, T>>> {
        let ways = self.flags.ways.all();
        let mut sweep = self.sweep(self.models.len() * ways.len());
        let of_models = self.models.iter().map(|model| {
            let of_ways = ways.iter().map(|&way| {
                sweep.begins(format_args!("{} {part} {way}", model.name));
                Ok((way, measure(model, way)?))
            });
            Ok((model, of_ways.collect::<Result<_>>()?))
        });
        of_models.collect()
    }

    /// Returns the columns of [`row`], with `others` for the figures.
    fn columns<const N: usize>(others: [Column; N]) -> Vec<Column> {
        let mut columns = vec![
            Column::text("model", "Model"),
            Column::text("strategy", "Strategy"),
            Column::text("exchange", "Gradients averaged"),
        ];
        columns.extend(others);
        columns
    }

    fn configuration(&self) -> Result<Fields> {
        let flags = self.flags;
        let ranks = match (self.are_threads, self.communicator.world_size()) {
            (true, count) => counted(count, "thread"),
            (false, count) => count.to_string(),
        };
        let mut fields = Fields::new();
        if flags.has(&MEASURED) {
            fields
                .insert("ranks", ranks)
                .insert("warm-up", flags.warmup_steps)
                .insert("steps", flags.steps);
        }
        if flags.has(&OF_STEPS) {
            fields
                .insert("precision", self.step.precision.name())
                .insert("attention", flags.attention.name());
        }
        if flags.has(&OF_MODELS) {
            let [b, t] = flags.sizes();
            fields.insert("B of a rank", b).insert("T", t);
        }
        if flags.has(&[Paper]) {
            fields.merge(Fields::of(&flags.paper)?);
        }
        if flags.has(&[Accounting]) {
            fields.merge(Fields::of(&flags.accounting)?);
        }
        if flags.has(&OF_STEPS) || flags.models.names_a_single_model() {
            fields.merge(describe(&self.models));
        }
        Ok(fields)
    }
}
