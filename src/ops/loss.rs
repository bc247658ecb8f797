//! Losses of predictions against targets of the same shape, composed of other ops, and reductions of losses.

use super::arithmetic::{mul, sub};
use super::cast::{cast, cast_for};
use super::compare::eq;
use super::dispatch::check_one_device;
use super::elementwise::{abs, affine, exp, log};
use super::log_sigmoid;
use super::operand::{check_size, check_supported, is_half};
use super::reduce::{mean, sum};
use super::select::masked_fill;
use crate::grad::no_grad;
use crate::precision;
use crate::{Error, Result};
use candle_core::{DType, Tensor};

/// The reduction of losses. PyTorch's `reduction`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reduction {
    /// Returns every loss.
    None,
    /// Returns the sum; of no targets that count it is 0, with gradients of 0.
    Sum,
    /// Returns the mean; of no targets that count it is an error.
    #[default]
    Mean,
}

impl Reduction {
    /// Reduces losses for `op`, which errors name.
    pub(super) fn of(self, op: &'static str, losses: &Tensor) -> Result<Tensor> {
        match self {
            Self::None => Ok(losses.clone()),
            Self::Sum => sum(losses),
            Self::Mean if losses.elem_count() == 0 => {
                Err(Error::data(op, "no losses")
                    .must_be("at least one", "the mean of nothing is NaN"))
            }
            Self::Mean => mean(losses),
        }
    }
}

/// Computes the squared error `(x - target)^2`, reduced: x and target of one shape (...), the loss a scalar, or (...)
/// for [`Reduction::None`]. PyTorch's `mse_loss`.
///
/// The following also holds for [`l1_loss`], [`bce_with_logits`] and [`kl_div`]. The loss is composed of other ops,
/// which a planned step plans one by one. Mixed dtypes are promoted; half precision is computed in f32 and rounded
/// once. Autocast: f32 under both policies. Backward: `dx = 2 (x - target) dloss`, divided by the number of elements
/// for a mean; the target has the opposite one. Saved for backward: the difference.
///
/// ```
/// use candle_core::{Device, Var};
/// use tallow::ops::{self, Reduction};
///
/// let x = Var::new(&[1f32, 2.0], &Device::Cpu)?;
/// let target = candle_core::Tensor::new(&[0f32, 5.0], &Device::Cpu)?;
/// let loss = ops::mse_loss(&x, &target, Reduction::Mean)?;
/// assert_eq!(loss.to_scalar::<f32>()?, 5.0);
/// let gradients = tallow::backward(loss)?;
/// assert_eq!(gradients.get(&x).unwrap().to_vec1::<f32>()?, [1.0, -3.0]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Shapes that differ (PyTorch broadcasts them with a warning); dtypes that are not floats; different devices; a mean
/// of nothing.
pub fn mse_loss(x: &Tensor, target: &Tensor, reduction: Reduction) -> Result<Tensor> {
    let pair = Pair::new("mse_loss", x, target)?;
    let difference = sub(&pair.x, &pair.target)?;
    pair.reduced(&mul(&difference, &difference)?, reduction)
}

/// Computes the absolute error `|x - target|`, reduced; otherwise like [`mse_loss`]. PyTorch's `l1_loss`. Backward:
/// `dx = sign(x - target) dloss`, 0 where they are equal.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use tallow::ops::{self, Reduction};
///
/// let x = Tensor::new(&[1f32, 2.0], &Device::Cpu)?;
/// let target = Tensor::new(&[0f32, 5.0], &Device::Cpu)?;
/// assert_eq!(ops::l1_loss(&x, &target, Reduction::Sum)?.to_scalar::<f32>()?, 4.0);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Those of [`mse_loss`].
pub fn l1_loss(x: &Tensor, target: &Tensor, reduction: Reduction) -> Result<Tensor> {
    let pair = Pair::new("l1_loss", x, target)?;
    pair.reduced(&abs(&sub(&pair.x, &pair.target)?)?, reduction)
}

/// Weights of [`bce_with_logits`], both broadcast to the losses' shape; `None` for 1.
#[derive(Clone, Copy, Debug, Default)]
pub struct BceWeights<'a> {
    /// The weight of each loss.
    pub weight: Option<&'a Tensor>,
    /// The weight of positive targets, for example (C) for C labels: their number of negatives for each positive.
    pub pos_weight: Option<&'a Tensor>,
}

