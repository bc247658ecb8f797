//! Planned steps against eager ones, and the data that a plan reports.

mod architectures;
pub mod attention;
#[cfg(feature = "cuda")]
mod attention_gpu;
mod attention_judged;
mod dropout;
mod eager;
#[cfg(feature = "cuda")]
mod gpu;
mod half;
#[cfg(feature = "cuda")]
mod loss_gpu;
mod loss_options;
mod loss_step;
mod masks;
mod memory;
mod missing_gradients;
mod options;
mod output_gradient;
mod packed;
mod phase_times;
mod plans;
mod property;
mod pytorch;
mod refusals;
mod retrace;
pub mod routing;
#[cfg(feature = "cuda")]
mod tf32;
mod tied;

use crate::check::{self, norms};
use crate::settings::{in_precision, with_lr, with_weights};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::VarBuilder;
use std::collections::HashMap;
use std::num::NonZeroUsize;
use tallow::compile::{Batch, Plan, Step, StepConfig};
use tallow::model::{TransformerConfig, TransformerLM};
use tallow::nn::{self, Architecture, Checkpointing, Layer};
use tallow::optim::{Optimizer, clip_grad_norm_checked, clip_grad_value};
use tallow::precision::Precision;

const CPU: Device = Device::Cpu;

/// Returns a small model of these sizes, with V 97 and T up to 160.
pub fn config(layers: usize, heads: usize, head_dim: usize, d_ff: usize) -> TransformerConfig {
    TransformerConfig {
        vocab_size: 97,
        context_length: 160,
        d_model: heads * head_dim,
        num_layers: layers,
        num_heads: heads,
        d_ff,
        ..Default::default()
    }
}

/// Returns ids (batch, length) that differ between steps and repeat within one.
pub fn batch(vocab_size: usize, batch: usize, length: usize, step: usize) -> (Tensor, Tensor) {
    let ids = |shift: usize| -> Vec<u32> {
        let id = |i: usize| ((i * i + 7 * i + 31 * step + shift) % vocab_size) as u32;
        (0..batch * length).map(id).collect()
    };
    let tensor = |shift| Tensor::from_vec(ids(shift), (batch, length), &CPU).unwrap();
    (tensor(0), tensor(1))
}

/// Returns a meta model with weights, always the same, and its optimizer.
pub fn model_and_optimizer(meta: &TransformerLM) -> (TransformerLM, Optimizer) {
    let model = with_weights(meta, nn::seeded(5, DType::F32, &CPU));
    let optimizer = Optimizer::new(model.parameters(), with_lr(3e-3)).unwrap();
    (model, optimizer)
}

/// Returns a step that computes the model's logits.
pub fn logits_of(model: &TransformerLM, precision: Precision) -> Step<'_> {
    let config = in_precision(precision);
    let parameters = model.parameters();
    let step = Step::without_optimizer(model.device(), parameters, &config, |inputs| {
        model.forward(&inputs.get("tokens")?)
    });
    step.unwrap()
}

/// Returns a configuration with clipping, except with the optimizer in backward, which excludes it.
fn updating(precision: Precision, accumulation: usize, optimizer_in_backward: bool) -> StepConfig {
    StepConfig {
        precision,
        accumulation,
        clip_norm: (!optimizer_in_backward).then_some(0.5),
        optimizer_in_backward,
        ..Default::default()
    }
}

/// Plans a model's step on the CPU, with tokens (B, T) in each micro-batch. Returns the plan and the chosen
/// checkpointing.
pub fn plan_of(
    model: &TransformerLM,
    plan: &StepConfig,
    [batch_size, length]: [usize; 2],
) -> tallow::Result<(Plan, Checkpointing)> {
    let batch = Batch::meta(plan.accumulation * batch_size, length)?;
    Step::plan_for_model(&CPU, model, plan, batch)
}

/// Returns the norm of the difference, relative to the norm of `wanted`.
pub fn distance(got: &Tensor, wanted: &Tensor) -> f64 {
    let [difference, size] = norms(got, wanted);
    difference / size.max(1e-30)
}

/// Returns the norm of all tensors as one vector.
fn length(tensors: &[(String, Tensor)]) -> f64 {
    let squares = |(_, x): &(String, Tensor)| x.sqr()?.sum_all()?.to_scalar::<f32>();
    let squares: candle_core::Result<Vec<f32>> = tensors.iter().map(squares).collect();
    f64::from(squares.unwrap().into_iter().sum::<f32>()).sqrt()
}

fn to_f32(x: &Tensor) -> Tensor {
    x.to_dtype(DType::F32).unwrap()
}

