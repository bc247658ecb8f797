//! Constructors of a [`Case`] for every op, with sizes chosen by the test.

use super::case::{Case, Input, cast, normal};
use super::compare::magnitude;
use candle_core::{D, DType, Device, Tensor};
use std::num::NonZeroUsize;
use tallow::Result;
use tallow::attention::{self, AttentionConfig, Mask};
use tallow::ops::{
    self, BceWeights, CrossEntropyConfig, Dropout, DropoutKey, Gelu, KlTarget, Reduction,
    RotaryPairs,
};

pub const MASKS: [Mask; 4] = [
    Mask::Full,
    Mask::Causal,
    Mask::CausalEnd,
    Mask::Window(NonZeroUsize::new(3).unwrap()),
];
pub const EPS: f64 = 1e-5;
pub const IGNORE: u32 = u32::MAX;

fn join(leading: &[usize], last: &[usize]) -> Vec<usize> {
    [leading, last].concat()
}

fn positive(dims: &[usize], seed: u64) -> Tensor {
    let x = normal(dims, seed).tanh().unwrap().affine(0.3, 1.0).unwrap();
    cast(&cast(&x, DType::F32), DType::F64)
}

pub fn ids(dims: &[usize], classes: usize, seed: u64) -> Tensor {
    let values = normal(dims, seed).flatten_all().unwrap();
    let values = values.to_vec1::<f64>().unwrap();
    // Concentrated at low ids, so that some repeat and some never occur.
    let ids = values
        .iter()
        .map(|x| (x.abs() * 0.3 * classes as f64) as u32);
    let ids: Vec<u32> = ids.map(|id| id.min(classes as u32 - 1)).collect();
    Tensor::from_vec(ids, dims, &Device::Cpu).unwrap()
}

/// Elements keep away from 0, where the slope is discontinuous.
pub fn relu(dims: &[usize], seed: u64) -> Case {
    let x = normal(dims, seed);
    let x = (&x + (x.sign().unwrap() * 0.125).unwrap()).unwrap();
    let x = cast(&cast(&x, DType::F32), DType::F64);
    Case::new("relu", vec![Input::new("x", x)], |x| ops::relu(&x[0]))
}

pub fn dropout(dims: &[usize], probability: f64, seed: u64) -> Case {
    let key = DropoutKey::new(seed, 7).unwrap().at(3);
    let inputs = vec![Input::new("x", normal(dims, seed))];
    Case::new("dropout", inputs, move |x| {
        let key = key.clone();
        ops::dropout(&x[0], &Dropout { probability, key })
    })
}

pub fn swiglu(dims: &[usize], seed: u64) -> Case {
    let inputs = vec![
        Input::new("gate", (normal(dims, seed) * 3.0).unwrap()),
        Input::new("up", normal(dims, seed + 1)),
    ];
    Case::new("swiglu", inputs, |x| ops::swiglu(&x[0], &x[1]))
}

pub fn geglu(form: Gelu, dims: &[usize], seed: u64) -> Case {
    let Case { inputs, .. } = swiglu(dims, seed);
    Case::new("geglu", inputs, move |x| ops::geglu(&x[0], &x[1], form))
}

/// Inputs within the cap and far beyond it.
pub fn soft_cap(dims: &[usize], cap: f64, seed: u64) -> Case {
    let inputs = vec![Input::new("x", (normal(dims, seed) * 3.0).unwrap())];
    Case::new("soft_cap", inputs, move |x| ops::soft_cap(&x[0], cap))
}

type Activation = fn(&Tensor) -> Result<Tensor>;

/// Smooth activations of one input.
pub const ACTIVATIONS: [(&str, Activation); 6] = [
    ("tanh", ops::tanh),
    ("sigmoid", ops::sigmoid),
    ("log_sigmoid", ops::log_sigmoid),
    ("silu", ops::silu),
    ("gelu", |x| ops::gelu(x, Gelu::Erf)),
    ("gelu_tanh", |x| ops::gelu(x, Gelu::Tanh)),
];

/// Returns a case for each activation, with inputs from its center to its tails.
pub fn activations(dims: &[usize], seed: u64) -> Vec<Case> {
    let x = (normal(dims, seed) * 2.5).unwrap();
    let all = ACTIVATIONS.into_iter();
    all.map(|(name, apply)| {
        let inputs = vec![Input::new("x", x.clone())];
        Case::new(name, inputs, move |x| apply(&x[0])).rounded_to(DType::F32)
    })
    .collect()
}

