//! Models of other families in Hugging Face's format, against `transformers` (`fixtures/families`): logits, loss, every
//! gradient, five steps, and generated text.

mod configurations;
mod loading;
mod saving;

use crate::check::{elements, gradients_of, refusal};
use crate::golden::{bounds, close, close_gradients, fixture};
use crate::settings::loaded_as;
use candle_core::{DType, Device, Tensor, safetensors};
use proptest::prelude::*;
use rstest::rstest;
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use tallow::attention::{Algorithm, FirstKeys};
use tallow::compile::{Batch, Step, StepConfig};
use tallow::hf::{self, SaveOptions};
use tallow::memory::{self, Mode, Workload, tracker};
use tallow::model::{GenerateConfig, LoadOptions, TransformerConfig, TransformerLM, flops};
use tallow::nn::{
    Architecture, Attention, AttentionLayerConfig, DropoutRates, ForwardContext, seeded,
};
use tallow::ops::{KernelPolicy, RotaryPairs, with_kernel_policy};
use tallow::optim::{AdamWConfig, Optimizer};
use tempfile::{TempDir, tempdir};

const NAMES: [&str; 10] = [
    "llama",
    "llama_tied",
    "llama_biased",
    "qwen2",
    "qwen3",
    "qwen3_biased",
    "mistral",
    "gemma2",
    "gpt2",
    "gpt2_erf",
];

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/families")
}

/// The lengths of packed documents in each sequence.
const DOCUMENTS: [&[usize]; 2] = [&[4, 9], &[1, 7, 5]];

/// The prefixes of weights' names.
const PREFIXES: [&str; 3] = ["model.", "transformer.", "lm_head."];

/// A golden file, written by `fixtures/generate.py families`, and a folder with the model's files.
struct Golden {
    folder: TempDir,
    hyperparameters: AdamWConfig,
    tensors: HashMap<String, Tensor>,
}

impl Golden {
    fn read(name: &str) -> Self {
        let (tensors, metadata) = fixture(&format!("families/{name}"));
        let weights = tensors
            .iter()
            .filter(|(name, _)| PREFIXES.iter().any(|prefix| name.starts_with(prefix)));
        let weights: HashMap<String, Tensor> =
            weights.map(|(name, x)| (name.clone(), x.clone())).collect();
        let folder = tempdir().unwrap();
        fs::write(folder.path().join("config.json"), &metadata["config"]).unwrap();
        safetensors::save(&weights, folder.path().join("model.safetensors")).unwrap();
        Self {
            folder,
            hyperparameters: serde_json::from_str(&metadata["hyperparameters"]).unwrap(),
            tensors,
        }
    }

    fn model(&self, dtype: DType, attention: Algorithm, device: &Device) -> TransformerLM {
        let options = loaded_as(dtype);
        let model = hf::load_with(self.folder.path(), &options, device).unwrap();
        model.with_attention(attention).unwrap()
    }

    fn set(&self, key: &str, value: Value) {
        let path = self.folder.path().join("config.json");
        let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        config[key] = value;
        fs::write(&path, config.to_string()).unwrap();
    }

    fn get(&self, key: &str) -> &Tensor {
        &self.tensors[key]
    }

    /// Returns tokens and targets (B, T).
    fn batch(&self, device: &Device) -> [Tensor; 2] {
        ["tokens", "targets"].map(|key| self.get(key).to_device(device).unwrap())
    }
}

/// Converts the model's tensors to those of the golden files. In GPT-2's files q, k and v are one tensor, and weights
/// of linear layers are (in, out).
fn to_golden_layout(
    model: &TransformerLM,
    named: impl IntoIterator<Item = (String, Tensor)>,
) -> BTreeMap<String, Tensor> {
    let architecture = model.config().architecture;
    let mut parts: BTreeMap<String, Vec<Tensor>> = BTreeMap::new();
    for (name, tensor) in named {
        let theirs = hf::name_of(architecture, &name).unwrap();
        parts.entry(theirs).or_default().push(tensor);
    }
    let joined = parts.into_iter().map(|(name, parts)| {
        let whole = Tensor::cat(&parts, 0).unwrap();
        let turned = name.contains(".c_") && name.ends_with(".weight");
        let whole = if turned { whole.t().unwrap() } else { whole };
        (name, whole)
    });
    joined.collect()
}

