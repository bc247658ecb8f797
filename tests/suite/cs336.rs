//! The tests of Stanford CS336's second assignment under their own names, with their sizes and tolerances: flash
//! attention, data parallelism, the sharded optimizer and fully sharded data parallelism. Ranks are threads. The
//! expected results were computed by PyTorch in one process (`fixtures/cs336.py`).

use crate::check::{bits, distance, elements};
use crate::distributed::on_ranks;
use crate::golden::fixture;
use crate::settings::in_precision;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::VarBuilder;
use rstest::rstest;
use std::collections::HashMap;
use tallow::attention::{self, AttentionConfig, Mask};
use tallow::compile::{Batch, Inputs, Step};
use tallow::distributed::{Exchange, FullyShard, FullyShardConfig, Replicated, ReplicatedConfig};
use tallow::nn::{Embedding, Linear, RmsNorm};
use tallow::optim::{AdamWConfig, Optimizer};
use tallow::precision::Precision;
use tallow::{Result, ops};

const CPU: Device = Device::Cpu;

/// Checks `torch.allclose(found, wanted, rtol, atol)`.
fn assert_close(found: &Tensor, wanted: &Tensor, rtol: f64, atol: f64, what: &str) {
    assert_eq!(found.dims(), wanted.dims(), "{what}");
    for (found, wanted) in elements(found).into_iter().zip(elements(wanted)) {
        let is_close = (found - wanted).abs() <= atol + rtol * wanted.abs();
        assert!(is_close, "{what}: {found} is not {wanted}");
    }
}

/// Returns the tensors of a fixture whose names begin with `prefix`, without the prefix.
fn starting_with(tensors: &HashMap<String, Tensor>, prefix: &str) -> HashMap<String, Tensor> {
    let own = tensors.iter().filter_map(|(name, tensor)| {
        let name = name.strip_prefix(prefix)?.strip_prefix('.')?;
        Some((name.to_string(), tensor.clone()))
    });
    own.collect()
}

/// q, k, v and the output's gradient, with B 4, T 128, D 64.
struct Attention {
    q: Var,
    k: Var,
    v: Var,
    d_out: Tensor,
}

impl Attention {
    fn new() -> Self {
        let draw = |i: u64| {
            let sine = |x: u64| ((x * 7919 + i * 104_729) % 65_537) as f64 / 65_537.0;
            // Normal numbers by the method of Box and Muller.
            let normal = |x: u64| {
                let radius = (-2.0 * (1.0 - sine(2 * x)).ln()).sqrt();
                (radius * (std::f64::consts::TAU * sine(2 * x + 1)).cos()) as f32
            };
            let numbers = (0..4 * 128 * 64).map(normal);
            Tensor::from_iter(numbers, &CPU)
                .unwrap()
                .reshape((4, 128, 64))
                .unwrap()
        };
        let var = |i| Var::from_tensor(&draw(i)).unwrap();
        Self {
            q: var(0),
            k: var(1),
            v: var(2),
            d_out: draw(3),
        }
    }

    /// Returns output and log-sum-exp, by candle's ops in f64.
    fn by_the_formula(&self, is_causal: bool) -> candle_core::Result<(Tensor, Tensor)> {
        let [q, k, v] = [&self.q, &self.k, &self.v].map(|x| x.to_dtype(DType::F64));
        let mut scores = (q?.matmul(&k?.t()?)? / 8.0)?;
        if is_causal {
            let hidden = (0..128 * 128).map(|i| if i / 128 >= i % 128 { 0.0 } else { -1e6 });
            let hidden = Tensor::from_iter(hidden, &CPU)?.reshape((128, 128))?;
            scores = scores.broadcast_add(&hidden)?;
        }
        let lse = scores.log_sum_exp(2)?;
        let p = scores.broadcast_sub(&lse.unsqueeze(2)?)?.exp()?;
        Ok((p.matmul(&v?)?, lse))
    }
}

fn config(is_causal: bool) -> AttentionConfig {
    AttentionConfig {
        mask: if is_causal { Mask::Causal } else { Mask::Full },
        ..Default::default()
    }
}

