//! Fully sharded weights, gradients and optimizer state, against replicated steps.

use super::{
    batch, batches, bits, config, config_of_six_layers, distance, meta, model, on_ranks,
    plan_config,
};
use crate::check::refusal;
use crate::settings::{scaler_from, with_weights};
use candle_core::{DType, Device, Tensor};
use rstest::rstest;
use tallow::compile::{Batch, Plan, Step, StepConfig, StepRanks};
use tallow::distributed::{
    Communicator, FullyShard, FullyShardConfig, Replicated, ReplicatedConfig, Shard,
};
use tallow::internals::{Category, Op};
use tallow::model::{TransformerConfig, TransformerLM};
use tallow::nn::{self, Architecture, Checkpointing, Layer, Linear};
use tallow::optim::{
    AdamWConfig, IterationDType, LionConfig, MuonConfig, Optimizer, Rule, usual_groups,
};
use tallow::precision::Precision;
use tallow::{Error, Result, no_grad, ops};

fn adamw() -> AdamWConfig {
    AdamWConfig {
        lr: 1e-2,
        weight_decay: 0.1,
        ..Default::default()
    }
}

/// Returns a rank's model, its optimizer and its shards.
fn sharded_model(
    ranks: &Communicator,
    meta: &TransformerLM,
    rule: impl Into<Rule>,
) -> Result<(TransformerLM, Optimizer, FullyShard)> {
    let sharded = FullyShard::new(ranks, FullyShardConfig::default())?;
    let vb = sharded.builder(nn::seeded(1, DType::F32, &Device::Cpu));
    let model = with_weights(meta, vb);
    let optimizer = Optimizer::with_groups(usual_groups(sharded.parameters(), rule))?;
    Ok((model, optimizer, sharded))
}

fn full_weights(model: &TransformerLM, sharded: &FullyShard) -> Result<Vec<(String, Tensor)>> {
    let weights = model.parameters().into_iter();
    let whole = weights.map(|(name, _)| {
        let whole = sharded.full_weight(&name)?;
        Ok((name, whole))
    });
    whole.collect()
}

/// Losses, and full weights by name.
type Run = (Vec<f32>, Vec<(String, Tensor)>);

fn of(architecture: Architecture) -> TransformerConfig {
    TransformerConfig {
        architecture,
        ..config()
    }
}

/// Runs three steps, replicated and fully sharded.
fn both_ways(
    ranks: &Communicator,
    meta: &TransformerLM,
    config: &StepConfig,
    rule: Rule,
) -> Result<[Run; 2]> {
    let first = ranks.rank() * config.accumulation;
    let [tokens, targets] = batches(first..first + config.accumulation);
    let run = |mut step: Step<'_>, mut optimizer: Optimizer| -> Result<Vec<f32>> {
        let losses = (0..3).map(|_| step.run(&mut optimizer, (&tokens, &targets)));
        losses.collect()
    };
    let whole = with_weights(meta, nn::seeded(1, DType::F32, &Device::Cpu));
    let optimizer = Optimizer::with_groups(usual_groups(whole.parameters(), rule))?;
    let replicated = Replicated::new(ranks, whole.parameters(), ReplicatedConfig::default())?;
    let step = Step::for_model(&whole, &optimizer, config)?.replicated(&optimizer, &replicated)?;
    let wanted = run(step, optimizer)?;
    let (divided, optimizer, sharded) = sharded_model(ranks, meta, rule)?;
    let step = Step::fully_sharded_for_model(&divided, &optimizer, config, &sharded)?;
    let found = run(step, optimizer)?;
    let weights = whole.parameters().into_iter();
    let weights = weights.map(|(name, var)| (name, var.as_tensor().clone()));
    Ok([
        (wanted, weights.collect()),
        (found, full_weights(&divided, &sharded)?),
    ])
}

/// Checks that fully sharded steps have the bits of replicated ones.
fn same_bits(world_size: usize, model: &TransformerLM, config: &StepConfig, rule: Rule) {
    let ranks = on_ranks(world_size, |ranks| both_ways(&ranks, model, config, rule));
    for [wanted, found] in ranks {
        assert_eq!(found.0, wanted.0, "{rule}");
        assert_eq!(found.1.len(), wanted.1.len());
        for ((name, found), (other, wanted)) in found.1.iter().zip(&wanted.1) {
            assert_eq!(name, other);
            assert!(bits(found) == bits(wanted), "{rule}: {name}");
        }
    }
}

