//! Calls of the stopwatch: which are timed, dropped and refused.

use std::cell::Cell;

use candle_core::{DType, Device, Tensor};
use tallow::Error;
use tallow::bench::{Step, Stopwatch, Timing, time_once};

#[test]
fn the_stopwatch_counts_and_reports_every_step() {
    let calls = Cell::new(0);
    let mut seen = Vec::new();
    let timing = Stopwatch::new(&Device::Cpu)
        .warmup(3)
        .on_step(|step, ms| seen.push((step, ms)))
        .measure(4, || {
            calls.set(calls.get() + 1);
            Ok::<_, candle_core::Error>(())
        })
        .unwrap();
    assert_eq!(calls.get(), 7);
    assert_eq!((timing.warmup_ms.len(), timing.samples_ms.len()), (3, 4));
    let times: Vec<_> = seen.iter().map(|(_, ms)| *ms).collect();
    assert_eq!(times, [timing.warmup_ms, timing.samples_ms].concat());
    let steps: Vec<_> = seen.iter().map(|(step, _)| step.to_string()).collect();
    assert_eq!(
        steps,
        [
            "warm-up 1/3",
            "warm-up 2/3",
            "warm-up 3/3",
            "step 1/4",
            "step 2/4",
            "step 3/4",
            "step 4/4"
        ]
    );
    assert_eq!(
        seen[3].0,
        Step {
            warmup: false,
            index: 0,
            count: 4
        }
    );
}

#[test]
fn results_are_dropped_outside_the_measured_span() {
    use std::time::Duration;
    struct SlowToDrop<'a>(&'a Cell<usize>);
    impl Drop for SlowToDrop<'_> {
        fn drop(&mut self) {
            std::thread::sleep(Duration::from_millis(60));
            self.0.set(self.0.get() + 1);
        }
    }
    let drops = Cell::new(0);
    let timing = Stopwatch::new(&Device::Cpu)
        .measure(3, || {
            std::thread::sleep(Duration::from_millis(5));
            Ok::<_, candle_core::Error>(SlowToDrop(&drops))
        })
        .unwrap();
    assert_eq!(drops.get(), 3);
    let statistics = timing.statistics().unwrap();
    assert!(statistics.min_ms >= 5.0, "{statistics:?}");
    // A busy machine may delay one of them, not all.
    assert!(statistics.min_ms < 60.0, "{statistics:?}");
}

#[test]
fn errors_of_the_work_stop_the_measurement() {
    let calls = Cell::new(0);
    let failing = || {
        calls.set(calls.get() + 1);
        match calls.get() {
            3 => Tensor::zeros(2, DType::F32, &Device::Cpu)?.reshape(3),
            _ => Tensor::zeros(2, DType::F32, &Device::Cpu),
        }
    };
    let error = Stopwatch::new(&Device::Cpu)
        .warmup(1)
        .measure(5, failing)
        .unwrap_err();
    assert!(matches!(error, Error::Candle(_)), "{error}");
    assert_eq!(calls.get(), 3);

    fn own() -> tallow::Result<()> {
        Err(Error::Plot("mine".into()))
    }
    let error = Stopwatch::new(&Device::Cpu).measure(1, own).unwrap_err();
    assert_eq!(error.to_string(), "plot: mine");
    assert!(time_once(&Device::Cpu, own).is_err());
}

#[test]
fn no_steps_is_an_error_before_any_work() {
    let calls = Cell::new(0);
    let error = Stopwatch::new(&Device::Cpu)
        .warmup(2)
        .measure(0, || {
            calls.set(calls.get() + 1);
            Ok::<_, candle_core::Error>(())
        })
        .unwrap_err();
    assert!(
        matches!(error, Error::Config { field: "steps", .. }),
        "{error}"
    );
    assert_eq!(calls.get(), 0);
}

#[test]
fn a_time_budget_takes_steps_away() {
    let nap = || {
        std::thread::sleep(std::time::Duration::from_millis(4));
        Ok::<_, candle_core::Error>(())
    };
    let steps = |budget_ms, warmup, steps| {
        let mut stopwatch = Stopwatch::new(&Device::Cpu)
            .warmup(warmup)
            .time_budget_ms(budget_ms);
        let timing = stopwatch.measure(steps, nap).unwrap();
        (timing.warmup_ms.len(), timing.samples_ms.len())
    };
    assert_eq!(steps(None, 2, 3), (2, 3));
    assert_eq!(steps(Some(60_000.0), 2, 3), (2, 3));
    // The minimum for any budget.
    assert_eq!(steps(Some(0.0), 5, 50), (1, 2));
    assert_eq!(steps(Some(0.0), 0, 50), (0, 2));
    assert_eq!(steps(Some(0.0), 1, 1), (1, 1));
    // Warm-up has a quarter of the budget for all steps. On a busy machine sleeps are longer, never shorter.
    let (warmup, samples) = steps(Some(40.0), 50, 50);
    assert!((1..=3).contains(&warmup), "{warmup}");
    assert!((2..=9).contains(&samples), "{samples}");
}

#[test]
fn laps_keep_a_budget_too_and_their_warm_up_apart() {
    let laps = Stopwatch::new(&Device::Cpu)
        .warmup(10)
        .time_budget_ms(Some(0.0))
        .measure_phases(10, |lap| lap.time("all", || Ok::<_, Error>(())))
        .unwrap();
    let (_, all) = &laps.phases[0];
    assert_eq!((all.warmup_ms.len(), all.samples_ms.len()), (1, 2));
    assert_eq!(
        (laps.whole.warmup_ms.len(), laps.whole.samples_ms.len()),
        (1, 2)
    );
}

#[test]
fn timing_serialises() {
    let timing = Timing {
        samples_ms: vec![1.0, 3.0],
        warmup_ms: vec![5.0],
    };
    assert_eq!(
        serde_json::to_string(&timing).unwrap(),
        r#"{"samples_ms":[1.0,3.0],"warmup_ms":[5.0]}"#
    );
    assert_eq!(timing.statistics().unwrap().mean_ms, 2.0);
    assert!(Timing::default().statistics().is_err());
}

#[test]
fn time_once_returns_result_and_time() {
    let (value, ms) = time_once(&Device::Cpu, || {
        std::thread::sleep(std::time::Duration::from_millis(10));
        Ok::<_, candle_core::Error>(42)
    })
    .unwrap();
    assert_eq!(value, 42);
    assert!((10.0..5000.0).contains(&ms), "{ms}");
}