fn logits_loss_and_gradients(golden: &Golden, model: &TransformerLM, dtype: DType) {
    let [tokens, targets] = golden.batch(model.device());
    let logits = model.forward(&tokens).unwrap();
    let loss = model.loss(&tokens, &targets).unwrap();
    let [logits_bound, loss_bound, gradient_bound] = bounds(dtype);
    close("logits", &logits, golden.get("logits"), logits_bound);
    let first_keys = FirstKeys::of_lengths(&DOCUMENTS.map(Vec::from)).unwrap();
    let context = ForwardContext::packed(first_keys);
    let packed = model.forward_with(&tokens, &context).unwrap();
    let wanted = golden.get("logits.packed");
    close("logits.packed", &packed, wanted, logits_bound);
    close("loss", &loss, golden.get("loss"), loss_bound);
    let gradients = gradients_of(model.parameters(), &tallow::backward(loss).unwrap());
    close_gradients(
        &golden.tensors,
        to_golden_layout(model, gradients),
        gradient_bound,
    );
}

/// Compares five steps; `step` returns each step's loss.
fn five_steps(golden: &Golden, model: &TransformerLM, dtype: DType, mut step: impl FnMut() -> f64) {
    let [loss_bound, weight_bound] = match dtype {
        DType::F64 => [1e-12, 1e-10],
        _ => [2e-6, 2e-5],
    };
    let wanted = elements(golden.get("losses"));
    assert_eq!(wanted.len(), 5);
    for (i, wanted) in wanted.into_iter().enumerate() {
        let error = (step() - wanted).abs() / wanted;
        assert!(error <= loss_bound, "step {i}: {error:.2e}");
    }
    let parameters = model.parameters().into_iter();
    let parameters = parameters.map(|(name, var)| (name, var.as_tensor().clone()));
    let mut found = 0;
    for (name, weight) in to_golden_layout(model, parameters) {
        let key = format!("final.{name}");
        if let Some(wanted) = golden.tensors.get(&key) {
            close(&key, &weight, wanted, weight_bound);
            found += 1;
        }
    }
    assert_eq!(found, 2);
}

fn eager(name: &str, dtype: DType, attention: Algorithm, device: &Device) {
    let golden = Golden::read(name);
    let model = golden.model(dtype, attention, device);
    logits_loss_and_gradients(&golden, &model, dtype);
    let mut optimizer = Optimizer::new(model.parameters(), golden.hyperparameters).unwrap();
    let [tokens, targets] = golden.batch(device);
    five_steps(&golden, &model, dtype, || {
        let loss = model.loss(&tokens, &targets).unwrap();
        let value = elements(&loss)[0];
        optimizer.step(&tallow::backward(loss).unwrap()).unwrap();
        value
    });
}

#[rstest]
fn eager_is_as_transformers(
    #[values(
        "llama",
        "llama_tied",
        "llama_biased",
        "qwen2",
        "qwen3",
        "qwen3_biased",
        "mistral",
        "gemma2",
        "gpt2",
        "gpt2_erf"
    )]
    name: &str,
    #[values(DType::F64, DType::F32)] dtype: DType,
    #[values(KernelPolicy::Strict, KernelPolicy::Reference)] policy: KernelPolicy,
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
) {
    with_kernel_policy(policy, || eager(name, dtype, attention, &Device::Cpu));
}

fn planned(name: &str, attention: Algorithm, device: &Device) {
    let golden = Golden::read(name);
    let model = golden.model(DType::F32, attention, device);
    let mut optimizer = Optimizer::new(model.parameters(), golden.hyperparameters).unwrap();
    let [tokens, targets] = golden.batch(device);
    let mut step = Step::for_model(&model, &optimizer, &StepConfig::default()).unwrap();
    step.forward_backward((&tokens, &targets)).unwrap();
    let gradients = step.gradients().unwrap();
    let [_, _, bound] = bounds(DType::F32);
    close_gradients(&golden.tensors, to_golden_layout(&model, gradients), bound);
    five_steps(&golden, &model, DType::F32, || {
        f64::from(step.run(&mut optimizer, (&tokens, &targets)).unwrap())
    });
}

#[rstest]
fn planned_is_as_transformers(
    #[values(
        "llama",
        "llama_tied",
        "llama_biased",
        "qwen2",
        "qwen3",
        "qwen3_biased",
        "mistral",
        "gemma2",
        "gpt2",
        "gpt2_erf"
    )]
    name: &str,
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
) {
    planned(name, attention, &Device::Cpu);
}

