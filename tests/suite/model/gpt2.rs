//! The architecture of GPT-2: its parameters, its errors, and its use by everything that runs a model.

use super::*;
use crate::compile::logits_of;
use rstest::rstest;
use tallow::nn::{Architecture, RopeScaling};
use tallow::ops::RotaryPairs;
use tallow::precision::{Autocast, Precision};
use tallow::{autocast, graph, no_grad};

/// Returns a configuration with heads of 5 elements, which rotary positions would not accept.
fn gpt2() -> TransformerConfig {
    TransformerConfig {
        d_model: 15,
        architecture: Architecture::Gpt2,
        tie_embeddings: true,
        ..mini()
    }
}

#[rstest]
fn names_shapes_and_order(#[values(false, true)] tie_embeddings: bool) {
    let config = TransformerConfig {
        tie_embeddings,
        ..gpt2()
    };
    let model = TransformerLM::new(&config, 0, &CPU).unwrap();
    let mut wanted: Vec<(String, Vec<usize>)> = Vec::new();
    let mut add = |name: &str, shape: &[usize]| wanted.push((name.into(), shape.to_vec()));
    add("token_embeddings.weight", &[29, 15]);
    add("position_embeddings.weight", &[16, 15]);
    for layer in ["layers.0", "layers.1"] {
        let maps = [
            ("ln1", &[15][..]),
            ("attn.q_proj", &[15, 15]),
            ("attn.k_proj", &[15, 15]),
            ("attn.v_proj", &[15, 15]),
            ("attn.output_proj", &[15, 15]),
            ("ln2", &[15]),
            ("ffn.w1", &[25, 15]),
            ("ffn.w2", &[15, 25]),
        ];
        for (name, shape) in maps {
            add(&format!("{layer}.{name}.weight"), shape);
            add(&format!("{layer}.{name}.bias"), &shape[..1]);
        }
    }
    add("ln_final.weight", &[15]);
    add("ln_final.bias", &[15]);
    if !tie_embeddings {
        add("lm_head.weight", &[29, 15]);
    }
    let parameters = model.parameters().into_iter();
    let got: Vec<_> = parameters.map(|(n, v)| (n, v.dims().to_vec())).collect();
    assert_eq!(got, wanted);
    let announced = config.parameter_shapes().into_iter();
    let announced: Vec<_> = announced.map(|(n, s)| (n, s.into_dims())).collect();
    assert_eq!(announced, wanted);
    assert_eq!(model.num_parameters(), config.num_parameters());
}

/// The parameter count of the smallest published model equals that of `transformers`.
#[test]
fn the_published_count() {
    let config = TransformerConfig {
        vocab_size: 50_257,
        context_length: 1024,
        tie_embeddings: true,
        architecture: Architecture::Gpt2,
        ..TransformerConfig::preset("small").unwrap()
    };
    config.validate().unwrap();
    assert_eq!(config.num_parameters(), 124_439_808);
}

/// A new model's loss is near ln(V); embeddings with a standard deviation of 1 would give logits in the tens.
#[test]
fn a_new_model_is_undecided() {
    let model = TransformerLM::new(&gpt2(), 0, &CPU).unwrap();
    let loss = model.loss(&ids(29, 2, 16), &ids(29, 2, 16)).unwrap();
    let loss = elements(&loss)[0];
    assert!((loss - 29f64.ln()).abs() < 0.1, "{loss}");
}

type Change = fn(&mut TransformerConfig);

#[rstest]
#[case(|c: &mut TransformerConfig| c.rope_theta = 5e5, &["rope_theta must be 10000", "got 500000", "learns"])]
#[case(|c: &mut TransformerConfig| c.rope_pairs = RotaryPairs::Halves, &["rope_pairs", "Adjacent", "Halves"])]
#[case(
    |c: &mut TransformerConfig| c.rope_scaling = RopeScaling::Linear { factor: 2.0 },
    &["rope_scaling must be None", "factor: 2.0"]
)]
#[case(|c: &mut TransformerConfig| c.qkv_bias = true, &["qkv_bias must be false", "have biases"])]
#[case(|c: &mut TransformerConfig| c.output_bias = true, &["output_bias must be false", "have biases"])]
#[case(|c: &mut TransformerConfig| c.padding_id = Some(0), &["padding_id must be None", "got Some(0)"])]
#[case(|c: &mut TransformerConfig| c.qk_norm = true, &["qk_norm must be false", "leave it out"])]
#[case(|c: &mut TransformerConfig| c.num_kv_heads = Some(1), &["num_kv_heads must be 3", "got 1"])]
#[case(|c: &mut TransformerConfig| c.head_dim = Some(4), &["head_dim must be 5", "got 4"])]
#[case(|c: &mut TransformerConfig| c.norm_eps = 0.0, &["norm_eps must be positive"])]
#[case(|c: &mut TransformerConfig| c.num_heads = 4, &["d_model must be divisible by num_heads 4"])]
fn what_has_no_place(#[case] change: Change, #[case] parts: &[&str]) {
    let mut config = gpt2();
    config.validate().unwrap();
    change(&mut config);
    refusal(config.validate(), parts);
    refusal(TransformerLM::new(&config, 0, &CPU), parts);
}

