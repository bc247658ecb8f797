//! A block whose attention and feed-forward are parallel and read the same norm. The feed-forward mixes two experts by
//! a soft gate.

use crate::settings::causal;
use candle_core::{D, DType, Device, Tensor, Var};
use rstest::rstest;
use tallow::attention::{Algorithm, Mask};
use tallow::compile::{Inputs, Step, StepConfig};
use tallow::graph::{self, Attribute, Target};
use tallow::nn::{self, Layer, Linear, RmsNorm, RotaryEmbedding, seeded};
use tallow::ops::{self, Gelu, KernelPolicy, with_kernel_policy};
use tallow::optim::{AdamWConfig, Optimizer};
use tallow::probe::in_module;
use tallow::profile;
use tallow::{Result, no_grad};

const WIDTH: usize = 8;
const HEADS: usize = 2;
const HIDDEN: usize = 10;
const SHARE: f64 = 0.5;

/// `w2 gelu(w1 x + b1) + b2`.
struct Expert {
    up: Linear,
    down: Linear,
}

impl Expert {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let hidden = ops::gelu(&in_module("up", || self.up.forward(x))?, Gelu::Erf)?;
        in_module("down", || self.down.forward(&hidden))
    }
}

struct Block {
    norm: RmsNorm,
    attention: nn::Attention,
    gate: Linear,
    experts: [Expert; 2],
}

impl Block {
    fn new(attention: Algorithm, vb: candle_nn::VarBuilder<'_>) -> Result<Self> {
        let expert = |name: &str| -> Result<Expert> {
            Ok(Expert {
                up: Linear::with_bias(WIDTH, HIDDEN, vb.pp(name).pp("up"))?,
                down: Linear::with_bias(HIDDEN, WIDTH, vb.pp(name).pp("down"))?,
            })
        };
        let rotary = RotaryEmbedding::new(1e4, WIDTH / HEADS, 16, vb.dtype(), vb.device())?;
        let heads = nn::Attention::new(&causal(WIDTH, HEADS), Some(rotary), vb.pp("attention"))?;
        Ok(Self {
            norm: RmsNorm::new(WIDTH, 1e-5, vb.pp("norm"))?,
            attention: heads.with_attention(attention),
            gate: Linear::new(WIDTH, 2, vb.pp("gate"))?,
            experts: [expert("experts.0")?, expert("experts.1")?],
        })
    }

    /// Maps x (B, T, D) to (B, T, D).
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let normed = in_module("norm", || self.norm.forward(x))?;
        let attended = in_module("attention", || self.attention.forward(&normed))?;
        let scores = in_module("gate", || self.gate.forward(&normed))?;
        let shares = ops::softmax(&scores, 1.0, Mask::Full)?; // (B, T, 2)
        let part = |i: usize, name| -> Result<Tensor> {
            let made = in_module(name, || self.experts[i].forward(&normed))?;
            ops::mul(&shares.narrow(D::Minus1, i, 1)?, &made)
        };
        let mixed = ops::add(&part(0, "experts.0")?, &part(1, "experts.1")?)?;
        ops::add(x, &ops::add_scaled(&attended, &mixed, SHARE)?)
    }

    /// Returns a number that depends on every weight.
    fn loss(&self, x: &Tensor) -> Result<Tensor> {
        let y = ops::tanh(&self.forward(x)?)?;
        ops::sum(&ops::mul(&y, &ops::sigmoid(&y)?)?)
    }
}

impl Layer for Block {
    fn visit(&self, path: &str, visit: &mut dyn FnMut(String, &Tensor)) {
        let [a, b] = &self.experts;
        let layers: [(&str, &dyn Layer); 7] = [
            ("norm", &self.norm),
            ("attention", &self.attention),
            ("gate", &self.gate),
            ("experts.0.up", &a.up),
            ("experts.0.down", &a.down),
            ("experts.1.up", &b.up),
            ("experts.1.down", &b.down),
        ];
        for (name, layer) in layers {
            layer.visit(&format!("{path}{name}"), visit);
        }
    }
}

fn noise(dims: &[usize], seed: usize) -> Tensor {
    let count: usize = dims.iter().product();
    let values: Vec<f64> = (0..count)
        .map(|i| ((i * 7919 + seed * 104_729 + 13) as f64 * 0.618_033_988_75).sin())
        .collect();
    Tensor::from_vec(values, dims, &Device::Cpu).unwrap()
}

fn input(dtype: DType) -> Var {
    Var::from_tensor(&noise(&[2, 7, WIDTH], 1).to_dtype(dtype).unwrap()).unwrap()
}

/// Every gradient in f64 equals the slope along a direction, by fourth-order differences.
#[rstest]
fn gradients_are_slopes(
    #[values(KernelPolicy::Strict, KernelPolicy::Reference)] policy: KernelPolicy,
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
) {
    const STEP: f64 = 2e-4;
    let block = Block::new(attention, seeded(3, DType::F64, &Device::Cpu)).unwrap();
    let x = input(DType::F64);
    with_kernel_policy(policy, || {
        let gradients = block.loss(&x).unwrap().backward().unwrap();
        let mut vars = block.parameters();
        assert_eq!(vars.len(), 14);
        vars.push(("x".into(), x.clone()));
        for (i, (name, var)) in vars.iter().enumerate() {
            let gradient = gradients
                .get(var)
                .unwrap_or_else(|| panic!("{name} has no gradient"));
            let direction = noise(var.dims(), 2 + i);
            let before = var.copy().unwrap();
            let at = |steps: f64| {
                var.set(&(&before + (&direction * (steps * STEP)).unwrap()).unwrap())
                    .unwrap();
                no_grad(|| block.loss(&x))
                    .unwrap()
                    .to_scalar::<f64>()
                    .unwrap()
            };
            let slope = (8.0 * (at(1.0) - at(-1.0)) - (at(2.0) - at(-2.0))) / (12.0 * STEP);
            var.set(&before).unwrap();
            let terms = (gradient * &direction).unwrap();
            let sum = |x: &Tensor| x.sum_all().unwrap().to_scalar::<f64>().unwrap();
            let (along, size) = (sum(&terms), sum(&terms.abs().unwrap()));
            assert!(size > 0.0, "{name}");
            assert!(
                (slope - along).abs() <= 1e-9 * size,
                "{name}: {slope}, not {along}"
            );
        }
    });
}

