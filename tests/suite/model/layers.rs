//! Single layers on candle tensors, against the same formula in candle's own ops.

use super::*;
use crate::check::refusal;
use candle_core::{D, Module};
use candle_nn::VarMap;
use rstest::rstest;
use tallow::nn::{Activation, Embedding, GeGlu, Layer, LayerNorm, Linear, Mlp, RmsNorm, SwiGlu};
use tallow::ops::{self, Gelu};

fn names(layer: &impl Layer) -> Vec<String> {
    layer
        .parameters()
        .into_iter()
        .map(|(name, _)| name)
        .collect()
}

/// Sets every parameter to other values, so that a norm's weight of 1 hides nothing.
fn scramble(layer: &impl Layer) {
    for (salt, (_, var)) in layer.parameters().into_iter().enumerate() {
        var.set(&numbers(var.dims(), var.dtype(), 50 + salt as u64))
            .unwrap();
    }
}

/// Checks the output and every gradient (also of `x`) against `wanted`, and that candle's `Module` is the same
/// function.
fn agrees<L: Layer + Module>(
    layer: &L,
    x: &Tensor,
    wanted: impl Fn(&Tensor, &[Tensor]) -> candle_core::Result<Tensor>,
) {
    scramble(layer);
    let x = Var::from_tensor(x).unwrap();
    let parameters = [vec![("x".to_string(), x.clone())], layer.parameters()].concat();
    let values: Vec<Tensor> = layer
        .parameters()
        .iter()
        .map(|(_, v)| v.as_tensor().clone())
        .collect();
    let got = x.apply(layer).unwrap();
    assert_eq!(bits(&got), bits(&layer.forward(&x).unwrap()));
    let wanted = wanted(&x, &values).unwrap();
    close("output", &got, &wanted, 1e-13);

    let upstream = numbers(got.dims(), DType::F64, 9);
    let gradients = |y: Tensor| {
        gradients_of(
            &(y * &upstream).unwrap().sum_all().unwrap(),
            parameters.clone(),
        )
    };
    let (got, wanted) = (gradients(got), gradients(wanted));
    alive(&got);
    for ((name, got), (_, wanted)) in got.iter().zip(&wanted) {
        close(name, got, wanted, 1e-12);
    }
}

fn linear(x: &Tensor, weight: &Tensor) -> candle_core::Result<Tensor> {
    x.broadcast_matmul(&weight.t()?)
}

#[rstest]
fn a_linear_layer(#[values(&[2, 5, 7], &[1, 1, 7], &[3, 2, 4, 7])] shape: &[usize]) {
    let layer = Linear::new(7, 4, seeded(DType::F64)).unwrap();
    assert_eq!(names(&layer), ["weight"]);
    agrees(&layer, &numbers(shape, DType::F64, 1), |x, p| {
        linear(x, &p[0])
    });
    assert_eq!(
        layer.forward(&numbers(&[7], DType::F64, 1)).unwrap().dims(),
        [4]
    );
}

#[rstest]
fn an_rms_norm(#[values(&[2, 5, 7], &[1, 7], &[7])] shape: &[usize]) {
    let eps = 0.25; // large enough to matter
    let layer = RmsNorm::new(7, eps, seeded(DType::F64)).unwrap();
    assert_eq!(names(&layer), ["weight"]);
    assert_eq!(elements(layer.weight()), [1.0; 7]);
    agrees(&layer, &numbers(shape, DType::F64, 2), |x, p| {
        let root = (x.sqr()?.mean_keepdim(D::Minus1)? + eps)?.sqrt()?;
        x.broadcast_div(&root)?.broadcast_mul(&p[0])
    });
}

#[rstest]
fn a_layer_norm(#[values(&[2, 5, 7], &[1, 7], &[7])] shape: &[usize]) {
    let eps = 0.25;
    let layer = LayerNorm::new(7, eps, seeded(DType::F64)).unwrap();
    assert_eq!(names(&layer), ["weight", "bias"]);
    assert_eq!(elements(layer.weight()), [1.0; 7]);
    assert_eq!(elements(layer.bias().unwrap()), [0.0; 7]);
    agrees(&layer, &numbers(shape, DType::F64, 2), |x, p| {
        let centred = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
        let root = (centred.sqr()?.mean_keepdim(D::Minus1)? + eps)?.sqrt()?;
        centred
            .broadcast_div(&root)?
            .broadcast_mul(&p[0])?
            .broadcast_add(&p[1])
    });
}

