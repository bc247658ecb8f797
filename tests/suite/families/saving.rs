//! A saved folder: the settings kept from the folder that the model was loaded from, and the files that are not
//! overwritten.

use super::Golden;
use crate::check::{elements, refusal};
use candle_core::{DType, Device};
use rstest::rstest;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use tallow::hf::{self, SaveOptions};
use tallow::model::{TransformerConfig, TransformerLM};
use tallow::nn::DropoutRates;
use tallow::ops::RotaryPairs;
use tempfile::{TempDir, tempdir};

const CPU: Device = Device::Cpu;

fn settings(folder: &Path) -> Value {
    serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap()
}

/// Returns the saved settings after a change of the model.
fn saved(golden: &Golden, change: impl FnOnce(TransformerLM) -> TransformerLM) -> (TempDir, Value) {
    let model = change(hf::load(golden.folder.path(), &CPU).unwrap());
    let folder = tempdir().unwrap();
    hf::save(&model, folder.path()).unwrap();
    let settings = settings(folder.path());
    assert_eq!(
        hf::load(folder.path(), &CPU).unwrap().config(),
        model.config()
    );
    (folder, settings)
}

/// Settings of sampling, special tokens and classes are kept, although this crate does not use them.
#[rstest]
fn settings_are_written_as_they_were_read(
    #[values("llama", "llama_tied", "qwen2", "qwen3", "mistral", "gpt2")] name: &str,
) {
    let golden = Golden::read(name);
    for (key, value) in [
        ("bos_token_id", json!(1)),
        ("eos_token_id", json!([2, 7])),
        ("initializer_range", json!(0.017)),
        ("transformers_version", json!("4.40.1")),
        ("use_cache", json!(true)),
        ("dtype", json!("float32")),
    ] {
        golden.set(key, value);
    }
    let generation = "{ \"eos_token_id\": [2, 7], \"temperature\": 0.6 }\n";
    fs::write(
        golden.folder.path().join("generation_config.json"),
        generation,
    )
    .unwrap();
    let (folder, found) = saved(&golden, |model| model);
    assert_eq!(found, settings(golden.folder.path()));
    let kept = fs::read_to_string(folder.path().join("generation_config.json")).unwrap();
    assert_eq!(kept, generation);
}

#[test]
fn the_class_stays() {
    let golden = Golden::read("mistral");
    golden.set("sliding_window", json!(null));
    let (_folder, found) = saved(&golden, |model| model);
    assert_eq!(found["model_type"], "mistral");
    assert_eq!(found["architectures"], json!(["MistralForCausalLM"]));
    // A saved model has a head.
    golden.set("architectures", json!(["MistralModel"]));
    let (_folder, found) = saved(&golden, |model| model);
    assert_eq!(found["architectures"], json!(["MistralForCausalLM"]));
}

/// Changed settings are written, and the others are kept.
#[test]
fn what_has_changed_is_written() {
    let golden = Golden::read("llama");
    golden.set("eos_token_id", json!(9));
    golden.set("attention_dropout", json!(0.5));
    golden.set("torch_dtype", json!("bfloat16"));
    golden.set("dtype", json!(null));
    let mut wanted = settings(golden.folder.path());
    let rates = DropoutRates {
        attention: 0.25,
        ..Default::default()
    };
    let (_folder, found) = saved(&golden, |model| model.with_dropout(rates).unwrap());
    wanted["attention_dropout"] = json!(0.25);
    wanted["torch_dtype"] = json!("float32");
    wanted["dtype"] = json!("float32");
    assert_eq!(found, wanted);
}

fn options(from: &Path) -> SaveOptions {
    SaveOptions {
        from: Some(from.into()),
        ..Default::default()
    }
}

