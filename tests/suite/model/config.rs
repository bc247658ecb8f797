//! Configurations: presets, counts, and the errors of `validate`.

use super::*;
use rstest::rstest;
use tallow::attention::Algorithm;
use tallow::model::flops;
use tallow::ops::Gelu;

/// The presets: name, D, F, L, H, and parameters at vocabulary 10,000.
const PRESETS: [(&str, usize, usize, usize, usize, usize); 8] = [
    ("tiny", 512, 1344, 4, 16, 22_696_448),
    ("small", 768, 3072, 12, 12, 128_625_408),
    ("medium", 1024, 4096, 24, 16, 423_183_360),
    ("large", 1280, 5120, 36, 20, 969_411_840),
    ("xl", 1600, 6400, 48, 25, 1_998_235_200),
    ("2.7b", 2560, 10_240, 32, 32, 3_406_809_600),
    ("wide", 3200, 25_600, 8, 4, 2_357_814_400),
    ("10b", 4608, 12_288, 50, 36, 12_832_823_808),
];

#[test]
fn presets_are_the_published_ones() {
    let mut names: Vec<&str> = PRESETS.iter().map(|preset| preset.0).collect();
    let mut known = TransformerConfig::PRESETS;
    names.sort_unstable();
    known.sort_unstable();
    assert_eq!(names, known);
    for (name, d_model, d_ff, num_layers, num_heads, parameters) in PRESETS {
        let config = TransformerConfig::preset(name).unwrap();
        let wanted = TransformerConfig {
            vocab_size: 10_000,
            context_length: 256,
            d_model,
            num_layers,
            num_heads,
            d_ff,
            rope_theta: 10_000.0,
            norm_eps: 1e-5,
            num_kv_heads: None,
            head_dim: None,
            qkv_bias: false,
            output_bias: false,
            qk_norm: false,
            tie_embeddings: false,
            rope_pairs: Default::default(),
            rope_scaling: Default::default(),
            sliding_window: None,
            attention_scale: None,
            attention_soft_cap: None,
            logit_soft_cap: None,
            dropout: Default::default(),
            padding_id: None,
            gelu: Gelu::Tanh,
            architecture: Default::default(),
        };
        assert_eq!(config, wanted, "{name}");
        config.validate().unwrap();
        assert_eq!(config.num_parameters(), parameters, "{name}");
        let shapes = config.parameter_shapes();
        let sum: usize = shapes.iter().map(|(_, shape)| shape.elem_count()).sum();
        assert_eq!(sum, parameters, "{name}");
    }
}

#[test]
fn presets_have_names_in_either_case() {
    type C = TransformerConfig;
    for name in C::PRESETS {
        let upper = C::preset(&name.to_ascii_uppercase()).unwrap();
        assert_eq!(C::preset(name).unwrap(), upper, "{name}");
    }
    assert_eq!(C::default(), C::preset("tiny").unwrap());
    let sizes = C::PRESETS.map(|name| C::preset(name).unwrap().num_parameters());
    assert!(sizes.is_sorted(), "{sizes:?}"); // ordered by size, whatever their names
    refusal(
        C::preset("huge"),
        &["preset", "\"huge\"", "tiny, small, medium", "2.7b"],
    );
}

#[test]
fn head_dim_divides_the_width() {
    assert_eq!(TransformerConfig::default().head_dim(), 32);
    assert_eq!(TransformerConfig::preset("wide").unwrap().head_dim(), 800);
    assert_eq!(mini().head_dim(), 6);
}

#[test]
fn counting_saturates() {
    let counted = |vocab_size, d_model, d_ff, num_layers| {
        let sizes = TransformerConfig {
            vocab_size,
            d_model,
            d_ff,
            num_layers,
            ..mini()
        };
        sizes.num_parameters()
    };
    assert_eq!(counted(1 << 40, 1 << 40, 1, 1), usize::MAX); // more than 64 bits
    // More than 128 bits too; with wrapping arithmetic the sum would be 2^63.
    assert_eq!(counted(1 << 63, 1 << 63, 4, 1 << 63), usize::MAX);
}

