//! Invalid input: each error names the op, what it expected and what it got, by kernel and reference alike.

use super::case::{cast, normal};
use super::cases::angles;
use super::every;
use candle_core::{DType, Device, Tensor};
use tallow::attention::{self, AttentionConfig, Mask};
use tallow::ops::{
    self, BceWeights, CrossEntropyConfig, KernelPolicy, Reduction, with_kernel_policy,
};
use tallow::{Error, Result};

const POLICIES: [KernelPolicy; 3] = [
    KernelPolicy::Prefer,
    KernelPolicy::Strict,
    KernelPolicy::Reference,
];

/// Checks that the error is of this kind and contains all `parts`, under every policy.
pub fn refused(kind: fn(&Error) -> bool, parts: &[&str], op: impl Fn() -> Result<Tensor>) {
    for policy in POLICIES {
        let error = with_kernel_policy(policy, &op).expect_err(parts[0]);
        let text = error.to_string();
        for part in parts {
            assert!(
                text.contains(part),
                "{policy:?}: {part:?} is not in {text:?}"
            );
        }
        assert!(kind(&error), "{policy:?}: {error:?}");
        // The text survives a conversion to candle's error.
        assert!(candle_core::Error::from(error).to_string().contains(&text));
    }
}

pub fn shape(op: &str, parts: &[&str], f: impl Fn() -> Result<Tensor>) {
    let op = format!("{op}: expected ");
    let parts = [&[op.as_str(), "got "], parts].concat();
    refused(|error| matches!(error, Error::Shape { .. }), &parts, f);
}

pub fn dtype(op: &str, parts: &[&str], f: impl Fn() -> Result<Tensor>) {
    let op = format!("{op}: expected ");
    let parts = [&[op.as_str(), "got "], parts].concat();
    refused(|error| matches!(error, Error::DType { .. }), &parts, f);
}

pub fn x(dims: &[usize]) -> Tensor {
    normal(dims, 1)
}

fn narrow(dims: &[usize]) -> Tensor {
    cast(&x(dims), DType::F32)
}

pub fn ids(values: &[u32]) -> Tensor {
    Tensor::new(values, &Device::Cpu).unwrap()
}

#[test]
fn shapes_of_linear_and_products() {
    shape("linear", &["(..., 5)", "x [2, 4]", "weight [3, 5]"], || {
        ops::linear(&x(&[2, 4]), &x(&[3, 5]))
    });
    shape("linear", &["(out, in)", "weight [5]"], || {
        ops::linear(&x(&[2, 5]), &x(&[5]))
    });
    shape("linear", &["x []"], || ops::linear(&x(&[]), &x(&[3, 5])));
    shape(
        "matmul",
        &["(..., K, N)", "a [2, 3, 4]", "b [2, 5, 4]"],
        || ops::matmul(&x(&[2, 3, 4]), &x(&[2, 5, 4])),
    );
    shape("matmul", &["leading", "a [2, 3, 4]", "b [3, 4, 5]"], || {
        ops::matmul(&x(&[2, 3, 4]), &x(&[3, 4, 5]))
    });
    shape("matmul", &["a [4]"], || ops::matmul(&x(&[4]), &x(&[4, 5])));
    shape("matmul_transposed", &["(..., N, K)", "b [4, 5]"], || {
        ops::matmul_transposed(&x(&[3, 4]), &x(&[4, 5]))
    });
}

