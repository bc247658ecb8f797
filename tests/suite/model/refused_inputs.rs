//! Tokens and tensors that a model or a layer refuses, and the errors.

use super::*;
use crate::settings::causal;
use rstest::rstest;
use tallow::nn::{
    Attention, Embedding, LayerNorm, Linear, RmsNorm, RotaryEmbedding, SwiGlu, TransformerBlock,
};

fn zeros(shape: &[usize], dtype: DType) -> Tensor {
    Tensor::zeros(shape, dtype, &CPU).unwrap()
}

#[rstest]
#[case::too_long(&[1, 17], &["T from 1 to 16", "got [1, 17]", "shorten the sequence", "context_length"])]
#[case::no_tokens(&[1, 0], &["T from 1 to 16", "got [1, 0]"])]
#[case::no_sequences(&[0, 4], &["B from 1", "got [0, 4]"])]
#[case::one_dimension(&[4], &["tokens (B, T)", "got [4]"])]
#[case::three_dimensions(&[2, 4, 1], &["tokens (B, T)", "got [2, 4, 1]"])]
#[case::scalar(&[], &["tokens (B, T)", "got []"])]
fn tokens_of_another_shape(#[case] shape: &[usize], #[case] parts: &[&str]) {
    let error = refusal(mini_model(0).forward(&zeros(shape, DType::U32)), parts);
    assert!(
        matches!(
            error,
            Error::Shape {
                op: "TransformerLM",
                ..
            }
        ),
        "{error:?}"
    );
}

#[rstest]
#[case(DType::F32, "f32")]
#[case(DType::U8, "u8")]
fn tokens_of_another_dtype(#[case] dtype: DType, #[case] got: &str) {
    let parts = ["embedding", "ids in u32 or i64", got, "to_dtype"];
    let error = refusal(mini_model(0).forward(&zeros(&[2, 4], dtype)), &parts);
    assert!(matches!(error, Error::DType { .. }), "{error:?}");
}

#[rstest]
#[case::first(0, 29)]
#[case::second_sequence(6, 29)]
#[case::last(7, u32::MAX)]
fn a_token_outside_the_vocabulary(#[case] position: usize, #[case] id: u32) {
    let mut tokens = vec![28u32; 8];
    tokens[position] = id;
    let tokens = Tensor::from_vec(tokens, (2, 4), &CPU).unwrap();
    let place = format!("id {id} at position {position} ");
    let parts = [place.as_str(), "vocabulary of 29", "from 0 to 28"];
    let error = refusal(mini_model(0).forward(&tokens), &parts);
    assert!(matches!(error, Error::TokenId { .. }), "{error:?}");
    // Also as targets.
    let model = mini_model(0);
    let logits = model.forward(&ids(29, 2, 4)).unwrap();
    refusal(ops::cross_entropy(&logits, &tokens), &parts);
}

#[test]
fn targets_of_another_shape_or_dtype() {
    let logits = mini_model(0).forward(&ids(29, 2, 4)).unwrap();
    let short = ops::cross_entropy(&logits, &zeros(&[2, 3], DType::U32));
    refusal(short, &["cross_entropy", "[2, 4, 29]", "[2, 3]"]);
    let wrong = ops::cross_entropy(&logits, &zeros(&[2, 4], DType::F32));
    refusal(wrong, &["cross_entropy", "u32", "f32"]);
}

/// Inputs of each layer with a wrong last dimension.
#[test]
fn widths_that_do_not_fit() {
    let vb = seeded(DType::F32);
    let x = zeros(&[2, 3, 7], DType::F32);
    let linear = Linear::new(6, 4, vb.pp("a")).unwrap();
    refusal(
        linear.forward(&x),
        &["linear", "(..., 6)", "x [2, 3, 7]", "weight [4, 6]"],
    );
    let rms_norm = RmsNorm::new(6, 1e-5, vb.pp("b")).unwrap();
    refusal(
        rms_norm.forward(&x),
        &["rms_norm", "[2, 3, 7]", "weight [6]"],
    );
    let layer_norm = LayerNorm::new(6, 1e-5, vb.pp("c")).unwrap();
    refusal(layer_norm.forward(&x), &["layer_norm", "[2, 3, 7]", "[6]"]);
    let swiglu = SwiGlu::new(6, 5, vb.pp("d")).unwrap();
    refusal(swiglu.forward(&x), &["linear", "(..., 6)", "[2, 3, 7]"]);
    let attention = Attention::new(&causal(6, 3), None, vb.pp("e")).unwrap();
    refusal(attention.forward(&x), &["linear", "(..., 6)", "[2, 3, 7]"]);
    let block = TransformerBlock::new(6, 3, 5, 1e-5, None, vb.pp("f")).unwrap();
    refusal(block.forward(&x), &["rms_norm", "[2, 3, 7]", "weight [6]"]);
    // Heads require a batch and a sequence dimension.
    let flat = zeros(&[3, 6], DType::F32);
    refusal(
        attention.forward(&flat),
        &["split_heads", "(B, T, D)", "[3, 6]"],
    );
    refusal(
        block.forward(&flat),
        &["split_heads", "(B, T, D)", "[3, 6]"],
    );
}

