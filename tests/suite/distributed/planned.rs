//! Planned steps, whose exchanges are calls of the plan.

use super::{
    EXCHANGES, batch, batches, bits, config_of_six_layers, distance, meta, model, on_ranks,
    plan_config,
};
use crate::check::refusal;
use crate::settings::scaler_from;
use candle_core::{DType, Device};
use rstest::rstest;
use std::collections::HashMap;
use tallow::Error;
use tallow::compile::{Batch, Plan, Step, StepConfig, StepRanks};
use tallow::distributed::{Communicator, Exchange, Replicated, ReplicatedConfig};
use tallow::internals::Op;
use tallow::optim::{AdamWConfig, GradientAccumulator, Optimizer};
use tallow::precision::Precision;

fn exchanges(plan: &Plan) -> Vec<usize> {
    let calls = plan.calls().iter().enumerate();
    let exchanges = calls.filter(|(_, call)| matches!(call.op, Op::AllReduce { .. }));
    exchanges.map(|(index, _)| index).collect()
}

/// Two steps of two ranks with micro-batches, against eager gradients of all batches; both ranks have the same weights.
#[rstest]
fn as_eager(
    #[values(1, 2)] accumulation: usize,
    #[values(Precision::F32, Precision::BF16)] precision: Precision,
) {
    let (world_size, bound) = match precision {
        Precision::F32 => (2, 1e-6),
        _ => (2, 2e-2),
    };
    let eager = model(1);
    let mut sum = GradientAccumulator::new(eager.parameters());
    for number in 0..world_size * accumulation {
        let [tokens, targets] = batch(number);
        let loss = precision.run(|| eager.loss(&tokens, &targets)).unwrap();
        sum.add(tallow::backward(loss).unwrap()).unwrap();
    }
    let mean = sum.mean().unwrap();
    for exchange in EXCHANGES {
        let found = on_ranks(world_size, |ranks| {
            let model = model(1);
            let mut optimizer = Optimizer::new(model.parameters(), AdamWConfig::default())?;
            let way = ReplicatedConfig {
                exchange,
                dtype: None,
            };
            let replicated = Replicated::new(&ranks, model.parameters(), way)?;
            let config = StepConfig {
                precision,
                ..plan_config(accumulation, Some(0.5))
            };
            let mut step = Step::for_model(&model, &optimizer, &config)?
                .replicated(&optimizer, &replicated)?;
            let first = ranks.rank() * accumulation;
            let [tokens, targets] = batches(first..first + accumulation);
            let loss = step.run(&mut optimizer, (&tokens, &targets))?;
            let gradients = step.gradients()?;
            let norm = step.gradient_norm();
            let second = step.run(&mut optimizer, (&tokens, &targets))?;
            let weights = model.parameters().into_iter();
            let weights: Vec<_> = weights.map(|(_, var)| bits(&var)).collect();
            Ok((loss, second, norm, gradients, weights))
        });
        let [(loss, second, norm, gradients, weights), other] = &found[..] else {
            panic!("two ranks");
        };
        assert_eq!((loss, second, norm), (&other.0, &other.1, &other.2));
        assert!(second < loss);
        assert!(weights == &other.4, "{exchange}");
        let gradients: HashMap<_, _> = gradients.iter().cloned().collect();
        for (name, var) in eager.parameters() {
            let error = distance(&gradients[&name], mean.get(&var).unwrap());
            assert!(error < bound, "{name}, {exchange}: {error}");
        }
    }
}

/// If a rank ends, the others' planned steps fail with an error that names it, as eager ones do.
#[test]
fn a_rank_that_ends_is_named() {
    let errors = on_ranks(2, |ranks| {
        let model = model(1);
        let mut optimizer = Optimizer::new(model.parameters(), AdamWConfig::default())?;
        let replicated = Replicated::new(&ranks, model.parameters(), ReplicatedConfig::default())?;
        let mut step = Step::for_model(&model, &optimizer, &plan_config(1, Some(0.5)))?
            .replicated(&optimizer, &replicated)?;
        let [tokens, targets] = batch(ranks.rank());
        step.run(&mut optimizer, (&tokens, &targets))?;
        Ok(match ranks.rank() {
            0 => Some(step.run(&mut optimizer, (&tokens, &targets)).unwrap_err()),
            _ => None,
        })
    });
    let error = errors[0].as_ref().unwrap();
    assert!(matches!(error, Error::Rank { rank: 1, .. }), "{error}");
}

