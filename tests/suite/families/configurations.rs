//! `config.json` files: written by `transformers` 4 and 5, by publishers, and refused ones.

use super::*;
use crate::check::refusal;
use std::num::NonZeroUsize;
use tallow::nn::RopeScaling;
use tallow::ops::Gelu;

/// Returns models by name, each with the content of its `config.json`.
fn configurations(file: &str) -> BTreeMap<String, Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/configurations");
    serde_json::from_slice(&fs::read(path.join(file)).unwrap()).unwrap()
}

fn read_with(config: &Value, options: &LoadOptions) -> tallow::Result<TransformerConfig> {
    let folder = tempdir().unwrap();
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    hf::config_with(folder.path(), options)
}

fn read(config: &Value) -> tallow::Result<TransformerConfig> {
    read_with(config, &LoadOptions::default())
}

/// Returns the required settings of a family, for a small model, plus these.
fn small(family: &str, more: Value) -> Value {
    let mut config = match family {
        "gpt2" => {
            json!({"vocab_size": 30, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 4})
        }
        _ => json!({
            "vocab_size": 30, "max_position_embeddings": 16, "hidden_size": 256, "intermediate_size": 48,
            "num_hidden_layers": 3, "num_attention_heads": 32,
        }),
    };
    config["model_type"] = json!(family);
    let config = config.as_object_mut().unwrap();
    config.extend(more.as_object().unwrap().clone());
    Value::Object(config.clone())
}

fn assert_refused(config: &Value, parts: &[&str]) {
    let error = read(config).unwrap_err().to_string();
    for part in parts.iter().chain(&["config.json"]) {
        assert!(error.contains(part), "{part} is not in {error}");
    }
}

/// Returns the sizes V, positions, D, L, H, Hkv, Dh, F.
fn sizes(config: &TransformerConfig) -> [usize; 8] {
    [
        config.vocab_size,
        config.context_length,
        config.d_model,
        config.num_layers,
        config.num_heads,
        config.num_kv_heads(),
        config.head_dim(),
        config.d_ff,
    ]
}

/// The folders of `examples/families` have the published numbers of parameters.
#[test]
fn shapes_of_examples() {
    for (name, parameters) in [
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-3b", 3_085_938_688),
        ("qwen2.5-7b", 7_615_616_512),
        ("llama-3.1-8b", 8_030_261_248),
    ] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/families");
        let config = hf::config(folder.join(name)).unwrap();
        let model = TransformerLM::meta(&config).unwrap();
        assert_eq!(model.num_parameters(), parameters, "{name}");
    }
}

/// The output of `to_dict()` of each family's configuration class, with all defaults.
#[rstest]
#[case("transformers_4.30.2.json", &["gpt2", "llama"])]
#[case("transformers_4.44.2.json", &["gpt2", "llama", "mistral", "qwen2"])]
#[case("transformers_4.57.1.json", &["gemma2", "gpt2", "llama", "mistral", "qwen2", "qwen3"])]
#[case("transformers_5.24.0.json", &["gemma2", "gpt2", "llama", "mistral", "qwen2", "qwen3"])]
fn dumps_of_the_library(#[case] file: &str, #[case] families: &[&str]) {
    let dumps = configurations(file);
    assert!(dumps.keys().eq(families), "{file}");
    for (family, dump) in dumps {
        let config = read(&dump).unwrap();
        let wanted = match family.as_str() {
            "gpt2" => [50_257, 1024, 768, 12, 12, 12, 64, 3072],
            "gemma2" => [256_000, 8192, 2304, 26, 8, 4, 256, 9216],
            "llama" => [32_000, 2048, 4096, 32, 32, 32, 128, 11_008],
            "mistral" => [32_000, 131_072, 4096, 32, 32, 8, 128, 14_336],
            _ => [151_936, 32_768, 4096, 32, 32, 32, 128, 22_016],
        };
        assert_eq!(sizes(&config), wanted, "{file} {family}");
        let window = config.sliding_window.map(NonZeroUsize::get);
        let has_window = ["mistral", "gemma2"].contains(&family.as_str());
        assert_eq!(window, has_window.then_some(4096));
        let caps = [config.attention_soft_cap, config.logit_soft_cap];
        let of_gemma = (family == "gemma2").then_some([50.0, 30.0]);
        assert_eq!(caps, of_gemma.map_or([None; 2], |caps| caps.map(Some)));
        assert_eq!(config.qkv_bias, family == "qwen2");
        assert_eq!(config.qk_norm, family == "qwen3");
        // Llama's default until 4.31.
        let is_old_llama = file.contains("4.30") && family == "llama";
        let padding = (is_old_llama || family == "gemma2").then_some(0);
        assert_eq!(config.padding_id, padding, "{file} {family}");
    }
}

