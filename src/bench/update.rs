//! What comes after backward in a measured training step.

use crate::optim::{AdamW, AdamWConfig, GradScaler, GradScalerConfig, Moments};
use crate::precision::{Precision, Regime};
use crate::{Error, Result};
use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor, Var};
use candle_nn::Optimizer;

/// The optimizer that a training step is measured with.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum OptimizerChoice {
    /// This crate's.
    AdamW(AdamWConfig),
    /// candle_nn's, to compare; its temporaries are not in the memory estimate.
    CandleAdamW(AdamWConfig),
}

type StepFn = Box<dyn FnMut(&GradStore) -> Result<()>>;
/// An optimizer's state by name, as far as it lets one see it.
type State = Vec<(String, Tensor)>;

impl OptimizerChoice {
    /// As reports name it.
    pub fn name(&self) -> &'static str {
        match self {
            OptimizerChoice::AdamW(AdamWConfig {
                moments: Moments::Bf16 { .. },
                ..
            }) => "adamw-bf16",
            OptimizerChoice::AdamW(_) => "adamw",
            OptimizerChoice::CandleAdamW(_) => "candle-adamw",
        }
    }

    pub(super) fn moments(&self) -> Moments {
        match self {
            OptimizerChoice::AdamW(config) => config.moments,
            OptimizerChoice::CandleAdamW(_) => Moments::Wide,
        }
    }

    /// A function that makes one step, and the state that it changes.
    fn stepper(&self, parameters: Vec<(String, Var)>) -> Result<(StepFn, State)> {
        match *self {
            OptimizerChoice::AdamW(config) => {
                let mut optimizer = AdamW::new(parameters, config)?;
                let state = optimizer.state();
                let step = Box::new(move |gradients: &GradStore| optimizer.step(gradients));
                Ok((step, state))
            }
            OptimizerChoice::CandleAdamW(config) => {
                let vars = parameters.into_iter().map(|(_, var)| var).collect();
                let params = candle_nn::ParamsAdamW {
                    lr: config.lr,
                    beta1: config.betas.0,
                    beta2: config.betas.1,
                    eps: config.eps,
                    weight_decay: config.weight_decay,
                };
                let mut optimizer = candle_nn::AdamW::new(vars, params)?;
                let step = move |gradients: &GradStore| {
                    Ok(candle_nn::Optimizer::step(&mut optimizer, gradients)?)
                };
                Ok((Box::new(step), State::new()))
            }
        }
    }
}

/// Optimizer and loss scaling of a measured run.
pub(super) struct Update {
    parameters: Vec<(String, Var)>,
    optimizer: StepFn,
    /// The optimizer's own tensors.
    pub state: Vec<(String, Tensor)>,
    /// Switched off where the dtype has f32's range.
    scaler: GradScaler,
    scales: bool,
    skipped_steps: usize,
}

/// What became of the loss scale.
pub(super) struct LossScaling {
    /// At the end.
    pub loss_scale: f64,
    /// Steps that overflowed and made no update.
    pub skipped_steps: usize,
}

impl Update {
    pub fn new(
        choice: OptimizerChoice,
        parameters: Vec<(String, Var)>,
        precision: Precision,
    ) -> Result<Self> {
        let scales = precision.dtype() == DType::F16;
        let in_f16 = scales && precision.regime() == Regime::Full;
        if in_f16 && matches!(choice, OptimizerChoice::CandleAdamW(_)) {
            let got = Error::config("end-to-end benchmark", "optimizer", choice.name());
            return Err(got.must_be(
                "adamw, where the parameters are f16",
                "a scaler returns gradients in f32, which candle's takes for f32 parameters only",
            ));
        }
        let config = GradScalerConfig {
            enabled: scales,
            ..Default::default()
        };
        let (optimizer, state) = choice.stepper(parameters.clone())?;
        Ok(Self {
            optimizer,
            state,
            parameters,
            scaler: GradScaler::new(config)?,
            scales,
            skipped_steps: 0,
        })
    }

    /// The loss that backward starts from.
    pub fn scaled(&self, loss: Tensor) -> Result<Tensor> {
        self.scaler.scale(&loss)
    }

    /// Unscales, checks and updates.
    pub fn step(&mut self, gradients: &mut GradStore) -> Result<()> {
        let stepped = self
            .scaler
            .step_with(gradients, &self.parameters, &mut self.optimizer)?;
        self.skipped_steps += usize::from(!stepped);
        self.scaler.update()
    }

    /// `None` where nothing is scaled.
    pub fn loss_scaling(&self) -> Option<LossScaling> {
        self.scales.then(|| LossScaling {
            loss_scale: self.scaler.loss_scale(),
            skipped_steps: self.skipped_steps,
        })
    }
}
