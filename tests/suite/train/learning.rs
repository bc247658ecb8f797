//! One run: it learns, and its reported numbers are correct.

use super::*;
use candle_core::DType;
use tallow::data::SequentialBatches;
use tallow::report::{Format, plot};
use tallow::{no_grad, ops};

#[test]
fn a_repeating_text_is_learned_by_heart() {
    // Each token determines the next one, so the loss can reach 0.
    let ids: Vec<u32> = (0..400).map(|i| i % VOCAB as u32).collect();
    let (train, validation) = Tokens::from_ids(ids, VOCAB).unwrap().split(0.2).unwrap();
    let config = TrainConfig {
        steps: 150,
        schedule: Schedule::Constant { lr: 1e-2 },
        ..settings()
    };
    let mut trainer = Trainer::new(model(), config, train, validation).unwrap();
    let untrained = trainer.evaluate().unwrap();
    let uniform = (VOCAB as f64).ln();
    assert!((untrained - uniform).abs() < 1.0, "{untrained}");
    let reports = take(&mut trainer, usize::MAX);
    assert_eq!(reports.len(), 150);
    let losses: Vec<f64> = reports.iter().map(|report| report.loss).collect();
    assert!(losses[0] > 0.8 * uniform, "{}", losses[0]);
    assert!(losses[149] < 0.01, "{}", losses[149]);
    let trained = trainer.evaluate().unwrap();
    assert!(trained < 0.01, "{trained}");
}

/// 79 targets in windows of 11 and a remainder of 2: each counts once, whatever its batch.
#[test]
fn evaluation_is_the_mean_over_every_target() {
    let mut trainer = start(settings());
    let loss = trainer.evaluate().unwrap();
    let one_by_one = SequentialBatches::new(&validation(), 1, 11).unwrap();
    let mut sum = 0.0;
    let mut targets = 0;
    for batch in one_by_one.iter(&candle_core::Device::Cpu) {
        let batch = batch.unwrap();
        let logits = no_grad(|| trainer.model().forward(&batch.inputs)).unwrap();
        let logits = logits.to_dtype(DType::F64).unwrap();
        let loss = ops::cross_entropy(&logits, &batch.targets).unwrap();
        sum += loss.to_scalar::<f64>().unwrap() * batch.num_targets() as f64;
        targets += batch.num_targets();
    }
    assert_eq!(targets, 79);
    let expected = sum / 79.0;
    assert!(
        (loss - expected).abs() < 1e-6 * expected,
        "{loss} {expected}"
    );
}

#[test]
fn evaluations_fall_due_and_change_nothing() {
    let mut evaluated = start(settings());
    let mut plain = start(settings());
    let mut due = Vec::new();
    while let Some(report) = evaluated.step().unwrap() {
        if evaluated.evaluation_is_due() {
            due.push(report.step);
            evaluated.evaluate().unwrap();
        }
        assert_eq!(plain.step().unwrap(), Some(report));
    }
    assert_eq!(due, [5, 10, 12]);
    assert!(evaluated.is_done() && plain.step().unwrap().is_none());
    assert_eq!(bits(&evaluated), bits(&plain));
}

#[test]
fn the_history_is_kept_drawn_and_tabulated() {
    let mut trainer = start(settings());
    trainer.evaluate().unwrap();
    let reports = take(&mut trainer, 2);
    trainer.evaluate().unwrap();
    trainer.evaluate().unwrap(); // again in the same step: recorded once
    let history = trainer.history();
    let losses: Vec<f64> = reports.iter().map(|report| report.loss).collect();
    assert_eq!(history.losses, losses);
    let steps: Vec<usize> = history.evaluations.iter().map(|e| e.step).collect();
    assert_eq!(steps, [0, 2]);

    let mut csv = Vec::new();
    history.report().write_to(Format::Csv, &mut csv).unwrap();
    let csv = String::from_utf8(csv).unwrap();
    let lines: Vec<&str> = csv.lines().collect();
    assert_eq!(lines.len(), 4, "{csv}");
    assert_eq!(lines[0], "step,loss,validation_loss");
    assert!(lines[1].starts_with("0,,"), "{csv}");
    assert_eq!(lines[2], format!("1,{},", losses[0]));
    assert!(!lines[3].ends_with(','), "{csv}");

    let chart = history.chart();
    assert_eq!(chart.series[0].points[1], (2.0, losses[1]));
    assert_eq!(chart.series[1].points.len(), 2);
    assert!(plot::to_svg(&[chart]).unwrap().contains("validation"));
}

/// A long history is charted as means: at most 500 points for the complete run.
#[test]
fn a_long_history_is_drawn_in_means() {
    let history = tallow::train::History {
        losses: (0..1234).map(f64::from).collect(),
        ..Default::default()
    };
    let training = &history.chart().series[0];
    assert!(training.name.contains("mean of 3 steps"));
    assert_eq!(training.points.len(), 412); // 411 means of three steps, and one of one
    assert_eq!(training.points[0], (2.0, 1.0));
    assert_eq!(training.points[411], (1234.0, 1233.0));
}