/// Takes an eager step with all sequences of the batch, and returns its loss.
pub fn eager_step(
    model: &TransformerLM,
    optimizer: &mut Optimizer,
    (tokens, targets): &(Tensor, Tensor),
    clip_norm: Option<f64>,
) -> f32 {
    eager_step_in(
        Precision::F32,
        model,
        optimizer,
        (tokens, targets),
        clip_norm,
    )
}

/// Does the same as [`eager_step`], in a precision.
pub fn eager_step_in(
    precision: Precision,
    model: &TransformerLM,
    optimizer: &mut Optimizer,
    (tokens, targets): (&Tensor, &Tensor),
    clip_norm: Option<f64>,
) -> f32 {
    let loss = precision.run(|| model.loss(tokens, targets)).unwrap();
    let mut store = loss.backward().unwrap();
    if let Some(norm) = clip_norm {
        clip_grad_norm_checked(&mut store, &model.parameters(), norm).unwrap();
    }
    optimizer.step(&store).unwrap();
    loss.to_scalar().unwrap()
}

/// Checks two planned steps of a meta model with weights, on tokens (B, T) in each micro-batch, against eager steps of
/// a model with the same weights and without checkpointing. Losses and gradients must agree. The weights must have the
/// bits that eager clipping and AdamW compute from the planned gradients.
pub fn agree(meta: &TransformerLM, plan: &StepConfig, sizes: [usize; 2]) {
    agree_of(|| model_and_optimizer(meta), plan, sizes);
}

/// Does the same as [`agree`] for any model; `make` returns the same one at each call.
pub fn agree_of(
    make: impl Fn() -> (TransformerLM, Optimizer),
    plan: &StepConfig,
    [batch_size, length]: [usize; 2],
) {
    let (eager, mut eager_optimizer) = make();
    let eager = eager.with_checkpointing(Checkpointing::None);
    let (planned, mut planned_optimizer) = make();
    let model_config = planned.config();
    let computed = (planned.attention(), planned.checkpointing());
    let what = format!("{model_config:?} {computed:?} {plan:?} {batch_size} {length}");
    let retraced = StepConfig {
        retrace_every: NonZeroUsize::new(1),
        ..plan.clone()
    };
    let mut step = Step::for_model(&planned, &planned_optimizer, &retraced).unwrap();
    // If gradients are freed after a run, those of a step that keeps them are used; the weights must have the same
    // bits.
    let keeping = StepConfig {
        optimizer_in_backward: false,
        ..plan.clone()
    };
    let mut keeper = plan.optimizer_in_backward.then(|| {
        let (model, optimizer) = make();
        let step = Step::for_model(&model, &optimizer, &keeping).unwrap();
        (step, optimizer)
    });
    for i in 0..2 {
        let sequences = plan.accumulation * batch_size;
        let batch = batch(model_config.vocab_size, sequences, length, i);
        let ids = (&batch.0, &batch.1);
        let got = step.run(&mut planned_optimizer, ids).unwrap();
        let gradients = match &mut keeper {
            Some((keeping_step, optimizer)) => {
                let kept = keeping_step.run(optimizer, ids).unwrap();
                assert_eq!(kept.to_bits(), got.to_bits());
                keeping_step.gradients().unwrap()
            }
            None => step.gradients().unwrap(),
        };

        let loss = || eager.loss(&batch.0, &batch.1);
        let loss = plan.precision.run(loss).unwrap();
        let mut store = loss.backward().unwrap();
        let loss = loss.to_scalar::<f32>().unwrap();
        let error = (got - loss).abs() / loss;
        let allowed = match plan.precision {
            Precision::F32 => 1e-6,
            _ => 1e-4,
        };
        assert!(error <= allowed, "{what}, step {i}: {got} for {loss}");
        let judge = Judge {
            precision: plan.precision,
            model: &eager,
            batch: &batch,
            what: &what,
        };
        judge.gradients(&gradients, &store);

        for ((_, var), (_, gradient)) in eager.parameters().iter().zip(gradients) {
            store.insert(var, gradient);
        }
        if let Some(norm) = plan.clip_norm {
            let norm = clip_grad_norm_checked(&mut store, &eager.parameters(), norm).unwrap();
            assert_eq!(step.gradient_norm(), Some(norm));
        }
        if let Some(value) = plan.clip_value {
            clip_grad_value(&mut store, &eager.parameters(), value).unwrap();
        }
        eager_optimizer.step(&store).unwrap();
        assert_eq!(bits(&planned), bits(&eager), "{what}, step {i}");
    }
    assert_eq!(planned_optimizer.steps(), 2);
}

/// Checks gradients against the eager ones of a model.
struct Judge<'a> {
    precision: Precision,
    model: &'a TransformerLM,
    batch: &'a (Tensor, Tensor),
    what: &'a str,
}