/// The parameter count equals that of each published model.
#[rstest]
#[case("Qwen/Qwen2.5-0.5B", [151_936, 32_768, 896, 24, 14, 2, 64, 4864], 494_032_768)]
#[case("Qwen/Qwen2.5-1.5B", [151_936, 131_072, 1536, 28, 12, 2, 128, 8960], 1_543_714_304)]
#[case("Qwen/Qwen2.5-3B", [151_936, 32_768, 2048, 36, 16, 2, 128, 11_008], 3_085_938_688)]
#[case("Qwen/Qwen2.5-7B", [152_064, 131_072, 3584, 28, 28, 4, 128, 18_944], 7_615_616_512)]
#[case("Qwen/Qwen2.5-7B-Instruct", [152_064, 32_768, 3584, 28, 28, 4, 128, 18_944], 7_615_616_512)]
#[case("Qwen/Qwen2.5-14B", [152_064, 131_072, 5120, 48, 40, 8, 128, 13_824], 14_770_033_664)]
#[case("Qwen/Qwen2.5-32B", [152_064, 131_072, 5120, 64, 40, 8, 128, 27_648], 32_763_876_352)]
#[case("Qwen/Qwen2.5-72B", [152_064, 131_072, 8192, 80, 64, 8, 128, 29_568], 72_706_203_648)]
#[case("Qwen/Qwen2.5-Coder-7B", [152_064, 32_768, 3584, 28, 28, 4, 128, 18_944], 7_615_616_512)]
#[case("Qwen/Qwen2.5-Coder-32B-Instruct", [152_064, 32_768, 5120, 64, 40, 8, 128, 27_648], 32_763_876_352)]
#[case("Qwen/Qwen3-0.6B", [151_936, 40_960, 1024, 28, 16, 8, 128, 3072], 596_049_920)]
#[case("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", [151_936, 131_072, 1536, 28, 12, 2, 128, 8960], 1_777_088_000)]
#[case("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", [152_064, 131_072, 3584, 28, 28, 4, 128, 18_944], 7_615_616_512)]
#[case("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", [128_256, 131_072, 4096, 32, 32, 8, 128, 14_336], 8_030_261_248)]
#[case("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", [128_256, 131_072, 8192, 80, 64, 8, 128, 28_672], 70_553_706_496)]
#[case("meta-llama/Meta-Llama-3-8B", [128_256, 8192, 4096, 32, 32, 8, 128, 14_336], 8_030_261_248)]
#[case("meta-llama/Llama-3.1-8B-Instruct", [128_256, 131_072, 4096, 32, 32, 8, 128, 14_336], 8_030_261_248)]
#[case("meta-llama/Llama-3.2-1B", [128_256, 131_072, 2048, 16, 32, 8, 64, 8192], 1_235_814_400)]
#[case("meta-llama/Llama-3.2-3B", [128_256, 131_072, 3072, 28, 24, 8, 128, 8192], 3_212_749_824)]
#[case("meta-llama/Llama-3.3-70B-Instruct", [128_256, 131_072, 8192, 80, 64, 8, 128, 28_672], 70_553_706_496)]
#[case("huggyllama/llama-7b", [32_000, 2048, 4096, 32, 32, 32, 128, 11_008], 6_738_415_616)]
#[case("TinyLlama/TinyLlama-1.1B-Chat-v1.0", [32_000, 2048, 2048, 22, 32, 4, 64, 5632], 1_100_048_384)]
#[case("mistralai/Mistral-7B-v0.1", [32_000, 32_768, 4096, 32, 32, 8, 128, 14_336], 7_241_732_096)]
#[case("mistralai/Mistral-7B-Instruct-v0.2", [32_000, 32_768, 4096, 32, 32, 8, 128, 14_336], 7_241_732_096)]
#[case("mistralai/Mistral-7B-v0.3", [32_768, 32_768, 4096, 32, 32, 8, 128, 14_336], 7_248_023_552)]
#[case("HuggingFaceTB/SmolLM2-135M", [49_152, 8192, 576, 30, 9, 3, 64, 1536], 134_515_008)]
#[case("HuggingFaceTB/SmolLM2-360M", [49_152, 8192, 960, 32, 15, 5, 64, 2560], 361_821_120)]
#[case("HuggingFaceTB/SmolLM2-1.7B-Instruct", [49_152, 8192, 2048, 24, 32, 32, 64, 8192], 1_711_376_384)]
#[case("openai-community/gpt2", [50_257, 1024, 768, 12, 12, 12, 64, 3072], 124_439_808)]
#[case("openai-community/gpt2-medium", [50_257, 1024, 1024, 24, 16, 16, 64, 4096], 354_823_168)]
#[case("openai-community/gpt2-large", [50_257, 1024, 1280, 36, 20, 20, 64, 5120], 774_030_080)]
#[case("openai-community/gpt2-xl", [50_257, 1024, 1600, 48, 25, 25, 64, 6400], 1_557_611_200)]
#[case("distilbert/distilgpt2", [50_257, 1024, 768, 6, 12, 12, 64, 3072], 81_912_576)]
#[case("unsloth/Meta-Llama-3.1-8B", [128_256, 131_072, 4096, 32, 32, 8, 128, 14_336], 8_030_261_248)]
#[case("unsloth/Qwen2.5-0.5B", [151_936, 32_768, 896, 24, 14, 2, 64, 4864], 494_032_768)]
#[case("unsloth/mistral-7b-v0.3", [32_768, 32_768, 4096, 32, 32, 8, 128, 14_336], 7_248_023_552)]
#[case("google/gemma-2-2b", [256_000, 8192, 2304, 26, 8, 4, 256, 9216], 2_614_341_888)]
#[case("google/gemma-2-27b", [256_000, 8192, 4608, 46, 32, 16, 128, 36_864], 27_227_128_320)]
fn configurations_of_publishers(
    #[case] name: &str,
    #[case] wanted: [usize; 8],
    #[case] parameters: usize,
) {
    let published = configurations("published.json");
    assert_eq!(published.len(), 38, "a case for each");
    let json = &published[name];
    let config = read(json).unwrap();
    assert_eq!(sizes(&config), wanted);
    assert_eq!(config.num_parameters(), parameters);
    if config.architecture == Architecture::Llama {
        let theta = json.get("rope_theta").and_then(Value::as_f64);
        assert_eq!(config.rope_theta, theta.unwrap_or(10_000.0));
        assert_eq!(json!(config.norm_eps), json["rms_norm_eps"]);
        assert_eq!(json!(config.tie_embeddings), json["tie_word_embeddings"]);
        let padding = json.get("pad_token_id").cloned().unwrap_or_default();
        assert_eq!(json!(config.padding_id), padding);
    }
    let is_scaled = json.get("rope_scaling").is_some_and(Value::is_object);
    let scaling = matches!(config.rope_scaling, RopeScaling::Llama3 { .. });
    assert_eq!(scaling, is_scaled);
    let has_window = name == "mistralai/Mistral-7B-v0.1" || name.contains("gemma");
    let window = config.sliding_window.map(NonZeroUsize::get);
    assert_eq!(window, has_window.then_some(4096));
}

