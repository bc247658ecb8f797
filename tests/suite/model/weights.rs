//! Trained, frozen and tied weights, with and without biases; and meta tensors, which can be neither trained nor saved.

use super::*;
use crate::settings::with_lr;
use candle_core::D;
use candle_nn::VarMap;
use tallow::compile::{Batch, PlanKind, Step, StepConfig, Target};
use tallow::graph;
use tallow::nn::{Embedding, Layer, LayerNorm, Linear, Mlp, RmsNorm};
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

fn names_of(parameters: Vec<(String, Var)>) -> Vec<String> {
    parameters.into_iter().map(|(name, _)| name).collect()
}

/// Frozen by name under any builder: the values and the storage are those of the builder.
#[test]
fn weights_are_frozen_by_name() {
    let map = VarMap::new();
    let vb = || VarBuilder::from_varmap(&map, DType::F32, &CPU);
    let whole = Mlp::new(4, 6, vb().pp("a")).unwrap();
    let frozen = nn::freeze(vb().pp("a"), |name| name.starts_with("a.w1."));
    let part = Mlp::new(4, 6, frozen).unwrap();
    assert_eq!(names_of(part.parameters()), ["w2.weight", "w2.bias"]);
    assert_eq!(part.parameters()[0].1.id(), whole.parameters()[2].1.id());
    for ((name, wanted), (_, got)) in whole.weights().iter().zip(part.weights()) {
        assert_eq!(bits(&got), bits(wanted), "{name}");
    }
    // A later change of the variable is seen: the storage is shared.
    let set = numbers(&[6, 4], DType::F32, 3);
    whole.parameters()[0].1.set(&set).unwrap();
    assert_eq!(bits(&part.weights()[0].1), bits(&set));
    // Of a file's builder the others become variables; a second pattern freezes more.
    let tensors = whole.weights().into_iter();
    let tensors = tensors.map(|(name, x)| (name, x.detach())).collect();
    let vb = VarBuilder::from_tensors(tensors, DType::F32, &CPU);
    let once = nn::freeze(vb, |name| name.ends_with("bias"));
    let layer = Mlp::new(4, 6, once.clone()).unwrap();
    assert_eq!(names_of(layer.parameters()), ["w1.weight", "w2.weight"]);
    let twice = Mlp::new(4, 6, nn::freeze(once, |name| name == "w1.weight")).unwrap();
    assert_eq!(names_of(twice.parameters()), ["w2.weight"]);
    // Meta weights too.
    let meta = nn::freeze(graph::weights(DType::F32), |name| name.starts_with("w1"));
    let meta = Mlp::new(4, 6, meta).unwrap();
    assert_eq!(names_of(meta.parameters()), ["w2.weight", "w2.bias"]);
    assert!(
        meta.weights()
            .iter()
            .all(|(_, weight)| graph::is_meta(weight))
    );
}

/// A layer of given tensors: variables are trained and tied, plain ones frozen; errors name the weight.
#[test]
fn layers_of_given_weights() {
    let first = Mlp::new(4, 6, seeded(DType::F64)).unwrap();
    let mut weights = first.weights();
    weights[1].1 = numbers(&[6], DType::F64, 2);
    let second = Mlp::new(4, 6, nn::from_weights(weights.clone())).unwrap();
    assert_eq!(
        names_of(second.parameters()),
        ["w1.weight", "w2.weight", "w2.bias"]
    );
    for ((_, given), (name, found)) in weights.iter().zip(second.weights()) {
        assert_eq!(given.id(), found.id(), "{name}");
    }
    let shape = Mlp::new(4, 5, nn::from_weights(weights.clone()));
    refusal(shape, &["w1.bias", "[5]", "[6]"]);
    weights.pop();
    let missing = Mlp::new(4, 6, nn::from_weights(weights));
    refusal(missing, &["w2.bias", "no such weight"]);
}

