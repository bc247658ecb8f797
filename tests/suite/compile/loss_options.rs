//! Options of planned steps of any loss: checkpointed segments, micro-batches, a memory budget, the optimizer in
//! backward, a loss scale.

use crate::check::{bits, refusal};
use crate::settings::{in_precision, scaler_from};
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::VarBuilder;
use rstest::rstest;
use tallow::compile::{Inputs, PlanKind, Step, StepConfig};
use tallow::nn::{self, Layer, Linear, RmsNorm};
use tallow::optim::{AdamWConfig, Optimizer};
use tallow::precision::Precision;
use tallow::{Result, graph, ops};

const DEVICE: &Device = &Device::Cpu;
const WIDTH: usize = 16;

/// Residual blocks of norm, linear, GELU and linear, and a head.
struct Model {
    blocks: Vec<(RmsNorm, Linear, Linear)>,
    head: Linear,
    checkpointed: bool,
}

impl Model {
    fn new(checkpointed: bool) -> Self {
        let vb = nn::seeded(3, DType::F32, DEVICE);
        let block = |i: usize| {
            let vb = vb.pp(i);
            let norm = RmsNorm::new(WIDTH, 1e-5, vb.pp("norm")).unwrap();
            let up = Linear::with_bias(WIDTH, 4 * WIDTH, vb.pp("up")).unwrap();
            let down = Linear::with_bias(4 * WIDTH, WIDTH, vb.pp("down")).unwrap();
            (norm, up, down)
        };
        Self {
            blocks: (0..4).map(block).collect(),
            head: Linear::new(WIDTH, 11, vb.pp("head")).unwrap(),
            checkpointed,
        }
    }

    fn parameters(&self) -> Vec<(String, Var)> {
        let mut parameters = Vec::new();
        let mut add = |path: &str, layer: &dyn Layer| {
            let named = layer.parameters().into_iter();
            parameters.extend(named.map(|(name, var)| (format!("{path}.{name}"), var)));
        };
        for (i, (norm, up, down)) in self.blocks.iter().enumerate() {
            add(&format!("{i}.norm"), norm);
            add(&format!("{i}.up"), up);
            add(&format!("{i}.down"), down);
        }
        add("head", &self.head);
        parameters
    }

    fn loss(&self, x: &Tensor, classes: &Tensor) -> Result<Tensor> {
        let mut x = x.clone();
        for (norm, up, down) in &self.blocks {
            let (norm, up, down) = (norm.clone(), up.clone(), down.clone());
            let block = move |[x]: [&Tensor; 1]| {
                let hidden = ops::gelu(&up.forward(&norm.forward(x)?)?, ops::Gelu::Tanh)?;
                ops::add(x, &down.forward(&hidden)?)
            };
            x = match self.checkpointed {
                true => nn::checkpoint(block, [&x])?,
                false => block([&x])?,
            };
        }
        ops::linear_cross_entropy(&x, self.head.weight(), classes)
    }

    fn optimizer(&self) -> Optimizer {
        Optimizer::new(self.parameters(), AdamWConfig::default()).unwrap()
    }

    fn planned(&self, optimizer: &Optimizer, config: &StepConfig) -> Step<'_> {
        let loss = |inputs: &Inputs| self.loss(&inputs.get("x")?, &inputs.get("classes")?);
        Step::new(optimizer, config, loss).unwrap()
    }

    fn bits(&self) -> Vec<Vec<u64>> {
        let parameters = self.parameters().into_iter();
        parameters.map(|(_, var)| bits(&var)).collect()
    }
}

fn batch() -> [Tensor; 2] {
    let x = (0..64 * WIDTH).map(|i| ((i * i % 101) as f32 - 50.0) / 40.0);
    let x = Tensor::from_iter(x, DEVICE).unwrap();
    let classes = Tensor::from_iter((0..64u32).map(|i| i * 7 % 11), DEVICE).unwrap();
    [x.reshape((64, WIDTH)).unwrap(), classes]
}