/// Exchanges follow the last gradient of their bucket, and have its size.
#[test]
fn buckets_in_backward() {
    let of = |config: &StepConfig| {
        let batch = Batch::meta(1, 12).unwrap();
        Step::plan_for_model(&Device::Cpu, &meta(&config_of_six_layers()), config, batch)
            .unwrap()
            .0
    };
    let plan = |exchange| {
        let replicated = ReplicatedConfig {
            exchange,
            dtype: None,
        };
        let config = StepConfig {
            ranks: StepRanks::Replicated(replicated),
            ..plan_config(1, Some(0.5))
        };
        of(&config)
    };
    let alone = of(&plan_config(1, Some(0.5)));
    assert!(exchanges(&alone).is_empty());
    let parameters = alone.buffers().iter();
    let parameters = parameters.filter(|b| b.category == tallow::internals::Category::Parameter);
    let bytes: u64 = parameters.clone().map(|buffer| buffer.bytes()).sum();

    let each = plan(Exchange::Overlapped { bucket_bytes: 0 });
    assert_eq!(exchanges(&each).len(), parameters.count() + 1); // plus the loss
    let flat = plan(Exchange::Flat);
    assert_eq!(exchanges(&flat).len(), 2);
    let bucket_bytes = 4000;
    let buckets = plan(Exchange::Overlapped { bucket_bytes });
    let places = exchanges(&buckets);
    assert!(
        (10..exchanges(&each).len()).contains(&places.len()),
        "{places:?}"
    );
    let total = |plan: &Plan| -> u64 {
        let calls = plan.calls().iter();
        let exchanged = calls.filter(|call| matches!(call.op, Op::AllReduce { .. }));
        exchanged
            .map(|call| plan.bytes_moved(call).unwrap() / 2)
            .sum()
    };
    assert_eq!(total(&each), bytes + 8); // the loss is one f64
    for plan in [&flat, &buckets] {
        assert!(
            (bytes..bytes + 256 * 80).contains(&total(plan)),
            "{}",
            total(plan)
        );
    }
    // Each exchange but the last is followed by matmuls of backward that hide it; a flat one follows all of them.
    let products_after = |plan: &Plan, index: usize| {
        let calls = plan.calls()[index..plan.per_micro_batch().end].iter();
        calls.filter(|call| call.op.is_matmul()).count()
    };
    let after: Vec<usize> = places
        .iter()
        .map(|index| products_after(&buckets, *index))
        .collect();
    assert!(
        after.is_sorted_by(|a, b| a >= b) && after[1] > 20,
        "{after:?}"
    );
    assert_eq!(products_after(&flat, exchanges(&flat)[1]), 0);
    // The arena grows by no more than alignment.
    assert!(buckets.arena_bytes() <= alone.arena_bytes() + 256 * 80);
}

/// If a gradient overflows on one rank, no rank takes the step, and all have the same scale.
#[test]
fn an_overflow_is_seen_by_all() {
    let found = on_ranks(2, |ranks| {
        let model = model(1);
        let mut optimizer = Optimizer::new(model.parameters(), AdamWConfig::default())?;
        let replicated = Replicated::new(&ranks, model.parameters(), ReplicatedConfig::default())?;
        let config = StepConfig {
            loss_scaling: true,
            precision: Precision::F16,
            clip_norm: None,
            ..plan_config(1, Some(0.5))
        };
        let mut step =
            Step::for_model(&model, &optimizer, &config)?.replicated(&optimizer, &replicated)?;
        let mut scaler = scaler_from(if ranks.rank() == 0 { 1e38 } else { 1.0 });
        let [tokens, targets] = batch(ranks.rank());
        let done = step.run_scaled(&mut optimizer, &mut scaler, (&tokens, &targets))?;
        Ok((done.updated(), optimizer.steps()))
    });
    assert_eq!(found, [(false, 0); 2]);
}

