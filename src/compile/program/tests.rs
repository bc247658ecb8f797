//! Tests of the rewrites: each traces a function and compares its program, printed as one line per node.

use super::*;
use crate::attention::{Algorithm, AttentionConfig, Mask};
use crate::graph::{input, weights};
use crate::nn::checkpoint;
use crate::ops::Gelu;
use crate::precision::Precision;
use crate::{Result, ops};
use candle_core::{DType, Tensor};
use candle_nn::VarBuilder;

/// Returns the program of a training step of the loss that `loss` computes from a stream (2, 8, 16).
fn program(
    target: Target,
    precision: Precision,
    loss: impl Fn(&VarBuilder<'static>, Tensor) -> Result<Tensor>,
) -> Program {
    let vb = weights(DType::F32);
    let traced = || {
        let table = vb.get((10, 16), "table")?;
        let tokens = input("tokens", (2, 8), DType::U32)?;
        let x = ops::embedding(&tokens, &table)?;
        Ok(vec![precision.run(|| loss(&vb, x))?])
    };
    let function = TracedFunction::with_meta_weights("test", target, traced).unwrap();
    Program::new(&function, PlanKind::TrainStep, 1)
}

/// Returns a line for each node, such as `add_rms_norm bf16 (embedding, linear, norm)`: name, dtype, producers of
/// inputs.
fn printed(program: &Program) -> Vec<String> {
    let name = |node: &Node| match &node.kind {
        Kind::Op(_) => node.op.to_string(),
        Kind::Norm(norm) if norm.adds => format!("add_{}", node.op),
        Kind::Norm(_) => format!("residual {}", node.op),
        Kind::Attention(_) => "attention in rows".into(),
        Kind::Head(_) => "head and loss".into(),
    };
    let operand = |operand: &ValueRef| match program.maker(operand.value) {
        Some(maker) => {
            let maker = &program.nodes[maker];
            let is_second = maker.second == Some(operand.value);
            format!("{}{}", if is_second { "sum of " } else { "" }, name(maker))
        }
        None => {
            let weights = program.weights_of(operand.value);
            let names = weights
                .iter()
                .map(|weight| match &program.value(*weight).source {
                    Source::Weight(name) | Source::Input(name) => name.clone(),
                    other => format!("{other:?}"),
                });
            names.collect::<Vec<_>>().join(" over ")
        }
    };
    let line = |node: &Node| {
        let inputs = node.inputs.iter().map(operand).collect::<Vec<_>>();
        let dtype = program.value(node.output).dtype.as_str();
        format!("{} {dtype} ({})", name(node), inputs.join(", "))
    };
    program.nodes.iter().map(line).collect()
}

fn check(program: &Program, wanted: &[&str]) {
    assert_eq!(printed(program), wanted);
}

fn linear(vb: &VarBuilder<'_>, x: &Tensor, name: &str) -> Result<Tensor> {
    ops::linear(x, &vb.get((16, 16), name)?)
}

fn norm(vb: &VarBuilder<'_>, x: &Tensor) -> Result<Tensor> {
    ops::rms_norm(x, &vb.get(16, "norm")?, 1e-5)
}

/// The norm absorbs the addition and the adjacent casts. Readers of the sum read it from the norm.
#[test]
fn a_sum_its_norm_and_its_casts() {
    let block = |vb: &VarBuilder<'static>, x: Tensor| {
        let x = ops::add(&x, &linear(vb, &x, "a")?)?;
        let y = linear(vb, &norm(vb, &x)?, "b")?;
        ops::mean(&ops::add(&x, &y)?)
    };
    let bf16 = program(Target::Cpu, Precision::BF16, block);
    check(
        &bf16,
        &[
            "embedding f32 (table)",
            "cast bf16 (embedding)",
            "linear bf16 (cast, a)",
            "add_rms_norm bf16 (embedding, linear, norm)",
            "linear bf16 (add_rms_norm, b)",
            "cast f32 (linear)",
            "add f32 (sum of add_rms_norm, cast)",
            "mean f32 (add)",
        ],
    );
    assert_eq!(bf16.nodes[3].ops, ["cast", "add", "rms_norm", "cast"]);
    check(
        &program(Target::Cpu, Precision::F32, block),
        &[
            "embedding f32 (table)",
            "linear f32 (embedding, a)",
            "add_rms_norm f32 (embedding, linear, norm)",
            "linear f32 (add_rms_norm, b)",
            "add f32 (sum of add_rms_norm, linear)",
            "mean f32 (add)",
        ],
    );
}

