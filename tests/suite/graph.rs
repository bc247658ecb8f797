//! A trace has the ops of an eager forward; code that cannot be traced is refused with an explanation.

mod candle_ops;
mod picture;

use crate::check::refusal;
use crate::settings::{meta_of, with_weights};
use candle_core::{DType, Device, Tensor, Var};
use rstest::rstest;
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};
use tallow::attention::{self, Algorithm, AttentionConfig};
use tallow::graph::{self, Graph, Node, Source, Target, TraceEvent};
use tallow::model::{TransformerConfig, TransformerLM, flops};
use tallow::nn::{self, Checkpointing};
use tallow::ops::{self, Gelu, KernelPolicy, with_kernel_policy};
use tallow::precision::Autocast;
use tallow::probe::{self, Kind, Listener};
use tallow::profile::{self, Cost, NodeCost};
use tallow::{Result, autocast, no_grad};

fn config() -> TransformerConfig {
    TransformerConfig {
        vocab_size: 20,
        context_length: 8,
        d_model: 16,
        num_layers: 4,
        num_heads: 2,
        d_ff: 32,
        ..Default::default()
    }
}

/// Returns a meta model without checkpointing.
fn meta(attention: Algorithm) -> TransformerLM {
    meta_of(&config(), attention)
}

/// An op's path, its operands' shapes, and its output's shape and dtype.
type Line = (String, Vec<Vec<usize>>, Vec<usize>, DType);

/// Records the ops of this thread as they run.
struct Log {
    thread: ThreadId,
    ops: Mutex<Vec<Line>>,
}

impl Listener for Log {
    fn on_leave(&self, event: &probe::Event<'_>) {
        if self.thread != thread::current().id() || event.kind != Kind::Op {
            return;
        }
        let operands = event.operands.expect("an op that has succeeded");
        let inputs = operands.inputs.iter().map(|x| x.dims.to_vec()).collect();
        let output = operands.output;
        // Ops inside a reference are not compared.
        if ["scale", "mask"].contains(&event.name) {
            return;
        }
        let line = (
            event.path.to_string(),
            inputs,
            output.dims.to_vec(),
            output.dtype,
        );
        self.ops.lock().unwrap().push(line);
    }
}

fn ids(rows: usize, cols: usize) -> Tensor {
    let ids: Vec<u32> = (0..rows * cols).map(|i| (i % 20) as u32).collect();
    Tensor::from_vec(ids, (rows, cols), &Device::Cpu).unwrap()
}

fn in_precision<T>(half: Option<DType>, f: impl FnOnce() -> Result<T>) -> Result<T> {
    match half {
        Some(dtype) => autocast(Autocast::cuda(dtype), f),
        None => f(),
    }
}

fn meta_ids(rows: usize, cols: usize) -> [Tensor; 2] {
    ["tokens", "targets"].map(|name| graph::input(name, (rows, cols), DType::U32).unwrap())
}

/// Returns whether an eager run has a range for the node.
fn is_op(node: &&Node) -> bool {
    !["copy", "checkpoint", "contiguous", "to_dtype"].contains(&node.op)
}

#[rstest]
fn a_trace_is_what_eager_does(
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
    #[values(None, Some(DType::BF16), Some(DType::F16))] half: Option<DType>,
    #[values(Checkpointing::None, Checkpointing::Sqrt)] checkpointing: Checkpointing,
    #[values(false, true)] without_grad: bool,
    #[values(KernelPolicy::Prefer, KernelPolicy::Reference)] policy: KernelPolicy,
) {
    if attention == Algorithm::Flash && policy == KernelPolicy::Reference {
        return; // a trace has one node for flash's reference, an eager run has tiles of candle's own ops
    }
    let model = meta(attention).with_checkpointing(checkpointing);
    let forward = |model: &TransformerLM, x: &Tensor, y: &Tensor| {
        with_kernel_policy(policy, || {
            in_precision(half, || match without_grad {
                true => no_grad(|| model.loss(x, y)),
                false => model.loss(x, y),
            })
        })
    };
    let log = Arc::new(Log {
        thread: thread::current().id(),
        ops: Mutex::default(),
    });
    let real = with_weights(&model, nn::seeded(1, DType::F32, &Device::Cpu));
    {
        let _listening = probe::listen(log.clone());
        forward(&real, &ids(3, 5), &ids(3, 5)).unwrap();
    }
    let [x, y] = meta_ids(3, 5);
    let traced = graph::trace(Target::Cpu, || forward(&model, &x, &y)).unwrap();

    let line = |node: &Node| -> Line {
        let output = traced.get(node.output).unwrap();
        let inputs = node
            .inputs
            .iter()
            .map(|x| traced.shape(x).unwrap().to_vec());
        let (path, shape) = (node.path.clone(), output.shape.clone());
        (path, inputs.collect(), shape, output.dtype)
    };
    let eager = std::mem::take(&mut *log.ops.lock().unwrap());
    let nodes: Vec<Line> = traced.nodes().filter(is_op).map(line).collect();
    assert_eq!(nodes, eager);
    assert_eq!(
        graph::trace(Target::Cpu, || forward(&real, &ids(3, 5), &ids(3, 5)))
            .unwrap()
            .nodes()
            .count(),
        traced.nodes().count()
    );
}

