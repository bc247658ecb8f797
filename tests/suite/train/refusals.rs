//! Training runs and checkpoints that are refused, and the errors.

use super::*;
use crate::check::refusal;
use candle_core::Device;
use rstest::rstest;
use std::collections::HashMap;
use tallow::attention::Algorithm;
use tallow::optim::AdamWConfig;
use tallow::train::Checkpoint;

type Change = fn(&mut TrainConfig);

#[rstest]
#[case(|c: &mut TrainConfig| c.batch_size = 0, "TrainConfig: batch_size must be at least 1, got 0")]
#[case(|c: &mut TrainConfig| c.sequence_length = 0, "TrainConfig: sequence_length must be at least 1, got 0")]
#[case(|c: &mut TrainConfig| c.accumulation = 0, "TrainConfig: accumulation must be at least 1, got 0")]
#[case(|c: &mut TrainConfig| c.steps = 0, "TrainConfig: steps must be at least 1, got 0")]
#[case(|c: &mut TrainConfig| c.evaluate_every = 0, "TrainConfig: evaluate_every must be at least 1, got 0")]
#[case(|c: &mut TrainConfig| c.keep = 0, "TrainConfig: keep must be at least 1, got 0")]
#[case(
    |c: &mut TrainConfig| c.batch_size = usize::MAX,
    "TrainConfig: batch_size must be such that a step's tokens can be counted"
)]
#[case(|c: &mut TrainConfig| c.max_grad_norm = Some(0.0), "TrainConfig: max_grad_norm must be over 0, got 0")]
#[case(|c: &mut TrainConfig| c.max_grad_norm = Some(f64::NAN), "TrainConfig: max_grad_norm must be over 0, got NaN")]
#[case(|c: &mut TrainConfig| c.max_grad_value = Some(0.0), "TrainConfig: max_grad_value must be over 0, got 0")]
#[case(|c: &mut TrainConfig| c.schedule = Schedule::Constant { lr: -1.0 }, "Schedule: lr must be")]
#[case(|c: &mut TrainConfig| c.optimizer = AdamWConfig { betas: (0.9, 1.0), ..Default::default() }.into(), "AdamWConfig: betas.1 must be")]
#[case(|c: &mut TrainConfig| c.schedule = Schedule::Constant { lr: 1e300 }, "Schedule: lr must be")]
#[case(|c: &mut TrainConfig| c.optimizer = c.optimizer.with_weight_decay(1e300), "AdamWConfig: weight_decay must be")]
#[case(
    |c: &mut TrainConfig| { c.schedule = Schedule::Constant { lr: 1e20 }; c.optimizer = c.optimizer.with_weight_decay(1e20) },
    "AdamWConfig: weight_decay must be such that lr * weight_decay, 1e40, is finite in f32"
)]
#[case(
    |c: &mut TrainConfig| c.sequence_length = 14,
    "TrainConfig: sequence_length must be at most the model's context_length, 13, got 14"
)]
fn settings_that_cannot_work(#[case] change: Change, #[case] text: &str) {
    let mut config = settings();
    change(&mut config);
    let error = refusal(
        Trainer::new(model(), config, training(), validation()),
        &[text],
    );
    assert!(matches!(error, Error::Config { .. }), "{error:?}");
}

#[test]
fn data_that_is_too_short_or_of_another_vocabulary() {
    let new = |train, validation| Trainer::new(model(), settings(), train, validation);
    for (train, held_out) in [(noise(11, 0), validation()), (training(), noise(11, 0))] {
        let parts = ["more than 11 tokens", "sequence_length 11", "got 11 tokens"];
        let error = refusal(new(train, held_out), &parts);
        assert!(matches!(error, Error::Data { .. }), "{error:?}");
    }
    new(noise(12, 0), noise(12, 0)).unwrap(); // one window and its last target
    let bytes = || Tokens::from_bytes("text".repeat(20)).unwrap();
    for (train, held_out) in [(bytes(), validation()), (training(), bytes())] {
        let text = "TransformerConfig: vocab_size must be at least bytes in memory's, 256, got 11";
        refusal(new(train, held_out), &[text]);
    }
}