#[test]
fn shapes_of_norms() {
    for width in [4, 6] {
        let weight = format!("weight [{width}]");
        shape("rms_norm", &["(5,)", "[2, 5]", &weight], || {
            ops::rms_norm(&x(&[2, 5]), &x(&[width]), 1e-5)
        });
        shape(
            "layer_norm",
            &["(5,)", "[2, 5]", &weight, "bias [5]"],
            || ops::layer_norm(&x(&[2, 5]), &x(&[width]), &x(&[5]), 1e-5),
        );
        shape("layer_norm", &["(5,)", &format!("bias [{width}]")], || {
            ops::layer_norm(&x(&[2, 5]), &x(&[5]), &x(&[width]), 1e-5)
        });
    }
    shape("rms_norm", &["weight [1, 5]"], || {
        ops::rms_norm(&x(&[2, 5]), &x(&[1, 5]), 1e-5)
    });
    shape("rms_norm", &["a scalar"], || {
        ops::rms_norm(&x(&[]), &x(&[1]), 1e-5)
    });
    shape("rms_norm", &["not empty"], || {
        ops::rms_norm(&x(&[2, 0]), &x(&[0]), 1e-5)
    });
    shape("layer_norm", &["not empty"], || {
        ops::layer_norm(&x(&[2, 0]), &x(&[0]), &x(&[0]), 1e-5)
    });
}

#[test]
fn shapes_of_softmax_and_attention() {
    shape("softmax", &["got []", "causal"], || {
        ops::softmax(&x(&[]), 1.0, Mask::Causal)
    });
    shape("softmax", &["[5]", "causal"], || {
        ops::softmax(&x(&[5]), 1.0, Mask::Causal)
    });
    let attend = |q: &[usize], k: &[usize], v: &[usize]| {
        attention::naive(&x(q), &x(k), &x(v), &AttentionConfig::default())
    };
    let sizes = ["q [1, 2, 3, 4]", "k [1, 2, 5, 6]", "v [1, 2, 5, 4]"];
    shape("attention::naive", &sizes, || {
        attend(&[1, 2, 3, 4], &[1, 2, 5, 6], &[1, 2, 5, 4])
    });
    shape("attention::naive", &["v [1, 2, 6, 4]"], || {
        attend(&[1, 2, 3, 4], &[1, 2, 5, 4], &[1, 2, 6, 4])
    });
    // The heads of k and v are equal in number and divide those of q.
    for kv_heads in [0, 2, 4, 6] {
        let kv = [1, kv_heads, 5, 4];
        let parts = [&format!("k {kv:?}"), "divide the 3 heads of q"];
        shape("attention::naive", &parts, || {
            attend(&[1, 3, 3, 4], &kv, &kv)
        });
    }
    let kv = [1, 2, 5, 4];
    shape("attention::naive", &["same heads, same length"], || {
        attend(&[1, 4, 3, 4], &kv, &[1, 4, 5, 4])
    });
    shape("attention::naive", &["before the heads"], || {
        attend(&[3, 2, 3, 4], &kv, &kv)
    });
    // The dimension of heads may be omitted, but only in all three tensors.
    for (q, k, v) in [
        (&[1, 3, 4][..], &[5, 4][..], &[5, 4][..]),
        (&[1, 3, 4], &[1, 5, 4], &[5, 4]),
        (&[3, 4], &[1, 5, 4], &[1, 5, 4]),
    ] {
        shape("attention::naive", &["before the heads"], || {
            attend(q, k, v)
        });
    }
    shape("attention::naive", &["v [2, 1, 5, 4]"], || {
        attend(&[1, 2, 3, 4], &[1, 2, 5, 4], &[2, 1, 5, 4])
    });
    shape("attention::naive", &["q [1, 2, 3, 0]"], || {
        attend(&[1, 2, 3, 0], &[1, 2, 5, 0], &[1, 2, 5, 4])
    });
    shape("attention::naive", &["q [4]"], || {
        attend(&[4], &[5, 4], &[5, 4])
    });
}

