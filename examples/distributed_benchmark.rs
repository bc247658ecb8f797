//! Times collectives and training steps of several ranks, measures a rank's memory, and estimates steps of more GPUs.
//!
//! The second half of Stanford CS336's second assignment: collectives, naive, flat, overlapped and bucketed DDP, the
//! sharded optimizer, FSDP, and communication accounting. Ranks are threads of this process, or with `--gpus`, torchrun,
//! srun or mpirun processes. Times are rank 0's. Every rank has a batch of its own.
//!
//! ```text
//! cargo run --example distributed_benchmark
//! cargo run --example distributed_benchmark -- --ranks 4 --part memory --strategy replicated sharded-optimizer fully-shard
//! cargo run --example distributed_benchmark --features cuda -- --gpus 2 --part steps --size small xl --precision bf16
//! cargo run --example distributed_benchmark -- --part paper --size xl --precision bf16 --attention flash \
//!     --bucket-mib 400 --exchange-bf16 --strategy replicated sharded-optimizer fully-shard \
//!     --product-tflops 600 --memory-gb-s 4000 --alone-ms 41.9 --contention 0.4 \
//!     --reduce-gb-s 330 150 120 --gather-gb-s 190 100 80
//! cargo run --example distributed_benchmark -- --part accounting
//! mpirun -n 2 cargo run --example distributed_benchmark --features mpi -- --mib 1 10 --size tiny
//! torchrun --no-python --nproc-per-node 2 target/debug/examples/distributed_benchmark --device cuda
//! ```

#![deny(clippy::print_stdout, clippy::print_stderr)] // common::stdout and common::say_aside do not panic

#[path = "distributed_benchmark/accounting.rs"]
mod accounting;
#[path = "distributed_benchmark/answers.rs"]
mod answers;
#[path = "distributed_benchmark/collectives.rs"]
mod collectives;
mod common;
#[path = "distributed_benchmark/estimate.rs"]
mod estimate;
#[path = "distributed_benchmark/memory.rs"]
mod memory;
#[path = "distributed_benchmark/paper.rs"]
mod paper;
#[path = "distributed_benchmark/steps.rs"]
mod steps;

use accounting::AccountingFlags;
use clap::{Parser, ValueEnum};
use common::models::{ModelFlags, describe};
use common::precision::PrecisionFlags;
use common::ranks::RankFlags;
use common::sweep::Progress;
use common::{Common, Effects, Output, values};
use paper::PaperFlags;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;
use steps::Ways;
use tallow::attention::Algorithm;
use tallow::distributed::{self, Communicator, Ranks};
use tallow::report::{Fields, Report};
use tallow::{Error, Result};

/// Times collectives and training steps of several ranks, and measures their memory
#[derive(Parser)]
#[command(version, after_help = EXAMPLES)]
#[command(mut_arg("full_half", |arg| arg.hide(true)))] // a planned step keeps f32 parameters, and copies of weights
#[command(mut_arg("drop_casts", |arg| arg.hide(true)))]
struct Flags {
    /// collectives, steps, memory, paper, accounting; several
    #[arg(long, value_enum, num_args = 1.., value_delimiter = ',', default_values = ["collectives", "steps"],
          value_name = "PART", hide_possible_values = true)]
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

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// All-reduce, reduce-scatter and all-gather by size
    Collectives,
    /// Training steps by how gradients are exchanged
    Steps,
    /// A rank's memory by what is divided
    Memory,
    /// Estimated steps of more GPUs, by measured rates
    Paper,
    /// The handout's communication accounting
    Accounting,
}

fn main() -> ExitCode {
    let mut flags = Flags::effects().parse();
    flags.models.fill_context(&mut flags.context_length, &[256]);
    match flags.processes.launched() {
        Some(code) => code,
        None => common::run(|| flags.run()),
    }
}

impl Flags {
    /// What the flags' effects depend on.
    fn effects() -> Effects<Self> {
        Effects::<Self>::new()
            .of_output(|flags| &flags.output)
            .of_ranks(|flags| (&flags.processes, &flags.common))
            .only(
                "without torchrun, srun or mpirun, which start the ranks, on the CPU",
                &["ranks"],
                |flags| matches!(flags.ranks_as_threads(), Ok(Some(_))),
            )
            .only("with --part collectives", &["mib"], |flags| {
                flags.has(&[Part::Collectives])
            })
            .only(
                "with --part steps, memory, paper or accounting",
                &[
                    "handout",
                    "size",
                    "family",
                    "d-model",
                    "d-ff",
                    "num-layers",
                    "num-heads",
                    "vocab-size",
                    "batch-size",
                    "context-length",
                ],
                |flags| flags.part.iter().any(|part| *part != Part::Collectives),
            )
            .only(
                "with --part steps, memory or paper",
                &[
                    "precision",
                    "autocast",
                    "attention",
                    "bucket-mib",
                    "exchange-bf16",
                    "strategy",
                    "memory-budget-gib",
                ],
                |flags| flags.has(&[Part::Steps, Part::Memory, Part::Paper]),
            )
            .only(
                "with --part steps or memory",
                &["without-alone", "seed"],
                |flags| flags.has(&[Part::Steps, Part::Memory]),
            )
            .only(
                "with --part collectives or steps",
                &["warmup-steps", "steps"],
                |flags| flags.has(&[Part::Collectives, Part::Steps]),
            )
            .only("with --part steps", &["trace"], |flags| {
                flags.has(&[Part::Steps])
            })
            .only("with --part paper", PaperFlags::NAMES, |flags| {
                flags.has(&[Part::Paper])
            })
            .only("with --part accounting", AccountingFlags::NAMES, |flags| {
                flags.has(&[Part::Accounting])
            })
    }

