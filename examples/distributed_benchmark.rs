//! What several GPUs cost and gain: collectives by size, and a training step by how its gradients are exchanged.
//!
//! The second half of Stanford CS336's second assignment ("distributed communication", "naive DDP", "flat", "overlap",
//! "bucketed"), on NVIDIA GPUs by NCCL and on CPUs by MPI.
//!
//! ```text
//! cargo run --example distributed_benchmark --features cuda -- --gpus 2
//! cargo run --example distributed_benchmark --features cuda -- --gpus 2 --part memory steps \
//!     --strategy replicated sharded-optimizer --size medium xl
//! cargo run --example distributed_benchmark --features cuda -- --gpus 2 --part steps --size small xl \
//!     --precision bf16 --attention flash --exchange-bf16
//! cargo run --example distributed_benchmark -- --part paper --size xl --precision bf16 --attention flash \
//!     --bucket-mib 400 --exchange-bf16 --strategy replicated sharded-optimizer fully-shard \
//!     --product-tflops 600 --memory-gb-s 4000 --alone-ms 41.9 --contention 0.4 \
//!     --reduce-gb-s 330 150 120 --gather-gb-s 190 100 80
//! cargo run --example distributed_benchmark -- --part accounting --d-model 16384 --d-ff 53248 --num-layers 126 \
//!     --num-heads 128
//! mpirun -n 2 cargo run --example distributed_benchmark --features mpi -- --mib 1 10 --size tiny
//! torchrun --no-python --nproc-per-node 2 target/debug/examples/distributed_benchmark --device cuda
//! ```
//!
//! Times are rank 0's. Every rank has a batch of its own, so that a step of N ranks learns from N times as many tokens.
//! "alone" is the same step on every rank at once without an exchange.

#![deny(clippy::print_stdout, clippy::print_stderr)] // common::stdout and common::say_aside do not panic

#[path = "distributed_benchmark/accounting.rs"]
mod accounting;
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
use clap::{Parser, ValueEnum};
use common::models::{ModelFlags, describe};
use common::precision::PrecisionFlags;
use common::ranks::RankFlags;
use common::{Common, Effects, Output, values};
use paper::PaperFlags;
use std::path::PathBuf;
use std::process::ExitCode;
use steps::Ways;
use tallow::Result;
use tallow::attention::Algorithm;
use tallow::distributed::Communicator;
use tallow::report::{Fields, Report};

/// Times collectives, and training steps whose gradients several ranks average
#[derive(Parser)]
#[command(version)]
#[command(mut_arg("full_half", |arg| arg.hide(true)))] // a planned step keeps f32 parameters, and copies of weights
#[command(mut_arg("drop_casts", |arg| arg.hide(true)))]
struct Flags {
    /// What to measure
    #[arg(long, value_enum, num_args = 1.., value_delimiter = ',', default_values = ["collectives", "steps"])]
    part: Vec<Part>,

    /// Sizes of a rank's buffer in collectives, in MiB
    #[arg(long, num_args = 1.., value_delimiter = ',', default_values_t = [1, 10, 100, 1024], value_name = "MIB")]
    mib: Vec<usize>,

    #[command(flatten)]
    models: ModelFlags,

    #[command(flatten)]
    precision: PrecisionFlags,

    /// What computes attention, naive or flash
    #[arg(long, default_value_t = Algorithm::Naive)]
    attention: Algorithm,

    /// Sequences of a rank's batch
    #[arg(long, default_value_t = 4, value_parser = values::count())]
    batch_size: usize,

    /// Tokens of a sequence
    #[arg(long, default_value_t = 256, value_parser = values::count())]
    context_length: usize,

    #[command(flatten)]
    ways: Ways,

    /// Steps before those that are timed
    #[arg(long, default_value_t = 3, value_parser = values::count_from_0())]
    warmup_steps: usize,

    /// Steps that are timed
    #[arg(long, default_value_t = 10, value_parser = values::count())]
    steps: usize,

    /// Save a trace of rank 0's steps for Perfetto (JSON), one for each way: kernels, and beside them collectives
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,

    #[command(flatten)]
    paper: PaperFlags,

    #[command(flatten)]
    accounting: AccountingFlags,

    #[command(flatten)]
    ranks: RankFlags,

    #[command(flatten)]
    output: Output,

    #[command(flatten)]
    common: Common,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// All-reduce, reduce-scatter and all-gather by size
    Collectives,
    /// Training steps by how gradients are exchanged, and what is divided
    Steps,
    /// What a rank's memory holds, by what is divided
    Memory,
    /// Training steps of more GPUs than there are, by rates that were measured
    Paper,
    /// Memory, and the least batch that hides communication, of feed-forward layers divided by data, weights (FSDP)
    /// and tensors, on paper
    Accounting,
}

fn main() -> ExitCode {
    let flags = Flags::effects().parse();
    match flags.ranks.launched() {
        Some(code) => code,
        None => common::run(|| flags.common.around(|| flags.run())),
    }
}

impl Flags {
    /// What the flags' effects depend on.
    fn effects() -> Effects<Self> {
        Effects::<Self>::new()
            .of_output(|flags| &flags.output)
            .of_ranks(|flags| (&flags.ranks, &flags.common))
            .only("with --part collectives", &["mib"], |flags| {
                flags.has(&[Part::Collectives])
            })
            .only(
                "with --part steps, memory, paper or accounting",
                &[
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
                    "only-overlapped",
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

    /// Whether one of these parts is measured.
    fn has(&self, parts: &[Part]) -> bool {
        self.part.iter().any(|part| parts.contains(part))
    }

    fn run(&self) -> Result<()> {
        let communicator = self.ranks.join(&self.common)?;
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
        let models = self.models.models(self.context_length, &[self.attention])?;
        let mut reports = Vec::new();
        for part in &self.part {
            reports.push(match part {
                Part::Collectives => self.collectives(&communicator)?,
                Part::Steps => self.training_steps(&communicator, &models)?,
                Part::Memory => self.memory(&communicator, &models)?,
                Part::Paper => self.on_paper(&models)?,
                Part::Accounting => self.accounting(&models)?,
            });
        }
        let mut configuration = self.configuration(&communicator)?;
        if self.part != [Part::Collectives] {
            configuration.merge(describe(&models));
        }
        let mut reports = reports.into_iter();
        let report = Report {
            environment: self.common.environment(communicator.device()),
            configuration,
            ..reports.next().unwrap_or_default()
        };
        let report = Report {
            details: reports.collect(),
            ..report
        };
        match communicator.rank() {
            0 => self.output.publish(&report),
            _ => Ok(()), // one rank's table is all of it
        }
    }

    fn configuration(&self, communicator: &Communicator) -> Result<Fields> {
        let mut fields = Fields::new();
        let measures = |part: &Part| !matches!(part, Part::Paper | Part::Accounting);
        if self.part.iter().any(measures) {
            fields.insert("ranks", communicator.world_size());
            fields.insert("warm-up", self.warmup_steps);
            fields.insert("steps", self.steps);
        }
        if self.part != [Part::Collectives] {
            if self.part != [Part::Accounting] {
                fields.insert("precision", self.precision.precision()?.name());
                fields.insert("attention", self.attention.name());
            }
            fields.insert("B of a rank", self.batch_size);
            fields.insert("T", self.context_length);
        }
        if self.part.contains(&Part::Paper) {
            fields.insert("rates", self.paper.rates_in_words());
        }
        Ok(fields)
    }
}
