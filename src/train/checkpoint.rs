//! A run in a file, and out of it again.

use super::differences::{Difference, first_difference};
use super::{DataFingerprint, History, TrainConfig, Trainer};
use crate::data::Tokens;
use crate::files::{self, TensorFile};
use crate::model::{TransformerConfig, TransformerLM};
use crate::optim::{GradScaler, GradScalerState};
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::HashMap;
use std::path::Path;

/// The metadata's key. One alone: a map of several has no fixed order, and equal runs should give equal files.
const KEY: &str = "tallow.train";
/// Raised when a reader of the old format could not make sense of the new one.
const FORMAT: u32 = 1;
/// What sets the optimizer's state apart from the weights; [`TransformerLM::load`] passes such names over.
const STATE_PREFIX: &str = "optimizer.";
/// Settings that may change from one part of a run to the next: no step depends on them.
const FREE_SETTINGS: [&str; 3] = ["steps", "evaluate_every", "optimizer.lr"];

/// What a saved run says about itself.
///
/// The file is safetensors, written by [`Trainer::save`]: the weights under their own names, so that
/// [`TransformerLM::load`] reads it as it reads any model's; the optimizer's state as `optimizer.exp_avg.<name>` and
/// `optimizer.exp_avg_sq.<name>`; and this, as JSON, in the metadata under `tallow.train`.
///
/// ```no_run
/// use tallow::model::TransformerLM;
/// use tallow::train::Checkpoint;
///
/// let saved = Checkpoint::read("run.safetensors")?;
/// println!("{} of {} steps", saved.step, saved.train.steps);
/// let model = TransformerLM::load(&saved.model, "run.safetensors", &tallow::device("cpu")?)?;
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Checkpoint {
    /// Steps taken. With the seed it is the position in the data, and with the schedule the learning rate.
    pub step: usize,
    /// The model's sizes, and its attention.
    pub model: TransformerConfig,
    /// The parameters' type, as candle names it: `f32`.
    pub dtype: String,
    /// What the run was told.
    pub train: TrainConfig,
    /// The data it trains on.
    pub training_data: DataFingerprint,
    /// The data it is evaluated on.
    pub validation_data: DataFingerprint,
    /// The losses so far.
    pub history: History,
    /// Where the loss scale stands, in f16. Runs saved without one go on with a fresh one.
    #[serde(default)]
    pub loss_scaling: Option<GradScalerState>,
}

/// The metadata's text: the checkpoint, and how to read it.
#[derive(Serialize)]
struct Written<'a> {
    format: u32,
    #[serde(flatten)]
    checkpoint: &'a Checkpoint,
}

impl Checkpoint {
    /// Reads what a file says, not its tensors.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be read; [`Error::Format`] if it is not whole, no safetensors, or no run's.
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        Self::parse(path, &TensorFile::open(path)?)
    }

    fn parse(path: &Path, file: &TensorFile) -> Result<Self> {
        let refuse = |problem: String, hint: &str| Error::Format {
            path: path.into(),
            problem,
            hint: hint.into(),
        };
        let text = file.metadata.get(KEY).ok_or_else(|| {
            refuse(
                format!("no training run (its metadata has no {KEY})"),
                "weights alone are read with TransformerLM::load; a run to resume is written by Trainer::save",
            )
        })?;
        let unreadable = |e: serde_json::Error| {
            refuse(
                format!("{KEY} in its metadata is not what Trainer::save writes: {e}"),
                "was it changed by another program?",
            )
        };
        let json: Value = serde_json::from_str(text).map_err(unreadable)?;
        if json["format"] != FORMAT {
            return Err(refuse(
                format!("a run in format {}", json["format"]),
                &format!("this version reads and writes format {FORMAT}"),
            ));
        }
        let checkpoint: Self = serde_json::from_value(json).map_err(unreadable)?;
        if checkpoint.history.losses.len() != checkpoint.step {
            return Err(refuse(
                format!(
                    "{} steps taken, but {} losses",
                    checkpoint.step,
                    checkpoint.history.losses.len()
                ),
                "was it changed by another program?",
            ));
        }
        let skipped = &checkpoint.history.skipped;
        let is_ordered = skipped.windows(2).all(|pair| pair[0] < pair[1]);
        let in_range = |step: &usize| (1..=checkpoint.step).contains(step);
        if !(is_ordered && skipped.iter().all(in_range)) {
            return Err(refuse(
                format!(
                    "{} steps taken, but {skipped:?} among them skipped",
                    checkpoint.step
                ),
                "was it changed by another program?",
            ));
        }
        if let Some(state) = &checkpoint.loss_scaling {
            state.validate().map_err(|e| {
                refuse(
                    format!("a loss scale that cannot be: {e}"),
                    "was it changed by another program?",
                )
            })?;
        }
        Ok(checkpoint)
    }
}

