//! The sharded optimizer state gives the bits of an unsharded optimizer.

use super::{
    EXCHANGES, batch, batches, bits, config, config_of_six_layers, meta, model, on_ranks,
    plan_config,
};
use crate::check::refusal;
use crate::settings::{scaler_from, with_weights};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device};
use rstest::rstest;
use tallow::compile::{Batch, Phase, Plan, Step, StepConfig, StepRanks};
use tallow::distributed::{Communicator, Replicated, ReplicatedConfig, Shard};
use tallow::internals::{Category, Location, Op};
use tallow::model::TransformerLM;
use tallow::optim::{
    AdamWConfig, LionConfig, Moments, MuonConfig, Optimizer, ParameterGroup, Rule, usual_groups,
};
use tallow::precision::Precision;
use tallow::{Error, Result};

fn groups(model: &TransformerLM, moments: Moments) -> Vec<ParameterGroup> {
    usual_groups(model.parameters(), adamw(moments))
}

fn adamw(moments: Moments) -> Rule {
    let config = AdamWConfig {
        lr: 1e-2,
        weight_decay: 0.1,
        moments,
        ..Default::default()
    };
    config.into()
}

fn muon() -> Rule {
    let config = MuonConfig {
        weight_decay: 0.1,
        ..Default::default()
    };
    config.into()
}

/// The bits of weights or state, by name.
type Bits = Vec<(String, Vec<u64>)>;

fn weights(model: &TransformerLM) -> Bits {
    let weights = model.parameters().into_iter();
    let weights = weights.map(|(name, var)| (name, bits(&var)));
    weights.collect()
}

fn state(optimizer: &Optimizer) -> Bits {
    let state = optimizer.state().into_iter();
    let state = state.map(|(name, x)| (name, bits(&x)));
    state.collect()
}

/// Joins the states of all ranks.
fn joined(parts: &[Bits], of: &Bits) -> Bits {
    let all: Vec<_> = parts.iter().flatten().collect();
    assert_eq!(all.len(), of.len()); // no state is on two ranks
    let find = |name: &String| all.iter().find(|(other, _)| other == name).unwrap();
    of.iter().map(|(name, _)| (*find(name)).clone()).collect()
}

fn gradients(model: &TransformerLM, step: usize) -> Result<GradStore> {
    let [tokens, targets] = batch(step);
    tallow::backward(model.loss(&tokens, &targets)?)
}

/// Three steps on the same gradients; also with weights in half precision, which have a third state, and with moments
/// rounded at random by each parameter's number.
#[rstest]
fn eager_steps(
    #[values(2, 3, 64)] world_size: usize,
    #[values(
        (DType::F32, adamw(Moments::Wide)),
        (DType::F32, adamw(Moments::Bf16 { seed: 3 })),
        (DType::BF16, adamw(Moments::Wide)),
        (DType::F32, LionConfig::default().into()),
        (DType::F32, muon()),
        (DType::BF16, muon())
    )]
    (dtype, rule): (DType, Rule),
) {
    let of = |ranks: Option<&Communicator>| -> Result<(Bits, Bits)> {
        let vb = tallow::nn::seeded(1, dtype, &Device::Cpu);
        let model = with_weights(&meta(&config()), vb);
        let mut optimizer = Optimizer::with_groups(usual_groups(model.parameters(), rule))?;
        if let Some(ranks) = ranks {
            optimizer.shard(ranks)?;
        }
        for step in 0..3 {
            optimizer.step(&gradients(&model, step)?)?;
        }
        Ok((weights(&model), state(&optimizer)))
    };
    let (wanted, wanted_state) = of(None).unwrap();
    let found = on_ranks(world_size, |ranks| of(Some(&ranks)));
    assert!(found.iter().all(|(weights, _)| *weights == wanted));
    let parts: Vec<Bits> = found.into_iter().map(|(_, state)| state).collect();
    assert!(joined(&parts, &wanted_state) == wanted_state);
    // No rank has more than its share plus one parameter.
    let elements = |state: &Bits| state.iter().map(|(_, bits)| bits.len()).sum::<usize>();
    let largest = wanted_state
        .iter()
        .map(|(_, bits)| bits.len())
        .max()
        .unwrap();
    let fair = elements(&wanted_state) / world_size + 3 * largest;
    assert!(parts.iter().all(|part| elements(part) <= fair));
}

