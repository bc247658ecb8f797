//! Ranks that are processes: each test starts this program again, some times. By MPI on CPUs (feature `mpi`), by NCCL
//! on two GPUs (feature `cuda`; these tests are ignored unless asked for).
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

/// Which of [`CASES`] a rank runs.
const CASE: &str = "TALLOW_TEST_CASE";

/// What a rank does, and its name.
type Case = (&'static str, fn() -> Result<()>);

const CASES: [Case; 9] = [
    ("collectives", collectives::of_every_dtype),
    ("replicated", replicated::as_one_process),
    ("tied", replicated::tied_as_one_process),
    ("sharded", sharded::as_one_process),
    ("fully sharded", fully_sharded::as_one_process),
    ("training", training::as_one_process),
    ("stopped", failures::stopped),
    ("ended", failures::ended),
    ("disagreeing", failures::disagreeing),
];

/// One rank of a case; nothing where no test has started it.
#[test]
fn rank() {
    let Ok(case) = std::env::var(CASE) else {
        return;
    };
    let (_, run) = CASES.iter().find(|(name, _)| *name == case).unwrap();
    run().unwrap_or_else(|error| panic!("{case}: {error}"));
}

/// Joins the job, with so many seconds of patience.
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

/// How many ranks there may be: as many as GPUs, or what a test asks for.
fn at_most(count: usize) -> usize {
    if cfg!(feature = "cuda") {
        count.min(2)
    } else {
        count
    }
}

/// Has a program run a case: a rank, or mpirun, which starts them.
fn of_case<'c>(program: &'c mut Command, case: &str) -> &'c mut Command {
    program
        .args(["--exact", "rank", "--nocapture"])
        .env(CASE, case)
        .env("RAYON_NUM_THREADS", "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
}

/// What the ranks of a case have printed, and whether all ended well.
struct Ended {
    success: bool,
    text: String,
    took: Duration,
}

impl Ended {
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

/// Runs so many ranks of a case by MPI.
#[cfg(not(feature = "cuda"))]
fn ranks(case: &str, count: usize, variables: &[(&str, String)]) -> Ended {
    let began = Instant::now();
    let mut mpirun = Command::new("mpirun");
    mpirun
        .args(["-n", &count.to_string()])
        .arg(std::env::current_exe().unwrap())
        // As root, on fewer cores than ranks, in a container.
        .envs(["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"].map(|name| (name, "1")))
        .env("OMPI_MCA_rmaps_base_oversubscribe", "1")
        .env("OMPI_MCA_hwloc_base_binding_policy", "none")
        .env("OMPI_MCA_btl_vader_single_copy_mechanism", "none")
        .envs(variables.iter().cloned());
    let output = of_case(&mut mpirun, case)
        .output()
        .expect("mpirun is there");
    Ended::of(&[output], began)
}

/// Runs so many ranks of a case by NCCL, with the variables that torchrun sets.
#[cfg(feature = "cuda")]
fn ranks(case: &str, count: usize, variables: &[(&str, String)]) -> Ended {
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
        of_case(&mut program, case).spawn().unwrap()
    });
    let children: Vec<_> = children.collect();
    let outputs = children
        .into_iter()
        .map(|child| child.wait_with_output().unwrap());
    Ended::of(&outputs.collect::<Vec<_>>(), began)
}

/// All ranks of a case end well.
fn succeed(case: &str, count: usize) {
    let ended = ranks(case, count, &[]);
    assert!(ended.success, "{case} of {count}: {}", ended.text);
}

/// The gradients of a rank's loss, averaged over the ranks.
fn averaged(
    replicated: &tallow::distributed::Replicated,
    loss: candle_core::Tensor,
) -> tallow::Result<candle_core::backprop::GradStore> {
    let mut gradients = tallow::backward(loss)?;
    replicated.average(&mut gradients)?;
    Ok(gradients)
}
