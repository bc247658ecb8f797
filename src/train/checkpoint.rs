//! A run in a file: what it says, and how it is written.

use super::ranks::Job;
use super::{DataFingerprint, History, TrainConfig, Trainer};
use crate::files::{self, Entry, Manifest, PathLock, TensorFile};
use crate::model::{STATE_PREFIX, TransformerConfig};
use crate::optim::{GradScaler, GradScalerState};
use crate::{Error, Result};
use candle_core::DType;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::Path;
use std::sync::PoisonError;

const KEY: &str = "tallow.train";
/// Raised when a reader of the old format could not make sense of the new one. In format 1 the history was in the JSON.
const FORMAT: u32 = 2;

/// What a saved run says about itself.
///
/// The file is safetensors, written by [`Trainer::save`]: the weights under their own names, so that
/// [`TransformerLM::load`](crate::model::TransformerLM::load) reads it as it reads any model's; the optimizer's state
/// as `optimizer.exp_avg.<name>` and `optimizer.exp_avg_sq.<name>`; the history as `history.losses` (f64, a number a
/// step), `history.skipped`, `history.evaluated_steps` (i64) and `history.evaluations` (f64); and the rest of this, as
/// JSON, in the metadata under `tallow.train`. Beside it, under `tallow.crc32`, is the CRC-32 of every tensor, as
/// `zlib.crc32` gives it, and of this text: reading the file here finds damage.
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
    /// The losses so far. As JSON, `serde` leaves them out: a long run's are too many for a file's metadata.
    #[serde(skip)]
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
    /// Reads what a file says, and of its tensors only the history.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be read or is no regular file; [`Error::Format`] if it is not whole, damaged, no
    /// safetensors, or no run's; [`Error::Weight`] for a history that lacks a part.
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        Self::parse(&TensorFile::open(path.as_ref())?)
    }

    pub(super) fn parse(file: &TensorFile) -> Result<Self> {
        let refuse = |problem: String, hint: &str| Error::format(file.path(), problem, hint);
        let text = file.text(KEY).ok_or_else(|| {
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
        let mut json: Value = serde_json::from_str(text).map_err(unreadable)?;
        let history = match json["format"].as_u64() {
            Some(1) => match json.get_mut("history") {
                Some(history) => Some(serde_json::from_value(history.take())),
                None => Some(Err(serde::de::Error::missing_field("history"))),
            },
            Some(2) => None, // in tensors
            _ => {
                return Err(refuse(
                    format!("a run in format {}", json["format"]),
                    &format!("this version reads formats 1 and 2, and writes {FORMAT}"),
                ));
            }
        };
        let mut checkpoint: Self = serde_json::from_value(json).map_err(unreadable)?;
        checkpoint.history = match history {
            Some(history) => history.map_err(unreadable)?,
            None => History::read(file, checkpoint.step)?,
        };
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
        let before = |i: usize| if i > 0 { skipped[i - 1] } else { 0 };
        let is_wrong = |i: &usize| skipped[*i] <= before(*i) || skipped[*i] > checkpoint.step;
        if let Some(wrong) = (0..skipped.len()).find(is_wrong) {
            let shown = &skipped[wrong.saturating_sub(1)..=wrong]; // there may be millions
            return Err(refuse(
                format!(
                    "{} steps taken, but {shown:?} among them skipped",
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
    /// [`Checkpoint`] says what is in it.
    ///
    /// If [`TrainConfig::keep`] is over 1, the files that were there before stay as `path.1`, the latest, `path.2`
    /// and so on. Temporary files that killed processes left in the folder are removed.
    ///
    /// From the first save on the path belongs to this run, until it is dropped or saves elsewhere: `path.lock` says
    /// so, and another run that saves there, in this process or another, gets an error. What a process leaves that is
    /// killed keeps no other writer away. (On a file system without locks no writer is kept away at all.)
    ///
    /// Of [ranks that train together](Self::replicate) rank 0 alone writes: they all have the same run. Where the
    /// [optimizer is divided](Self::shard_optimizer) among them, it gets the others' state: all ranks have to call
    /// this. Where [weights are divided](Self::fully_sharded), every rank writes its part to a file of its own beside
    /// `path`, `path.part-...`, and rank 0 then the file at `path`, which names them: with it the run is whole, and
    /// before it the one that was there. Parts that no file names any more are removed. The folder must be one that all
    /// ranks see.
    ///
    /// # Errors
    /// [`Error::Io`] naming `path`, and the process that writes there if that is why; [`Error::Weight`] names a
    /// weight or an entry of the optimizer's state that is not finite, or negative where it is a mean of squares.
    /// What was there before stays.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        if let Some(Job::FullyShard(sharded)) = &self.job {
            return self.save_parts(path, sharded);
        }
        self.optimizer.gather_weights()?;
        let state = self.optimizer.state_entries(STATE_PREFIX)?;
        if self.communicator().is_some_and(|ranks| ranks.rank() > 0) {
            return Ok(()); // rank 0 writes what all have
        }
        let tensors = self.model.entries().chain(state).collect();
        self.write(path, tensors, None)
    }

    /// Writes the run with these tensors beside the history, and with what says where others are.
    pub(super) fn write(
        &self,
        path: &Path,
        tensors: Vec<Entry>,
        parts: Option<&Manifest>,
    ) -> Result<()> {
        let mut lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        PathLock::hold(&mut lock, path)?;
        let checkpoint = Checkpoint {
            step: self.step,
            model: self.model.config().clone(),
            dtype: self.dtype().as_str().into(),
            train: self.config.clone(),
            training_data: self.training_data.clone(),
            validation_data: self.validation_data.clone(),
            history: History::default(), // not in this text
            loss_scaling: self.scaler.as_ref().map(GradScaler::state),
        };
        let written = Written {
            format: FORMAT,
            checkpoint: &checkpoint,
        };
        let unwritten = |e| Error::io("write", path, std::io::Error::other(e));
        let text = serde_json::to_string(&written).map_err(unwritten)?;
        let mut texts = vec![(KEY, text), self.model.config_text(path)?];
        if let Some(parts) = parts {
            let text = serde_json::to_string(parts).map_err(unwritten)?;
            texts.push((Manifest::KEY, text));
        }
        let history = self.history.entries()?;
        let entries = tensors.into_iter().chain(history).collect();
        files::save_tensors(path, entries, &texts, self.config.keep)
    }

    fn dtype(&self) -> DType {
        self.parameters[0].1.dtype()
    }
}