/// Roots, absolute values, bounds and scaling. Elements keep away from 0 and from the bounds, where slopes are
/// discontinuous.
pub fn maps(dims: &[usize], seed: u64) -> Vec<Case> {
    let x = (normal(dims, seed) * 8.0).unwrap().round().unwrap();
    let x = x.affine(0.125, 0.0625).unwrap(); // exact in every dtype
    let all: [(&str, Activation); 4] = [
        ("sqrt", |x| ops::sqrt(&ops::abs(x)?)),
        ("abs", ops::abs),
        ("clamp", |x| ops::clamp(x, -0.5, 1.0)),
        ("affine", |x| ops::affine(x, -1.5, 0.3)),
    ];
    all.into_iter()
        .map(|(name, apply)| {
            let inputs = vec![Input::new("x", x.clone())];
            Case::new(name, inputs, move |x| apply(&x[0]))
        })
        .collect()
}

type Reduce = fn(&Tensor, Vec<usize>) -> Result<Tensor>;

/// Reductions of dimensions, removed or kept.
pub const REDUCTIONS: [(&str, Reduce); 10] = [
    ("sum_over", |x, over| ops::sum_over(x, over)),
    ("sum_keepdim", |x, over| ops::sum_keepdim(x, over)),
    ("mean_over", |x, over| ops::mean_over(x, over)),
    ("mean_keepdim", |x, over| ops::mean_keepdim(x, over)),
    ("max_over", |x, over| ops::max_over(x, over)),
    ("min_keepdim", |x, over| ops::min_keepdim(x, over)),
    ("logsumexp", |x, over| ops::logsumexp(x, over)),
    ("logsumexp_keepdim", |x, over| {
        ops::logsumexp_keepdim(x, over)
    }),
    ("var", |x, over| ops::var(x, over, 1)),
    ("var_keepdim", |x, over| ops::var_keepdim(x, over, 0)),
];

pub fn reductions(dims: &[usize], over: &[usize], seed: u64) -> Vec<Case> {
    let all = REDUCTIONS.into_iter();
    all.map(|(name, apply)| {
        let (inputs, over) = (vec![Input::new("x", normal(dims, seed))], over.to_vec());
        let name = format!("{name} {over:?} of {dims:?}");
        Case::new(name, inputs, move |x| apply(&x[0], over.clone()))
    })
    .collect()
}

/// Returns a mask of these dimensions, of about a half.
pub fn mask(dims: &[usize], seed: u64) -> Tensor {
    normal(dims, seed).gt(0.0).unwrap()
}

/// Selections by masks and by indices, along every dimension of x (a, b, c).
pub fn selections([a, b, c]: [usize; 3], seed: u64) -> Vec<Case> {
    let dims = [a, b, c];
    let x = || Input::new("x", normal(&dims, seed));
    let other = |dims: &[usize]| Input::new("other", normal(dims, seed + 1));
    let (full, rows) = (mask(&dims, seed + 2), mask(&[b, 1], seed + 3));
    let here = |mask: &Tensor, x: &Tensor| mask.to_device(x.device());
    let of_rows = rows.clone();
    // Distinct numbers, so that none overtakes another in differences.
    let spread = (0..a * b * c).map(|i| (i * 7919 % (a * b * c)) as f64 / 8.0);
    let spread = Tensor::from_iter(spread, &Device::Cpu).unwrap();
    let spread = Input::new("x", spread.reshape(&dims).unwrap());
    let mut cases = vec![
        Case::new("where_cond", vec![x(), other(&dims)], move |x| {
            ops::where_cond(&here(&full, &x[0])?, &x[0], &x[1])
        }),
        Case::new(
            "where_cond of broadcasts",
            vec![x(), other(&[c])],
            move |x| ops::where_cond(&here(&of_rows, &x[0])?, &x[1], &x[0]),
        ),
        Case::new("masked_fill", vec![x()], move |x| {
            ops::masked_fill(&x[0], &here(&rows, &x[0])?, -3.5)
        }),
        Case::new("topk", vec![spread], move |x| {
            Ok(ops::topk(&x[0], c.div_ceil(2))?.0)
        }),
        Case::new("stack", vec![x(), other(&dims)], |x| {
            ops::stack(&[&x[0], &x[1]], 1)
        }),
    ];
    for (dim, n) in dims.into_iter().enumerate() {
        let mut some = dims;
        some[dim] = n + 2; // more indices than elements: some repeat
        let ids = ids(&some, n, seed + 4);
        let index = ids.clone();
        cases.push(Case::new(format!("gather {dim}"), vec![x()], move |x| {
            ops::gather(&x[0], dim, &index)
        }));
        let inputs = vec![x(), other(&some)];
        cases.push(Case::new(format!("scatter_add {dim}"), inputs, move |x| {
            ops::scatter_add(&x[0], dim, &ids, &x[1])
        }));
        let ids = self::ids(&[n + 2], n, seed + 5);
        let rows = ids.clone();
        cases.push(Case::new(
            format!("index_select {dim}"),
            vec![x()],
            move |x| ops::index_select(&x[0], dim, &rows),
        ));
        let inputs = vec![x(), other(&some)];
        cases.push(Case::new(format!("index_add {dim}"), inputs, move |x| {
            ops::index_add(&x[0], dim, &ids, &x[1])
        }));
    }
    cases
}

