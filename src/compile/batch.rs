//! The inputs of a step: [`Batch`] has the tensors of a run, [`Inputs`] the meta tensors that its loss is traced with.

use crate::graph;
use crate::model::MaskedTargets;
use crate::ops::DropoutKey;
use crate::{Error, Result};
use candle_core::{DType, Tensor};

pub(super) const DROPOUT: &str = "dropout";

pub(super) const D_OUTPUT: &str = "d_output";

/// The inputs of a run of a [`Step`](super::Step): named tensors, with micro-batches stacked in their first dimension.
///
/// Converts from `[("x", &x), ("y", &y)]`; for the step of a [`TransformerLM`](crate::model::TransformerLM) also from
/// `(&tokens, &targets)`, (accumulation * B, T) each. To get a plan alone, the tensors may be [meta
/// tensors](crate::graph::input()).
///
/// ```
/// use candle_core::{DType, Tensor};
/// use tallow::compile::Batch;
///
/// let device = tallow::device("cpu")?;
/// let x = Tensor::zeros((4, 3), DType::F32, &device)?; // two micro-batches of two rows
/// let y = Tensor::zeros(4, DType::U32, &device)?;
/// let batch = Batch::from([("x", &x), ("y", &y)]).with_counted_targets(3); // a target is ignored
/// assert_eq!(batch.counted_targets(), Some(3));
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Batch {
    inputs: Vec<(String, Tensor)>,
    counted_targets: Option<usize>,
}

impl Batch {
    /// Creates a batch of named tensors. A step refuses a batch with two inputs of one name.
    pub fn new<'t>(inputs: impl IntoIterator<Item = (&'t str, &'t Tensor)>) -> Self {
        let inputs = inputs.into_iter();
        Self {
            inputs: inputs.map(|(name, x)| (name.into(), x.clone())).collect(),
            counted_targets: None,
        }
    }

    /// Sets the number of targets that count, that is, that are not ignored. The loss must then be a sum over these.
    /// The step's loss is the mean over all targets that count, of all micro-batches and ranks; gradients are those of
    /// this mean.
    pub fn with_counted_targets(self, targets: usize) -> Self {
        Self {
            counted_targets: Some(targets),
            ..self
        }
    }

    /// Creates a language model's batch of tokens and targets, (accumulation * B, T) in u32 or i64, in which some
    /// targets do not count. These are targets equal to `ignore_index` (-100 in PyTorch), and targets that follow the
    /// token `separator`, which ends each document of a packed sequence. With a separator, attention does not cross
    /// documents, as in [`TransformerLM::loss_of_documents`](crate::model::TransformerLM::loss_of_documents).
    ///
    /// ```
    /// use candle_core::Tensor;
    /// use tallow::compile::Batch;
    ///
    /// let device = tallow::device("cpu")?;
    /// let tokens = Tensor::new(&[[1u32, 2, 0, 3]], &device)?; // (B, T)
    /// let targets = Tensor::new(&[[2i64, 0, 3, -100]], &device)?; // (B, T)
    /// assert_eq!(Batch::masked(&tokens, &targets, Some(0), Some(-100))?.counted_targets(), Some(2));
    /// # Ok::<(), tallow::Error>(())
    /// ```
    ///
    /// Meta tensors give a batch for planning alone.
    ///
    /// # Errors
    /// Tokens or targets of another dtype.
    pub fn masked(
        tokens: &Tensor,
        targets: &Tensor,
        separator: Option<u32>,
        ignore_index: Option<i64>,
    ) -> Result<Self> {
        if graph::is_meta(tokens) {
            return Self::masked_meta(tokens, targets, separator, ignore_index);
        }
        let Some(masked) = MaskedTargets::of(tokens, targets, separator, ignore_index)? else {
            return Ok((tokens, targets).into());
        };
        let first_keys = masked.first_keys.as_ref();
        let first_keys = first_keys.map(|keys| ("first_keys", keys.tensor()));
        let inputs = [("tokens", tokens), ("targets", &masked.targets)];
        Ok(Self::new(inputs.into_iter().chain(first_keys)).with_counted_targets(masked.counted))
    }

    fn masked_meta(
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
            true => batch.with_counted_targets(0), // the plan does not depend on the number
            false => batch,
        })
    }

    /// Creates a batch of meta tokens and targets, (batch_size, sequence_length) in u32, for planning alone.
    ///
    /// # Errors
    /// Those of [`graph::input`](crate::graph::input()).
    pub fn meta(batch_size: usize, sequence_length: usize) -> Result<Self> {
        let input = |name| graph::input(name, (batch_size, sequence_length), DType::U32);
        Ok((&input("tokens")?, &input("targets")?).into())
    }

    /// Returns the number of targets that count, if it was [set](Self::with_counted_targets).
    pub fn counted_targets(&self) -> Option<usize> {
        self.counted_targets
    }

    pub(super) fn inputs(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.inputs.iter().map(|(name, x)| (name.as_str(), x))
    }

    pub(super) fn with(mut self, name: &str, input: Tensor) -> Self {
        self.inputs.push((name.into(), input));
        self
    }

    /// Returns a name that two inputs have.
    pub(super) fn repeated_name(&self) -> Option<&str> {
        let names = || self.inputs().map(|(name, _)| name);
        let mut numbered = names().enumerate();
        let found = numbered.find(|(i, name)| names().take(*i).any(|earlier| earlier == *name));
        found.map(|(_, name)| name)
    }

    /// Returns the last dimension of an input, or 0 if the batch does not have it.
    pub(super) fn length(&self, name: &str) -> usize {
        let mut all = self.inputs();
        let found = all.find(|(other, _)| *other == name);
        let length = found.and_then(|(_, x)| x.dims().last().copied());
        length.unwrap_or_default()
    }

    /// Returns the number of elements of the largest input.
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

