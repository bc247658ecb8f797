//! A training run in a plain loop with candle's own backward, the reference for planned runs.

use super::*;
use candle_core::{DType, Device, Tensor, Var};
use tallow::data::{Batch, RandomBatches, SequentialBatches};
use tallow::nn::ForwardContext;
use tallow::no_grad;
use tallow::ops::DropoutKey;
use tallow::optim::{
    GradScaler, GradientAccumulator, Optimizer, clip_grad_norm, clip_grad_value,
    decay_matrices_only,
};

pub struct EagerLoop {
    model: TransformerLM,
    parameters: Vec<(String, Var)>,
    optimizer: Optimizer,
    scaler: Option<GradScaler>,
    config: TrainConfig,
    batches: RandomBatches,
    validation: Tokens,
    step: usize,
}

impl EagerLoop {
    pub fn new(model: TransformerLM, config: TrainConfig) -> Self {
        Self::on(model, config, &training(), validation())
    }

    pub fn on(
        model: TransformerLM,
        config: TrainConfig,
        train: &Tokens,
        validation: Tokens,
    ) -> Self {
        let parameters = model.parameters();
        let groups = decay_matrices_only(parameters.clone(), config.optimizer);
        let scaled = config.precision.dtype() == DType::F16;
        let (batch_size, length) = (config.batch_size, config.sequence_length);
        Self {
            optimizer: Optimizer::with_groups(groups).unwrap(),
            scaler: scaled.then(|| GradScaler::new(config.loss_scaling).unwrap()),
            batches: RandomBatches::new(train, batch_size, length, config.seed).unwrap(),
            validation,
            model,
            parameters,
            config,
            step: 0,
        }
    }

    pub fn step(&mut self) -> StepReport {
        let accumulation = self.config.accumulation;
        let mut accumulator = GradientAccumulator::new(self.parameters.clone());
        let mut sum = 0.0;
        for part in 0..accumulation {
            let index = self.step * accumulation + part;
            let batch = self.batches.batch(index as u64, &Device::Cpu).unwrap();
            let key = DropoutKey::of_micro_batch(self.config.seed, self.optimizer.steps(), part);
            let (loss, targets) = self.loss(&batch, Some(key.unwrap()));
            sum += value(&loss) * targets;
            let loss = match &self.scaler {
                Some(scaler) => scaler.scale(&loss).unwrap(),
                None => loss,
            };
            let gradients = loss.backward().unwrap();
            accumulator.add_weighted(gradients, targets).unwrap();
        }
        let targets = accumulator.total_weight();
        let mut gradients = accumulator.mean().unwrap();
        let loss_scale = self.scaler.as_ref().map(GradScaler::loss_scale);
        if let Some(scaler) = &mut self.scaler {
            scaler.unscale(&mut gradients, &self.parameters).unwrap();
        }
        let max_norm = self.config.max_grad_norm.unwrap_or(f64::INFINITY);
        let grad_norm = clip_grad_norm(&mut gradients, &self.parameters, max_norm).unwrap();
        if let Some(value) = self.config.max_grad_value {
            clip_grad_value(&mut gradients, &self.parameters, value).unwrap();
        }
        let learning_rate = self.config.schedule.learning_rate(self.step);
        self.optimizer.set_learning_rate(learning_rate);
        let skipped = match &mut self.scaler {
            Some(scaler) => {
                let stepped = scaler.step(&mut self.optimizer, &mut gradients).unwrap();
                scaler.update().unwrap();
                !stepped
            }
            None => {
                self.optimizer.step(&gradients).unwrap();
                false
            }
        };
        self.step += 1;
        StepReport {
            step: self.step,
            loss: sum / targets,
            learning_rate,
            grad_norm,
            loss_scale,
            skipped,
            tokens: targets as usize,
        }
    }

    pub fn steps(&mut self, count: usize) -> Vec<StepReport> {
        (0..count).map(|_| self.step()).collect()
    }

    pub fn evaluate(&self) -> f64 {
        let (batch_size, length) = (self.config.batch_size, self.config.sequence_length);
        let batches = SequentialBatches::new(&self.validation, batch_size, length).unwrap();
        let (mut sum, mut all) = (0.0, 0.0);
        for batch in batches.iter(&Device::Cpu) {
            let (loss, targets) = no_grad(|| self.loss(&batch.unwrap(), None));
            sum += value(&loss) * targets;
            all += targets;
        }
        sum / all
    }

    /// Returns the loss scale of the next step.
    pub fn loss_scale(&self) -> Option<f64> {
        self.scaler.as_ref().map(GradScaler::loss_scale)
    }

    pub fn parameters(&self) -> &[(String, Var)] {
        &self.parameters
    }

    pub fn updates(&self) -> usize {
        self.optimizer.steps()
    }

    /// Returns the mean loss of a batch, and its number of targets.
    fn loss(&self, batch: &Batch, dropout: Option<DropoutKey>) -> (Tensor, f64) {
        let (tokens, targets) = (&batch.inputs, &batch.targets);
        let context = ForwardContext {
            dropout: dropout.clone(),
            ..Default::default()
        };
        let loss = self.config.precision.run(|| match self.config.separator {
            Some(separator) => {
                self.model
                    .loss_of_documents(tokens, targets, separator, dropout.as_ref())
            }
            None => self.model.loss_with(tokens, targets, &context, None),
        });
        let counts = |token: &u32| Some(*token) != self.config.separator;
        let tokens = tokens.flatten_all().unwrap().to_vec1::<u32>().unwrap();
        (
            loss.unwrap(),
            tokens.iter().filter(|t| counts(t)).count() as f64,
        )
    }
}

fn value(loss: &Tensor) -> f64 {
    let loss = loss.detach().to_dtype(DType::F64).unwrap();
    loss.to_scalar().unwrap()
}
