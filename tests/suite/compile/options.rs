//! Options of planned steps: clipping, accumulation, checkpointing, budgets, the optimizer in backward; and state
//! shared with eager steps.

use super::{CPU, agree, batch, bits as weights, config, eager_step, model_and_optimizer, plan_of};
use crate::check::{elements, refusal};
use crate::settings::{in_precision, meta_of, with_lr};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device};
use rstest::rstest;
use std::num::NonZeroUsize;
use tallow::attention::Algorithm;
use tallow::compile::{Batch, Step, StepConfig, Target};
use tallow::internals::Category;
use tallow::model::TransformerLM;
use tallow::nn::Checkpointing;
use tallow::optim::{
    AdamWConfig, LionConfig, Moments, Optimizer, Rule, SgdConfig, clip_grad_norm, clip_grad_value,
    decay_matrices_only,
};
use tallow::precision::Precision;

/// The batch size and the length of a micro-batch.
const SIZES: [usize; 2] = [2, 37];

#[rstest]
fn clipping(
    #[values(0.01, 1e9)] norm: f64,
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
) {
    let plan = StepConfig {
        clip_norm: Some(norm),
        ..Default::default()
    };
    agree(&meta_of(&config(2, 2, 24, 56), attention), &plan, SIZES);
}

/// Elements are clipped after the norm, also with the optimizer in backward; returned gradients are not clipped.
#[rstest]
#[case(None, false)]
#[case(Some(0.5), false)]
#[case(None, true)]
fn clipping_by_value(#[case] clip_norm: Option<f64>, #[case] optimizer_in_backward: bool) {
    let plan = StepConfig {
        clip_norm,
        clip_value: Some(1e-3),
        optimizer_in_backward,
        ..Default::default()
    };
    agree(
        &meta_of(&config(2, 2, 24, 56), Algorithm::Flash),
        &plan,
        SIZES,
    );
}

/// Checks that a step has the bits of eager clipping and the rule applied to the planned gradients.
pub fn clipping_by_value_to_the_bit(
    model: impl Fn(&TransformerLM) -> TransformerLM,
    device: &Device,
    rule: Rule,
) {
    let plan = StepConfig {
        clip_norm: Some(0.5),
        clip_value: Some(1e-3),
        ..Default::default()
    };
    let made = || {
        let model = model(&meta_of(&config(2, 2, 32, 72), Algorithm::Flash));
        let optimizer = Optimizer::new(model.parameters(), rule).unwrap();
        (model, optimizer)
    };
    let ((eager, mut eager_optimizer), (planned, mut optimizer)) = (made(), made());
    let mut step = Step::for_model(&planned, &optimizer, &plan).unwrap();
    let parameters = eager.parameters();
    for i in 0..3 {
        let (tokens, targets) = batch(97, 2, 37, i);
        let [tokens, targets] = [tokens, targets].map(|ids| ids.to_device(device).unwrap());
        step.run(&mut optimizer, (&tokens, &targets)).unwrap();
        let mut store = tallow::backward(eager.loss(&tokens, &targets).unwrap()).unwrap();
        for ((_, var), (_, gradient)) in parameters.iter().zip(step.gradients().unwrap()) {
            store.insert(var, gradient.to_device(device).unwrap());
        }
        clip_grad_norm(&mut store, &parameters, 0.5).unwrap();
        let largest = |store: &GradStore| {
            let gradients = parameters.iter().map(|(_, var)| store.get(var).unwrap());
            let largest = gradients.map(|g| g.abs().unwrap().max_all().unwrap());
            largest
                .map(|x| x.to_scalar::<f32>().unwrap())
                .fold(0.0, f32::max)
        };
        assert!(largest(&store) > 1e-3, "nothing to clip");
        clip_grad_value(&mut store, &parameters, 1e-3).unwrap();
        assert_eq!(largest(&store), 1e-3);
        eager_optimizer.step(&store).unwrap();
        assert_eq!(weights(&planned), weights(&eager), "step {i}");
    }
}

/// Returns the rules, with and without state.
pub fn rules() -> [Rule; 4] {
    let momentum = SgdConfig {
        momentum: 0.9,
        nesterov: true,
        weight_decay: 0.1,
        ..Default::default()
    };
    [
        Rule::default(),
        SgdConfig::default().into(),
        momentum.into(),
        LionConfig::default().into(),
    ]
}