pub fn add_scaled(dims: &[usize], other: &[usize], scale: f64, seed: u64) -> Case {
    let inputs = vec![
        Input::new("a", normal(dims, seed)),
        Input::new("b", normal(other, seed + 1)),
    ];
    Case::new("add_scaled", inputs, move |x| {
        ops::add_scaled(&x[0], &x[1], scale)
    })
}

/// Concatenates three tensors with these lengths along `dim`.
pub fn concat(dims: &[usize], dim: usize, lengths: [usize; 3], seed: u64) -> Case {
    let input = |i: usize| {
        let mut dims = dims.to_vec();
        dims[dim] = lengths[i];
        Input::new(["a", "b", "c"][i], normal(&dims, seed + i as u64))
    };
    let inputs = vec![input(0), input(1), input(2)];
    Case::new("concat", inputs, move |x| {
        ops::concat(&[&x[0], &x[1], &x[2]], dim)
    })
}

/// Copies a column-major matrix.
pub fn contiguous(rows: usize, cols: usize, seed: u64) -> Case {
    let inputs = vec![Input::new("x", normal(&[rows, cols], seed))];
    Case::new("contiguous", inputs, |x| ops::contiguous(&x[0].t()?))
}

pub fn repeated_heads(dims: &[usize], times: usize, seed: u64) -> Case {
    let inputs = vec![Input::new("x", normal(dims, seed))];
    Case::new("repeat_heads", inputs, move |x| {
        ops::repeat_heads(&x[0], times)
    })
}

/// Returns the largest |dy w rstd|: backward of a norm subtracts its mean and its projection on x from these terms.
fn norm_terms(x: &Tensor, weight: &Tensor, dy: &Tensor) -> f64 {
    let mean_square = x.sqr().unwrap().mean_keepdim(D::Minus1).unwrap();
    let rstd = (mean_square + EPS)
        .unwrap()
        .sqrt()
        .unwrap()
        .recip()
        .unwrap();
    let terms = dy
        .broadcast_mul(weight)
        .unwrap()
        .broadcast_mul(&rstd)
        .unwrap();
    magnitude(&terms).max
}

pub fn rms_norm(leading: &[usize], width: usize, seed: u64) -> Case {
    let inputs = vec![
        Input::new("x", normal(&join(leading, &[width]), seed)),
        Input::new("weight", positive(&[width], seed + 1)),
    ];
    let case = Case::new("rms_norm", inputs, |x| ops::rms_norm(&x[0], &x[1], EPS));
    let (x, weight) = (case.inputs[0].value.clone(), case.inputs[1].value.clone());
    let terms = move |_: &Tensor, dy: &Tensor| norm_terms(&x, &weight, dy);
    Case {
        terms: Some(Box::new(terms)),
        ..case
    }
}

pub fn offset_rms_norm(leading: &[usize], width: usize, seed: u64) -> Case {
    let Case { inputs, .. } = rms_norm(leading, width, seed);
    let (x, weight) = (inputs[0].value.clone(), (&inputs[1].value + 1.0).unwrap());
    let terms = move |_: &Tensor, dy: &Tensor| norm_terms(&x, &weight, dy);
    Case {
        terms: Some(Box::new(terms)),
        ..Case::new("offset_rms_norm", inputs, |x| {
            ops::offset_rms_norm(&x[0], &x[1], EPS)
        })
    }
}

