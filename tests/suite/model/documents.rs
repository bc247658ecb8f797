//! Documents packed into sequences: the loss is the mean over the predictions of the separate documents.

use crate::check::refusal;
use crate::settings::{meta_of, with_weights};
use candle_core::{DType, Device, Tensor};
use rstest::rstest;
use tallow::attention::Algorithm;
use tallow::model::{TransformerConfig, TransformerLM};
use tallow::nn::{self, Checkpointing};

const SEPARATOR: u32 = 3;

fn model(attention: Algorithm, checkpointing: Checkpointing) -> TransformerLM {
    let config = TransformerConfig {
        vocab_size: 11,
        context_length: 90,
        d_model: 24,
        num_layers: 2,
        num_heads: 2,
        d_ff: 30,
        ..Default::default()
    };
    let weights = nn::seeded(4, DType::F64, &Device::Cpu);
    let meta = meta_of(&config, attention).with_checkpointing(checkpointing);
    with_weights(&meta, weights)
}

/// Returns token ids (2, 91) with documents of 1 to about 30 tokens, and two consecutive separators.
fn text() -> Vec<Vec<u32>> {
    let token = |i: usize| (i * i / 3 + i / 7) as u32 % 11;
    let mut text: Vec<Vec<u32>> = [5, 400]
        .map(|first| (first..first + 91).map(token).collect())
        .into();
    text[0][17..19].fill(SEPARATOR);
    text
}

fn tensor(rows: &[&[u32]]) -> Tensor {
    let shape = (rows.len(), rows[0].len());
    Tensor::from_vec(rows.concat(), shape, &Device::Cpu).unwrap()
}

#[rstest]
fn as_one_by_one(
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
    #[values(Checkpointing::None, Checkpointing::Sqrt)] checkpointing: Checkpointing,
    #[values(DType::U32, DType::I64)] dtype: DType,
) {
    let (model, text) = (model(attention, checkpointing), text());
    let (mut sum, mut count) = (0.0, 0);
    for row in &text {
        let mut rest = &row[..];
        while rest.len() > 1 {
            let end = rest.iter().position(|id| *id == SEPARATOR);
            let predicted = end.unwrap_or(rest.len() - 1); // the separator is predicted too
            if predicted > 0 {
                let (tokens, targets) = (&rest[..predicted], &rest[1..predicted + 1]);
                let loss = model.loss(&tensor(&[tokens]), &tensor(&[targets])).unwrap();
                sum += loss.to_scalar::<f64>().unwrap() * predicted as f64;
                count += predicted;
            }
            rest = &rest[(predicted + 1).min(rest.len())..];
        }
    }
    let cut = |first: usize| {
        let rows: Vec<&[u32]> = text.iter().map(|row| &row[first..first + 90]).collect();
        tensor(&rows).to_dtype(dtype).unwrap()
    };
    let loss = model
        .loss_of_documents(&cut(0), &cut(1), SEPARATOR, None)
        .unwrap();
    let (found, wanted) = (loss.to_scalar::<f64>().unwrap(), sum / count as f64);
    assert!(
        count > 140 && (found - wanted).abs() < 1e-12,
        "{count}: {found} {wanted}"
    );
    let gradients = tallow::backward(loss).unwrap();
    assert!(
        model
            .parameters()
            .iter()
            .all(|(_, parameter)| gradients.get(parameter).is_some())
    );
}

#[test]
fn what_is_refused() {
    let model = model(Algorithm::Flash, Checkpointing::None);
    let all = tensor(&[&[SEPARATOR; 4]]);
    refusal(
        model.loss_of_documents(&all, &all, SEPARATOR, None),
        &["ignore"],
    );
    let beyond = tensor(&[&[1, 2, 11, 4]]);
    refusal(
        model.loss_of_documents(&beyond, &beyond, SEPARATOR, None),
        &["11"],
    );
    let longer = tensor(&[&[1, 2, 5, 4, 4]]);
    model
        .loss_of_documents(&longer, &all, SEPARATOR, None)
        .unwrap_err();
    model
        .loss_of_documents(&all, &longer, SEPARATOR, None)
        .unwrap_err();
}

/// Masked targets are -100, as in PyTorch; the loss is the mean over the others.
#[test]
fn masked_targets() {
    let (model, text) = (model(Algorithm::Naive, Checkpointing::None), text());
    let (tokens, wanted) = (tensor(&[&text[0][..5]]), tensor(&[&text[0][1..6]]));
    let rows = wanted
        .to_dtype(DType::I64)
        .unwrap()
        .to_vec2::<i64>()
        .unwrap();
    let mut masked = rows[0].clone();
    masked[..3].fill(-100);
    let masked = Tensor::new(vec![masked], &Device::Cpu).unwrap();
    let context = nn::ForwardContext::default();
    let loss = model
        .loss_with(&tokens, &masked, &context, Some(-100))
        .unwrap();
    let logits = model.forward(&tokens).unwrap();
    let last = |x: &Tensor| x.narrow(1, 3, 2).unwrap();
    let wanted = tallow::ops::cross_entropy(&last(&logits), &last(&wanted)).unwrap();
    let [loss, wanted] = [loss, wanted].map(|x| x.to_scalar::<f64>().unwrap());
    assert!((loss - wanted).abs() < 1e-12, "{loss} {wanted}");
    refusal(model.loss(&tokens, &masked), &["id -100 at position 0"]);
}