/// Returns x (B, T, D) as one head.
fn heads(x: &Tensor) -> Tensor {
    x.unsqueeze(1).unwrap()
}

#[rstest]
fn test_flash_forward_pass(#[values(false, true)] is_causal: bool) {
    let inputs = Attention::new();
    let [q, k, v] = [&inputs.q, &inputs.k, &inputs.v].map(|x| heads(x));
    let (out, lse) = attention::flash_with_lse(&q, &k, &v, &config(is_causal)).unwrap();
    let (wanted, wanted_lse) = inputs.by_the_formula(is_causal).unwrap();
    assert_close(&out.squeeze(1).unwrap(), &wanted, 1e-2, 1e-2, "out");
    assert_close(&lse.squeeze(1).unwrap(), &wanted_lse, 1e-2, 1e-2, "lse");
}

#[rstest]
fn test_flash_backward(#[values(false, true)] is_causal: bool) {
    let inputs = Attention::new();
    let [q, k, v] = [&inputs.q, &inputs.k, &inputs.v].map(|x| heads(x));
    let out = attention::flash(&q, &k, &v, &config(is_causal)).unwrap();
    let found = tallow::backward_from(out, &heads(&inputs.d_out)).unwrap();
    let (wanted, _) = inputs.by_the_formula(is_causal).unwrap();
    let d_out = inputs.d_out.to_dtype(DType::F64).unwrap();
    let wanted = (wanted * d_out)
        .unwrap()
        .sum_all()
        .unwrap()
        .backward()
        .unwrap();
    for (name, x) in [("q", &inputs.q), ("k", &inputs.k), ("v", &inputs.v)] {
        let [found, wanted] = [&found, &wanted].map(|gradients| gradients.get(x).unwrap());
        assert_close(found, wanted, 1e-2, 1e-2, name);
    }
}

/// The assignment's toy models: with a bias that is not trained, or with a weight that two layers share.
#[derive(Clone, Copy)]
enum ToyModel {
    Plain,
    Tied,
}

impl ToyModel {
    fn name(self) -> &'static str {
        match self {
            Self::Plain => "toy",
            Self::Tied => "tied",
        }
    }

    fn forward(self, weights: &HashMap<String, Var>, x: &Tensor) -> Result<Tensor> {
        let linear = |x: &Tensor, name: &str| ops::linear(x, &weights[name]);
        match self {
            Self::Plain => {
                let x = ops::relu(&linear(x, "fc1.weight")?)?;
                let bias = weights["fc2.fc.bias"].as_detached_tensor();
                let x = linear(&x, "fc2.fc.weight")?.broadcast_add(&bias)?;
                linear(&ops::relu(&x)?, "fc3.weight")
            }
            Self::Tied => {
                let mut x = x.clone();
                for name in ["fc1.weight", "fc2.weight", "fc3.weight", "fc2.weight"] {
                    x = ops::relu(&linear(&x, name)?)?;
                }
                linear(&x, "fc5.weight")
            }
        }
    }

    fn trained(self, weights: &HashMap<String, Var>) -> Vec<(String, Var)> {
        let mut all: Vec<(String, Var)> = weights.clone().into_iter().collect();
        all.retain(|(name, _)| name != "fc2.fc.bias");
        all.sort_by(|a, b| a.0.cmp(&b.0));
        all
    }
}

fn variables(tensors: HashMap<String, Tensor>) -> HashMap<String, Var> {
    let variables = tensors.into_iter();
    let variables =
        variables.map(|(name, tensor)| (name, Var::from_tensor(&tensor.copy().unwrap()).unwrap()));
    variables.collect()
}

fn squares(
    model: ToyModel,
    weights: &HashMap<String, Var>,
    x: &Tensor,
    y: &Tensor,
) -> Result<Tensor> {
    let difference = ops::sub(&model.forward(weights, x)?, y)?;
    ops::mul(&difference, &difference)
}