#[cfg(feature = "cuda")]
#[rstest]
#[ignore = "needs a CUDA device"]
fn families_on_a_gpu(
    #[values(
        "llama",
        "llama_tied",
        "qwen2",
        "qwen3",
        "qwen3_biased",
        "mistral",
        "gemma2",
        "gpt2"
    )]
    name: &str,
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
) {
    eager(name, DType::F32, attention, &crate::gpu());
    if (name, attention) != ("gpt2", Algorithm::Flash) {
        return planned(name, attention, &crate::gpu());
    }
    // Heads of 11, which planned flash attention does not accept there.
    let golden = Golden::read(name);
    let model = golden.model(DType::F32, attention, &crate::gpu());
    let [tokens, targets] = golden.batch(&crate::gpu());
    let optimizer = Optimizer::new(model.parameters(), AdamWConfig::default()).unwrap();
    let mut step = Step::for_model(&model, &optimizer, &StepConfig::default()).unwrap();
    refusal(step.prepare((&tokens, &targets)), &["heads of 11"]);
}

#[test]
fn they_generate_the_same() {
    for name in NAMES {
        let golden = Golden::read(name);
        let model = golden.model(DType::F64, Algorithm::Naive, &Device::Cpu);
        let tokens: Vec<Vec<u32>> = golden.get("tokens").to_vec2().unwrap();
        let wanted: Vec<u32> = golden.get("generated").to_vec1().unwrap();
        let config = GenerateConfig {
            max_new_tokens: wanted.len(),
            temperature: 0.0,
            ..Default::default()
        };
        let generated = model.generate(&tokens[0][..5], &config).unwrap();
        assert!(
            generated.ends_with(&wanted),
            "{name}: {generated:?} for {wanted:?}"
        );
    }
}

#[test]
fn shards_that_the_library_wrote() {
    let model = hf::load(fixtures().join("sharded"), &Device::Cpu).unwrap();
    let golden = Golden::read("qwen3");
    let [tokens, _] = golden.batch(&Device::Cpu);
    let logits = model.forward(&tokens).unwrap();
    close(
        "logits",
        &logits,
        golden.get("logits"),
        bounds(DType::F32)[0],
    );
}

#[test]
fn what_is_saved_is_loaded() {
    for name in NAMES {
        let golden = Golden::read(name);
        let model = golden.model(DType::F32, Algorithm::Flash, &Device::Cpu);
        let folder = tempdir().unwrap();
        hf::save(&model, folder.path()).unwrap();
        let again = hf::load(folder.path(), &Device::Cpu).unwrap();
        let [tokens, _] = golden.batch(&Device::Cpu);
        let logits = |model: &TransformerLM| elements(&model.forward(&tokens).unwrap());
        assert_eq!(logits(&again), logits(&model), "{name}");
        // Also through this crate's own file format.
        let path = folder.path().join("own.safetensors");
        model.save(&path).unwrap();
        let own = TransformerLM::open(&path, &Device::Cpu).unwrap();
        assert_eq!(own.config(), model.config());
        let own = own.with_attention(model.attention()).unwrap();
        assert_eq!(logits(&own), logits(&model), "{name}");
    }
}

#[rstest]
fn what_is_saved_in_shards_is_loaded(#[values("qwen3", "gpt2")] name: &str) {
    let golden = Golden::read(name);
    let model = golden.model(DType::F32, Algorithm::Flash, &Device::Cpu);
    let folder = tempdir().unwrap();
    let [tokens, _] = golden.batch(&Device::Cpu);
    let logits = |model: &TransformerLM| elements(&model.forward(&tokens).unwrap());
    let shards = || {
        let files = fs::read_dir(folder.path()).unwrap();
        let files = files.map(|file| file.unwrap().file_name().into_string().unwrap());
        let mut shards: Vec<_> = files.filter(|name| name.ends_with("tensors")).collect();
        shards.sort();
        shards
    };
    hf::save(&model, folder.path()).unwrap();
    assert_eq!(shards(), ["model.safetensors"]);
    // The single file is removed, because `transformers` would read it.
    let in_shards = |max_shard_bytes| SaveOptions {
        max_shard_bytes,
        overwrite: true,
        ..Default::default()
    };
    hf::save_with(&model, folder.path(), &in_shards(24_000)).unwrap();
    let count = shards().len();
    assert!(count > 2, "{count}");
    assert_eq!(
        shards()[1],
        format!("model-00002-of-{count:05}.safetensors")
    );
    assert_eq!(
        logits(&hf::load(folder.path(), &Device::Cpu).unwrap()),
        logits(&model)
    );
    // A weight larger than the limit has its own shard.
    let each = tempdir().unwrap();
    hf::save_with(&model, each.path(), &in_shards(0)).unwrap();
    let weights = golden.tensors.keys().filter(|key| key.starts_with("grad."));
    assert_eq!(
        fs::read_dir(each.path()).unwrap().count(),
        weights.count() + 2
    );
    assert_eq!(
        logits(&hf::load(each.path(), &Device::Cpu).unwrap()),
        logits(&model)
    );
}

