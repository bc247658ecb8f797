//! A run out of its file again.

use super::{Checkpoint, Data, TrainConfig, Trainer};
use crate::distributed::FullyShard;
use crate::files::{self, TensorFile, first_difference};
use crate::model::{LoadOptions, STATE_PREFIX, TransformerConfig, TransformerLM};
use crate::saved::Numbers;
use crate::{Error, Result};
use candle_core::{DType, Device};
use std::path::Path;

/// Settings that may change from one part of a run to the next: no step depends on them.
const FREE_SETTINGS: [&str; 4] = ["steps", "evaluate_every", "keep", "optimizer.lr"];

impl Trainer {
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
        train: impl Into<Data>,
        validation: impl Into<Data>,
        device: &Device,
    ) -> Result<Self> {
        Self::resume_as(
            path.as_ref(),
            model,
            config,
            [train.into(), validation.into()],
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
        train: impl Into<Data>,
        validation: impl Into<Data>,
    ) -> Result<Self> {
        // A file has all of a weight, of which the rank's device then gets a part.
        let device = &Device::Cpu;
        let data = [train.into(), validation.into()];
        Self::resume_as(path.as_ref(), model, config, data, device, Some(sharded))
    }

    fn resume_as(
        path: &Path,
        model: &TransformerConfig,
        config: TrainConfig,
        [train, validation]: [Data; 2],
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
        if let Some(different) = difference {
            return Err(refuse(&different.field, different.saved, different.given));
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
                return Err(Error::weight(path, name, got).must_be(
                    Numbers::Finite.expected(),
                    "it was saved by a run that had diverged; resume from an earlier checkpoint",
                ));
            }
        }
        let mut trainer = match sharded {
            Some(sharded) => Self::of_parts(model, sharded, config, train, validation)?,
            None => Self::new(model, config, train, validation)?,
        };
        let data = [saved.training_data, saved.validation_data];
        let given = [&trainer.training_data, &trainer.validation_data];
        let names = ["training data of", "validation data of"];
        for ((what, saved), given) in names.into_iter().zip(data).zip(given) {
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
}

#[cfg(test)]
mod tests {
    use super::super::{Evaluation, History};
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
        let tokens = crate::data::Tokens::from_bytes("to be, or not to be").unwrap();
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
