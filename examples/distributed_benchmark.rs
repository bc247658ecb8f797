//! Times collectives and training steps of several ranks, measures a rank's memory, and estimates steps of more GPUs.
//!
//! The second half of Stanford CS336's second assignment: collectives, naive, flat, overlapped and bucketed DDP, the
//! sharded optimizer, FSDP, and communication accounting. Ranks are threads of this process, or with `--gpus`,
//! torchrun, srun or mpirun processes. Times are rank 0's. Every rank has a batch of its own.
//!
//! ```text
//! cargo run --example distributed_benchmark --features cuda -- --gpus 2 --part steps --size small xl --precision bf16
//! cargo run --example distributed_benchmark -- --part paper --size xl --precision bf16 --attention flash \
//!     --bucket-mib 400 --exchange-bf16 --strategy replicated sharded-optimizer fully-shard \
//!     --product-tflops 600 --memory-gb-s 4000 --alone-ms 41.9 --contention 0.4 \
//!     --reduce-gb-s 330 150 120 --gather-gb-s 190 100 80
//! torchrun --no-python --nproc-per-node 2 target/debug/examples/distributed_benchmark --device cuda
//! ```

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
use clap::{CommandFactory, Parser, ValueEnum};
use common::effects::{self, Effect, names_gpu, only, only_group};
use common::models::{Model, ModelFlags, describe};
use common::precision::PrecisionFlags;
use common::ranks::RankFlags;
use common::sweep::Progress;
use common::ways::Way;
use common::{Common, Output, gib_bytes, values};
use paper::PaperFlags;
use std::num::NonZeroUsize;
use std::panic::resume_unwind;
use std::path::PathBuf;
use std::process::ExitCode;
use steps::Ways;
use tallow::attention::Algorithm;
use tallow::bench::Stopwatch;
use tallow::compile::StepConfig;
use tallow::distributed::{self, Communicator, Ranks};
use tallow::report::{Fields, Report, Statistics, counted};
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

    /// Tokens in a sequence [default: 256]
    #[arg(long, num_args = 1, value_name = "T", alias = "sequence-length", value_parser = values::count())]
    context_length: Vec<usize>,

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
  distributed_benchmark --part accounting";

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

fn main() -> ExitCode {
    let mut flags = effects::parse(Flags::command(), Flags::effects);
    flags.models.fill_context(&mut flags.context_length, &[256]);
    match flags.processes.launched() {
        Some(code) => code,
        None => common::run(|| flags.run()),
    }
}

impl Flags {
    /// Returns what the flags' effects depend on.
    fn effects(&self) -> Vec<Effect> {
        const WITH_MODEL: &str = "with --part steps, memory, paper or accounting";
        const WITH_STEP: &str = "with --part steps, memory or paper";
        let of = |parts: &[Part]| self.has(parts);
        let with_model = of(&[Steps, Memory, Paper, Accounting]);
        let with_step = of(&[Steps, Memory, Paper]);
        let on_threads = matches!(self.ranks_as_threads(), Ok(Some(_)));
        let mut effects = self.processes.effects(&self.common);
        effects.extend([
            only(
                "without torchrun, srun or mpirun, which start the ranks, on the CPU",
                on_threads,
                &["ranks"],
            ),
            only(
                "with --part collectives, steps or memory",
                of(&[Collectives, Steps, Memory]),
                &["ranks"],
            ),
            only("with --part collectives", of(&[Collectives]), &["mib"]),
            only(
                "with --part steps or memory",
                of(&[Steps, Memory]),
                &["without-alone", "seed"],
            ),
            only(
                "with --part collectives or steps",
                of(&[Collectives, Steps]),
                &["warmup-steps", "steps"],
            ),
            only("with --part steps", of(&[Steps]), &["trace"]),
            only(WITH_MODEL, with_model, &["batch-size", "context-length"]),
            only_group::<ModelFlags>(WITH_MODEL, with_model),
            only(WITH_STEP, with_step, &["attention"]),
            only_group::<PrecisionFlags>(WITH_STEP, with_step),
            only_group::<Ways>(WITH_STEP, with_step),
            only_group::<PaperFlags>("with --part paper", of(&[Paper])),
            only_group::<AccountingFlags>("with --part accounting", of(&[Accounting])),
        ]);
        effects
    }

    /// Returns T: the last context length given, since a repeated flag replaces the one before.
    fn length(&self) -> usize {
        self.context_length.last().copied().unwrap_or_default()
    }