/// Steps have the bits of replicated ones, also where ranks hold shards of few weights.
#[rstest]
fn steps_without_sums_over_parts(
    #[values(2, 3, 40)] world_size: usize,
    #[values(Precision::F32, Precision::BF16)] precision: Precision,
    #[values(Checkpointing::None, Checkpointing::Block)] checkpointing: Checkpointing,
    #[values(Architecture::Llama, Architecture::Gpt2)] architecture: Architecture,
) {
    let config = StepConfig {
        precision,
        ..plan_config(1, None)
    };
    let model = meta(&of(architecture)).with_checkpointing(checkpointing);
    same_bits(world_size, &model, &config, adamw().into());
}

/// A rule that is not elementwise gathers the direction of each matrix.
#[rstest]
fn other_rules(
    #[values(2, 3, 40)] world_size: usize,
    #[values(Precision::F32, Precision::BF16)] precision: Precision,
) {
    let config = StepConfig {
        precision,
        ..plan_config(1, None)
    };
    let in_bf16 = MuonConfig {
        dtype: IterationDType::Bf16,
        weight_decay: 0.1,
        ..Default::default()
    };
    let rules = [
        LionConfig::default().into(),
        MuonConfig::default().into(),
        in_bf16.into(),
    ];
    for rule in rules {
        same_bits(world_size, &meta(&super::config()), &config, rule);
    }
}

/// Sums over micro-batches and of squares have another order, so steps are equal up to rounding, and equal on all
/// ranks.
#[rstest]
fn steps_with_sums_over_parts(
    #[values(2, 3)] world_size: usize,
    #[values((1, Some(0.5)), (2, None), (3, Some(0.5)))] (accumulation, clip_norm): (
        usize,
        Option<f64>,
    ),
) {
    let (config, rule) = (plan_config(accumulation, clip_norm), adamw().into());
    let ranks = on_ranks(world_size, |ranks| {
        both_ways(&ranks, &meta(&super::config()), &config, rule)
    });
    for [wanted, found] in &ranks {
        for (found, wanted) in found.0.iter().zip(&wanted.0) {
            assert!((found - wanted).abs() < 1e-5 * wanted, "{found} {wanted}");
        }
        for ((name, found), (_, wanted)) in found.1.iter().zip(&wanted.1) {
            let distance = distance(found, wanted);
            assert!(distance < 1e-5, "{name}: {distance}");
        }
        assert!(found.0 == ranks[0][1].0);
    }
}

/// A forward gathers its weights, so an evaluation equals the full model's. Outside of a step it is refused.
#[rstest]
fn evaluations(
    #[values(2, 3, 40)] world_size: usize,
    #[values(Precision::F32, Precision::BF16)] precision: Precision,
    #[values(Architecture::Llama, Architecture::Gpt2)] architecture: Architecture,
) {
    let meta = meta(&of(architecture));
    let found = on_ranks(world_size, |ranks| {
        let [tokens, targets] = batch(ranks.rank());
        let whole = with_weights(&meta, nn::seeded(1, DType::F32, &Device::Cpu));
        let (model, divided, sharded) = sharded_model(&ranks, &meta, adamw())?;
        let optimizer = Optimizer::new(whole.parameters(), adamw())?;
        let step_config = StepConfig {
            precision,
            ..plan_config(1, None)
        };
        let mut of_whole = Step::for_model(&whole, &optimizer, &step_config)?;
        let mut sharded_step =
            Step::fully_sharded_for_model(&model, &divided, &step_config, &sharded)?;
        let wanted = of_whole.forward((&tokens, &targets))?;
        let found = sharded_step.forward((&tokens, &targets))?;
        let loss =
            |model: &TransformerLM| no_grad(|| precision.run(|| model.loss(&tokens, &targets)));
        let off = (loss(&whole)? - &wanted)?.abs()?.to_scalar::<f32>()?;
        assert!(off <= 1e-5 * wanted.to_scalar::<f32>()?, "{off}");
        refusal(loss(&model), &["compile::Step"]);
        Ok(bits(&wanted) == bits(&found))
    });
    assert!(found.into_iter().all(|is_same| is_same));
}

