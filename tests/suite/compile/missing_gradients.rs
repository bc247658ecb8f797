//! Planned steps with parameters that the loss does not depend on.

use crate::check::{elements, refusal};
use candle_core::{Device, Tensor, Var};
use rstest::rstest;
use tallow::compile::{Step, StepConfig};
use tallow::optim::{
    AdamWConfig, GradScaler, GradScalerConfig, MissingGradients, Optimizer, ParameterGroup,
    clip_grad_norm,
};
use tallow::{Error, Result, ops};

const CPU: &Device = &Device::Cpu;

/// A trained parameter, one that is read without a gradient, and one that is not read.
struct Model {
    parameters: Vec<(String, Var)>,
}

impl Model {
    fn new(device: &Device) -> Self {
        let weight = |(i, name): (usize, &str)| {
            let numbers = (0..16).map(|n| ((n * n + 7 * i) as f32 * 0.37).sin());
            let weight = Tensor::from_iter(numbers, device).unwrap().reshape((4, 4));
            (
                name.to_string(),
                Var::from_tensor(&weight.unwrap()).unwrap(),
            )
        };
        let names = ["trained", "detached", "idle"].into_iter().enumerate();
        Self {
            parameters: names.map(weight).collect(),
        }
    }

    fn var(&self, i: usize) -> &Var {
        &self.parameters[i].1
    }

    fn loss(&self, x: &Tensor) -> Result<Tensor> {
        let gate = ops::sigmoid(&ops::linear(x, self.var(1))?.detach())?;
        let y = ops::mul(&ops::linear(x, self.var(0))?, &gate)?;
        ops::mean(&ops::mul(&y, &y)?)
    }

    fn optimizer(&self, missing_gradients: MissingGradients) -> Optimizer {
        let config = AdamWConfig {
            lr: 1e-2,
            weight_decay: 0.1,
            missing_gradients,
            ..Default::default()
        };
        Optimizer::new(self.parameters.clone(), config).unwrap()
    }

    /// Takes a first step in which each parameter has a gradient, so that all moments are nonzero.
    fn first_step(&self, optimizer: &mut Optimizer) {
        let loss = self.parameters.iter().try_fold(None, |sum, (_, var)| {
            let loss = ops::sum(&ops::mul(var, var)?)?;
            Ok::<_, Error>(Some(match sum {
                None => loss,
                Some(sum) => ops::add(&sum, &loss)?,
            }))
        });
        let gradients = tallow::backward(loss.unwrap().unwrap()).unwrap();
        optimizer.step(&gradients).unwrap();
    }

    fn elements(&self) -> Vec<Vec<f64>> {
        let parameters = self.parameters.iter();
        parameters.map(|(_, var)| elements(var)).collect()
    }

    fn planned(&self, optimizer: &Optimizer, config: &StepConfig) -> Result<Step<'_>> {
        let mut step = Step::new(optimizer, config, |inputs| self.loss(&inputs.get("x")?))?;
        step.prepare([("x", &x(CPU))])?;
        Ok(step)
    }
}

fn x(device: &Device) -> Tensor {
    let numbers = (0..32).map(|n| ((n * n * 3) as f32 * 0.11).cos());
    let x = Tensor::from_iter(numbers, device).unwrap();
    x.reshape((8, 4)).unwrap()
}

fn configs() -> [StepConfig; 4] {
    let plain = StepConfig::default();
    [
        plain.clone(),
        StepConfig {
            clip_norm: Some(1e-3),
            accumulation: 2,
            ..plain.clone()
        },
        StepConfig {
            optimizer_in_backward: true,
            ..plain.clone()
        },
        StepConfig {
            loss_scaling: true,
            ..plain
        },
    ]
}

/// Parameters without a gradient have the bits of eager steps; the others are equal up to rounding.
#[rstest]
fn as_eager(
    #[values(MissingGradients::Skip, MissingGradients::Zero)] missing: MissingGradients,
    #[values(0, 1, 2, 3)] config: usize,
) {
    assert_as_eager(missing, &configs()[config], CPU);
}