#[test]
fn weights_and_inputs_have_their_names() {
    let (model, [x, y]) = (meta(Algorithm::Flash), meta_ids(2, 8));
    let traced = graph::trace(Target::Cpu, || model.loss(&x, &y)).unwrap();
    let mut found: Vec<&str> = traced.weights().map(|(_, name)| name).collect();
    let mut wanted: Vec<String> = model
        .parameters()
        .into_iter()
        .map(|(name, _)| name)
        .collect();
    found.sort();
    wanted.sort();
    assert_eq!(found, wanted);
    for name in ["tokens", "targets"] {
        let source = Source::Input(name.into());
        assert_eq!(
            traced
                .values()
                .iter()
                .filter(|value| value.source == source)
                .count(),
            1
        );
    }
    let text = traced.to_string();
    let line = "layers.0/attn/q_proj/linear ";
    let line = text.lines().find(|text| text.contains(line)).unwrap();
    assert!(line.contains("layers.0.attn.q_proj.weight"), "{line}");
}

/// Returns the dropped values in order.
fn drops(traced: &Graph) -> Vec<usize> {
    let events = traced.events().iter();
    events
        .filter_map(|event| match event {
            TraceEvent::Drop(value) => Some(value.0),
            _ => None,
        })
        .collect()
}

#[test]
fn drops_are_told_when_they_happen() {
    let x = graph::input("x", (2, 3), DType::F32).unwrap();
    let weight = nn::Linear::new(3, 3, graph::weights(DType::F32)).unwrap();
    let chain = || {
        let mut y = weight.forward(&x)?;
        for _ in 0..2 {
            y = weight.forward(&y)?; // and the previous y is dropped
        }
        Ok(y)
    };
    // With a graph everything is kept. Without one, each value is dropped after the next has been computed.
    let kept = graph::trace(Target::Cpu, chain).unwrap();
    assert!(drops(&kept).is_empty());
    let dropped = graph::trace(Target::Cpu, || no_grad(chain)).unwrap();
    let made: Vec<usize> = dropped.nodes().map(|node| node.output.0).collect();
    assert_eq!(drops(&dropped), made[..2]);
    // A tensor that outlives its node, detached from its graph, is not dropped.
    let revived = graph::trace(Target::Cpu, || {
        let y = weight.forward(&x)?.detach();
        let other = ops::relu(&x)?;
        ops::add(&y, &other)
    });
    let made = revived.as_ref().unwrap().nodes().next().unwrap().output.0;
    assert!(!drops(&revived.unwrap()).contains(&made));
}

#[test]
fn segments_keep_nothing() {
    let model = meta(Algorithm::Naive).with_checkpointing(Checkpointing::Block);
    let [x, y] = meta_ids(2, 8);
    let traced = graph::trace(Target::Cpu, || model.loss(&x, &y)).unwrap();
    let place = |wanted| {
        traced
            .events()
            .iter()
            .position(|event| *event == wanted)
            .unwrap()
    };
    let (begins, ends) = (place(TraceEvent::Enter), place(TraceEvent::Leave));
    let inside = &traced.events()[begins..ends];
    let made = inside
        .iter()
        .filter(|event| matches!(event, TraceEvent::Node(_)));
    let dropped = inside
        .iter()
        .filter(|event| matches!(event, TraceEvent::Drop(_)));
    // Everything is dropped except the output, which the segment copies at its end.
    assert_eq!(dropped.count(), made.count() - 1);
    assert!(
        matches!(&traced.events()[ends + 1], TraceEvent::Node(node) if node.op == "checkpoint")
    );
}