impl Trainer {
    /// Writes the run to one file, whole or not at all: into a temporary file beside it, synced, then renamed over it.
    ///
    /// [`Checkpoint`] says what is in it.
    ///
    /// # Errors
    /// [`Error::Io`] naming `path`; what was there before stays.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let checkpoint = Checkpoint {
            step: self.step,
            model: self.model.config().clone(),
            dtype: self.dtype().as_str().into(),
            train: self.config.clone(),
            training_data: self.training_data.clone(),
            validation_data: self.validation_data.clone(),
            history: self.history.clone(),
            loss_scaling: self.scaler.as_ref().map(GradScaler::state),
        };
        let written = Written {
            format: FORMAT,
            checkpoint: &checkpoint,
        };
        let text = serde_json::to_string(&written)
            .map_err(|e| Error::io("write", path, std::io::Error::other(e)))?;
        let weights = self.parameters.iter();
        let mut tensors: Vec<(String, Tensor)> = weights
            .map(|(name, var)| (name.clone(), var.as_tensor().clone()))
            .collect();
        let state = self.optimizer.state().into_iter();
        tensors.extend(state.map(|(name, tensor)| (format!("{STATE_PREFIX}{name}"), tensor)));
        files::save_tensors(path, &tensors, HashMap::from([(KEY.to_string(), text)]))
    }

    /// The run that [`Trainer::save`] wrote to `path`, to go on with: its steps have the bits that they would have had
    /// without the break (on one machine and build, and one kind of device).
    ///
    /// `model`, `config` and the data must be those it was saved with, in what its steps depend on. (On
    /// [`TransformerConfig::attention`] they do, by rounding: another algorithm is another run, from the weights that
    /// [`TransformerLM::load`] reads. On [`TransformerConfig::checkpointing`] they do not.) So `steps` and `evaluate_every` may differ: a finished run goes on if it is given more steps, at the learning rates that its
    /// schedule has beyond its end. And the data may lie elsewhere, as long as it is the same.
    ///
    /// # Errors
    /// [`Error::Resume`] names the setting that differs, with both values. [`Error::Io`], [`Error::Format`] and
    /// [`Error::Weight`] for a file that cannot be read, is not whole, or lacks a part; and those of [`Trainer::new`].
    pub fn resume(
        path: impl AsRef<Path>,
        model: &TransformerConfig,
        config: TrainConfig,
        train: Tokens,
        validation: Tokens,
        device: &Device,
    ) -> Result<Self> {
        let path = path.as_ref();
        let file = TensorFile::open(path)?;
        let saved = Checkpoint::parse(path, &file)?;
        let refuse = |field: &str, saved: String, given: String| Error::Resume {
            path: path.into(),
            field: field.into(),
            saved,
            given,
        };
        let difference = first_difference(&saved.model, model, &["checkpointing"])
            .or_else(|| first_difference(&saved.train, &config, &FREE_SETTINGS));
        if let Some(Difference {
            field,
            saved,
            given,
        }) = difference
        {
            return Err(refuse(&field, saved, given));
        }
        if config.steps < saved.step {
            let taken = format!("{} already taken", saved.step);
            return Err(refuse("steps", taken, config.steps.to_string()));
        }
        let dtype: DType = saved.dtype.parse().map_err(|_| Error::Format {
            path: path.into(),
            problem: format!("parameters of the unknown type {}", saved.dtype),
            hint: "was it written by a newer version?".into(),
        })?;
        let model = TransformerLM::load_as(model, path, dtype, device)?;
        let mut trainer = Self::new(model, config, train, validation)?;
        for (what, saved, given) in [
            (
                "training data of",
                saved.training_data,
                &trainer.training_data,
            ),
            (
                "validation data of",
                saved.validation_data,
                &trainer.validation_data,
            ),
        ] {
            if saved != *given {
                return Err(refuse(what, saved.to_string(), given.to_string()));
            }
        }
        let state = trainer.optimizer.state();
        let state = state.iter().map(|(name, own)| {
            let tensor = read_state(path, &file, name, own)?;
            Ok((name.clone(), tensor))
        });
        let state = state.collect::<Result<Vec<_>>>()?;
        let updates = saved.step - saved.history.skipped.len();
        trainer.optimizer.load_state(state, updates)?;
        if let (Some(scaler), Some(state)) = (&mut trainer.scaler, saved.loss_scaling) {
            scaler.load_state(state)?;
        }
        trainer.step = saved.step;
        trainer.history = saved.history;
        Ok(trainer)
    }

    /// The parameters' type.
    fn dtype(&self) -> DType {
        self.parameters[0].1.dtype()
    }
}

/// The optimizer's state called `name`, of the shape and dtype of `own`.
fn read_state(path: &Path, file: &TensorFile, name: &str, own: &Tensor) -> Result<Tensor> {
    let name = format!("{STATE_PREFIX}{name}");
    let describe = |tensor: &Tensor| format!("{} {:?}", tensor.dtype().as_str(), tensor.dims());
    let tensor = file.get(&name, own.device())?;
    match tensor {
        Some(tensor) if describe(&tensor) == describe(own) => Ok(tensor),
        other => Err(Error::Weight {
            path: path.into(),
            name,
            expected: describe(own),
            got: other.as_ref().map_or("nothing".into(), describe),
            hint: "the file is not as Trainer::save writes it; resume from another".into(),
        }),
    }
}