pub fn layer_norm(leading: &[usize], width: usize, seed: u64) -> Case {
    let inputs = vec![
        Input::new("x", (normal(&join(leading, &[width]), seed) + 0.5).unwrap()),
        Input::new("weight", positive(&[width], seed + 1)),
        Input::new("bias", normal(&[width], seed + 2)),
    ];
    let case = Case::new("layer_norm", inputs, |x| {
        ops::layer_norm(&x[0], &x[1], &x[2], EPS)
    });
    let (x, weight) = (&case.inputs[0].value, case.inputs[1].value.clone());
    let centred = x
        .broadcast_sub(&x.mean_keepdim(D::Minus1).unwrap())
        .unwrap();
    let terms = move |_: &Tensor, dy: &Tensor| norm_terms(&centred, &weight, dy);
    Case {
        terms: Some(Box::new(terms)),
        ..case
    }
}

/// `std` is the standard deviation of the scores before the scale.
pub fn softmax(
    leading: &[usize],
    (queries, keys): (usize, usize),
    (scale, std): (f64, f64),
    mask: Mask,
    seed: u64,
) -> Case {
    let x = (normal(&join(leading, &[queries, keys]), seed) * std).unwrap();
    let x = cast(&cast(&x, DType::F32), DType::F64);
    let largest_score = magnitude(&x).max * scale.abs();
    let name = format!("softmax {mask:?} {queries}x{keys} scale {scale}");
    let case = Case::new(name, vec![Input::new("x", x)], move |x| {
        ops::softmax(&x[0], scale, mask)
    });
    let terms = move |p: &Tensor, dp: &Tensor| magnitude(&(p * dp).unwrap()).max * scale.abs();
    Case {
        terms: Some(Box::new(terms)),
        largest_score,
        ..case
    }
}

/// Returns (cos, sin) of shape (T, Dh/2) in f64.
pub fn angles(length: usize, head_dim: usize) -> (Tensor, Tensor) {
    let angles: Vec<f64> = (0..length)
        .flat_map(|t| (0..head_dim / 2).map(move |i| (t, i)))
        .map(|(t, i)| t as f64 * 1e4f64.powf(-2.0 * i as f64 / head_dim as f64))
        .collect();
    let angles = Tensor::from_vec(angles, (length, head_dim / 2), &Device::Cpu).unwrap();
    (angles.cos().unwrap(), angles.sin().unwrap())
}

pub fn rope(leading: &[usize], length: usize, head_dim: usize, seed: u64) -> Case {
    let inputs = rotated(leading, length, head_dim, seed);
    Case::new("rope", inputs, |x| ops::rope(&x[0], &x[1], &x[2])).rounded_to(DType::F32)
}

pub fn rope_by_halves(leading: &[usize], length: usize, head_dim: usize, seed: u64) -> Case {
    let inputs = rotated(leading, length, head_dim, seed);
    let apply = |x: &[Tensor]| ops::rope_with(&x[0], &x[1], &x[2], RotaryPairs::Halves);
    Case::new("rope", inputs, apply).rounded_to(DType::F32)
}

fn rotated(leading: &[usize], length: usize, head_dim: usize, seed: u64) -> Vec<Input> {
    let (cos, sin) = angles(length, head_dim);
    vec![
        Input::new("x", normal(&join(leading, &[length, head_dim]), seed)),
        Input::constant("cos", cos),
        Input::constant("sin", sin),
    ]
}

pub fn linear(leading: &[usize], depth: usize, out: usize, seed: u64) -> Case {
    let inputs = vec![
        Input::new("x", normal(&join(leading, &[depth]), seed)),
        Input::new("weight", normal(&[out, depth], seed + 1)),
    ];
    Case::new("linear", inputs, |x| ops::linear(&x[0], &x[1]))
}

pub fn linear_bias(leading: &[usize], depth: usize, out: usize, seed: u64) -> Case {
    let inputs = vec![
        Input::new("x", normal(&join(leading, &[depth]), seed)),
        Input::new("weight", normal(&[out, depth], seed + 1)),
        Input::new("bias", normal(&[out], seed + 2)),
    ];
    Case::new("linear_bias", inputs, |x| {
        ops::linear_bias(&x[0], &x[1], &x[2])
    })
}

