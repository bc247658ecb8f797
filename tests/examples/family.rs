//! The example `train` with a model in Hugging Face's format.

use super::process::{Outcome, example, run};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use tallow::hf;
use tallow::model::{TransformerConfig, TransformerLM};
use tallow::ops::RotaryPairs;
use tempfile::{TempDir, tempdir};

/// Writes a folder with a model of four token ids and a tokenizer of three words.
fn family() -> TempDir {
    let folder = tempdir().unwrap();
    let config = TransformerConfig {
        vocab_size: 4,
        context_length: 16,
        d_model: 8,
        num_layers: 1,
        num_heads: 2,
        d_ff: 12,
        rope_pairs: RotaryPairs::Halves,
        ..Default::default()
    };
    let model = TransformerLM::new(&config, 5, &candle_core::Device::Cpu).unwrap();
    hf::save(&model, folder.path()).unwrap();
    let words = json!({"the": 0, "License": 1, "other": 2});
    let tokenizer = json!({
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "other"},
    });
    fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    folder
}

/// Trains in windows of 8 tokens, after which id 3, which is no word, is never the most likely. `HERE` in `flags`
/// stands for the folder.
fn train(folder: &Path, steps: usize, flags: &str) -> Outcome {
    let flags = flags.replace("HERE", folder.to_str().unwrap());
    let sizes = format!("--batch-size 2 --steps {steps} --lr 0.4 --sample 5 --temperature 0");
    let mut command = example(&format!("train --data DATA {sizes}"));
    command.args(flags.split(' '));
    if !flags.contains("--context-length") {
        command.args(["--context-length", "8"]);
    }
    if !flags.contains("--prompt") {
        command.args(["--prompt", "License"]); // the default prompt, a line break, is no word
    }
    run(command)
}

#[track_caller]
fn run_well(ended: &Outcome) {
    assert_eq!(
        (ended.status, ended.err.as_str()),
        (Some(0), ""),
        "{ended:?}"
    );
}

fn weights(folder: &Path) -> Vec<f32> {
    let model = hf::load(folder, &candle_core::Device::Cpu).unwrap();
    let (_, weight) = &model.parameters()[0];
    weight.flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn the_trained_model_is_a_folder_again() {
    let folder = family();
    let ended = train(folder.path(), 3, "--family HERE --save-family HERE/tuned");
    run_well(&ended);
    let text = ended.out.lines().last().unwrap();
    assert!(text.starts_with("License "), "{text}");
    let tuned = folder.path().join("tuned");
    assert_eq!(hf::config(&tuned).unwrap().context_length, 16);
    assert_ne!(weights(&tuned), weights(folder.path()));
    let [ours, theirs] =
        [&tuned, folder.path()].map(|folder| fs::read(folder.join("tokenizer.json")).unwrap());
    assert_eq!(ours, theirs);
    // A run that is stopped after two steps and resumed has the same weights.
    let line = "--family HERE --schedule-steps 3 --checkpoint HERE/run";
    run_well(&train(folder.path(), 2, line));
    let rest = format!("{line} --resume --save-family HERE/again");
    run_well(&train(folder.path(), 3, &rest));
    assert_eq!(weights(&folder.path().join("again")), weights(&tuned));
}

#[test]
fn weights_are_random_where_that_is_asked_for() {
    let folder = family();
    fs::remove_file(folder.path().join("model.safetensors")).unwrap();
    let ended = train(folder.path(), 3, "--family HERE");
    assert_eq!(ended.status, Some(1), "{ended:?}");
    assert!(ended.err.contains("--random-weights"), "{ended:?}");
    let ended = train(folder.path(), 3, "--family HERE --random-weights");
    run_well(&ended);
    assert!(ended.out.contains("begun with random weights"), "{ended:?}");
}

/// An unknown setting in config.json is refused unless a flag names it.
#[test]
fn settings_that_are_ignored() {
    let folder = family();
    let path = folder.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["logits_scaling"] = json!(2.0);
    fs::write(&path, config.to_string()).unwrap();
    let ended = train(folder.path(), 1, "--family HERE");
    assert_eq!(ended.status, Some(1), "{ended:?}");
    assert!(ended.err.contains("logits_scaling (2.0)"), "{ended:?}");
    assert!(ended.err.contains("--ignore-config-key"), "{ended:?}");
    for more in ["", " --random-weights"] {
        let flags = format!("--family HERE --ignore-config-key logits_scaling{more}");
        run_well(&train(folder.path(), 1, &flags));
    }
}

#[test]
fn what_is_refused_before_the_first_step() {
    let folder = family();
    let ends_with = |status: i32, flags: &str, words: &str| {
        let ended = train(folder.path(), 3, flags);
        assert_eq!(ended.status, Some(status), "{flags}: {ended:?}");
        assert!(ended.err.contains(words), "{flags}: {ended:?}");
    };
    let refused = |flags: &str, words: &str| ends_with(1, flags, words);
    let misused = |flags: &str, words: &str| ends_with(2, flags, words);
    refused("--family HERE --save-family HERE", "--save-family");
    // The trained model could not be saved at the end.
    misused("--save-family HERE/new --prompt a", "--family");
    misused("--save-family HERE/new --size tiny --prompt a", "--family");
    misused("--random-weights --prompt a", "--family");
    refused(
        "--family HERE --save-family HERE/new --dropout 0.1",
        "dropout",
    );
    let other = folder.path().join("other");
    fs::create_dir(&other).unwrap();
    fs::write(other.join("config.json"), "{}").unwrap();
    refused("--family HERE --save-family HERE/other", "--overwrite");
    assert_eq!(fs::read(other.join("config.json")).unwrap(), b"{}");
    let line = "--family HERE --save-family HERE/other --overwrite --save-dtype bf16";
    run_well(&train(folder.path(), 3, line));
    let settings = fs::read_to_string(other.join("config.json")).unwrap();
    assert!(settings.contains("\"bfloat16\""), "{settings}");
    weights(&other);
    refused("--family HERE/none", "no such folder");
    refused(
        "--family HERE --context-length 17",
        "at least 17, the length of a sequence",
    );
    refused("--family HERE --prompt \n", "drops");
    fs::write(folder.path().join("tokenizer.json"), "{").unwrap();
    refused("--family HERE", "tokenizer.json");
    let vocab = json!({"the": 0, "other": 4});
    let model = json!({"type": "WordLevel", "vocab": vocab, "unk_token": "other"});
    let path = folder.path().join("tokenizer.json");
    fs::write(path, json!({"model": model}).to_string()).unwrap();
    refused("--family HERE", "up to 4");
}