#[test]
fn a_region_ends_once() {
    let (model, [x, y]) = (meta(Algorithm::Flash), meta_ids(2, 8));
    let run = || autocast(Autocast::cuda(DType::BF16), || model.loss(&x, &y));
    let traced = graph::trace(Target::Cpu, run).unwrap();
    let ends = traced
        .events()
        .iter()
        .filter(|event| **event == TraceEvent::AutocastEnd);
    assert_eq!(ends.count(), 1);
    // Casts of weights are kept by the ops that read them, so none is dropped.
    let is_copy = |node: &&Node| node.op == "weight_cast";
    let copies: Vec<usize> = traced
        .nodes()
        .filter(is_copy)
        .map(|node| node.output.0)
        .collect();
    let dropped = drops(&traced);
    assert!(!copies.is_empty() && !copies.iter().any(|copy| dropped.contains(copy)));
    let dropping = || {
        autocast(Autocast::cuda(DType::BF16).with_weight_cache(false), || {
            model.loss(&x, &y)
        })
    };
    let traced = graph::trace(Target::Cpu, dropping).unwrap();
    let copies: Vec<usize> = traced
        .nodes()
        .filter(is_copy)
        .map(|node| node.output.0)
        .collect();
    let dropped = drops(&traced);
    assert!(!copies.is_empty() && copies.iter().all(|copy| dropped.contains(copy)));
}

#[test]
fn a_target_decides_what_has_a_kernel() {
    let x = graph::input("x", (2, 3), DType::F64).unwrap();
    for (target, composed) in [(Target::Cpu, false), (Target::Cuda, true)] {
        let traced = graph::trace(target, || ops::relu(&x)).unwrap();
        assert_eq!(
            traced.nodes().next().unwrap().composed,
            composed,
            "{target:?}"
        );
    }
    let strict = with_kernel_policy(KernelPolicy::Strict, || {
        graph::trace(Target::Cuda, || ops::relu(&x))
    });
    assert!(strict.unwrap_err().to_string().contains("no kernel"));
}

#[test]
fn one_weight_read_twice_is_one_weight() {
    let table = nn::Embedding::new(7, 4, graph::weights(DType::F32).pp("table")).unwrap();
    let tokens = graph::input("tokens", (2, 3), DType::U32).unwrap();
    let tied = || {
        let x = table.forward(&tokens)?;
        ops::linear(&x, table.weight())
    };
    let traced = graph::trace(Target::Cpu, tied).unwrap();
    assert_eq!(
        traced.weights().map(|(_, name)| name).collect::<Vec<_>>(),
        ["table.weight"]
    );
}

/// A part of a variable, taken by candle's ops, reads the whole weight, which the trace has not seen before.
#[test]
fn a_part_of_a_variable_is_its_weight() {
    let stack = Var::ones((4, 3), DType::F32, &Device::Cpu).unwrap();
    let read = |part: &Tensor| ops::sum(&ops::relu(part)?);
    let part = |index: usize| stack.narrow(0, index, 1)?.squeeze(0);
    let traced = graph::trace(Target::Cpu, || {
        ops::add(&read(&part(2)?)?, &read(&part(1)?)?)
    });
    let traced = traced.unwrap();
    let values = traced.values().iter();
    let mut weights = values.filter(|value| matches!(value.source, Source::Weight(_)));
    assert_eq!(weights.next().unwrap().shape, [4, 3]);
    assert!(weights.next().is_none());
    let first = &traced.nodes().next().unwrap().inputs[0];
    let view = first.view.as_ref().unwrap();
    assert!(first.tracked && view.shape == [3] && view.offset == 6);
    // A part that is detached has no gradient and stays a constant.
    let detached = graph::trace(Target::Cpu, || read(&part(2)?.detach())).unwrap();
    assert_eq!(detached.weights().count(), 0);
}

