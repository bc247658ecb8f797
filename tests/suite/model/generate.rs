//! Sampling: greedy is argmax, a seed determines the rest, and settings out of range are refused.

use super::*;
use rstest::rstest;
use tallow::model::GenerateConfig;

const PROMPT: [u32; 3] = [3, 14, 15];

fn greedy() -> GenerateConfig {
    GenerateConfig {
        max_new_tokens: 12,
        temperature: 0.0,
        ..Default::default()
    }
}

fn sampled(seed: u64) -> GenerateConfig {
    GenerateConfig {
        max_new_tokens: 40,
        seed,
        ..Default::default()
    }
}

/// Returns the most likely token after `tokens`, by a plain forward pass over the last 16.
fn argmax(model: &TransformerLM, tokens: &[u32]) -> u32 {
    let window = &tokens[tokens.len().saturating_sub(16)..];
    let input = Tensor::new(window, &CPU).unwrap().unsqueeze(0).unwrap();
    let logits = elements(&model.forward(&input).unwrap());
    let last = &logits[logits.len() - 29..];
    let best = last.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
    best.unwrap().0 as u32
}

#[test]
fn defaults_are_the_whole_distribution() {
    let config = GenerateConfig::default();
    assert_eq!((config.max_new_tokens, config.temperature), (256, 1.0));
    assert_eq!((config.top_k, config.top_p), (None, None));
    assert_eq!((config.seed, config.stop_token), (0, None));
    config.validate().unwrap();
}

#[rstest]
fn greedy_is_the_argmax_of_each_step(
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
) {
    for seed in 0..4 {
        let model = attending(attention, &mini(), seed, DType::F32);
        // Longer than the context of 16, so that the window moves.
        let config = GenerateConfig {
            max_new_tokens: 30,
            ..greedy()
        };
        let got = model.generate(&PROMPT, &config).unwrap();
        let mut wanted = PROMPT.to_vec();
        for _ in 0..30 {
            wanted.push(argmax(&model, &wanted));
        }
        assert_eq!(got, wanted[3..]);
        let reseeded = GenerateConfig { seed: 99, ..config };
        assert_eq!(model.generate(&PROMPT, &reseeded).unwrap(), got);
    }
}

#[test]
fn narrow_settings_are_greedy() {
    let model = mini_model(2);
    let wanted = model.generate(&PROMPT, &greedy()).unwrap();
    let sampled = GenerateConfig {
        temperature: 1.0,
        seed: 5,
        ..greedy()
    };
    let narrow = [
        GenerateConfig {
            top_k: Some(1),
            ..sampled.clone()
        },
        GenerateConfig {
            top_p: Some(1e-9),
            ..sampled.clone()
        },
        GenerateConfig {
            temperature: 1e-9,
            ..sampled.clone()
        },
    ];
    for config in narrow {
        let got = model.generate(&PROMPT, &config).unwrap();
        assert_eq!(got, wanted, "{config:?}");
    }
    assert_ne!(model.generate(&PROMPT, &sampled).unwrap(), wanted);
}

#[test]
fn wide_settings_change_nothing() {
    let model = mini_model(2);
    let wanted = model.generate(&PROMPT, &sampled(1)).unwrap();
    let wide = GenerateConfig {
        top_k: Some(1000),
        top_p: Some(1.0),
        ..sampled(1)
    };
    assert_eq!(model.generate(&PROMPT, &wide).unwrap(), wanted);
}

#[test]
fn a_seed_settles_the_sample() {
    let model = mini_model(2);
    let run = |seed| model.generate(&PROMPT, &sampled(seed)).unwrap();
    assert_eq!(run(1), run(1));
    assert_ne!(run(1), run(2));
    let tokens = run(1);
    assert_eq!(tokens.len(), 40);
    assert!(tokens.iter().all(|token| *token < 29));
    // Each token has its own random number: a new model is not certain of any token.
    let distinct: std::collections::HashSet<_> = tokens.iter().collect();
    assert!(distinct.len() > 8, "{tokens:?}");
    // A shorter run is a prefix of a longer one.
    let short = GenerateConfig {
        max_new_tokens: 7,
        ..sampled(1)
    };
    assert_eq!(model.generate(&PROMPT, &short).unwrap(), tokens[..7]);
}

