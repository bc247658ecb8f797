//! `nn::save` and `nn::load`: the weights of a layer that its user wrote.

use super::*;
use rstest::rstest;
use std::collections::HashMap;
use std::path::PathBuf;
use tallow::compile::{Inputs, Step, StepConfig};
use tallow::nn::{Embedding, Layer, Linear};
use tallow::optim::{AdamWConfig, Optimizer};
use tempfile::{TempDir, tempdir};

/// An embedding, a frozen linear layer, and a head tied to the embedding.
struct Net {
    table: Embedding,
    frozen: Linear,
    head: Linear,
}

impl Layer for Net {
    fn visit(&self, path: &str, visit: &mut dyn FnMut(String, &Tensor)) {
        self.table.visit(&nn::join(path, "table"), visit);
        self.frozen.visit(&nn::join(path, "frozen"), visit);
        self.head.visit(&nn::join(path, "head"), visit);
    }
}

impl Net {
    fn new(seed: u64, dtype: DType) -> Self {
        let vb = nn::seeded(seed, dtype, &CPU);
        let table = Embedding::new(7, 4, vb.pp("table")).unwrap();
        let frozen = Linear::new(4, 4, vb.pp("frozen")).unwrap();
        let frozen = Linear::from_weights(frozen.weight().copy().unwrap().detach(), None).unwrap();
        let head = Linear::from_weights(table.weight().clone(), None).unwrap();
        Self {
            table,
            frozen,
            head,
        }
    }

    fn loss(&self, inputs: &Inputs) -> tallow::Result<Tensor> {
        let hidden = self
            .frozen
            .forward(&self.table.forward(&inputs.get("tokens")?)?)?;
        ops::cross_entropy(&self.head.forward(&hidden)?, &inputs.get("targets")?)
    }

    fn bits(&self) -> Vec<Vec<u64>> {
        self.weights().iter().map(|(_, w)| bits(w)).collect()
    }
}

fn place() -> (TempDir, PathBuf) {
    let folder = tempdir().unwrap();
    let path = folder.path().join("net.safetensors");
    (folder, path)
}

/// A saved net with changed weights, as other programs write them.
fn changed(change: impl FnOnce(&mut HashMap<String, Tensor>)) -> (TempDir, PathBuf) {
    let (folder, path) = place();
    nn::save(&Net::new(1, DType::F32), &path).unwrap();
    let mut weights = candle_core::safetensors::load(&path, &CPU).unwrap();
    change(&mut weights);
    candle_core::safetensors::save(&weights, &path).unwrap();
    (folder, path)
}

#[rstest]
fn all_weights_and_each_once(#[values(DType::F32, DType::F64, DType::BF16)] dtype: DType) {
    let (_folder, path) = place();
    let (saved, other) = (Net::new(1, dtype), Net::new(2, dtype));
    nn::save(&saved, &path).unwrap();
    let mut names: Vec<_> = candle_core::safetensors::load(&path, &CPU)
        .unwrap()
        .into_keys()
        .collect();
    names.sort();
    assert_eq!(names, ["frozen.weight", "table.weight"]); // the head is tied
    assert_ne!(other.bits(), saved.bits());
    nn::load(&other, &path).unwrap();
    assert_eq!(other.bits(), saved.bits());
    assert_eq!(other.head.weight().id(), other.table.weight().id());
}

#[test]
fn other_float_dtypes_are_converted() {
    let (_folder, path) = place();
    let (saved, loaded) = (Net::new(1, DType::F64), Net::new(2, DType::F32));
    nn::save(&saved, &path).unwrap();
    nn::load(&loaded, &path).unwrap();
    for ((name, got), (_, wide)) in loaded.weights().iter().zip(saved.weights()) {
        assert_eq!(
            bits(got),
            bits(&wide.to_dtype(DType::F32).unwrap()),
            "{name}"
        );
    }
}