/// Computes the binary cross-entropy of logits x, reduced: `-w (p t log(sigmoid(x)) + (1 - t) log(1 - sigmoid(x)))`
/// with targets t from 0 to 1, weights w and weights p of positives. PyTorch's `binary_cross_entropy_with_logits`.
///
/// It is `w ((1 - t) x - (1 + (p - 1) t) log(sigmoid(x)))`, of [`log_sigmoid`](super::log_sigmoid()), which does not
/// overflow. Otherwise it is like [`mse_loss`]; the weights get no gradient. Backward for p of 1:
/// `dx = w (sigmoid(x) - t) dloss`.
///
/// ```
/// use candle_core::{Device, Var};
/// use tallow::ops::{self, BceWeights, Reduction};
///
/// let x = Var::new(&[0f32, 1000.0], &Device::Cpu)?;
/// let target = candle_core::Tensor::new(&[1f32, 1.0], &Device::Cpu)?;
/// let losses = ops::bce_with_logits(&x, &target, BceWeights::default(), Reduction::None)?;
/// assert!((losses.to_vec1::<f32>()?[0] - std::f32::consts::LN_2).abs() < 1e-6);
/// let gradients = tallow::backward(ops::sum(&losses)?)?;
/// assert_eq!(gradients.get(&x).unwrap().to_vec1::<f32>()?, [-0.5, 0.0]);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Those of [`mse_loss`]; weights that do not broadcast to the losses' shape, or are not floats.
pub fn bce_with_logits(
    x: &Tensor,
    target: &Tensor,
    weights: BceWeights<'_>,
    reduction: Reduction,
) -> Result<Tensor> {
    let pair = Pair::new("bce_with_logits", x, target)?;
    let (x, t) = (&pair.x, &pair.target);
    let mut of_positives = log_sigmoid(x)?;
    if let Some(pos_weight) = weights.pos_weight {
        let surplus = affine(&pair.weight("pos_weight", pos_weight)?, 1.0, -1.0)?;
        let factor = affine(&mul(t, &surplus)?, 1.0, 1.0)?;
        of_positives = mul(&factor, &of_positives)?;
    }
    let mut losses = sub(&mul(&affine(t, -1.0, 1.0)?, x)?, &of_positives)?;
    if let Some(weight) = weights.weight {
        losses = mul(&losses, &pair.weight("weight", weight)?)?;
    }
    pair.reduced(&losses, reduction)
}

/// The form of the targets of [`kl_div`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KlTarget {
    /// Probabilities.
    #[default]
    Probabilities,
    /// Logarithms of probabilities: PyTorch's `log_target`.
    Logarithms,
}

/// Computes the pointwise Kullback-Leibler divergence `t (log(t) - x)` of probabilities t from log-probabilities x,
/// reduced. PyTorch's `kl_div`.
///
/// Probabilities of 0 have a divergence of 0; the gradient of the target is 0 there. Otherwise it is like [`mse_loss`].
/// [`Reduction::Mean`] is over all elements, as PyTorch's `mean`; the divergence of distributions, PyTorch's
/// `batchmean`, is the sum divided by their number. Backward: `dx = -t dloss`.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use tallow::ops::{self, KlTarget, Reduction};
///
/// let log_p = ops::log_softmax(&Tensor::new(&[[0f32, 0.0], [0.0, 0.0]], &Device::Cpu)?)?; // (N, V)
/// let target = Tensor::new(&[[1f32, 0.0], [0.5, 0.5]], &Device::Cpu)?;
/// let total = ops::kl_div(&log_p, &target, KlTarget::Probabilities, Reduction::Sum)?;
/// let batch_mean = ops::affine(&total, 1.0 / 2.0, 0.0)?;
/// assert!((batch_mean.to_scalar::<f32>()? - std::f32::consts::LN_2 / 2.0).abs() < 1e-6);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Those of [`mse_loss`].
pub fn kl_div(x: &Tensor, target: &Tensor, form: KlTarget, reduction: Reduction) -> Result<Tensor> {
    let pair = Pair::new("kl_div", x, target)?;
    let (x, t) = (&pair.x, &pair.target);
    let losses = match form {
        KlTarget::Logarithms => mul(&exp(t)?, &sub(t, x)?)?,
        KlTarget::Probabilities => {
            // 0 log(0) is 0: its logarithm is taken of 1 instead.
            let is_zero = no_grad(|| eq(t, &sub(t, t)?))?;
            let entropy = mul(t, &log(&masked_fill(t, &is_zero, 1.0)?)?)?;
            sub(&entropy, &mul(t, x)?)?
        }
    };
    pair.reduced(&losses, reduction)
}

/// Predictions and targets in at least f32, and the dtype of the loss.
struct Pair {
    op: &'static str,
    x: Tensor,
    target: Tensor,
    dtype: DType,
}

impl Pair {
    fn new(op: &'static str, x: &Tensor, target: &Tensor) -> Result<Self> {
        check_supported(op, x)?;
        check_supported(op, target)?;
        if x.dims() != target.dims() {
            let got = format!("x {:?}, target {:?}", x.dims(), target.dims());
            return Err(Error::shape(op, got).must_be(
                "a target of x's shape",
                "broadcast_as repeats a target, reshape removes dimensions of size 1",
            ));
        }
        check_one_device(op, ("x", x), ("target", target))?;
        check_size(op, x.dims(), x.dtype(), x.device())?;
        let [x, target] = cast_for(op, [x, target])?;
        let operands = [&x, &target].map(Into::into);
        let dtype = precision::promoted(&operands).unwrap_or(x.dtype());
        let wide = if is_half(dtype) { DType::F32 } else { dtype };
        Ok(Self {
            op,
            x: cast(&x, wide)?,
            target: cast(&target, wide)?,
            dtype,
        })
    }

    /// Returns a weight in the dtype that is computed in.
    fn weight(&self, name: &'static str, weight: &Tensor) -> Result<Tensor> {
        check_supported(self.op, weight)?;
        check_one_device(self.op, ("x", &self.x), (name, weight))?;
        let shape = self
            .x
            .shape()
            .broadcast_shape_binary_op(weight.shape(), self.op);
        if shape.ok().as_ref() != Some(self.x.shape()) {
            return Err(
                Error::shape(self.op, format!("{name} {:?}", weight.dims())).must_be(
                    format!("{name} that broadcasts to {:?}", self.x.dims()),
                    "counted from the last, its dimensions must be equal or 1",
                ),
            );
        }
        no_grad(|| cast(weight, self.x.dtype()))
    }

    fn reduced(&self, losses: &Tensor, reduction: Reduction) -> Result<Tensor> {
        cast(&reduction.of(self.op, losses)?, self.dtype)
    }
}