#[rstest]
#[case("llama", json!({"pretraining_tp": 2, "torchscript": true, "max_length": 4096, "auto_map": {"AutoModel": "x.y"}}))]
#[case("qwen2", json!({"use_mrope": false, "unsloth_fixed": true, "_attn_implementation_autoset": true, "top_k": 5}))]
#[case("mistral", json!({"attention_bias": true, "use_sliding_window": false, "max_window_layers": 1}))]
#[case("gpt2", json!({"pad_token_id": 29, "pruned_heads": {}, "is_decoder": false, "attn_implementation": "sdpa"}))]
fn settings_that_change_nothing(#[case] family: &str, #[case] more: Value) {
    let plain = read(&small(family, json!({}))).unwrap();
    assert_eq!(read(&small(family, more)).unwrap(), plain);
}

#[rstest]
#[case("qwen2", "use_mrope", json!(true))]
#[case("llama", "is_decoder", json!(true))]
#[case("llama", "is_encoder_decoder", json!(true))]
#[case("gpt2", "add_cross_attention", json!(true))]
#[case("gpt2", "pruned_heads", json!({"0": [1]}))]
#[case("llama", "quantization_config", json!({"load_in_4bit": true}))]
#[case("llama", "pad_token_id", json!(30))]
#[case("llama", "pad_token_id", json!(-31))]
#[case("llama", "pad_token_id", json!("0"))]
#[case("llama", "rms_norm_eps", json!(-1.0))]
#[case("llama", "attention_dropout", json!(1.5))]
#[case("llama", "rope_theta", json!(0))]
#[case("llama", "num_hidden_layers", json!(5_000_000_000u64))]
fn settings_out_of_range_name_the_file(
    #[case] family: &str,
    #[case] key: &str,
    #[case] value: Value,
) {
    let field = match key {
        "attention_dropout" => "dropout.attention",
        "num_hidden_layers" => "num_layers",
        "rms_norm_eps" => "norm_eps",
        key => key,
    };
    assert_refused(&small(family, json!({ key: value })), &[field]);
}