#[test]
fn shapes_of_the_rest() {
    let (cos, sin) = angles(3, 6);
    for dims in [&[2, 4, 6][..], &[2, 3, 8], &[2, 3, 7], &[6]] {
        let got = format!("x {dims:?}, cos [3, 3], sin [3, 3]");
        shape("rope", &["Dh even", &got], || {
            ops::rope(&x(dims), &cos, &sin)
        });
    }
    shape("rope", &["sin [3, 2]"], || {
        ops::rope(&x(&[3, 6]), &cos, &x(&[3, 2]))
    });
    shape("swiglu", &["[2, 3]", "[3, 2]"], || {
        ops::swiglu(&x(&[2, 3]), &x(&[3, 2]))
    });
    shape("embedding", &["(V, D)", "[5]"], || {
        ops::embedding(&ids(&[0]), &x(&[5]))
    });
    shape("split_heads", &["4 heads", "[2, 3, 6]"], || {
        ops::split_heads(&x(&[2, 3, 6]), 4)
    });
    shape("split_heads", &["0 heads"], || {
        ops::split_heads(&x(&[2, 3, 6]), 0)
    });
    shape("split_heads", &["(B, T, D)", "[3, 6]"], || {
        ops::split_heads(&x(&[3, 6]), 2)
    });
    shape("merge_heads", &["(B, H, T, Dh)", "[2, 3, 6]"], || {
        ops::merge_heads(&x(&[2, 3, 6]))
    });
    shape("cross_entropy", &["[2, 3, 5]", "targets [2]"], || {
        ops::cross_entropy(&x(&[2, 3, 5]), &ids(&[0, 1]))
    });
    shape("cross_entropy", &["a scalar"], || {
        ops::cross_entropy(&x(&[]), &ids(&[0]))
    });
}

#[test]
fn selections() {
    let mask = Tensor::zeros((2, 3), DType::U8, &Device::Cpu).unwrap();
    let columns = |values: &[u32]| ids(values).unsqueeze(0).unwrap();
    shape("eq", &["[2, 3]", "[2, 4]"], || {
        ops::eq(&x(&[2, 3]), &x(&[2, 4]))
    });
    dtype("lt", &["u32 and u8", "one dtype"], || {
        ops::lt(&ids(&[1]), &mask)
    });
    dtype("where_cond", &["u32", "u8"], || {
        ops::where_cond(&ids(&[0, 1]), &x(&[2]), &x(&[2]))
    });
    shape("masked_fill", &["[2, 4]", "[2, 3]"], || {
        ops::masked_fill(&x(&[2, 4]), &mask, 0.0)
    });
    refused(
        |e| matches!(e, Error::Config { .. }),
        &["masked_fill", "65504", "f16"],
        || {
            let half = x(&[2, 3]).to_dtype(DType::F16)?;
            ops::masked_fill(&half, &mask, -1e9)
        },
    );
    for k in [0, 4] {
        shape("topk", &[&format!("{k} of [2, 3]"), "at most"], || {
            Ok(ops::topk(&x(&[2, 3]), k)?.0)
        });
    }
    shape("argmax", &["[2, 3]"], || ops::argmax(&x(&[2, 3]), 2));
    shape("gather", &["index [1, 2]", "x [3]"], || {
        ops::gather(&x(&[3]), 0, &columns(&[0, 1]))
    });
    shape("scatter_add", &["index [1, 2]", "x [2, 3]"], || {
        ops::scatter_add(&x(&[2, 3]), 1, &columns(&[0, 1]), &x(&[1, 2]))
    });
    shape("index_select", &["ids [1, 2]", "one dimension"], || {
        ops::index_select(&x(&[3, 2]), 0, &columns(&[0, 1]))
    });
    shape("index_add", &["src [3, 2]", "src [2, 2]"], || {
        ops::index_add(&x(&[3, 2]), 0, &ids(&[0, 1]), &x(&[3, 2]))
    });
    shape("stack", &["[[2], [3]]"], || {
        ops::stack(&[&x(&[2]), &x(&[3])], 0)
    });
    let outside = |e: &Error| matches!(e, Error::TokenId { .. });
    refused(outside, &["gather", "3"], || {
        ops::gather(&x(&[1, 3]), 1, &columns(&[0, 3]))
    });
    refused(outside, &["index_select", "3"], || {
        ops::index_select(&x(&[3, 2]), 0, &ids(&[3]))
    });
    refused(outside, &["one_hot", "3"], || {
        ops::one_hot(&ids(&[3]), 3, DType::F32)
    });
}

