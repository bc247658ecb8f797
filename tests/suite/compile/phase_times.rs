//! The times of the phases of planned steps.

use super::{batch, bits, config};
use crate::settings::{meta_of, with_weights};
use candle_core::{DType, Device};
use tallow::attention::Algorithm;
use tallow::compile::{PhaseTimes, Step, StepConfig};
use tallow::nn;
use tallow::optim::{AdamWConfig, Optimizer};

/// Runs three steps, one forward and backward alone, and two more steps. Returns the weights' bits, and the phase
/// times.
fn steps(device: &Device, timed: bool) -> (Vec<u64>, Vec<Option<PhaseTimes>>) {
    let model = meta_of(&config(2, 2, 24, 56), Algorithm::Flash);
    let model = with_weights(&model, nn::seeded(5, DType::F32, device));
    let mut optimizer = Optimizer::new(model.parameters(), AdamWConfig::default()).unwrap();
    let plan = StepConfig {
        accumulation: 2,
        clip_norm: Some(0.5),
        ..Default::default()
    };
    let mut step = Step::for_model(&model, &optimizer, &plan).unwrap();
    let mut times = vec![step.phase_times().unwrap()];
    step.time_phases(timed);
    times.push(step.phase_times().unwrap());
    for i in 0..6 {
        let (tokens, targets) = batch(97, 4, 37, i);
        let ids = [tokens, targets].map(|ids| ids.to_device(device).unwrap());
        match i {
            3 => step.forward_backward((&ids[0], &ids[1])).unwrap(),
            _ => step.run(&mut optimizer, (&ids[0], &ids[1])).unwrap(),
        };
        times.push(step.phase_times().unwrap());
    }
    step.time_phases(false);
    times.push(step.phase_times().unwrap());
    (bits(&model), times)
}

fn phases_are_timed(device: &Device) {
    let (weights, times) = steps(device, true);
    let (untimed_weights, untimed) = steps(device, false);
    assert_eq!(weights, untimed_weights);
    assert_eq!(untimed, [None; 9]);
    assert_eq!((times[0], times[1], times[8]), (None, None, None));
    for (i, times) in times[2..8].iter().enumerate() {
        let times = times.unwrap();
        assert!(
            times.forward_ms > 0.0 && times.backward_ms > 0.0,
            "{i}: {times:?}"
        );
        assert_eq!(times.optimizer_ms > 0.0, i != 3, "{i}: {times:?}");
    }
}

#[test]
fn on_the_cpu() {
    phases_are_timed(&Device::Cpu);
}

#[cfg(feature = "cuda")]
#[test]
#[ignore = "needs a CUDA device"]
fn on_a_gpu() {
    phases_are_timed(&crate::gpu());
}
