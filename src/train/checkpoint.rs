//! A run in a file, and out of it again.

use super::ranks::Job;
use super::{DataFingerprint, History, TrainConfig, Trainer};
use crate::data::Tokens;
use crate::dist::FullyShard;
use crate::files::{self, Difference, Entry, Manifest, PathLock, TensorFile, first_difference};
use crate::model::{LoadOptions, STATE_PREFIX, TransformerConfig, TransformerLM};
use crate::optim::{GradScaler, GradScalerState};
use crate::saved::Numbers;
use crate::{Error, Result};
use candle_core::{DType, Device};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::Path;
use std::sync::PoisonError;

/// The metadata's key.
const KEY: &str = "tallow.train";
/// Raised when a reader of the old format could not make sense of the new one. In format 1 the history was in the JSON.
const FORMAT: u32 = 2;
/// Settings that may change from one part of a run to the next: no step depends on them.
const FREE_SETTINGS: [&str; 4] = ["steps", "evaluate_every", "keep", "optimizer.lr"];

/// What a saved run says about itself.
///
/// The file is safetensors, written by [`Trainer::save`]: the weights under their own names, so that
/// [`TransformerLM::load`] reads it as it reads any model's; the optimizer's state as `optimizer.exp_avg.<name>` and
/// `optimizer.exp_avg_sq.<name>`; the history as `history.losses` (f64, a number a step), `history.skipped`,
/// `history.evaluated_steps` (i64) and `history.evaluations` (f64); and the rest of this, as JSON, in the metadata
/// under `tallow.train`. Beside it, under `tallow.crc32`, is the CRC-32 of every tensor, as `zlib.crc32` gives it,
/// and of this text: reading the file here finds damage.
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

    fn parse(file: &TensorFile) -> Result<Self> {
        let refuse = |problem: String, hint: &str| Error::Format {
            path: file.path().into(),
            problem,
            hint: hint.into(),
        };
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
                Some(history) => serde_json::from_value(history.take()),
                None => Err(serde::de::Error::missing_field("history")),
            }
            .map_err(unreadable)?,
            Some(2) => History::read(file)?,
            _ => {
                return Err(refuse(
                    format!("a run in format {}", json["format"]),
                    &format!("this version reads formats 1 and 2, and writes {FORMAT}"),
                ));
            }
        };
        let mut checkpoint: Self = serde_json::from_value(json).map_err(unreadable)?;
        checkpoint.history = history;
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
        self.gather_weights()?;
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

    /// The run that [`Trainer::save`] wrote to `path`, to go on with: its steps have the bits that they would have had
    /// without the break (on one machine and build, and one kind of device).
    ///
    /// `model`, `config` and the data must be those it was saved with, in what its steps depend on. (On
    /// [`TransformerConfig::attention`] they do, by rounding: another algorithm is another run, from the weights that
    /// [`TransformerLM::load`] reads. On [`TransformerConfig::checkpointing`] they do not.) So `steps`,
    /// `evaluate_every` and `keep` may differ: a finished run goes on if it is given more steps, at the learning
    /// rates that its schedule has beyond its end. And the data may lie elsewhere, as long as it is the same.
    ///
    /// The file is opened once: a run that saves to `path` meanwhile does no harm. Temporary files that killed
    /// processes left beside it are removed.
    ///
    /// # Errors
    /// [`Error::Resume`] names the setting that differs, with both values. [`Error::Io`], [`Error::Format`] and
    /// [`Error::Weight`] for a file that cannot be read, is not whole, was damaged, lacks a part, or has weights or a
    /// state that are not finite; and those of [`Trainer::new`].
    pub fn resume(
        path: impl AsRef<Path>,
        model: &TransformerConfig,
        config: TrainConfig,
        train: Tokens,
        validation: Tokens,
        device: &Device,
    ) -> Result<Self> {
        Self::resume_as(
            path.as_ref(),
            model,
            config,
            [train, validation],
            device,
            None,
        )
    }

    /// As [`resume`](Self::resume), as a run of [`fully_sharded`](Self::fully_sharded), whatever ranks have saved it:
    /// `sharded`, of which nothing was built yet, gets this rank's parts. Every rank calls it.
    ///
    /// A run goes on with the bits that it would have had if it was saved by as many ranks.
    ///
    /// # Errors
    /// As [`resume`](Self::resume) and [`fully_sharded`](Self::fully_sharded).
    pub fn resume_fully_sharded(
        path: impl AsRef<Path>,
        model: &TransformerConfig,
        sharded: &FullyShard,
        config: TrainConfig,
        train: Tokens,
        validation: Tokens,
    ) -> Result<Self> {
        // A file has all of a weight, of which the rank's device then gets a part.
        let device = &Device::Cpu;
        let data = [train, validation];
        Self::resume_as(path.as_ref(), model, config, data, device, Some(sharded))
    }

    fn resume_as(
        path: &Path,
        model: &TransformerConfig,
        config: TrainConfig,
        [train, validation]: [Tokens; 2],
        device: &Device,
        sharded: Option<&FullyShard>,
    ) -> Result<Self> {
        let file = TensorFile::open(path)?;
        files::remove_abandoned(path);
        let saved = Checkpoint::parse(&file)?;
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
        let options = LoadOptions {
            dtype,
            ..Default::default()
        };
        let model = TransformerLM::read(model, &file, &options, device, |vb| match sharded {
            Some(sharded) => sharded.builder(vb),
            None => vb,
        })?;
        let parameters = match sharded {
            Some(sharded) => sharded.parameters(),
            None => model.parameters(),
        };
        for (name, weight) in parameters {
            if let Some(got) = Numbers::Finite.misfit(&weight)? {
                return Err(Error::Weight {
                    path: path.into(),
                    name,
                    expected: Numbers::Finite.expected().into(),
                    got,
                    hint:
                        "it was saved by a run that had diverged; resume from an earlier checkpoint"
                            .into(),
                });
            }
        }
        let mut trainer = match sharded {
            Some(sharded) => Self::of_parts(model, sharded, config, train, validation)?,
            None => Self::new(model, config, train, validation)?,
        };
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
        let state = trainer.optimizer.read_state(&file, STATE_PREFIX, sharded)?;
        let updates = saved.step - saved.history.skipped.len();
        trainer.optimizer.put_state(&state, updates)?;
        if let (Some(scaler), Some(state)) = (&mut trainer.scaler, saved.loss_scaling) {
            scaler.load_state(state)?;
        }
        trainer.step = saved.step;
        trainer.history = saved.history;
        if let Some(sharded) = sharded {
            trainer.check_ranks("Trainer::resume_fully_sharded", sharded.communicator())?;
        }
        Ok(trainer)
    }

    /// The parameters' type.
    fn dtype(&self) -> DType {
        self.parameters[0].1.dtype()
    }
}

