//! Flags of the examples that run on several GPUs, and the start of such a run.

use super::effects::{Effect, names_gpu, only, only_group};
use super::ways::{Strategy, Way};
use super::{Common, stdout};
use candle_core::DType;
use clap::{Args, ValueEnum};
use std::num::NonZeroUsize;
use std::process::ExitCode;
use std::time::Duration;
use tallow::compile::StepRanks;
use tallow::distributed::{self, Communicator, DistConfig, Exchange, Ranks, Shard};
use tallow::{Error, Result};

/// Flags of a job's ranks.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Ranks")]
pub struct RankFlags {
    /// Ranks to start on this host, one per GPU
    #[arg(long, value_name = "N")]
    pub gpus: Option<NonZeroUsize>,

    /// Seconds without an answer after which a rank has failed
    #[arg(long, hide_short_help = true, default_value_t = 600, value_name = "S", value_parser = clap::value_parser!(u64).range(1..))]
    pub timeout: u64,

    /// Multiprocessors for NCCL at most [default: NCCL's choice]
    #[arg(long, hide_short_help = true, value_name = "N")]
    pub nccl_max_ctas: Option<u32>,
}

/// The condition under which flags of ranks have an effect.
const SEVERAL: &str = "among several ranks: with --gpus, or started by torchrun or mpirun";

impl RankFlags {
    /// Returns what these flags' effects depend on.
    pub fn effects(&self, common: &Common) -> Vec<Effect> {
        let on_gpus = self.are_several() && (self.gpus.is_some() || names_gpu(common));
        let names_no_gpu = self.gpus.is_none() || common.device == "cuda";
        let gives_gpus = "without --gpus, which gives each rank a GPU";
        vec![
            only(SEVERAL, self.are_several(), &["timeout"]),
            only("where several GPUs run NCCL", on_gpus, &["nccl-max-ctas"]),
            only(gives_gpus, names_no_gpu, &["device"]),
        ]
    }

    /// Whether this process is one of several ranks, or starts them. An invalid environment is reported later.
    fn are_several(&self) -> bool {
        match Ranks::from_env() {
            Ok(Some(ranks)) => ranks.world_size > 1,
            Ok(None) => self.gpus.is_some_and(|gpus| gpus.get() > 1),
            Err(_) => true,
        }
    }

    /// Starts the ranks and waits for them, if this process is no rank itself. Returns the exit code then.
    pub fn launched(&self) -> Option<ExitCode> {
        let count = self.gpus?.get();
        let starts = match Ranks::from_env() {
            Ok(None) => true,
            // The one task of an srun starts ranks, too.
            Ok(Some(ranks)) => ranks.world_size == 1 && count > 1,
            Err(_) => false, // `join` reports it
        };
        starts.then(|| super::code_of(launch(count)))
    }

    /// Joins the job; a job of one rank where this process is no rank. Ranks other than the first print nothing from
    /// then on.
    pub fn join(&self, common: &Common) -> Result<Communicator> {
        let started = Ranks::from_env()?.map_or(1, |ranks| ranks.world_size);
        if let Some(count) = self.gpus.filter(|count| count.get() != started) {
            return Err(Error::Order {
                op: "--gpus",
                problem: format!("expected {count} ranks, and {started} are started"),
                hint: "torchrun, srun and mpirun start ranks themselves: leave --gpus out".into(),
            });
        }
        let communicator = distributed::init(&DistConfig {
            device: match self.gpus {
                Some(_) => "cuda".into(),
                None => common.device.clone(),
            },
            timeout: Duration::from_secs(self.timeout),
            nccl_max_ctas: self.nccl_max_ctas,
        })?;
        tallow::hardware::set_tf32(communicator.device(), common.tf32)?;
        if communicator.rank() > 0 {
            stdout::silence();
        }
        Ok(communicator)
    }
}

#[cfg(unix)]
fn launch(count: usize) -> Result<ExitCode> {
    Ok(match distributed::launch(count)? {
        None => ExitCode::SUCCESS,
        Some(failed) => {
            super::print_progress(failed);
            ExitCode::from(failed.exit_code())
        }
    })
}

#[cfg(not(unix))]
fn launch(_count: usize) -> Result<ExitCode> {
    Err(Error::Order {
        op: "--gpus",
        problem: "ranks are started on Unix alone".into(),
        hint: "start them with the variables that torchrun sets".into(),
    })
}

/// Flags for the strategy of several ranks.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Ranks")]
pub struct ExchangeFlags {
    /// replicated, sharded-optimizer or fully-shard
    #[arg(long, value_enum, default_value_t = Strategy::Replicated, value_name = "NAME")]
    strategy: Strategy,

    /// per-parameter, flat or overlapped
    #[arg(long, hide_short_help = true, value_enum, default_value_t = When::Overlapped, value_name = "NAME")]
    exchange: When,

    /// Size of a bucket of gradients; 0 exchanges each by itself
    #[arg(long, hide_short_help = true, default_value_t = 25.0, value_name = "MIB", value_parser = super::values::from_0)]
    bucket_mib: f64,

    /// Exchange gradients in bf16
    #[arg(long, hide_short_help = true)]
    pub exchange_bf16: bool,
}

/// The values of `--exchange`: how gradients are averaged ([`Exchange`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum When {
    PerParameter,
    Flat,
    Overlapped,
}

impl ExchangeFlags {
    /// Returns what these flags' effects depend on.
    pub fn effects(&self, ranks: &RankFlags) -> Vec<Effect> {
        let is_sharded = self.strategy == Strategy::FullyShard;
        let in_buckets = self.exchange == When::Overlapped;
        vec![
            only_group::<Self>(SEVERAL, ranks.are_several()),
            only("without --strategy fully-shard", !is_sharded, &["exchange"]),
            only(
                "with --exchange overlapped or --strategy fully-shard",
                in_buckets || is_sharded,
                &["bucket-mib"],
            ),
        ]
    }

    pub fn way(&self) -> Way {
        let bucket_bytes = (self.bucket_mib * 2f64.powi(20)) as u64;
        let exchange = match self.exchange {
            When::PerParameter => Exchange::PerParameter,
            When::Flat => Exchange::Flat,
            When::Overlapped => Exchange::Overlapped { bucket_bytes },
        };
        Way::Exchanged(self.strategy, exchange)
    }

    /// Returns how the planned step of this rank, of several, exchanges.
    pub fn step_ranks(&self, shard: Shard) -> StepRanks {
        let dtype = self.exchange_bf16.then_some(DType::BF16);
        self.way().step_ranks(dtype, shard)
    }
}