#[rstest]
#[case("attention_dropout", json!(0))]
#[case("partial_rotary_factor", json!(1))]
fn numbers_are_compared_by_value(#[case] key: &str, #[case] value: Value) {
    let golden = Golden::read("llama");
    golden.set(key, value);
    hf::config(golden.folder.path()).unwrap();
}

#[rstest]
#[case(0, 1, 8, "num_heads 0")]
#[case(4, 2, 0, "head_dim")]
#[case(usize::MAX - 1, 2, 3, "head_dim")]
#[case(4, 0, 8, "num_kv_heads 0")]
fn sizes_of_heads_that_are_refused(
    #[case] num_heads: usize,
    #[case] num_kv_heads: usize,
    #[case] head_dim: usize,
    #[case] named: &str,
) {
    let config = AttentionLayerConfig {
        d_model: 16,
        num_heads,
        num_kv_heads: Some(num_kv_heads),
        head_dim: Some(head_dim),
        qkv_bias: true,
        ..Default::default()
    };
    let vb = seeded(0, DType::F32, &Device::Cpu);
    refusal(Attention::new(&config, None, vb), &[named]);
}

/// Older files have another name for the scaling.
#[test]
fn a_scaling_under_its_older_name() {
    let golden = Golden::read("llama");
    let path = golden.folder.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let mut scaling = config["rope_parameters"].take();
    config["rope_theta"] = scaling["rope_theta"].take();
    scaling.as_object_mut().unwrap().remove("rope_theta");
    config["rope_scaling"] = scaling;
    config.as_object_mut().unwrap().remove("rope_parameters");
    let newer = hf::config(golden.folder.path()).unwrap();
    fs::write(&path, config.to_string()).unwrap();
    assert_eq!(hf::config(golden.folder.path()).unwrap(), newer);
}

#[rstest]
#[case::architecture("model_type", json!("mamba"), "mamba")]
#[case::activation("hidden_act", json!("gelu"), "gelu")]
#[case::bias("attention_bias", json!(true), "self_attn.q_proj.bias")]
#[case::other_bias("mlp_bias", json!(true), "mlp_bias is true")]
#[case::window("sliding_window", json!(8), "sliding_window is 8")]
#[case::unknown("residual_multiplier", json!(0.5), "residual_multiplier")]
#[case::scaling("rope_parameters", json!({"rope_type": "longrope", "rope_theta": 1e4}), "longrope")]
#[case::inside("rope_parameters", json!({"rope_type": "linear", "factor": 2.0, "mscale": 1.0}), "mscale")]
#[case::heads("num_key_value_heads", json!(4), "num_kv_heads 4")]
#[case::no_size("hidden_size", json!("wide"), "hidden_size")]
#[case::width("intermediate_size", json!(97), "mlp.")]
#[case::vocabulary("vocab_size", json!(62), "model.embed_tokens.weight")]
#[case::layers("num_hidden_layers", json!(3), "model.layers.2.")]
#[case::fewer_layers("num_hidden_layers", json!(1), "model.layers.1.")]
fn settings_that_are_refused(#[case] key: &str, #[case] value: Value, #[case] named: &str) {
    refused("llama", key, value, named);
}