pub fn swiglu_linear(leading: &[usize], depth: usize, out: usize, seed: u64) -> Case {
    let inputs = vec![
        Input::new("x", normal(&join(leading, &[depth]), seed)),
        Input::new("w1", normal(&[out, depth], seed + 1)),
        Input::new("w3", normal(&[out, depth], seed + 2)),
    ];
    Case::new("swiglu_linear", inputs, |x| {
        ops::swiglu_linear(&x[0], &x[1], &x[2])
    })
}

pub fn geglu_linear(leading: &[usize], depth: usize, out: usize, seed: u64) -> Case {
    let Case { inputs, .. } = swiglu_linear(leading, depth, out, seed);
    Case::new("geglu_linear", inputs, |x| {
        ops::geglu_linear(&x[0], &x[1], &x[2], Gelu::Tanh)
    })
}

pub fn matmul(leading: &[usize], [m, k, n]: [usize; 3], seed: u64) -> Case {
    let inputs = vec![
        Input::new("a", normal(&join(leading, &[m, k]), seed)),
        Input::new("b", normal(&join(leading, &[k, n]), seed + 1)),
    ];
    Case::new("matmul", inputs, |x| ops::matmul(&x[0], &x[1]))
}

pub fn matmul_transposed(leading: &[usize], [m, k, n]: [usize; 3], seed: u64) -> Case {
    let inputs = vec![
        Input::new("a", normal(&join(leading, &[m, k]), seed)),
        Input::new("b", normal(&join(leading, &[n, k]), seed + 1)),
    ];
    Case::new("matmul_transposed", inputs, |x| {
        ops::matmul_transposed(&x[0], &x[1])
    })
}

pub fn embedding(tokens: &[usize], vocab: usize, width: usize, seed: u64) -> Case {
    let tokens = ids(tokens, vocab, seed);
    let table = normal(&[vocab, width], seed + 1);
    Case::new("embedding", vec![Input::new("table", table)], move |x| {
        ops::embedding(&tokens, &x[0])
    })
}

pub fn split_heads([batch, length, heads, head_dim]: [usize; 4], seed: u64) -> Case {
    let x = normal(&[batch, length, heads * head_dim], seed);
    Case::new("split_heads", vec![Input::new("x", x)], move |x| {
        ops::split_heads(&x[0], heads)
    })
}

pub fn merge_heads([batch, length, heads, head_dim]: [usize; 4], seed: u64) -> Case {
    let x = normal(&[batch, heads, length, head_dim], seed);
    Case::new("merge_heads", vec![Input::new("x", x)], |x| {
        ops::merge_heads(&x[0])
    })
}

/// If `ignoring`, every third target is ignored, but never the first.
pub fn cross_entropy(
    leading: &[usize],
    classes: usize,
    std: f64,
    ignoring: bool,
    seed: u64,
) -> Case {
    let logits = (normal(&join(leading, &[classes]), seed) * std).unwrap();
    let logits = cast(&cast(&logits, DType::F32), DType::F64);
    let mut targets = ids(leading, classes, seed + 1)
        .flatten_all()
        .unwrap()
        .to_vec1()
        .unwrap();
    if ignoring {
        targets
            .iter_mut()
            .skip(1)
            .step_by(3)
            .for_each(|target| *target = IGNORE);
    }
    let counted = targets.iter().filter(|target| **target != IGNORE).count();
    let targets = Tensor::from_vec(targets, leading, &Device::Cpu).unwrap();
    let largest_score = magnitude(&logits).max;
    let name = if ignoring {
        "cross_entropy_ignoring"
    } else {
        "cross_entropy"
    };
    let case = Case::new(name, vec![Input::new("logits", logits)], move |x| {
        if ignoring {
            ops::cross_entropy_ignoring(&x[0], &targets, IGNORE.into())
        } else {
            ops::cross_entropy(&x[0], &targets)
        }
    });
    // The gradient at the target is (p - 1) / n.
    let terms = move |_: &Tensor, d_loss: &Tensor| magnitude(d_loss).max / counted as f64;
    Case {
        terms: Some(Box::new(terms)),
        largest_score,
        ..case
    }
}

