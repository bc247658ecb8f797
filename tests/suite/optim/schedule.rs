//! Learning-rate schedules.

use rstest::rstest;
use tallow::Error;
use tallow::optim::Schedule;

const COSINE: Schedule = Schedule::WarmupCosine {
    max_lr: 1.0,
    min_lr: 0.1,
    warmup_steps: 8,
    total_steps: 24,
};
const LINEAR: Schedule = Schedule::WarmupLinear {
    max_lr: 1.0,
    min_lr: 0.1,
    warmup_steps: 8,
    total_steps: 24,
};

#[test]
fn corners_are_exact() {
    for schedule in [COSINE, LINEAR] {
        assert_eq!(schedule.learning_rate(0), 0.0);
        assert_eq!(schedule.learning_rate(2), 0.25);
        assert_eq!(schedule.learning_rate(8), 1.0);
        assert!(
            (schedule.learning_rate(16) - 0.55).abs() < 1e-15,
            "half way"
        );
        assert_eq!(schedule.learning_rate(24), 0.1);
        assert_eq!(schedule.learning_rate(25), 0.1);
        assert_eq!(schedule.learning_rate(usize::MAX), 0.1);
    }
    // At a quarter of the decay, (1 + cos(pi/4)) / 2 of the distance remains, or three quarters if linear.
    let left = (1.0 + 0.5f64.sqrt()) / 2.0;
    assert!((COSINE.learning_rate(12) - (0.1 + 0.9 * left)).abs() < 1e-15);
    assert!((LINEAR.learning_rate(12) - (0.1 + 0.9 * 0.75)).abs() < 1e-15);
    assert_eq!(Schedule::Constant { lr: 0.3 }.learning_rate(1_000_000), 0.3);
}

#[test]
fn it_rises_then_falls() {
    for schedule in [COSINE, LINEAR] {
        let rates: Vec<f64> = (0..=24).map(|t| schedule.learning_rate(t)).collect();
        assert!(rates[..=8].is_sorted_by(|a, b| a < b));
        assert!(rates[8..].is_sorted_by(|a, b| a > b));
    }
}

#[test]
fn no_warmup_starts_at_the_top_and_no_decay_ends_at_once() {
    for (warmup_steps, total_steps, expected) in [(0, 10, [1.0, 0.0]), (10, 10, [0.0, 0.0])] {
        for schedule in [
            Schedule::WarmupCosine {
                max_lr: 1.0,
                min_lr: 0.0,
                warmup_steps,
                total_steps,
            },
            Schedule::WarmupLinear {
                max_lr: 1.0,
                min_lr: 0.0,
                warmup_steps,
                total_steps,
            },
        ] {
            schedule.validate().unwrap();
            let got = [0, total_steps].map(|t| schedule.learning_rate(t));
            assert_eq!(got, expected, "{schedule:?}");
        }
    }
}

#[test]
fn the_same_bits_through_json() {
    let schedules = [
        COSINE,
        LINEAR,
        Schedule::Constant { lr: 0.1 + 0.2 },
        Schedule::WarmupCosine {
            max_lr: 1.0 / 3.0 * 1e-3,
            min_lr: 1e-4 / 7.0,
            warmup_steps: 100,
            total_steps: 2000,
        },
    ];
    for schedule in schedules {
        let text = serde_json::to_string(&schedule).unwrap();
        let back: Schedule = serde_json::from_str(&text).unwrap();
        assert_eq!(schedule, back, "{text}");
    }
    let text =
        r#"{"kind":"warmup_cosine","max_lr":1.0,"min_lr":0.1,"warmup_steps":8,"total_steps":24}"#;
    assert_eq!(serde_json::from_str::<Schedule>(text).unwrap(), COSINE);
}

