//! [`AdamW`] as a [`candle_nn::Optimizer`], for training loops written against that trait.

use super::adamw::AdamW;
use super::config::{AdamWConfig, ParameterGroup};
use candle_core::{Var, backprop::GradStore};

impl candle_nn::Optimizer for AdamW {
    type Config = AdamWConfig;

    /// As candle's own optimizers, it leaves out variables that are not floats. Names are made of position and shape:
    /// `#3 [512, 1344]`.
    fn new(vars: Vec<Var>, config: AdamWConfig) -> candle_core::Result<Self> {
        let parameters = vars
            .into_iter()
            .enumerate()
            .filter(|(_, var)| var.dtype().is_float())
            .map(|(i, var)| (format!("#{i} {:?}", var.dims()), var))
            .collect();
        // The trait's `empty` passes no variables.
        Ok(Self::of_any_groups(vec![ParameterGroup {
            parameters,
            config,
        }])?)
    }

    fn step(&mut self, gradients: &GradStore) -> candle_core::Result<()> {
        Ok(AdamW::step(self, gradients)?)
    }

    fn learning_rate(&self) -> f64 {
        AdamW::learning_rate(self)
    }

    fn set_learning_rate(&mut self, lr: f64) {
        AdamW::set_learning_rate(self, lr);
    }
}