#[rstest]
#[case::plain(ToyModel::Plain)]
#[case::tied(ToyModel::Tied)]
fn test_distributed_data_parallel(
    #[case] model: ToyModel,
    #[values(Exchange::PerParameter, Exchange::Flat, Exchange::Overlapped { bucket_bytes: 1000 })]
    exchange: Exchange,
) {
    let (tensors, _) = fixture("cs336");
    let own = starting_with(&tensors, &format!("ddp.{}", model.name()));
    let first = starting_with(&own, "first");
    let last = on_ranks(2, |ranks| {
        let mut weights = variables(first.clone());
        if ranks.rank() > 0 {
            // Other weights, which rank 0's replace.
            for var in weights.values_mut() {
                var.set(&(var.as_tensor() + 1.0)?)?;
            }
        }
        let config = ReplicatedConfig {
            exchange,
            dtype: None,
        };
        let mut all: Vec<(String, Var)> = weights.clone().into_iter().collect();
        all.sort_by(|a, b| a.0.cmp(&b.0));
        Replicated::new(&ranks, all, config)?; // the fixed bias comes from rank 0 too
        let trained = model.trained(&weights);
        let replicated = Replicated::new(&ranks, trained.clone(), config)?;
        for step in 0..5 {
            let rows = |name: &str| own[name].get(step)?.narrow(0, 10 * ranks.rank(), 10);
            let loss = ops::mean(&squares(model, &weights, &rows("x")?, &rows("y")?)?)?;
            let mut gradients = tallow::backward(loss)?;
            replicated.average(&mut gradients)?;
            for (_, var) in &trained {
                let gradient = gradients.get(var).expect("every weight has a gradient");
                var.set(&(var.as_tensor() - (gradient * 0.1)?)?)?;
            }
        }
        Ok(weights)
    });
    let wanted = starting_with(&own, "last");
    for weights in last {
        assert_eq!(weights.len(), wanted.len());
        for (name, wanted) in &wanted {
            assert_close(&weights[name], wanted, 1e-5, 1e-6, name);
        }
    }
}

#[rstest]
#[case::plain(ToyModel::Plain)]
#[case::tied(ToyModel::Tied)]
fn test_sharded_optimizer(#[case] model: ToyModel) {
    let (tensors, _) = fixture("cs336");
    let own = starting_with(&tensors, &format!("sharded.{}", model.name()));
    let first = starting_with(&own, "first");
    let last = on_ranks(2, |ranks| {
        let weights = variables(first.clone());
        let config = AdamWConfig {
            lr: 0.1,
            weight_decay: 0.1,
            betas: (0.9, 0.999),
            eps: 1e-8,
            ..Default::default()
        };
        let mut optimizer = Optimizer::new(model.trained(&weights), config)?;
        optimizer.shard(&ranks)?;
        for step in 0..10 {
            let [x, y] = ["x", "y"].map(|name| own[name].get(step));
            let loss = ops::sum(&squares(model, &weights, &x?, &y?)?)?;
            optimizer.step(&tallow::backward(loss)?)?;
        }
        Ok(weights)
    });
    let wanted = starting_with(&own, "last");
    for weights in last {
        for (name, wanted) in &wanted {
            assert_close(&weights[name], wanted, 1e-4, 1e-5, name);
        }
    }
}

/// The assignment's model for FSDP: embedding, norms and linear layers.
struct ToyFsdpModel {
    embedding: Embedding,
    norms: [RmsNorm; 2],
    linears: [Linear; 3],
}

impl ToyFsdpModel {
    fn new(vb: &VarBuilder<'_>) -> Result<Self> {
        let linear = |d_in, d_out, name| Linear::new(d_in, d_out, vb.pp(name));
        Ok(Self {
            embedding: Embedding::new(100, 64, vb.pp("embedding"))?,
            norms: [
                RmsNorm::new(64, 1e-5, vb.pp("norm1"))?,
                RmsNorm::new(128, 1e-5, vb.pp("norm2"))?,
            ],
            linears: [
                linear(64, 128, "linear1")?,
                linear(128, 64, "linear2")?,
                linear(64, 100, "lm_head")?,
            ],
        })
    }

