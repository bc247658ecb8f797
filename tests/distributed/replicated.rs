//! Data parallelism. A port of Stanford CS336's tests with a small network, with or without a tied weight: after each
//! of five steps every rank has the weights of one process that saw the whole batch.

use super::{at_most, join, succeed};
use candle_core::{Device, Tensor, Var};
use rstest::rstest;
use tallow::distributed::{Communicator, Exchange, Replicated, ReplicatedConfig};
use tallow::{Result, ops};

#[rstest]
#[cfg_attr(feature = "cuda", ignore = "needs two CUDA devices")]
fn small_network(#[values(2, 3, 4)] ranks: usize, #[values("replicated", "tied")] case: &str) {
    succeed(case, at_most(ranks));
}

pub(super) const BATCH: usize = 24; // divisible by two, three and four ranks
const LEARNING_RATE: f64 = 0.1;

pub fn as_one_process() -> Result<()> {
    check(false)
}

pub fn tied_as_one_process() -> Result<()> {
    check(true)
}

/// Returns pseudo-random numbers in [-1, 1), the same on every rank.
pub(super) fn numbers(seed: u32, shape: (usize, usize), device: &Device) -> Result<Tensor> {
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    let numbers: Vec<f32> = std::iter::repeat_with(next)
        .take(shape.0 * shape.1)
        .collect();
    Ok(Tensor::from_vec(numbers, shape, device)?)
}

/// Linear layers of widths 10, 10, 10, 10, 5 with ReLU between them. If tied, the second and the third share a weight.
pub(super) struct Network {
    pub(super) layers: Vec<Var>,
}

impl Network {
    pub(super) fn new(seed: u32, tied: bool, device: &Device) -> Result<Self> {
        let weight = |seed: u32, shape| -> Result<Var> {
            let numbers = (numbers(seed, shape, device)? * 0.3)?;
            Ok(Var::from_tensor(&numbers)?)
        };
        let second = weight(seed + 1, (10, 10))?;
        let third = match tied {
            true => second.clone(),
            false => weight(seed + 2, (10, 10))?,
        };
        let layers = vec![
            weight(seed, (10, 10))?,
            second,
            third,
            weight(seed + 3, (5, 10))?,
        ];
        Ok(Self { layers })
    }

    pub(super) fn parameters(&self) -> Vec<(String, Var)> {
        let layers = self.layers.iter().enumerate();
        layers
            .map(|(i, var)| (format!("layers.{i}"), var.clone()))
            .collect()
    }

    /// Returns the mean squared error.
    pub(super) fn loss(&self, x: &Tensor, y: &Tensor) -> Result<Tensor> {
        let mut x = x.clone();
        for (i, layer) in self.layers.iter().enumerate() {
            x = ops::linear(&x, layer)?;
            if i + 1 < self.layers.len() {
                x = ops::relu(&x)?;
            }
        }
        let error = ops::sub(&x, y)?;
        ops::mean(&ops::mul(&error, &error)?)
    }

    /// Takes a step of gradient descent.
    fn step(&self, gradients: &candle_core::backprop::GradStore) -> Result<()> {
        let mut seen = Vec::new();
        for layer in &self.layers {
            if !seen.contains(&layer.id()) {
                seen.push(layer.id());
                let gradient = gradients.get(layer).unwrap();
                layer.set(&(layer.as_tensor() - (gradient * LEARNING_RATE)?)?)?;
            }
        }
        Ok(())
    }
}

fn check(tied: bool) -> Result<()> {
    let ranks = join(60)?;
    for exchange in [
        Exchange::PerParameter,
        Exchange::Flat,
        Exchange::Overlapped { bucket_bytes: 0 },
        Exchange::Overlapped { bucket_bytes: 500 },
        Exchange::Overlapped {
            bucket_bytes: 1 << 20,
        },
    ] {
        five_steps(&ranks, exchange, tied)?;
    }
    ranks.barrier()
}

fn five_steps(ranks: &Communicator, exchange: Exchange, tied: bool) -> Result<()> {
    let device = ranks.device();
    let alone = Network::new(1, tied, device)?;
    let network = Network::new(1 + 100 * ranks.rank() as u32, tied, device)?; // rank 0's are broadcast
    let config = ReplicatedConfig {
        exchange,
        dtype: None,
    };
    let replicated = Replicated::new(ranks, network.parameters(), config)?;
    let rows = BATCH / ranks.world_size();
    for step in 0..5 {
        let (x, y) = (
            numbers(7 + step, (BATCH, 10), device)?,
            numbers(70 + step, (BATCH, 5), device)?,
        );
        alone.step(&tallow::backward(alone.loss(&x, &y)?)?)?;
        let part = |x: &Tensor| {
            let part = x.narrow(0, ranks.rank() * rows, rows)?;
            part.contiguous()
        };
        network.step(&super::averaged(
            &replicated,
            network.loss(&part(&x)?, &part(&y)?)?,
        )?)?;
        for (ours, wanted) in network.layers.iter().zip(&alone.layers) {
            let values = |x: &Var| x.flatten_all().and_then(|x| x.to_vec1::<f32>());
            for (a, b) in values(ours)?.into_iter().zip(values(wanted)?) {
                assert!(
                    (a - b).abs() <= 1e-8 + 1e-5 * b.abs().max(0.1),
                    "{exchange}: {a} {b}"
                );
            }
        }
    }
    Ok(())
}