/// Values with other readers stay: a norm that is also read in f32 is not rounded, and a sum that is read before its
/// norm stays a node.
#[test]
fn what_others_read_stays() {
    let twice = program(Target::Cpu, Precision::BF16, |vb, x| {
        let y = norm(vb, &x)?;
        ops::mean(&ops::add(&linear(vb, &y, "a")?, &y)?)
    });
    assert!(printed(&twice).contains(&"residual rms_norm f32 (embedding, norm)".into()));
    let before = program(Target::Cpu, Precision::F32, |vb, x| {
        let x = ops::add(&x, &linear(vb, &x, "a")?)?;
        let first = linear(vb, &x, "b")?;
        ops::mean(&ops::add(&norm(vb, &x)?, &first)?)
    });
    assert!(printed(&before).contains(&"residual rms_norm f32 (add, norm)".into()));
}

/// A cast in another checkpointed segment than its norm is not fused.
#[test]
fn a_segments_end() {
    let ends = program(Target::Cpu, Precision::BF16, |vb, x| {
        let weight = vb.get(16, "norm")?;
        let y = checkpoint(|[x, weight]| ops::rms_norm(x, weight, 1e-5), [&x, &weight])?;
        ops::mean(&linear(vb, &y, "a")?)
    });
    let lines = printed(&ends);
    assert!(
        lines.contains(&"residual rms_norm f32 (embedding, norm)".into()),
        "{lines:?}"
    );
    assert!(
        lines.contains(&"cast bf16 (residual rms_norm)".into()),
        "{lines:?}"
    );
}

fn attend(vb: &VarBuilder<'_>, x: &Tensor, algorithm: Algorithm, mask: Mask) -> Result<Tensor> {
    let config = AttentionConfig {
        mask,
        ..Default::default()
    };
    attend_with(vb, x, algorithm, &config)
}

fn attend_with(
    vb: &VarBuilder<'_>,
    x: &Tensor,
    algorithm: Algorithm,
    config: &AttentionConfig,
) -> Result<Tensor> {
    let [x] = ops::cast_for("linear", [x])?;
    let heads = |name| ops::split_heads(&linear(vb, &x, name)?, 2);
    let out = algorithm.attend(&heads("q")?, &heads("k")?, &heads("v")?, config)?;
    ops::mean(&ops::merge_heads(&out)?)
}

/// On a GPU, heads stay in rows; in half precision their projections are one matmul. On the CPU, linear layers of one
/// input are adjacent, last first.
#[test]
fn heads_in_rows() {
    let flash =
        |vb: &VarBuilder<'static>, x: Tensor| attend(vb, &x, Algorithm::Flash, Mask::Causal);
    check(
        &program(Target::Cuda, Precision::BF16, flash),
        &[
            "embedding f32 (table)",
            "cast bf16 (embedding)",
            "linear bf16 (cast, q over k over v)",
            "attention in rows bf16 (linear)",
            "mean bf16 (attention in rows)",
        ],
    );
    check(
        &program(Target::Cuda, Precision::F32, flash),
        &[
            "embedding f32 (table)",
            "linear f32 (embedding, v)",
            "linear f32 (embedding, k)",
            "linear f32 (embedding, q)",
            "attention in rows f32 (linear, linear, linear)",
            "mean f32 (attention in rows)",
        ],
    );
    let capped = program(Target::Cuda, Precision::BF16, |vb, x| {
        let config = AttentionConfig {
            mask: Mask::Causal,
            soft_cap: Some(3.0),
            ..Default::default()
        };
        attend_with(vb, &x, Algorithm::Flash, &config)
    });
    let caps = capped.nodes.iter().filter_map(|node| match &node.kind {
        Kind::Attention(in_rows) => Some(in_rows.sizes.soft_cap),
        _ => None,
    });
    assert_eq!(caps.collect::<Vec<_>>(), [Some(3.0)]);
    let on_cpu = program(Target::Cpu, Precision::BF16, flash);
    let lines = printed(&on_cpu);
    assert_eq!(
        lines[2..5],
        ["v", "k", "q"].map(|name| format!("linear bf16 (cast, {name})"))
    );
    assert_eq!(on_cpu.copies().len(), 3); // casts of weights are not nodes
}