#[test]
fn clipping_by_value_is_as_eager() {
    for rule in rules() {
        let model = |meta: &TransformerLM| model_and_optimizer(meta).0;
        clipping_by_value_to_the_bit(model, &super::CPU, rule);
    }
}

/// A plan is for the rules of its optimizer.
#[test]
fn another_rule_is_refused() {
    let (model, adamw) = model_and_optimizer(&meta_of(&config(1, 2, 16, 24), Algorithm::Flash));
    let mut lion = Optimizer::new(model.parameters(), LionConfig::default()).unwrap();
    let mut step = Step::for_model(&model, &adamw, &StepConfig::default()).unwrap();
    let (tokens, targets) = batch(97, 2, 5, 0);
    refusal(
        step.run(&mut lion, (&tokens, &targets)),
        &[
            "planned with the state adamw (exp_avg, exp_avg_sq), and the optimizer's group has lion (exp_avg)",
            "plan the step for this optimizer",
        ],
    );
}

/// A plan without an optimizer counts the state of the rule that its configuration names.
#[test]
fn planned_memory_is_that_of_the_rule() {
    let meta = meta_of(&config(1, 2, 16, 24), Algorithm::Flash);
    for rule in rules() {
        let config = StepConfig {
            optimizer: rule,
            ..Default::default()
        };
        let meta_batch = Batch::meta(2, 5).unwrap();
        let (plan, _) = Step::plan_for_model(Target::Cpu, &meta, &config, meta_batch).unwrap();
        let (model, _) = model_and_optimizer(&meta);
        let optimizer = Optimizer::new(model.parameters(), rule).unwrap();
        let state = optimizer.state().into_iter();
        let bytes = state.map(|(_, x)| x.elem_count() * x.dtype().size_in_bytes());
        let planned = plan.category_bytes(Category::OptimizerState);
        assert_eq!(planned, bytes.sum::<usize>() as u64, "{rule}");
        let mut step = Step::for_model(&model, &optimizer, &StepConfig::default()).unwrap();
        let (tokens, targets) = batch(97, 2, 5, 0);
        let prepared = step.prepare((&tokens, &targets)).unwrap();
        assert_eq!(prepared.total_bytes(), plan.total_bytes(), "{rule}");
    }
}

/// Compares planned and eager steps with matrix moments in bf16 and vector moments in f32. They differ only where a
/// gradient's rounding error decides to which bf16 value a moment is rounded.
pub fn moments_in_bf16(
    model: impl Fn(&TransformerLM) -> TransformerLM,
    device: &Device,
    optimizer_in_backward: bool,
) {
    let meta = meta_of(&config(2, 2, 24, 56), Algorithm::Flash);
    let plan = StepConfig {
        optimizer_in_backward,
        ..Default::default()
    };
    let made = || {
        let model = model(&meta);
        let mut groups = decay_matrices_only(model.parameters(), AdamWConfig::default());
        groups[0].rule = AdamWConfig {
            moments: Moments::Bf16 { seed: 5 },
            ..Default::default()
        }
        .into();
        (model, Optimizer::with_groups(groups).unwrap())
    };
    let ((eager, mut eager_optimizer), (planned, mut optimizer)) = (made(), made());
    let mut step = Step::for_model(&planned, &optimizer, &plan).unwrap();
    for i in 0..4 {
        let (tokens, targets) = batch(97, 2, 37, i);
        let [tokens, targets] = [tokens, targets].map(|ids| ids.to_device(device).unwrap());
        step.run(&mut optimizer, (&tokens, &targets)).unwrap();
        let loss = eager.loss(&tokens, &targets).unwrap();
        let gradients = tallow::backward(loss).unwrap();
        eager_optimizer.step(&gradients).unwrap();
    }
    let mut state_bytes = 0;
    for ((name, a), (_, b)) in optimizer.state().iter().zip(eager_optimizer.state()) {
        state_bytes += a.elem_count() * a.dtype().size_in_bytes();
        let wanted = if a.rank() == 2 {
            DType::BF16
        } else {
            DType::F32
        };
        assert_eq!((a.dtype(), b.dtype()), (wanted, wanted), "{name}");
        let off = super::distance(a, &b);
        assert!(off <= 2e-3, "{name}: {off}");
    }
    for ((name, a), (_, b)) in planned.parameters().iter().zip(eager.parameters()) {
        let off = super::distance(a, &b);
        assert!(off <= 1e-4, "{name}: {off}");
    }
    let planned_bytes = step
        .plan()
        .unwrap()
        .category_bytes(Category::OptimizerState);
    assert_eq!(planned_bytes, state_bytes as u64);
    let matrices = &optimizer.groups()[0].parameters;
    assert!(matrices.iter().all(|(_, var)| var.rank() == 2));
}