#[test]
fn losses() {
    let config = |label_smoothing, z_loss| CrossEntropyConfig {
        label_smoothing,
        z_loss,
        ..Default::default()
    };
    let of = |config: CrossEntropyConfig| {
        move || ops::cross_entropy_with(&x(&[2, 5]), &ids(&[0, 1]), &config)
    };
    let refuses = |e: &Error| matches!(e, Error::Config { .. });
    refused(
        refuses,
        &["label_smoothing", "1.5", "0 to 1"],
        of(config(1.5, 0.0)),
    );
    refused(
        refuses,
        &["z_loss", "-1", "positive"],
        of(config(0.0, -1.0)),
    );
    let weights = |dims: &[usize]| CrossEntropyConfig {
        class_weights: Some(x(dims)),
        ..Default::default()
    };
    shape(
        "cross_entropy",
        &["class_weights [4]", "[5]"],
        of(weights(&[4])),
    );
    for class_weights in [None, Some(x(&[5]))] {
        let config = CrossEntropyConfig {
            ignore_index: Some(1),
            class_weights,
            ..Default::default()
        };
        refused(
            |e| matches!(e, Error::Data { .. }),
            &["2 targets, all ignored"],
            move || ops::cross_entropy_with(&x(&[2, 5]), &ids(&[1, 1]), &config),
        );
    }
    shape("cross_entropy", &["targets [2, 4]", "[2, 5]"], || {
        ops::cross_entropy_with(&x(&[2, 5]), &x(&[2, 4]), &CrossEntropyConfig::default())
    });
    refused(refuses, &["ignore_index", "probabilities"], || {
        ops::cross_entropy_ignoring(&x(&[2, 5]), &x(&[2, 5]), 1)
    });
    shape("mse_loss", &["x [2, 5]", "target [5]"], || {
        ops::mse_loss(&x(&[2, 5]), &x(&[5]), Reduction::Mean)
    });
    shape("bce_with_logits", &["pos_weight [2]", "[2, 5]"], || {
        let pos_weight = x(&[2]);
        let weights = BceWeights {
            weight: None,
            pos_weight: Some(&pos_weight),
        };
        ops::bce_with_logits(&x(&[2, 5]), &x(&[2, 5]), weights, Reduction::Mean)
    });
    refused(
        |e| matches!(e, Error::Data { .. }),
        &["l1_loss", "no losses"],
        || ops::l1_loss(&x(&[0]), &x(&[0]), Reduction::Mean),
    );
}

#[test]
fn mixed_dtypes() {
    let (wide, f32s) = (x(&[2, 3]), narrow(&[2, 3]));
    let row = narrow(&[3]);
    let parts = |name: &'static str| ["one dtype, f64", name, "f32", "to_dtype"];
    dtype("linear", &parts("weight in"), || ops::linear(&wide, &f32s));
    dtype("matmul", &parts("b in"), || {
        ops::matmul(&wide, &narrow(&[3, 2]))
    });
    dtype("matmul_transposed", &parts("b in"), || {
        ops::matmul_transposed(&wide, &f32s)
    });
    dtype("swiglu", &parts("up in"), || ops::swiglu(&wide, &f32s));
    dtype("rms_norm", &parts("weight in"), || {
        ops::rms_norm(&wide, &row, 1e-5)
    });
    dtype("layer_norm", &parts("bias in"), || {
        ops::layer_norm(&wide, &x(&[3]), &row, 1e-5)
    });
    // Half precision combines with f32 parameters; other mixtures are refused.
    let half = cast(&wide, DType::BF16);
    dtype("rms_norm", &["bf16", "or f32", "weight in f64"], || {
        ops::rms_norm(&half, &x(&[3]), 1e-5)
    });
    dtype("layer_norm", &["bf16", "or f32", "bias in f16"], || {
        ops::layer_norm(&half, &row, &cast(&row, DType::F16), 1e-5)
    });
    dtype("rms_norm", &["one dtype, f32", "weight in bf16"], || {
        ops::rms_norm(&f32s, &cast(&row, DType::BF16), 1e-5)
    });
    dtype("swiglu", &["one dtype, bf16", "up in f32"], || {
        ops::swiglu(&half, &f32s)
    });
    let (cos, sin) = angles(2, 6);
    let cos_f32 = cast(&cos, DType::F32);
    dtype("rope", &parts("cos in"), || {
        ops::rope(&x(&[2, 6]), &cos_f32, &sin)
    });
    dtype("attention::naive", &parts("v in"), || {
        attention::naive(&wide, &wide, &f32s, &AttentionConfig::default())
    });
}

