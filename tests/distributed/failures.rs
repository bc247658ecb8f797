//! Ranks that stop, die or disagree: the other ranks end within the timeout, with an error that names the rank.

use super::{Outcome, at_most, join, ranks};
use candle_core::{DType, Tensor, Var};
use std::time::{Duration, Instant};
use tallow::compile::{Inputs, Step, StepConfig};
use tallow::distributed::{Reduce, Replicated, ReplicatedConfig};
use tallow::optim::{AdamWConfig, Optimizer};
use tallow::{Error, Result, ops};

/// Enough time for a busy machine to start all processes.
const SOON: Duration = Duration::from_secs(45);

#[test]
#[cfg_attr(feature = "cuda", ignore = "needs two CUDA devices")]
fn a_stopped_rank_is_named() {
    let Outcome {
        success,
        text,
        took,
    } = ranks("stopped", at_most(3), &[]);
    assert!(!success && took < SOON, "{took:?}: {text}");
    assert!(
        text.contains("rank 1, in ") && text.contains("has waited"),
        "{text}"
    );
}

#[test]
#[cfg_attr(feature = "cuda", ignore = "needs two CUDA devices")]
fn a_rank_that_is_late_for_a_step_is_named() {
    let Outcome {
        success,
        text,
        took,
    } = ranks("late", 2, &[]);
    assert!(!success && took < SOON, "{took:?}: {text}");
    assert!(
        text.contains("rank 1, in its own work") && text.contains("has waited"),
        "{text}"
    );
}

#[test]
#[cfg_attr(feature = "cuda", ignore = "needs two CUDA devices")]
fn a_rank_that_ends_ends_all() {
    let Outcome {
        success,
        text,
        took,
    } = ranks("ended", at_most(3), &[]);
    assert!(!success && took < SOON, "{took:?}: {text}");
}

#[test]
#[cfg_attr(feature = "cuda", ignore = "needs two CUDA devices")]
fn a_rank_that_disagrees_is_named_on_all() {
    let Outcome {
        success,
        text,
        took,
    } = ranks("disagreeing", at_most(3), &[]);
    assert!(success && took < SOON, "{took:?}: {text}");
}

/// Stops rank 1 (SIGSTOP) after three collectives. The others notice, and one of them kills it.
pub fn stopped() -> Result<()> {
    let ranks = join(4)?;
    let pids = Tensor::new(&[i64::from(std::process::id())], ranks.device())?;
    let pids = ranks.all_gather(&pids)?.to_vec1::<i64>()?;
    let x = Tensor::ones(1000, DType::F32, ranks.device())?;
    for _ in 0..3 {
        ranks.all_reduce(&x, Reduce::Mean)?;
    }
    if ranks.rank() == 1 {
        // SAFETY: a signal to this process.
        unsafe { libc::kill(libc::getpid(), libc::SIGSTOP) };
        std::thread::sleep(Duration::from_secs(1)); // stopping all threads is not immediate
    }
    let began = Instant::now();
    let error = ranks.barrier().unwrap_err();
    // SAFETY: a signal to a stopped process of this test.
    unsafe { libc::kill(pids[1] as libc::pid_t, libc::SIGKILL) };
    assert!(matches!(error, Error::Rank { rank: 1, .. }), "{error}");
    assert!(
        began.elapsed() < Duration::from_secs(20),
        "{:?}",
        began.elapsed()
    );
    Err(error)
}

/// Lets rank 1 miss a planned step, in which rank 0 waits: rank 1 is the one that failed.
pub fn late() -> Result<()> {
    let ranks = join(8)?;
    let weight = Var::ones((4, 4), DType::F32, ranks.device())?;
    let parameters = vec![("weight".to_string(), weight.clone())];
    let mut optimizer = Optimizer::new(parameters.clone(), AdamWConfig::default())?;
    let replicated = Replicated::new(&ranks, parameters, ReplicatedConfig::default())?;
    let x = Tensor::ones((2, 4), DType::F32, ranks.device())?;
    let loss = |inputs: &Inputs| ops::mean(&ops::linear(&inputs.get("x")?, &weight)?);
    // A first step on a GPU loads libraries and compiles kernels. Without the other rank, no timeout covers that.
    let mut alone = Step::new(&optimizer, &StepConfig::default(), loss)?;
    alone.run(&mut optimizer, [("x", &x)])?;
    let mut step =
        Step::new(&optimizer, &StepConfig::default(), loss)?.replicated(&optimizer, &replicated)?;
    for _ in 0..4 {
        step.run(&mut optimizer, [("x", &x)])?;
    }
    let began = Instant::now();
    let error = loop {
        let found = match ranks.rank() {
            0 => step.run(&mut optimizer, [("x", &x)]).map(|_| ()),
            _ => ranks.check(),
        };
        if let Err(error) = found {
            break error;
        }
        assert!(began.elapsed() < Duration::from_secs(40));
        std::thread::sleep(Duration::from_millis(20));
    };
    assert!(matches!(error, Error::Rank { rank: 1, .. }), "{error}");
    Err(error)
}

/// Kills the last rank between two collectives.
pub fn ended() -> Result<()> {
    let ranks = join(20)?;
    let x = Tensor::ones(1000, DType::F32, ranks.device())?;
    ranks.all_reduce(&x, Reduce::Mean)?;
    if ranks.rank() + 1 == ranks.world_size() {
        // SAFETY: a signal to this process.
        unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    }
    loop {
        ranks.all_reduce(&x, Reduce::Mean)?;
        ranks.barrier()?; // waits for the other ranks, on a GPU too
    }
}

/// Gives the last rank another batch size.
pub fn disagreeing() -> Result<()> {
    let ranks = join(20)?;
    let last = ranks.world_size() - 1;
    let batch_size = if ranks.rank() == last { 8 } else { 4 };
    let facts = [
        ("model", "tiny".into()),
        ("batch size", batch_size.to_string()),
    ];
    let error = ranks.check_equal("the benchmark", &facts).unwrap_err();
    let text = error.to_string();
    assert!(
        matches!(error, Error::Rank { rank, .. } if rank == last),
        "{text}"
    );
    assert!(
        text.contains("batch size") && text.contains('8') && text.contains('4'),
        "{text}"
    );
    Ok(())
}