/// An unknown key is refused unless the caller names it; other unknown keys are still refused.
#[test]
fn keys_that_a_caller_ignores() {
    let config = small(
        "llama",
        json!({"residual_multiplier": 0.5, "logits_scaling": 2.0}),
    );
    assert_refused(&config, &["logits_scaling (2.0)", "--ignore-config-key"]);
    let ignoring = |keys: &[&str]| LoadOptions {
        ignore_keys: keys.iter().map(|key| (*key).into()).collect(),
        ..Default::default()
    };
    refusal(
        read_with(&config, &ignoring(&["logits_scaling"])),
        &["residual_multiplier"],
    );
    let both = ignoring(&["logits_scaling", "residual_multiplier"]);
    let plain = read(&small("llama", json!({}))).unwrap();
    assert_eq!(read_with(&config, &both).unwrap(), plain);
    // A nested key, and one that is known.
    let config = small(
        "llama",
        json!({"rope_scaling": {"type": "linear", "factor": 2.0, "finetuned": true}}),
    );
    assert_refused(&config, &["finetuned"]);
    let scaled = read_with(&config, &ignoring(&["finetuned"])).unwrap();
    assert_eq!(scaled.rope_scaling, RopeScaling::Linear { factor: 2.0 });
    assert_eq!(
        read_with(&config, &ignoring(&["rope_scaling"])).unwrap(),
        plain
    );

    let golden = Golden::read("llama");
    golden.set("logits_scaling", json!(2.0));
    hf::load(golden.folder.path(), &Device::Cpu).unwrap_err();
    let model = hf::load_with(
        golden.folder.path(),
        &ignoring(&["logits_scaling"]),
        &Device::Cpu,
    );
    model.unwrap();
}

