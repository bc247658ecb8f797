//! Folders written by publishers and other programs.

use super::{Golden, fixtures};
use crate::check::elements;
use crate::settings::loaded_as;
use candle_core::{DType, Device, Tensor, safetensors};
use rstest::rstest;
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use tallow::hf;
use tallow::model::{LoadOptions, TransformerLM};
use tempfile::tempdir;

const CPU: Device = Device::Cpu;
const HEAD: &str = "lm_head.weight";
const EMBEDDING: &str = "model.embed_tokens.weight";

type Weights = HashMap<String, Tensor>;

impl Golden {
    fn path(&self) -> PathBuf {
        self.folder.path().join("model.safetensors")
    }

    fn weights(&self) -> Weights {
        safetensors::load(self.path(), &CPU).unwrap()
    }

    fn write(&self, weights: &Weights) {
        safetensors::save(weights, self.path()).unwrap();
    }

    fn load(&self) -> tallow::Result<TransformerLM> {
        hf::load(self.folder.path(), &CPU)
    }

    fn load_in(&self, dtype: DType) -> tallow::Result<TransformerLM> {
        let options = loaded_as(dtype);
        hf::load_with(self.folder.path(), &options, &CPU)
    }

    fn logits(&self, model: &TransformerLM) -> Vec<f64> {
        let [tokens, _] = self.batch(&CPU);
        elements(&model.forward(&tokens).unwrap())
    }
}

#[track_caller]
fn says<T>(result: tallow::Result<T>, parts: &[&str]) {
    let Err(error) = result else {
        panic!("expected an error with {parts:?}");
    };
    let error = error.to_string();
    for part in parts {
        assert!(error.contains(part), "{part:?} is not in {error:?}");
    }
}

/// `transformers` ties head and embedding only if the file has one of them, or both with equal weights.
#[test]
fn a_head_that_the_configuration_ties() {
    let golden = Golden::read("llama_tied");
    let tied = golden.load().unwrap();
    let wanted = golden.logits(&tied);
    let weights = golden.weights();
    let is_tied = || {
        let loaded = hf::loaded_config(golden.folder.path(), &LoadOptions::default()).unwrap();
        let model = golden.load().unwrap();
        assert_eq!(model.config(), &loaded);
        assert!(hf::config(golden.folder.path()).unwrap().tie_embeddings);
        (loaded.tie_embeddings, golden.logits(&model))
    };

    let mut same = weights.clone();
    same.insert(HEAD.into(), weights[EMBEDDING].clone());
    golden.write(&same);
    assert_eq!(is_tied(), (true, wanted.clone()));

    same.remove(EMBEDDING);
    golden.write(&same);
    assert_eq!(is_tied(), (true, wanted.clone()));

    let mut other = weights.clone();
    let head = (&weights[EMBEDDING] * 2.0).unwrap();
    other.insert(HEAD.into(), head);
    golden.write(&other);
    let (tied, logits) = is_tied();
    assert!(!tied);
    let doubled: Vec<f64> = wanted.iter().map(|x| 2.0 * x).collect();
    assert_eq!(logits, doubled); // exactly, because a power of two rounds nothing
    let model = golden.load().unwrap();
    let saved = tempdir().unwrap();
    hf::save(&model, saved.path()).unwrap();
    assert!(!hf::config(saved.path()).unwrap().tie_embeddings);
    assert_eq!(
        golden.logits(&hf::load(saved.path(), &CPU).unwrap()),
        doubled
    );

    let mut short = weights;
    short.insert(
        HEAD.into(),
        Tensor::zeros((3, 5), DType::F32, &CPU).unwrap(),
    );
    golden.write(&short);
    says(golden.load(), &[HEAD, "got [3, 5]"]);
}

/// A single file saved into a folder of shards takes precedence over the index, like in `transformers`.
#[test]
fn one_file_goes_before_an_index() {
    let golden = Golden::read("qwen3");
    let wanted = golden.logits(&golden.load().unwrap());
    for file in fs::read_dir(fixtures().join("sharded")).unwrap() {
        let file = file.unwrap();
        if file.file_name() != "config.json" {
            fs::copy(file.path(), golden.folder.path().join(file.file_name())).unwrap();
        }
    }
    let mut weights = golden.weights();
    let norm = (&weights["model.norm.weight"] * 2.0).unwrap();
    weights.insert("model.norm.weight".into(), norm);
    golden.write(&weights);
    let doubled: Vec<f64> = wanted.iter().map(|x| 2.0 * x).collect();
    assert_eq!(golden.logits(&golden.load().unwrap()), doubled);
    fs::remove_file(golden.path()).unwrap();
    assert_eq!(golden.logits(&golden.load().unwrap()), wanted);
}