/// Checkpointed segments give the same bits with less memory and more calls.
#[rstest]
fn segments_are_run_again(
    #[values(Precision::F32, Precision::BF16, Precision::F16)] precision: Precision,
) {
    let [x, classes] = batch();
    let inputs = [("x", &x), ("classes", &classes)];
    let run = |checkpointed| {
        let model = Model::new(checkpointed);
        let mut optimizer = model.optimizer();
        let config = in_precision(precision);
        let mut step = model.planned(&optimizer, &config);
        let losses = [0, 1].map(|_| step.run(&mut optimizer, inputs).unwrap().to_bits());
        let plan = step.plan().unwrap();
        let sizes = (plan.arena_bytes(), plan.calls().len());
        ((losses, model.bits()), sizes)
    };
    let (kept, kept_sizes) = run(false);
    let (again, again_sizes) = run(true);
    assert_eq!(kept, again);
    let more = again_sizes.1 - kept_sizes.1;
    // Recomputed in each block: norm, bias and matmul, GELU; not the calls that only compute the block's output.
    assert!((4..=4 * 5).contains(&more), "{more}");
    assert!(
        again_sizes.0 < kept_sizes.0 * 3 / 4,
        "{again_sizes:?} {kept_sizes:?}"
    );
}

/// Updating each weight as soon as its gradient is complete gives the same bits.
#[rstest]
fn the_optimizer_in_backward(#[values(false, true)] checkpointed: bool) {
    let [x, classes] = batch();
    let inputs = [("x", &x), ("classes", &classes)];
    let run = |optimizer_in_backward| {
        let model = Model::new(checkpointed);
        let mut optimizer = model.optimizer();
        let config = StepConfig {
            optimizer_in_backward,
            ..Default::default()
        };
        let mut step = model.planned(&optimizer, &config);
        for _ in 0..3 {
            step.run(&mut optimizer, inputs).unwrap();
        }
        assert_eq!(step.gradients().is_err(), optimizer_in_backward);
        assert_eq!(
            step.forward_backward(inputs).is_err(),
            optimizer_in_backward
        );
        model.bits()
    };
    assert_eq!(run(false), run(true));
    let model = Model::new(false);
    let config = StepConfig {
        clip_norm: Some(1.0),
        optimizer_in_backward: true,
        ..Default::default()
    };
    let refused = Step::new(&model.optimizer(), &config, |_| unreachable!());
    refusal(refused, &["optimizer_in_backward"]);
}

/// A scaled step takes an eager step's update; if a gradient overflows, the update is skipped and the scale falls.
#[test]
fn loss_scales() {
    let [x, classes] = batch();
    let inputs = [("x", &x), ("classes", &classes)];
    let model = Model::new(false);
    let mut optimizer = model.optimizer();
    let config = StepConfig {
        precision: Precision::F16,
        loss_scaling: true,
        ..Default::default()
    };
    let mut step = model.planned(&optimizer, &config);
    let mut scaler = scaler_from(2f64.powi(40));
    let before = model.bits();
    let done = step
        .run_scaled(&mut optimizer, &mut scaler, inputs)
        .unwrap();
    assert!(!done.updated() && done.loss.is_finite(), "{done:?}");
    assert_eq!((model.bits(), optimizer.steps()), (before, 0));
    while !step
        .run_scaled(&mut optimizer, &mut scaler, inputs)
        .unwrap()
        .updated()
    {}
    assert_eq!(optimizer.steps(), 1);

    // The update equals that of unscaled gradients, within f16's rounding.
    let other = Model::new(false);
    let mut plain = other.optimizer();
    let config = in_precision(Precision::F16);
    let mut step = other.planned(&plain, &config);
    step.run(&mut plain, inputs).unwrap();
    for ((name, a), (_, b)) in model.parameters().iter().zip(other.parameters()) {
        let off = (a.as_tensor() - b.as_tensor()).unwrap().abs().unwrap();
        let off: f32 = off.max_all().unwrap().to_scalar().unwrap();
        assert!(off <= 2.1e-3, "{name}: {off}"); // AdamW's first step is at most lr in either direction
    }
    refusal(
        step.run_scaled(&mut plain, &mut scaler, inputs),
        &["loss_scaling"],
    );
}

