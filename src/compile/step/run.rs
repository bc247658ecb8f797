//! Runs of a step.

use super::super::arguments::changed_since_trace;
use super::super::batch::{Batch, D_OUTPUT, DROPOUT};
use super::super::config::PlanKind;
use super::super::executor::Tensors;
use super::super::planned_step::{PlannedStep, ScaledStep};
use super::{OP, Step, nothing_run};
use crate::distributed::Communicator;
use crate::ops::DropoutKey;
use crate::ops::cross_entropy::nothing_counts;
use crate::optim::{GradScaler, Optimizer};
use crate::{Error, Result};
use candle_core::Tensor;

impl Step<'_> {
    /// Runs a training step. Returns the loss of the batch before the update. For a batch that [counts its
    /// targets](Batch::with_counted_targets), loss and gradients are means over the targets that count, of all
    /// micro-batches and ranks.
    ///
    /// If the plan has loss scaling, this runs with a scale of 1, and no update is skipped.
    ///
    /// # Errors
    /// Those of [`prepare`](Self::prepare); ids out of bounds; no target that counts; an optimizer of other parameters;
    /// an invalid learning rate; with clipping, gradients that are not finite, with the name of the first such
    /// parameter; [`Error::Rank`]. After any other error than [`Error::Rank`], parameters and optimizer are unchanged.
    /// After [`Error::Rank`] they are [undefined](crate::distributed#failures).
    pub fn run(&mut self, optimizer: &mut Optimizer, batch: impl Into<Batch>) -> Result<f32> {
        let given = self
            .prepare_batch(batch.into(), optimizer.steps())?
            .counted()?;
        self.run_given(optimizer, &given)
    }

    /// Same as [`run`](Self::run), for a batch that [`prepare_batch`](Self::prepare_batch) has prepared.
    pub(crate) fn run_given(
        &mut self,
        optimizer: &mut Optimizer,
        given: &PreparedBatch,
    ) -> Result<f32> {
        self.run_prepared(given, |step, tensors| step.run(optimizer, tensors))
    }

    /// Runs a training step with the scaler's loss scale, as an eager step with [`GradScaler::scale`],
    /// [`unscale`](GradScaler::unscale), [`step`](GradScaler::step) and [`update`](GradScaler::update). The scale is
    /// read at each run. If a gradient overflows, parameters and optimizer stay unchanged, and the scale is reduced.
    ///
    /// ```
    /// use candle_core::Tensor;
    /// use tallow::compile::{Step, StepConfig};
    /// use tallow::model::{TransformerConfig, TransformerLM};
    /// use tallow::optim::{AdamWConfig, GradScaler, GradScalerConfig, Optimizer};
    /// use tallow::precision::Precision;
    ///
    /// let device = tallow::device("cpu")?;
    /// let config = TransformerConfig {
    ///     vocab_size: 10, context_length: 4, d_model: 8, num_layers: 1, num_heads: 2, d_ff: 16,
    ///     ..Default::default()
    /// };
    /// let model = TransformerLM::new(&config, 0, &device)?;
    /// let mut optimizer = Optimizer::new(model.parameters(), AdamWConfig::default())?;
    /// let mut scaler = GradScaler::new(GradScalerConfig::default())?;
    /// let config = StepConfig { precision: Precision::F16, loss_scaling: true, ..Default::default() };
    /// let mut step = Step::for_model(&model, &optimizer, &config)?;
    /// let tokens = Tensor::new(&[[1u32, 2, 3, 4]], &device)?; // (B, T)
    /// let done = step.run_scaled(&mut optimizer, &mut scaler, (&tokens, &tokens))?;
    /// assert!(done.loss.is_finite());
    /// assert_eq!(optimizer.steps(), usize::from(done.updated()));
    /// # Ok::<(), tallow::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`run`](Self::run), except for gradients that are not finite; [`Error::Config`] if the step was planned
    /// without loss scaling (and the scaler is enabled); [`Error::Order`] if an eager step of the scaler has begun and
    /// not ended; those of [`GradScaler::update`].
    pub fn run_scaled(
        &mut self,
        optimizer: &mut Optimizer,
        scaler: &mut GradScaler,
        batch: impl Into<Batch>,
    ) -> Result<ScaledStep> {
        let given = self
            .prepare_batch(batch.into(), optimizer.steps())?
            .counted()?;
        self.run_scaled_given(optimizer, scaler, &given)
    }

    /// Same as [`run_scaled`](Self::run_scaled), for a batch that [`prepare_batch`](Self::prepare_batch) has prepared.
    pub(crate) fn run_scaled_given(
        &mut self,
        optimizer: &mut Optimizer,
        scaler: &mut GradScaler,
        given: &PreparedBatch,
    ) -> Result<ScaledStep> {
        self.run_prepared(given, |step, tensors| {
            step.run_scaled(optimizer, scaler, tensors)
        })
    }

    /// Runs forward, loss and backward, without the update. Returns the loss. [`gradients`](Self::gradients) returns
    /// the gradients, which are not clipped. Dropout is that of an optimizer's first step.
    ///
    /// # Errors
    /// Those of [`run`](Self::run); [`Error::Order`] if the optimizer runs in backward.
    pub fn forward_backward(&mut self, batch: impl Into<Batch>) -> Result<f32> {
        let given = self.prepare_batch(batch.into(), 0)?.counted()?;
        self.run_prepared(&given, PlannedStep::forward_backward)
    }

    /// Runs forward, and backward from `d_output`, the gradient of the function's output, as
    /// [`backward_from`](crate::backward_from) does eagerly. The output need not be a scalar. Call
    /// [`gradients`](Self::gradients) for the parameters' gradients and [`output`](Self::output) for the output.
    ///
    /// `d_output` is (accumulation * B, ...), with micro-batches stacked; their gradients are added. Dropout is that of
    /// an optimizer's first step. Ranks average gradients as in [`run`](Self::run). On a GPU, pass the same tensor each
    /// time: it is read in place, and a run that finds it at another address is recorded again.
    ///
    /// ```
    /// use candle_core::{Tensor, Var};
    /// use tallow::attention::{self, AttentionConfig, Mask};
    /// use tallow::compile::{Batch, Step, StepConfig};
    ///
    /// // Attention alone: q, k and v are its parameters.
    /// let device = tallow::device("cpu")?;
    /// let draw = || Var::randn(0f32, 1.0, (2, 3, 5, 8), &device); // (B, H, T, Dh)
    /// let (q, k, v) = (draw()?, draw()?, draw()?);
    /// let parameters = vec![("q".into(), q.clone()), ("k".into(), k.clone()), ("v".into(), v.clone())];
    /// let causal = AttentionConfig { mask: Mask::Causal, ..Default::default() };
    /// let mut step = Step::without_optimizer(&device, parameters, &StepConfig::default(), |_| {
    ///     attention::flash(&q, &k, &v, &causal)
    /// })?;
    /// let d_out = Tensor::ones((2, 3, 5, 8), candle_core::DType::F32, &device)?;
    /// step.forward_backward_from(Batch::new([]), &d_out)?;
    /// let (name, dq) = &step.gradients()?[0];
    /// assert_eq!((name.as_str(), dq.dims()), ("q", &[2, 3, 5, 8][..]));
    /// # Ok::<(), tallow::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`prepare`](Self::prepare), but the output may be of any shape and float dtype, and must be made by an
    /// op; a gradient of another shape or dtype than the output.
    pub fn forward_backward_from(
        &mut self,
        batch: impl Into<Batch>,
        d_output: &Tensor,
    ) -> Result<()> {
        let batch = batch.into();
        if batch.inputs().any(|(name, _)| name == D_OUTPUT) {
            return Err(Error::Order {
                op: OP,
                problem: format!("an input is called {D_OUTPUT:?}, as the output's gradient is"),
                hint: "call the input otherwise".into(),
            });
        }
        let batch = batch.with(D_OUTPUT, d_output.clone());
        let batch = self.with_dropout_keys(PlanKind::Gradients, batch, 0)?;
        let given = PreparedBatch::of(PlanKind::Gradients, batch);
        self.run_prepared(&given, PlannedStep::forward_backward_from)
    }

    /// Returns a copy of the output of the last [`forward_backward_from`](Self::forward_backward_from): (B, ...), of
    /// its last micro-batch.
    ///
    /// # Errors
    /// [`Error::Order`] if the last run was of another kind.
    pub fn output(&self) -> Result<Tensor> {
        match self.last() {
            Some(last) => {
                let shape = last.graph.shape_of(&last.graph.outputs[0]);
                last.step.output(last.kind, shape)
            }
            None => Err(nothing_run()),
        }
    }

    /// Runs forward alone. Returns the function's output for a batch, which is not split into micro-batches. If the
    /// function is a loss, it is the loss of the whole batch: its mean, or its sum over the targets of a batch that
    /// [counts them](Batch::with_counted_targets). There is no dropout.
    ///
    /// No other rank takes part, except with [sharded weights](Self::fully_sharded): these are gathered, so all ranks
    /// must call it equally often. With a [sharded optimizer](Self::replicated) it uses this rank's current values of
    /// all parameters.
    ///
    /// # Errors
    /// Those of [`prepare`](Self::prepare), but the output may be of any shape and float dtype.
    pub fn forward(&mut self, batch: impl Into<Batch>) -> Result<Tensor> {
        let device = self.device.clone();
        let given = PreparedBatch::of(PlanKind::Forward, batch.into());
        self.run_prepared(&given, |step, tensors| step.forward(tensors, &device))
    }

    /// Prepares a batch for a run after `steps` steps of the optimizer. Counted targets are summed over all ranks.
    ///
    /// # Errors
    /// Those of [`prepare`](Self::prepare); a rank that failed.
    pub(crate) fn prepare_batch(&mut self, batch: Batch, steps: usize) -> Result<PreparedBatch> {
        let batch = self.with_dropout_keys(PlanKind::TrainStep, batch, steps)?;
        let (counted, loss_divisor) = match batch.counted_targets() {
            Some(counted) => {
                let (all, mean) = self.sum_over_ranks(counted)?;
                (Some(all), Some(mean))
            }
            None => (None, None),
        };
        Ok(PreparedBatch {
            counted,
            loss_divisor,
            ..PreparedBatch::of(PlanKind::TrainStep, batch)
        })
    }

    /// Adds dropout keys to a batch if its plan reads them. `steps` is the optimizer's step count.
    fn with_dropout_keys(&mut self, kind: PlanKind, batch: Batch, steps: usize) -> Result<Batch> {
        let reads_keys = self.prepared(kind, &batch)?.arguments.reads_input(DROPOUT);
        match self.config.dropout_seed {
            Some(seed) if reads_keys => {
                let rank = self.communicator.as_ref().map_or(0, Communicator::rank);
                let count = self.config.accumulation;
                let micro_batches = rank * count..(rank + 1) * count;
                Ok(batch.with(DROPOUT, DropoutKey::of_step(seed, steps, micro_batches)?))
            }
            _ => Ok(batch),
        }
    }

    /// Returns the number of targets that count on all ranks, and its mean per rank. The mean is the loss divisor,
    /// because ranks average their results.
    fn sum_over_ranks(&self, counted: usize) -> Result<(usize, f64)> {
        let (mean, ranks) = match &self.communicator {
            Some(ranks) => (ranks.mean(&[counted as f64])?[0], ranks.world_size()),
            None => (counted as f64, 1),
        };
        Ok(((mean * ranks as f64).round() as usize, mean))
    }

    fn run_prepared<T>(
        &mut self,
        given: &PreparedBatch,
        run: impl FnOnce(&mut PlannedStep, &Tensors<'_>) -> Result<T>,
    ) -> Result<T> {
        self.prepared(given.kind, &given.batch)?;
        self.runs += 1;
        if let Some(every) = self.config.retrace_every
            && self.runs.is_multiple_of(every.get())
        {
            self.check_trace(&given.batch)?;
        }
        let (device, parameters) = (&self.device, &self.parameters);
        let Some(prepared) = self.plans.last_mut() else {
            unreachable!("it was prepared");
        };
        let arguments = prepared
            .arguments
            .run_tensors(&given.batch, device, parameters)?;
        let tensors = Tensors {
            arguments: &arguments,
            loss_divisor: given.loss_divisor,
            ..Default::default()
        };
        run(&mut prepared.step, &tensors)
    }

    /// Checks that a new trace of the function equals that of the last plan.
    fn check_trace(&self, batch: &Batch) -> Result<()> {
        let Some(last) = self.last() else {
            return Ok(());
        };
        let config = self.config.of(last.kind);
        let job = self.request(last.kind, &config);
        let function = job.trace(&job.inputs(batch)?, last.checkpointing)?;
        if let Some(difference) = last.graph.difference(&function.graph) {
            return Err(changed_since_trace(OP, difference));
        }
        let (arguments, plan) = (&last.arguments, &last.step.plan);
        arguments.check_constants(&function, plan, &self.device)
    }
}

/// A batch that is ready to run.
pub(crate) struct PreparedBatch {
    kind: PlanKind,
    batch: Batch,
    /// The number of targets that count, of all ranks; `None` if all targets do.
    pub(crate) counted: Option<usize>,
    loss_divisor: Option<f64>,
}

impl PreparedBatch {
    /// Prepares a batch whose targets are not counted.
    fn of(kind: PlanKind, batch: Batch) -> Self {
        Self {
            kind,
            batch,
            counted: None,
            loss_divisor: None,
        }
    }

    /// # Errors
    /// No target that counts.
    fn counted(self) -> Result<Self> {
        match self.counted {
            Some(0) => Err(nothing_counts(OP, self.batch.elements())),
            _ => Ok(self),
        }
    }
}
