//! Weights outside layers: variables of every builder.

use super::*;
use crate::check::refusal;
use candle_nn::{Init, VarMap, var_builder::SimpleBackend};
use std::sync::{Arc, Mutex};
use tallow::graph::{self, Source, Target};
use tallow::nn::{Embedding, Layer, Linear, Parameter};
use tallow::optim::{AdamWConfig, Optimizer, parameters_of};

const NORMAL: Init = Init::Randn {
    mean: 0.0,
    stdev: 1.0,
};

/// A class token before a sequence, and a linear layer with a scale.
struct Model {
    class_token: Parameter,
    scale: Parameter,
    map: Linear,
}

impl Model {
    fn new(vb: VarBuilder<'_>) -> Self {
        Self {
            class_token: Parameter::new((1, 3), NORMAL, vb.pp("class_token")).unwrap(),
            scale: Parameter::new((), Init::Const(2.0), vb.pp("a.scale")).unwrap(),
            map: Linear::new(3, 2, vb.pp("map")).unwrap(),
        }
    }

    fn loss(&self, x: &Tensor) -> tallow::Result<Tensor> {
        let x = ops::concat(&[self.class_token.weight(), x], 0)?;
        let y = ops::mul(&self.map.forward(&x)?, self.scale.weight())?;
        ops::mean(&ops::mul(&y, &y)?)
    }
}

impl Layer for Model {
    fn visit(&self, path: &str, visit: &mut dyn FnMut(String, &Tensor)) {
        self.class_token
            .visit(&nn::join(path, "class_token"), visit);
        self.scale.visit(&nn::join(path, "a.scale"), visit);
        self.map.visit(&nn::join(path, "map"), visit);
    }
}

const NAMES: [&str; 3] = ["class_token", "a.scale", "map.weight"];

fn names(parameters: &[(String, Var)]) -> Vec<&str> {
    parameters.iter().map(|(name, _)| name.as_str()).collect()
}

fn train(model: &Model, parameters: Vec<(String, Var)>) {
    let before: Vec<Vec<u64>> = parameters.iter().map(|(_, var)| bits(var)).collect();
    let x = numbers(&[4, 3], DType::F64, 1);
    let gradients = tallow::backward(model.loss(&x).unwrap()).unwrap();
    let mut optimizer = Optimizer::new(parameters.clone(), AdamWConfig::default()).unwrap();
    optimizer.step(&gradients).unwrap();
    for ((name, var), before) in parameters.iter().zip(before) {
        assert_ne!(bits(var), before, "{name}");
    }
}

#[test]
fn trained_with_a_seed() {
    let model = Model::new(nn::seeded(3, DType::F64, &CPU));
    assert_eq!(names(&model.parameters()), NAMES);
    let of_layer = Embedding::new(1, 3, nn::seeded(3, DType::F64, &CPU)).unwrap();
    assert_ne!(
        bits(of_layer.weight()),
        bits(model.class_token.weight()),
        "another name"
    );
    let again = Model::new(nn::seeded(3, DType::F64, &CPU));
    for ((name, a), (_, b)) in model.parameters().iter().zip(again.parameters()) {
        assert_eq!(bits(a), bits(&b), "{name}");
        assert_ne!(a.id(), b.id());
    }
    train(&model, model.parameters());
}

#[test]
fn trained_in_a_var_map() {
    let map = VarMap::new();
    let model = Model::new(VarBuilder::from_varmap(&map, DType::F64, &CPU));
    let sorted = parameters_of(&map);
    assert_eq!(names(&sorted), ["a.scale", "class_token", "map.weight"]);
    for (name, var) in model.parameters() {
        let (_, own) = sorted.iter().find(|(other, _)| *other == name).unwrap();
        assert_eq!(own.id(), var.id(), "{name}");
    }
    train(&model, sorted);
}

#[test]
fn traced_by_name() {
    let model = Model::new(graph::weights(DType::F32));
    assert_eq!(names(&model.parameters()), NAMES);
    let x = graph::input("x", (4, 3), DType::F32).unwrap();
    let traced = graph::trace(Target::Cpu, || model.loss(&x)).unwrap();
    for name in NAMES {
        let is_it = |value: &&graph::Value| value.source == Source::Weight(name.into());
        let value = traced.values().iter().find(is_it);
        assert!(value.unwrap_or_else(|| panic!("{name}")).tracked);
    }
}

#[test]
fn a_name_is_needed() {
    refusal(
        Parameter::new(3, NORMAL, nn::seeded(0, DType::F32, &CPU)),
        &["nn::Parameter", "pp("],
    );
    let alone = Parameter::new(3, NORMAL, nn::seeded(0, DType::F32, &CPU).pp("head.scale"));
    assert_eq!(names(&alone.unwrap().parameters()), ["scale"]);
}

/// The tensors of a seeded builder's `get_with_hints` are variables, like those of a `VarMap` or a builder of meta
/// tensors.
#[test]
fn a_seeded_builder_gives_variables() {
    for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
        for init in [NORMAL, Init::Const(1.0)] {
            let vb = nn::seeded(0, dtype, &CPU);
            assert!(
                vb.get_with_hints((2, 3), "weight", init)
                    .unwrap()
                    .is_variable()
            );
        }
    }
}

/// A backend that returns a seeded builder's tensors and keeps them.
struct Kept(VarBuilder<'static>, Arc<Mutex<Vec<Tensor>>>);

impl SimpleBackend for Kept {
    fn get(
        &self,
        shape: candle_core::Shape,
        name: &str,
        init: Init,
        _: DType,
        _: &Device,
    ) -> candle_core::Result<Tensor> {
        let weight = self.0.get_with_hints(shape, name, init)?;
        self.1.lock().unwrap().push(weight.clone());
        Ok(weight)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> candle_core::Result<Tensor> {
        self.0.get_unchecked(name)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.0.contains_tensor(name)
    }
}

/// Layers share the builder's variables, so that no weight exists twice.
#[test]
fn layers_share_the_variables_of_a_seeded_builder() {
    let kept = Arc::new(Mutex::new(Vec::new()));
    let backend = Kept(nn::seeded(0, DType::F32, &CPU), kept.clone());
    let vb = VarBuilder::from_backend(Box::new(backend), DType::F32, CPU);
    let model = TransformerLM::from_var_builder(&mini(), vb).unwrap();
    let kept = kept.lock().unwrap();
    for (name, var) in model.parameters() {
        assert!(kept.iter().any(|weight| weight.id() == var.id()), "{name}");
    }
}