/// An overflow on one rank is seen by all, and all name a gradient that is not finite.
#[test]
fn overflows_and_what_is_not_finite() {
    let found = on_ranks(2, |ranks| {
        let (model, mut optimizer, sharded) = sharded_model(&ranks, &meta(&config()), adamw())?;
        let config = StepConfig {
            loss_scaling: true,
            precision: Precision::F16,
            ..plan_config(1, None)
        };
        let mut step = Step::fully_sharded_for_model(&model, &optimizer, &config, &sharded)?;
        let [tokens, targets] = batch(ranks.rank());
        let mut stepped = Vec::new();
        for init_scale in [if ranks.rank() == 0 { 1e38 } else { 1.0 }, 1.0] {
            let mut scaler = scaler_from(init_scale);
            let done = step.run_scaled(&mut optimizer, &mut scaler, (&tokens, &targets))?;
            stepped.push(done.updated());
        }
        let (_, var) = sharded.parameters().swap_remove(3);
        if ranks.rank() == 1 {
            var.set(&(var.as_tensor() * f64::INFINITY)?)?;
        }
        let clipped = plan_config(1, Some(1.0));
        let mut step = Step::fully_sharded_for_model(&model, &optimizer, &clipped, &sharded)?;
        let error = step.run(&mut optimizer, (&tokens, &targets)).unwrap_err();
        Ok((stepped, error.to_string(), optimizer.steps()))
    });
    assert_eq!(found[0].0, [false, true]);
    assert!(
        found[0].1.contains("the gradient of parameter"),
        "{}",
        found[0].1
    );
    assert_eq!(found[0].2, 1);
    assert!(found[0] == found[1]);
}

/// A custom loss with a tied weight and one that is read as a view.
#[test]
fn a_loss_of_layers() {
    let found = on_ranks(3, |ranks| {
        let loss = |x: &Tensor, map: &Linear, scale: &Linear| -> Result<Tensor> {
            let y = map.forward(&map.forward(x)?)?;
            let row = scale.weight().narrow(0, 1, 1)?;
            ops::mean(&ops::mul(&ops::mul(&y, &row.broadcast_as((5, 16))?)?, &y)?)
        };
        let layers = |vb: candle_nn::VarBuilder<'_>| -> Result<_> {
            let map = Linear::new(16, 16, vb.pp("map"))?;
            Ok((map, Linear::new(16, 2, vb.pp("scale"))?))
        };
        let given = Tensor::arange(0f32, 80.0, &Device::Cpu)?.reshape((5, 16))?;
        let given = (given * (0.01 + ranks.rank() as f64 * 0.001))?;
        let inputs = [("x", &given)];
        let (map, scale) = layers(nn::seeded(1, DType::F32, &Device::Cpu))?;
        let parameters = [("map.weight", &map), ("scale.weight", &scale)];
        let parameters = parameters.map(|(name, layer)| {
            let (_, var) = layer.parameters().swap_remove(0);
            (name.to_string(), var)
        });
        let mut whole = Optimizer::new(parameters.to_vec(), adamw())?;
        let replicated = Replicated::new(&ranks, parameters.clone(), ReplicatedConfig::default())?;
        let config = StepConfig::default();
        let step = Step::new(&whole, &config, |inputs| {
            loss(&inputs.get("x")?, &map, &scale)
        })?;
        let mut step = step.replicated(&whole, &replicated)?;
        let sharded = FullyShard::new(&ranks, FullyShardConfig::default())?;
        let vb = sharded.builder(nn::seeded(1, DType::F32, &Device::Cpu));
        let (map, scale) = layers(vb)?;
        let mut optimizer = Optimizer::new(sharded.parameters(), adamw())?;
        let mut sharded_step = Step::fully_sharded(&optimizer, &config, &sharded, |inputs| {
            loss(&inputs.get("x")?, &map, &scale)
        })?;
        for _ in 0..3 {
            let wanted = step.run(&mut whole, inputs)?;
            assert_eq!(sharded_step.run(&mut optimizer, inputs)?, wanted);
        }
        for (name, var) in &parameters {
            assert!(bits(&sharded.full_weight(name)?) == bits(var), "{name}");
        }
        let of_each = sharded_step.gradients()?;
        assert_eq!(of_each.len(), 2);
        Ok(of_each[0].1.elem_count())
    });
    assert_eq!(found, [88, 88, 80]); // of 256 elements
}