/// Element counts that overflow 64 bits, or exceed the memory.
#[test]
fn layers_that_nothing_can_hold() {
    let vb = || seeded(DType::F32);
    refusal(
        Linear::new(1 << 40, 1 << 40, vb()),
        &["a parameter", "can be addressed"],
    );
    refusal(
        Linear::new(usize::MAX, usize::MAX, vb()),
        &["a parameter", "can be addressed"],
    );
    refusal(
        Embedding::new(1 << 40, 1 << 24, vb()),
        &["a parameter", "can be addressed"],
    );
    let error = refusal(
        Embedding::new(1 << 30, 1 << 20, vb()),
        &["one tensor", "bytes"],
    );
    assert!(matches!(error, tallow::Error::OutOfMemory { .. }));
}

/// Without eps a row of zeros would be 0 / 0.
#[test]
fn norms_without_an_eps() {
    for eps in [0.0, 1e-50, -1e-5, f64::NAN, f64::INFINITY] {
        let vb = seeded(DType::F32);
        let parts = ["eps must be positive and finite", "0 / 0"];
        refusal(
            RmsNorm::new(6, eps, vb.pp("a")),
            &[&["RmsNorm"], &parts[..]].concat(),
        );
        refusal(
            LayerNorm::new(6, eps, vb.pp("b")),
            &[&["LayerNorm"], &parts[..]].concat(),
        );
        let block = TransformerBlock::new(6, 3, 5, eps, None, vb.pp("c"));
        refusal(block, &[&["RmsNorm"], &parts[..]].concat());
    }
}

#[test]
fn dtypes_that_do_not_mix() {
    let vb = seeded(DType::F32);
    let x = zeros(&[1, 3, 6], DType::F64);
    let parts = ["one dtype", "f64", "f32", "to_dtype"];
    let linear = Linear::new(6, 4, vb.pp("a")).unwrap();
    refusal(linear.forward(&x), &[&["linear"], &parts[..]].concat());
    let rms_norm = RmsNorm::new(6, 1e-5, vb.pp("b")).unwrap();
    refusal(rms_norm.forward(&x), &[&["rms_norm"], &parts[..]].concat());
    let layer_norm = LayerNorm::new(6, 1e-5, vb.pp("c")).unwrap();
    refusal(
        layer_norm.forward(&x),
        &[&["layer_norm"], &parts[..]].concat(),
    );
    let rotary = RotaryEmbedding::new(1e4, 6, 8, DType::F32, &CPU).unwrap();
    refusal(rotary.forward(&x, 0), &[&["rope"], &parts[..]].concat());
    let table = Embedding::new(6, 4, vb.pp("d")).unwrap();
    refusal(
        table.forward(&x),
        &["embedding", "ids in u32 or i64", "f64"],
    );
    refusal(
        table.forward(&Tensor::new(&[5u32, 6], &CPU).unwrap()),
        &["id 6 at position 1", "vocabulary of 6"],
    );
}

#[test]
fn heads_that_do_not_divide() {
    let attention = |heads| Attention::new(&causal(6, heads), None, seeded(DType::F32));
    for heads in [0, 4, 7] {
        let expected = format!("d_model must be divisible by num_heads {heads}");
        refusal(
            attention(heads),
            &["AttentionLayerConfig", &expected, "got 6"],
        );
        let block = TransformerBlock::new(6, heads, 5, 1e-5, None, seeded(DType::F32));
        refusal(block, &["AttentionLayerConfig", &expected]);
    }
    // The head dimension differs from that of the rotary tables.
    let rotary = RotaryEmbedding::new(1e4, 4, 8, DType::F32, &CPU).unwrap();
    let wrong = Attention::new(&causal(6, 3), Some(rotary), seeded(DType::F32));
    let x = zeros(&[1, 2, 6], DType::F32);
    refusal(wrong.and_then(|layer| layer.forward(&x)), &["rope", "Dh"]);
}

#[rstest]
#[case::odd(1e4, 5, 8, &["head_dim must be even and positive", "got 5"])]
#[case::zero(1e4, 0, 8, &["head_dim must be even and positive", "got 0"])]
#[case::no_positions(1e4, 6, 0, &["max_length must be positive", "got 0"])]
#[case::theta(-1e4, 6, 8, &["theta must be positive", "got -10000"])]
#[case::no_number(f64::NAN, 6, 8, &["theta must be positive", "got NaN"])]
fn rotations_that_cannot_be(
    #[case] theta: f64,
    #[case] head_dim: usize,
    #[case] max_length: usize,
    #[case] parts: &[&str],
) {
    let rotary = RotaryEmbedding::new(theta, head_dim, max_length, DType::F32, &CPU);
    refusal(rotary, &[&["RotaryEmbedding: "], parts].concat());
}

#[test]
fn positions_beyond_the_tables() {
    let rotary = RotaryEmbedding::new(1e4, 6, 8, DType::F32, &CPU).unwrap();
    let x = zeros(&[2, 3, 6], DType::F32);
    rotary.forward(&x, 5).unwrap();
    for start in [6, 9, usize::MAX] {
        let from = format!("from position {start}");
        let parts = ["RotaryEmbedding", "start + T up to 8", "[2, 3, 6]", &from];
        refusal(rotary.forward(&x, start), &parts);
    }
    refusal(
        rotary.forward(&zeros(&[6], DType::F32), 0),
        &["RotaryEmbedding", "[6]"],
    );
    refusal(
        rotary.forward(&zeros(&[2, 3, 4], DType::F32), 0),
        &["rope", "[2, 3, 4]"],
    );
}