/// Without a mask, or if a projection has another reader, heads are split and merged by separate calls.
#[test]
fn heads_apart() {
    let open = program(Target::Cuda, Precision::F32, |vb, x| {
        attend(vb, &x, Algorithm::Flash, Mask::Full)
    });
    let read = program(Target::Cuda, Precision::F32, |vb, x| {
        let q = linear(vb, &x, "q")?;
        let heads = ops::split_heads(&q, 2)?;
        let config = AttentionConfig {
            mask: Mask::Causal,
            ..Default::default()
        };
        let out = Algorithm::Flash.attend(&heads, &heads, &heads, &config)?;
        ops::mean(&ops::add(&ops::merge_heads(&out)?, &q)?)
    });
    for program in [open, read] {
        let lines = printed(&program);
        assert!(
            lines.iter().any(|line| line.starts_with("split_heads")),
            "{lines:?}"
        );
        assert!(
            !lines.iter().any(|line| line.starts_with("attention in")),
            "{lines:?}"
        );
    }
}

/// Gate and up are one matmul on a GPU in half precision, unless another node reads one of the weights.
#[test]
fn gate_and_up() {
    let gated = |vb: &VarBuilder<'_>, x: &Tensor, gelu: Option<Gelu>| {
        let [w1, w3] = ["w1", "w3"].map(|name| vb.get((16, 16), name));
        match gelu {
            None => ops::swiglu_linear(x, &w1?, &w3?),
            Some(gelu) => ops::geglu_linear(x, &w1?, &w3?, gelu),
        }
    };
    for (target, precision, gelu, packed) in [
        (Target::Cuda, Precision::BF16, None, true),
        (Target::Cuda, Precision::BF16, Some(Gelu::Tanh), true),
        (Target::Cuda, Precision::F32, None, false),
        (Target::Cpu, Precision::BF16, None, false),
    ] {
        let once = |vb: &VarBuilder<'static>, x: Tensor| ops::mean(&gated(vb, &x, gelu)?);
        let program = program(target, precision, once);
        let node = &program.nodes[program.nodes.len() - 2];
        assert_eq!(
            (node.inputs.len(), node.saved.len()),
            if packed { (2, 1) } else { (3, 2) }
        );
        let of_weights = program.weights_of(node.inputs[1].value).len();
        assert_eq!(of_weights, if packed { 2 } else { 1 });
    }
    let shared = program(Target::Cuda, Precision::BF16, |vb, x| {
        let w1 = vb.get((16, 16), "w1")?;
        let w3 = vb.get((16, 16), "w3")?;
        ops::mean(&ops::add(
            &ops::swiglu_linear(&x, &w1, &w3)?,
            &ops::linear(&x, &w1)?,
        )?)
    });
    assert!(printed(&shared).contains(&"swiglu_linear bf16 (cast, w1, w3)".into()));
}

/// Head and loss are fused if the function returns the loss.
#[test]
fn head_and_loss() {
    let loss = |vb: &VarBuilder<'_>, x: &Tensor| {
        let targets = input("targets", (2, 8), DType::U32)?;
        ops::linear_cross_entropy(x, &vb.get((10, 16), "head")?, &targets)
    };
    let root = program(Target::Cpu, Precision::F32, |vb, x| loss(vb, &x));
    check(
        &root,
        &[
            "embedding f32 (table)",
            "head and loss f32 (embedding, head)",
        ],
    );
    let doubled = program(Target::Cpu, Precision::F32, |vb, x| {
        let loss = loss(vb, &x)?;
        ops::add(&loss, &loss)
    });
    assert!(printed(&doubled).contains(&"linear_cross_entropy f32 (embedding, head)".into()));
}

