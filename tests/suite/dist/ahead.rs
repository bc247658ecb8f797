//! Weights that are gathered a layer ahead: what is read is what they are then, whatever was gathered before.

use super::{averaged, batch, bits, config_of_six_layers, on_ranks};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use rstest::rstest;
use std::num::NonZeroUsize;
use tallow::dist::{
    self, Communicator, FullyShard, FullyShardConfig, Replicated, ReplicatedConfig,
};
use tallow::model::{TransformerConfig, TransformerLM};
use tallow::nn::{self, Checkpointing, Layer, Linear};
use tallow::optim::{AdamW, AdamWConfig};
use tallow::precision::Precision;
use tallow::{Result, backward, no_grad, ops};

fn every(blocks: usize) -> Checkpointing {
    Checkpointing::Every(NonZeroUsize::new(blocks).unwrap())
}

/// Steps of two micro-batches, both forwards before both backwards, with an evaluation between, in two dtypes: the bits
/// of replicated ones.
#[rstest]
fn blocks_of_a_model(
    #[values(1, 3)] world_size: usize,
    #[values(Checkpointing::None, Checkpointing::Block, every(2), every(4))]
    checkpointing: Checkpointing,
) {
    let config = TransformerConfig {
        checkpointing,
        ..config_of_six_layers()
    };
    on_ranks(world_size, |ranks| {
        let whole = TransformerLM::new(&config, 1, &Device::Cpu)?;
        let mut of_whole = AdamW::new(whole.parameters(), AdamWConfig::default())?;
        let replicated = Replicated::new(&ranks, whole.parameters(), ReplicatedConfig::default())?;
        let sharded = FullyShard::new(&ranks, FullyShardConfig::default())?;
        let vb = sharded.builder(nn::seeded(1, DType::F32, &Device::Cpu));
        let model = TransformerLM::from_var_builder(&config, vb)?;
        let mut optimizer = AdamW::new(sharded.parameters(), AdamWConfig::default())?;
        for precision in [Precision::BF16, Precision::F32, Precision::BF16] {
            let loss = |model: &TransformerLM, index: usize| {
                let [tokens, targets] = batch(2 * ranks.rank() + index);
                precision.run(|| model.loss(&tokens, &targets))
            };
            let [first, second] = [loss(&model, 0)?, loss(&model, 1)?];
            let evaluated = no_grad(|| loss(&model, 0))?;
            assert_eq!(bits(&evaluated), bits(&first));
            let found = [backward(first)?, backward(second)?];
            let [first, second] = [loss(&whole, 0)?, loss(&whole, 1)?];
            let wanted = [
                averaged(&replicated, first)?,
                averaged(&replicated, second)?,
            ];
            for (found, wanted) in found.iter().zip(&wanted) {
                of_whole.step(wanted)?;
                optimizer.step(found)?;
            }
        }
        for (name, weight) in whole.parameters() {
            assert!(bits(&sharded.whole(&name)?) == bits(&weight), "{name}");
        }
        Ok(())
    });
}

/// Three maps (16, 16), each read after the other, and the parts of their weights.
fn maps(ranks: &Communicator) -> Result<(Vec<Linear>, FullyShard)> {
    let sharded = FullyShard::new(ranks, FullyShardConfig::default())?;
    let vb = sharded.builder(nn::seeded(1, DType::F32, &Device::Cpu));
    let maps = (0..3).map(|i| Linear::with_bias(16, 16, vb.pp(i)));
    let maps: Vec<Linear> = maps.collect::<Result<_>>()?;
    dist::gather_ahead(maps.iter().map(Layer::weights));
    Ok((maps, sharded))
}

fn through(maps: &[Linear], rank: usize) -> Result<Tensor> {
    let x = Tensor::arange(0f32, 32.0, &Device::Cpu)?.reshape((2, 16))?;
    let x = (x * (0.1 + 0.1 * rank as f64))?;
    maps.iter().try_fold(x, |x, map| map.forward(&x))
}

/// The same maps as a whole.
fn whole_maps(sharded: &FullyShard) -> Result<Vec<Linear>> {
    let of = |name: String| sharded.whole(&name);
    let map = |i: usize| {
        let [weight, bias] = [of(format!("{i}.weight"))?, of(format!("{i}.bias"))?];
        let [weight, bias] = [Var::from_tensor(&weight)?, Var::from_tensor(&bias)?];
        Linear::from_weights(weight.into_inner(), Some(bias.into_inner()))
    };
    (0..3).map(map).collect()
}

/// What a pass has gathered and not read is not read by the next, whose weights are others.
#[rstest]
fn passes_that_end_early(#[values(0, 1, 2)] layers: usize, #[values(false, true)] in_graph: bool) {
    on_ranks(2, |ranks| {
        let (maps, sharded) = maps(&ranks)?;
        for factor in [1.0, 2.0, -0.5] {
            for (_, part) in sharded.parameters() {
                part.set(&(part.as_tensor() * factor)?)?;
            }
            let wanted = through(&whole_maps(&sharded)?, ranks.rank())?;
            let found = match in_graph {
                true => through(&maps, ranks.rank())?,
                false => no_grad(|| through(&maps, ranks.rank()))?,
            };
            assert_eq!(bits(&found), bits(&wanted));
            through(&maps[..layers], ranks.rank())?;
        }
        Ok(())
    });
}