/// Memory is checked before the allocation, because a panic or a killed process would end the whole run.
#[test]
fn more_memory_than_there_is() {
    let column = Tensor::zeros((1 << 22, 1), DType::F32, &Device::Cpu).unwrap();
    let error = ops::linear(&column, &column).unwrap_err().to_string();
    let wanted_bytes = (1u64 << 46).to_string();
    for part in [wanted_bytes.as_str(), "bytes of memory", "available"] {
        assert!(error.contains(part), "{part:?} is not in {error:?}");
    }
}

/// Integers have no gradient and no kernel, and references must refuse them too.
#[test]
fn integers_where_floats_belong() {
    for case in every::small() {
        let name = match case.name.split(' ').next().unwrap() {
            "attention" => "attention::naive",
            "cross_entropy_ignoring" => "cross_entropy",
            name => name,
        };
        let operands = case.operands(DType::U32);
        dtype(name, &["floating-point", "u32"], || (case.apply)(&operands));
    }
}

/// The references are public, so they must refuse integers themselves.
#[test]
fn integers_in_references() {
    let ints = |dims: &[usize]| Tensor::ones(dims, DType::I64, &Device::Cpu).unwrap();
    let (x, row, heads) = (ints(&[2, 4]), ints(&[4]), ints(&[1, 1, 2, 4]));
    let half = ints(&[2, 2]);
    let config = AttentionConfig::default();
    let refusals = [
        (
            "cross_entropy",
            ops::reference::cross_entropy(&x, &ids(&[0, 1]), None),
        ),
        ("embedding", ops::reference::embedding(&ids(&[0, 1]), &x)),
        (
            "layer_norm",
            ops::reference::layer_norm(&x, &row, &row, 1e-5),
        ),
        ("linear", ops::reference::linear(&x, &x)),
        (
            "linear_cross_entropy",
            ops::reference::linear_cross_entropy(&x, &x, &ids(&[0, 1]), None),
        ),
        ("matmul", ops::reference::matmul(&x, &x, true)),
        ("relu", ops::reference::relu(&x)),
        ("rms_norm", ops::reference::rms_norm(&x, &row, 1e-5)),
        ("rope", ops::reference::rope(&x, &half, &half)),
        ("softmax", ops::reference::softmax(&x, 1.0, Mask::Full)),
        ("swiglu", ops::reference::swiglu(&x, &x)),
        ("swiglu_linear", ops::reference::swiglu_linear(&x, &x, &x)),
        (
            "attention::naive",
            attention::reference::naive(&heads, &heads, &heads, &config),
        ),
        (
            "attention::flash",
            attention::reference::flash(&heads, &heads, &heads, &config).map(|(out, _)| out),
        ),
    ];
    for (op, result) in refusals {
        let error = result.expect_err(op);
        assert!(matches!(error, Error::DType { .. }), "{op}: {error:?}");
        let text = error.to_string();
        assert!(
            text.starts_with(&format!("{op}: expected a floating-point")),
            "{text}"
        );
        assert!(text.contains("got i64"), "{text}");
    }
}
