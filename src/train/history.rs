//! The losses of a run so far.

use crate::files::{Entry, TensorFile};
use crate::model::HISTORY_PREFIX;
use crate::saved::{Numbers, describe};
use crate::{Error, Result};
use candle_core::{Device, Tensor, WithDType};
use serde::{Deserialize, Deserializer, Serialize};
use std::ops::RangeInclusive;

/// Names of the history's tensors in a file, after their prefix.
const LOSSES: &str = "losses";
const SKIPPED: &str = "skipped";
const EVALUATED: &str = "evaluated_steps";
const EVALUATIONS: &str = "evaluations";

/// The losses of all steps and evaluations, in nats a token. Checkpoints contain it, so the curve of a resumed run is
/// complete.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct History {
    /// The mean loss of each step's batches, before the update; the first step's first. NaN if it was not finite, which
    /// a scaled loss may be.
    #[serde(deserialize_with = "null_as_nan")]
    pub losses: Vec<f64>,
    /// The steps, counted from 1, whose update was skipped because gradients overflowed.
    #[serde(default)]
    pub skipped: Vec<usize>,
    /// The evaluations, in the order of their steps.
    pub evaluations: Vec<Evaluation>,
}

/// The mean loss over the validation data after a number of steps.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Steps taken before it.
    pub step: usize,
    /// Loss in nats a token.
    pub loss: f64,
}

/// Replaces null by NaN, which JSON lacks.
fn null_as_nan<'de, D: Deserializer<'de>>(losses: D) -> std::result::Result<Vec<f64>, D::Error> {
    let losses = Vec::<Option<f64>>::deserialize(losses)?;
    Ok(losses
        .into_iter()
        .map(|loss| loss.unwrap_or(f64::NAN))
        .collect())
}

impl History {
    pub(super) fn stepped(&mut self, loss: f64, skipped: bool) {
        // NaN for every loss that is not finite, so that it is the same after a file's round trip.
        self.losses
            .push(if loss.is_finite() { loss } else { f64::NAN });
        if skipped {
            self.skipped.push(self.losses.len());
        }
    }

    /// Records an evaluation, and removes an earlier one of the same step.
    pub(super) fn evaluated(&mut self, step: usize, loss: f64) {
        self.evaluations.retain(|earlier| earlier.step < step);
        self.evaluations.push(Evaluation { step, loss });
    }

    /// Returns the history as entries of a checkpoint: a vector for each list; that of the losses has one number a
    /// step.
    pub(super) fn entries(&self) -> Result<Vec<Entry>> {
        let integers = |values: &mut dyn Iterator<Item = usize>| {
            let values: Vec<i64> = values.map(|value| value as i64).collect();
            Tensor::from_slice(&values, values.len(), &Device::Cpu)
        };
        let evaluations: Vec<f64> = self.evaluations.iter().map(|e| e.loss).collect();
        let vectors = [
            (
                LOSSES,
                Tensor::from_slice(&self.losses, self.losses.len(), &Device::Cpu)?,
            ),
            (SKIPPED, integers(&mut self.skipped.iter().copied())?),
            (
                EVALUATED,
                integers(&mut self.evaluations.iter().map(|e| e.step))?,
            ),
            (
                EVALUATIONS,
                Tensor::from_slice(&evaluations, evaluations.len(), &Device::Cpu)?,
            ),
        ];
        let entries = vectors.into_iter().map(|(name, tensor)| Entry {
            name: format!("{HISTORY_PREFIX}{name}"),
            tensor,
            numbers: Numbers::Any, // a loss that overflowed is NaN
        });
        Ok(entries.collect())
    }

    /// Reads the entries of a run of `step` steps. Lists that are longer than this allows are refused before they are
    /// read.
    ///
    /// # Errors
    /// [`Error::Weight`] for a part that is missing, or has another dtype or length; those of [`TensorFile::get`].
    pub(super) fn read(file: &TensorFile, step: usize) -> Result<Self> {
        let steps = |name, lengths| -> Result<Vec<usize>> {
            let steps = vector::<i64>(file, name, lengths)?.into_iter();
            Ok(steps
                .map(|step| usize::try_from(step).unwrap_or(usize::MAX))
                .collect())
        };
        let most = 0..=step.saturating_add(1); // before the first step and after each
        let evaluations = vector(file, EVALUATIONS, most.clone())?;
        let evaluated = steps(EVALUATED, most)?;
        if evaluated.len() != evaluations.len() {
            let (expected, got) = (evaluated.len(), evaluations.len());
            return Err(refuse(
                file,
                EVALUATIONS,
                format!("{expected} numbers"),
                got.to_string(),
            ));
        }
        let evaluations = evaluated.into_iter().zip(evaluations);
        Ok(Self {
            losses: vector(file, LOSSES, step..=step)?,
            skipped: steps(SKIPPED, 0..=step)?,
            evaluations: evaluations
                .map(|(step, loss)| Evaluation { step, loss })
                .collect(),
        })
    }

    /// Returns the mean loss of the last `steps` steps, or of all if there are fewer: the loss of one batch is noisy.
    /// Losses that are not finite are ignored; `None` if no others are left.
    pub fn recent_loss(&self, steps: usize) -> Option<f64> {
        mean_of_finite(&self.losses[self.losses.len().saturating_sub(steps)..])
    }
}

fn vector<T: WithDType>(
    file: &TensorFile,
    name: &str,
    lengths: RangeInclusive<usize>,
) -> Result<Vec<T>> {
    let saved = format!("{HISTORY_PREFIX}{name}");
    let (least, most) = (lengths.start(), lengths.end());
    let count = match least == most {
        true => most.to_string(),
        false => format!("at most {most}"),
    };
    let expected = || format!("{count} {} in a row", T::DTYPE.as_str());
    // Checked before it is read: a file may claim any length.
    match file.shape(&saved) {
        Some([length]) if lengths.contains(length) => {}
        found => {
            let got = found.and_then(|_| file.description(&saved));
            let got = got.unwrap_or_else(|| "nothing".into());
            return Err(refuse(file, name, expected(), got));
        }
    }
    match file.get(&saved, &Device::Cpu)? {
        Some(tensor) if tensor.dtype() == T::DTYPE => Ok(tensor.to_vec1()?),
        Some(tensor) => Err(refuse(file, name, expected(), describe(&tensor))),
        None => Err(refuse(file, name, expected(), "nothing".into())),
    }
}

fn refuse(file: &TensorFile, name: &str, expected: String, got: String) -> Error {
    Error::weight(file.path(), format!("{HISTORY_PREFIX}{name}"), got).must_be(
        expected,
        "the file is not as Trainer::save writes it; resume from another",
    )
}

/// Returns the mean of finite losses; `None` if there are none.
pub(super) fn mean_of_finite(losses: &[f64]) -> Option<f64> {
    let finite = losses.iter().filter(|loss| loss.is_finite());
    let count = finite.clone().count();
    (count > 0).then(|| finite.sum::<f64>() / count as f64)
}