/// Over many seeds, the frequencies of the first token match the softmax of the model's logits.
#[test]
fn samples_follow_the_model() {
    const DRAWS: u64 = 1500;

    let model = mini_model(2);
    let input = Tensor::new(&[PROMPT], &CPU).unwrap();
    let logits = elements(&model.forward(&input).unwrap());
    let exp: Vec<f64> = logits[2 * 29..].iter().map(|logit| logit.exp()).collect();
    let total: f64 = exp.iter().sum();
    let mut counts = [0.0; 29];
    for seed in 0..DRAWS {
        let config = GenerateConfig {
            max_new_tokens: 1,
            ..sampled(seed)
        };
        counts[model.generate(&PROMPT, &config).unwrap()[0] as usize] += 1.0;
    }
    for (token, count) in counts.iter().enumerate() {
        let share = exp[token] / total;
        let mean = share * DRAWS as f64;
        let spread = 5.0 * (mean * (1.0 - share)).sqrt();
        assert!(
            (count - mean).abs() < spread + 1.0,
            "{token}: {count} {mean}"
        );
    }
}

#[test]
fn the_stop_token_ends_it_and_is_kept() {
    let model = mini_model(2);
    let free = model.generate(&PROMPT, &sampled(1)).unwrap();
    let stop = free[9];
    let first = free.iter().position(|token| *token == stop).unwrap();
    let config = GenerateConfig {
        stop_token: Some(stop),
        ..sampled(1)
    };
    assert_eq!(model.generate(&PROMPT, &config).unwrap(), free[..=first]);
    // A stop token in the prompt does not stop, nor does an id outside the vocabulary.
    assert_ne!(free[0], PROMPT[2]);
    for stop in [PROMPT[2], 1000] {
        let config = GenerateConfig {
            stop_token: Some(stop),
            ..sampled(1)
        };
        let end = free.iter().position(|token| *token == stop);
        let wanted = &free[..end.map_or(40, |end| end + 1)];
        assert_eq!(model.generate(&PROMPT, &config).unwrap(), wanted);
    }
}

#[test]
fn prompts_of_any_length() {
    let model = mini_model(2);
    let long: Vec<u32> = (0..45).map(|i| i * 7 % 29).collect();
    let got = model.generate(&long, &greedy()).unwrap();
    // The model sees only the last 16 tokens.
    assert_eq!(got, model.generate(&long[29..], &greedy()).unwrap());
    assert_eq!(got[0], argmax(&model, &long));
    assert_eq!(model.generate(&long[..1], &greedy()).unwrap().len(), 12);
    assert_eq!(model.generate(&long[..16], &greedy()).unwrap().len(), 12);
    let none = GenerateConfig {
        max_new_tokens: 0,
        ..greedy()
    };
    assert_eq!(model.generate(&PROMPT, &none).unwrap(), [0u32; 0]);
}

type Change = fn(&mut GenerateConfig);

#[rstest]
#[case::cold(|c: &mut GenerateConfig| c.temperature = -0.5, &["temperature must be 0 or more", "got -0.5"])]
#[case::infinite(
    |c: &mut GenerateConfig| c.temperature = f64::INFINITY,
    &["temperature must be 0 or more, and finite", "got inf"]
)]
#[case::no_number(|c: &mut GenerateConfig| c.temperature = f64::NAN, &["temperature", "got NaN"])]
#[case::top_k(|c: &mut GenerateConfig| c.top_k = Some(0), &["top_k must be positive", "got 0"])]
#[case::top_p_zero(|c: &mut GenerateConfig| c.top_p = Some(0.0), &["top_p must be in (0, 1]", "got 0"])]
#[case::top_p_over(|c: &mut GenerateConfig| c.top_p = Some(1.5), &["top_p must be in (0, 1]", "got 1.5"])]
#[case::top_p_no_number(|c: &mut GenerateConfig| c.top_p = Some(f64::NAN), &["top_p must be in (0, 1]", "got NaN"])]
fn settings_out_of_range(#[case] change: Change, #[case] parts: &[&str]) {
    let mut config = greedy();
    change(&mut config);
    let with_type = [&["GenerateConfig: "], parts].concat();
    refusal(config.validate(), &with_type);
    refusal(mini_model(2).generate(&PROMPT, &config), &with_type);
}

#[test]
fn prompts_that_are_none() {
    let model = mini_model(2);
    refusal(
        model.generate(&[], &greedy()),
        &["generate", "at least one token", "got none"],
    );
    let parts = ["id 29 at position 1", "vocabulary of 29"];
    refusal(model.generate(&[1, 29, 2], &greedy()), &parts);
    // The error names the position in the prompt, even outside the model's window.
    let mut long = vec![1; 40];
    long[2] = 77;
    refusal(model.generate(&long, &greedy()), &["id 77 at position 2"]);
    long[2] = 1;
    long[39] = 88;
    refusal(model.generate(&long, &greedy()), &["id 88 at position 39"]);
}

#[test]
fn weights_that_have_diverged() {
    let model = mini_model(2);
    let (_, head) = model.parameters().pop().unwrap();
    let broken = head.as_tensor().affine(f64::INFINITY, 0.0).unwrap();
    head.set(&broken).unwrap();
    refusal(
        model.generate(&PROMPT, &greedy()),
        &["finite logits", "diverged"],
    );
}
