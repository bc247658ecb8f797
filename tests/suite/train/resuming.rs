//! A run that is saved and resumed equals an uninterrupted run.

use super::*;
use rstest::rstest;
use tallow::attention::Algorithm;
use tallow::nn::{Checkpointing, Layer};
use tallow::train::Checkpoint;

/// Stopped after `stop` steps, in memory and from the file, with evaluations in between.
#[rstest]
#[case::at_the_start(0, 1)]
#[case::in_the_warm_up(1, 1)]
#[case::in_the_middle(7, 1)]
#[case::accumulating(5, 3)]
#[case::at_the_end(12, 1)]
fn losses_and_weights_have_the_same_bits(#[case] stop: usize, #[case] accumulation: usize) {
    let config = TrainConfig {
        accumulation,
        ..settings()
    };
    let mut whole = start(config.clone());
    let expected = take(&mut whole, usize::MAX);

    let (_folder, path) = checkpoint();
    let mut first = start(config.clone());
    let mut reports = take(&mut first, stop);
    first.evaluate().unwrap();
    first.save(&path).unwrap();
    let saved = bits(&first);
    take(&mut first, 3); // continuing does not change what was saved
    drop(first);

    let mut second = resume(&path, config).unwrap();
    assert_eq!(second.steps_taken(), stop);
    assert_eq!(bits(&second), saved);
    second.evaluate().unwrap();
    reports.extend(take(&mut second, usize::MAX));
    assert_eq!(reports, expected);
    assert_eq!(bits(&second), bits(&whole));
    assert_eq!(second.history().losses, whole.history().losses);
    assert_eq!(second.history().evaluations[0].step, stop);
}

/// A run resumed at every step writes the same file as an uninterrupted one, so numbers survive their text format.
#[test]
fn files_of_equal_runs_are_equal() {
    let (folder, path) = checkpoint();
    start(settings()).save(&path).unwrap();
    for step in 1..=settings().steps {
        let mut trainer = resume(&path, settings()).unwrap();
        assert_eq!(trainer.step().unwrap().unwrap().step, step);
        if trainer.evaluation_is_due() {
            trainer.evaluate().unwrap();
        }
        trainer.save(&path).unwrap();
    }
    let mut trainer = start(settings());
    while trainer.step().unwrap().is_some() {
        if trainer.evaluation_is_due() {
            trainer.evaluate().unwrap();
        }
    }
    let other = folder.path().join("other.safetensors");
    trainer.save(&other).unwrap();
    let read = |path| std::fs::read(path).unwrap();
    assert!(read(&path) == read(&other));
}

/// Activation checkpointing changes no bit, so it may differ in each part of a run.
#[test]
fn activations_may_be_checkpointed_from_then_on() {
    let (_folder, path) = checkpoint();
    let mut whole = start(settings());
    take(&mut whole, usize::MAX);
    let mut first = start(settings());
    take(&mut first, 5);
    first.save(&path).unwrap();
    for strategy in ["block", "sqrt"] {
        let checkpointing: Checkpointing = strategy.parse().unwrap();
        let config = TrainConfig {
            checkpointing: Some(checkpointing),
            ..settings()
        };
        let mut second = resume(&path, config).unwrap();
        assert_eq!(second.model().checkpointing(), checkpointing);
        take(&mut second, usize::MAX);
        assert_eq!(bits(&second), bits(&whole), "{strategy}");
    }
}

#[test]
fn a_finished_run_goes_on_if_it_is_given_more_steps() {
    let (_folder, path) = checkpoint();
    let mut trainer = start(settings());
    take(&mut trainer, usize::MAX);
    trainer.save(&path).unwrap();

    assert!(resume(&path, settings()).unwrap().step().unwrap().is_none());
    let longer = TrainConfig {
        steps: 14,
        evaluate_every: 3,
        ..settings()
    };
    let mut trainer = resume(&path, longer).unwrap();
    let reports = take(&mut trainer, usize::MAX);
    assert_eq!(reports.len(), 2);
    assert!(reports.iter().all(|report| report.learning_rate == 1e-3)); // the schedule's end

    let shorter = TrainConfig {
        steps: 11,
        ..settings()
    };
    let parts = ["steps", "12 already taken", "11"];
    let error = refusal(resume(&path, shorter), &parts);
    assert!(matches!(error, Error::Resume { .. }));
}

/// The attention algorithm belongs to the run: it is saved, and it affects the bits.
#[test]
fn flash_attention_goes_on_as_it_was() {
    let flash = TrainConfig {
        attention: Some(Algorithm::Flash),
        ..settings()
    };
    let mut trainer = start(flash.clone());
    assert_eq!(trainer.model().attention(), Algorithm::Flash);
    take(&mut trainer, 4);
    let (_folder, path) = checkpoint();
    trainer.save(&path).unwrap();
    let saved = Checkpoint::read(&path).unwrap().train;
    assert_eq!(saved, flash);
    resume(&path, flash).unwrap();
    let unset = TrainConfig {
        attention: None,
        checkpointing: None,
        ..settings()
    };
    let mut resumed = resume(&path, unset.clone()).unwrap();
    let flash = model().with_attention(Algorithm::Flash).unwrap();
    let of_flash = Trainer::new(flash, unset, training(), validation()).unwrap();
    assert_eq!(of_flash.model().attention(), Algorithm::Flash);
    assert_eq!(resumed.model().attention(), Algorithm::Flash);
    assert_eq!(take(&mut resumed, 8), take(&mut trainer, 8));
    assert_eq!(bits(&resumed), bits(&trainer));
    // The weights can be loaded with another attention, which starts another run.
    TransformerLM::load(&sizes(), &path, &candle_core::Device::Cpu).unwrap();
}