/// A rank's plan has its shards of weights, gradients and state, and the full weights of at most two blocks.
#[rstest]
fn what_a_rank_has(#[values(2, 8, 512)] world_size: usize) {
    let of = |shard: Option<Shard>| {
        let config = StepConfig {
            ranks: shard.map_or(StepRanks::Single, |own| {
                let parts = FullyShardConfig {
                    bucket_bytes: 0,
                    ..Default::default()
                };
                StepRanks::FullySharded(parts, own)
            }),
            ..plan_config(1, Some(1.0))
        };
        let model = TransformerConfig {
            d_model: 64,
            d_ff: 192,
            ..config_of_six_layers()
        };
        let batch = Batch::meta(1, 12).unwrap();
        Step::plan_for_model(&Device::Cpu, &meta(&model), &config, batch)
            .unwrap()
            .0
    };
    let bytes = |plan: &Plan, category: Category| plan.category_bytes(category) as f64;
    let whole = of(None);
    let rank = 0;
    let plan = of(Some(Shard { rank, world_size }));
    let fraction = 1.0 / world_size as f64;
    let block = bytes(&whole, Category::Parameter) / 6.0;
    for (category, more) in [
        (Category::Parameter, 0.0),
        (Category::OptimizerState, 0.0),
        (Category::Gradient, 2.5 * block),
    ] {
        let (part, whole) = (bytes(&plan, category), bytes(&whole, category));
        let rounding = 13.0 * 6.0 * 8.0 * 8.0; // 8 elements of each weight, of two states
        let fair = fraction * whole + more + rounding;
        assert!(
            part >= fraction * whole && part <= fair,
            "{category:?} {part} {fair}"
        );
    }
    assert!(bytes(&plan, Category::WeightCopy) < 2.5 * block);
    let count = |is: fn(&Op) -> bool| plan.calls().iter().filter(|call| is(&call.op)).count();
    let parameters = count(|op| matches!(op, Op::Update { .. }));
    assert_eq!(
        count(|op| matches!(op, Op::ReduceScatter { .. })),
        parameters
    );
    // Head and embedding are not read in backward.
    let gathered = count(|op| matches!(op, Op::AllGather { .. }));
    assert_eq!(gathered, 2 * parameters - 2);
}

#[test]
fn what_is_refused() {
    on_ranks(2, |ranks| {
        let (divided, optimizer, sharded) = sharded_model(&ranks, &meta(&config()), adamw())?;
        let config = plan_config(1, None);
        // A plan without ranks for a model that is sharded.
        let error = Step::for_model(&divided, &optimizer, &config).unwrap_err();
        assert!(matches!(error, Error::Order { .. }), "{error}");
        let other = model(1);
        refusal(
            Step::fully_sharded_for_model(&other, &optimizer, &config, &sharded),
            &["FullyShard::builder"],
        );
        refusal(sharded.full_weight("nobody"), &["nobody"]);
        let frozen = nn::freeze(nn::seeded(1, DType::F32, &Device::Cpu), |name| {
            name == "weight"
        });
        refusal(
            Linear::new(4, 4, sharded.builder(frozen)),
            &["weight is frozen", "freeze none"],
        );
        let in_half = FullyShardConfig {
            dtype: Some(DType::F16),
            ..Default::default()
        };
        refusal(FullyShard::new(&ranks, in_half), &["FullyShardConfig"]);
        Ok(())
    });
    let config = |rank| {
        let own = Shard {
            rank,
            world_size: 2,
        };
        StepConfig {
            ranks: StepRanks::FullySharded(FullyShardConfig::default(), own),
            ..plan_config(1, None)
        }
    };
    config(1).validate().unwrap();
    let in_backward = StepConfig {
        optimizer_in_backward: true,
        ..config(1)
    };
    for (config, words) in [
        (in_backward, "false with several ranks"),
        (config(2), "under the number of ranks, 2"),
    ] {
        refusal(config.validate(), &[words]);
    }
}