#[rstest]
#[case::activation("activation_function", json!("relu"), "activation_function is \"relu\"")]
#[case::scores("scale_attn_by_inverse_layer_idx", json!(true), "scale_attn_by_inverse_layer_idx")]
#[case::scale("scale_attn_weights", json!(false), "scale_attn_weights")]
#[case::cross("add_cross_attention", json!(true), "add_cross_attention")]
#[case::mask("n_ctx", json!(64), "n_ctx is 64")]
#[case::unknown("residual_multiplier", json!(0.5), "residual_multiplier")]
#[case::others("rope_parameters", json!({"rope_type": "default"}), "rope_parameters")]
#[case::no_size("n_embd", json!("wide"), "n_embd")]
#[case::lacking("n_head", json!(null), "it has no n_head")]
#[case::heads("n_head", json!(4), "num_heads 4")]
#[case::width("n_inner", json!(51), "transformer.h.0.mlp.c_fc.weight: expected [33, 51], got [33, 50]")]
#[case::width_as_usual("n_inner", json!(null), "expected [33, 132], got [33, 50]")]
#[case::positions("n_positions", json!(95), "transformer.wpe.weight")]
#[case::vocabulary("vocab_size", json!(28), "transformer.wte.weight")]
#[case::layers("n_layer", json!(3), "transformer.h.2.")]
#[case::fewer_layers("n_layer", json!(1), "transformer.h.1.")]
#[case::untied("tie_word_embeddings", json!(false), "lm_head.weight")]
fn settings_of_gpt2_that_are_refused(#[case] key: &str, #[case] value: Value, #[case] named: &str) {
    refused("gpt2", key, value, named);
}

fn refused(family: &str, key: &str, value: Value, named: &str) {
    let golden = Golden::read(family);
    golden.set(key, value);
    refusal(hf::load(golden.folder.path(), &Device::Cpu), &[named]);
}

/// Settings of other tasks' heads, and keys that published files have or omit.
#[test]
fn settings_of_gpt2_that_change_nothing() {
    let golden = Golden::read("gpt2");
    let wanted = hf::config(golden.folder.path()).unwrap();
    for (key, value) in [
        ("n_ctx", json!(96)),
        ("n_special", json!(0)),
        ("predict_special_tokens", json!(true)),
        (
            "task_specific_params",
            json!({"text-generation": {"do_sample": true}}),
        ),
        ("tie_word_embeddings", json!(null)),
        ("layer_norm_epsilon", json!(null)),
        ("scale_attn_weights", json!(null)),
    ] {
        golden.set(key, value);
    }
    assert_eq!(hf::config(golden.folder.path()).unwrap(), wanted);
}

/// Dropout in training equals that of `transformers`: for GPT-2 the file's rates or 0.1, for other families that of the
/// attention probabilities.
#[test]
fn rates_of_dropout() {
    let golden = Golden::read("gpt2");
    let dropout = || hf::config(golden.folder.path()).unwrap().dropout;
    assert!(!dropout().is_active());
    golden.set("attn_pdrop", json!(0.3));
    golden.set("resid_pdrop", json!(0.2));
    golden.set("embd_pdrop", json!(null));
    let wanted = DropoutRates {
        embedding: 0.1,
        attention: 0.3,
        residual: 0.2,
    };
    assert_eq!(dropout(), wanted);
    let (model, saved) = (
        hf::load(golden.folder.path(), &Device::Cpu),
        tempfile::tempdir(),
    );
    let (model, saved) = (model.unwrap(), saved.unwrap());
    hf::save(&model, saved.path()).unwrap();
    assert_eq!(hf::config(saved.path()).unwrap().dropout, wanted);
    let saved = tempdir().unwrap();
    refused("gpt2", "attn_pdrop", json!(1.0), "dropout.attention");

    let golden = Golden::read("llama");
    golden.set("attention_dropout", json!(0.25));
    let model = hf::load(golden.folder.path(), &Device::Cpu).unwrap();
    assert_eq!(model.config().dropout.attention, 0.25);
    hf::save(&model, saved.path()).unwrap();
    assert_eq!(hf::config(saved.path()).unwrap(), *model.config());
    let everywhere = model.with_dropout(DropoutRates::all(0.1)).unwrap();
    refusal(hf::save(&everywhere, saved.path()), &["dropout"]);
}

