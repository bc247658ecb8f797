//! Checkpoints: the format of a saved run, and its writing.

use super::ranks::Job;
use super::{DataFingerprint, History, TrainConfig, Trainer};
use crate::attention::Algorithm;
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
/// Increased when readers of the old format cannot read the new one. In format 1 the history was in the JSON.
const FORMAT: u32 = 2;

/// The description of a saved run.
///
/// [`Trainer::save`] writes a safetensors file. The weights have their own names, so that
/// [`TransformerLM::load`](crate::model::TransformerLM::load) and `open` read the file like any model's. The file of a
/// [fully sharded](Trainer::fully_sharded) run lists the files with the parts of its tensors. All readers here and in
/// [`TransformerLM`](crate::model::TransformerLM) then join the parts, which must be in the same folder (other programs
/// find no weights in the file). The optimizer's state is
/// `optimizer.exp_avg.<name>` and `optimizer.exp_avg_sq.<name>`. The history is `history.losses` (f64, one a step),
/// `history.skipped`, `history.evaluated_steps` (i64) and `history.evaluations` (f64). The other fields are JSON in the
/// metadata under `tallow.train`. The metadata's `tallow.crc32` has the CRC-32 of every tensor, as `zlib.crc32`
/// computes it, and of this JSON, so that reading the file detects damage.
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
    /// Steps taken. With the seed it determines the position in the data, and with the schedule the learning rate.
    pub step: usize,
    /// The model's configuration.
    pub model: TransformerConfig,
    /// Dtype of the parameters, as candle names it: `f32`.
    pub dtype: String,
    /// The configuration of the run.
    pub train: TrainConfig,
    /// Fingerprint of the training data.
    pub training_data: DataFingerprint,
    /// Fingerprint of the validation data.
    pub validation_data: DataFingerprint,
    /// The losses so far. `serde` omits them from JSON: those of a long run are too many for a file's metadata.
    #[serde(skip)]
    pub history: History,
    /// The names of the [frozen](crate::nn::freeze()) weights, which are frozen again when the run is resumed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub frozen: Vec<String>,
    /// The state of the loss scale, in f16. A run saved without one continues with a new one.
    #[serde(default)]
    pub loss_scaling: Option<GradScalerState>,
}

/// The JSON in the metadata: the checkpoint, and its format.
#[derive(Serialize)]
struct Written<'a> {
    format: u32,
    #[serde(flatten)]
    checkpoint: &'a Checkpoint,
}

impl Checkpoint {
    /// Reads the description of a run; of the file's tensors only the history is read.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be read or is not regular; [`Error::Format`] if it is incomplete, damaged, not
    /// safetensors, or not a run; [`Error::Weight`] if a part of the history is missing.
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
            Some(2) => None, // stored as tensors
            _ => {
                return Err(refuse(
                    format!("a run in format {}", json["format"]),
                    &format!("this version reads formats 1 and 2, and writes {FORMAT}"),
                ));
            }
        };
        // Older files have the attention in the model's configuration; the oldest have none, and it is naive.
        let attention = json.pointer("/model/attention").cloned();
        if let Some(train) = json.get_mut("train").and_then(Value::as_object_mut) {
            let attention = attention.unwrap_or_else(|| Algorithm::Naive.name().into());
            train.entry("attention").or_insert(attention);
        }
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
    /// Writes the run to a file, completely or not at all: to a temporary file in the same folder, synced, then renamed
    /// to `path`. [`Checkpoint`] describes the format.
    ///
    /// If [`TrainConfig::keep`] is more than 1, earlier files are kept as `path.1` (the latest), `path.2` and so on, in
    /// a fully sharded run with the parts that they list. Temporary files of killed processes in the folder are
    /// removed.
    ///
    /// After its first save the run owns the path until it is dropped or saves to another path: it holds `path.lock`,
    /// and another run that saves there, in this process or another, gets an error. The lock file of a killed process
    /// does not block other writers. (On a file system without locks other writers are not blocked at all.)
    ///
    /// If several ranks train together:
    ///
    /// - With [`replicate`](Self::replicate) alone, all ranks have the same run, and rank 0 writes the file. Other
    ///   ranks may call this; it does nothing there.
    /// - With a [sharded optimizer](Self::shard_optimizer) rank 0 writes the file, for which it receives the others'
    ///   state: every rank must call this. On other ranks the call returns before the file is written, and with no
    ///   error if writing fails.
    /// - With [sharded weights](Self::fully_sharded) every rank must call this, and see the same folder. Each writes
    ///   its part to a file of its own next to `path`, `path.part-...`. Rank 0 then writes the file at `path`, which
    ///   lists the parts and completes the save; until then the earlier save is valid. Parts that no file lists any
    ///   more are removed. The call returns on every rank once the save is complete, or with an error on all.
    ///
    /// # Errors
    /// [`Error::Io`] naming `path`, and the process that writes there if there is one; [`Error::Weight`] naming a
    /// weight or an entry of the optimizer's state that is not finite, or a negative mean of squares. Earlier files
    /// stay unchanged.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        if let Some(Job::FullyShard(sharded)) = &self.job {
            return self.save_parts(path, sharded);
        }
        self.optimizer.gather_weights()?;
        let state = self.optimizer.state_entries(STATE_PREFIX)?;
        if self.communicator().is_some_and(|ranks| ranks.rank() > 0) {
            return Ok(()); // rank 0 writes for all
        }
        let tensors = self.model.entries().chain(state).collect();
        self.write(path, tensors, None)
    }

    /// Writes the run with these tensors and the history; `parts` lists the files of other tensors.
    pub(super) fn write(
        &self,
        path: &Path,
        tensors: Vec<Entry>,
        parts: Option<&Manifest>,
    ) -> Result<()> {
        let mut lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        PathLock::acquire_for(&mut lock, path)?;
        let checkpoint = Checkpoint {
            step: self.step,
            model: self.model.config().clone(),
            dtype: self.dtype().as_str().into(),
            train: self.config.clone(),
            training_data: self.training_data.clone(),
            validation_data: self.validation_data.clone(),
            frozen: self.model.frozen_weights(),
            history: History::default(), // stored as tensors instead
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