#[test]
fn what_is_given_as_it_is_has_a_place() {
    let config = TransformerConfig {
        num_kv_heads: Some(3),
        head_dim: Some(5),
        ..gpt2()
    };
    config.validate().unwrap();
}

#[test]
fn a_file_of_the_other_architecture() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let model = TransformerLM::new(&gpt2(), 0, &CPU).unwrap();
    model.save(&path).unwrap();
    assert_eq!(
        all_bits(&TransformerLM::open(&path, &CPU).unwrap()),
        all_bits(&model)
    );
    let llama = TransformerConfig {
        architecture: Architecture::Llama,
        ..mini()
    };
    let parts = [
        "model.safetensors",
        "position_embeddings.weight",
        "no such weight",
    ];
    refusal(
        TransformerLM::load(&llama, &path, &CPU),
        &["model.safetensors", "no such weight"],
    );
    let longer = TransformerConfig {
        context_length: 17,
        ..gpt2()
    };
    let error = TransformerLM::load(&longer, &path, &CPU);
    refusal(
        error,
        &["position_embeddings.weight", "[17, 15]", "[16, 15]"],
    );
    mini_model(0).save(&path).unwrap();
    let other = TransformerConfig {
        d_model: 18,
        ..gpt2()
    };
    refusal(TransformerLM::load(&other, &path, &CPU), &parts[..1]);
}

#[rstest]
fn gradients_under_autocast_are_near(
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
    #[values(DType::BF16, DType::F16)] lower: DType,
) {
    let model = attending(attention, &gpt2(), 1, DType::F32);
    let (tokens, targets) = (ids(29, 2, 13), ids(29, 3, 13).narrow(0, 1, 2).unwrap());
    let exact = gradients_of(&model.loss(&tokens, &targets).unwrap(), model.parameters());
    for policy in [Autocast::cuda(lower), Autocast::cpu(lower)] {
        let run = || {
            assert_eq!(model.forward(&tokens)?.dtype(), lower);
            model.loss(&tokens, &targets)
        };
        let loss = autocast(policy, run).unwrap();
        let gradients = gradients_of(&loss, model.parameters());
        let bound = if lower == DType::BF16 { 4e-2 } else { 5e-3 };
        for ((name, gradient), (_, exact)) in gradients.iter().zip(&exact) {
            assert_eq!(gradient.dtype(), DType::F32, "{name}");
            if !name.ends_with("k_proj.bias") {
                close(name, gradient, exact, bound); // that one is 0 up to rounding
            }
        }
    }
}

/// Recomputed blocks give the bits of saved ones.
#[rstest]
fn checkpointing_changes_no_bit(#[values("block", "every-2", "sqrt")] strategy: &str) {
    let config = TransformerConfig {
        num_layers: 5,
        ..gpt2()
    };
    let model = TransformerLM::new(&config, 1, &CPU).unwrap();
    let (tokens, targets) = (ids(29, 2, 16), ids(29, 2, 16));
    let step = |model: &TransformerLM| {
        let gradients = gradients_of(&model.loss(&tokens, &targets).unwrap(), model.parameters());
        gradients
            .iter()
            .map(|(_, gradient)| bits(gradient))
            .collect::<Vec<_>>()
    };
    let again = model.clone().with_checkpointing(strategy.parse().unwrap());
    assert_eq!(step(&again), step(&model));
}

/// A planned forward gives the eager logits, with fewer tokens than positions.
#[rstest]
fn a_planned_forward(#[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm) {
    let model = attending(attention, &gpt2(), 1, DType::F32);
    let tokens = ids(29, 2, 11);
    let mut step = logits_of(&model, Precision::F32);
    let planned = step.forward([("tokens", &tokens)]).unwrap();
    let eager = no_grad(|| model.forward(&tokens)).unwrap();
    close("logits", &planned, &eager, 1e-6);
}

/// Traced ops have the paths of their modules.
#[test]
fn places() {
    let model = TransformerLM::new(&gpt2(), 0, &CPU).unwrap();
    let tokens = graph::input("tokens", (2, 16), DType::U32).unwrap();
    let traced = graph::trace(graph::Target::Cpu, || model.forward(&tokens)).unwrap();
    let paths: Vec<&str> = traced.nodes().map(|node| node.path.as_str()).collect();
    for place in [
        "token_embeddings/embedding",
        "position_embeddings/add",
        "layers.0/ln1/layer_norm",
        "layers.1/attn/output_proj/linear_bias",
        "layers.1/ffn/w1/linear_bias",
        "layers.1/ffn/gelu_tanh",
        "layers.1/ffn/w2/linear_bias",
        "ln_final/layer_norm",
        "lm_head/linear",
    ] {
        assert!(paths.contains(&place), "{place} is not in {paths:?}");
    }
}
