//! Tests whose ranks are processes: each test starts this program again, once per rank. They use MPI on CPUs (feature
//! `mpi`), or NCCL on two GPUs (feature `cuda`; those tests are ignored by default).
#![cfg(any(feature = "cuda", feature = "mpi"))]

mod collectives;
mod failures;
mod fully_sharded;
mod replicated;
mod sharded;
mod training;

use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};
use tallow::Result;
use tallow::distributed::{self, Communicator, DistConfig};

/// The environment variable that names the rank's entry of [`CASES`].
const CASE: &str = "TALLOW_TEST_CASE";

/// A name, and the function that each rank runs.
type Case = (&'static str, fn() -> Result<()>);

const CASES: [Case; 10] = [
    ("collectives", collectives::of_every_dtype),
    ("replicated", replicated::as_one_process),
    ("tied", replicated::tied_as_one_process),
    ("sharded", sharded::as_one_process),
    ("fully sharded", fully_sharded::as_one_process),
    ("training", training::as_one_process),
    ("stopped", failures::stopped),
    ("late", failures::late),
    ("ended", failures::ended),
    ("disagreeing", failures::disagreeing),
];

/// Runs one rank of a case; does nothing unless a test has started this process.
#[test]
fn rank() {
    let Ok(case) = std::env::var(CASE) else {
        return;
    };
    let (_, run) = CASES.iter().find(|(name, _)| *name == case).unwrap();
    run().unwrap_or_else(|error| panic!("{case}: {error}"));
}

/// Joins the job with a timeout in seconds.
fn join(timeout: u64) -> Result<Communicator> {
    let device = if cfg!(feature = "cuda") {
        "cuda"
    } else {
        "cpu"
    };
    distributed::init(&DistConfig {
        device: device.into(),
        timeout: Duration::from_secs(timeout),
        ..Default::default()
    })
}

/// Limits the number of ranks to two if they run on GPUs.
fn at_most(count: usize) -> usize {
    if cfg!(feature = "cuda") {
        count.min(2)
    } else {
        count
    }
}

/// Configures a program to run a case: a rank, or the mpirun that starts the ranks.
fn configure_case<'c>(program: &'c mut Command, case: &str) -> &'c mut Command {
    program
        .args(["--exact", "rank", "--nocapture"])
        .env(CASE, case)
        .env("RAYON_NUM_THREADS", "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
}

/// The output of all ranks of a case, whether all succeeded, and the time they needed.
struct Outcome {
    success: bool,
    text: String,
    took: Duration,
}

impl Outcome {
    fn of(outputs: &[Output], began: Instant) -> Self {
        let text = outputs.iter().map(|output| {
            let [out, err] = [&output.stdout, &output.stderr].map(|x| String::from_utf8_lossy(x));
            format!("{out}{err}{}\n", output.status)
        });
        Self {
            success: outputs.iter().all(|output| output.status.success()),
            text: text.collect(),
            took: began.elapsed(),
        }
    }
}

/// Runs `count` ranks of a case by MPI.
#[cfg(not(feature = "cuda"))]
fn ranks(case: &str, count: usize, variables: &[(&str, String)]) -> Outcome {
    let began = Instant::now();
    let mut mpirun = Command::new("mpirun");
    mpirun
        .args(["-n", &count.to_string()])
        .arg(std::env::current_exe().unwrap())
        // Allows root in a container, and more ranks than cores.
        .envs(["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"].map(|name| (name, "1")))
        .env("OMPI_MCA_rmaps_base_oversubscribe", "1")
        .env("OMPI_MCA_hwloc_base_binding_policy", "none")
        .env("OMPI_MCA_btl_vader_single_copy_mechanism", "none")
        .envs(variables.iter().cloned());
    let output = configure_case(&mut mpirun, case)
        .output()
        .expect("mpirun is there");
    Outcome::of(&[output], began)
}

/// Runs `count` ranks of a case by NCCL, with the variables that torchrun sets.
#[cfg(feature = "cuda")]
fn ranks(case: &str, count: usize, variables: &[(&str, String)]) -> Outcome {
    let began = Instant::now();
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let children = (0..count).map(|rank| {
        let mut program = Command::new(std::env::current_exe().unwrap());
        program
            .env("RANK", rank.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("WORLD_SIZE", count.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .envs(variables.iter().cloned());
        configure_case(&mut program, case).spawn().unwrap()
    });
    let children: Vec<_> = children.collect();
    let outputs = children
        .into_iter()
        .map(|child| child.wait_with_output().unwrap());
    Outcome::of(&outputs.collect::<Vec<_>>(), began)
}

fn succeed(case: &str, count: usize) {
    let ended = ranks(case, count, &[]);
    assert!(ended.success, "{case} of {count}: {}", ended.text);
}

/// Returns the gradients of a rank's loss, averaged over the ranks.
fn averaged(
    replicated: &tallow::distributed::Replicated,
    loss: candle_core::Tensor,
) -> tallow::Result<candle_core::backprop::GradStore> {
    let mut gradients = tallow::backward(loss)?;
    replicated.average(&mut gradients)?;
    Ok(gradients)
}
