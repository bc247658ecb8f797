//! The inputs of a step: the tensors of a run, and the tensors without elements that its loss is traced with.

use crate::graph;
use crate::model::MaskedTargets;
use crate::ops::DropoutKey;
use crate::{Error, Result};
use candle_core::{DType, Tensor};

/// The input that holds the keys of dropout.
pub(super) const DROPOUT: &str = "dropout";

/// The input that holds the gradient of the output, where a run is given it.
pub(super) const D_OUTPUT: &str = "d_output";

/// The inputs of a run of a [`Step`](super::Step): tensors by the names that its loss asks for, micro-batches one after
/// another in their first dimension.
///
/// Made of `[("x", &x), ("y", &y)]`; of a [`TransformerLM`](crate::model::TransformerLM)'s step also of
/// `(&tokens, &targets)`, (accumulation * B, T) each. The tensors may be [hollow](crate::graph::input()) where a plan
/// alone is asked for.
#[derive(Clone, Debug)]
pub struct Batch {
    inputs: Vec<(String, Tensor)>,
    counted: Option<usize>,
}

impl Batch {
    /// Tensors by name.
    pub fn new<'t>(inputs: impl IntoIterator<Item = (&'t str, &'t Tensor)>) -> Self {
        let inputs = inputs.into_iter();
        Self {
            inputs: inputs.map(|(name, x)| (name.into(), x.clone())).collect(),
            counted: None,
        }
    }

    /// The batch, of which so many targets count. Its loss is then a sum over these: the step's loss is the mean over
    /// all targets that count, of all micro-batches and ranks, and so are the gradients.
    pub fn counting(self, targets: usize) -> Self {
        Self {
            counted: Some(targets),
            ..self
        }
    }

    /// Tokens and targets of a language model, (accumulation * B, T) in u32 or i64, of which some targets do not count:
    /// those that are `ignore_index` (-100 in PyTorch), and those that follow the token `separator`, which ends each of
    /// the documents that a sequence is packed of. With a separator a document attends to itself alone, as in
    /// [`TransformerLM::loss_of_documents`](crate::model::TransformerLM::loss_of_documents).
    ///
    /// ```
    /// use candle_core::Tensor;
    /// use tallow::compile::Batch;
    ///
    /// let device = tallow::device("cpu")?;
    /// let tokens = Tensor::new(&[[1u32, 2, 0, 3]], &device)?; // (B, T)
    /// let targets = Tensor::new(&[[2i64, 0, 3, -100]], &device)?; // (B, T)
    /// assert_eq!(Batch::masked(&tokens, &targets, Some(0), Some(-100))?.counted(), Some(2));
    /// # Ok::<(), tallow::Error>(())
    /// ```
    ///
    /// Hollow tokens and targets give the batch for a plan alone.
    ///
    /// # Errors
    /// Tokens or targets of another dtype.
    pub fn masked(
        tokens: &Tensor,
        targets: &Tensor,
        separator: Option<u32>,
        ignore_index: Option<i64>,
    ) -> Result<Self> {
        if graph::is_hollow(tokens) {
            return Self::masked_hollow(tokens, targets, separator, ignore_index);
        }
        let Some(masked) = MaskedTargets::of(tokens, targets, separator, ignore_index)? else {
            return Ok((tokens, targets).into());
        };
        let first_keys = masked.first_keys.as_ref();
        let first_keys = first_keys.map(|keys| ("first_keys", keys.tensor()));
        let inputs = [("tokens", tokens), ("targets", &masked.targets)];
        Ok(Self::new(inputs.into_iter().chain(first_keys)).counting(masked.counted))
    }

    fn masked_hollow(
        tokens: &Tensor,
        targets: &Tensor,
        separator: Option<u32>,
        ignore_index: Option<i64>,
    ) -> Result<Self> {
        let batch = Self::from((tokens, targets));
        let batch = match separator {
            Some(_) => {
                let first_keys = graph::input("first_keys", tokens.shape(), DType::U32)?;
                batch.with("first_keys", first_keys)
            }
            None => batch,
        };
        Ok(match separator.is_some() || ignore_index.is_some() {
            true => batch.counting(0), // whatever their number, the plan is the same
            false => batch,
        })
    }

    /// Hollow tokens and targets, (batch_size, sequence_length) in u32, for a plan alone.
    ///
    /// # Errors
    /// As [`graph::input`](crate::graph::input()).
    pub fn hollow(batch_size: usize, sequence_length: usize) -> Result<Self> {
        let input = |name| graph::input(name, (batch_size, sequence_length), DType::U32);
        Ok((&input("tokens")?, &input("targets")?).into())
    }

    /// The number of targets that count, of a batch that [counts them](Self::counting).
    pub fn counted(&self) -> Option<usize> {
        self.counted
    }

    pub(super) fn inputs(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.inputs.iter().map(|(name, x)| (name.as_str(), x))
    }

    pub(super) fn with(mut self, name: &str, input: Tensor) -> Self {
        self.inputs.push((name.into(), input));
        self
    }

    /// The last dimension of an input, 0 where there is none.
    pub(super) fn length(&self, name: &str) -> usize {
        let mut all = self.inputs();
        let found = all.find(|(other, _)| *other == name);
        let length = found.and_then(|(_, x)| x.dims().last().copied());
        length.unwrap_or_default()
    }

    /// The number of elements of its largest input.
    pub(super) fn elements(&self) -> usize {
        let elements = self.inputs.iter().map(|(_, x)| x.elem_count());
        elements.max().unwrap_or_default()
    }
}

