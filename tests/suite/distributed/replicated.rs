//! Eager data parallelism: gradients averaged over all ranks.

use super::{EXCHANGES, averaged, batch, bits, distance, model, on_ranks};
use crate::check::refusal;
use candle_core::{DType, Device, Tensor, Var};
use rstest::rstest;
use tallow::distributed::{Replicated, ReplicatedConfig};
use tallow::optim::{GradientAccumulator, MissingGradients};
use tallow::{Error, ops};

/// Returns the gradients of one rank that has the batches of all.
fn accumulated(world_size: usize) -> Vec<(String, Tensor)> {
    let model = model(1);
    let mut sum = GradientAccumulator::new(model.parameters());
    for rank in 0..world_size {
        let [tokens, targets] = batch(rank);
        let loss = model.loss(&tokens, &targets).unwrap();
        sum.add(tallow::backward(loss).unwrap()).unwrap();
    }
    let mean = sum.mean().unwrap();
    let named = model.parameters().into_iter();
    let named = named.map(|(name, var)| (name, mean.get(&var).unwrap().clone()));
    named.collect()
}

#[rstest]
fn as_one_rank_with_all_batches(#[values(2, 3)] world_size: usize) {
    let wanted = accumulated(world_size);
    for exchange in EXCHANGES {
        let found = on_ranks(world_size, |ranks| {
            let model = model(1 + ranks.rank() as u64); // rank 0's are broadcast
            let config = ReplicatedConfig {
                exchange,
                dtype: None,
            };
            let replicated = Replicated::new(&ranks, model.parameters(), config)?;
            let [tokens, targets] = batch(ranks.rank());
            let gradients = averaged(&replicated, model.loss(&tokens, &targets)?)?;
            let named = model.parameters().into_iter();
            let named = named.map(|(name, var)| (name, gradients.get(&var).unwrap().clone()));
            Ok(named.collect::<Vec<_>>())
        });
        for (i, (name, wanted)) in wanted.iter().enumerate() {
            let of_ranks: Vec<_> = found.iter().map(|found| bits(&found[i].1)).collect();
            assert!(
                of_ranks.iter().all(|x| *x == of_ranks[0]),
                "{name} {exchange}"
            );
            assert_eq!(found[0][i].0, *name);
            match world_size {
                2 => assert_eq!(of_ranks[0], bits(wanted), "{name} {exchange}"), // a half is exact
                _ => assert!(distance(&found[0][i].1, wanted) < 1e-6, "{name} {exchange}"),
            }
        }
    }
}

/// In bf16 gradients are rounded to it and no less accurate.
#[test]
fn rounded_to_bf16() {
    let wanted = accumulated(2);
    let found = on_ranks(2, |ranks| {
        let model = model(1);
        let config = ReplicatedConfig {
            dtype: Some(DType::BF16),
            ..Default::default()
        };
        let replicated = Replicated::new(&ranks, model.parameters(), config)?;
        let [tokens, targets] = batch(ranks.rank());
        let gradients = averaged(&replicated, model.loss(&tokens, &targets)?)?;
        let parameters = model.parameters().into_iter();
        Ok(parameters
            .map(|(_, var)| gradients.get(&var).unwrap().clone())
            .collect::<Vec<_>>())
    });
    for ((name, wanted), found) in wanted.iter().zip(&found[0]) {
        assert_eq!(found.dtype(), DType::F32, "{name}");
        let error = distance(found, wanted);
        assert!(error < 2f64.powi(-8), "{name}: {error}");
    }
}

/// A tied weight counts once, a frozen one is left out, and gradients that share a storage stay independent.
#[test]
fn tied_frozen_and_shared() {
    let found = on_ranks(2, |ranks| {
        let own = ranks.rank() as f32 + 1.0;
        let [a, b] = [1f32, 2.0].map(|x| Var::new(&[x, x], &Device::Cpu).unwrap());
        let frozen = Tensor::new(&[own, 1.0], &Device::Cpu)?;
        let parameters = [("a", &a), ("tied", &a), ("b", &b)];
        let parameters = parameters.map(|(name, var)| (name.to_string(), var.clone()));
        let replicated = Replicated::new(&ranks, parameters, ReplicatedConfig::default())?;
        // d/da and d/db of (a + b) x are one tensor in candle's backward.
        let sum = ops::add(a.as_tensor(), b.as_tensor())?;
        let loss = ops::sum(&ops::mul(&ops::mul(&sum, &frozen)?, a.as_tensor())?)?;
        let gradients = averaged(&replicated, loss)?;
        let of = |var: &Var| gradients.get(var).unwrap().to_vec1::<f32>().unwrap();
        Ok([of(&a), of(&b)])
    });
    // x (2 a + b) and x a, with x 1.5 on average.
    assert_eq!(found[0], [vec![6.0, 4.0], vec![1.5, 1.0]]);
    assert_eq!(found[0], found[1]);
}

/// A parameter without a gradient on every rank is named.
#[test]
fn without_a_gradient() {
    for exchange in EXCHANGES {
        let errors = on_ranks(2, |ranks| {
            let [a, b] = [1f32, 2.0].map(|x| Var::new(&[x], &Device::Cpu).unwrap());
            let parameters = [("a".to_string(), a.clone()), ("b".to_string(), b)];
            let config = ReplicatedConfig {
                exchange,
                dtype: None,
            };
            let replicated = Replicated::new(&ranks, parameters, config)?;
            Ok(averaged(&replicated, ops::sum(a.as_tensor())?).unwrap_err())
        });
        for error in errors {
            let is_named =
                matches!(&error, Error::MissingGradient { parameter, .. } if parameter == "b");
            assert!(is_named, "{error}");
        }
    }
}

/// Each rank uses another expert, and none uses the last: gradients are means over ranks, with zeros for missing ones.
#[test]
fn experts_that_some_ranks_do_not_choose() {
    for exchange in EXCHANGES {
        for missing in [MissingGradients::Skip, MissingGradients::Zero] {
            let found = on_ranks(2, |ranks| {
                let vars = [1f32, 2.0, 3.0, 4.0].map(|x| Var::new(&[x], &Device::Cpu).unwrap());
                let names = ["shared", "first", "second", "idle"].map(String::from);
                let parameters: Vec<_> = names.into_iter().zip(vars.clone()).collect();
                let config = ReplicatedConfig {
                    exchange,
                    dtype: None,
                };
                let replicated = Replicated::new(&ranks, parameters, config)?;
                let replicated = replicated.with_missing(missing);
                let chosen = &vars[1 + ranks.rank()];
                let gradients = averaged(&replicated, ops::sum(&ops::mul(&vars[0], chosen)?)?)?;
                let of = |var: &Var| gradients.get(var).map(|g| g.to_vec1::<f32>().unwrap()[0]);
                Ok(vars.each_ref().map(of))
            });
            let idle = match missing {
                MissingGradients::Zero => Some(0.0),
                _ => None,
            };
            for found in found {
                assert_eq!(
                    found,
                    [Some(2.5), Some(0.5), Some(0.5), idle],
                    "{exchange:?}"
                );
            }
        }
    }
}

#[test]
fn dtypes_that_are_refused() {
    let config = ReplicatedConfig {
        dtype: Some(DType::F16),
        ..Default::default()
    };
    refusal(config.validate(), &["bf16"]);
}