    /// Returns the B and T of a rank.
    fn sizes(&self) -> [usize; 2] {
        [self.batch_size, self.length()]
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
            return self.run_rank(self.processes.join(&self.common)?, false);
        };
        let ranks = distributed::threads(ranks)?;
        let mut errors: Vec<Error> = std::thread::scope(|scope| {
            let ranks = ranks.into_iter();
            let threads = ranks.map(|rank| scope.spawn(|| self.run_rank(rank, true)));
            let threads: Vec<_> = threads.collect();
            let ended = threads.into_iter().map(|thread| thread.join());
            let ended = ended.map(|ended| ended.unwrap_or_else(|panic| resume_unwind(panic)));
            ended.filter_map(Result::err).collect()
        });
        // A rank that fails takes the others with it: its own error says why.
        errors.sort_by_key(|error| matches!(error, Error::Rank { .. }));
        errors.into_iter().next().map_or(Ok(()), Err)
    }

    /// Runs all parts as one rank. Rank 0 prints them.
    fn run_rank(&self, communicator: Communicator, is_thread: bool) -> Result<()> {
        self.common.around(|| {
            let is_first = communicator.rank() == 0;
            if is_first {
                self.output.check_with([&self.trace])?;
            }
            let mut rank = Rank::new(self, communicator, is_thread)?;
            let reports = self.part.iter().map(|part| rank.report(*part));
            let mut reports: Vec<Report> = reports.collect::<Result<_>>()?;
            let first = Report {
                environment: self.common.environment(rank.communicator.device()),
                configuration: rank.configuration()?,
                ..reports.remove(0)
            };
            match is_first {
                true => self.output.publish(&Report {
                    details: reports,
                    ..first
                }),
                false => Ok(()), // all ranks have the same tables
            }
        })
    }
}

impl Part {
    /// Returns the table without rows.
    fn table(self) -> Report {
        let (title, columns) = match self {
            Collectives => ("Collectives", collectives::columns()),
            Steps => ("Training steps", steps::columns()),
            Memory => ("Memory of a rank", memory::columns()),
            Paper => ("Estimated steps of more GPUs", paper::columns()),
            Accounting => ("Accounting of feed-forward layers", accounting::columns()),
        };
        Report {
            title: title.into(),
            columns,
            ..Default::default()
        }
    }
}

/// A rank of the job, which measures the parts.
struct Rank<'f> {
    flags: &'f Flags,
    communicator: Communicator,
    /// Whether ranks are threads of this process.
    are_threads: bool,
    models: Vec<Model>,
    step: StepConfig,
    progress: Progress,
}

impl<'f> Rank<'f> {
    fn new(flags: &'f Flags, communicator: Communicator, are_threads: bool) -> Result<Self> {
        let models = flags.models.models(flags.length(), &[flags.attention])?;
        let ways = models.len() * flags.ways.all(communicator.shard()).len();
        let runs = flags.part.iter().map(|part| match part {
            Collectives => collectives::COLLECTIVES.len() * flags.mib.len(),
            Steps | Memory | Paper => ways,
            Accounting => 0,
        });
        Ok(Self {
            flags,
            progress: Progress::of_rank(communicator.rank(), runs.sum()),
            communicator,
            are_threads,
            models,
            step: StepConfig {
                precision: flags.precision.precision()?,
                memory_budget_bytes: flags.ways.memory_budget_gib.map(gib_bytes),
                ..Default::default()
            },
        })
    }

    fn report(&mut self, part: Part) -> Result<Report> {
        let mut report = part.table();
        match part {
            Collectives => self.collectives(&mut report)?,
            Steps => self.training_steps(&mut report)?,
            Memory => self.memory(&mut report)?,
            Paper => self.paper(&mut report)?,
            Accounting => self.accounting(&mut report),
        }
        Ok(report)
    }

    /// Returns every strategy with every exchange that it has, the step alone first.
    fn ways(&self) -> Vec<Way> {
        let all = self.flags.ways.all(self.communicator.shard());
        all.into_iter().map(Way::new).collect()
    }

    fn timed(&self, work: impl FnMut() -> Result<()>) -> Result<Statistics> {
        let stopwatch = Stopwatch::new(self.communicator.device());
        let timing = stopwatch
            .warmup(self.flags.warmup_steps)
            .measure(self.flags.steps, work)?;
        timing.statistics()
    }

    fn configuration(&self) -> Result<Fields> {
        let (flags, mut fields) = (self.flags, Fields::new());
        let steps = flags.has(&[Steps, Memory, Paper]);
        if flags.has(&[Collectives, Steps, Memory]) {
            let ranks = match self.communicator.world_size() {
                ranks if self.are_threads => counted(ranks, "thread"),
                ranks => ranks.to_string(),
            };
            fields
                .insert("ranks", ranks)
                .insert("warm-up", flags.warmup_steps)
                .insert("steps", flags.steps);
        }
        if steps {
            fields
                .insert("precision", self.step.precision.name())
                .insert("attention", flags.attention.name());
        }
        if flags.has(&[Accounting]) {
            fields
                .insert("B of a rank", flags.batch_size)
                .insert("T", flags.length());
        }
        if flags.has(&[Paper]) {
            fields.merge(Fields::of(&flags.paper)?);
        }
        if steps || flags.models.names_a_single_model() {
            fields.merge(describe(&self.models));
        }
        Ok(fields)
    }
}