#[rstest]
fn moments_in_bf16_are_as_eager(#[values(false, true)] optimizer_in_backward: bool) {
    let model = |meta: &TransformerLM| model_and_optimizer(meta).0;
    moments_in_bf16(model, &super::CPU, optimizer_in_backward);
}

/// Compares accumulation with one eager step of the whole batch.
#[rstest]
fn accumulated(
    #[values(2, 5)] accumulation: usize,
    #[values(None, Some(0.5))] clip_norm: Option<f64>,
    #[values(Checkpointing::None, Checkpointing::Block)] checkpointing: Checkpointing,
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
    #[values(Precision::F32, Precision::BF16)] precision: Precision,
) {
    let plan = StepConfig {
        accumulation,
        clip_norm,
        precision,
        ..Default::default()
    };
    let model = meta_of(&config(2, 2, 24, 56), attention).with_checkpointing(checkpointing);
    agree(&model, &plan, SIZES);
}

/// The bits do not depend on checkpointing, nor on when the optimizer runs.
#[rstest]
fn the_same_bits_however_planned(
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
    #[values(Precision::F32, Precision::BF16, Precision::F16)] precision: Precision,
) {
    let plan = || in_precision(precision);
    let meta = meta_of(&config(5, 2, 24, 56), attention);
    let bits = |plan: StepConfig, checkpointing: Checkpointing| {
        let (model, mut optimizer) = model_and_optimizer(&meta);
        let model = model.with_checkpointing(checkpointing);
        let mut step = Step::for_model(&model, &optimizer, &plan).unwrap();
        for i in 0..3 {
            let (tokens, targets) = batch(97, 2, 37, i);
            step.run(&mut optimizer, (&tokens, &targets)).unwrap();
        }
        (weights(&model), step.plan().unwrap().arena_bytes())
    };
    let (wanted, whole_bytes) = bits(plan(), Checkpointing::None);
    let every = |n| Checkpointing::Every(NonZeroUsize::new(n).unwrap());
    for checkpointing in [
        Checkpointing::Block,
        every(2),
        every(3),
        every(5),
        Checkpointing::Sqrt,
    ] {
        let (got, bytes) = bits(plan(), checkpointing);
        assert_eq!(got, wanted, "{checkpointing}");
        let fewer = checkpointing.recomputed_blocks(5) > 0;
        assert_eq!(bytes < whole_bytes, fewer, "{checkpointing}: {bytes}");
    }
    // Recomputes gates and up projections of as many blocks as the budget requires.
    for percent in [99, 95, 90] {
        let budget_bytes = whole_bytes * percent / 100;
        let plan = StepConfig {
            memory_budget_bytes: Some(budget_bytes),
            ..plan()
        };
        let (got, bytes) = bits(plan, Checkpointing::None);
        assert_eq!(got, wanted, "{percent}%");
        assert!(bytes <= budget_bytes, "{percent}%: {bytes}");
    }
    let in_backward = StepConfig {
        optimizer_in_backward: true,
        ..plan()
    };
    let (got, bytes) = bits(in_backward, Checkpointing::None);
    assert_eq!(got, wanted);
    assert!(bytes < whole_bytes);
}

