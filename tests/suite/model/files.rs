//! Weights saved to a file and loaded from it.

use super::*;
use crate::settings::loaded_as;
use rstest::rstest;
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::PathBuf;
use tempfile::{TempDir, tempdir};

fn place() -> (TempDir, PathBuf) {
    let folder = tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    (folder, path)
}

fn of_dtype(dtype: DType) -> LoadOptions {
    loaded_as(dtype)
}

fn weights(model: &TransformerLM, dtype: DType) -> HashMap<String, Tensor> {
    let parameters = model.parameters().into_iter();
    parameters
        .map(|(name, var)| (name, var.to_dtype(dtype).unwrap().detach()))
        .collect()
}

#[rstest]
fn there_and_back(#[values(DType::F32, DType::F64, DType::BF16, DType::F16)] dtype: DType) {
    let (_folder, path) = place();
    let model = model_of(&mini(), 4, dtype);
    model.save(&path).unwrap();
    let loaded = TransformerLM::load_with(&mini(), &path, &of_dtype(dtype), &CPU).unwrap();
    assert_eq!(all_bits(&loaded), all_bits(&model));
    let tokens = ids(29, 2, 5);
    let logits = |model: &TransformerLM| bits(&model.forward(&tokens).unwrap());
    assert_eq!(logits(&loaded), logits(&model));
    assert_eq!(loaded.config(), &mini());
    // The loaded weights are variables of their own that can be trained.
    if dtype == DType::F32 {
        alive(&loss_and_gradients(&loaded, &tokens, &tokens).1);
    }
}

/// The file is a plain safetensors file: these names, shapes and dtype, and nothing else.
#[rstest]
fn the_file_is_what_others_read(#[values(DType::F32, DType::BF16)] dtype: DType) {
    let (_folder, path) = place();
    let model = model_of(&mini(), 4, dtype);
    model.save(&path).unwrap();
    let read = candle_core::safetensors::load(&path, &CPU).unwrap();
    let got: BTreeMap<_, _> = read.iter().map(|(n, t)| (n, t.dims().to_vec())).collect();
    let shapes = mini().parameter_shapes();
    let wanted: BTreeMap<_, _> = shapes.iter().map(|(n, s)| (n, s.dims().to_vec())).collect();
    assert_eq!(got, wanted);
    for (name, var) in model.parameters() {
        assert_eq!(read[&name].dtype(), dtype, "{name}");
        assert_eq!(bits(&read[&name]), bits(&var), "{name}");
    }
}

/// Every float dtype is converted to every other, rounded once.
#[rstest]
fn dtypes_are_converted(
    #[values(DType::F32, DType::F64, DType::BF16, DType::F16)] stored: DType,
    #[values(DType::F32, DType::F64, DType::BF16)] wanted: DType,
) {
    let (_folder, path) = place();
    let stored = weights(&model_of(&mini(), 4, DType::F64), stored);
    candle_core::safetensors::save(&stored, &path).unwrap();
    let loaded = TransformerLM::load_with(&mini(), &path, &of_dtype(wanted), &CPU).unwrap();
    for (name, var) in loaded.parameters() {
        assert_eq!(var.dtype(), wanted, "{name}");
        let converted = stored[&name].to_dtype(wanted).unwrap();
        assert_eq!(bits(&var), bits(&converted), "{name}");
    }
    let logits = loaded.forward(&ids(29, 1, 3)).unwrap();
    assert_eq!(logits.dtype(), wanted);
}

#[test]
fn load_means_f32() {
    let (_folder, path) = place();
    model_of(&mini(), 4, DType::F64).save(&path).unwrap();
    let loaded = TransformerLM::load(&mini(), &path, &CPU).unwrap();
    assert_eq!(all_bits(&loaded), all_bits(&mini_model(4)));
    assert!(
        loaded
            .parameters()
            .iter()
            .all(|(_, var)| var.dtype() == DType::F32)
    );
}

#[test]
fn an_optimizers_state_beside_the_weights_is_left_alone() {
    let (_folder, path) = place();
    let model = mini_model(4);
    let mut tensors = weights(&model, DType::F32);
    let state = Tensor::zeros(3, DType::U32, &CPU).unwrap();
    tensors.insert("optimizer.step".into(), state);
    candle_core::safetensors::save(&tensors, &path).unwrap();
    let loaded = TransformerLM::load(&mini(), &path, &CPU).unwrap();
    assert_eq!(all_bits(&loaded), all_bits(&model));
}

/// A second save replaces the first and leaves no other file.
#[test]
fn saving_again() {
    let (folder, path) = place();
    for seed in [4, 5] {
        let model = mini_model(seed);
        model.save(&path).unwrap();
        let loaded = TransformerLM::load(&mini(), &path, &CPU).unwrap();
        assert_eq!(all_bits(&loaded), all_bits(&model));
    }
    let names = fs::read_dir(folder.path()).unwrap();
    let names: Vec<_> = names.map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["model.safetensors"]);
}