impl Judge<'_> {
    fn gradients(&self, gradients: &[(String, Tensor)], store: &GradStore) {
        let parameters = self.model.parameters();
        assert_eq!(gradients.len(), parameters.len());
        match self.precision.dtype() {
            // Half of the distance between 1 and the next number.
            DType::BF16 => return self.in_half(gradients, store, 2f64.powi(-8)),
            DType::F16 => return self.in_half(gradients, store, 2f64.powi(-11)),
            _ => {}
        }
        let rounding = 1e-6 * length(gradients);
        for ((name, got), (wanted_name, var)) in gradients.iter().zip(&parameters) {
            assert_eq!(name, wanted_name);
            let wanted = store.get(var).unwrap();
            let is_query_or_key = name.contains("q_proj") || name.contains("k_proj");
            let is_one_key = self.batch.0.dims()[1] == 1 && is_query_or_key;
            let is_gpt2 = self.model.config().architecture == Architecture::Gpt2;
            if is_one_key || is_gpt2 && name.ends_with("k_proj.bias") {
                // With one key the probability is 1 whatever q and k. A bias shared by all keys, without rotation,
                // shifts a query's scores alike. Both gradients are exactly 0, and rounding errors on both sides.
                let both = [got, wanted].map(|x| length(&[(String::new(), x.clone())]));
                assert!(
                    both.iter().all(|norm| *norm <= rounding),
                    "{name}: {both:?}"
                );
                continue;
            }
            let error = distance(got, wanted);
            if error > 5e-6 {
                // A small difference of large numbers; both sides are compared with f64. Eager may be near by chance,
                // so an error below four roundings of all gradients is accepted.
                let exact = &self.exact()[name];
                let [error, allowed] = [got, wanted].map(|x| distance(x, exact));
                let (what, own) = (self.what, length(&[(String::new(), wanted.clone())]));
                let floor = 4.0 * f64::from(f32::EPSILON) * length(gradients);
                assert!(
                    error <= 3.0 * allowed || error * own <= floor,
                    "{what}, {name}: {error:.1e}, {allowed:.1e}, of {own:.1e} beside {floor:.1e}"
                );
            }
        }
    }

    /// Checks half precision against f64. Each gradient's error is at most three times eager's, or three roundings. All
    /// gradients together are nearer to eager's than those are to f64's.
    fn in_half(&self, gradients: &[(String, Tensor)], store: &GradStore, unit: f64) {
        let exact = self.exact();
        let negligible = unit * length(gradients);
        let (mut apart, mut allowed) = (0.0, 0.0);
        for ((name, got), (_, var)) in gradients.iter().zip(self.model.parameters()) {
            let (wanted, exact) = (store.get(&var).unwrap(), &exact[name]);
            let norm = |x: &Tensor| length(&[(String::new(), to_f32(x))]);
            apart += (distance(got, wanted) * norm(wanted)).powi(2);
            let [error, eager] = [got, wanted].map(|x| distance(x, exact));
            let norm = norm(exact);
            allowed += (eager * norm).powi(2);
            let is_near = error <= 3.0 * eager.max(unit) || error * norm <= negligible;
            assert!(is_near, "{}, {name}: {error:.1e}, {eager:.1e}", self.what);
        }
        let (apart, allowed) = (apart.sqrt(), allowed.sqrt().max(negligible));
        assert!(
            apart <= allowed,
            "{}: {apart:.1e}, {allowed:.1e}",
            self.what
        );
    }

    /// Returns the gradients in f64.
    fn exact(&self) -> HashMap<String, Tensor> {
        let mut wide = HashMap::new(); // a tied weight is one variable
        let weights = self.model.weights().into_iter().map(|(name, weight)| {
            let of_weight = || Var::from_tensor(&weight.to_dtype(DType::F64).unwrap()).unwrap();
            let var = wide.entry(weight.id()).or_insert_with(of_weight);
            (name, var.as_tensor().clone())
        });
        let weights: HashMap<String, Tensor> = weights.collect();
        let vb = VarBuilder::from_tensors(weights, DType::F64, &CPU);
        let model = with_weights(self.model, vb);
        let (tokens, targets) = self.batch;
        let gradients = model.loss(tokens, targets).unwrap().backward().unwrap();
        let parameters = model.parameters().into_iter();
        let gradients = parameters.map(|(name, var)| (name, gradients.get(&var).unwrap().clone()));
        gradients.collect()
    }
}

/// Returns the bits of every weight.
pub fn bits(model: &TransformerLM) -> Vec<u64> {
    let parameters = model.parameters();
    let bits = parameters.iter().flat_map(|(_, var)| check::bits(var));
    bits.collect()
}