/// `rope_scaling` takes precedence unless it is empty, with its own theta or the file's, like in `transformers`.
#[test]
fn two_scalings_of_angles() {
    let newer = json!({"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0});
    let of = |older: Value| {
        let more =
            json!({"rope_parameters": newer.clone(), "rope_scaling": older, "rope_theta": 7e5});
        let config = read(&small("llama", more)).unwrap();
        (config.rope_scaling, config.rope_theta)
    };
    let linear = |factor| RopeScaling::Linear { factor };
    assert_eq!(
        of(json!({"type": "linear", "factor": 2.0})),
        (linear(2.0), 7e5)
    );
    let own = json!({"rope_type": "linear", "factor": 2.0, "rope_theta": 9e5});
    assert_eq!(of(own), (linear(2.0), 9e5));
    assert_eq!(of(json!({})), (linear(4.0), 5e5));
    assert_eq!(of(json!(null)), (linear(4.0), 5e5));
}

/// Heads that a file omits are determined by the family; null is `None` of `transformers`.
#[rstest]
#[case("llama", 32, 8)]
#[case("mistral", 8, 8)]
#[case("qwen2", 32, 8)]
#[case("qwen3", 32, 128)]
fn heads_that_a_file_leaves_out(
    #[case] family: &str,
    #[case] num_kv_heads: usize,
    #[case] head_dim: usize,
) {
    let config = read(&small(family, json!({}))).unwrap();
    assert_eq!(
        [config.num_kv_heads(), config.head_dim()],
        [num_kv_heads, head_dim]
    );
    let nulls = json!({"num_key_value_heads": null, "head_dim": null});
    let config = read(&small(family, nulls)).unwrap();
    assert_eq!([config.num_kv_heads(), config.head_dim()], [32, 8]);
    let fewer = small(family, json!({"num_attention_heads": 4}));
    match family {
        "llama" => assert_eq!(read(&fewer).unwrap().num_kv_heads(), 4),
        _ => assert_refused(
            &fewer,
            &["num_heads", &format!("num_kv_heads {num_kv_heads}")],
        ),
    }
}

/// Qwen's window applies to the layers from `max_window_layers` on, if it is enabled.
#[rstest]
#[case(json!({"sliding_window": 8}), true)]
#[case(json!({"sliding_window": 8, "use_sliding_window": false}), true)]
#[case(json!({"sliding_window": 8, "use_sliding_window": true}), true)] // from layer 28 on
#[case(json!({"sliding_window": 8, "use_sliding_window": true, "max_window_layers": 3}), true)]
#[case(json!({"sliding_window": 8, "use_sliding_window": true, "max_window_layers": 2}), false)]
#[case(json!({"sliding_window": 16, "use_sliding_window": true, "max_window_layers": 0}), true)] // all tokens
#[case(json!({"sliding_window": null, "use_sliding_window": true, "max_window_layers": 0}), true)]
#[case(json!({"use_sliding_window": true, "max_window_layers": 0, "max_position_embeddings": 5000}), false)]
#[case(json!({"sliding_window": 8, "use_sliding_window": true, "max_window_layers": 0,
    "layer_types": ["full_attention", "full_attention", "full_attention"]}), true)]
#[case(json!({"layer_types": ["full_attention", "full_attention", "sliding_attention"]}), false)]
fn windows_of_some_layers(
    #[values("qwen2", "qwen3")] family: &str,
    #[case] more: Value,
    #[case] is_read: bool,
) {
    let config = small(family, more);
    match is_read {
        true => assert_eq!(read(&config).unwrap().sliding_window, None),
        false => assert_refused(&config, &["sliding_"]),
    }
}

#[rstest]
#[case(json!(null), Gelu::Tanh)]
#[case(json!("gelu_new"), Gelu::Tanh)]
#[case(json!("gelu_pytorch_tanh"), Gelu::Tanh)]
#[case(json!("gelu"), Gelu::Erf)]
fn activations_of_gpt2(#[case] name: Value, #[case] gelu: Gelu) {
    let config = read(&small("gpt2", json!({"activation_function": name}))).unwrap();
    assert_eq!(config.gelu, gelu);
}

/// A negative id counts from the end of the vocabulary, as in PyTorch's `padding_idx`.
#[test]
fn padding_ids() {
    let of = |id: Value| {
        read(&small("llama", json!({"pad_token_id": id})))
            .unwrap()
            .padding_id
    };
    assert_eq!(of(json!(null)), None);
    assert_eq!(of(json!(0)), Some(0));
    assert_eq!(of(json!(29)), Some(29));
    assert_eq!(of(json!(-1)), Some(29));
}