#[rstest]
fn a_feed_forward_network(#[values(&[2, 5, 6], &[1, 6])] shape: &[usize]) {
    let layer = SwiGlu::new(6, 11, seeded(DType::F64)).unwrap();
    assert_eq!(names(&layer), ["w1.weight", "w2.weight", "w3.weight"]);
    agrees(&layer, &numbers(shape, DType::F64, 3), |x, p| {
        let gated = (linear(x, &p[0])?.silu()? * linear(x, &p[2])?)?;
        linear(&gated, &p[1])
    });

    let layer = GeGlu::new(6, 11, seeded(DType::F64)).unwrap();
    assert_eq!(names(&layer), ["w1.weight", "w2.weight", "w3.weight"]);
    agrees(&layer, &numbers(shape, DType::F64, 3), |x, p| {
        let gelu = ops::reference::gelu(&linear(x, &p[0])?, Gelu::Tanh).unwrap();
        let gated = (gelu * linear(x, &p[2])?)?;
        linear(&gated, &p[1])
    });
}

#[rstest]
#[case(Activation::Relu, |x: &Tensor| x.relu())]
#[case(Activation::Silu, |x: &Tensor| x.silu())]
#[case(Activation::Tanh, |x: &Tensor| x.tanh())]
#[case(Activation::Sigmoid, |x: &Tensor| (x.neg()?.exp()? + 1.0)?.recip())]
#[case(Activation::Gelu(Gelu::Erf), |x: &Tensor| Ok(ops::reference::gelu(x, Gelu::Erf)?))]
#[case(Activation::default(), |x: &Tensor| Ok(ops::reference::gelu(x, Gelu::Tanh)?))]
fn a_feed_forward_network_of_any_activation(
    #[case] activation: Activation,
    #[case] wanted: fn(&Tensor) -> candle_core::Result<Tensor>,
) {
    let layer = Mlp::new(6, 11, seeded(DType::F64)).unwrap();
    let layer = layer.with_activation(activation);
    assert_eq!(
        names(&layer),
        ["w1.weight", "w1.bias", "w2.weight", "w2.bias"]
    );
    agrees(&layer, &numbers(&[2, 5, 6], DType::F64, 3), |x, p| {
        let hidden = linear(x, &p[0])?.broadcast_add(&p[1])?;
        linear(&wanted(&hidden)?, &p[2])?.broadcast_add(&p[3])
    });
}

/// Layers of candle_nn are converted: the weights are shared, and variables stay variables.
#[test]
fn layers_of_candle_nn() {
    let map = VarMap::new();
    let vb = VarBuilder::from_varmap(&map, DType::F64, &CPU);
    let x = numbers(&[4, 6], DType::F64, 3);
    let converted = |candles: &dyn Module, ours: &dyn Module, names: &[&str], layer: &dyn Layer| {
        let (wanted, got) = (candles.forward(&x).unwrap(), ours.forward(&x).unwrap());
        close("y", &got, &wanted, 1e-6); // candle's eps is f32
        let data = map.data().lock().unwrap();
        let parameters = layer.parameters();
        assert_eq!(parameters.len(), names.len());
        for ((_, var), name) in parameters.iter().zip(names) {
            assert_eq!(var.id(), data[*name].id(), "{name}");
        }
    };
    let candles = candle_nn::linear(6, 3, vb.pp("a")).unwrap();
    let ours = Linear::try_from(candles.clone()).unwrap();
    converted(&candles, &ours, &["a.weight", "a.bias"], &ours);
    let candles = candle_nn::layer_norm_no_bias(6, 1e-5, vb.pp("b")).unwrap();
    let ours = LayerNorm::try_from(candles.clone()).unwrap();
    converted(&candles, &ours, &["b.weight"], &ours);
    let candles = candle_nn::layer_norm(6, 1e-5, vb.pp("c")).unwrap();
    let ours = LayerNorm::try_from(candles.clone()).unwrap();
    let slowly = x.t().unwrap().contiguous().unwrap().t().unwrap(); // candle's fused norm knows no f64
    close(
        "y",
        &ours.forward(&slowly).unwrap(),
        &candles.forward(&slowly).unwrap(),
        1e-12,
    );
    let rms = candle_nn::rms_norm(6, 1e-5, vb.pp("d")).unwrap();
    let ours = RmsNorm::try_from(rms.clone()).unwrap();
    let wanted = rms.forward_diff(&x).unwrap();
    close("y", &ours.forward(&x).unwrap(), &wanted, 1e-12);
    assert_eq!(ours.parameters().len(), 1);
    let candles = candle_nn::embedding(7, 3, vb.pp("e")).unwrap();
    let ours = Embedding::try_from(candles.clone()).unwrap();
    let ids = Tensor::new(&[3u32, 6], &CPU).unwrap();
    assert_eq!(
        bits(&ours.forward(&ids).unwrap()),
        bits(&candles.forward(&ids).unwrap())
    );
    assert_eq!(ours.parameters().len(), 1);

    // Plain tensors stay frozen; what no layer of ours computes is refused.
    let zeros = |n: usize| Tensor::zeros(n, DType::F32, &CPU).unwrap();
    let plain = candle_nn::Linear::new(zeros(6).reshape((2, 3)).unwrap(), None);
    assert!(Linear::try_from(plain).unwrap().parameters().is_empty());
    refusal(
        Linear::try_from(candle_nn::Linear::new(zeros(6), None)),
        &["nn::Linear", "(out, in)", "[6]"],
    );
    refusal(
        LayerNorm::try_from(rms.into_inner()),
        &["remove_mean", "RmsNorm"],
    );
}

