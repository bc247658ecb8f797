//! Trained, frozen and tied weights, with and without biases; and meta tensors, which can be neither trained nor saved.

use super::*;
use crate::settings::with_lr;
use candle_core::D;
use candle_nn::VarMap;
use tallow::graph;
use tallow::nn::{Embedding, Layer, LayerNorm, Linear, RmsNorm};
use tallow::optim::{AdamWConfig, Optimizer};

/// An embedding, a frozen linear layer with a bias, a norm without one, and a head that shares the embedding's table.
struct Net {
    table: Embedding,
    frozen: Linear,
    norm: LayerNorm,
    head: Linear,
}

impl Net {
    fn new(dtype: DType) -> Self {
        let vb = seeded(dtype);
        let table = Embedding::new(7, 4, vb.pp("table")).unwrap();
        let real = Linear::with_bias(4, 4, vb.pp("frozen")).unwrap();
        let bias = (real.bias().unwrap() + 0.5).unwrap();
        Self {
            frozen: Linear::from_weights(real.weight().detach(), Some(bias.detach())).unwrap(),
            norm: LayerNorm::without_bias(4, 1e-5, vb.pp("norm")).unwrap(),
            head: Linear::from_weights(table.weight().clone(), None).unwrap(),
            table,
        }
    }

    fn loss(&self, tokens: &Tensor) -> tallow::Result<Tensor> {
        let x = self.table.forward(tokens)?;
        let x = self.norm.forward(&self.frozen.forward(&x)?)?;
        ops::cross_entropy(&self.head.forward(&x)?, tokens)
    }
}

impl Layer for Net {
    fn visit(&self, path: &str, visit: &mut dyn FnMut(String, &Tensor)) {
        let layers: [(&str, &dyn Layer); 4] = [
            ("table", &self.table),
            ("frozen", &self.frozen),
            ("norm", &self.norm),
            ("head", &self.head),
        ];
        for (name, layer) in layers {
            layer.visit(&format!("{path}{name}"), visit);
        }
    }
}

#[test]
fn frozen_and_tied_weights_have_their_names() {
    let net = Net::new(DType::F32);
    let names = |weights: Vec<String>| weights.join(" ");
    let all = net.weights().into_iter().map(|(name, _)| name).collect();
    assert_eq!(
        names(all),
        "table.weight frozen.weight frozen.bias norm.weight head.weight"
    );
    let trained = net.parameters().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names(trained), "table.weight norm.weight");
}

/// Compares training in f64 with AdamW steps on the two variables alone, the tied one with the sum of both gradients.
#[test]
fn frozen_and_tied_weights_are_trained_as_they_are() {
    let net = Net::new(DType::F64);
    let tokens = Tensor::new(&[[1u32, 2, 6, 1]], &CPU).unwrap();
    let before: Vec<Tensor> = net
        .weights()
        .iter()
        .map(|(_, w)| w.copy().unwrap())
        .collect();
    let config = with_lr(0.1);
    let mut optimizer = Optimizer::new(net.parameters(), config).unwrap();
    // A twin with the same values in its own variables, computed by candle's ops.
    let twin: Vec<Var> = [0, 3].map(|i| Var::from_tensor(&before[i]).unwrap()).into();
    let twin_loss = || {
        let x = twin[0].index_select(&tokens.flatten_all()?, 0)?;
        let x = x.matmul(&before[1].t()?)?.broadcast_add(&before[2])?;
        let x = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
        let rstd = (x.sqr()?.mean_keepdim(D::Minus1)? + 1e-5)?
            .sqrt()?
            .recip()?;
        let x = x.broadcast_mul(&rstd)?.broadcast_mul(&twin[1])?;
        candle_nn::loss::cross_entropy(&x.matmul(&twin[0].t()?)?, &tokens.flatten_all()?)
    };
    let named = [
        ("table".to_string(), twin[0].clone()),
        ("norm".into(), twin[1].clone()),
    ];
    let mut by_hand = Optimizer::new(named, config).unwrap();
    for step in 0..5 {
        let loss = net.loss(&tokens).unwrap();
        let wanted = twin_loss().unwrap();
        close("loss", &loss, &wanted, 1e-12);
        optimizer.step(&loss.backward().unwrap()).unwrap();
        by_hand.step(&wanted.backward().unwrap()).unwrap();
        close("table", net.table.weight(), &twin[0], 1e-10);
        close("norm", net.norm.weight(), &twin[1], 1e-10);
        assert!(bits(net.table.weight()) != bits(&before[0]), "step {step}");
    }
    let after = net.weights();
    assert_eq!(bits(&after[4].1), bits(net.table.weight()));
    for i in [1, 2] {
        assert_eq!(bits(&after[i].1), bits(&before[i]), "{}", after[i].0);
    }
}

