//! The autocast policies against PyTorch: its observed results on the CPU, and its op lists for CUDA.

use super::*;
use serde::Deserialize;
use tallow::precision::OpClass;
use tallow::{autocast, ops};

#[derive(Deserialize)]
struct Golden {
    rows: Vec<Row>,
}

#[derive(Deserialize)]
struct Row {
    op: String,
    lower: String,
    inputs: Vec<String>,
    output: String,
}

/// Returns the dtype that all inputs of `op` have after `cast_for`, which is its output's.
fn computes_in(policy: &Autocast, op: &str, inputs: &[DType]) -> DType {
    let op: &'static str = op.to_string().leak(); // cast_for names ops in errors
    let inputs: Vec<Tensor> = inputs
        .iter()
        .map(|dtype| numbers(&[2], *dtype, 1))
        .collect();
    let cast = autocast(policy.clone(), || {
        Ok(match &inputs[..] {
            [a] => ops::cast_for(op, [a])?.to_vec(),
            [a, b] => ops::cast_for(op, [a, b])?.to_vec(),
            [a, b, c] => ops::cast_for(op, [a, b, c])?.to_vec(),
            _ => panic!("{op} of {} inputs", inputs.len()),
        })
    });
    let cast = cast.unwrap();
    assert!(cast.iter().all(|x| x.dtype() == cast[0].dtype()), "{op}");
    cast[0].dtype()
}

#[test]
fn cpu_policy_gives_the_dtypes_that_pytorch_gave() {
    let golden = include_str!("../../../fixtures/autocast_cpu.json");
    let golden: Golden = serde_json::from_str(golden).unwrap();
    assert!(golden.rows.len() > 250);
    for row in &golden.rows {
        let policy = Autocast::cpu(row.lower.parse().unwrap());
        let inputs: Vec<DType> = row.inputs.iter().map(|d| d.parse().unwrap()).collect();
        let got = computes_in(&policy, &row.op, &inputs);
        assert_eq!(got.as_str(), row.output, "{} of {:?}", row.op, row.inputs);
    }
}

#[test]
fn cuda_policy_gives_the_dtypes_of_pytorchs_lists() {
    let lower = "matmul mm bmm addmm baddbmm addbmm linear einsum conv1d conv2d conv3d prelu mv addmv \
                 scaled_dot_product_attention gru_cell lstm_cell";
    let f32s = "exp expm1 log log10 log2 log1p pow reciprocal rsqrt acos asin cosh sinh tan erfinv softplus layer_norm \
                group_norm cosine_similarity nll_loss cross_entropy_loss mse_loss l1_loss huber_loss kl_div \
                binary_cross_entropy_with_logits dist cdist renorm logsumexp softmax log_softmax prod cumprod cumsum \
                sum norm";
    let widest =
        "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put tensordot scatter_add";
    let follow = "add mul sub div relu silu gelu embedding mean";
    for half in [DType::F16, DType::BF16] {
        let policy = Autocast::cuda(half);
        let check = |ops: &str, of_f32: DType, of_half: DType, of_both: DType| {
            for op in ops.split_whitespace() {
                let got = |inputs: &[DType]| computes_in(&policy, op, inputs);
                assert_eq!(got(&[DType::F32; 2]), of_f32, "{op}");
                assert_eq!(got(&[half; 2]), of_half, "{op}");
                assert_eq!(got(&[half, DType::F32]), of_both, "{op}");
                assert_eq!(got(&[DType::F64; 2]), DType::F64, "{op}");
                assert_eq!(got(&[DType::U32; 2]), DType::U32, "{op}");
            }
        };
        check(lower, half, half, half);
        check(f32s, DType::F32, DType::F32, DType::F32);
        check(widest, DType::F32, half, DType::F32);
        check(follow, DType::F32, half, DType::F32);
    }
}

/// The one intended difference: PyTorch 2.15 lists rms_norm among the f32 ops of CUDA.
#[test]
fn the_two_policies_differ_and_ours_of_rms_norm() {
    let (cuda, cpu) = (Autocast::cuda(DType::BF16), Autocast::cpu(DType::BF16));
    for op in "softmax log_softmax layer_norm exp log pow rsqrt sum".split_whitespace() {
        assert_eq!(
            (cuda.class(op), cpu.class(op)),
            (OpClass::F32, OpClass::Follow),
            "{op}"
        );
    }
    for policy in [&cuda, &cpu] {
        assert_eq!(policy.class("rms_norm"), OpClass::Follow);
        assert_eq!(policy.class("cross_entropy"), OpClass::F32);
        assert_eq!(policy.class("linear_cross_entropy"), OpClass::Lower);
    }
}

#[test]
fn an_op_moves_and_takes_ours_along() {
    let policy = Autocast::cuda(DType::F16)
        .with("scaled_dot_product_attention", OpClass::F32)
        .with("softmax", OpClass::Lower)
        .with("mine", OpClass::Lower);
    assert_eq!(policy.class("attention::naive"), OpClass::F32);
    assert_eq!(policy.class("attention::flash"), OpClass::F32);
    assert_eq!(computes_in(&policy, "softmax", &[DType::F32]), DType::F16);
    assert_eq!(computes_in(&policy, "mine", &[DType::F32]), DType::F16);
    assert_ne!(policy, Autocast::cuda(DType::F16));
    let flash = policy.with("attention::flash", OpClass::Lower);
    assert_eq!(flash.class("attention::naive"), OpClass::F32); // this copy alone
    assert_eq!(flash.class("attention::flash"), OpClass::Lower);
}

#[test]
fn a_policy_prints_every_op_with_its_class() {
    let policy = Autocast::cpu(DType::BF16);
    let table = policy.to_string();
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines.len(), 1 + policy.classes().count());
    for (line, (op, class)) in lines[1..].iter().zip(policy.classes()) {
        let words: Vec<&str> = line.split_whitespace().collect();
        assert_eq!(words[..2], [op, class.name()]);
        if class == OpClass::Lower {
            assert_eq!(words[2], "bf16");
        }
    }
    let ours = "add attention::flash attention::naive cross_entropy div embedding exp layer_norm linear \
                linear_cross_entropy log log_softmax matmul matmul_transposed mean merge_heads mul pow relu rms_norm \
                rope rsqrt softmax split_heads sub sum swiglu swiglu_linear";
    for policy in [policy, Autocast::cuda(DType::F16)] {
        for op in ours.split_whitespace() {
            assert!(policy.classes().any(|(name, _)| name == op), "{op}");
        }
    }
    assert_eq!(Autocast::disabled().to_string(), "autocast is off");
}