/// Cross-entropy with options, of logits and with a head. A third of the targets is ignored where any is.
pub fn cross_entropy_options(rows: usize, classes: usize, seed: u64) -> Vec<Case> {
    let logits = (normal(&[rows, classes], seed) * 2.0).unwrap();
    let targets = ids(&[rows], classes, seed + 1);
    let mut some: Vec<u32> = targets.to_vec1().unwrap();
    some.iter_mut().skip(1).step_by(3).for_each(|x| *x = IGNORE);
    let some = Tensor::new(some, &Device::Cpu).unwrap();
    let weights = positive(&[classes], seed + 2);
    let ignore_index = Some(i64::from(IGNORE));
    let plain = CrossEntropyConfig::default;
    let configs = [
        (
            "smoothing",
            &targets,
            CrossEntropyConfig {
                label_smoothing: 0.2,
                ..plain()
            },
        ),
        (
            "z-loss",
            &targets,
            CrossEntropyConfig {
                z_loss: 0.03,
                ..plain()
            },
        ),
        (
            "sum",
            &some,
            CrossEntropyConfig {
                reduction: Reduction::Sum,
                label_smoothing: 0.2,
                z_loss: 0.03,
                ignore_index,
                ..plain()
            },
        ),
        (
            "losses",
            &some,
            CrossEntropyConfig {
                reduction: Reduction::None,
                label_smoothing: 0.2,
                z_loss: 0.03,
                ignore_index,
                ..plain()
            },
        ),
        (
            "weights",
            &some,
            CrossEntropyConfig {
                class_weights: Some(weights.clone()),
                ignore_index,
                ..plain()
            },
        ),
        (
            "all",
            &some,
            CrossEntropyConfig {
                reduction: Reduction::None,
                class_weights: Some(weights),
                label_smoothing: 0.2,
                z_loss: 0.03,
                ignore_index,
            },
        ),
    ];
    let here = |config: &CrossEntropyConfig, x: &Tensor| -> Result<CrossEntropyConfig> {
        let weights = config
            .class_weights
            .as_ref()
            .map(|w| w.to_device(x.device()));
        let class_weights = weights.transpose()?;
        Ok(CrossEntropyConfig {
            class_weights,
            ..config.clone()
        })
    };
    let mut cases = Vec::new();
    for (name, targets, config) in configs {
        let (of_logits, of_head) = (targets.clone(), targets.clone());
        let given = config.clone();
        let inputs = vec![Input::new("logits", logits.clone())];
        cases.push(Case::new(
            format!("cross_entropy {name}"),
            inputs,
            move |x| ops::cross_entropy_with(&x[0], &of_logits, &here(&given, &x[0])?),
        ));
        let Case { inputs, .. } = linear(&[rows], 5, classes, seed + 3);
        cases.push(Case::new(
            format!("linear_cross_entropy {name}"),
            inputs,
            move |x| ops::linear_cross_entropy_with(&x[0], &x[1], &of_head, &here(&config, &x[0])?),
        ));
    }
    let config = CrossEntropyConfig {
        label_smoothing: 0.2,
        z_loss: 0.03,
        ..plain()
    };
    let inputs = vec![
        Input::new("logits", logits),
        Input::new("targets", positive(&[rows, classes], seed + 4)),
    ];
    cases.push(Case::new(
        "cross_entropy of probabilities",
        inputs,
        move |x| ops::cross_entropy_with(&x[0], &x[1], &config),
    ));
    cases
}

/// Losses of predictions and targets of one shape. Their differences keep away from 0.
pub fn losses(dims: &[usize], seed: u64) -> Vec<Case> {
    let x = normal(dims, seed);
    let far = (&x + (normal(dims, seed + 1).sign().unwrap() * 0.5).unwrap()).unwrap();
    let inputs = |target: &Tensor| {
        vec![
            Input::new("x", x.clone()),
            Input::new("target", target.clone()),
        ]
    };
    let share = (positive(dims, seed + 2) * 0.5).unwrap();
    let (weight, pos_weight) = (
        positive(&dims[1..], seed + 3),
        positive(&dims[1..], seed + 4),
    );
    vec![
        Case::new("mse_loss", inputs(&far), |x| {
            ops::mse_loss(&x[0], &x[1], Reduction::Mean)
        }),
        Case::new("l1_loss", inputs(&far), |x| {
            ops::l1_loss(&x[0], &x[1], Reduction::None)
        }),
        Case::new("bce_with_logits", inputs(&share), |x| {
            ops::bce_with_logits(&x[0], &x[1], BceWeights::default(), Reduction::Mean)
        }),
        Case::new("bce_with_logits of weights", inputs(&share), move |x| {
            let cast = |w: &Tensor| w.to_device(x[0].device());
            let (weight, pos_weight) = (cast(&weight)?, cast(&pos_weight)?);
            let weights = BceWeights {
                weight: Some(&weight),
                pos_weight: Some(&pos_weight),
            };
            ops::bce_with_logits(&x[0], &x[1], weights, Reduction::None)
        }),
        Case::new("kl_div", inputs(&share), |x| {
            ops::kl_div(&x[0], &x[1], KlTarget::Probabilities, Reduction::Sum)
        }),
        Case::new("kl_div of logarithms", inputs(&far), |x| {
            ops::kl_div(&x[0], &x[1], KlTarget::Logarithms, Reduction::None)
        }),
    ]
}