#[test]
fn a_linear_layer_with_a_bias() {
    let map = VarMap::new();
    let vb = VarBuilder::from_varmap(&map, DType::F64, &CPU);
    let layer = Linear::with_bias(3, 2, vb).unwrap();
    let parameters = layer.parameters();
    assert_eq!([&parameters[0].0, &parameters[1].0], ["weight", "bias"]);
    assert_eq!(elements(&parameters[1].1), [0.0; 2]);
    let bias = numbers(&[2], DType::F64, 2);
    parameters[1].1.set(&bias).unwrap();
    let x = numbers(&[4, 3], DType::F64, 3);
    let wanted = x.matmul(&layer.weight().t().unwrap()).unwrap();
    let wanted = wanted.broadcast_add(&bias).unwrap();
    close("y", &layer.forward(&x).unwrap(), &wanted, 1e-14);
}

#[test]
fn weights_of_other_shapes_are_refused() {
    let zeros = |dims: &[usize]| Tensor::zeros(dims, DType::F32, &CPU).unwrap();
    refusal(
        Linear::from_weights(zeros(&[3]), None),
        &["nn::Linear", "(out, in)", "[3]"],
    );
    let bias = Some(zeros(&[2]));
    refusal(
        Linear::from_weights(zeros(&[3, 2]), bias),
        &["bias (3,)", "[2]"],
    );
    refusal(
        Embedding::from_weight(zeros(&[3])),
        &["nn::Embedding", "(V, D)"],
    );
    refusal(
        RmsNorm::from_weight(zeros(&[3, 1]), 1e-5),
        &["nn::RmsNorm", "(D,)"],
    );
    let bias = Some(zeros(&[2]));
    refusal(
        LayerNorm::from_weights(zeros(&[3]), bias, 1e-5),
        &["nn::LayerNorm", "[2]"],
    );
    refusal(LayerNorm::from_weights(zeros(&[3]), None, 0.0), &["eps"]);
}

/// An optimizer and a file need elements; the error names the meta tensor.
#[test]
fn meta_weights_are_neither_trained_nor_saved() {
    let model = TransformerLM::from_var_builder(&mini(), graph::weights(DType::F32)).unwrap();
    let refused = Optimizer::new(model.parameters(), AdamWConfig::default());
    refusal(refused, &["token_embeddings.weight", "meta"]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("meta.safetensors");
    refusal(model.save(&path), &["weight", "meta", "nothing was saved"]);
    assert!(!path.exists());
}

/// 16 TiB as a meta tensor, without allocating them.
#[test]
fn a_meta_weight_is_of_any_size() {
    let (rows, cols) = (1 << 21, 1 << 21);
    let layer = Linear::new(cols, rows, graph::weights(DType::F32)).unwrap();
    assert_eq!(layer.weight().dims(), [rows, cols]);
    let x = graph::input("x", (1, cols), DType::F32).unwrap();
    let traced = graph::trace(graph::Target::Cpu, || layer.forward(&x)).unwrap();
    assert_eq!(traced.nodes().count(), 1);
    // A real tensor of this size is refused.
    refusal(Linear::new(cols, rows, seeded(DType::F32)), &["memory"]);
}
