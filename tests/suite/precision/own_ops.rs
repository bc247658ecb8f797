//! Every op under both policies and both dtypes: its output's dtype, and gradients in the inputs' dtypes.

use super::*;
use crate::settings::with_mask;
use tallow::attention::{self, AttentionConfig, Mask};
use tallow::ops::{BceWeights, Dropout, DropoutKey, Gelu, KlTarget, Reduction};
use tallow::{Result, autocast, ops};

/// The dtype of an output.
#[derive(Clone, Copy, Debug)]
enum Out {
    Lower,
    F32,
    /// The first input's dtype.
    Follow,
    /// f32 under CUDA's policy, the first input's dtype under the CPU's.
    F32OnCuda,
    /// f32, because the second input is f32.
    Promoted,
}

type Apply = fn(&Tensor, &[Var]) -> Result<Tensor>;

/// An op: its name, the shapes of its first input and of its f32 weights, its output's dtype, and the function.
type Op = (&'static str, Vec<usize>, Vec<Vec<usize>>, Out, Apply);

fn ids(shape: &[usize]) -> Tensor {
    let n: usize = shape.iter().product();
    let ids: Vec<u32> = (0..n as u32).map(|i| i * 3 % 5).collect();
    Tensor::from_vec(ids, shape, &Device::Cpu).unwrap()
}

fn causal() -> AttentionConfig {
    with_mask(Mask::Causal)
}

fn all() -> Vec<Op> {
    use Out::*;
    let heads = || vec![2, 3, 7, 8];
    vec![
        ("linear", vec![2, 3, 6], vec![vec![5, 6]], Lower, |x, w| {
            ops::linear(x, &w[0])
        }),
        (
            "matmul",
            vec![2, 3, 6],
            vec![vec![2, 6, 5]],
            Lower,
            |x, w| ops::matmul(x, &w[0]),
        ),
        (
            "matmul_transposed",
            vec![2, 3, 6],
            vec![vec![2, 5, 6]],
            Lower,
            |x, w| ops::matmul_transposed(x, &w[0]),
        ),
        ("naive", heads(), vec![heads(), heads()], Lower, |x, w| {
            attention::naive(x, &w[0], &w[1], &causal())
        }),
        (
            "naive::reference",
            heads(),
            vec![heads(), heads()],
            Lower,
            |x, w| attention::reference::naive(x, &w[0], &w[1], &causal()),
        ),
        ("flash", heads(), vec![heads(), heads()], Lower, |x, w| {
            attention::flash(x, &w[0], &w[1], &causal())
        }),
        (
            "swiglu_linear",
            vec![3, 6],
            vec![vec![5, 6], vec![5, 6]],
            Lower,
            |x, w| ops::swiglu_linear(x, &w[0], &w[1]),
        ),
        (
            "geglu_linear",
            vec![3, 6],
            vec![vec![5, 6], vec![5, 6]],
            Lower,
            |x, w| ops::geglu_linear(x, &w[0], &w[1], Gelu::Tanh),
        ),
        ("softmax", vec![2, 3, 6], vec![], F32OnCuda, |x, _| {
            ops::softmax(x, 0.5, Mask::Full)
        }),
        ("log_softmax", vec![2, 3, 6], vec![], F32OnCuda, |x, _| {
            ops::log_softmax(x)
        }),
        (
            "layer_norm",
            vec![3, 6],
            vec![vec![6], vec![6]],
            F32OnCuda,
            |x, w| ops::layer_norm(x, &w[0], &w[1], 1e-5),
        ),
        ("exp", vec![3, 6], vec![], F32OnCuda, |x, _| ops::exp(x)),
        ("log", vec![3, 6], vec![], F32OnCuda, |x, _| ops::log(x)),
        ("pow", vec![3, 6], vec![], F32OnCuda, |x, _| {
            ops::pow(x, 2.5)
        }),
        ("rsqrt", vec![3, 6], vec![], F32OnCuda, |x, _| ops::rsqrt(x)),
        ("sum", vec![3, 6], vec![], F32OnCuda, |x, _| ops::sum(x)),
        ("sum_over", vec![3, 6], vec![], F32OnCuda, |x, _| {
            ops::sum_over(x, 0)
        }),
        ("sqrt", vec![3, 6], vec![], Follow, |x, _| {
            ops::sqrt(&ops::abs(x)?)
        }),
        ("abs", vec![3, 6], vec![], Follow, |x, _| ops::abs(x)),
        ("clamp", vec![3, 6], vec![], Follow, |x, _| {
            ops::clamp(x, -0.5, 1.0)
        }),
        ("affine", vec![3, 6], vec![], Follow, |x, _| {
            ops::affine(x, -1.5, 0.3)
        }),
        ("max_over", vec![3, 6], vec![], Follow, |x, _| {
            ops::max_over(x, 0)
        }),
        ("min_keepdim", vec![3, 6], vec![], Follow, |x, _| {
            ops::min_keepdim(x, 1)
        }),
        (
            "where_cond",
            vec![3, 6],
            vec![vec![3, 6]],
            Promoted,
            |x, w| ops::where_cond(&ops::gt(x, &w[0])?, x, &w[0]),
        ),
        ("masked_fill", vec![3, 6], vec![], Follow, |x, _| {
            ops::masked_fill(x, &ops::gt(x, x)?, f64::NEG_INFINITY)
        }),
        ("topk", vec![3, 6], vec![], Follow, |x, _| {
            Ok(ops::topk(x, 2)?.0)
        }),
        ("gather", vec![2, 6], vec![], Follow, |x, _| {
            ops::gather(x, 1, &ids(&[2, 3]))
        }),
        (
            "scatter_add",
            vec![2, 6],
            vec![vec![2, 3]],
            Promoted,
            |x, w| ops::scatter_add(x, 1, &ids(&[2, 3]), &w[0]),
        ),
        ("index_select", vec![5, 6], vec![], Follow, |x, _| {
            ops::index_select(x, 0, &ids(&[3]))
        }),
        (
            "index_add",
            vec![5, 6],
            vec![vec![3, 6]],
            Promoted,
            |x, w| ops::index_add(x, 0, &ids(&[3]), &w[0]),
        ),
        ("stack", vec![3, 6], vec![vec![3, 6]], Promoted, |x, w| {
            ops::stack(&[x, &w[0]], 0)
        }),
        ("logsumexp", vec![3, 6], vec![], F32OnCuda, |x, _| {
            ops::logsumexp(x, 1)
        }),
        ("var", vec![3, 6], vec![], Follow, |x, _| ops::var(x, 0, 1)),
        ("mean_keepdim", vec![3, 6], vec![], Follow, |x, _| {
            ops::mean_keepdim(x, 1)
        }),
        ("cross_entropy", vec![2, 3, 5], vec![], F32, |x, _| {
            ops::cross_entropy(x, &ids(&[2, 3]))
        }),
        (
            "cross_entropy_ignoring",
            vec![2, 3, 5],
            vec![],
            F32,
            |x, _| ops::cross_entropy_ignoring(x, &ids(&[2, 3]), 3),
        ),
        ("mse_loss", vec![3, 6], vec![vec![3, 6]], F32, |x, w| {
            ops::mse_loss(x, &w[0], Reduction::Mean)
        }),
        ("l1_loss", vec![3, 6], vec![vec![3, 6]], F32, |x, w| {
            ops::l1_loss(x, &w[0], Reduction::Mean)
        }),
        (
            "bce_with_logits",
            vec![3, 6],
            vec![vec![3, 6]],
            F32,
            |x, w| ops::bce_with_logits(x, &w[0], BceWeights::default(), Reduction::Mean),
        ),
        ("kl_div", vec![3, 6], vec![vec![3, 6]], F32, |x, w| {
            ops::kl_div(x, &w[0], KlTarget::Logarithms, Reduction::Mean)
        }),
        ("log_sigmoid", vec![3, 6], vec![], Follow, |x, _| {
            ops::log_sigmoid(x)
        }),
        (
            "linear_cross_entropy",
            vec![2, 3, 6],
            vec![vec![5, 6]],
            F32,
            |x, w| ops::linear_cross_entropy(x, &w[0], &ids(&[2, 3])),
        ),
        ("rms_norm", vec![3, 6], vec![vec![6]], Follow, |x, w| {
            ops::rms_norm(x, &w[0], 1e-5)
        }),
        ("relu", vec![3, 6], vec![], Follow, |x, _| ops::relu(x)),
        ("dropout", vec![3, 6], vec![], Follow, |x, _| {
            let key = DropoutKey::new(1, 2)?;
            let probability = 0.2;
            ops::dropout(x, &Dropout { probability, key })
        }),
        ("tanh", vec![3, 6], vec![], Follow, |x, _| ops::tanh(x)),
        ("sigmoid", vec![3, 6], vec![], Follow, |x, _| {
            ops::sigmoid(x)
        }),
        ("silu", vec![3, 6], vec![], Follow, |x, _| ops::silu(x)),
        ("gelu", vec![3, 6], vec![], Follow, |x, _| {
            ops::gelu(x, Gelu::Erf)
        }),
        ("gelu_tanh", vec![3, 6], vec![], Follow, |x, _| {
            ops::gelu(x, Gelu::Tanh)
        }),
        ("repeat_heads", heads(), vec![], Follow, |x, _| {
            ops::repeat_heads(x, 2)
        }),
        ("contiguous", vec![3, 6], vec![], Follow, |x, _| {
            ops::contiguous(&x.t()?)
        }),
        ("concat", vec![3, 6], vec![vec![3, 2]], Promoted, |x, w| {
            ops::concat(&[x, &w[0]], 1)
        }),
        (
            "linear_bias",
            vec![2, 3, 6],
            vec![vec![5, 6], vec![5]],
            Lower,
            |x, w| ops::linear_bias(x, &w[0], &w[1]),
        ),
        (
            "add_scaled",
            vec![3, 6],
            vec![vec![3, 6]],
            Promoted,
            |x, w| ops::add_scaled(x, &w[0], 0.5),
        ),
        ("mean", vec![3, 6], vec![], Follow, |x, _| ops::mean(x)),
        ("embedding", vec![5, 6], vec![], Follow, |x, _| {
            ops::embedding(&ids(&[2, 3]), x)
        }),
        ("split_heads", vec![2, 3, 6], vec![], Follow, |x, _| {
            ops::split_heads(x, 2)
        }),
        ("merge_heads", heads(), vec![], Follow, |x, _| {
            ops::merge_heads(x)
        }),
        ("rope", vec![2, 3, 6], vec![], Follow, |x, _| {
            let table = |salt| numbers(&[3, 3], DType::F32, salt);
            ops::rope(x, &table(8), &table(9))
        }),
        ("swiglu", vec![3, 6], vec![vec![3, 6]], Promoted, |x, w| {
            ops::swiglu(x, &w[0])
        }),
        ("soft_cap", vec![3, 6], vec![], Follow, |x, _| {
            ops::soft_cap(x, 2.0)
        }),
        ("geglu", vec![3, 6], vec![vec![3, 6]], Promoted, |x, w| {
            ops::geglu(x, &w[0], Gelu::Tanh)
        }),
        ("add", vec![3, 6], vec![vec![3, 6]], Promoted, |x, w| {
            ops::add(x, &w[0])
        }),
        ("sub", vec![3, 6], vec![vec![3, 6]], Promoted, |x, w| {
            ops::sub(x, &w[0])
        }),
        ("mul", vec![3, 6], vec![vec![3, 6]], Promoted, |x, w| {
            ops::mul(x, &w[0])
        }),
        ("div", vec![3, 6], vec![vec![3, 6]], Promoted, |x, w| {
            ops::div(x, &w[0])
        }),
    ]
}

#[test]
fn every_op_returns_what_the_policy_says_and_gradients_in_their_inputs_dtypes() {
    for (policy_name, lower, policy) in policies() {
        for (name, x_shape, weight_shapes, out, apply) in all() {
            let other = if lower == DType::F16 {
                DType::BF16
            } else {
                DType::F16
            };
            for x_dtype in [DType::F32, lower, other] {
                let what = format!("{name} of {x_dtype:?} under {policy_name} {lower:?}");
                let x = var(&x_shape, x_dtype, 1);
                let shapes = weight_shapes.iter().enumerate();
                let weights: Vec<Var> = shapes.map(|(i, s)| var(s, DType::F32, 2 + i)).collect();
                let y = autocast(policy.clone(), || apply(&x, &weights)).expect(&what);
                let wanted = match (out, policy_name) {
                    (Out::Lower, _) => lower,
                    (Out::F32 | Out::Promoted, _) | (Out::F32OnCuda, "cuda") => DType::F32,
                    (Out::Follow | Out::F32OnCuda, _) => x_dtype,
                };
                assert_eq!(y.dtype(), wanted, "{what}");

                let weighting = numbers(y.dims(), DType::F32, 5);
                let loss = (y.to_dtype(DType::F32).unwrap() * weighting).unwrap();
                let gradients = loss.sum_all().unwrap().backward().unwrap();
                for input in weights.iter().chain([&x]) {
                    let gradient = gradients.get(input).expect(&what);
                    assert_eq!(gradient.dtype(), input.dtype(), "{what}");
                    let gradient = elements(gradient);
                    assert!(gradient.iter().all(|g| g.is_finite()), "{what}");
                    assert!(gradient.iter().any(|g| *g != 0.0), "{what}");
                }
                let untracked =
                    tallow::no_grad(|| autocast(policy.clone(), || apply(&x, &weights)));
                let untracked = untracked.unwrap();
                assert!(!untracked.track_op(), "{what}");
                same(&untracked, &y);
            }
        }
    }
}

/// f64 is unchanged by a region.
#[test]
fn f64_is_left_alone() {
    for (_, _, policy) in policies() {
        for (name, x_shape, weight_shapes, _, apply) in all() {
            let x = numbers(&x_shape, DType::F64, 1);
            let shapes = weight_shapes.iter().enumerate();
            let weights: Vec<Var> = shapes.map(|(i, s)| var(s, DType::F64, 2 + i)).collect();
            if name == "rope" {
                continue; // its tables are f32 here
            }
            let inside = autocast(policy.clone(), || apply(&x, &weights)).unwrap();
            assert_eq!(inside.dtype(), DType::F64, "{name}");
            same(&inside, &apply(&x, &weights).unwrap());
        }
    }
}

/// Without a region, or where it is disabled, nothing is cast: f32 runs in f32, and mixed dtypes are refused, except
/// for a norm's f32 weight.
#[test]
fn outside_nothing_is_cast() {
    for (name, x_shape, weight_shapes, out, apply) in all() {
        let x = numbers(&x_shape, DType::F32, 1);
        let shapes = weight_shapes.iter().enumerate();
        let weights: Vec<Var> = shapes.map(|(i, s)| var(s, DType::F32, 2 + i)).collect();
        let outside = apply(&x, &weights).unwrap();
        assert_eq!(outside.dtype(), DType::F32, "{name}");
        let off = || autocast(Autocast::disabled(), || apply(&x, &weights));
        same(&off().unwrap(), &outside);
        let nested = autocast(Autocast::cuda(DType::BF16), off);
        same(&nested.unwrap(), &outside);

        let promotes = [
            "add",
            "add_scaled",
            "bce_with_logits",
            "div",
            "kl_div",
            "l1_loss",
            "mse_loss",
            "mul",
            "sub",
            "where_cond",
        ]
        .contains(&name);
        if weight_shapes.is_empty() || promotes {
            continue;
        }
        let half = x.to_dtype(DType::F16).unwrap();
        if ["rms_norm", "layer_norm"].contains(&name) {
            // Weights of norms may be f32, in which they compute.
            assert_eq!(apply(&half, &weights).unwrap().dtype(), DType::F16);
            continue;
        }
        let error = apply(&half, &weights).expect_err(name).to_string();
        assert!(error.contains("one dtype, f16"), "{out:?} {name}: {error}");
    }
}

/// The softmax inside attention is part of it, also in the reference: no policy gives f32 probabilities.
#[test]
fn the_reference_of_attention_is_one_op() {
    let [q, k, v] = [1, 2, 3].map(|salt| numbers(&[1, 2, 5, 8], DType::F32, salt));
    let half = [&q, &k, &v].map(|x| x.to_dtype(DType::BF16).unwrap());
    let by_hand = attention::reference::naive(&half[0], &half[1], &half[2], &causal()).unwrap();
    let inside = autocast(Autocast::cuda(DType::BF16), || {
        attention::reference::naive(&q, &k, &v, &causal())
    });
    same(&inside.unwrap(), &by_hand);
}