/// A newly trained model has no source folder, so it is passed as an option.
#[test]
fn settings_of_a_folder_that_is_named() {
    let golden = Golden::read("qwen2");
    golden.set("eos_token_id", json!(9));
    golden.set("dtype", json!("float32"));
    let loaded = hf::load(golden.folder.path(), &CPU).unwrap();
    let trained = TransformerLM::new(loaded.config(), 3, &CPU).unwrap();
    let folder = tempdir().unwrap();
    hf::save_with(&trained, folder.path(), &options(golden.folder.path())).unwrap();
    assert_eq!(settings(folder.path()), settings(golden.folder.path()));
    // From another model's folder only the token settings are kept.
    let other = Golden::read("gpt2");
    other.set("eos_token_id", json!(11));
    let folder = tempdir().unwrap();
    hf::save_with(&trained, folder.path(), &options(other.folder.path())).unwrap();
    let found = settings(folder.path());
    assert_eq!(found["eos_token_id"], 11);
    assert_eq!(found["model_type"], "qwen2");
    assert_eq!(found.get("n_embd"), None);
    hf::load(folder.path(), &CPU).unwrap();
}

#[rstest]
fn another_dtype(
    #[values(DType::BF16, DType::F16, DType::F64)] dtype: DType,
    #[values("llama", "gpt2")] name: &str,
) {
    let golden = Golden::read(name);
    let model = hf::load(golden.folder.path(), &CPU).unwrap();
    let folder = tempdir().unwrap();
    let options = SaveOptions {
        dtype: Some(dtype),
        ..Default::default()
    };
    hf::save_with(&model, folder.path(), &options).unwrap();
    let name = match dtype {
        DType::BF16 => "bfloat16",
        DType::F16 => "float16",
        _ => "float64",
    };
    assert_eq!(settings(folder.path())["dtype"], name);
    let path = folder.path().join("model.safetensors");
    let stored = candle_core::safetensors::load(path, &CPU).unwrap();
    assert!(stored.values().all(|weight| weight.dtype() == dtype));
    let again = hf::load(folder.path(), &CPU).unwrap();
    for ((name, found), (_, wanted)) in again.parameters().iter().zip(model.parameters()) {
        let wanted = wanted
            .to_dtype(dtype)
            .unwrap()
            .to_dtype(DType::F32)
            .unwrap();
        assert_eq!(elements(found.as_tensor()), elements(&wanted), "{name}");
    }
    let options = SaveOptions {
        dtype: Some(DType::U32),
        overwrite: true,
        ..Default::default()
    };
    refusal(hf::save_with(&model, folder.path(), &options), &["u32"]);
}

fn small(seed: u64) -> TransformerLM {
    let config = TransformerConfig {
        vocab_size: 20,
        d_model: 8,
        num_layers: 1,
        num_heads: 2,
        d_ff: 12,
        rope_pairs: RotaryPairs::Halves,
        ..Default::default()
    };
    TransformerLM::new(&config, seed, &CPU).unwrap()
}

fn contents(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let files = fs::read_dir(folder).unwrap().map(Result::unwrap);
    let files = files.map(|file| {
        let name = file.file_name().into_string().unwrap();
        (name, fs::read(file.path()).unwrap())
    });
    let mut files: Vec<_> = files.collect();
    files.sort();
    files
}

#[rstest]
#[case("config.json")]
#[case("model.safetensors")]
#[case("model-00001-of-00002.safetensors")]
#[case("pytorch_model.bin")]
#[case("tokenizer.json")]
#[case("LICENSE")]
fn what_is_there_is_replaced_only_where_that_is_allowed(#[case] file: &str) {
    let [folder, from] = [tempdir().unwrap(), tempdir().unwrap()];
    for name in ["tokenizer.json", "LICENSE"] {
        fs::write(from.path().join(name), "new").unwrap();
    }
    fs::write(folder.path().join(file), "old").unwrap();
    fs::write(folder.path().join("notes.txt"), "notes").unwrap();
    let before = contents(folder.path());
    let mut options = options(from.path());
    let refused = |error: tallow::Error| {
        let error = error.to_string();
        assert!(
            error.contains(file) && error.contains("overwrite"),
            "{error}"
        );
        assert_eq!(contents(folder.path()), before);
    };
    refused(hf::save_with(&small(1), folder.path(), &options).unwrap_err());
    refused(hf::check_save(small(1).config(), folder.path(), &options).unwrap_err());
    options.overwrite = true;
    hf::check_save(small(1).config(), folder.path(), &options).unwrap();
    assert_eq!(contents(folder.path()), before);
    hf::save_with(&small(1), folder.path(), &options).unwrap();
    hf::load(folder.path(), &CPU).unwrap();
    assert_eq!(fs::read(folder.path().join("notes.txt")).unwrap(), b"notes");
    assert_eq!(fs::read(folder.path().join("LICENSE")).unwrap(), b"new");
}