/// The requested number of sums and gates is recomputed, the first ones first. Of two consecutive sums only one is.
#[test]
fn sums_and_gates() {
    let blocks = |vb: &VarBuilder<'static>, mut x: Tensor| {
        for layer in 0..4 {
            let y = norm(&vb.pp(layer), &x)?;
            let [w1, w3] = ["w1", "w3"].map(|name| vb.pp(layer).get((16, 16), name));
            x = ops::add(&x, &ops::swiglu_linear(&y, &w1?, &w3?)?)?;
        }
        ops::mean(&linear(vb, &norm(vb, &x)?, "a")?)
    };
    let of = |target, sums, gates| {
        let mut program = program(target, Precision::BF16, blocks);
        let taken = program.recompute(Recompute { sums, gates });
        let stays = program.nodes.iter().filter_map(|node| match &node.kind {
            Kind::Norm(norm) if norm.adds => Some(norm.sum_stays),
            _ => None,
        });
        let stays: Vec<bool> = stays.collect();
        let gates = program.nodes.iter().filter(|node| node.recomputes_saved);
        assert_eq!(gates.count(), taken.gates);
        (taken, stays)
    };
    let taken = |sums, gates| Recompute { sums, gates };
    assert_eq!(of(Target::Cuda, 0, 0), (taken(0, 0), vec![true; 4]));
    assert_eq!(
        of(Target::Cuda, 1, 3),
        (taken(1, 3), vec![false, true, true, true])
    );
    assert_eq!(
        of(Target::Cuda, 9, 9),
        (taken(2, 4), vec![false, true, false, true])
    );
    assert_eq!(of(Target::Cpu, 9, 9), (taken(0, 4), vec![true; 4]));
}

/// A head in a checkpointed segment is not fused: recomputing the segment would add its gradients twice.
#[test]
fn a_head_in_a_segment() {
    let program = program(Target::Cpu, Precision::F32, |vb, x| {
        let head = vb.get((10, 16), "head")?;
        let targets = input("targets", (2, 8), DType::U32)?;
        let loss = move |[x, head]: [&Tensor; 2]| ops::linear_cross_entropy(x, head, &targets);
        checkpoint(loss, [&x, &head])
    });
    assert!(printed(&program).contains(&"linear_cross_entropy f32 (embedding, head)".into()));
}

/// Projections from outside of an attention's segment are not rotated in place: backward would rotate them twice.
#[test]
fn a_core_in_a_segment() {
    let core = program(Target::Cuda, Precision::F32, |vb, x| {
        let [q, k, v] = ["q", "k", "v"].map(|name| linear(vb, &x, name));
        let attend = |x: [&Tensor; 3]| {
            let [q, k, v] = x.map(|x| ops::split_heads(x, 2));
            let config = AttentionConfig {
                mask: Mask::Causal,
                ..Default::default()
            };
            ops::merge_heads(&Algorithm::Flash.attend(&q?, &k?, &v?, &config)?)
        };
        ops::mean(&checkpoint(attend, [&q?, &k?, &v?])?)
    });
    let lines = printed(&core);
    assert!(
        !lines.iter().any(|line| line.starts_with("attention in")),
        "{lines:?}"
    );
}

/// A cast that is also read as an input stays a node. Matmuls read a separate copy, or the cast itself.
#[test]
fn casts_that_others_read() {
    let read = program(Target::Cpu, Precision::BF16, |vb, x| {
        let w = vb.get((16, 16), "w")?;
        let copy = crate::no_grad(|| ops::cast_for("matmul", [&w]))?;
        let y = ops::linear(&x, &w)?;
        ops::mean(&ops::linear(&y, &copy[0])?)
    });
    assert!(read.copies().is_empty());
    assert!(printed(&read).contains(&"weight_cast bf16 (w)".into()));
}

/// LayerNorm is fused like RMSNorm.
#[test]
fn a_sum_and_its_layer_norm() {
    let program = program(Target::Cuda, Precision::BF16, |vb, x| {
        let x = ops::add(&x, &linear(vb, &x, "a")?)?;
        let (weight, bias) = (vb.get(16, "norm")?, vb.get(16, "bias")?);
        let y = ops::layer_norm(&x, &weight, &bias, 1e-5)?;
        ops::mean(&ops::add(&x, &linear(vb, &y, "b")?)?)
    });
    let line = "add_layer_norm bf16 (embedding, linear, norm, bias)";
    assert!(
        printed(&program).contains(&line.into()),
        "{:?}",
        printed(&program)
    );
}
