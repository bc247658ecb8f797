//! Models and layers on candle's own builders: shared variables, refused weights.

use super::*;
use candle_nn::VarMap;
use std::collections::{BTreeSet, HashMap};
use tallow::nn::{Embedding, Layer, Linear};

fn shared() -> (VarMap, TransformerLM) {
    let map = VarMap::new();
    let vb = VarBuilder::from_varmap(&map, DType::F32, &CPU);
    let model = TransformerLM::from_var_builder(&mini(), vb).unwrap();
    (map, model)
}

fn var(map: &VarMap, name: &str) -> Var {
    map.data().lock().unwrap()[name].clone()
}

#[test]
fn a_var_map_holds_the_parameters() {
    let (map, model) = shared();
    let names: BTreeSet<String> = map.data().lock().unwrap().keys().cloned().collect();
    let wanted = mini().parameter_shapes().into_iter().map(|(name, _)| name);
    assert_eq!(names, wanted.collect());
    for (name, parameter) in model.parameters() {
        let kept = var(&map, &name);
        assert_eq!(kept.as_tensor().id(), parameter.as_tensor().id(), "{name}");
        if name.contains("ln") {
            assert!(elements(&kept).iter().all(|w| *w == 1.0), "{name}");
        }
    }
}

#[test]
fn setting_a_variable_changes_the_model_and_back() {
    let (mut map, model) = shared();
    let tokens = ids(29, 2, 5);
    let before = bits(&model.forward(&tokens).unwrap());
    for (name, shape) in mini().parameter_shapes() {
        let kept = var(&map, &name).as_tensor().copy().unwrap();
        map.set_one(&name, numbers(shape.dims(), DType::F32, 1))
            .unwrap();
        assert_ne!(bits(&model.forward(&tokens).unwrap()), before, "{name}");
        map.set_one(&name, &kept).unwrap();
    }
    assert_eq!(bits(&model.forward(&tokens).unwrap()), before);
    // And in the other direction.
    let (name, parameter) = model.parameters().remove(3);
    parameter.set(&parameter.zeros_like().unwrap()).unwrap();
    assert!(elements(&var(&map, &name)).iter().all(|w| *w == 0.0));
}

#[test]
fn two_models_of_one_map_are_one() {
    let (map, first) = shared();
    let vb = VarBuilder::from_varmap(&map, DType::F32, &CPU);
    let second = TransformerLM::from_var_builder(&mini(), vb).unwrap();
    let (tokens, targets) = (ids(29, 2, 5), ids(29, 2, 5));
    let (loss, _) = loss_and_gradients(&second, &tokens, &targets);
    // The second's loss has gradients for the first's variables.
    alive(&gradients_of(&loss, first.parameters()));
}

/// candle's own checkpoint of a map is a valid model file.
#[test]
fn a_saved_map_is_a_model_file() {
    let (map, model) = shared();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("map.safetensors");
    map.save(&path).unwrap();
    let loaded = TransformerLM::load(&mini(), &path, &CPU).unwrap();
    assert_eq!(all_bits(&loaded), all_bits(&model));

    let mut other = VarMap::new();
    let vb = VarBuilder::from_varmap(&other, DType::F32, &CPU);
    let twin = TransformerLM::from_var_builder(&mini(), vb).unwrap();
    assert_ne!(all_bits(&twin), all_bits(&model));
    model.save(&path).unwrap();
    other.load(&path).unwrap();
    assert_eq!(all_bits(&twin), all_bits(&model));
}

/// The tensors of a map are copied: training the model does not change the caller's.
#[test]
fn plain_tensors_stay_as_they_are() {
    let weight = numbers(&[4, 3], DType::F32, 0);
    let tensors = HashMap::from([("weight".to_string(), weight.clone())]);
    let layer = Linear::new(3, 4, VarBuilder::from_tensors(tensors, DType::F32, &CPU)).unwrap();
    assert_eq!(bits(layer.weight()), bits(&weight));
    let var = &layer.parameters()[0].1;
    var.set(&weight.zeros_like().unwrap()).unwrap();
    assert_eq!(bits(&weight), bits(&numbers(&[4, 3], DType::F32, 0)));
}

/// A builder's error keeps its text: the name and both shapes.
#[test]
fn missing_and_misshapen_weights_of_a_builder() {
    let builder = |shape: &[usize]| {
        let weight = Tensor::zeros(shape, DType::F32, &CPU).unwrap();
        let tensors = HashMap::from([("table.weight".to_string(), weight)]);
        VarBuilder::from_tensors(tensors, DType::F32, &CPU)
    };
    Embedding::new(4, 3, builder(&[4, 3]).pp("table")).unwrap();
    let missing = Embedding::new(4, 3, builder(&[4, 3]).pp("other"));
    refusal(missing, &["other.weight"]);
    let misshapen = Embedding::new(4, 3, builder(&[3, 4]).pp("table"));
    refusal(misshapen, &["table.weight", "[4, 3]", "[3, 4]"]);
}

/// The embedding and the head share one table if the caller passes one variable.
#[test]
fn a_shared_variable_gets_both_gradients() {
    let map = VarMap::new();
    let vb = VarBuilder::from_varmap(&map, DType::F64, &CPU);
    let table = Embedding::new(7, 4, vb.pp("tied")).unwrap();
    let head = Linear::new(4, 7, vb.pp("tied")).unwrap();
    assert_eq!(map.all_vars().len(), 1);
    assert_eq!(table.parameters()[0].0, "weight");
    let tokens = Tensor::new(&[[1u32, 2]], &CPU).unwrap();
    let gradient = |table: &Embedding, head: &Linear, of: &Tensor| {
        let logits = head.forward(&table.forward(&tokens).unwrap()).unwrap();
        let loss = ops::cross_entropy(&logits, &tokens).unwrap();
        loss.backward().unwrap().get(of).unwrap().clone()
    };
    let both = gradient(&table, &head, table.weight());
    // With the same values in two variables, each has its part of the gradient; the tied one has their sum.
    let copy = |name: &str| {
        let tensors = HashMap::from([(format!("{name}.weight"), table.weight().copy().unwrap())]);
        VarBuilder::from_tensors(tensors, DType::F64, &CPU).pp(name)
    };
    let own_table = Embedding::new(7, 4, copy("a")).unwrap();
    let own_head = Linear::new(4, 7, copy("b")).unwrap();
    let parts = [own_table.weight(), own_head.weight()];
    let parts = parts.map(|part| gradient(&own_table, &own_head, part));
    close("tied", &both, &(&parts[0] + &parts[1]).unwrap(), 1e-14);
}