type ChangeModel = fn(&mut TransformerConfig);

#[rstest]
#[case(|m: &mut TransformerConfig| m.d_model = 24, "saved with d_model 20, resumed with 24")]
#[case(|m: &mut TransformerConfig| m.num_layers = 1, "saved with num_layers 2, resumed with 1")]
#[case(|m: &mut TransformerConfig| m.rope_theta = 5000.0, "saved with rope_theta 10000.0, resumed with 5000.0")]
fn another_model(#[case] change: ChangeModel, #[case] text: &str) {
    let (_folder, path) = checkpoint();
    start(settings()).save(&path).unwrap();
    let mut sizes = sizes();
    change(&mut sizes);
    let (train, validation) = (training(), validation());
    let result = Trainer::resume(&path, &sizes, settings(), train, validation, &Device::Cpu);
    let error = refusal(result, &[text, "run.safetensors"]);
    assert!(matches!(error, Error::Resume { .. }), "{error:?}");
}

#[rstest]
#[case(|c: &mut TrainConfig| c.batch_size = 4, "saved with batch_size 3, resumed with 4")]
#[case(|c: &mut TrainConfig| c.sequence_length = 12, "saved with sequence_length 11, resumed with 12")]
#[case(|c: &mut TrainConfig| c.accumulation = 2, "saved with accumulation 1, resumed with 2")]
#[case(|c: &mut TrainConfig| c.seed = 8, "saved with seed 7, resumed with 8")]
#[case(|c: &mut TrainConfig| c.attention = Some(Algorithm::Flash), "saved with attention naive, resumed with flash")]
#[case(|c: &mut TrainConfig| c.max_grad_norm = None, "saved with max_grad_norm 1.0, resumed with none")]
#[case(|c: &mut TrainConfig| c.max_grad_value = Some(2.0), "saved with max_grad_value none, resumed with 2.0")]
#[case(|c: &mut TrainConfig| c.optimizer = c.optimizer.with_weight_decay(0.0), "saved with optimizer.weight_decay 0.1, resumed with 0.0")]
#[case(
    |c: &mut TrainConfig| c.schedule = Schedule::Constant { lr: 1.0 },
    "saved with schedule.kind warmup_cosine, resumed with constant"
)]
#[case(|c: &mut TrainConfig| if let Schedule::WarmupCosine { total_steps, .. } = &mut c.schedule { *total_steps = 24 },
    "saved with schedule.total_steps 12, resumed with 24"
)]
fn other_settings(#[case] change: Change, #[case] text: &str) {
    let (_folder, path) = checkpoint();
    start(settings()).save(&path).unwrap();
    let mut config = settings();
    change(&mut config);
    let error = refusal(resume(&path, config), &[text, "run.safetensors"]);
    assert!(matches!(error, Error::Resume { .. }), "{error:?}");
}

#[test]
fn settings_that_no_step_depends_on_may_differ() {
    let (_folder, path) = checkpoint();
    start(settings()).save(&path).unwrap();
    let optimizer = settings().optimizer.with_lr(123.0); // unused, because the schedule sets the learning rate
    let config = TrainConfig {
        steps: 99,
        evaluate_every: 1,
        keep: 3,
        optimizer,
        ..settings()
    };
    assert_eq!(resume(&path, config).unwrap().config().steps, 99);
}

#[test]
fn other_data() {
    let (_folder, path) = checkpoint();
    start(settings()).save(&path).unwrap();
    let resume = |train, validation| {
        Trainer::resume(&path, &sizes(), settings(), train, validation, &Device::Cpu)
    };
    let mut ids = training().to_vec().unwrap();
    ids[123] = (ids[123] + 1) % VOCAB as u32;
    let changed = Tokens::from_ids(ids, VOCAB).unwrap();
    for (train, held_out, parts) in [
        (
            changed,
            validation(),
            ["saved with training data of 300", "resumed with 300"],
        ),
        (
            noise(301, 0),
            validation(),
            ["saved with training data of 300", "resumed with 301"],
        ),
        (
            training(),
            noise(80, 1),
            ["saved with validation data of 80", "resumed with 80"],
        ),
    ] {
        let error = refusal(resume(train, held_out), &parts);
        assert!(matches!(error, Error::Resume { .. }), "{error:?}");
    }
}