#[test]
fn an_embedding() {
    let layer = Embedding::new(11, 3, seeded(DType::F64)).unwrap();
    assert_eq!(names(&layer), ["weight"]);
    let table = layer.weight().to_vec2::<f64>().unwrap();
    let tokens = Tensor::new(&[[10u32, 0], [4, 4]], &CPU).unwrap();
    let rows = layer.forward(&tokens).unwrap();
    assert_eq!(rows.dims(), [2, 2, 3]);
    assert_eq!(
        elements(&rows),
        [10, 0, 4, 4].map(|i| table[i].clone()).concat()
    );
    assert_eq!(bits(&tokens.apply(&layer).unwrap()), bits(&rows));
    // Tokens may have any shape; each gives one vector.
    let one = Tensor::new(7u32, &CPU).unwrap();
    assert_eq!(elements(&layer.forward(&one).unwrap()), table[7]);

    let upstream = numbers(&[2, 2, 3], DType::F64, 4);
    let loss = (rows * &upstream).unwrap().sum_all().unwrap();
    let (_, gradient) = gradients_of(&loss, layer.parameters()).remove(0);
    let (gradient, upstream) = (gradient.to_vec2::<f64>().unwrap(), elements(&upstream));
    for (token, row) in gradient.iter().enumerate() {
        let wanted: Vec<f64> = match token {
            10 => upstream[..3].to_vec(),
            0 => upstream[3..6].to_vec(),
            4 => (6..9).map(|i| upstream[i] + upstream[i + 3]).collect(),
            _ => vec![0.0; 3],
        };
        assert_eq!(row, &wanted, "{token}");
    }
}

#[test]
fn strided_input() {
    let vb = seeded(DType::F32);
    let view = numbers(&[5, 7, 3], DType::F32, 5).transpose(1, 2).unwrap(); // (5, 3, 7)
    assert!(!view.is_contiguous());
    let copy = view.contiguous().unwrap();
    let layers: [Box<dyn Module>; 4] = [
        Box::new(Linear::new(7, 4, vb.pp("a")).unwrap()),
        Box::new(RmsNorm::new(7, 1e-5, vb.pp("b")).unwrap()),
        Box::new(LayerNorm::new(7, 1e-5, vb.pp("c")).unwrap()),
        Box::new(SwiGlu::new(7, 4, vb.pp("d")).unwrap()),
    ];
    for layer in layers {
        let got = layer.forward(&view).unwrap();
        assert!(got.is_contiguous());
        assert_eq!(bits(&got), bits(&layer.forward(&copy).unwrap()));
    }
}

/// Inside candle's `Sequential`, on a `VarMap`, with candle's own ops and loss, every variable has a gradient.
#[test]
fn among_candles_own() {
    let map = VarMap::new();
    let vb = VarBuilder::from_varmap(&map, DType::F32, &CPU);
    let network = candle_nn::seq()
        .add(Embedding::new(11, 6, vb.pp("table")).unwrap())
        .add(LayerNorm::new(6, 1e-5, vb.pp("first")).unwrap())
        .add(SwiGlu::new(6, 9, vb.pp("gate")).unwrap())
        .add(candle_nn::Activation::Relu)
        .add(RmsNorm::new(6, 1e-5, vb.pp("second")).unwrap())
        .add(Linear::new(6, 11, vb.pp("head")).unwrap());
    let tokens = Tensor::new(&[1u32, 5, 9, 10], &CPU).unwrap();
    let logits = tokens.apply(&network).unwrap();
    let loss = candle_nn::loss::cross_entropy(&logits, &tokens).unwrap();
    let variables = tallow::optim::parameters_of(&map);
    let gradients = gradients_of(&loss, variables);
    assert_eq!(gradients.len(), 8);
    alive(&gradients);
}

/// An error of this crate keeps its text through candle's `apply`.
#[test]
fn a_refusal_through_candle() {
    let layer = Linear::new(6, 4, seeded(DType::F32)).unwrap();
    let x = numbers(&[2, 5], DType::F32, 0);
    let own = layer.forward(&x).unwrap_err().to_string();
    refusal(x.apply(&layer), &[&own]);
    assert!(own.contains("(..., 6)"), "{own}");
}
