//! The losses of a run so far.

use crate::files::{Entry, TensorFile};
use crate::model::HISTORY_PREFIX;
use crate::saved::{Numbers, describe};
use crate::{Error, Result};
use candle_core::{Device, Tensor, WithDType};
use serde::{Deserialize, Deserializer, Serialize};
use std::ops::RangeInclusive;

/// The history's lists in a file, after its prefix.
const LOSSES: &str = "losses";
const SKIPPED: &str = "skipped";
const EVALUATED: &str = "evaluated_steps";
const EVALUATIONS: &str = "evaluations";

/// Every step's loss, and every evaluation's: nats a token. Checkpoints keep it, so that a resumed run's curve is
/// whole.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct History {
    /// The loss of each step's own batch, before the step's update; the first step's first. NaN where it was no number,
    /// as may be where the loss is scaled.
    #[serde(deserialize_with = "null_as_nan")]
    pub losses: Vec<f64>,
    /// The steps, counted from 1, whose update was skipped for gradients that overflowed at their loss scale.
    #[serde(default)]
    pub skipped: Vec<usize>,
    /// The evaluations, in the order of their steps.
    pub evaluations: Vec<Evaluation>,
}

/// The mean loss over the validation tokens, after some steps.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Steps taken before it.
    pub step: usize,
    /// Nats a token.
    pub loss: f64,
}

/// JSON has no NaN.
fn null_as_nan<'de, D: Deserializer<'de>>(losses: D) -> std::result::Result<Vec<f64>, D::Error> {
    let losses = Vec::<Option<f64>>::deserialize(losses)?;
    Ok(losses
        .into_iter()
        .map(|loss| loss.unwrap_or(f64::NAN))
        .collect())
}

impl History {
    pub(super) fn stepped(&mut self, loss: f64, skipped: bool) {
        // One value for all that is none: it comes back from a file as it went in.
        self.losses
            .push(if loss.is_finite() { loss } else { f64::NAN });
        if skipped {
            self.skipped.push(self.losses.len());
        }
    }

    /// Puts an evaluation down, in the place of an earlier one of the same step.
    pub(super) fn evaluated(&mut self, step: usize, loss: f64) {
        self.evaluations.retain(|earlier| earlier.step < step);
        self.evaluations.push(Evaluation { step, loss });
    }

    /// As a checkpoint holds it: a vector for each list, of which that of the losses has a number a step.
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

    /// Reads what [`History::entries`] gave, of a run of `step` steps: no list is read that is longer than that allows.
    ///
    /// # Errors
    /// [`Error::Weight`] for a part that is missing, of another type or of another length; those of
    /// [`TensorFile::get`].
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

    /// The mean loss of the last `steps` steps, or of as many as there are; one batch's loss says little. Losses that
    /// are no numbers are left out, and `None` says that nothing is left.
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
    // Before it is read: a file may claim any length.
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

/// `None` if there is no number among them.
pub(super) fn mean_of_finite(losses: &[f64]) -> Option<f64> {
    let finite = losses.iter().filter(|loss| loss.is_finite());
    let count = finite.clone().count();
    (count > 0).then(|| finite.sum::<f64>() / count as f64)
}