/// Creates a batch of a language model's tokens and targets, with the names `tokens` and `targets`.
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

/// The inputs that the loss of a [`Step`](super::Step) is traced with: one micro-batch of a [batch](Batch), as meta
/// tensors. Shapes and dtypes are known. Decisions that depend on them are fixed for all runs of the plan.
#[derive(Debug)]
pub struct Inputs {
    op: &'static str,
    meta: Vec<(String, Tensor)>,
    drops: bool,
    sums_targets: bool,
}

impl Inputs {
    /// # Errors
    /// Inputs that cannot be split into this number of micro-batches; two inputs of one name.
    pub(super) fn of(
        op: &'static str,
        batch: &Batch,
        micro_batches: usize,
        drops: bool,
    ) -> Result<Self> {
        if let Some(name) = batch.repeated_name() {
            let problem = format!("the batch has two inputs called {name:?}");
            return Err(Error::order(
                op,
                problem,
                "give each input a name of its own",
            ));
        }
        let meta = batch.inputs().map(|(name, x)| {
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
            meta: meta.collect::<Result<_>>()?,
            drops,
            sums_targets: batch.counted_targets.is_some(),
        })
    }

    /// Returns the input with this name.
    ///
    /// # Errors
    /// [`Error::Order`] if the batch has none.
    pub fn get(&self, name: &str) -> Result<Tensor> {
        self.find(name).ok_or_else(|| {
            let names: Vec<&str> = self.meta.iter().map(|(name, _)| name.as_str()).collect();
            Error::Order {
                op: self.op,
                problem: format!("no tensor for the input {name:?}"),
                hint: format!("pass it to run, which was given {}", names.join(", ")),
            }
        })
    }

    /// Returns the input with this name, or `None` if the batch has none.
    pub fn find(&self, name: &str) -> Option<Tensor> {
        let mut all = self.meta.iter();
        all.find(|(other, _)| other == name).map(|(_, x)| x.clone())
    }

    /// Returns the dropout key, if [`StepConfig::dropout_seed`](super::StepConfig::dropout_seed) is set. Each run and
    /// micro-batch has a different key.
    ///
    /// # Errors
    /// Those of [`graph::input`](crate::graph::input()).
    pub fn dropout(&self) -> Result<Option<DropoutKey>> {
        let key = self.drops.then(|| DropoutKey::input(DROPOUT));
        key.transpose()
    }

    /// Returns whether the loss must be a sum over targets, because the batch [counts
    /// them](Batch::with_counted_targets).
    pub fn sums_targets(&self) -> bool {
        self.sums_targets
    }
}