/// GPT-2 files with other weights.
#[test]
fn weights_of_gpt2() {
    let golden = Golden::read("gpt2");
    let path = golden.folder.path().join("model.safetensors");
    let weights = safetensors::load(&path, &Device::Cpu).unwrap();
    let wanted = hf::load(golden.folder.path(), &Device::Cpu).unwrap();
    let load = |weights: &HashMap<String, Tensor>| {
        safetensors::save(weights, &path).unwrap();
        hf::load(golden.folder.path(), &Device::Cpu)
    };
    let refused = |weights: &HashMap<String, Tensor>, parts: [&str; 3]| {
        refusal(load(weights), &parts);
    };
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
    let file = "model.safetensors";

    // Without the prefix, and with tables of masks, as in the published files.
    let stripped = |(name, weight): (&String, &Tensor)| {
        let name = name.strip_prefix("transformer.").unwrap();
        (name.to_string(), weight.clone())
    };
    let mut older: HashMap<String, Tensor> = weights.iter().map(stripped).collect();
    older.insert("h.0.attn.bias".into(), zeros(&[1, 1, 96, 96]));
    older.insert("h.1.attn.masked_bias".into(), zeros(&[]));
    let [tokens, _] = golden.batch(&Device::Cpu);
    let logits = |model: TransformerLM| elements(&model.forward(&tokens).unwrap());
    assert_eq!(logits(load(&older).unwrap()), logits(wanted));
    older.insert("transformer.wpe.weight".into(), zeros(&[96, 33]));
    refused(&older, [file, "wpe.weight", "one tensor a weight"]);

    let mut other = weights.clone();
    let joined = "transformer.h.0.attn.c_attn.weight";
    for shape in [[33, 98], [99, 33], [33, 33]] {
        other.insert(joined.into(), zeros(&shape));
        let got = format!("got {shape:?}");
        refused(&other, [file, joined, &got]);
    }
    other.remove(joined);
    refused(
        &other,
        [file, joined, "expected [33, 99], got no such weight"],
    );

    let mut other = weights.clone();
    other.remove("transformer.wpe.weight");
    refused(
        &other,
        [
            file,
            "transformer.wpe.weight",
            "expected [96, 33], got no such weight",
        ],
    );

    let mut other = weights.clone();
    other.insert(
        "transformer.h.0.crossattention.c_attn.bias".into(),
        zeros(&[66]),
    );
    refused(
        &other,
        [
            file,
            "h.0.crossattention.c_attn.bias",
            "no such weight in 2 layers",
        ],
    );
}

#[test]
fn folders_that_are_refused() {
    let refused = |spoil: &dyn Fn(&Path), named: &str| {
        let folder = tempdir().unwrap();
        for file in fs::read_dir(fixtures().join("sharded")).unwrap() {
            let file = file.unwrap();
            fs::copy(file.path(), folder.path().join(file.file_name())).unwrap();
        }
        spoil(folder.path());
        refusal(hf::load(folder.path(), &Device::Cpu), &[named]);
    };
    let shard = "model-00002-of-00003.safetensors";
    let index = "model.safetensors.index.json";
    refused(&|f| fs::remove_file(f.join(shard)).unwrap(), shard);
    refused(
        &|f| fs::remove_file(f.join("config.json")).unwrap(),
        "config.json",
    );
    refused(
        &|f| {
            let bytes = fs::read(f.join(shard)).unwrap();
            fs::write(f.join(shard), &bytes[..bytes.len() - 1]).unwrap();
        },
        shard,
    );
    refused(&|f| fs::write(f.join(index), "{").unwrap(), index);
    refused(&|f| fs::write(f.join(index), "{}").unwrap(), "weight_map");
    let changed = |from: &'static str, to: &'static str| {
        move |f: &Path| {
            let text = fs::read_to_string(f.join(index)).unwrap();
            fs::write(f.join(index), text.replace(from, to)).unwrap();
        }
    };
    refused(&changed(shard, "../model.safetensors"), "not in the folder");
    refused(
        &changed("model.norm.weight", "model.norm.bias"),
        "model.norm.",
    );
}

/// Tokenizer files are copied with the model. A folder with shards becomes one file, and its index is removed.
#[test]
fn tokenizer_files_are_copied() {
    let from = fixtures().join("sharded");
    let model = hf::load(&from, &Device::Cpu).unwrap();
    let [source, target] = [tempdir().unwrap(), tempdir().unwrap()];
    for name in ["tokenizer.json", "notes.txt", "generation_config.json"] {
        fs::write(source.path().join(name), name).unwrap();
    }
    fs::copy(
        from.join("model.safetensors.index.json"),
        target.path().join("model.safetensors.index.json"),
    )
    .unwrap();
    let options = SaveOptions {
        from: Some(source.path().into()),
        ..Default::default()
    };
    refusal(
        hf::save_with(&model, target.path(), &options),
        &["model.safetensors.index.json", "overwrite"],
    );
    let options = SaveOptions {
        overwrite: true,
        ..options
    };
    hf::save_with(&model, target.path(), &options).unwrap();
    let files = fs::read_dir(target.path()).unwrap();
    let mut files: Vec<_> = files.map(|file| file.unwrap().file_name()).collect();
    files.sort();
    let wanted = [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ];
    assert_eq!(files, wanted);
    hf::load(target.path(), &Device::Cpu).unwrap();
}

