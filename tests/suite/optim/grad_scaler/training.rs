//! Training in f16.

use super::*;
use crate::check;
use crate::settings::with_lr;
use tallow::model::ToyModel;
use tallow::{nn, ops};

const STEPS: usize = 60;
const PLANTED: usize = 23;
const INTERVAL: usize = 16;

/// Returns the bits of everything that a step changes.
fn bits(model: &ToyModel, optimizer: &Optimizer) -> Vec<(String, Vec<u64>)> {
    let parameters = model.parameters().into_iter();
    let parameters = parameters.map(|(name, var)| (name, var.as_tensor().clone()));
    let all = parameters.chain(optimizer.state());
    all.map(|(name, tensor)| (name, check::bits(&tensor)))
        .collect()
}

/// A model with f16 parameters learns. One step whose gradients overflow f16, although its loss is finite, changes
/// nothing.
#[test]
fn a_planted_overflow_skips_its_step_and_no_other() {
    let cpu = &Device::Cpu;
    let model = ToyModel::new(12, 3, nn::seeded(5, DType::F16, cpu)).unwrap();
    let numbers = noise(64 * 12, 3);
    // The task: which of a row's first three numbers is the largest.
    let largest =
        |row: &[f64]| (0..3u32).max_by(|i, j| row[*i as usize].total_cmp(&row[*j as usize]));
    let targets: Vec<u32> = numbers.chunks(12).filter_map(largest).collect();
    let x = Tensor::from_vec(numbers, (64, 12), cpu).unwrap();
    let (x, targets) = (
        x.to_dtype(DType::F16).unwrap(),
        Tensor::new(targets, cpu).unwrap(),
    );
    let config = with_lr(3e-2);
    let mut optimizer = Optimizer::new(model.parameters(), config).unwrap();
    let config = GradScalerConfig {
        init_scale: 1024.0,
        growth_interval: INTERVAL,
        ..Default::default()
    };
    let mut scaler = GradScaler::new(config).unwrap();
    let mut losses = Vec::new();
    let (mut scale, mut good) = (1024.0, 0);
    for step in 0..STEPS {
        let logits = model.forward(&x).unwrap();
        let loss = ops::cross_entropy(&logits, &targets).unwrap();
        losses.push(elements(&loss)[0]);
        let weight = if step == PLANTED { 1e6 } else { 1.0 };
        let loss = (loss.to_dtype(DType::F32).unwrap() * weight).unwrap();
        assert!(elements(&loss)[0].is_finite());
        let mut gradients = scaler.scale(&loss).unwrap().backward().unwrap();
        for (name, var) in model.parameters() {
            assert_eq!(gradients.get(&var).unwrap().dtype(), DType::F16, "{name}");
        }
        let before = bits(&model, &optimizer);
        let stepped = scaler.step(&mut optimizer, &mut gradients).unwrap();
        assert_eq!(stepped, step != PLANTED, "step {step}");
        let unchanged = bits(&model, &optimizer) == before;
        assert_eq!(unchanged, step == PLANTED, "step {step}");
        scaler.update().unwrap();

        if step == PLANTED {
            (scale, good) = (scale / 2.0, 0);
        } else {
            good += 1;
            if good == INTERVAL {
                (scale, good) = (scale * 2.0, 0);
            }
        }
        assert_eq!(scaler.loss_scale(), scale, "step {step}");
    }
    assert_eq!(optimizer.steps(), STEPS - 1);
    assert_eq!(scale, 1024.0 * 2.0 / 2.0 * 4.0); // grown once, halved, grown twice
    let (first, planted, last) = (losses[0], losses[PLANTED], losses[STEPS - 1]);
    assert!(planted < 0.9 * first, "{losses:?}");
    assert_eq!(losses[PLANTED + 1], planted, "the same weights");
    assert!(last < 0.7 * planted, "{losses:?}");
}