#[test]
fn f64_goes_on_as_it_was() {
    use candle_core::{DType, Device};
    let vb = tallow::nn::seeded(5, DType::F64, &Device::Cpu);
    let model = TransformerLM::from_var_builder(&sizes(), vb).unwrap();
    let mut trainer = Trainer::new(model, settings(), training(), validation()).unwrap();
    take(&mut trainer, 4);
    let (_folder, path) = checkpoint();
    trainer.save(&path).unwrap();
    let mut resumed = resume(&path, settings()).unwrap();
    assert_eq!(resumed.model().parameters()[0].1.dtype(), DType::F64);
    assert_eq!(take(&mut resumed, 3), take(&mut trainer, 3));
}

/// The data may move: tokens from memory may later come from a file.
#[test]
fn data_may_move() {
    let (folder, path) = checkpoint();
    start(settings()).save(&path).unwrap();
    let moved = folder.path().join("tokens.bin");
    let format = tallow::data::TokenFormat::RawU16;
    tallow::data::write_tokens(&moved, &training(), format).unwrap();
    let train = Tokens::open(&moved, VOCAB).unwrap();
    let device = candle_core::Device::Cpu;
    Trainer::resume(&path, &sizes(), settings(), train, validation(), &device).unwrap();
}

#[test]
fn a_checkpoint_says_what_it_holds_and_loads_as_a_plain_model() {
    let (_folder, path) = checkpoint();
    let mut trainer = start(settings());
    take(&mut trainer, 5);
    trainer.evaluate().unwrap();
    trainer.save(&path).unwrap();

    let saved = Checkpoint::read(&path).unwrap();
    assert_eq!(saved.step, 5);
    assert_eq!(saved.model, sizes());
    assert_eq!(saved.train, settings());
    assert_eq!(saved.dtype, "f32");
    assert_eq!(saved.training_data.tokens, 300);
    assert_eq!(&saved.history, trainer.history());

    let model = TransformerLM::load(&saved.model, &path, &candle_core::Device::Cpu).unwrap();
    for ((name, ours), (_, theirs)) in trainer.model().parameters().iter().zip(model.parameters()) {
        let values = |var: &candle_core::Var| {
            let flat = var.flatten_all().unwrap();
            flat.to_vec1::<f32>().unwrap()
        };
        assert_eq!(values(ours), values(&theirs), "{name}");
    }
}

#[test]
fn precision_is_the_runs() {
    use tallow::precision::Precision;
    let bf16 = TrainConfig {
        precision: Precision::BF16,
        ..settings()
    };
    let (_folder, path) = checkpoint();
    let mut trainer = start(bf16.clone());
    let mut plain = start(settings());
    let (report, in_f32) = (take(&mut trainer, 4), take(&mut plain, 4));
    for (report, in_f32) in report.iter().zip(&in_f32) {
        assert_ne!(report.loss, in_f32.loss);
        assert!(
            (report.loss / in_f32.loss - 1.0).abs() < 1e-2,
            "{report:?} {in_f32:?}"
        );
    }
    assert_eq!(
        trainer.model().parameters()[0].1.dtype(),
        candle_core::DType::F32
    );
    trainer.save(&path).unwrap();
    assert_eq!(Checkpoint::read(&path).unwrap().train, bf16);
    refusal(
        resume(&path, settings()),
        &["saved with precision bf16", "resumed with f32"],
    );
    let mut resumed = resume(&path, bf16).unwrap();
    assert_eq!(take(&mut resumed, 3), take(&mut trainer, 3));
    let (a, b) = (resumed.evaluate().unwrap(), plain.evaluate().unwrap());
    assert!(a != b);
}

/// Runs saved before precision could be configured are f32.
#[test]
fn a_run_that_says_nothing_of_precision_is_f32s() {
    let mut json = serde_json::to_value(settings()).unwrap();
    assert!(json.as_object_mut().unwrap().remove("precision").is_some());
    let config: TrainConfig = serde_json::from_value(json).unwrap();
    assert_eq!(config, settings());
}

/// A run that trains the last block alone: its file has all weights and names the frozen ones.
#[test]
fn frozen_weights_are_frozen_in_the_resumed_run() {
    let (_folder, path) = checkpoint();
    let is_frozen = |name: &str| !name.starts_with("layers.1.");
    let start = || {
        let model = model().freeze(is_frozen).unwrap();
        Trainer::new(model, settings(), training(), validation()).unwrap()
    };
    let mut whole = start();
    let expected = take(&mut whole, usize::MAX);
    let mut first = start();
    let mut reports = take(&mut first, 5);
    first.save(&path).unwrap();
    assert_eq!(Checkpoint::read(&path).unwrap().frozen.len(), 12);
    let mut second = resume(&path, settings()).unwrap();
    assert_eq!(second.model().parameters().len(), 9);
    reports.extend(take(&mut second, usize::MAX));
    assert_eq!(reports, expected);
    assert_eq!(bits(&second), bits(&whole));
    let before = model();
    let weights = before.weights().into_iter().zip(second.model().weights());
    for ((name, before), (_, after)) in weights {
        let changed = check::bits(&before) != check::bits(&after);
        assert_eq!(changed, !is_frozen(&name), "{name}");
    }
    // Nothing is left to train.
    let frozen = model().freeze(|_| true).unwrap();
    let refused = Trainer::new(frozen, settings(), training(), validation());
    refusal(refused, &["parameter"]);
}
