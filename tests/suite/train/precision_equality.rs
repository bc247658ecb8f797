//! A real text learned in every precision, from the same weights and batches: the final losses equal f32's. Parameters
//! in half precision are trained by a plain loop.

use super::eager_loop::EagerLoop;
use super::*;
use candle_core::Device;
use tallow::precision::{Precision, Regime};
use tallow::train::{Evaluation, History};

/// Returns the bytes of a licence, a text that does not change.
fn text() -> (Tokens, Tokens) {
    let bytes = include_bytes!("../../../LICENSE-APACHE");
    let tokens = Tokens::from_bytes(bytes.to_vec()).unwrap();
    tokens.split(0.1).unwrap()
}

fn learn(precision: Precision) -> History {
    let sizes = TransformerConfig {
        vocab_size: 256,
        context_length: 32,
        d_model: 40,
        num_layers: 2,
        num_heads: 4,
        d_ff: 104,
        ..Default::default()
    };
    let config = TrainConfig {
        batch_size: 8,
        sequence_length: 32,
        steps: 150,
        schedule: Schedule::WarmupCosine {
            max_lr: 5e-3,
            min_lr: 5e-4,
            warmup_steps: 10,
            total_steps: 150,
        },
        precision,
        ..settings()
    };
    let vb = tallow::nn::seeded(3, precision.parameter_dtype(), &Device::Cpu);
    let model = TransformerLM::from_var_builder(&sizes, vb).unwrap();
    let (train, validation) = text();
    if precision.regime() == Regime::Full {
        let mut eager = EagerLoop::on(model, config, &train, validation);
        let losses = eager.steps(150).iter().map(|step| step.loss).collect();
        let evaluation = Evaluation {
            step: 150,
            loss: eager.evaluate(),
        };
        return History {
            losses,
            evaluations: vec![evaluation],
            ..Default::default()
        };
    }
    let mut trainer = Trainer::new(model, config, train, validation).unwrap();
    while trainer.step().unwrap().is_some() {}
    trainer.evaluate().unwrap();
    trainer.history().clone()
}

#[test]
fn final_losses_are_within_two_percent_of_f32s() {
    let last = |history: &History| {
        let validation = history.evaluations[0].loss;
        [history.recent_loss(10).unwrap(), validation]
    };
    let exact = learn(Precision::F32);
    let first = exact.losses[0];
    assert!(last(&exact)[0] < 0.6 * first, "{first} {:?}", last(&exact));
    for half in [Precision::BF16, Precision::F16] {
        for regime in [Regime::CudaAutocast, Regime::CpuAutocast, Regime::Full] {
            let precision = half.with_regime(regime);
            let history = learn(precision);
            assert_ne!(history.losses, exact.losses, "{precision}: this was f32");
            for (ours, exact) in last(&history).into_iter().zip(last(&exact)) {
                let percent = (ours / exact - 1.0) * 100.0;
                assert!(percent.abs() < 2.0, "{precision}: {percent:.2} %");
            }
        }
    }
}