/// Configurations are written and read again, with attention biases in the families that have them.
#[rstest]
#[case("llama_biased", "llama")]
#[case("qwen3_biased", "qwen3")]
#[case("gpt2_erf", "gpt2")]
#[case("gemma2", "gemma2")]
fn configurations_that_are_written(#[case] name: &str, #[case] family: &str) {
    let model = Golden::read(name).model(DType::F32, Algorithm::Naive, &Device::Cpu);
    let folder = tempdir().unwrap();
    hf::save(&model, folder.path()).unwrap();
    let json = fs::read(folder.path().join("config.json")).unwrap();
    let json: Value = serde_json::from_slice(&json).unwrap();
    assert_eq!(json["model_type"], family);
    match family {
        "gpt2" => assert_eq!(json["activation_function"], "gelu"),
        "gemma2" => {
            assert_eq!(json["query_pre_attn_scalar"], 24);
            assert_eq!(json["attn_logit_softcapping"], 0.5);
            assert_eq!(json["final_logit_softcapping"], 2.0);
            assert_eq!(json["sliding_window"], 5);
        }
        _ => {
            assert_eq!(json["attention_bias"], true);
            assert_eq!(json["pad_token_id"], 7);
        }
    }
    let again = hf::load(folder.path(), &Device::Cpu).unwrap();
    assert_eq!(again.config(), model.config());
}

/// Gemma 2's windows are in every second layer or in none; its caps and its activation may differ.
#[test]
fn settings_of_gemma() {
    let of = |more: Value| read(&small("gemma2", more));
    let [sliding, full] = ["sliding_attention", "full_attention"];
    let config = of(json!({"sliding_window": 5})).unwrap();
    assert_eq!(config.sliding_window.map(NonZeroUsize::get), Some(5));
    assert_eq!(config.attention_scale, Some(1.0 / 16.0));
    assert_eq!(config.gelu, Gelu::Tanh);
    let kinds = json!({"sliding_window": 5, "layer_types": [sliding, full, sliding]});
    assert_eq!(of(kinds).unwrap(), config);
    let full = json!({"sliding_window": 5, "layer_types": [full, full, full]});
    let without = of(full).unwrap();
    assert_eq!(without.sliding_window, None);
    let folder = tempdir().unwrap();
    let model = TransformerLM::new(&without, 0, &Device::Cpu).unwrap();
    hf::save(&model, folder.path()).unwrap();
    assert_eq!(hf::config(folder.path()).unwrap(), without);
    let others = json!({
        "attn_logit_softcapping": null, "final_logit_softcapping": 10.0, "hidden_activation": "gelu",
        "query_pre_attn_scalar": 4, "pad_token_id": null,
    });
    let config = of(others).unwrap();
    let caps = [config.attention_soft_cap, config.logit_soft_cap];
    assert_eq!(caps, [None, Some(10.0)]);
    assert_eq!(
        (config.attention_scale, config.gelu),
        (Some(0.5), Gelu::Erf)
    );
    assert_eq!(config.padding_id, None);
    for (key, value) in [
        ("layer_types", json!([sliding, sliding, sliding])),
        ("hidden_activation", json!("silu")),
        ("attn_logit_softcapping", json!(0.0)),
        ("use_bidirectional_attention", json!(true)),
        ("query_pre_attn_scalar", json!(0)),
    ] {
        let error = of(json!({key: value})).unwrap_err().to_string();
        let named = if key.contains("soft") {
            "soft_cap"
        } else {
            key
        };
        assert!(error.contains(named), "{error}");
    }
    let config = TransformerConfig {
        attention_scale: Some(0.3),
        ..of(json!({})).unwrap()
    };
    let model = TransformerLM::new(&config, 0, &Device::Cpu).unwrap();
    refusal(
        hf::save(&model, tempdir().unwrap().path()),
        &["query_pre_attn_scalar"],
    );
}

/// A bias of the output projection alone belongs to no family.
#[test]
fn biases_that_no_family_has() {
    let golden = Golden::read("qwen3_biased");
    let config = hf::config(golden.folder.path()).unwrap();
    for (qkv_bias, qk_norm) in [(false, true), (false, false)] {
        let config = TransformerConfig {
            qkv_bias,
            qk_norm,
            ..config.clone()
        };
        let model = TransformerLM::new(&config, 0, &Device::Cpu).unwrap();
        refusal(
            hf::save(&model, tempdir().unwrap().path()),
            &["output_bias must be false"],
        );
    }
}