/// A plan keeps to its budget and recomputes no more than needed; the error names the smallest possible budget.
#[test]
fn a_memory_budget_chooses_the_checkpointing() {
    let meta = meta_of(&config(6, 2, 24, 56), Algorithm::Naive);
    let peak = |checkpointing| {
        let meta = meta.clone().with_checkpointing(checkpointing);
        let (plan, _) = plan_of(&meta, &StepConfig::default(), SIZES).unwrap();
        plan.arena_bytes()
    };
    let with_budget = |bytes| {
        let plan = StepConfig {
            memory_budget_bytes: Some(bytes),
            ..Default::default()
        };
        plan_of(&meta, &plan, SIZES)
    };
    let (whole, chosen) = with_budget(peak(Checkpointing::None)).unwrap();
    assert_eq!(chosen, Checkpointing::None);
    // Smaller budgets first recompute gates and up projections of more blocks, then more whole blocks.
    let (mut before, mut flops) = (0, whole.flops());
    let mut budget = whole.arena_bytes() - 1;
    let smallest = loop {
        match with_budget(budget) {
            Ok((plan, chosen)) => {
                assert!(plan.arena_bytes() <= budget);
                let blocks = chosen.recomputed_blocks(6);
                match blocks {
                    0 => assert!(before == 0 && plan.flops() > flops, "{budget}"),
                    _ => assert_eq!(plan.arena_bytes(), peak(chosen)),
                }
                assert!(blocks >= before);
                (before, flops) = (blocks, plan.flops());
                budget = plan.arena_bytes() - 1;
            }
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains("memory_budget_bytes"), "{text}");
                let smallest = (1..=6)
                    .map(|n| peak(Checkpointing::Every(NonZeroUsize::new(n).unwrap())))
                    .min()
                    .unwrap();
                assert!(text.contains(&smallest.to_string()), "{text}");
                break smallest;
            }
        }
    };
    assert!(before > 0);
    assert!(with_budget(smallest).is_ok());
}

/// Learning rates and groups are read from the optimizer at each run.
#[test]
fn schedules_and_groups_are_read_at_each_run() {
    let meta = meta_of(&config(2, 2, 24, 56), Algorithm::Naive);
    let with_groups = || {
        let (model, _) = model_and_optimizer(&meta);
        let adamw = AdamWConfig {
            weight_decay: 0.3,
            betas: (0.8, 0.95),
            ..Default::default()
        };
        let groups = decay_matrices_only(model.parameters(), adamw);
        let optimizer = Optimizer::with_groups(groups).unwrap();
        (model, optimizer)
    };
    let (eager, mut eager_optimizer) = with_groups();
    let (planned, mut planned_optimizer) = with_groups();
    let mut step = Step::for_model(&planned, &planned_optimizer, &StepConfig::default()).unwrap();
    for i in 0..4 {
        let batch = batch(97, 2, 37, i);
        for optimizer in [&mut eager_optimizer, &mut planned_optimizer] {
            optimizer.set_learning_rate(1e-4 * (i + 1) as f64);
            optimizer.set_learning_rate_of(1, 1e-5).unwrap();
        }
        eager_step(&eager, &mut eager_optimizer, &batch, None);
        step.run(&mut planned_optimizer, (&batch.0, &batch.1))
            .unwrap();
    }
    for ((name, got), (_, wanted)) in planned.parameters().iter().zip(eager.parameters()) {
        let error = super::distance(got, &wanted);
        assert!(error <= 1e-5, "{name}: {error:.1e}");
    }
}

#[test]
fn optimizers_take_turns_on_one_step() {
    optimizers_take_turns(&CPU);
}

/// Two optimizers of one model run one step in turns, as with a new step for each run. The second has two groups, whose
/// learning rates are equal at first.
pub fn optimizers_take_turns(device: &Device) {
    let trained = |is_new_for_each: bool| {
        let model = TransformerLM::new(&config(2, 2, 24, 56), 5, device).unwrap();
        let mut first = Optimizer::new(model.parameters(), with_lr(1e-3)).unwrap();
        let groups = decay_matrices_only(model.parameters(), with_lr(1e-3));
        let mut second = Optimizer::with_groups(groups).unwrap();
        let plan = StepConfig::default();
        let mut step = Step::for_model(&model, &first, &plan).unwrap();
        for (i, turn) in [1, 1, 2, 2, 2, 1, 2, 2].into_iter().enumerate() {
            if i == 3 {
                second.set_learning_rate_of(1, 1e-4).unwrap();
            }
            let optimizer = if turn == 1 { &mut first } else { &mut second };
            if is_new_for_each {
                step = Step::for_model(&model, optimizer, &plan).unwrap();
            }
            let (tokens, targets) = batch(97, 2, 37, i);
            let [tokens, targets] = [tokens, targets].map(|ids| ids.to_device(device).unwrap());
            step.run(optimizer, (&tokens, &targets)).unwrap();
        }
        weights(&model)
    };
    assert_eq!(trained(false), trained(true));
}

