//! Several hosts: a job on two hosts with eight NVIDIA GPUs each.
//!
//! **Several hosts are untried.** tallow's collectives and steps have run on two GPUs of one host. Rendezvous, secret
//! and failures are tested on one host. Everything below follows from the code of
//! [`distributed`](crate::distributed); nobody has run it on two hosts yet.
//!
//! # The program
//!
//! One process per GPU runs the same program: 16 ranks. [`distributed::init`](crate::distributed::init()) reads the
//! rank from the environment, waits for all ranks, and returns a [`Communicator`](crate::distributed::Communicator).
//! Without a launcher's variables it is a job of one rank, so the same program runs alone. It needs the features `cuda`
//! and `train`, which is on by default:
//!
//! ```toml
//! tallow = { path = "../tallow", features = ["cuda"] }
//! ```
//!
//! ```no_run
//! use std::path::Path;
//! use tallow::data::Tokens;
//! use tallow::distributed::{self, DistConfig, ReplicatedConfig};
//! use tallow::model::{TransformerConfig, TransformerLM};
//! use tallow::train::{TrainConfig, Trainer};
//!
//! fn main() -> tallow::Result<()> {
//!     let ranks = distributed::init(&DistConfig { device: "cuda".into(), ..Default::default() })?;
//!     let (train, validation) = Tokens::bytes("/shared/input.txt")?.split(0.1)?;
//!     let size = TransformerConfig { vocab_size: 256, ..TransformerConfig::preset("small")? };
//!     let config = TrainConfig {
//!         sequence_length: 256,
//!         accumulation: 16, // batches of a step on all ranks together: one on each
//!         ..Default::default()
//!     };
//!     let path = Path::new("/shared/run.safetensors");
//!     let mut trainer = if path.exists() {
//!         Trainer::resume(path, &size, config, train, validation, ranks.device())?
//!     } else {
//!         Trainer::new(TransformerLM::new(&size, 0, ranks.device())?, config, train, validation)?
//!     };
//!     trainer.replicate(&ranks, ReplicatedConfig::default())?;
//!     while let Some(step) = trainer.step()? {
//!         if trainer.evaluation_is_due() {
//!             let loss = trainer.evaluate()?; // every rank calls this, and save
//!             trainer.save(path)?;
//!             if ranks.rank() == 0 {
//!                 println!("{}: {loss:.3} nats", step.step);
//!             }
//!         }
//!     }
//!     Ok(())
//! }
//! ```
//!
//! Here every GPU has the full model. If the model does not fit on one GPU, use the program in
//! [`Trainer::fully_sharded`].
//!
//! # The memory of a rank
//!
//! [`StepConfig::ranks`] selects the rank that a plan is made for, so its memory is known before the job starts, on any
//! machine. This example plans rank 0 of 16 fully sharded ranks:
//!
//! ```
//! use tallow::compile::{Batch, Step, StepConfig, StepRanks, Target};
//! use tallow::distributed::{FullyShardConfig, Shard};
//! use tallow::memory::planned_breakdown;
//! use tallow::model::{TransformerConfig, TransformerLM};
//! use tallow::train::TrainConfig;
//!
//! let size = TransformerConfig { vocab_size: 256, ..TransformerConfig::preset("small")? };
//! let run = TrainConfig { sequence_length: 256, accumulation: 16, ..Default::default() };
//! let ranks =
//!     StepRanks::FullySharded(FullyShardConfig::default(), Shard { rank: 0, world_size: 16 });
//! let config = StepConfig { accumulation: run.accumulation / 16, ranks, ..run.step() };
//! let model = TransformerLM::meta(&size)?;
//! let batch = Batch::meta(config.accumulation * run.batch_size, run.sequence_length)?;
//! let (plan, _) = Step::plan_for_model(Target::Cuda, &model, &config, batch)?; // needs no GPU
//! println!("{} MiB\n{}", plan.total_bytes() >> 20, planned_breakdown(&plan));
//! # Ok::<(), tallow::Error>(())
//! ```
//!
//! For replicated ranks use [`StepRanks::Replicated`] or, with a sharded optimizer, [`StepRanks::ShardedOptimizer`].
//! Leave room for what the plan [does not count](crate::compile#what-a-plan-is-exact-about): the CUDA context and
//! NCCL's buffers. Before [`Optimizer::shard`](crate::optim::Optimizer::shard) is called, each rank has the full
//! optimizer state, of which the plan counts only its share.
//!
//! [`StepConfig::ranks`]: crate::compile::StepConfig::ranks
//! [`StepRanks::Replicated`]: crate::compile::StepRanks::Replicated
//! [`StepRanks::ShardedOptimizer`]: crate::compile::StepRanks::ShardedOptimizer
//!
//! # What each process needs in its environment
//!
//! | variable | value | here |
//! |---|---|---|
//! | `RANK` | number of the process in the job, from 0 | 0 to 15 |
//! | `LOCAL_RANK` | number of the process on its host, which is the index of its GPU | 0 to 7 |
//! | `WORLD_SIZE` | number of processes | 16 |
//! | `MASTER_ADDR` | host of rank 0, by a name or address that the other host can reach | `host-0` |
//! | `MASTER_PORT` | a free TCP port of that host | 29500 |
//! | `TALLOW_JOB_TOKEN` | secret of the job, at least 16 bytes, the same for all | from `openssl rand -hex 16` |
//! | `TALLOW_NCCL_LIBRARY` | path of `libnccl.so.2`, unless the system finds it (`LD_LIBRARY_PATH`) | |
//!
//! torchrun sets the first five. Under Slurm's `srun` the first three come from Slurm's own variables. You set
//! `MASTER_ADDR` and `MASTER_PORT`, which ranks on GPUs require.
//! [`Ranks::from_env`](crate::distributed::Ranks::from_env) lists the variables of each launcher. Variables that
//! contradict each other are an error.
//!
//! The secret is required as soon as rank 0 listens on another address than loopback. Rank 0 refuses every process that
//! does not send it. It is sent unencrypted: it keeps other users of the network out, but not those who can read its
//! traffic.
//!
//! # With torchrun
//!
//! On each of the two hosts, with `N` 0 on the first and 1 on the second:
//!
//! ```sh
//! export TALLOW_JOB_TOKEN=...    # what `openssl rand -hex 16` printed once, the same on both hosts
//! torchrun --nnodes 2 --node-rank $N --master-addr host-0 --master-port 29500 --nproc-per-node 8 --no-python \
//!     target/release/my-program
//! ```
//!
//! # With Slurm
//!
//! ```sh
//! #!/bin/bash
//! #SBATCH --nodes=2
//! #SBATCH --ntasks-per-node=8
//! #SBATCH --cpus-per-task=4                           # cores of a rank, for data and files; by default one
//! #SBATCH --gpus-per-node=8
//! export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK      # srun may not inherit --cpus-per-task
//! export TALLOW_JOB_TOKEN=$(openssl rand -hex 16)     # srun passes it on
//! export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1) MASTER_PORT=29500
//! srun --kill-on-bad-exit=1 target/release/my-program
//! ```
//!
//! `MASTER_ADDR` must be the host of rank 0. Either each rank sees all GPUs of its host, or each sees one
//! (`--gpus-per-task=1`). In the second case set `LOCAL_RANK=0` for all of them: `srun --kill-on-bad-exit=1 env
//! LOCAL_RANK=0 target/release/my-program`.
//!
//! # Without a launcher
//!
//! [`launch`](crate::distributed::launch()) starts ranks on its own host only. For two hosts a shell loop is enough, on
//! each host with `N` as above:
//!
//! ```sh
//! export TALLOW_JOB_TOKEN=... MASTER_ADDR=host-0 MASTER_PORT=29500 WORLD_SIZE=16
//! for i in 0 1 2 3 4 5 6 7; do
//!     RANK=$((8 * N + i)) LOCAL_RANK=$i target/release/my-program &
//! done
//! wait
//! ```
//!
//! # Ports
//!
//! - Rank 0 listens on `MASTER_PORT`, on all interfaces, and every other rank connects there. torchrun's agent
//!   may use `MASTER_PORT` itself (it then sets `TORCHELASTIC_USE_AGENT_STORE=True`); rank 0 then listens on the port
//!   after it. Open both ports.
//! - If rank 0 does not answer, the other ranks try again until [`DistConfig::timeout`], ten minutes by default. All
//!   ranks must join within that time.
//! - Jobs on one host need different ports. A job that is started again may use the same port once the old rank 0 has
//!   ended.
//! - NCCL opens its own connections between the hosts.
//!
//! # NCCL's variables
//!
//! NCCL is loaded when ranks join; version 2.19 or later is required. It reads its own environment variables:
//!
//! | variable | use |
//! |---|---|
//! | `NCCL_DEBUG=INFO` | makes NCCL log what it does; `WARN` logs less |
//! | `NCCL_NVLS_ENABLE=0` | disables NVLink's multicast, which does not work on every machine |
//!
//! Which network interfaces it uses is also set by its variables; NCCL's documentation lists them.
//!
//! [`DistConfig::nccl_max_ctas`](crate::distributed::DistConfig::nccl_max_ctas) limits the multiprocessors that
//! collectives use. tallow sets no variable of NCCL.
//!
//! # A folder for checkpoints
//!
//! Put data and checkpoints in a folder that both hosts see under the same path.
//!
//! - Every rank opens the training and validation data. Ranks with other data are refused: their fingerprints are
//!   compared, as are the configuration, the model and the number of steps taken.
//! - [`Trainer::save`]: call it on every rank. (With [`Trainer::replicate`] alone, rank 0 suffices.) Without sharded
//!   weights, rank 0 writes one file. With [`Trainer::fully_sharded`] each rank writes its part to a file of its own
//!   (`run.safetensors.part-...`) in the same folder, and rank 0 then writes the file that lists the parts. A crash
//!   during a save leaves the previous checkpoint intact. [`TrainConfig::keep`] keeps earlier checkpoints, with their
//!   parts.
//! - [`Trainer::resume`]: every rank reads the file. [`TrainConfig::accumulation`] must not change. The number of ranks
//!   may change if the new number divides `accumulation`. The way in which they train together may change too.
//! - The file `run.safetensors.lock` keeps a second run from writing to the same path. On a file system without locks
//!   nothing prevents that.
//!
//! # Failures
//!
//! Each rank sends rank 0 a heartbeat four times a second, with the operation that it is in. If a process dies, or a
//! call that waits for other ranks lasts longer than the timeout, all ranks return [`Error::Rank`](crate::Error::Rank),
//! which names the rank that has failed. Weights are then undefined. The `?` in the program ends it with exit code 1:
//! start all ranks again, and they resume from the checkpoint. tallow restarts no ranks. torchrun restarts all of them
//! with the option `--max-restarts N`; under Slurm call `srun` in a loop until it succeeds. Neither has been tried. To
//! save before Slurm's time limit, add `#SBATCH --signal=TERM@300`, which sends SIGTERM to the ranks five minutes
//! before it, and handle the signal as `examples/train/signals.rs` does (untried too).
//! [`distributed`](crate::distributed#failures) says when a rank counts as failed, how soon the others notice, and
//! what happens if rank 0 ends or a rank gets SIGTERM.
//!
//! # Before the first run
//!
//! 1. Run the program alone, then with `torchrun --nproc-per-node 2` on one host with two GPUs.
//! 2. Estimate memory and time of the step of 16 ranks: `distributed_benchmark --part paper --world-size 16`, with the
//!    rates that you measured in `--product-tflops`, `--memory-gb-s`, `--reduce-gb-s` and `--gather-gb-s`. For two GPUs
//!    the estimates differed from measured steps by at most 10% (`benches/RESULTS.md`); for more GPUs nothing has been
//!    compared.
//! 3. Measure the collectives on both hosts: start the example `distributed_benchmark` as above, with `--device cuda
//!    --part collectives`.
//!
//! [`DistConfig::timeout`]: crate::distributed::DistConfig::timeout
//! [`Trainer::save`]: crate::train::Trainer::save
//! [`Trainer::resume`]: crate::train::Trainer::resume
//! [`Trainer::replicate`]: crate::train::Trainer::replicate
//! [`Trainer::shard_optimizer`]: crate::train::Trainer::shard_optimizer
//! [`Trainer::fully_sharded`]: crate::train::Trainer::fully_sharded
//! [`TrainConfig::accumulation`]: crate::train::TrainConfig::accumulation
//! [`TrainConfig::keep`]: crate::train::TrainConfig::keep
