//! Rotary positions, self-attention and the complete block, against plain formulas.

use super::*;
use crate::settings::causal;
use candle_core::{D, Module};
use rstest::rstest;
use tallow::attention::{KeyMask, Mask, ScoreBias};
use tallow::nn::{
    Architecture, Attention, AttentionLayerConfig, ForwardContext, Layer, RotaryEmbedding,
    TransformerBlock,
};
use tallow::no_grad;

const THETA: f64 = 100.0;

fn rotary(head_dim: usize, max_length: usize) -> RotaryEmbedding {
    RotaryEmbedding::new(THETA, head_dim, max_length, DType::F64, &CPU).unwrap()
}

/// Rotates `vector` to `position`, pair by pair, by the formula.
fn turned(vector: &[f64], position: usize) -> Vec<f64> {
    let width = vector.len() as f64;
    let pairs = vector.chunks_exact(2).enumerate();
    pairs
        .flat_map(|(i, pair)| {
            let angle = position as f64 * THETA.powf(-2.0 * i as f64 / width);
            let (sin, cos) = angle.sin_cos();
            [pair[0] * cos - pair[1] * sin, pair[0] * sin + pair[1] * cos]
        })
        .collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[rstest]
fn rotation_by_the_formula(#[values(2, 6, 10)] head_dim: usize, #[values(0, 4)] start: usize) {
    let x = numbers(&[2, 3, 5, head_dim], DType::F64, 1);
    let y = rotary(head_dim, 9).forward(&x, start).unwrap();
    assert_eq!(y.dims(), x.dims());
    let (x, y) = (elements(&x), elements(&y));
    for (row, (x, y)) in x.chunks(head_dim).zip(y.chunks(head_dim)).enumerate() {
        for (got, wanted) in y.iter().zip(turned(x, start + row % 5)) {
            assert!((got - wanted).abs() < 1e-14, "row {row}: {got} {wanted}");
        }
        // A rotation preserves the norm.
        assert!((dot(x, x) - dot(y, y)).abs() < 1e-13, "row {row}");
    }
}

/// The score of q at i and k at j depends on i - j alone.
#[test]
fn rotations_are_relative() {
    let tables = rotary(8, 40);
    let at = |vector: &Tensor, position| elements(&tables.forward(vector, position).unwrap());
    let (q, k) = (
        numbers(&[1, 8], DType::F64, 1),
        numbers(&[1, 8], DType::F64, 2),
    );
    let score = |i: usize, j: usize| dot(&at(&q, i), &at(&k, j));
    for distance in [0, 1, 7] {
        let wanted = score(distance, 0);
        for j in [1, 5, 30] {
            let got = score(j + distance, j);
            assert!(
                (got - wanted).abs() < 1e-13,
                "{distance} {j}: {got} {wanted}"
            );
        }
    }
    // It does depend on the distance, and on its sign.
    assert!((score(0, 0) - score(1, 0)).abs() > 1e-3);
    assert!((score(7, 0) - score(0, 7)).abs() > 1e-3);
    assert!((score(0, 0) - dot(&elements(&q), &elements(&k))).abs() < 1e-14);
}

/// Position 0 is not rotated, and the tables have the caller's dtype.
#[test]
fn the_first_position_does_not_turn() {
    for dtype in [DType::F32, DType::F64] {
        let tables = RotaryEmbedding::new(1e4, 6, 4, dtype, &CPU).unwrap();
        let x = numbers(&[2, 1, 6], dtype, 3);
        let y = tables.forward(&x, 0).unwrap();
        assert_eq!(y.dtype(), dtype);
        assert_eq!(bits(&y), bits(&x));
        assert_ne!(bits(&tables.forward(&x, 3).unwrap()), bits(&x));
    }
}

/// Computes softmax(scale q k^T under the mask) v of one layer by loops over numbers, for x (B, T, D), row by row.
fn attention_by_loops(x: &Tensor, weights: &[Tensor], heads: usize, turns: bool) -> Vec<f64> {
    let (batch, length, width) = x.dims3().unwrap();
    let dim = width / heads;
    let project = |weight: &Tensor, row: &[f64]| -> Vec<f64> {
        let weight = weight.to_vec2::<f64>().unwrap();
        weight.iter().map(|w| dot(w, row)).collect()
    };
    let mut out = Vec::new();
    for sequence in elements(x).chunks(length * width).take(batch) {
        let rows: Vec<&[f64]> = sequence.chunks(width).collect();
        let all = |weight: &Tensor| -> Vec<Vec<f64>> {
            rows.iter().map(|r| project(weight, r)).collect()
        };
        let (q, k, v) = (all(&weights[0]), all(&weights[1]), all(&weights[2]));
        for i in 0..length {
            let mut joined = Vec::new();
            for head in 0..heads {
                let part = head * dim..(head + 1) * dim;
                let place = |rows: &[Vec<f64>], at: usize| {
                    let row = &rows[at][part.clone()];
                    if turns { turned(row, at) } else { row.to_vec() }
                };
                let query = place(&q, i);
                let exp = |j| (dot(&query, &place(&k, j)) / (dim as f64).sqrt()).exp();
                let exp: Vec<f64> = (0..=i).map(exp).collect();
                let total: f64 = exp.iter().sum();
                for column in part.clone() {
                    joined.push((0..=i).map(|j| exp[j] / total * v[j][column]).sum());
                }
            }
            out.extend(project(&weights[3], &joined));
        }
    }
    out
}

fn values(layer: &impl Layer) -> Vec<Tensor> {
    let parameters = layer.parameters().into_iter();
    parameters.map(|(_, var)| var.as_tensor().clone()).collect()
}

#[rstest]
fn self_attention(
    #[values((1, 6), (2, 3), (3, 2))] heads: (usize, usize),
    #[values(1, 2, 7)] length: usize,
    #[values(true, false)] turns: bool,
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
) {
    let (heads, dim) = heads;
    if turns && dim % 2 == 1 {
        return; // rotation needs pairs
    }
    let tables = turns.then(|| rotary(dim, 7));
    let layer = Attention::new(&causal(6, heads), tables, seeded(DType::F64)).unwrap();
    let layer = layer.with_attention(attention);
    let x = numbers(&[2, length, 6], DType::F64, 6);
    let got = layer.forward(&x).unwrap();
    assert_eq!(got.dims(), x.dims());
    assert_eq!(bits(&x.apply(&layer).unwrap()), bits(&got));
    let wanted = attention_by_loops(&x, &values(&layer), heads, turns);
    for (got, wanted) in elements(&got).iter().zip(&wanted) {
        assert!((got - wanted).abs() < 1e-13, "{got} {wanted}");
    }
    assert_eq!(wanted.len(), x.elem_count());
}

#[test]
fn parts_are_called_as_in_a_checkpoint() {
    let names = |layer: &dyn Layer| -> Vec<String> {
        layer
            .parameters()
            .into_iter()
            .map(|(name, _)| name)
            .collect()
    };
    let attention = Attention::new(&causal(6, 3), None, seeded(DType::F64)).unwrap();
    let projections = ["q_proj", "k_proj", "v_proj", "output_proj"].map(|p| format!("{p}.weight"));
    assert_eq!(names(&attention), projections);
    let block = TransformerBlock::new(6, 3, 5, 1e-5, None, seeded(DType::F64)).unwrap();
    let mut wanted = vec!["ln1.weight".to_string()];
    wanted.extend(projections.map(|p| format!("attn.{p}")));
    wanted.extend(
        [
            "ln2.weight",
            "ffn.w1.weight",
            "ffn.w2.weight",
            "ffn.w3.weight",
        ]
        .map(String::from),
    );
    assert_eq!(names(&block), wanted);
}

/// x + attn(ln1(x)), then x + ffn(ln2(x)), with norms whose weights are not 1.
#[rstest]
fn a_block(#[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm) {
    let eps = 0.1;
    let block =
        TransformerBlock::new(6, 3, 5, eps, Some(rotary(2, 7)), seeded(DType::F64)).unwrap();
    let block = block.with_attention(attention);
    for (name, var) in block.parameters() {
        if name.starts_with("ln") {
            var.set(&numbers(&[6], DType::F64, name.len() as u64))
                .unwrap();
        }
    }
    let p = values(&block);
    let norm = |x: &Tensor, weight: &Tensor| {
        let root = (x.sqr()?.mean_keepdim(D::Minus1)? + eps)?.sqrt()?;
        x.broadcast_div(&root)?.broadcast_mul(weight)
    };
    let plain = |x: &Tensor| -> candle_core::Result<Tensor> {
        let attended = attention_by_loops(&norm(x, &p[0])?, &p[1..5], 3, true);
        let x = (x + Tensor::from_vec(attended, x.shape(), &CPU)?)?;
        let h = norm(&x, &p[5])?;
        let gated = (h.broadcast_matmul(&p[6].t()?)?.silu()? * h.broadcast_matmul(&p[8].t()?)?)?;
        x + gated.broadcast_matmul(&p[7].t()?)?
    };
    let x = numbers(&[2, 7, 6], DType::F64, 7);
    let got = block.forward(&x).unwrap();
    close("block", &got, &plain(&x).unwrap(), 1e-13);
    assert_eq!(bits(&x.apply(&block).unwrap()), bits(&got));
}

/// Gradients reach the block's input and every parameter. Under `no_grad` nothing is recorded, although x is a
/// variable.
#[rstest]
fn graphs_of_layers(
    #[values(DType::F32, DType::BF16)] dtype: DType,
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
) {
    let vb = seeded(dtype);
    let tables = RotaryEmbedding::new(1e4, 2, 7, dtype, &CPU).unwrap();
    let block = TransformerBlock::new(6, 3, 5, 1e-5, Some(tables), vb).unwrap();
    let block = block.with_attention(attention);
    let x = Var::from_tensor(&numbers(&[2, 7, 6], dtype, 8)).unwrap();
    let y = block.forward(&x).unwrap();
    let mut parameters = block.parameters();
    parameters.push(("x".into(), x.clone()));
    alive(&gradients_of(
        &y.sqr().unwrap().sum_all().unwrap(),
        parameters,
    ));
    let free = no_grad(|| block.forward(&x)).unwrap();
    assert!(!free.track_op());
    assert_eq!(bits(&free), bits(&y));
    let module = no_grad(|| Module::forward(&block, &x)).unwrap();
    assert!(!module.track_op());
}

/// Computes attention of two heads with projections `p` and added `terms` (B, 1, Tq, Tk) by candle's ops.
fn attention_by_candle(
    p: &[Tensor],
    [x, memory]: [&Tensor; 2],
    terms: &Tensor,
) -> candle_core::Result<Tensor> {
    let split = |x: &Tensor, weight: &Tensor| {
        let y = x.broadcast_matmul(&weight.t()?)?;
        let (batch, length, width) = y.dims3()?;
        let heads = y.reshape((batch, length, 2, width / 2))?;
        heads.transpose(1, 2)?.contiguous()
    };
    let (q, k, v) = (
        split(x, &p[0])?,
        split(memory, &p[1])?,
        split(memory, &p[2])?,
    );
    let scale = 1.0 / (q.dim(D::Minus1)? as f64).sqrt();
    let scores = (q.matmul(&k.t()?)? * scale)?.broadcast_add(terms)?;
    let out = candle_nn::ops::softmax(&scores, D::Minus1)?.matmul(&v)?;
    let out = out.transpose(1, 2)?.flatten_from(2)?;
    out.broadcast_matmul(&p[3].t()?)
}

/// Self-attention and cross-attention with a memory of another width, with any mask, padding, a trained score bias, and
/// values of another width: outputs and gradients.
#[rstest]
fn attention_with_masks_and_memories(
    #[values(Mask::Full, Mask::Causal, Mask::Window(2.try_into().unwrap()))] mask: Mask,
    #[values(None, Some((5, 4)))] memory: Option<(usize, usize)>,
    #[values(None, Some(5))] value_dim: Option<usize>,
    #[values(Algorithm::Naive, Algorithm::Flash)] algorithm: Algorithm,
) {
    let config = AttentionLayerConfig {
        d_model: 6,
        kv_dim: memory.map(|(_, width)| width),
        num_heads: 2,
        value_dim,
        mask,
        ..Default::default()
    };
    let layer = Attention::new(&config, None, seeded(DType::F64)).unwrap();
    let layer = layer.with_attention(algorithm);
    let variable =
        |dims: &[usize], salt| Var::from_tensor(&numbers(dims, DType::F64, salt)).unwrap();
    let x = variable(&[2, 4, 6], 1);
    let other = memory.map(|(length, width)| variable(&[2, length, width], 2));
    let keys = memory.map_or(4, |(length, _)| length);
    let bias = variable(&[4, keys], 3);
    let lengths = [keys, 2];
    let context = ForwardContext {
        key_mask: Some(KeyMask::of_lengths(&lengths, keys).unwrap()),
        bias: Some(ScoreBias::new(&bias).unwrap()),
        ..Default::default()
    };
    let got = match &other {
        Some(memory) => layer.cross(&x, memory, &context).unwrap(),
        None => layer.forward_with(&x, &context).unwrap(),
    };
    let mut hidden = Vec::new();
    for length in lengths {
        for query in 0..4 {
            let seen = mask.visible(query, 4, keys);
            let shows = |key: usize| seen.contains(&key) && key < length;
            hidden.extend((0..keys).map(|key| if shows(key) { 0.0 } else { -1e30 }));
        }
    }
    let hidden = Tensor::from_vec(hidden, (2, 1, 4, keys), &CPU).unwrap();
    let terms = hidden.broadcast_add(&bias).unwrap();
    let memory = other.as_ref().unwrap_or(&x);
    let wanted = attention_by_candle(&values(&layer), [&x, memory], &terms).unwrap();

    // A query of the second sequence sees no key if its window is in the padding: it has zeros, candle's has a mean.
    let rows = match mask {
        Mask::Window(_) => 3,
        _ => 4,
    };
    let [got, wanted] = [got, wanted].map(|y| y.narrow(1, 0, rows).unwrap());
    close("output", &got, &wanted, 1e-13);
    let upstream = numbers(got.dims(), DType::F64, 9);
    let mut variables = layer.parameters();
    variables.extend([("x".into(), x.clone()), ("bias".into(), bias)]);
    variables.extend(other.map(|memory| ("memory".into(), memory)));
    let gradients = |y: Tensor| {
        let loss = (y * &upstream).unwrap().sum_all().unwrap();
        gradients_of(&loss, variables.clone())
    };
    let (got, wanted) = (gradients(got), gradients(wanted));
    alive(&got);
    for ((name, got), (_, wanted)) in got.iter().zip(&wanted) {
        close(name, got, wanted, 1e-12);
    }
}

/// A block with a full mask is an encoder's: padding does not reach the other rows.
#[test]
fn a_block_of_an_encoder() {
    let config = AttentionLayerConfig {
        d_model: 6,
        num_heads: 3,
        ..Default::default()
    };
    let vb = seeded(DType::F64);
    let block =
        TransformerBlock::with_config(Architecture::Gpt2, &config, 5, 1e-5, None, vb).unwrap();
    let x = numbers(&[2, 5, 6], DType::F64, 3);
    let padding = ForwardContext::padded(KeyMask::of_lengths(&[5, 3], 5).unwrap());
    let y = block.forward_with(&x, &padding).unwrap();
    let second = |x: &Tensor| x.narrow(0, 1, 1).unwrap().narrow(1, 0, 3).unwrap();
    let alone = block.forward(&second(&x).contiguous().unwrap()).unwrap();
    close("without padding", &second(&y), &alone, 1e-14);
    // Every row depends on every other.
    let first = block.forward(&x).unwrap().narrow(1, 0, 1).unwrap();
    assert!(distance(&first, &y.narrow(1, 0, 1).unwrap()) > 1e-3);
}

#[test]
fn sequences_that_do_not_fit_the_layer() {
    let config = AttentionLayerConfig {
        d_model: 6,
        kv_dim: Some(4),
        num_heads: 2,
        ..Default::default()
    };
    let layer = Attention::new(&config, None, seeded(DType::F64)).unwrap();
    let (x, memory) = (
        numbers(&[2, 3, 6], DType::F64, 1),
        numbers(&[2, 5, 4], DType::F64, 2),
    );
    let none = ForwardContext::default();
    refusal(
        layer.forward(&x),
        &["nn::Attention", "width 6", "width 4", "cross"],
    );
    refusal(
        layer.cross(&x, &x, &none),
        &["linear", "(..., 4)", "[2, 3, 6]"],
    );
    refusal(
        layer.cross(&memory, &memory, &none),
        &["linear", "(..., 6)", "[2, 5, 4]"],
    );
    let one = memory.narrow(0, 0, 1).unwrap();
    refusal(
        layer.cross(&x, &one, &none),
        &["attention::naive", "[1, 2, 5, 3]"],
    );
    // A mask of the queries, not of the keys.
    let wrong = ForwardContext::padded(KeyMask::of_lengths(&[3, 2], 3).unwrap());
    refusal(
        layer.cross(&x, &memory, &wrong),
        &["key_mask [2, 3]", "[2, 5]"],
    );
}