#[test]
fn files_that_are_no_whole_run() {
    let (folder, path) = checkpoint();
    let missing = folder.path().join("missing.safetensors");
    let error = refusal(
        resume(&missing, settings()),
        &["missing.safetensors", "cannot read"],
    );
    assert!(matches!(error, Error::Io { .. }), "{error:?}");

    start(settings()).save(&path).unwrap();
    let whole = std::fs::read(&path).unwrap();
    for len in [0, 4, 100, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&path, &whole[..len]).unwrap();
        let error = refusal(resume(&path, settings()), &["run.safetensors"]);
        assert!(matches!(error, Error::Format { .. }), "{len}: {error:?}");
    }
    std::fs::write(&path, "To be, or not to be").unwrap();
    let error = refusal(resume(&path, settings()), &["run.safetensors"]);
    assert!(matches!(error, Error::Format { .. }), "{error:?}");

    model().save(&path).unwrap(); // weights alone
    let parts = ["run.safetensors", "tallow.train", "TransformerLM::load"];
    let error = refusal(resume(&path, settings()), &parts);
    assert!(matches!(error, Error::Format { .. }), "{error:?}");
}

/// Rewrites a checkpoint in format 1: without checksums, with the history in the metadata. The metadata and tensors are
/// changed, but the file is a valid safetensors file.
pub(super) fn forge(
    path: &Path,
    edit: impl Fn(&str) -> String,
    keep: impl Fn(&str) -> Option<Vec<usize>>,
) {
    let history = serde_json::to_string(&Checkpoint::read(path).unwrap().history).unwrap();
    let bytes = std::fs::read(path).unwrap();
    let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let text = &header.metadata().as_ref().unwrap()["tallow.train"];
    let text = text.replace(
        "\"format\":2",
        &format!("\"format\":1,\"history\":{history}"),
    );
    let metadata = HashMap::from([("tallow.train".to_string(), edit(&text))]);
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tensors: Vec<_> = file
        .tensors()
        .into_iter()
        .filter(|(name, _)| !name.starts_with("history."))
        .filter_map(|(name, view)| {
            let shape = match keep(&name)? {
                same if same.is_empty() => view.shape().to_vec(),
                other => other,
            };
            let view = safetensors::tensor::TensorView::new(view.dtype(), shape, view.data());
            Some((name, view.unwrap()))
        })
        .collect();
    std::fs::write(
        path,
        safetensors::serialize(tensors, Some(metadata)).unwrap(),
    )
    .unwrap();
}

type Edit<'a> = &'a dyn Fn(&str) -> String;

#[test]
fn runs_that_lack_a_part_or_were_changed() {
    let (_folder, path) = checkpoint();
    let same = |text: &str| text.to_string();
    let all = |_: &str| Some(vec![]);
    let but = |what: &'static str| move |name: &str| (name != what).then(Vec::new);
    let forged = |edit: Edit, keep: &dyn Fn(&str) -> Option<Vec<usize>>, parts: &[&str]| {
        start(settings()).save(&path).unwrap();
        forge(&path, edit, keep);
        refusal(resume(&path, settings()), parts)
    };
    let state = "optimizer.exp_avg_sq.layers.1.ffn.w2.weight";
    for name in ["lm_head.weight", state] {
        let error = forged(&same, &but(name), &["run.safetensors", name, "expected"]);
        assert!(matches!(error, Error::Weight { .. }), "{error:?}");
    }
    let turned = |name: &str| Some(if name == state { vec![28, 20] } else { vec![] });
    let error = forged(&same, &turned, &[state, "[20, 28]", "[28, 20]"]);
    assert!(matches!(error, Error::Weight { .. }), "{error:?}");

    let later = |text: &str| text.replace("\"format\":1", "\"format\":3");
    let fewer = |text: &str| text.replace("\"step\":0", "\"step\":3");
    let broken = |text: &str| text[..text.len() / 2].to_string();
    let without = |text: &str| text.replace("\"history\"", "\"past\"");
    let edits: [(Edit, &[&str]); 4] = [
        (&later, &["a run in format 3", "reads formats 1 and 2"]),
        (&fewer, &["3 steps taken, but 0 losses"]),
        (&broken, &["tallow.train"]),
        (&without, &["tallow.train", "history"]),
    ];
    for (edit, parts) in edits {
        let error = forged(edit, &all, parts);
        assert!(matches!(error, Error::Format { .. }), "{error:?}");
    }
}