#[test]
fn it_survives_json() {
    let read = |text: &str| serde_json::from_str::<TransformerConfig>(text).unwrap();
    let text = serde_json::to_string(&mini()).unwrap();
    assert!(text.contains("\"d_ff\":25"), "{text}");
    assert_eq!(read(&text), mini());
    // A configuration from when attention and checkpointing were fields.
    for attention in Algorithm::ALL {
        let fields = format!("{{\"attention\":\"{attention}\",\"checkpointing\":\"every-2\",");
        let older = text.replacen('{', &fields, 1);
        assert_eq!(read(&older), mini());
    }
}

type Change = fn(&mut TransformerConfig);

#[rstest]
#[case::vocab_size(|c: &mut TransformerConfig| c.vocab_size = 0, &["vocab_size must be positive", "got 0"])]
#[case::context_length(|c: &mut TransformerConfig| c.context_length = 0, &["context_length must be positive", "got 0"])]
#[case::d_model(|c: &mut TransformerConfig| c.d_model = 0, &["d_model must be positive", "got 0"])]
#[case::num_layers(|c: &mut TransformerConfig| c.num_layers = 0, &["num_layers must be positive", "got 0"])]
#[case::num_heads(|c: &mut TransformerConfig| c.num_heads = 0, &["num_heads must be positive", "got 0"])]
#[case::d_ff(|c: &mut TransformerConfig| c.d_ff = 0, &["d_ff must be positive", "got 0"])]
#[case::indivisible(
    |c: &mut TransformerConfig| c.num_heads = 4,
    &["d_model must be divisible by num_heads 4", "got 18", "each head gets"]
)]
#[case::odd_head(
    |c: &mut TransformerConfig| c.num_heads = 2,
    &["num_heads must be such that d_model / num_heads is even", "head dimension of 9", "pairs"]
)]
#[case::more_heads_than_width(
    |c: &mut TransformerConfig| c.num_heads = 36,
    &["d_model must be divisible by num_heads 36", "got 18"]
)]
#[case::theta_zero(|c: &mut TransformerConfig| c.rope_theta = 0.0, &["rope_theta must be positive", "got 0", "10000"])]
#[case::theta_negative(|c: &mut TransformerConfig| c.rope_theta = -1.0, &["rope_theta must be positive", "got -1"])]
#[case::theta_infinite(
    |c: &mut TransformerConfig| c.rope_theta = f64::INFINITY,
    &["rope_theta must be positive and finite", "got inf"]
)]
#[case::eps_zero(|c: &mut TransformerConfig| c.norm_eps = 0.0, &["norm_eps must be positive", "1e-5"])]
#[case::eps_0_in_f32(|c: &mut TransformerConfig| c.norm_eps = 1e-50, &["eps must be positive", "0 / 0"])]
#[case::eps_no_number(
    |c: &mut TransformerConfig| c.norm_eps = f64::NAN,
    &["norm_eps must be positive", "got NaN"]
)]
#[case::vocab_past_u32(
    |c: &mut TransformerConfig| c.vocab_size = 1 << 32,
    &["vocab_size must be under 2^32", "got 4294967296"]
)]
#[case::width_past_u32(|c: &mut TransformerConfig| c.d_model = 1 << 40, &["d_model must be under 2^32"])]
#[case::uncountable(
    |c: &mut TransformerConfig| (c.vocab_size, c.d_model, c.num_heads) = (u32::MAX as usize, 1 << 31, 1 << 30),
    &["TransformerConfig", "parameters"]
)]
fn configurations_that_are_no_models(#[case] change: Change, #[case] parts: &[&str]) {
    let mut config = mini();
    change(&mut config);
    let with_type = [&["TransformerConfig: "], parts].concat();
    refusal(config.validate(), &with_type);
    // Every constructor gives the same error, before any weight is drawn or read.
    refusal(TransformerLM::new(&config, 0, &CPU), parts);
    refusal(
        TransformerLM::from_var_builder(&config, seeded(DType::F32)),
        parts,
    );
    refusal(TransformerLM::load(&config, "no such file", &CPU), parts);
}