impl<'t, const N: usize> From<[(&'t str, &'t Tensor); N]> for Batch {
    fn from(inputs: [(&'t str, &'t Tensor); N]) -> Self {
        Self::new(inputs)
    }
}

impl<'t> From<&[(&'t str, &'t Tensor)]> for Batch {
    fn from(inputs: &[(&'t str, &'t Tensor)]) -> Self {
        Self::new(inputs.iter().copied())
    }
}

/// Tokens and targets of a language model.
impl From<(&Tensor, &Tensor)> for Batch {
    fn from((tokens, targets): (&Tensor, &Tensor)) -> Self {
        Self::new([("tokens", tokens), ("targets", targets)])
    }
}

impl From<&Batch> for Batch {
    fn from(batch: &Batch) -> Self {
        batch.clone()
    }
}

/// The inputs that the loss of a [`Step`](super::Step) is traced with: one micro-batch of a [batch](Batch), without
/// elements. Shapes and dtypes are known, and what is decided from them is decided for all runs of the plan.
#[derive(Debug)]
pub struct Inputs {
    op: &'static str,
    hollow: Vec<(String, Tensor)>,
    drops: bool,
    are_counted: bool,
}

impl Inputs {
    /// # Errors
    /// Inputs that cannot be cut into so many micro-batches.
    pub(super) fn of(
        op: &'static str,
        batch: &Batch,
        micro_batches: usize,
        drops: bool,
    ) -> Result<Self> {
        let hollow = batch.inputs().map(|(name, x)| {
            let mut shape = x.dims().to_vec();
            match shape.first_mut() {
                _ if micro_batches == 1 => {}
                Some(first) if first.is_multiple_of(micro_batches) => *first /= micro_batches,
                _ => {
                    let expected = format!(
                        "{name} of {micro_batches} micro-batches, one after another in its first dimension"
                    );
                    let hint = "pass as many of each micro-batch (a scalar as (1) each), or set accumulation";
                    let got = Error::shape(op, format!("{:?}", x.dims()));
                    return Err(got.must_be(expected, hint));
                }
            }
            Ok((name.to_string(), graph::input(name, shape, x.dtype())?))
        });
        Ok(Self {
            op,
            hollow: hollow.collect::<Result<_>>()?,
            drops,
            are_counted: batch.counted.is_some(),
        })
    }

    /// The input of this name.
    ///
    /// # Errors
    /// [`Error::Order`] where the batch has none.
    pub fn get(&self, name: &str) -> Result<Tensor> {
        self.find(name).ok_or_else(|| {
            let names: Vec<&str> = self.hollow.iter().map(|(name, _)| name.as_str()).collect();
            Error::Order {
                op: self.op,
                problem: format!("no tensor for the input {name:?}"),
                hint: format!("pass it to run, which was given {}", names.join(", ")),
            }
        })
    }

    /// The input of this name, where the batch has one.
    pub fn find(&self, name: &str) -> Option<Tensor> {
        let mut all = self.hollow.iter();
        all.find(|(other, _)| other == name).map(|(_, x)| x.clone())
    }

    /// The key of dropout, where [`StepConfig::dropout_seed`](super::StepConfig::dropout_seed) has one: each run and
    /// micro-batch has another.
    ///
    /// # Errors
    /// As [`graph::input`](crate::graph::input()).
    pub fn dropout(&self) -> Result<Option<DropoutKey>> {
        let key = self.drops.then(|| DropoutKey::input(DROPOUT));
        key.transpose()
    }

    /// Says whether the loss has to be a sum over targets, since the batch [counts them](Batch::counting).
    pub fn are_counted(&self) -> bool {
        self.are_counted
    }
}