    /// T: the last context length given, since a repeated flag replaces the one before.
    fn length(&self) -> usize {
        self.context_length.last().copied().unwrap_or_default()
    }

    /// Whether one of these parts is measured.
    fn has(&self, parts: &[Part]) -> bool {
        self.part.iter().any(|part| parts.contains(part))
    }

    /// The ranks that are threads of this process; `None` where ranks are processes or GPUs.
    fn ranks_as_threads(&self) -> Result<Option<NonZeroUsize>> {
        let are_processes = Ranks::from_env()?.is_some() || self.processes.gpus.is_some();
        let is_on_cpu = self.common.device.eq_ignore_ascii_case("cpu");
        let ranks = self.ranks.or(NonZeroUsize::new(2));
        Ok(ranks.filter(|_| !are_processes && is_on_cpu))
    }

    fn run(&self) -> Result<()> {
        let Some(ranks) = self.ranks_as_threads()? else {
            let communicator = self.processes.join(&self.common)?;
            return self.common.around(|| self.run_rank(&communicator));
        };
        let communicators = distributed::threads(ranks.get())?;
        let ended: Vec<Result<()>> = std::thread::scope(|scope| {
            let run =
                |communicator: Communicator| self.common.around(|| self.run_rank(&communicator));
            let threads: Vec<_> = communicators
                .into_iter()
                .map(|communicator| scope.spawn(move || run(communicator)))
                .collect();
            let joined = threads.into_iter().map(|thread| thread.join());
            joined
                .map(|ended| ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .collect()
        });
        // A rank that fails takes the others with it: its own error says why.
        let mut errors: Vec<Error> = ended.into_iter().filter_map(Result::err).collect();
        let own = errors
            .iter()
            .position(|error| !matches!(error, Error::Rank { .. }));
        match errors.is_empty() {
            true => Ok(()),
            false => Err(errors.swap_remove(own.unwrap_or(0))),
        }
    }

    /// Runs all parts as one rank; rank 0 prints them.
    fn run_rank(&self, communicator: &Communicator) -> Result<()> {
        if communicator.rank() == 0 {
            self.output.check_with([&self.trace])?;
        }
        let tables = [
            collectives::columns(),
            steps::columns(),
            memory::columns(),
            paper::columns(),
            accounting::columns(),
        ];
        self.output.check_columns(tables)?;
        let models = self.models.models(self.length(), &[self.attention])?;
        let runs = self.part.iter().map(|part| match part {
            Part::Collectives => 3 * self.mib.len(),
            Part::Steps | Part::Memory => models.len() * self.ways.all().len(),
            Part::Paper => models.len() * self.ways.all().iter().flatten().count(),
            Part::Accounting => 0,
        });
        let runs = runs.sum();
        let progress = &mut Progress::of_rank(communicator.rank(), runs);
        let mut reports = Vec::new();
        for part in &self.part {
            reports.push(match part {
                Part::Collectives => self.collectives(communicator, progress)?,
                Part::Steps => self.training_steps(communicator, &models, progress)?,
                Part::Memory => self.memory(communicator, &models, progress)?,
                Part::Paper => self.on_paper(&models, progress)?,
                Part::Accounting => self.accounting(&models)?,
            });
        }
        if communicator.rank() > 0 {
            return Ok(()); // one rank's tables are all of it
        }
        let mut configuration = self.configuration(communicator)?;
        let is_of_models = |part: &Part| match part {
            Part::Collectives => false,
            Part::Accounting => self.models.names_a_model(),
            _ => true,
        };
        if self.part.iter().any(is_of_models) {
            configuration.merge(describe(&models));
        }
        let mut reports = reports.into_iter();
        let report = Report {
            environment: self.common.environment(communicator.device()),
            configuration,
            ..reports.next().unwrap_or_default()
        };
        self.output.publish(&Report {
            details: reports.collect(),
            ..report
        })
    }

    fn configuration(&self, communicator: &Communicator) -> Result<Fields> {
        let mut fields = Fields::new();
        let measures = |part: &Part| !matches!(part, Part::Paper | Part::Accounting);
        if self.part.iter().any(measures) {
            let ranks = communicator.world_size();
            let are_threads = self.ranks_as_threads()?.is_some();
            let ranks = format!("{ranks}{}", if are_threads { " threads" } else { "" });
            fields.insert("ranks", ranks);
            fields.insert("warm-up", self.warmup_steps);
            fields.insert("steps", self.steps);
        }
        if self.part != [Part::Collectives] {
            if self.part != [Part::Accounting] {
                fields.insert("precision", self.precision.precision()?.name());
                fields.insert("attention", self.attention.name());
            }
            fields.insert("B of a rank", self.batch_size);
            fields.insert("T", self.length());
        }
        if self.part.contains(&Part::Paper) {
            fields.merge(self.paper.describe());
        }
        Ok(fields)
    }
}
