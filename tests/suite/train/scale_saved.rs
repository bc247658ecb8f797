//! Runs in f16, saved and resumed: the loss scale continues where it was.

use super::loss_scaling::{f16_regimes, in_f16};
use super::*;
use rstest::rstest;
use tallow::optim::GradScalerConfig;
use tallow::precision::Precision;
use tallow::train::Checkpoint;

/// Formats reports as text, in which NaN can be compared.
fn text(reports: &[StepReport]) -> Vec<String> {
    reports.iter().map(|report| format!("{report:?}")).collect()
}

#[rstest]
#[case::before_anything(0, 1)]
#[case::among_skipped_steps(2, 1)]
#[case::while_the_scale_stands(14, 1)]
#[case::accumulating(9, 3)]
#[case::at_the_end(24, 1)]
fn a_resumed_run_is_the_same_run(#[case] stop: usize, #[case] accumulation: usize) {
    for precision in f16_regimes() {
        let config = TrainConfig {
            accumulation,
            ..in_f16(precision)
        };
        let mut whole = start(config.clone());
        let expected = take(&mut whole, usize::MAX);
        assert!(expected[0].skipped && expected.iter().any(|report| !report.skipped));

        let (_folder, path) = checkpoint();
        let mut first = start(config.clone());
        let mut reports = take(&mut first, stop);
        first.save(&path).unwrap();
        let scale = first.loss_scale();
        drop(first);
        let saved = Checkpoint::read(&path).unwrap();
        assert_eq!(saved.loss_scaling.map(|state| state.scale), scale);

        let mut second = resume(&path, config).unwrap();
        assert_eq!(second.loss_scale(), scale);
        reports.extend(take(&mut second, usize::MAX));
        assert_eq!(text(&reports), text(&expected), "{precision}");
        assert_eq!(bits(&second), bits(&whole), "{precision}");
        assert_eq!(second.optimizer().steps(), whole.optimizer().steps());
        assert_eq!(second.history().skipped, whole.history().skipped);
    }
}

/// A run saved before loss scaling existed continues with an initial scale.
#[test]
fn runs_that_say_nothing_of_a_scale() {
    let config = TrainConfig {
        precision: Precision::F16,
        ..settings()
    };
    let saved = || {
        let (folder, path) = checkpoint();
        let mut trainer = start(config.clone());
        take(&mut trainer, 2);
        trainer.save(&path).unwrap();
        (folder, path)
    };
    let (_folder, path) = saved();
    let without = |text: &str| {
        let mut json: serde_json::Value = serde_json::from_str(text).unwrap();
        for (holder, key) in [
            ("", "loss_scaling"),
            ("/train", "loss_scaling"),
            ("/history", "skipped"),
        ] {
            let holder = json.pointer_mut(holder).unwrap().as_object_mut().unwrap();
            assert!(holder.remove(key).is_some());
        }
        json.to_string()
    };
    super::refusals::forge(&path, without, |_| Some(vec![]));
    let mut resumed = resume(&path, config.clone()).unwrap();
    assert_eq!(resumed.loss_scale(), Some(65536.0));
    take(&mut resumed, 1);
}

/// States that no scaler can have, and skipped steps beyond the steps taken, are refused.
#[rstest]
#[case("\"scale\":65536.0", "\"scale\":0.0", "scale must be")]
#[case("\"scale\":65536.0", "\"scale\":\"large\"", "large")]
#[case("\"scale\":65536.0,", "", "scale")]
#[case(
    "\"_growth_tracker\":2",
    "\"_growth_tracker\":2000",
    "growth_tracker must be"
)]
#[case("\"skipped\":[]", "\"skipped\":[3]", "2 steps taken, but [3]")]
#[case("\"skipped\":[]", "\"skipped\":[0]", "2 steps taken, but [0]")]
#[case("\"skipped\":[]", "\"skipped\":[2,2]", "2 steps taken, but [2, 2]")]
fn states_that_cannot_be(#[case] from: &str, #[case] to: &str, #[case] part: &str) {
    let config = TrainConfig {
        precision: Precision::F16,
        ..settings()
    };
    let (_folder, path) = checkpoint();
    let mut trainer = start(config.clone());
    take(&mut trainer, 2);
    trainer.save(&path).unwrap();
    let edit = |text: &str| {
        assert!(text.contains(from), "{text}");
        text.replace(from, to)
    };
    super::refusals::forge(&path, edit, |_| Some(vec![]));
    let error = refusal(resume(&path, config), &[part, "run.safetensors"]);
    assert!(matches!(error, Error::Format { .. }), "{error:?}");
}

/// Resuming with other settings of the scaler is refused as another run.
#[test]
fn the_scales_settings_are_the_runs() {
    let (_folder, path) = checkpoint();
    start(in_f16(Precision::F16)).save(&path).unwrap();
    let config = TrainConfig {
        loss_scaling: GradScalerConfig::default(),
        ..in_f16(Precision::F16)
    };
    refusal(
        resume(&path, config),
        &["saved with loss_scaling.growth_interval 3, resumed with 2000"],
    );
    let state = Checkpoint::read(&path).unwrap().loss_scaling.unwrap();
    assert_eq!(state.growth_interval, 3);
}