    /// Returns the mean over the sequences of the loss of their last token.
    fn loss(&self, inputs: &Inputs) -> Result<Tensor> {
        let x = self.embedding.forward(&inputs.get("tokens")?)?;
        let x = self.linears[0].forward(&self.norms[0].forward(&x)?)?;
        let x = self.norms[1].forward(&ops::relu(&x)?)?;
        let logits = self.linears[2].forward(&self.linears[1].forward(&x)?)?;
        ops::cross_entropy_ignoring(&logits, &inputs.get("targets")?, i64::from(IGNORED))
    }
}

const IGNORED: u32 = 1000;

/// Returns the tokens of a rank's sequences, and targets that are ignored except the last.
fn fsdp_batch(
    own: &HashMap<String, Tensor>,
    step: usize,
    rank: usize,
) -> candle_core::Result<Batch> {
    let rows = |name: &str| {
        own[name]
            .get(step)?
            .narrow(0, 10 * rank, 10)?
            .to_dtype(DType::U32)
    };
    let ignored = Tensor::full(IGNORED, (10, 7), &CPU)?;
    let targets = Tensor::cat(&[&ignored, &rows("labels")?.unsqueeze(1)?], 1)?;
    Ok(Batch::new([
        ("tokens", &rows("tokens")?),
        ("targets", &targets),
    ]))
}

/// Runs three steps of two ranks; returns each weight by name.
fn fsdp_run(own: &HashMap<String, Tensor>, precision: Precision) -> Vec<(String, Tensor)> {
    let first = starting_with(own, "first");
    let of_ranks = on_ranks(2, |ranks| {
        let sharded = FullyShard::new(&ranks, FullyShardConfig::default())?;
        let vb = VarBuilder::from_tensors(first.clone(), DType::F32, &CPU);
        let model = ToyFsdpModel::new(&sharded.builder(vb))?;
        let optimizer = Optimizer::new(sharded.parameters(), AdamWConfig::default())?;
        let config = in_precision(precision);
        let loss = |inputs: &Inputs| model.loss(inputs);
        let mut step = Step::fully_sharded(&optimizer, &config, &sharded, loss)?;
        for number in 0..3 {
            step.forward_backward(fsdp_batch(own, number, ranks.rank())?)?;
            let gradients: HashMap<String, Tensor> = step.gradients()?.into_iter().collect();
            for (name, shard) in sharded.parameters() {
                // test_fsdp_gradient_sync: gradients are f32, with the shape of the rank's shard.
                let gradient = &gradients[&name];
                let (dtype, dims) = (gradient.dtype(), gradient.dims());
                assert_eq!((dtype, dims), (DType::F32, shard.dims()), "{name}");
                shard.set(&(shard.as_tensor() - (gradient * 0.01)?)?)?;
            }
        }
        let names = first.keys();
        let whole = names.map(|name| Ok((name.clone(), sharded.full_weight(name)?)));
        whole.collect::<Result<Vec<_>>>()
    });
    let [run, other] = of_ranks.try_into().unwrap_or_else(|_| panic!("two ranks"));
    for ((name, run), (_, other)) in run.iter().zip(&other) {
        assert_eq!(bits(run), bits(other), "{name}");
    }
    run
}

#[test]
fn test_fsdp_correctness_fp32() {
    let own = starting_with(&fixture("cs336").0, "fsdp");
    for (name, found) in fsdp_run(&own, Precision::F32) {
        assert_close(&found, &own[&format!("f32.{name}")], 1e-6, 1e-6, &name);
    }
}

/// Rounding to f16 makes some inputs of the ReLU cross 0, not the same ones as in PyTorch. So the distances from f32
/// are compared.
#[test]
fn test_fsdp_correctness_fp16() {
    let own = starting_with(&fixture("cs336").0, "fsdp");
    for (name, found) in fsdp_run(&own, Precision::F16) {
        let [exact, theirs] = ["f32", "f16"].map(|dtype| &own[&format!("{dtype}.{name}")]);
        let (error, allowed) = (distance(&found, exact), distance(theirs, exact));
        assert!(error <= 1.5 * allowed, "{name}: {error:.1e}, {allowed:.1e}");
    }
}