/// A checkpoint from before attention could be configured: naive.
#[test]
fn runs_that_say_nothing_of_attention() {
    let (_folder, path) = checkpoint();
    start(settings()).save(&path).unwrap();
    let without = |text: &str| {
        let changed = text.replace(",\"attention\":\"naive\"", "");
        assert_ne!(changed, text);
        changed
    };
    forge(&path, without, |_| Some(vec![]));
    resume(&path, settings()).unwrap();
    let saved = Checkpoint::read(&path).unwrap();
    assert_eq!((saved.model, saved.train), (sizes(), settings()));
}

/// A checkpoint from when the model's configuration had attention and checkpointing.
#[test]
fn runs_that_say_it_of_the_model() {
    let (_folder, path) = checkpoint();
    let flash = TrainConfig {
        attention: Some(Algorithm::Flash),
        ..settings()
    };
    start(flash.clone()).save(&path).unwrap();
    let older = |text: &str| {
        let fields = ",\"attention\":\"flash\",\"checkpointing\":\"none\"";
        assert_eq!(text.matches(fields).count(), 1);
        let model = "\"model\":{\"attention\":\"flash\",\"checkpointing\":\"block\",";
        text.replace(fields, "").replace("\"model\":{", model)
    };
    forge(&path, older, |_| Some(vec![]));
    let saved = Checkpoint::read(&path).unwrap();
    let without_checkpointing = TrainConfig {
        checkpointing: None,
        ..flash.clone()
    };
    assert_eq!((saved.model, saved.train), (sizes(), without_checkpointing));
    resume(&path, flash).unwrap();
    let text = "saved with attention flash, resumed with naive";
    refusal(resume(&path, settings()), &[text]);
}

/// A loss that is not finite stops the run before it has any effect.
#[test]
fn losses_and_gradients_that_are_not_finite() {
    let model = model();
    let mut trainer = Trainer::new(model.clone(), settings(), training(), validation()).unwrap();
    take(&mut trainer, 2);
    let head = model.parameters().pop().unwrap().1;
    let whole = head.as_tensor().copy().unwrap();
    let nan = whole.affine(f64::NAN, 0.0).unwrap();

    head.set(&nan).unwrap();
    let before = bits(&trainer);
    let error = refusal(
        trainer.step(),
        &[
            "the gradient of parameter token_embeddings.weight",
            "finite numbers",
            "a norm of NaN",
            "learning rate",
        ],
    );
    assert!(matches!(error, Error::Data { .. }), "{error:?}");
    assert_eq!(bits(&trainer), before);
    refusal(
        trainer.evaluate(),
        &["the validation loss after 2 steps", "a finite number"],
    );
    assert_eq!(trainer.history().losses.len(), 2);
    assert!(trainer.history().evaluations.is_empty());

    // With the weight restored, the run continues where it was.
    head.set(&whole).unwrap();
    let mut undisturbed = start(settings());
    take(&mut undisturbed, 2);
    assert_eq!(trainer.step().unwrap(), undisturbed.step().unwrap());
}

/// A separator outside the vocabulary, which no document can end with.
#[test]
fn a_separator_beyond_the_vocabulary() {
    let config = TrainConfig {
        separator: Some(VOCAB as u32),
        ..settings()
    };
    refusal(
        Trainer::new(model(), config, training(), validation()),
        &["separator", "under the model's vocab_size"],
    );
}
