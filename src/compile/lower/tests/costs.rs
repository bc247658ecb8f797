//! Tests that the costs of a plan's ops equal those of its calls and of the same ops run eagerly.

use super::*;
use crate::attention::Mask;
use crate::nn::Checkpointing;
use crate::ops::cost::Cost;
use crate::{ops, profile};
use rstest::rstest;

const CPU: Target = Target::Cpu;

/// Checks that the FLOPs of each part are those of its calls.
fn check_parts(plan: &Plan) {
    let mut others = vec![0.0; plan.costs().len()];
    let mut products = vec![0.0; plan.costs().len()];
    for call in plan.calls() {
        match call.cost_index {
            Some(part) => {
                assert!(!matches!(call.op, Op::Update { .. }));
                products[part] += call.op.flops();
                others[part] += plan.cost_of(call).other_flops;
                // Gradients that are computed with a loss belong to its part.
                let of_part = plan.costs()[part].phase;
                assert_eq!(call.phase.name(), of_part.name(), "{call:?}");
            }
            None => assert_eq!(call.op.flops(), 0.0, "{call:?}"),
        }
    }
    for (part, (products, others)) in plan.costs().iter().zip(products.into_iter().zip(others)) {
        assert_eq!(part.cost.matmul_flops, products, "{part:?}");
        let error = (part.cost.other_flops - others).abs();
        assert!(error <= 1e-12 * others, "{part:?}: {others}");
    }
}

/// Also checks that, without checkpointing, sums equal those of the graph's nodes.
fn check(planned: &Planned, recomputes: bool) {
    let plan = &planned.lowered.plan;
    check_parts(plan);
    let of_nodes = profile::node_costs(&planned.function.graph).into_iter();
    let mut sum = Cost::default();
    of_nodes
        .flat_map(|node| [node.forward, node.backward])
        .flatten()
        .for_each(|cost| sum += cost);
    let wanted =
        [sum.matmul_flops, sum.other_flops].map(|flops| plan.micro_batches() as f64 * flops);
    match recomputes {
        true => assert!(plan.other_flops() > wanted[1]),
        false => assert_eq!([plan.flops(), plan.other_flops()], wanted),
    }
}

#[rstest]
fn of_a_transformer(
    #[values(CPU, Target::Cuda)] target: Target,
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
    #[values(Precision::F32, Precision::BF16)] precision: Precision,
    #[values(Checkpointing::None, Checkpointing::Block)] checkpointing: Checkpointing,
) {
    let model = TransformerConfig {
        num_layers: 2,
        ..TransformerConfig::preset("small").unwrap()
    };
    let model = TransformerLM::meta(&model).unwrap();
    let model = model.with_attention(attention).unwrap();
    let model = model.with_checkpointing(checkpointing);
    let config = StepConfig {
        precision,
        accumulation: 3,
        ..Default::default()
    };
    let planned = planned(target, &model, [2, 64], &config, Recompute::default());
    check(&planned, checkpointing != Checkpointing::None);
}

/// Rotary embeddings planned with attention add nothing to the FLOPs of softmax: 4 Dh for matmuls and 6 for softmax per
/// score, whatever the target fuses.
#[rstest]
fn of_softmax(
    #[values(CPU, Target::Cuda)] target: Target,
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
) {
    let config = small(2);
    let head_dim = (config.d_model / config.num_heads) as f64;
    let model = flash(&config).with_attention(attention).unwrap();
    let planned = planned(target, &model, [2, 64], &in_bf16(), Recompute::default());
    let plan = &planned.lowered.plan;
    let mut attentions = 0;
    for call in plan.calls() {
        let cost = plan.cost_of(call);
        let computes_scores = call.op.kernel().is_some_and(|kernel| kernel.scores() > 0.0);
        if computes_scores && call.phase.name() == "forward" {
            assert_eq!(cost.matmul_flops / cost.softmax_flops, 4.0 * head_dim / 6.0);
            attentions += 1;
        }
        assert!(computes_scores || cost.softmax_flops == 0.0, "{call:?}");
    }
    assert_eq!(attentions, 2);
}

/// Gates that a memory budget has recomputed are parts too.
#[test]
fn of_a_budget() {
    let model = small(2);
    let meta = flash(&model);
    let of = |recompute| planned(Target::Cuda, &meta, [2, 1024], &in_bf16(), recompute);
    let (kept, recomputed) = (
        of(Recompute::default()),
        of(Recompute { sums: 4, gates: 2 }),
    );
    check_parts(&recomputed.lowered.plan);
    let [kept, recomputed] = [&kept, &recomputed].map(|planned| planned.lowered.plan.flops());
    let rows = (2 * 1024) as f64;
    let gates = 2.0 * 2.0 * 2.0 * rows * (model.d_model * model.d_ff) as f64;
    assert_eq!(recomputed, kept + gates);
}

/// Covers LayerNorm, GELU, linear layers with a bias, softmax between matmuls, and cross-entropy of logits.
#[rstest]
fn of_any_loss(
    #[values(CPU, Target::Cuda)] target: Target,
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
    #[values(Precision::F32, Precision::BF16)] precision: Precision,
) {
    let weights = graph::weights(DType::F32);
    let ids = |name| graph::input(name, (2, 64), DType::U32).unwrap();
    let (tokens, targets) = (ids("tokens"), ids("targets"));
    let forward = || {
        let table = weights.pp("table").get((100, 128), "weight")?;
        let x = ops::embedding(&tokens, &table)?;
        let x = block(&weights.pp("0"), &x, 2, attention)?;
        let scores = ops::matmul_transposed(&x, &x)?;
        let x = ops::matmul(&ops::softmax(&scores, 0.1, Mask::Causal)?, &x)?;
        let head = crate::nn::Linear::with_bias(128, 100, weights.pp("head"))?;
        ops::cross_entropy(&head.forward(&x)?, &targets)
    };
    let config = StepConfig {
        optimizer_in_backward: true,
        ..Default::default()
    };
    let traced = || Ok(vec![precision.run(forward)?]);
    let function = Rc::new(TracedFunction::with_meta_weights("test", target, traced).unwrap());
    let kind = PlanKind::TrainStep;
    let planned = function.plan(kind, &config, Recompute::default());
    check(&planned.unwrap(), false);
}
