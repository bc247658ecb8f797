//! Planned steps of several ranks with layers that the loss does not read; and weights outside layers.

use super::{bits, on_ranks};
use candle_core::{DType, Device, Tensor};
use candle_nn::{Init, VarBuilder};
use rstest::rstest;
use tallow::compile::{Inputs, Step, StepConfig};
use tallow::distributed::{
    Communicator, FullyShard, FullyShardConfig, Replicated, ReplicatedConfig,
};
use tallow::nn::{self, Layer, Linear, Parameter};
use tallow::optim::{AdamWConfig, MissingGradients, Optimizer};
use tallow::{Result, ops};

#[derive(Clone, Copy, Debug)]
enum Job {
    SingleRank,
    Replicated,
    /// Replicated weights with a sharded optimizer state.
    ShardedOptimizer,
    FullySharded,
}

struct Model {
    map: Linear,
    idle: Linear,
    scale: Parameter,
}

impl Model {
    fn new(vb: VarBuilder<'_>) -> Result<Self> {
        Ok(Self {
            map: Linear::new(4, 6, vb.pp("map"))?,
            idle: Linear::new(4, 6, vb.pp("idle"))?,
            scale: Parameter::new(6, Init::Const(0.5), vb.pp("scale"))?,
        })
    }

    fn loss(&self, x: &Tensor) -> Result<Tensor> {
        let y = ops::mul(&self.map.forward(x)?, self.scale.weight())?;
        ops::mean(&ops::mul(&y, &y)?)
    }
}

impl Layer for Model {
    fn visit(&self, path: &str, visit: &mut dyn FnMut(String, &Tensor)) {
        self.map.visit(&nn::join(path, "map"), visit);
        self.idle.visit(&nn::join(path, "idle"), visit);
        self.scale.visit(&nn::join(path, "scale"), visit);
    }
}

/// Returns all weights after three steps on the same batch.
fn weights(ranks: &Communicator, job: Job, missing: MissingGradients) -> Result<Vec<Tensor>> {
    let config = AdamWConfig {
        lr: 1e-2,
        weight_decay: 0.1,
        missing_gradients: missing,
        ..Default::default()
    };
    let clips = StepConfig {
        clip_norm: Some(0.1),
        ..Default::default()
    };
    let seeded = nn::seeded(1, DType::F32, &Device::Cpu);
    let sharded = FullyShard::new(ranks, FullyShardConfig::default())?;
    let model = match job {
        Job::FullySharded => Model::new(sharded.builder(seeded))?,
        _ => Model::new(seeded)?,
    };
    let parameters = match job {
        Job::FullySharded => sharded.parameters(),
        _ => model.parameters(),
    };
    let mut optimizer = Optimizer::new(parameters, config)?;
    if let Job::ShardedOptimizer = job {
        optimizer.shard(ranks)?;
    }
    let loss = |inputs: &Inputs| model.loss(&inputs.get("x")?);
    let mut step = match job {
        Job::SingleRank => Step::new(&optimizer, &clips, loss)?,
        Job::FullySharded => Step::fully_sharded(&optimizer, &clips, &sharded, loss)?,
        Job::Replicated | Job::ShardedOptimizer => {
            let parameters = model.parameters();
            let replicated = Replicated::new(ranks, parameters, ReplicatedConfig::default())?;
            Step::new(&optimizer, &clips, loss)?.replicated(&optimizer, &replicated)?
        }
    };
    let numbers = (0..12).map(|n| ((n * n) as f32 * 0.3).sin());
    let numbers = Tensor::from_iter(numbers, &Device::Cpu)?.reshape((3, 4))?;
    for _ in 0..3 {
        step.run(&mut optimizer, [("x", &numbers)])?;
    }
    optimizer.gather_weights()?;
    let weights = model.parameters().into_iter();
    let weights = weights.map(|(name, var)| match job {
        Job::FullySharded => sharded.full_weight(&name),
        _ => Ok(var.as_tensor().copy()?),
    });
    weights.collect()
}

/// With the same batch on all ranks, every strategy gives the weights of training alone.
#[rstest]
fn as_alone(
    #[values(MissingGradients::Skip, MissingGradients::Zero)] missing: MissingGradients,
    #[values(Job::Replicated, Job::ShardedOptimizer, Job::FullySharded)] job: Job,
) {
    let alone = on_ranks(1, |ranks| weights(&ranks, Job::SingleRank, missing)).remove(0);
    for found in on_ranks(2, |ranks| weights(&ranks, job, missing)) {
        assert_eq!(bits(&found[1]), bits(&alone[1]), "idle");
        for (found, alone) in found.iter().zip(&alone) {
            assert!(super::distance(found, alone) < 1e-5);
        }
    }
    let start = Model::new(nn::seeded(1, DType::F32, &Device::Cpu)).unwrap();
    let is_left = bits(start.idle.weight()) == bits(&alone[1]);
    assert_eq!(is_left, missing == MissingGradients::Skip);
}

/// Steps and evaluations read the full value of a sharded parameter, and its shard has a gradient.
#[test]
fn a_parameter_of_which_ranks_have_parts() {
    let of = |ranks: Communicator| {
        let sharded = FullyShard::new(&ranks, FullyShardConfig::default())?;
        let vb = sharded.builder(nn::seeded(1, DType::F32, &Device::Cpu));
        let model = Model::new(vb)?;
        let optimizer = Optimizer::new(
            sharded.parameters(),
            AdamWConfig {
                missing_gradients: MissingGradients::Skip,
                ..Default::default()
            },
        )?;
        let mut step =
            Step::fully_sharded(&optimizer, &StepConfig::default(), &sharded, |inputs| {
                model.loss(&inputs.get("x")?)
            })?;
        let x = Tensor::ones((3, 4), DType::F32, &Device::Cpu)?;
        let evaluated = step.forward([("x", &x)])?.to_scalar::<f32>()?;
        let loss = step.forward_backward([("x", &x)])?;
        assert!((loss - evaluated).abs() <= 1e-6 * loss.abs());
        let gradients = step.gradients()?;
        let (_, part) = gradients.iter().find(|(name, _)| name == "scale").unwrap();
        Ok(part.flatten_all()?.to_vec1::<f32>()?)
    };
    let found = on_ranks(2, of).concat();
    let whole = Model::new(nn::seeded(1, DType::F32, &Device::Cpu)).unwrap();
    let x = Tensor::ones((3, 4), DType::F32, &Device::Cpu).unwrap();
    let gradients = tallow::backward(whole.loss(&x).unwrap()).unwrap();
    let (_, scale) = whole.scale.parameters().remove(0);
    let wanted = gradients.get(&scale).unwrap().to_vec1::<f32>().unwrap();
    for (found, wanted) in found.iter().zip(&wanted) {
        assert!(
            (found - wanted).abs() <= 1e-6 * wanted.abs(),
            "{found} {wanted}"
        );
    }
}