/// Gradients of a weight that is read more than once are added when they are there; candle's own backward has them too.
#[test]
fn gradients_of_weights_read_twice() {
    on_ranks(2, |ranks| {
        let (maps, sharded) = maps(&ranks)?;
        let whole = whole_maps(&sharded)?;
        let loss = |maps: &[Linear]| {
            let y = through(maps, ranks.rank())?;
            let again = maps[1].forward(&maps[0].forward(&y)?)?;
            ops::mean(&ops::mul(&again, &y)?)
        };
        let named = whole.iter().enumerate().flat_map(|(i, map)| {
            let parameters = map.parameters().into_iter();
            parameters.map(move |(name, var)| (format!("{i}.{name}"), var))
        });
        let named: Vec<(String, Var)> = named.collect();
        let replicated = Replicated::new(&ranks, named.clone(), ReplicatedConfig::default())?;
        let wanted = averaged(&replicated, loss(&whole)?)?;
        let of_parts = |found: GradStore| -> Result<()> {
            let parts = sharded.parameters();
            assert_eq!(parts.len(), named.len());
            for (name, part) in &parts {
                let (_, var) = named.iter().find(|(other, _)| other == name).unwrap();
                let wanted = wanted.get(var).unwrap().flatten_all()?;
                let found = found.get(part).unwrap().flatten_all()?;
                let count = found.elem_count();
                let wanted = wanted.narrow(0, ranks.rank() * count, count)?;
                // Sums of ranks' sums, and sums of sums of ranks.
                let largest = (found - &wanted)?.abs()?.max(0)?.to_scalar::<f32>()?;
                let scale = wanted.abs()?.max(0)?.to_scalar::<f32>()?;
                assert!(largest <= 1e-6 * scale, "{name}: {largest} of {scale}");
            }
            Ok(())
        };
        of_parts(backward(loss(&maps)?)?)?;
        of_parts(loss(&maps)?.backward()?)
    });
}

/// Backward of a graph that was made before weights were changed reads them as they are since.
#[rstest]
fn backwards_with_a_change_between(
    #[values(1, 2, 3)] layers: usize,
    #[values(false, true)] recomputed: bool,
) {
    on_ranks(2, |ranks| {
        let sharded = FullyShard::new(&ranks, FullyShardConfig::default())?;
        let vb = sharded.builder(nn::seeded(1, DType::F32, &Device::Cpu));
        let maps = (0..layers).map(|i| Linear::new(16, 16, vb.pp(i)));
        let maps: Vec<Linear> = maps.collect::<Result<_>>()?;
        dist::gather_ahead(maps.iter().map(Layer::weights));
        let whole = (0..layers).map(|i| {
            let weight = Var::from_tensor(&sharded.whole(&format!("{i}.weight"))?)?;
            Linear::from_weights(weight.into_inner(), None)
        });
        let whole: Vec<Linear> = whole.collect::<Result<_>>()?;
        let loss = |maps: &[Linear], factor: f64| {
            let x = Tensor::arange(0f32, 32.0, &Device::Cpu)?.reshape((2, 16))?;
            let x = Var::from_tensor(&(x * (factor + 0.1 * ranks.rank() as f64))?)?.into_inner();
            let y = maps.iter().try_fold(x, |x, map| {
                let map = map.clone();
                match recomputed {
                    true => nn::checkpoint(move |[x]| map.forward(x), [&x]),
                    false => map.forward(&x),
                }
            })?;
            ops::mean(&ops::mul(&y, &y)?)
        };
        let losses = |maps: &[Linear]| Ok::<_, tallow::Error>([loss(maps, 0.1)?, loss(maps, 0.2)?]);
        let weights = whole.iter().enumerate().map(|(i, map)| {
            let (_, var) = map.parameters().swap_remove(0);
            (format!("{i}.weight"), var)
        });
        let weights: Vec<(String, Var)> = weights.collect();
        let replicated = Replicated::new(&ranks, weights.clone(), ReplicatedConfig::default())?;
        let halve = |vars: &[(String, Var)]| -> Result<()> {
            for (_, var) in vars {
                var.set(&(var.as_tensor() * 0.5)?)?;
            }
            Ok(())
        };
        for (wanted, found) in losses(&whole)?.into_iter().zip(losses(&maps)?) {
            let (wanted, found) = (averaged(&replicated, wanted)?, backward(found)?);
            for ((name, var), (_, part)) in weights.iter().zip(sharded.parameters()) {
                let found = found.get(&part).unwrap();
                let wanted = wanted.get(var).unwrap().flatten_all()?;
                let wanted = wanted.narrow(0, 128 * ranks.rank(), 128)?; // of 256
                assert!(bits(found) == bits(&wanted), "{name}");
            }
            halve(&weights)?;
            halve(&sharded.parameters())?;
        }
        Ok(())
    });
}