#[cfg(test)]
mod tests {
    use super::super::Evaluation;
    use super::*;

    /// More losses than safetensors' header can hold as text: a run of that length cannot be made in a test otherwise.
    #[test]
    fn a_history_of_six_million_steps_is_saved_and_resumed() {
        const STEPS: usize = 6_000_000;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("long.safetensors");
        let model = TransformerConfig {
            vocab_size: 256,
            context_length: 4,
            d_model: 4,
            num_layers: 1,
            num_heads: 1,
            d_ff: 4,
            ..Default::default()
        };
        let config = TrainConfig {
            batch_size: 1,
            sequence_length: 4,
            steps: STEPS + 1,
            ..Default::default()
        };
        let tokens = Tokens::from_bytes("to be, or not to be").unwrap();
        let new = TransformerLM::new(&model, 0, &Device::Cpu).unwrap();
        let mut trainer =
            Trainer::new(new, config.clone(), tokens.clone(), tokens.clone()).unwrap();
        let losses = (0..STEPS).map(|step| 2.0 + (step as f64).sin() / 3.0);
        trainer.history = History {
            losses: losses.collect(),
            skipped: (1..STEPS).step_by(7).collect(),
            evaluations: (0..STEPS)
                .step_by(1000)
                .map(|step| Evaluation {
                    step,
                    loss: 1.0 / 3.0,
                })
                .collect(),
        };
        trainer.history.losses[5] = f64::NAN;
        trainer.step = STEPS;
        trainer.save(&path).unwrap();
        let resumed =
            Trainer::resume(&path, &model, config, tokens.clone(), tokens, &Device::Cpu).unwrap();
        let bits = |history: &History| -> Vec<u64> {
            history.losses.iter().map(|loss| loss.to_bits()).collect()
        };
        assert!(bits(&resumed.history) == bits(&trainer.history));
        assert!(resumed.history.skipped == trainer.history.skipped);
        assert!(resumed.history.evaluations == trainer.history.evaluations);
        assert_eq!(resumed.steps_taken(), STEPS);
    }
}