#[cfg(feature = "cuda")]
#[test]
#[ignore = "needs a CUDA device"]
fn as_eager_on_a_gpu() {
    for missing in [MissingGradients::Skip, MissingGradients::Zero] {
        for config in configs() {
            assert_as_eager(missing, &config, &crate::gpu());
        }
    }
}

fn assert_as_eager(missing: MissingGradients, config: &StepConfig, device: &Device) {
    let (planned, eager) = (Model::new(device), Model::new(device));
    let x = x(device);
    let mut optimizer = planned.optimizer(missing);
    planned.first_step(&mut optimizer);
    let first = planned.elements();
    let mut step = planned.planned(&optimizer, config).unwrap();
    let mut scaler = GradScaler::new(GradScalerConfig::default()).unwrap();
    for _ in 0..3 {
        let loss = match config.loss_scaling {
            false => step.run(&mut optimizer, [("x", &x)]).unwrap(),
            true => {
                let scaled = step.run_scaled(&mut optimizer, &mut scaler, [("x", &x)]);
                let scaled = scaled.unwrap();
                assert!(scaled.updated());
                scaled.loss
            }
        };
        assert!(loss.is_finite());
    }
    let mut by_hand = eager.optimizer(missing);
    eager.first_step(&mut by_hand);
    for _ in 0..3 {
        let mut gradients = tallow::backward(eager.loss(&x).unwrap()).unwrap();
        if let Some(norm) = config.clip_norm {
            let present = missing
                .with_gradients(&gradients, &eager.parameters)
                .unwrap();
            clip_grad_norm(&mut gradients, &present, norm).unwrap();
        }
        by_hand.step(&gradients).unwrap();
    }
    let (found, wanted) = (planned.elements(), eager.elements());
    for i in [1, 2] {
        assert_eq!(found[i], wanted[i], "{}", planned.parameters[i].0);
        assert_eq!(found[i] == first[i], missing == MissingGradients::Skip);
    }
    for (a, b) in found[0].iter().zip(&wanted[0]) {
        assert!((a - b).abs() < 2e-6, "{a} {b}");
    }
    let names = |optimizer: &Optimizer| -> Vec<String> {
        let state = optimizer.state().into_iter();
        state.map(|(name, _)| name).collect()
    };
    assert_eq!(names(&optimizer), names(&by_hand)); // includes the counts of skipped steps
    assert_eq!(optimizer.steps(), 4);
    // An eager step afterwards has the same step counts.
    for (model, optimizer) in [(&planned, &mut optimizer), (&eager, &mut by_hand)] {
        model.first_step(optimizer);
    }
    let (found, wanted) = (planned.elements(), eager.elements());
    assert_eq!(found[1..], wanted[1..]);
}

#[test]
fn an_error_names_the_parameter_unless_its_group_takes_it() {
    let model = Model::new(CPU);
    let refused = |optimizer: &Optimizer| {
        let refused = model.planned(optimizer, &StepConfig::default());
        match refused.unwrap_err() {
            Error::MissingGradient { parameter, .. } => parameter,
            other => panic!("{other}"),
        }
    };
    assert_eq!(
        refused(&model.optimizer(MissingGradients::Error)),
        "detached"
    );
    let group = |parameters: &[(String, Var)], missing_gradients| ParameterGroup {
        parameters: parameters.to_vec(),
        rule: AdamWConfig {
            missing_gradients,
            ..Default::default()
        }
        .into(),
    };
    let groups = [
        group(&model.parameters[..2], MissingGradients::Skip),
        group(&model.parameters[2..], MissingGradients::Error),
    ];
    assert_eq!(
        refused(&Optimizer::with_groups(groups.into()).unwrap()),
        "idle"
    );
}

/// A step refuses an optimizer whose setting differs from the plan's.
#[test]
fn an_optimizer_of_another_choice_is_refused() {
    let model = Model::new(CPU);
    let planned_for = model.optimizer(MissingGradients::Skip);
    let mut step = model.planned(&planned_for, &StepConfig::default()).unwrap();
    let before = model.elements();
    for other in [MissingGradients::Error, MissingGradients::Zero] {
        let mut optimizer = model.optimizer(other);
        refusal(
            step.run(&mut optimizer, [("x", &x(CPU))]),
            &["detached", "Skip"],
        );
    }
    assert_eq!(model.elements(), before);
}