/// If an old index names the saved file or missing shards, the saved files are neither removed nor confused with it.
#[rstest]
#[case("model.safetensors")]
#[case("model-00001-of-00001.safetensors")]
#[case("model-00001-of-00003.safetensors")]
#[case("weights.safetensors")]
fn an_index_of_other_files(
    #[case] shard: &str,
    #[values(500, usize::MAX)] max_shard_bytes: usize,
    #[values(false, true)] is_there: bool,
) {
    let folder = tempdir().unwrap();
    let index = json!({"weight_map": {"model.norm.weight": shard}});
    let path = folder.path().join("model.safetensors.index.json");
    fs::write(path, index.to_string()).unwrap();
    if is_there {
        fs::write(folder.path().join(shard), "old").unwrap();
    }
    let options = SaveOptions {
        overwrite: true,
        max_shard_bytes,
        ..Default::default()
    };
    hf::save_with(&small(1), folder.path(), &options).unwrap();
    let again = hf::load(folder.path(), &CPU).unwrap();
    for ((_, found), (_, wanted)) in again.parameters().iter().zip(small(1).parameters()) {
        assert_eq!(elements(found.as_tensor()), elements(wanted.as_tensor()));
    }
    let count = contents(folder.path()).len();
    let empty = tempdir().unwrap();
    hf::save_with(&small(1), empty.path(), &options).unwrap();
    assert_eq!(count, contents(empty.path()).len());
}

/// The generation settings of the previous model are removed.
#[test]
fn generation_settings_of_another_model_go() {
    let folder = tempdir().unwrap();
    hf::save(&small(1), folder.path()).unwrap();
    fs::write(folder.path().join("generation_config.json"), "{}").unwrap();
    let overwrite = SaveOptions {
        overwrite: true,
        ..Default::default()
    };
    hf::save_with(&small(2), folder.path(), &overwrite).unwrap();
    assert!(!folder.path().join("generation_config.json").exists());
    hf::load(folder.path(), &CPU).unwrap();
}

#[test]
fn an_adapter_in_the_folder() {
    let folder = tempdir().unwrap();
    fs::write(folder.path().join("adapter_config.json"), "{}").unwrap();
    let overwrite = SaveOptions {
        overwrite: true,
        ..Default::default()
    };
    refusal(
        hf::save_with(&small(1), folder.path(), &overwrite),
        &["adapter"],
    );
}

/// The hub's cache consists of links, whose targets must not be changed.
#[cfg(unix)]
#[rstest]
#[case("config.json")]
#[case("model.safetensors")]
#[case("model.safetensors.index.json")]
#[case("model-00001-of-00002.safetensors")]
#[case("generation_config.json")]
fn nothing_is_written_through_links(#[case] file: &str) {
    let [folder, blobs] = [tempdir().unwrap(), tempdir().unwrap()];
    let blob = blobs.path().join("blob");
    fs::write(&blob, "{}").unwrap();
    std::os::unix::fs::symlink(&blob, folder.path().join(file)).unwrap();
    let overwrite = SaveOptions {
        overwrite: true,
        max_shard_bytes: 500,
        ..Default::default()
    };
    let errors = [
        hf::save_with(&small(1), folder.path(), &overwrite).unwrap_err(),
        hf::check_save(small(1).config(), folder.path(), &overwrite).unwrap_err(),
    ];
    for error in errors {
        let error = error.to_string();
        assert!(
            error.contains(file) && error.contains("symbolic link"),
            "{error}"
        );
    }
    assert_eq!(fs::read(&blob).unwrap(), b"{}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}