/// Planned steps have the bits of replicated ones for any exchange, before and after the weights are gathered.
#[rstest]
fn planned_steps(
    #[values(1, 2)] accumulation: usize,
    #[values(Precision::F32, Precision::BF16)] precision: Precision,
    #[values(None, Some(0.5))] clip_norm: Option<f64>,
    #[values(adamw(Moments::Wide), LionConfig::default().into(), muon())] rule: Rule,
) {
    for exchange in EXCHANGES {
        let found = on_ranks(2, |ranks| {
            let run = |sharded: bool| -> Result<_> {
                let model = model(1);
                let groups = usual_groups(model.parameters(), rule);
                let mut optimizer = Optimizer::with_groups(groups)?;
                if sharded {
                    optimizer.shard(&ranks)?;
                }
                let way = ReplicatedConfig {
                    exchange,
                    dtype: None,
                };
                let replicated = Replicated::new(&ranks, model.parameters(), way)?;
                let config = StepConfig {
                    precision,
                    ..plan_config(accumulation, clip_norm)
                };
                let mut step = Step::for_model(&model, &optimizer, &config)?
                    .replicated(&optimizer, &replicated)?;
                let first = ranks.rank() * accumulation;
                let [tokens, targets] = batches(first..first + accumulation);
                let mut losses = Vec::new();
                for _ in 0..3 {
                    losses.push(step.run(&mut optimizer, (&tokens, &targets))?.to_bits());
                }
                let own: Vec<String> = optimizer
                    .state()
                    .into_iter()
                    .map(|(name, _)| name)
                    .collect();
                let before = weights(&model);
                optimizer.gather_weights()?;
                Ok((losses, before, weights(&model), state(&optimizer), own))
            };
            Ok((run(false)?, run(true)?))
        });
        let parts: Vec<Bits> = found.iter().map(|(_, found)| found.3.clone()).collect();
        for (wanted, found) in &found {
            assert!(found.0 == wanted.0, "{exchange}");
            assert!(found.2 == wanted.2, "{exchange}");
            assert!(joined(&parts, &wanted.3) == wanted.3, "{exchange}");
            // A rank has its own weights of the last step immediately, and the others only after gathering.
            for ((name, before), (_, after)) in found.1.iter().zip(&found.2) {
                let kinds = ["exp_avg", "momentum_buffer"];
                let is_own = kinds
                    .iter()
                    .any(|kind| found.4.contains(&format!("{kind}.{name}")));
                assert_eq!(before == after, is_own, "{name}");
            }
        }
    }
}

/// An overflow on one rank is seen by all, and all take the next step.
#[test]
fn an_overflow_is_seen_by_all() {
    let found = on_ranks(2, |ranks| {
        let model = model(1);
        let mut optimizer = Optimizer::with_groups(groups(&model, Moments::Wide))?;
        optimizer.shard(&ranks)?;
        let replicated = Replicated::new(&ranks, model.parameters(), ReplicatedConfig::default())?;
        let config = StepConfig {
            loss_scaling: true,
            precision: Precision::F16,
            ..plan_config(1, None)
        };
        let mut step =
            Step::for_model(&model, &optimizer, &config)?.replicated(&optimizer, &replicated)?;
        let [tokens, targets] = batch(ranks.rank());
        let mut stepped = Vec::new();
        for init_scale in [if ranks.rank() == 0 { 1e38 } else { 1.0 }, 1.0] {
            let mut scaler = scaler_from(init_scale);
            let done = step.run_scaled(&mut optimizer, &mut scaler, (&tokens, &targets))?;
            stepped.push(done.updated());
        }
        optimizer.gather_weights()?;
        Ok((stepped, weights(&model)))
    });
    assert_eq!(found[0].0, [false, true]);
    assert!(found[0] == found[1]);
}

/// With clipping, a gradient that is not finite is found by its owner and named on all ranks.
#[test]
fn a_gradient_that_is_not_finite_is_named() {
    let errors = on_ranks(3, |ranks| {
        let model = model(1);
        let (_, var) = model.parameters().swap_remove(3);
        var.set(&(var.as_tensor() * f64::INFINITY)?)?;
        let mut optimizer = Optimizer::with_groups(groups(&model, Moments::Wide))?;
        optimizer.shard(&ranks)?;
        let replicated = Replicated::new(&ranks, model.parameters(), ReplicatedConfig::default())?;
        let config = plan_config(1, Some(1.0));
        let mut step =
            Step::for_model(&model, &optimizer, &config)?.replicated(&optimizer, &replicated)?;
        let [tokens, targets] = batch(ranks.rank());
        let error = step.run(&mut optimizer, (&tokens, &targets)).unwrap_err();
        Ok((error.to_string(), optimizer.steps()))
    });
    assert!(
        errors[0].0.contains("the gradient of parameter"),
        "{}",
        errors[0].0
    );
    assert!(
        errors
            .iter()
            .all(|error| *error == (errors[0].0.clone(), 0))
    );
}

