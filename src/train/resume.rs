//! Resuming of a run from its file.

use super::{Checkpoint, Data, TrainConfig, Trainer};
use crate::distributed::FullyShard;
use crate::files::{self, TensorFile, first_difference};
use crate::model::{LoadOptions, STATE_PREFIX, TransformerConfig, TransformerLM};
use crate::saved::Numbers;
use crate::{Error, Result, nn};
use candle_core::{DType, Device};
use std::path::Path;

/// Settings that may change when a run is resumed, since no step depends on them.
const FREE_SETTINGS: [&str; 5] = [
    "steps",
    "evaluate_every",
    "keep",
    "optimizer.lr",
    "checkpointing",
];

impl Trainer {
    /// Resumes the run that [`Trainer::save`] wrote to `path`. Its steps have the same bits as without the interruption
    /// if build, kind of processor and GPU, and number of ranks are the same.
    ///
    /// `model`, `config` and the data must be those it was saved with. In `config` only `steps`, `evaluate_every`,
    /// `keep`, `checkpointing`, `memory_budget_bytes` and the unused `optimizer.lr` may differ.
    /// [`attention`](TrainConfig::attention) may not, because it changes the rounding: for another algorithm start a
    /// new run from the weights, with [`TransformerLM::load`]. A finished run continues if it gets more steps, with the
    /// learning rates that its schedule has after its end. The data may be at another path if it is the same.
    ///
    /// The file is opened once, so another save to `path` meanwhile does no harm. Temporary files of killed processes
    /// in its folder are removed.
    ///
    /// # Errors
    /// [`Error::Resume`] names the setting that differs, with both values. [`Error::Io`], [`Error::Format`] and
    /// [`Error::Weight`] for a file that cannot be read, is incomplete, was damaged, lacks a part, or has weights or a
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

    /// Resumes a run as a [fully sharded](Self::fully_sharded) one. Any number of ranks may have saved it, with any
    /// strategy. Every rank calls this. Pass a new `sharded`, whose [`builder`](FullyShard::builder) has not been
    /// called: this call fills it with the rank's parts.
    ///
    /// If a fully sharded run of as many ranks saved it, the steps have the same bits as without the interruption.
    ///
    /// # Errors
    /// Those of [`resume`](Self::resume) and [`fully_sharded`](Self::fully_sharded).
    pub fn resume_fully_sharded(
        path: impl AsRef<Path>,
        model: &TransformerConfig,
        sharded: &FullyShard,
        config: TrainConfig,
        train: impl Into<Data>,
        validation: impl Into<Data>,
    ) -> Result<Self> {
        // The file has full weights; the rank's device gets its part of each.
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
        let config = TrainConfig {
            attention: config.attention.or(saved.train.attention),
            checkpointing: config.checkpointing.or(saved.train.checkpointing),
            ..config
        };
        let difference = first_difference(&saved.model, model, &[])
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
        let frozen = &saved.frozen;
        let model = TransformerLM::read(model, &file, &options, device, |vb| {
            let vb = match frozen.is_empty() {
                true => vb,
                false => nn::freeze(vb, |name| frozen.iter().any(|frozen| frozen == name)),
            };
            match sharded {
                Some(sharded) => sharded.builder(vb),
                None => vb,
            }
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
            Some(sharded) => Self::sharded_trainer(model, sharded, config, train, validation)?,
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

    /// More losses than safetensors' header can hold as text. No test can run that many steps.
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