/// In a region all layers read the same rotary tables, cast once, for any sequence length.
#[test]
fn layers_share_their_angles() {
    let model = meta(Algorithm::Flash);
    for length in [8, 5] {
        let [tokens, targets] = meta_ids(2, length);
        let loss = || in_precision(Some(DType::BF16), || model.loss(&tokens, &targets));
        let traced = graph::trace(Target::Cpu, loss).unwrap();
        let ropes: Vec<&Node> = traced.nodes().filter(|node| node.op == "rope").collect();
        assert_eq!(ropes.len(), 8);
        for rope in &ropes {
            for (read, first) in rope.extra_inputs.iter().zip(&ropes[0].extra_inputs) {
                assert_eq!(read.value, first.value);
            }
        }
    }
}

#[test]
fn lse_is_a_value_of_its_own() {
    let [q, k] = ["q", "k"].map(|name| graph::input(name, (1, 2, 5, 8), DType::F32).unwrap());
    let attend = || attention::flash_with_lse(&q, &k, &k, &AttentionConfig::default());
    let traced = graph::trace(Target::Cpu, || no_grad(attend)).unwrap();
    let lse = traced.shape(&traced.outputs()[1]).unwrap();
    assert_eq!(lse, [1, 2, 5]);
}

#[test]
fn flash_without_a_kernel_is_one_node() {
    let q = graph::weights(DType::F64).get((1, 4, 5, 8), "q").unwrap();
    let k = graph::input("k", (1, 2, 7, 8), DType::F64).unwrap();
    let attend = || attention::flash_with_lse(&q, &k, &k, &AttentionConfig::default());
    let traced = graph::trace(Target::Cuda, attend).unwrap();
    let nodes: Vec<&Node> = traced.nodes().collect();
    assert_eq!(nodes.len(), 1);
    assert!(nodes[0].composed && nodes[0].op == "attention::flash");
    let shapes = traced
        .outputs()
        .iter()
        .map(|x| traced.shape(x).unwrap().to_vec());
    assert_eq!(
        shapes.collect::<Vec<_>>(),
        [vec![1, 4, 5, 8], vec![1, 4, 5]]
    );
}

/// Checks that a trace of `f` is refused with these words.
fn refused(f: impl FnOnce(&Tensor) -> Result<Tensor>, words: &[&str]) {
    let x = graph::input("x", (4, 4), DType::F32).unwrap();
    let traced = graph::trace(Target::Cpu, || f(&ops::relu(&x)?));
    let error = refusal(traced, words).to_string();
    assert!(!error.contains("F4") && !error.contains("f4"), "{error}");
}

#[test]
fn what_cannot_be_traced_is_refused_in_words() {
    type Candle = fn(&Tensor) -> candle_core::Result<Tensor>;
    let computing: [Candle; 9] = [
        |x| x + x,
        |x| x * 2.0,
        |x| x.exp(),
        |x| x.sum_all(),
        |x| x.matmul(x),
        |x| x.t()?.contiguous(),
        |x| x.to_dtype(DType::BF16),
        |x| Tensor::cat(&[x, x], 1),
        |x| candle_nn::ops::softmax(x, 1),
    ];
    for f in computing {
        refused(|x| Ok(f(x)?), &["after relu", "tallow::ops"]);
    }
    refused(|x| ops::relu(&x.copy()?), &["no op of this trace"]);
    let nested = |x: &Tensor| graph::trace(Target::Cpu, || ops::relu(x)).map(|_| x.clone());
    refused(nested, &["open"]);
    let of_input = |x: &Tensor| ops::linear(x, &graph::input("w", (2, 3), DType::F32)?);
    refused(of_input, &["weight"]);

    let x = graph::input("x", (4, 4), DType::F32).unwrap();
    for error in [
        ops::relu(&x).unwrap_err(),
        ops::linear(&x, &x).unwrap_err(),
        meta(Algorithm::Naive).forward(&ids(1, 3)).unwrap_err(),
    ] {
        let error = error.to_string();
        assert!(error.contains("meta") && !error.contains("F4"), "{error}");
    }
    assert!(graph::input("x", 3, DType::F8E4M3).is_err());
}