/// Forward and backward alone have the step's loss and gradients, and update nothing.
#[test]
fn without_the_update() {
    let meta = meta_of(&config(2, 2, 24, 56), Algorithm::Naive);
    let (model, mut optimizer) = model_and_optimizer(&meta);
    let plan = StepConfig {
        accumulation: 2,
        clip_norm: Some(0.1),
        ..Default::default()
    };
    let mut step = Step::for_model(&model, &optimizer, &plan).unwrap();
    let (tokens, targets) = batch(97, 4, 37, 0);
    let before = weights(&model);
    let loss = step.forward_backward((&tokens, &targets)).unwrap();
    let values = |step: &mut Step| -> Vec<Vec<f64>> {
        let gradients = step.gradients().unwrap().into_iter();
        gradients.map(|(_, x)| elements(&x)).collect()
    };
    let gradients = values(&mut step);
    assert_eq!((weights(&model), optimizer.steps()), (before.clone(), 0));
    assert_eq!(step.gradient_norm(), None);
    assert_eq!(step.run(&mut optimizer, (&tokens, &targets)).unwrap(), loss);
    assert_eq!(values(&mut step), gradients);
    assert!(step.gradient_norm().is_some());
    assert_ne!(weights(&model), before);

    let (model, optimizer) = model_and_optimizer(&meta);
    let plan = StepConfig {
        optimizer_in_backward: true,
        ..Default::default()
    };
    let mut step = Step::for_model(&model, &optimizer, &plan).unwrap();
    let (tokens, targets) = batch(97, 2, 37, 0);
    refusal(
        step.forward_backward((&tokens, &targets)),
        &["optimizer_in_backward"],
    );
}

/// Planned and eager steps alternate on one model, which works because plans share its tensors.
#[test]
fn planned_and_eager_take_turns() {
    let meta = meta_of(&config(2, 2, 24, 56), Algorithm::Naive);
    let (eager, mut eager_optimizer) = model_and_optimizer(&meta);
    let (mixed, mut mixed_optimizer) = model_and_optimizer(&meta);
    for optimizer in [&mut eager_optimizer, &mut mixed_optimizer] {
        optimizer.set_learning_rate(1e-4);
    }
    let mut step = Step::for_model(&mixed, &mixed_optimizer, &StepConfig::default()).unwrap();
    for i in 0..6 {
        let batch = batch(97, 2, 37, i);
        let wanted = eager_step(&eager, &mut eager_optimizer, &batch, None);
        let got = match i % 2 {
            0 => step
                .run(&mut mixed_optimizer, (&batch.0, &batch.1))
                .unwrap(),
            _ => eager_step(&mixed, &mut mixed_optimizer, &batch, None),
        };
        let error = (got - wanted).abs() / wanted;
        assert!(error <= 1e-5, "step {i}: {got} for {wanted}");
    }
    assert_eq!(mixed_optimizer.steps(), 6);
}

/// Repeated runs, and any number of threads, give the same bits.
#[rstest]
fn the_same_bits_for_any_number_of_threads(
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
    #[values(Precision::F32, Precision::BF16, Precision::F16)] precision: Precision,
) {
    let meta = meta_of(&config(2, 3, 24, 120), attention);
    let bits = |planned_with: usize, run_with: usize| {
        let pool = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
            pool.build().unwrap()
        };
        let (model, mut optimizer) = model_and_optimizer(&meta);
        let plan = StepConfig {
            clip_norm: Some(0.1),
            accumulation: 2,
            precision,
            ..Default::default()
        };
        let mut step = Step::for_model(&model, &optimizer, &plan).unwrap();
        pool(planned_with).install(|| {
            let batch = Batch::meta(4, 130).unwrap();
            step.prepare(batch).unwrap();
        });
        let mut losses = Vec::new();
        pool(run_with).install(|| {
            for i in 0..3 {
                let (tokens, targets) = batch(97, 4, 130, i);
                let loss = step.run(&mut optimizer, (&tokens, &targets)).unwrap();
                losses.push(loss.to_bits());
            }
        });
        (losses, weights(&model))
    };
    let one = bits(1, 1);
    for (planned_with, run_with) in [(1, 1), (2, 2), (3, 3), (1, 3), (3, 2)] {
        assert_eq!(
            bits(planned_with, run_with),
            one,
            "{planned_with} {run_with}"
        );
    }
}