/// A model of which only the head and the last block are trained: eager steps and planned steps agree, nothing else
/// changes, and the plan needs less memory, with or without weights.
#[test]
fn a_model_is_trained_in_part() {
    let whole = mini_model(3);
    let is_frozen = |name: &str| !(name.starts_with("layers.1.") || name == "lm_head.weight");
    let start = || {
        let tensors = whole.weights().into_iter();
        let tensors = tensors.map(|(name, x)| (name, x.copy().unwrap())).collect();
        let vb = VarBuilder::from_tensors(tensors, DType::F32, &CPU);
        let model = TransformerLM::from_var_builder(&mini(), vb).unwrap();
        let model = model.freeze(is_frozen).unwrap();
        let optimizer = Optimizer::new(model.parameters(), with_lr(0.05)).unwrap();
        (model, optimizer)
    };
    let (tokens, targets) = (ids(29, 3, 16), ids(29, 3, 16));
    let (eager, mut optimizer) = start();
    assert_eq!(eager.parameters().len(), 10);
    let losses: Vec<f32> = (0..4)
        .map(|_| {
            let loss = eager.loss(&tokens, &targets).unwrap();
            let value = loss.to_scalar().unwrap();
            optimizer.step(&tallow::backward(loss).unwrap()).unwrap();
            value
        })
        .collect();
    let (planned, mut optimizer) = start();
    let mut step = Step::for_model(&planned, &optimizer, &StepConfig::default()).unwrap();
    for (i, wanted) in losses.iter().enumerate() {
        let loss = step.run(&mut optimizer, (&tokens, &targets)).unwrap();
        assert!((loss - wanted).abs() < 1e-5, "step {i}: {loss} {wanted}");
    }
    assert!(losses[3] < losses[0] - 0.5, "{losses:?}");
    for ((name, before), ((_, eager), (_, planned))) in whole
        .weights()
        .iter()
        .zip(eager.weights().iter().zip(planned.weights()))
    {
        let changed = bits(before) != bits(eager);
        assert_eq!(changed, !is_frozen(name), "{name}");
        close(name, &planned, eager, 1e-4);
    }
    // The plan of meta weights is that of the step, and smaller than the plan of the whole model.
    let batch = || Batch::from((&tokens, &targets));
    let config = StepConfig::default();
    let plan_of = |model: &TransformerLM| {
        let (plan, _) = Step::plan_for_model(Target::Cpu, model, &config, batch()).unwrap();
        [plan.arena_bytes(), plan.total_bytes()]
    };
    let arena = step.plan().unwrap().arena_bytes();
    let [part, all] = [plan_of(&planned), plan_of(&whole)];
    assert_eq!(part[0], arena);
    assert!(part[0] < all[0] && part[1] < all[1], "{part:?} {all:?}");
    let meta = nn::freeze(graph::weights(DType::F32), is_frozen);
    let meta = TransformerLM::from_var_builder(&mini(), meta).unwrap();
    assert_eq!(plan_of(&meta), part);
    let plan = Step::plan_for(
        Target::Cpu,
        PlanKind::TrainStep,
        &config,
        batch(),
        |inputs| meta.loss(&inputs.get("tokens")?, &inputs.get("targets")?),
    );
    assert_eq!(plan.unwrap().arena_bytes(), arena);
    // A model of which everything is frozen has nothing to train.
    let frozen = mini_model(3).freeze(|_| true).unwrap();
    refusal(
        Optimizer::new(frozen.parameters(), with_lr(0.1)),
        &["parameter"],
    );
}

/// Low-rank factors next to frozen maps: the gradients are those of the factors, and no other.
#[test]
fn low_rank_factors_are_trained_alone() {
    let vb = seeded(DType::F64);
    let frozen = nn::freeze(vb.pp("map"), |_| true);
    let map = Linear::new(6, 4, frozen).unwrap();
    let [a, b] = [("a", (2, 6)), ("b", (4, 2))].map(|(name, shape)| {
        let init = candle_nn::Init::Randn {
            mean: 0.0,
            stdev: 0.5,
        };
        nn::Parameter::new(shape, init, vb.pp(name)).unwrap()
    });
    let x = numbers(&[5, 6], DType::F64, 1);
    let narrow = ops::linear(&x, a.weight()).unwrap();
    let y = ops::add(
        &map.forward(&x).unwrap(),
        &ops::linear(&narrow, b.weight()).unwrap(),
    )
    .unwrap();
    let loss = ops::mean(&ops::mul(&y, &y).unwrap()).unwrap();
    let gradients = tallow::backward(loss).unwrap();
    assert!(gradients.get(map.weight()).is_none());
    let merged = b.weight().matmul(a.weight()).unwrap();
    let all = (map.weight() + merged).unwrap();
    let y = x.matmul(&all.t().unwrap()).unwrap();
    let d_all = (y.t().unwrap().matmul(&x).unwrap() * (2.0 / 20.0)).unwrap();
    let wanted = b.weight().t().unwrap().matmul(&d_all).unwrap();
    close("a", gradients.get(a.weight()).unwrap(), &wanted, 1e-13);
    let wanted = d_all.matmul(&a.weight().t().unwrap()).unwrap();
    close("b", gradients.get(b.weight()).unwrap(), &wanted, 1e-13);
}