/// Ops other than layers that models need are traced with the shapes of a run.
#[test]
fn every_op_for_models_is_traced() {
    type Op = fn(&Tensor) -> Result<Tensor>;
    let table: [(&str, Op); 12] = [
        ("gelu", |x| ops::gelu(x, Gelu::Erf)),
        ("gelu_tanh", |x| ops::gelu(x, Gelu::Tanh)),
        ("tanh", ops::tanh),
        ("sigmoid", ops::sigmoid),
        ("silu", ops::silu),
        ("concat", |x| ops::concat(&[x, &x.narrow(1, 0, 1)?, x], 1)),
        ("repeat_heads", |x| ops::repeat_heads(x, 3)),
        ("add_scaled", |x| ops::add_scaled(x, x, 0.5)),
        ("linear_bias", |x| {
            let weight = Tensor::zeros((5, 4), x.dtype(), x.device())?;
            ops::linear_bias(x, &weight, &weight.narrow(1, 0, 1)?.squeeze(1)?)
        }),
        ("contiguous", |x| {
            Ok(ops::contiguous(&x.transpose(0, 1)?)?.reshape((6, 4))?)
        }),
        ("relu", |x| ops::relu(&x.narrow(1, 1, 2)?)),
        ("mul", |x| ops::mul(x, &x.narrow(2, 0, 1)?)),
    ];
    for (name, op) in table {
        for target in [Target::Cpu, Target::Cuda] {
            for dtype in [DType::F32, DType::BF16] {
                let x = graph::input("x", (2, 3, 4), dtype).unwrap();
                let traced = graph::trace(target, || op(&x)).unwrap();
                let made = traced.shape(&traced.outputs()[0]).unwrap().to_vec();
                let real = Tensor::ones((2, 3, 4), dtype, &Device::Cpu).unwrap();
                assert_eq!(made, op(&real).unwrap().dims(), "{name}");
                let last = traced.nodes().last().unwrap();
                assert_eq!(last.op, name);
                let costs = profile::node_costs(&traced);
                assert!(costs.last().unwrap().forward.is_some(), "{name}");
            }
        }
    }
    let strided = |x: &Tensor| Ok(x.t()?.reshape(16)?);
    refused(strided, &["contiguous before reshape"]);
    assert!(ops::contiguous(&graph::input("x", (2, 3), DType::F32).unwrap().t().unwrap()).is_err());
}

#[test]
fn the_largest_preset_is_traced_without_its_memory() {
    let config = TransformerConfig {
        context_length: 1024,
        ..TransformerConfig::preset("10b").unwrap()
    };
    let (model, [x, y]) = (TransformerLM::meta(&config).unwrap(), meta_ids(4, 1024));
    let traced = graph::trace(Target::Cuda, || model.loss(&x, &y)).unwrap();
    assert_eq!(
        traced,
        graph::trace(Target::Cuda, || model.loss(&x, &y)).unwrap()
    );
    let costs = profile::node_costs(&traced);
    let sum = |cost: fn(&NodeCost) -> Option<Cost>| -> f64 {
        costs
            .iter()
            .filter_map(cost)
            .map(|cost| cost.matmul_flops)
            .sum()
    };
    let close = |found: f64, wanted: f64| assert!((found / wanted - 1.0).abs() < 1e-12);
    close(sum(|c| c.forward), flops::forward(&config, 4, 1024).total());
    close(
        sum(|c| c.backward),
        flops::backward(&config, 4, 1024).total(),
    );
    let weights = traced
        .weights()
        .map(|(id, _)| traced.get(id).unwrap().elements());
    assert_eq!(weights.sum::<usize>(), config.num_parameters());
}

/// A value or operand that only another graph has returns `None`.
#[test]
fn what_a_graph_does_not_have_is_none() {
    let graph_of = |layers: usize| {
        let config = TransformerConfig {
            num_layers: layers,
            ..config()
        };
        let model = TransformerLM::meta(&config).unwrap();
        let tokens = graph::input("tokens", (2, 8), DType::U32).unwrap();
        graph::trace(Target::Cpu, || model.forward(&tokens)).unwrap()
    };
    let (small, large) = (graph_of(1), graph_of(4));
    let output = &large.outputs()[0];
    assert_eq!(large.shape(output), Some(&[2, 8, 20][..]));
    assert!(large.get(output.value).is_some());
    assert_eq!(small.shape(output), None);
    assert_eq!(small.get(output.value), None);
    let empty = Graph::default();
    assert_eq!((empty.values().len(), empty.get(output.value)), (0, None));
    assert!(!empty.to_dot().is_empty());
    assert!(profile::node_costs(&empty).is_empty());
}