#[test]
fn what_is_refused() {
    let ranks = Communicator::single_rank(&Device::Cpu);
    let model = model(1);
    let optimizer = Optimizer::new(model.parameters(), AdamWConfig::default()).unwrap();
    let bf16 = ReplicatedConfig {
        dtype: Some(DType::BF16),
        ..Default::default()
    };
    let replicated = Replicated::new(&ranks, model.parameters(), bf16).unwrap();
    let in_bf16 = StepConfig {
        precision: Precision::BF16,
        ..plan_config(1, Some(0.5))
    };
    let [tokens, targets] = batch(0);
    let step = Step::for_model(&model, &optimizer, &in_bf16).unwrap();
    let mut step = step.replicated(&optimizer, &replicated).unwrap();
    refusal(step.prepare((&tokens, &targets)), &["None or f32"]);
    let exchanging = StepConfig {
        ranks: StepRanks::Replicated(bf16),
        ..in_bf16.clone()
    };
    exchanging.validate().unwrap();
    let [f32, accumulating, scaling] = [(); 3].map(|()| exchanging.clone());
    for (config, words) in [
        (
            StepConfig {
                precision: Precision::F32,
                ..f32
            },
            ["precision", "bf16 for gradients"],
        ),
        (
            StepConfig {
                accumulation: 2,
                ..accumulating
            },
            ["accumulation", "1 for gradients"],
        ),
        (
            StepConfig {
                loss_scaling: true,
                ..scaling
            },
            ["loss_scaling", "false for gradients"],
        ),
    ] {
        refusal(config.validate(), &words);
    }
    let config = plan_config(1, Some(0.5));
    let without_ranks = StepConfig {
        ranks: StepRanks::Replicated(ReplicatedConfig::default()),
        ..config.clone()
    };
    let mut optimizer = optimizer;
    let mut step = Step::for_model(&model, &optimizer, &without_ranks).unwrap();
    for error in [
        step.run(&mut optimizer, (&tokens, &targets)).unwrap_err(),
        step.forward_backward((&tokens, &targets)).unwrap_err(),
    ] {
        assert!(
            error.to_string().contains("with Step::replicated"),
            "{error}"
        );
    }
    let config = StepConfig {
        ranks: StepRanks::Replicated(ReplicatedConfig::default()),
        optimizer_in_backward: true,
        clip_norm: None,
        ..config
    };
    refusal(config.validate(), &["false with several ranks"]);
}

/// On a GPU, gradients exchanged in bf16 are computed, clipped and applied like those in f32. (A job of one rank;
/// `tests/distributed` uses two GPUs.)
#[cfg(feature = "cuda")]
#[test]
#[ignore = "needs a CUDA device"]
fn in_bf16_on_a_gpu() {
    use crate::settings::with_weights;
    use candle_core::Tensor;
    use tallow::nn;

    let gpu = crate::gpu();
    let here = |x: &Tensor| x.to_device(&gpu).unwrap();
    let [tokens, targets] = batch(0).map(|x| here(&x));
    let config = StepConfig {
        precision: Precision::BF16,
        ..plan_config(1, Some(0.5))
    };
    let run = |dtype: Option<DType>| {
        let model = with_weights(&meta(&super::config()), nn::seeded(1, DType::F32, &gpu));
        let mut optimizer = Optimizer::new(model.parameters(), AdamWConfig::default()).unwrap();
        let way = ReplicatedConfig {
            exchange: Exchange::Overlapped { bucket_bytes: 3000 },
            dtype,
        };
        let ranks = Communicator::single_rank(&gpu);
        let replicated = Replicated::new(&ranks, model.parameters(), way).unwrap();
        let mut step = Step::for_model(&model, &optimizer, &config)
            .unwrap()
            .replicated(&optimizer, &replicated)
            .unwrap();
        let losses: Vec<f32> =
            (0..4) // launched, recorded, replayed
                .map(|_| step.run(&mut optimizer, (&tokens, &targets)).unwrap())
                .collect();
        (
            losses,
            step.gradient_norm().unwrap(),
            step.gradients().unwrap(),
        )
    };
    let (losses, norm, gradients) = run(Some(DType::BF16));
    let (wanted, wanted_norm, wanted_gradients) = run(None);
    assert!(
        (norm - wanted_norm).abs() < 2e-2 * wanted_norm,
        "{norm} {wanted_norm}"
    );
    for (loss, wanted) in losses.iter().zip(&wanted) {
        assert!((loss - wanted).abs() < 1e-2, "{loss} {wanted}");
    }
    assert!(
        gradients
            .iter()
            .any(|(_, gradient)| gradient.dtype() == DType::BF16)
    );
    for ((name, found), (_, wanted)) in gradients.iter().zip(&wanted_gradients) {
        let found = found.to_dtype(DType::F32).unwrap();
        assert!(distance(&found, wanted) < 5e-2, "{name}");
    }
}