/// Repeats each head of k or v (..., Hkv, Tk, Dh) to match `heads` of q: (..., H, Tk, Dh).
pub fn repeat_heads(x: &Tensor, heads: usize) -> Tensor {
    let heads_at = x.rank() - 3;
    if heads == 0 {
        return x.narrow(heads_at, 0, 0).unwrap();
    }
    let group = heads / x.dims()[heads_at];
    let of = |head| x.narrow(heads_at, head / group, 1).unwrap();
    let repeated: Vec<Tensor> = (0..heads).map(of).collect();
    Tensor::cat(&repeated, heads_at).unwrap()
}

pub fn attention(
    leading: &[usize],
    sizes: (usize, usize),
    head_dim: usize,
    how: (Option<f64>, Mask),
    seed: u64,
) -> Case {
    attend(leading, leading, sizes, (head_dim, head_dim), how, seed)
}

/// Grouped heads: heads of q share heads of k and v.
pub fn grouped_attention(
    batch: &[usize],
    (heads, kv_heads): (usize, usize),
    sizes: (usize, usize),
    dims: (usize, usize),
    how: (Option<f64>, Mask),
    seed: u64,
) -> Case {
    let (q, kv) = (join(batch, &[heads]), join(batch, &[kv_heads]));
    let mut case = attend(&q, &kv, sizes, dims, how, seed);
    case.name += &format!(", {heads} heads with {kv_heads}");
    case
}

#[cfg(feature = "cuda")]
pub fn grouped_flash(
    batch: &[usize],
    heads: (usize, usize),
    sizes: (usize, usize),
    head_dim: usize,
    mask: Mask,
    seed: u64,
) -> Case {
    let naive = grouped_attention(
        batch,
        heads,
        sizes,
        (head_dim, head_dim),
        (None, mask),
        seed,
    );
    let config = crate::settings::with_mask(mask);
    Case {
        name: format!("flash {}", naive.name),
        apply: Box::new(move |x| attention::flash(&x[0], &x[1], &x[2], &config)),
        ..naive
    }
}

fn attend(
    leading: &[usize],
    kv_leading: &[usize],
    (queries, keys): (usize, usize),
    (head_dim, value_dim): (usize, usize),
    (scale, mask): (Option<f64>, Mask),
    seed: u64,
) -> Case {
    let q = normal(&join(leading, &[queries, head_dim]), seed);
    let k = normal(&join(kv_leading, &[keys, head_dim]), seed + 1);
    let v = normal(&join(kv_leading, &[keys, value_dim]), seed + 2);
    let config = AttentionConfig {
        mask,
        scale,
        ..Default::default()
    };
    let met = match leading.last() {
        Some(heads) if leading != kv_leading => repeat_heads(&k, *heads),
        _ => k.clone(),
    };
    // candle's matmul supports up to four dimensions.
    let matrices: usize = leading.iter().product();
    let flat = |x: &Tensor, rows| x.reshape((matrices, rows, head_dim)).unwrap();
    let met = flat(&met, keys).t().unwrap();
    let scores = flat(&q, queries).matmul(&met).unwrap();
    let largest_score = magnitude(&scores).max * config.scale_for(head_dim).abs();
    let name = format!("attention {mask:?} {queries}x{keys} of {head_dim}");
    let inputs = vec![Input::new("q", q), Input::new("k", k), Input::new("v", v)];
    let case = Case::new(name, inputs, move |x| {
        attention::naive(&x[0], &x[1], &x[2], &config)
    });
    Case {
        largest_score,
        ..case
    }
}