/// Prefixes of a base model (`AutoModel`), or of a model saved inside another module.
#[rstest]
fn names_with_other_beginnings(#[values("llama_tied", "qwen3", "mistral")] name: &str) {
    let golden = Golden::read(name);
    let wanted = golden.logits(&golden.load().unwrap());
    let weights = golden.weights();
    let renamed = |change: &dyn Fn(&str) -> String| {
        let renamed = weights
            .iter()
            .map(|(name, weight)| (change(name), weight.clone()));
        golden.write(&renamed.collect());
    };
    renamed(&|name| name.strip_prefix("model.").unwrap_or(name).into());
    assert_eq!(golden.logits(&golden.load().unwrap()), wanted);

    renamed(&|name| format!("_orig_mod.{name}"));
    says(golden.load(), &["_orig_mod."]);
    let options = LoadOptions {
        strip_prefixes: vec!["_orig_mod.".into()],
        ..Default::default()
    };
    let model = hf::load_with(golden.folder.path(), &options, &CPU).unwrap();
    assert_eq!(golden.logits(&model), wanted);
}

#[test]
fn a_base_model_without_its_head() {
    let golden = Golden::read("llama");
    let mut weights = golden.weights();
    weights.remove(HEAD).unwrap();
    golden.write(&weights);
    says(golden.load(), &[HEAD, "base model", "tie_word_embeddings"]);
}

/// 8-bit weights are converted to every dtype. (candle's own conversion to f64 recurses endlessly.)
#[rstest]
fn weights_of_8_bits(#[values(DType::F64, DType::F32, DType::BF16)] dtype: DType) {
    let golden = Golden::read("llama");
    let mut weights = golden.weights();
    let name = "model.layers.0.mlp.up_proj.weight";
    let rounded = weights[name].to_dtype(DType::F8E4M3).unwrap();
    let wide = rounded.to_dtype(DType::F32).unwrap();
    weights.insert(name.into(), rounded);
    golden.write(&weights);
    let model = golden.load_in(dtype).unwrap();
    let parameters = model.parameters();
    let (_, found) = parameters
        .iter()
        .find(|(name, _)| name == "layers.0.ffn.w3.weight")
        .unwrap();
    assert_eq!(found.dtype(), dtype);
    assert_eq!(elements(found.as_tensor()), elements(&wide));
}

#[rstest]
#[case::not_a_number(
    DType::F32,
    f64::NAN,
    DType::F32,
    "expected finite numbers, got NaN at element 7"
)]
#[case::infinite(DType::BF16, f64::NEG_INFINITY, DType::F32, "got -inf at element 7")]
#[case::of_8_bits(DType::F8E4M3, f64::NAN, DType::F32, "got NaN at element 7")]
#[case::too_large(
    DType::F64,
    1e300,
    DType::F32,
    "expected numbers that f32 holds, got inf"
)]
#[case::too_large_for_f16(
    DType::BF16,
    1e6,
    DType::F16,
    "expected numbers that f16 holds, got inf"
)]
fn a_weight_that_is_not_finite(
    #[case] stored: DType,
    #[case] value: f64,
    #[case] dtype: DType,
    #[case] words: &str,
) {
    let golden = Golden::read("llama");
    let mut weights = golden.weights();
    let name = "model.layers.1.self_attn.k_proj.weight";
    let mut numbers = elements(&weights[name]);
    numbers[7] = value;
    let shape = weights[name].shape().clone();
    let changed = Tensor::from_vec(numbers, shape, &CPU).unwrap();
    let changed = match stored {
        DType::F64 => changed,
        _ => changed
            .to_dtype(DType::F32)
            .unwrap()
            .to_dtype(stored)
            .unwrap(),
    };
    weights.insert(name.into(), changed);
    golden.write(&weights);
    says(golden.load_in(dtype), &["model.safetensors", name, words]);
}

#[rstest]
#[case(&["pytorch_model.bin"], &["pytorch_model.bin", "save_pretrained"])]
#[case(&["pytorch_model.bin.index.json"], &["pytorch_model.bin.index.json", "save_pretrained"])]
#[case(&["tf_model.h5"], &["tf_model.h5", "convert"])]
#[case(&["consolidated.safetensors"], &["consolidated.safetensors", "fetch"])]
#[case(&["adapter_config.json", "adapter_model.safetensors"], &["adapter of peft", "merge_and_unload"])]
#[case(&[], &["model.safetensors.index.json", "neither", "fetch the weights"])]
fn folders_without_safetensors(#[case] files: &[&str], #[case] parts: &[&str]) {
    let golden = Golden::read("llama");
    fs::remove_file(golden.path()).unwrap();
    for file in files {
        fs::write(golden.folder.path().join(file), "{}").unwrap();
    }
    says(golden.load(), parts);
}

/// `transformers` loads the base model that the adapter names, not the weights next to it.
#[test]
fn an_adapter_beside_weights() {
    let golden = Golden::read("llama");
    fs::write(golden.folder.path().join("adapter_config.json"), "{}").unwrap();
    says(golden.load(), &["adapter of peft", "merge_and_unload"]);
    says(hf::config(golden.folder.path()), &["adapter of peft"]);
}

#[test]
fn what_is_no_folder_or_no_tensors() {
    let name = "HuggingFaceTB/no-such-model";
    says(
        hf::load(name, &CPU),
        &[name, "no such folder", "hf download", "hf::find"],
    );
    says(
        hf::config(Path::new("/no/such/folder")),
        &["no such folder", "check the path"],
    );
    let golden = Golden::read("llama");
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n";
    fs::write(golden.path(), pointer).unwrap();
    says(
        golden.load(),
        &["model.safetensors", "pointer of Git LFS", "git lfs pull"],
    );
}