/// A loaded model does not depend on its file any more.
#[test]
fn a_loaded_model_is_its_own() {
    let (_folder, path) = place();
    let model = mini_model(4);
    model.save(&path).unwrap();
    let loaded = TransformerLM::load(&mini(), &path, &CPU).unwrap();
    fs::remove_file(&path).unwrap();
    assert_eq!(all_bits(&loaded), all_bits(&model));
    let (_, var) = loaded.parameters().remove(0);
    var.set(&var.zeros_like().unwrap()).unwrap();
    assert_ne!(all_bits(&loaded), all_bits(&model));
}

/// A weight that is a view (transposed in place, for example) is saved in logical order.
#[test]
fn weights_with_strides() {
    let (_folder, path) = place();
    let model = mini_model(4);
    let mut tensors = weights(&model, DType::F32);
    let name = "layers.1.ffn.w2.weight";
    let straight = tensors[name].clone();
    let view = straight.t().unwrap().contiguous().unwrap().t().unwrap();
    assert!(!view.is_contiguous());
    tensors.insert(name.into(), view);
    let vb = VarBuilder::from_tensors(tensors, DType::F32, &CPU);
    let strided = TransformerLM::from_var_builder(&mini(), vb).unwrap();
    strided.save(&path).unwrap();
    let loaded = TransformerLM::load(&mini(), &path, &CPU).unwrap();
    assert_eq!(all_bits(&loaded), all_bits(&model));
}

/// A file stores the model's configuration; the context length is chosen on loading.
#[test]
fn a_file_has_its_configuration() {
    let (_folder, path) = place();
    let model = mini_model(4);
    model.save(&path).unwrap();
    let opened = TransformerLM::open(&path, &CPU).unwrap();
    assert_eq!(opened.config(), &mini());
    assert_eq!(all_bits(&opened), all_bits(&model));
    let longer = TransformerConfig {
        context_length: 2 * mini().context_length,
        ..mini()
    };
    let loaded = TransformerLM::load(&longer, &path, &CPU).unwrap();
    assert_eq!(loaded.config(), &longer);
    for (changed, field) in [
        (
            TransformerConfig {
                num_heads: 1,
                ..mini()
            },
            "num_heads",
        ),
        (
            TransformerConfig {
                rope_theta: 5e5,
                ..mini()
            },
            "rope_theta",
        ),
        (
            TransformerConfig {
                norm_eps: 1e-6,
                ..mini()
            },
            "norm_eps",
        ),
    ] {
        assert_ne!(changed, mini());
        let parts = ["model.safetensors", field, "TransformerLM::open"];
        refusal(TransformerLM::load(&changed, &path, &CPU), &parts);
    }
    let others = weights(&model, DType::F32);
    candle_core::safetensors::save(&others, &path).unwrap();
    refusal(
        TransformerLM::open(&path, &CPU),
        &["model.safetensors", "tallow.model", "load"],
    );
}

/// Prefixes of `torch.compile` and `DistributedDataParallel`, and additional weights, are accepted on request.
#[test]
fn other_names_and_weights_too_many() {
    let (_folder, path) = place();
    let model = mini_model(4);
    let renamed = weights(&model, DType::F32).into_iter();
    let mut renamed: HashMap<_, _> = renamed
        .map(|(name, weight)| (format!("module._orig_mod.{name}"), weight))
        .collect();
    renamed.insert(
        "rotary.cos".into(),
        Tensor::zeros(3, DType::F32, &CPU).unwrap(),
    );
    candle_core::safetensors::save(&renamed, &path).unwrap();
    let load = |options: &LoadOptions| TransformerLM::load_with(&mini(), &path, options, &CPU);
    let strip_prefixes = vec!["_orig_mod.".to_string(), "module.".into(), String::new()];
    let mut options = LoadOptions {
        strip_prefixes,
        ..Default::default()
    };
    refusal(load(&options), &["rotary.cos", "no such weight"]);
    options.allow_extra = true;
    assert_eq!(all_bits(&load(&options).unwrap()), all_bits(&model));
    options.strip_prefixes.pop();
    options.strip_prefixes.pop();
    refusal(
        load(&options),
        &["token_embeddings.weight", "no such weight"],
    );
    let (name, weight) = weights(&model, DType::F32).into_iter().next().unwrap();
    renamed.insert(name.clone(), weight);
    candle_core::safetensors::save(&renamed, &path).unwrap();
    options.strip_prefixes.push("module.".into());
    refusal(load(&options), &[&name, "one tensor a weight"]);
}