/// A rank's plan updates its own parameters, has only their state, and fetches the others before they are read.
#[test]
fn what_a_rank_does() {
    let of = |shard: Option<Shard>| {
        let exchange = ReplicatedConfig::default();
        let config = StepConfig {
            ranks: match shard {
                None => StepRanks::Replicated(exchange),
                Some(own) => StepRanks::ShardedOptimizer(exchange, own),
            },
            ..plan_config(1, Some(1.0))
        };
        let batch = Batch::meta(1, 12).unwrap();
        Step::plan_for_model(&Device::Cpu, &meta(&config_of_six_layers()), &config, batch)
            .unwrap()
            .0
    };
    let whole = of(None);
    let parameters = whole.buffers().iter();
    let parameters = parameters.filter(|b| b.category == Category::Parameter);
    let count = parameters.clone().count();
    let largest = parameters.map(|buffer| buffer.bytes()).max().unwrap();
    for world_size in [2, 4] {
        let plans = (0..world_size).map(|rank| of(Some(Shard { rank, world_size })));
        let plans: Vec<_> = plans.collect();
        let mut updated = Vec::new();
        for plan in &plans {
            let calls = plan.calls().iter();
            updated.extend(calls.filter_map(|call| match call.op {
                Op::Update { parameter, .. } => Some(parameter),
                _ => None,
            }));
            let state = |plan: &Plan| -> u64 {
                let state = plan.buffers().iter();
                let state = state.filter(|b| b.category == Category::OptimizerState);
                state.map(|buffer| buffer.bytes()).sum()
            };
            assert!(state(plan) <= state(&whole) / world_size as u64 + 2 * largest);
            assert_eq!(plan.arena_bytes(), whole.arena_bytes());
            let mut fetched = 0;
            for (index, call) in plan.calls().iter().enumerate() {
                if matches!(call.op, Op::Broadcast { .. }) && call.phase == Phase::Forward {
                    fetched += 1;
                    let weight = call.writes.get("x").unwrap();
                    let location = plan.buffer(weight.buffer).unwrap().location;
                    assert!(matches!(location, Location::Parameter(_)));
                    let mut before = plan.calls()[..index].iter();
                    assert!(
                        !before.any(|call| call.reads.iter().any(|x| x.buffer == weight.buffer))
                    );
                }
            }
            assert_eq!(fetched, count);
            check_places(plan);
        }
        updated.sort();
        assert!(updated.into_iter().eq(0..count));
    }
}

/// Checks that each sum of squares is written at its parameter's position in the clip factor's list.
fn check_places(plan: &Plan) {
    let calls = plan.calls();
    let places = calls.iter().find_map(|call| match &call.op {
        Op::ClipFactor { parameters } => Some(parameters),
        _ => None,
    });
    let places = places.unwrap();
    let mut found = 0;
    for call in calls
        .iter()
        .filter(|call| matches!(call.op, Op::SumOfSquares { .. }))
    {
        let gradient = Some(call.reads.get("x").unwrap());
        let mut updates = calls
            .iter()
            .filter(|call| call.reads.get("gradient") == gradient);
        let number = places[call.writes.get("square").unwrap().elements.start];
        let update = &updates.next().unwrap().op;
        assert!(matches!(update, Op::Update { parameter, .. } if *parameter == number));
        found += 1;
    }
    assert!(found > 0);
}

/// Rank 0 saves the file of an unsharded optimizer.
#[test]
fn saved_by_three_ranks_and_loaded_by_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("optimizer.safetensors");
    let alone = model(1);
    let mut wanted = Optimizer::with_groups(groups(&alone, Moments::Wide)).unwrap();
    for step in 0..2 {
        wanted.step(&gradients(&alone, step).unwrap()).unwrap();
    }
    on_ranks(3, |ranks| {
        let model = model(1);
        let mut optimizer = Optimizer::with_groups(groups(&model, Moments::Wide))?;
        optimizer.shard(&ranks)?;
        for step in 0..2 {
            optimizer.step(&gradients(&model, step)?)?;
        }
        optimizer.save(&path)?;
        refusal(optimizer.load(&path), &["before Optimizer::shard"]);
        // Its own shard can be restored as before.
        let (state, steps) = (optimizer.state(), optimizer.steps());
        optimizer.load_state(state, steps)
    });
    let mut loaded = Optimizer::with_groups(groups(&alone, Moments::Wide)).unwrap();
    loaded.load(&path).unwrap();
    assert!(state(&loaded) == state(&wanted));
    assert_eq!(loaded.steps(), 2);
}

#[test]
fn what_is_refused() {
    on_ranks(2, |ranks| {
        let model = model(1);
        let mut whole = Optimizer::with_groups(groups(&model, Moments::Wide))?;
        let mut optimizer = Optimizer::with_groups(groups(&model, Moments::Wide))?;
        optimizer.shard(&ranks)?;
        let error = optimizer.shard(&ranks).unwrap_err();
        assert!(matches!(error, Error::Order { .. }), "{error}");
        // A plan of a sharded optimizer cannot run an unsharded one, nor the reverse.
        let replicated = Replicated::new(&ranks, model.parameters(), ReplicatedConfig::default())?;
        let config = plan_config(1, None);
        let mut step =
            Step::for_model(&model, &optimizer, &config)?.replicated(&optimizer, &replicated)?;
        let [tokens, targets] = batch(0);
        refusal(
            step.run(&mut whole, (&tokens, &targets)),
            &["Optimizer::shard"],
        );
        let error = Step::for_model(&model, &optimizer, &config)
            .and_then(|mut step| step.run(&mut optimizer, (&tokens, &targets)));
        refusal(error, &["Optimizer::shard"]);
        Ok(())
    });
    let nobody = Shard {
        rank: 2,
        world_size: 2,
    };
    let config = StepConfig {
        ranks: StepRanks::ShardedOptimizer(ReplicatedConfig::default(), nobody),
        ..plan_config(1, None)
    };
    refusal(config.validate(), &["under the number of ranks, 2"]);
}