/// Flash attention accepts up to 256 elements per head, naive any number. Of the presets, only `wide` has more.
#[test]
fn heads_that_flash_attention_takes() {
    let of = |attention, head_dim: usize| {
        let config = TransformerConfig {
            d_model: 3 * head_dim,
            ..mini()
        };
        TransformerLM::meta(&config)
            .unwrap()
            .with_attention(attention)
    };
    of(Algorithm::Flash, 256).unwrap();
    of(Algorithm::Naive, 258).unwrap();
    let parts = [
        "attention must be naive where a head has more than 256 elements",
        "got flash for heads of 258",
        "choose naive, or more heads",
    ];
    refusal(of(Algorithm::Flash, 258), &parts);
    for name in TransformerConfig::PRESETS {
        let preset = TransformerConfig::preset(name).unwrap();
        let taken = preset.check_attention(Algorithm::Flash).is_ok();
        assert_eq!(taken, name != "wide", "{name}");
    }
}

/// Petabytes are refused before any weight is drawn, with both sizes in the error.
#[cfg(target_os = "linux")]
#[test]
fn more_than_there_is_memory() {
    let huge = TransformerConfig {
        vocab_size: 1 << 24,
        d_model: 3 << 23,
        ..mini()
    };
    huge.validate().unwrap();
    let parameters = format!("a model of {} parameters", huge.num_parameters());
    let parts = [
        parameters.as_str(),
        "needs",
        "are available",
        "smaller model",
    ];
    let error = refusal(TransformerLM::new(&huge, 0, &CPU), &parts);
    let Error::OutOfMemory {
        wanted_bytes,
        available_bytes,
        ..
    } = error
    else {
        panic!("{error:?}");
    };
    assert!(wanted_bytes >= 4 * huge.num_parameters() as u64);
    assert!(available_bytes > 0 && available_bytes < wanted_bytes);
}

/// B 2, T 3, V 11, D 4, F 6, L 5, H 2, matmul by matmul.
#[test]
fn flops_by_hand() {
    let config = TransformerConfig {
        vocab_size: 11,
        context_length: 8,
        d_model: 4,
        num_layers: 5,
        num_heads: 2,
        d_ff: 6,
        ..Default::default()
    };
    // A matmul of (rows, depth, columns) costs 2 * rows * depth * columns.
    let product = |rows: u32, depth: u32, columns: u32| f64::from(2 * rows * depth * columns);
    let rows = 2 * 3; // B T
    let forward = flops::forward(&config, 2, 3);
    assert_eq!(forward.embedding, 0.0);
    assert_eq!(forward.projections, 5.0 * 4.0 * product(rows, 4, 4));
    let heads = 2.0 * 2.0; // B H, each with q k^T and p v
    let attention = product(3, 2, 3) + product(3, 3, 2);
    assert_eq!(forward.attention, 5.0 * heads * attention);
    let feed_forward = 2.0 * product(rows, 4, 6) + product(rows, 6, 4);
    assert_eq!(forward.feed_forward, 5.0 * feed_forward);
    assert_eq!(forward.head, product(rows, 4, 11));
    assert_eq!(forward.total(), 3840.0 + 1440.0 + 4320.0 + 528.0);

    let backward = flops::backward(&config, 2, 3);
    let both = flops::forward_backward(&config, 2, 3);
    type Part = fn(&flops::Flops) -> f64;
    let parts: [Part; 6] = [
        |f| f.embedding,
        |f| f.projections,
        |f| f.attention,
        |f| f.feed_forward,
        |f| f.head,
        flops::Flops::total,
    ];
    for part in parts {
        assert_eq!(part(&backward), 2.0 * part(&forward));
        assert_eq!(part(&both), 3.0 * part(&forward));
    }
    let sum: f64 = parts[..5].iter().map(|part| part(&forward)).sum();
    assert_eq!(sum, forward.total());
}
