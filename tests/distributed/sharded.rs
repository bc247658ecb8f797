//! The sharded optimizer. A port of Stanford CS336's test: after ten steps of a small network, eager and planned, with
//! or without a tied weight, the weights equal those of an unsharded optimizer.

use super::replicated::{BATCH, Network, numbers};
use super::{at_most, join, succeed};
use rstest::rstest;
use tallow::compile::{Inputs, Step, StepConfig};
use tallow::distributed::{Communicator, Replicated, ReplicatedConfig};
use tallow::optim::{AdamWConfig, Optimizer};
use tallow::{Error, Result};

#[rstest]
#[cfg_attr(feature = "cuda", ignore = "needs two CUDA devices")]
fn small_network(#[values(2, 3, 4)] ranks: usize) {
    succeed("sharded", at_most(ranks));
}

pub(super) const CONFIG: AdamWConfig = AdamWConfig {
    lr: 0.1,
    betas: (0.9, 0.999),
    eps: 1e-8,
    weight_decay: 0.1,
    moments: tallow::optim::Moments::Wide,
    missing_gradients: tallow::optim::MissingGradients::Error,
};

pub fn as_one_process() -> Result<()> {
    let ranks = join(60)?;
    for tied in [false, true] {
        ten_steps(&ranks, tied, None)?;
        for clip_norm in [None, Some(1e6)] {
            let config = StepConfig {
                clip_norm, // larger than any gradient norm here
                ..Default::default()
            };
            ten_steps(&ranks, tied, Some(&config))?;
        }
    }
    ranks.barrier()?;
    one_that_differs(&ranks)
}

fn ten_steps(ranks: &Communicator, tied: bool, planned: Option<&StepConfig>) -> Result<()> {
    let device = ranks.device();
    let (alone, network) = (
        Network::new(1, tied, device)?,
        Network::new(1, tied, device)?,
    );
    let mut wanted = Optimizer::new(distinct(&alone), CONFIG)?;
    let mut optimizer = Optimizer::new(distinct(&network), CONFIG)?;
    optimizer.shard(ranks)?;
    let parameters = distinct(&network);
    let replicated = Replicated::new(ranks, parameters, ReplicatedConfig::default())?;
    let rows = BATCH / ranks.world_size();
    let mut step = match planned {
        None => None,
        Some(config) => {
            let loss = |inputs: &Inputs| network.loss(&inputs.get("x")?, &inputs.get("y")?);
            let step = Step::new(&optimizer, config, loss)?;
            Some(step.replicated(&optimizer, &replicated)?)
        }
    };
    for number in 0..10 {
        let x = numbers(7 + number, (BATCH, 10), device)?;
        let y = numbers(70 + number, (BATCH, 5), device)?;
        wanted.step(&tallow::backward(alone.loss(&x, &y)?)?)?;
        let [x, y] = [x, y].map(|x| x.narrow(0, ranks.rank() * rows, rows));
        let (x, y) = (x?.contiguous()?, y?.contiguous()?);
        match &mut step {
            Some(step) => {
                step.run(&mut optimizer, [("x", &x), ("y", &y)])?;
            }
            None => optimizer.step(&super::averaged(&replicated, network.loss(&x, &y)?)?)?,
        }
    }
    optimizer.gather_weights()?;
    for (ours, wanted) in network.layers.iter().zip(&alone.layers) {
        let values = |x: &candle_core::Var| x.flatten_all().and_then(|x| x.to_vec1::<f32>());
        for (a, b) in values(ours)?.into_iter().zip(values(wanted)?) {
            assert!((a - b).abs() <= 1e-4, "tied {tied}, {planned:?}: {a} {b}");
        }
    }
    Ok(())
}

/// Returns the parameters, a tied weight only once.
pub(super) fn distinct(network: &Network) -> Vec<(String, candle_core::Var)> {
    let mut seen = Vec::new();
    let mut parameters = network.parameters();
    parameters.retain(|(_, var)| {
        let is_new = !seen.contains(&var.id());
        seen.push(var.id());
        is_new
    });
    parameters
}

/// Checks that every rank reports an error if rank 1 has taken one step more than the others.
fn one_that_differs(ranks: &Communicator) -> Result<()> {
    let device = ranks.device();
    let network = Network::new(1, false, device)?;
    let mut optimizer = Optimizer::new(network.parameters(), CONFIG)?;
    if ranks.rank() == 1 {
        let (x, y) = (
            numbers(7, (BATCH, 10), device)?,
            numbers(70, (BATCH, 5), device)?,
        );
        optimizer.step(&tallow::backward(network.loss(&x, &y)?)?)?;
    }
    let error = optimizer.shard(ranks).unwrap_err();
    assert!(matches!(error, Error::Rank { rank: 1, .. }), "{error}");
    Ok(())
}