fn configurations() -> impl Strategy<Value = TransformerConfig> {
    prop_oneof![3 => rotated(), 1 => gpt2s()]
}

/// The width is at least 8: a LayerNorm of two elements keeps hardly more than their order, so its gradients cancel.
fn gpt2s() -> impl Strategy<Value = TransformerConfig> {
    let heads = (1..6usize, 1..12usize);
    let heads = heads.prop_filter("8 elements", |(heads, head_dim)| heads * head_dim >= 8);
    let sizes = (1..30usize, 1..3usize, 2..50usize, any::<bool>());
    (heads, sizes).prop_map(|((num_heads, head_dim), sizes)| {
        let (d_ff, num_layers, vocab_size, tie_embeddings) = sizes;
        TransformerConfig {
            vocab_size,
            context_length: 20,
            d_model: num_heads * head_dim,
            d_ff,
            num_layers,
            num_heads,
            tie_embeddings,
            architecture: Architecture::Gpt2,
            ..Default::default()
        }
    })
}

fn rotated() -> impl Strategy<Value = TransformerConfig> {
    let heads = (1..4usize, 1..4usize, 1..21usize);
    let sizes = (4..40usize, 1..30usize, 1..3usize, 2..50usize);
    let flags = (
        any::<bool>(),
        any::<bool>(),
        any::<bool>(),
        any::<bool>(),
        any::<bool>(),
    );
    let padding = prop::option::of(0..2u32);
    (heads, sizes, flags, padding).prop_map(|(heads, sizes, flags, padding_id)| {
        let ((kv_heads, group, pairs), (d_model, d_ff, num_layers, vocab_size)) = (heads, sizes);
        let (qkv_bias, output_bias, qk_norm, tie_embeddings, halves) = flags;
        TransformerConfig {
            vocab_size,
            context_length: 20,
            d_model,
            d_ff,
            num_layers,
            num_heads: kv_heads * group,
            num_kv_heads: Some(kv_heads),
            head_dim: Some(2 * pairs),
            qkv_bias,
            output_bias,
            qk_norm,
            tie_embeddings,
            padding_id,
            rope_pairs: if halves {
                RotaryPairs::Halves
            } else {
                RotaryPairs::Adjacent
            },
            ..Default::default()
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Kernels, references and plans agree on unusual configurations.
    #[test]
    fn odd_configurations(config in configurations(), batch in 1..3usize, length in 1..20usize) {
        let ids = |shift: usize| {
            let ids = (0..batch * length).map(|i| ((i * i + shift) % config.vocab_size) as u32);
            Tensor::from_iter(ids, &Device::Cpu).unwrap().reshape((batch, length)).unwrap()
        };
        let (tokens, targets) = (ids(0), ids(1));
        let model = TransformerLM::new(&config, 1, &Device::Cpu).unwrap();
        prop_assert_eq!(config.num_parameters(), model.num_parameters());
        let attending = |attention| model.clone().with_attention(attention).unwrap();
        let of_policy = |policy, attention| with_kernel_policy(policy, || {
            let loss = attending(attention).loss(&tokens, &targets).unwrap();
            let gradients = tallow::backward(loss.clone()).unwrap();
            let parameters = model.parameters().into_iter();
            let gradients: Vec<Tensor> = parameters.map(|(_, p)| gradients.get(&p).unwrap().clone()).collect();
            (elements(&loss)[0], gradients)
        });
        let (wanted, gradients) = of_policy(KernelPolicy::Reference, Algorithm::Naive);
        let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
        let norms = gradients.iter().map(|gradient| norm(&elements(gradient)));
        let largest = norms.fold(0.0, f64::max);
        let near = |what: &str, got: &Tensor, wanted: &Tensor| {
            let (got, wanted) = (elements(got), elements(wanted));
            let differences: Vec<f64> = got.iter().zip(&wanted).map(|(a, b)| a - b).collect();
            // A gradient whose terms cancel has the rounding error of the others.
            let bound = 2e-5 * norm(&wanted) + 2e-6 * largest;
            prop_assert!(
                norm(&differences) <= bound,
                "{}: {:e} of {:e}",
                what,
                norm(&differences),
                norm(&wanted)
            );
            Ok(())
        };
        for attention in Algorithm::ALL {
            let (loss, found) = of_policy(KernelPolicy::Strict, attention);
            prop_assert!((loss - wanted).abs() <= 2e-6 * wanted.abs() + 1e-7, "{} {}", loss, wanted);
            for ((name, _), (found, wanted)) in model.parameters().iter().zip(found.iter().zip(&gradients)) {
                near(name, found, wanted)?;
            }
            let planned = attending(attention);
            let optimizer = Optimizer::new(planned.parameters(), AdamWConfig::default()).unwrap();
            let mut step = Step::for_model(&planned, &optimizer, &StepConfig::default()).unwrap();
            step.forward_backward((&tokens, &targets)).unwrap();
            let found = step.gradients().unwrap();
            for ((name, found), wanted) in found.iter().zip(&gradients) {
                near(name, found, wanted)?;
            }
        }
    }
}

/// Adjacent rotary pairs exist only in this crate.
#[test]
fn a_model_of_no_family_is_not_saved() {
    let config = TransformerConfig {
        d_model: 16,
        num_heads: 2,
        num_layers: 1,
        d_ff: 32,
        vocab_size: 20,
        ..Default::default()
    };
    let model = TransformerLM::new(&config, 0, &Device::Cpu).unwrap();
    let folder = tempdir().unwrap();
    refusal(hf::save(&model, folder.path()), &["rope_pairs"]);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn sizes_and_flops() {
    for name in NAMES {
        let golden = Golden::read(name);
        let model = golden.model(DType::F32, Algorithm::Flash, &Device::Cpu);
        let config = model.config();
        assert_eq!(config.num_parameters(), model.num_parameters(), "{name}");
        let shapes = config.parameter_shapes().into_iter();
        let parameters = model.parameters().into_iter();
        let parameters = parameters.map(|(name, var)| (name, var.shape().clone()));
        assert!(shapes.eq(parameters), "{name}");
        // The plan's matmuls have the same count.
        let batch = Batch::meta(2, 13).unwrap();
        let (plan, _) =
            Step::plan_for_model(&Device::Cpu, &model, &StepConfig::default(), batch).unwrap();
        let wanted = flops::forward_backward(config, 2, 13).total();
        let difference = (plan.flops() - wanted).abs();
        assert!(
            difference <= 1e-12 * wanted,
            "{name}: {} for {wanted}",
            plan.flops()
        );
    }
}

#[test]
fn memory_is_predicted() {
    if crate::child::ran("families::memory_is_predicted") {
        return;
    }
    assert!(tracker::current_bytes().is_some());
    let gpt2 = TransformerConfig {
        d_model: 192,
        num_heads: 6,
        d_ff: 512,
        num_layers: 3,
        vocab_size: 3000,
        tie_embeddings: true,
        architecture: Architecture::Gpt2,
        ..Default::default()
    };
    let grouped = TransformerConfig {
        d_model: 192,
        num_heads: 6,
        num_kv_heads: Some(2),
        head_dim: Some(48),
        d_ff: 512,
        num_layers: 3,
        vocab_size: 3000,
        qk_norm: true,
        tie_embeddings: true,
        rope_pairs: RotaryPairs::Halves,
        ..Default::default()
    };
    // GPT-2 with as many tokens as positions, and with fewer.
    let cases = [(&grouped, 128), (&gpt2, 128), (&gpt2, 256)];
    let all = cases
        .iter()
        .flat_map(|case| Algorithm::ALL.map(|attention| (*case, attention)));
    for ((config, sequence_length), attention) in all {
        let workload = Workload {
            batch_size: 4,
            sequence_length,
            mode: Mode::TrainStep,
            attention,
            ..Default::default()
        };
        let predicted = memory::estimate(config, &workload).unwrap().peak_bytes as f64;
        let measured = memory::measure(config, &workload).unwrap().peak_bytes as f64;
        let difference = (predicted - measured).abs() / measured;
        assert!(
            difference <= 0.02,
            "{attention}: {predicted} for {measured}"
        );
    }
}