/// An interrupted run, planned: weights and optimizer are loaded into the objects that a step already uses.
#[test]
fn a_step_goes_on_with_what_was_loaded() {
    let (folder, path) = place();
    let state = folder.path().join("optimizer.safetensors");
    let tokens = Tensor::new(&[[1u32, 2, 3, 6]], &CPU).unwrap();
    let targets = Tensor::new(&[[2u32, 3, 4, 0]], &CPU).unwrap();
    let batch = || [("tokens", &tokens), ("targets", &targets)];
    let config = AdamWConfig::default();
    let net = Net::new(1, DType::F32);
    let mut optimizer = Optimizer::new(net.parameters(), config).unwrap();
    let mut step = Step::new(&optimizer, &StepConfig::default(), |i| net.loss(i)).unwrap();
    step.run(&mut optimizer, batch()).unwrap();
    nn::save(&net, &path).unwrap();
    optimizer.save(&state).unwrap();
    let expected = [(); 2].map(|()| step.run(&mut optimizer, batch()).unwrap().to_bits());

    let net = Net::new(2, DType::F32);
    let mut optimizer = Optimizer::new(net.parameters(), config).unwrap();
    let mut step = Step::new(&optimizer, &StepConfig::default(), |i| net.loss(i)).unwrap();
    step.run(&mut optimizer, batch()).unwrap();
    nn::load(&net, &path).unwrap();
    optimizer.load(&state).unwrap();
    step.refresh();
    let got = [(); 2].map(|()| step.run(&mut optimizer, batch()).unwrap().to_bits());
    assert_eq!(got, expected);
}

#[test]
fn a_file_that_does_not_fit_changes_nothing() {
    type Change = fn(&mut HashMap<String, Tensor>);
    let cases: [(Change, &str); 5] = [
        (
            |w| drop(w.remove("table.weight")),
            "weight table.weight: expected f32 [7, 4], got no such weight",
        ),
        (
            |w| drop(w.insert("other".into(), Tensor::zeros(1, DType::F32, &CPU).unwrap())),
            "weight other: expected no such weight, got one",
        ),
        (
            |w| {
                drop(w.insert(
                    "table.weight".into(),
                    Tensor::zeros((4, 7), DType::F32, &CPU).unwrap(),
                ))
            },
            "weight table.weight: expected f32 [7, 4], got f32 [4, 7]",
        ),
        (
            |w| {
                drop(w.insert(
                    "table.weight".into(),
                    Tensor::zeros((7, 4), DType::U32, &CPU).unwrap(),
                ))
            },
            "weight table.weight: expected f32 [7, 4], got u32 [7, 4]",
        ),
        (
            |w| {
                drop(w.insert(
                    "table.weight".into(),
                    Tensor::full(1e300, (7, 4), &CPU).unwrap(),
                ))
            },
            "weight table.weight: expected finite numbers in f32, got inf at element 0",
        ),
    ];
    for (change, expected) in cases {
        let (_folder, path) = changed(change);
        let net = Net::new(2, DType::F32);
        let before = net.bits();
        let error = refusal(nn::load(&net, &path), &["net.safetensors", expected]);
        assert!(matches!(error, Error::Weight { .. }), "{error:?}");
        assert_eq!(net.bits(), before);
    }
    let (_folder, path) = place();
    let missing = refusal(
        nn::load(&Net::new(1, DType::F32), &path),
        &["net.safetensors"],
    );
    assert!(matches!(missing, Error::Io { .. }), "{missing:?}");
}

#[test]
fn weights_that_cannot_be_saved_are_named() {
    struct Twice(Linear, Linear);
    impl Layer for Twice {
        fn visit(&self, path: &str, visit: &mut dyn FnMut(String, &Tensor)) {
            self.0.visit(path, visit);
            self.1.visit(path, visit);
        }
    }
    let linear = |seed| Linear::new(2, 2, nn::seeded(seed, DType::F32, &CPU)).unwrap();
    let (_folder, path) = place();
    let twice = Twice(linear(1), linear(2));
    let error = refusal(
        nn::save(&twice, &path),
        &["weight weight", "two weights of this name"],
    );
    assert!(matches!(error, Error::Weight { .. }), "{error:?}");
    let meta = Linear::new(2, 2, tallow::graph::weights(DType::F32)).unwrap();
    refusal(nn::save(&meta, &path), &["weight weight", "a meta tensor"]);
    let infinite = Linear::from_weights(Tensor::new(&[[1f32, f32::INFINITY]], &CPU).unwrap(), None);
    refusal(
        nn::save(&infinite.unwrap(), &path),
        &["weight weight", "finite numbers", "inf at element 1"],
    );
    assert!(!path.exists());
}