#[rstest]
#[case("lr", Schedule::Constant { lr: f64::NAN })]
#[case("lr", Schedule::Constant { lr: 1e300 })] // infinite in f32
#[case("max_lr", Schedule::WarmupCosine { max_lr: 1e300, min_lr: 0.0, warmup_steps: 1, total_steps: 2 })]
#[case("total_steps", Schedule::WarmupCosine { max_lr: 1.0, min_lr: 0.0, warmup_steps: 0, total_steps: 0 })]
#[case("total_steps", Schedule::WarmupLinear { max_lr: 1.0, min_lr: 0.0, warmup_steps: 0, total_steps: 0 })]
#[case("max_lr", Schedule::WarmupCosine { max_lr: -1.0, min_lr: 0.0, warmup_steps: 1, total_steps: 2 })]
#[case("min_lr", Schedule::WarmupLinear { max_lr: 1.0, min_lr: -0.1, warmup_steps: 1, total_steps: 2 })]
#[case("min_lr", Schedule::WarmupLinear { max_lr: 1.0, min_lr: 2.0, warmup_steps: 1, total_steps: 2 })]
#[case("warmup_steps", Schedule::WarmupCosine { max_lr: 1.0, min_lr: 0.0, warmup_steps: 3, total_steps: 2 })]
#[case("decay_steps", Schedule::WarmupStableDecay {
    max_lr: 1.0, min_lr: 0.0, warmup_steps: 5, decay_steps: 6, total_steps: 10
})]
#[case("warmup_steps", Schedule::WarmupStableDecay {
    max_lr: 1.0, min_lr: 0.0, warmup_steps: 11, decay_steps: 0, total_steps: 10
})]
#[case("period", Schedule::CosineRestarts { max_lr: 1.0, min_lr: 0.0, period: 0, factor: 1 })]
#[case("factor", Schedule::CosineRestarts { max_lr: 1.0, min_lr: 0.0, period: 3, factor: 0 })]
#[case("min_lr", Schedule::CosineRestarts { max_lr: 1.0, min_lr: 1.5, period: 3, factor: 1 })]
#[case("steps", Schedule::Linear { lr: 1.0, start_factor: 0.0, end_factor: 1.0, steps: 0 })]
#[case("end_factor", Schedule::Linear { lr: 1.0, start_factor: 0.0, end_factor: -1.0, steps: 4 })]
#[case("lr", Schedule::Linear { lr: 1e30, start_factor: 1e30, end_factor: 1.0, steps: 4 })]
fn a_bad_schedule_names_its_field(#[case] wanted: &str, #[case] schedule: Schedule) {
    let error = schedule.validate().unwrap_err();
    assert!(
        matches!(&error, Error::Config { field, .. } if *field == wanted),
        "{error}"
    );
    assert!(COSINE.validate().is_ok());
}

#[test]
fn schedules_are_said_in_words() {
    let words = |schedule: Schedule| schedule.to_string();
    let cosine = "up to 1 in 8 steps, down to 0.1 at step 24 along a cosine";
    assert_eq!(words(COSINE), cosine);
    let linear = "up to 1 in 8 steps, down to 0.1 at step 24 in a straight line";
    assert_eq!(words(LINEAR), linear);
    assert_eq!(words(Schedule::Constant { lr: 3e-4 }), "constant 0.0003");
    let at_once = Schedule::WarmupLinear {
        max_lr: 0.003,
        min_lr: 0.003 / 10.0, // 0.00030000000000000003
        warmup_steps: 0,
        total_steps: 5,
    };
    let expected = "from 0.003, down to 0.0003 at step 5 in a straight line";
    assert_eq!(words(at_once), expected);
    let wsd = Schedule::WarmupStableDecay {
        max_lr: 0.003,
        min_lr: 0.0,
        warmup_steps: 4,
        decay_steps: 10,
        total_steps: 50,
    };
    assert_eq!(
        words(wsd),
        "up to 0.003 in 4 steps, down to 0 in the last 10 of 50 steps"
    );
    let restarts = |factor| Schedule::CosineRestarts {
        max_lr: 1.0,
        min_lr: 0.1,
        period: 9,
        factor,
    };
    let expected = "from 1 down to 0.1 along a cosine of 9 steps, restarted";
    assert_eq!(words(restarts(1)), expected);
    assert_eq!(words(restarts(2)), format!("{expected} 2 times as long"));
    let linear = Schedule::Linear {
        lr: 0.3,
        start_factor: 0.1,
        end_factor: 1.0,
        steps: 7,
    };
    assert_eq!(words(linear), "from 0.03 to 0.3 in 7 steps");
}