#[test]
fn f32_is_near_f64() {
    let run = |dtype| {
        let block = Block::new(Algorithm::Flash, seeded(3, dtype, &Device::Cpu)).unwrap();
        let x = input(dtype);
        let y = block.forward(&x).unwrap();
        let gradients = block.loss(&x).unwrap().backward().unwrap();
        let vars = block.parameters().into_iter();
        let gradients = vars.map(|(_, var)| gradients.get(&var).unwrap().clone());
        [vec![y], gradients.collect()].concat()
    };
    for (got, wanted) in run(DType::F32).iter().zip(&run(DType::F64)) {
        crate::golden::close("f32", got, wanted, 5e-6);
    }
}

#[test]
fn it_is_traced() {
    let block = Block::new(Algorithm::Flash, graph::weights(DType::F32)).unwrap();
    let x = graph::input("x", (2, 7, WIDTH), DType::F32).unwrap();
    let traced = graph::trace(Target::Cpu, || block.loss(&x)).unwrap();
    let mut names: Vec<&str> = traced.weights().map(|(_, name)| name).collect();
    let parameters = block.parameters();
    let mut wanted: Vec<&str> = parameters.iter().map(|(name, _)| name.as_str()).collect();
    names.sort();
    wanted.sort();
    assert_eq!(names, wanted);
    let find = |op: &str| -> Vec<&graph::Node> {
        let nodes = traced.nodes().filter(|node| node.op == op);
        nodes.collect()
    };
    let scaled = find("add_scaled");
    assert_eq!(scaled[0].attributes, [("scale", Attribute::Number(SHARE))]);
    // Columns of the shares are read from one value. The norm's output has six readers.
    let columns = find("contiguous");
    let columns: Vec<_> = columns[..2].iter().map(|node| &node.inputs[0]).collect();
    assert_eq!(columns[0].value, columns[1].value);
    assert_eq!(traced.shape(columns[0]).unwrap(), [2, 7, 1]);
    let normed = find("rms_norm")[0].output;
    let readers = traced
        .nodes()
        .filter(|node| node.inputs.iter().any(|x| x.value == normed));
    assert_eq!(readers.count(), 3 + 1 + 2); // q, k and v; the gate; two experts
    for cost in profile::node_costs(&traced) {
        assert!(cost.forward.is_some(), "no formula for {}", cost.node.op);
    }
    // A trace of a real run, op by op.
    let real = Block::new(Algorithm::Flash, seeded(3, DType::F32, &Device::Cpu)).unwrap();
    let of_real = graph::trace(Target::Cpu, || real.loss(&input(DType::F32))).unwrap();
    let paths = |graph: &graph::Graph| -> Vec<String> {
        graph.nodes().map(|node| node.path.clone()).collect()
    };
    assert_eq!(paths(&of_real), paths(&traced));
}

#[rstest]
fn it_is_planned(#[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm) {
    planned(attention, &Device::Cpu, [1e-6, 5e-6]);
}

#[cfg(feature = "cuda")]
#[rstest]
#[ignore = "needs a CUDA device"]
fn it_is_planned_on_a_gpu(#[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm) {
    planned(attention, &crate::gpu(), [2e-6, 2e-5]);
}

/// Checks that loss and gradients of a plan equal those of an eager step on the CPU, within these bounds.
fn planned(attention: Algorithm, device: &Device, [loss_bound, gradient_bound]: [f64; 2]) {
    let eager = Block::new(attention, seeded(3, DType::F32, &Device::Cpu)).unwrap();
    let block = Block::new(attention, seeded(3, DType::F32, device)).unwrap();
    let optimizer = Optimizer::new(block.parameters(), AdamWConfig::default()).unwrap();
    let real = input(DType::F32);
    let loss = |inputs: &Inputs| block.loss(&inputs.get("x")?);
    let mut step = Step::new(&optimizer, &StepConfig::default(), loss).unwrap();
    let on_device = real.to_device(device).unwrap();
    let loss = step.forward_backward([("x", &on_device)]).unwrap();
    let wanted = eager.loss(&real).unwrap();
    let loss = Tensor::new(loss, &Device::Cpu).unwrap();
    crate::golden::close("loss", &loss, &wanted, loss_bound);
    let gradients = wanted.backward().unwrap();
    let planned = step.gradients().unwrap();
    assert_eq!(planned.len(), eager.parameters().len());
    for (name, var) in eager.parameters() {
        let (_, found) = planned.iter().find(|(other, _)| *other == name).unwrap();
        let found = found.to_device(&Device::Cpu).unwrap();
        let gradient = gradients.get(&var).unwrap();
        crate::golden::close(&name, &found, gradient, gradient_bound);
    }
}