/// Micro-batches are consecutive slices of each input's first dimension, and their mean loss is that of the whole
/// batch. In half precision gradients are rounded once per micro-batch.
#[rstest]
fn micro_batches(#[values(Precision::F32, Precision::BF16)] precision: Precision) {
    let model = Model::new(false);
    let [x, classes] = batch();
    let inputs = [("x", &x), ("classes", &classes)];
    let step = |accumulation| {
        let optimizer = model.optimizer();
        let config = StepConfig {
            precision,
            accumulation,
            ..Default::default()
        };
        let mut step = model.planned(&optimizer, &config);
        let loss = step.forward_backward(inputs).unwrap();
        (loss, step.gradients().unwrap())
    };
    let (whole, gradients) = step(1);
    let (mean, sums) = step(4);
    let bound = match precision == Precision::F32 {
        true => 2e-6,
        false => 1e-2,
    };
    assert!((whole - mean).abs() <= bound * whole, "{whole} {mean}");
    for ((name, a), (other, b)) in gradients.iter().zip(&sums) {
        assert_eq!(name, other);
        let error = super::distance(b, a);
        assert!(error <= f64::from(bound), "{name}: {error:.1e}");
    }

    let scalar = graph::input("scale", (), DType::F32).unwrap();
    let config = StepConfig {
        accumulation: 2,
        ..Default::default()
    };
    let loss = |inputs: &Inputs| ops::mean(&ops::mul(model.head.weight(), &inputs.get("scale")?)?);
    let head = model.head.parameters();
    let optimizer = Optimizer::new(head, AdamWConfig::default()).unwrap();
    let mut step = Step::new(&optimizer, &config, loss).unwrap();
    refusal(step.prepare([("scale", &scalar)]), &["2 micro-batches"]);
}

/// Plans from meta tensors: each smaller budget recomputes more gates, down to the smallest possible peak.
#[test]
fn a_budget() {
    a_budget_of(|vb| {
        let layer = nn::SwiGlu::new(WIDTH, 64, vb)?;
        Ok(Box::new(move |x| layer.forward(x)))
    });
    a_budget_of(|vb| {
        let layer = nn::GeGlu::new(WIDTH, 64, vb)?;
        Ok(Box::new(move |x| layer.forward(x)))
    });
}

type FeedForward = Box<dyn Fn(&Tensor) -> Result<Tensor>>;

fn a_budget_of(layer: fn(VarBuilder<'_>) -> Result<FeedForward>) {
    let plan = |memory_budget_bytes| {
        let vb = graph::weights(DType::F32);
        let x = graph::input("x", (64, WIDTH), DType::F32).unwrap();
        let classes = graph::input("classes", 64, DType::U32).unwrap();
        let config = StepConfig {
            memory_budget_bytes,
            optimizer_in_backward: true,
            ..Default::default()
        };
        Step::plan_for(
            DEVICE,
            PlanKind::TrainStep,
            &config,
            [("x", &x), ("classes", &classes)],
            |inputs| {
                let mut x = inputs.get("x")?;
                for i in 0..3 {
                    x = ops::add(&x, &layer(vb.pp(i))?(&x)?)?;
                }
                let head = Linear::new(WIDTH, 5, vb.pp("head"))?;
                ops::linear_cross_entropy(&x, head.weight(), &inputs.get("classes")?)
            },
        )
    };
    let mut last = plan(None).unwrap();
    let mut smaller = 0;
    while let Ok(next) = plan(Some(last.arena_bytes() - 1)) {
        assert!(next.arena_bytes() < last.arena_bytes());
        assert!(next.flops() > last.flops());
        last = next;
        smaller += 1;
    }
    assert!(smaller > 0);
    let least = format!("at least {}", last.arena_bytes());
    refusal(
        plan(Some(last.arena_bytes() - 1)),
        &["StepConfig", "memory_budget_bytes", &least],
    );
}
