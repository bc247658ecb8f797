//! Masks and biases that are tensors: padding, any pairs of queries and keys, and terms of the scores.

use super::AttentionConfig;
use crate::graph::{self, Target};
use crate::kernels::attention::Sizes;
use crate::ops::record::contiguous;
use crate::ops::{self, check_same_or_f32};
use crate::probe::Operand;
use crate::{Error, Result};
use candle_core::{DType, Device, Shape, Tensor};

const KEY_MASK: &str = "attention::KeyMask";
const BIAS: &str = "attention::ScoreBias";

/// The keys that queries may attend to, in addition to the other masks: a u8 tensor, where 0 hides and 1 shows.
/// No other value is allowed.
///
/// [`padding`](Self::padding) hides keys from all queries of a sequence; no tensor of size Tq Tk is made.
/// [`new`](Self::new) takes any tensor that broadcasts to the scores (B, H, Tq, Tk). PyTorch's `key_padding_mask` is
/// the opposite: there, true hides. Its boolean `attn_mask` of `scaled_dot_product_attention` is the same as here.
///
/// A query that attends to no key has an output and gradients of zero. [`flash`](super::flash()) skips tiles of keys
/// that are hidden from all queries of a tile, forward and backward. On a GPU a kernel packs the mask first, a bit for
/// each element, and finds these tiles. Hidden keys and values must be finite numbers, such as zeros:
/// [`naive`](super::naive()) multiplies them by 0, and a GPU multiplies whole tiles. (In flash attention on the CPU a
/// hidden NaN or infinity has no effect.)
///
/// ```
/// use candle_core::{Device, Tensor};
/// use tallow::attention::{self, AttentionConfig, KeyMask};
///
/// let visible = Tensor::new(&[[1u8, 1, 1, 0], [1, 1, 0, 0]], &Device::Cpu)?; // (B, Tk)
/// let key_mask = KeyMask::padding(&visible)?;
/// assert_eq!(KeyMask::of_lengths(&[3, 2], 4)?.tensor().to_vec2::<u8>()?, visible.to_vec2::<u8>()?);
///
/// let q = Tensor::randn(0f32, 1.0, (2, 4, 4, 8), &Device::Cpu)?; // (B, H, T, Dh)
/// let config = AttentionConfig { key_mask: Some(key_mask), ..Default::default() };
/// let padded = attention::flash(&q, &q, &q, &config)?;
/// let second = q.narrow(0, 1, 1)?.narrow(2, 0, 2)?; // the second sequence without padding
/// let alone = attention::flash(&second, &second, &second, &AttentionConfig::default())?;
/// let difference = (padded.narrow(0, 1, 1)?.narrow(2, 0, 2)? - alone)?.abs()?.max_all()?;
/// assert!(difference.to_scalar::<f32>()? < 1e-6);
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct KeyMask {
    visible: Tensor,
    /// Whether the tensor has the dimensions (B, Tk).
    is_padding: bool,
}

/// Two are equal if they share the tensor and mean the same. Elements are not compared, since they may be on a GPU.
impl PartialEq for KeyMask {
    fn eq(&self, other: &Self) -> bool {
        self.visible.id() == other.visible.id() && self.is_padding == other.is_padding
    }
}

impl KeyMask {
    /// Takes a mask (B, Tk). If q has more dimensions before its heads, the mask has the same ones before Tk. All heads
    /// and queries of a sequence see the same keys.
    ///
    /// # Errors
    /// Another dtype than u8; a scalar.
    pub fn padding(visible: &Tensor) -> Result<Self> {
        Self::of(visible, true, 1, "(B, Tk)")
    }

    /// Takes a mask that broadcasts to (B, H, Tq, Tk): (Tq, Tk), (H, Tq, Tk), (B, 1, Tq, Tk), (B, 1, 1, Tk), ...
    /// Dimensions are counted from the last; each is that of the scores or 1.
    ///
    /// # Errors
    /// Another dtype than u8; fewer than two dimensions.
    pub fn new(visible: &Tensor) -> Result<Self> {
        Self::of(visible, false, 2, "(Tq, Tk) or more dimensions")
    }

    fn of(visible: &Tensor, is_padding: bool, rank: usize, expected: &str) -> Result<Self> {
        if visible.dtype() != DType::U8 {
            return Err(Error::dtype(KEY_MASK, visible.dtype().as_str()).must_be(
                "a mask in u8, 0 for hidden keys",
                "convert with to_dtype(DType::U8); terms of the scores are an attention::ScoreBias",
            ));
        }
        if visible.rank() < rank {
            let got = format!("{:?}", visible.dims());
            let hint =
                "KeyMask::padding takes (B, Tk), KeyMask::new what broadcasts to (B, H, Tq, Tk)";
            return Err(Error::shape(KEY_MASK, got).must_be(format!("a mask {expected}"), hint));
        }
        Ok(Self {
            visible: visible.contiguous()?,
            is_padding,
        })
    }

    /// Builds the padding mask of sequences of these lengths, (B, `keys`), on the CPU.
    ///
    /// # Errors
    /// A length above `keys`.
    pub fn of_lengths(lengths: &[usize], keys: usize) -> Result<Self> {
        if let Some(length) = lengths.iter().find(|length| **length > keys) {
            return Err(
                Error::shape(KEY_MASK, format!("a length of {length}")).must_be(
                    format!("at most {keys} keys in each sequence"),
                    "the longest sequence has no padding",
                ),
            );
        }
        let visible = lengths.iter();
        let visible = visible.flat_map(|length| (0..keys).map(move |key| u8::from(key < *length)));
        let shape = (lengths.len(), keys);
        Self::padding(&Tensor::from_vec(visible.collect(), shape, &Device::Cpu)?)
    }

    /// Creates a meta mask that broadcasts to (B, H, Tq, Tk), as an input of a [trace](crate::graph::trace()). In the
    /// loss of a [`Step`](crate::compile::Step) write `KeyMask::new(&inputs.get(name)?)` instead.
    ///
    /// # Errors
    /// Those of [`graph::input`](crate::graph::input()) and [`KeyMask::new`].
    pub fn input(name: &str, shape: impl Into<Shape>) -> Result<Self> {
        Self::new(&graph::input(name, shape, DType::U8)?)
    }

    /// Creates a meta padding mask (B, Tk), as an input of a [trace](crate::graph::trace()). In the loss of a
    /// [`Step`](crate::compile::Step) write `KeyMask::padding(&inputs.get(name)?)` instead.
    ///
    /// # Errors
    /// Those of [`graph::input`](crate::graph::input()) and [`KeyMask::padding`].
    pub fn padding_input(name: &str, shape: impl Into<Shape>) -> Result<Self> {
        Self::padding(&graph::input(name, shape, DType::U8)?)
    }

    /// Copies the mask to another device. If the mask is on another device than q, each call of attention copies it.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn to_device(&self, device: &Device) -> Result<Self> {
        Ok(Self {
            visible: self.visible.to_device(device)?,
            is_padding: self.is_padding,
        })
    }

    /// Returns the u8 tensor.
    pub fn tensor(&self) -> &Tensor {
        &self.visible
    }

    /// Returns the dimensions as a tensor that broadcasts to `scores`, or an error.
    fn check(&self, op: &'static str, scores: &[usize]) -> Result<[usize; 4]> {
        let dims = self.visible.dims();
        let (expected, dims) = match (self.is_padding, scores) {
            (false, _) => (broadcasting("a mask", scores), Some(dims.to_vec())),
            (true, [leading @ .., _, keys]) => {
                let leading = &leading[..leading.len().saturating_sub(1)];
                let wanted = [leading, &[*keys]].concat();
                let expected = format!("a padding mask {wanted:?}, one element for each key");
                let is_it = dims == wanted;
                let repeated = vec![1; scores.len() - leading.len() - 1];
                let dims = || [leading, &repeated, &[*keys]].concat();
                (expected, is_it.then(dims))
            }
            (true, _) => (String::new(), None), // refused by the op
        };
        match dims.and_then(|dims| four_dims(&dims, scores)) {
            Some(dims) => Ok(dims),
            None => Err(
                Error::shape(op, format!("key_mask {:?}", self.visible.dims())).must_be(
                    expected,
                    "KeyMask::padding takes (B, Tk); KeyMask::new counts dimensions from the last",
                ),
            ),
        }
    }
}

/// Terms of the scores, such as ALiBi's or T5's relative positions: a float tensor that is added to the scaled (and
/// capped) scores.
///
/// The tensor broadcasts to (B, H, Tq, Tk). Its dtype is that in which attention computes: the dtype of q, or the one
/// to which autocast casts q. If this is half precision, f32 is allowed too. -inf hides a key; a query whose terms are
/// all -inf attends to no key. The tensor has a gradient if it is tracked, `dS` summed over the dimensions in which it
/// was broadcast.
///
/// Flash attention on a GPU reads a bias in its own dtype: in half precision it needs half of the bandwidth. Tiles that
/// a bias hides are computed; those that a [`KeyMask`] hides are skipped.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use tallow::attention::{self, AttentionConfig, ScoreBias};
/// use tallow::ops;
///
/// let q = Tensor::randn(0f32, 1.0, (2, 4, 6, 8), &Device::Cpu)?; // (B, H, T, Dh)
/// // The same for all sequences.
/// let positions = Var::zeros((4, 6, 6), q.dtype(), &Device::Cpu)?; // (H, Tq, Tk)
/// let config = AttentionConfig { bias: Some(ScoreBias::new(&positions)?), ..Default::default() };
/// let out = attention::flash(&q, &q, &q, &config)?;
/// let gradients = tallow::backward(ops::sum(&ops::mul(&out, &out)?)?)?;
/// assert_eq!(gradients.get(&positions).unwrap().dims(), [4, 6, 6]);
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ScoreBias(Tensor);

/// Two are equal if they share the tensor. Elements are not compared, since they may be on a GPU.
impl PartialEq for ScoreBias {
    fn eq(&self, other: &Self) -> bool {
        self.0.id() == other.0.id()
    }
}

impl ScoreBias {
    /// Takes terms that broadcast to (B, H, Tq, Tk): (Tq, Tk), (H, Tq, Tk), (1, H, 1, Tk), ... Dimensions are counted
    /// from the last; each is that of the scores or 1.
    ///
    /// # Errors
    /// A dtype that is not f16, bf16, f32 or f64; fewer than two dimensions.
    pub fn new(bias: &Tensor) -> Result<Self> {
        if !matches!(
            bias.dtype(),
            DType::F16 | DType::BF16 | DType::F32 | DType::F64
        ) {
            return Err(Error::dtype(BIAS, bias.dtype().as_str()).must_be(
                "terms in f16, bf16, f32 or f64",
                "a boolean mask is an attention::KeyMask, in u8",
            ));
        }
        if bias.rank() < 2 {
            return Err(Error::shape(BIAS, format!("{:?}", bias.dims())).must_be(
                "terms (Tq, Tk) or more dimensions",
                "they broadcast to (B, H, Tq, Tk), counted from the last dimension",
            ));
        }
        Ok(Self(bias.clone()))
    }

    /// Creates terms as a meta tensor, as an input of a [trace](crate::graph::trace()). In the loss of a
    /// [`Step`](crate::compile::Step) write `ScoreBias::new(&inputs.get(name)?)` instead.
    ///
    /// # Errors
    /// Those of [`graph::input`](crate::graph::input()) and [`ScoreBias::new`].
    pub fn input(name: &str, shape: impl Into<Shape>, dtype: DType) -> Result<Self> {
        Self::new(&graph::input(name, shape, dtype)?)
    }

    /// Returns the tensor.
    pub fn tensor(&self) -> &Tensor {
        &self.0
    }

    fn check(&self, op: &'static str, q: &Tensor, scores: &[usize]) -> Result<[usize; 4]> {
        check_same_or_f32(op, &[("q", q), ("bias", &self.0)])?;
        four_dims(self.0.dims(), scores).ok_or_else(|| {
            Error::shape(op, format!("bias {:?}", self.0.dims())).must_be(
                broadcasting("a bias", scores),
                "dimensions are counted from the last",
            )
        })
    }
}

/// Masks and biases in the four dimensions of the scores (B, H, Tq, Tk), each 1 or theirs.
pub(super) struct MaskTensors {
    /// u8.
    pub visible: Option<Tensor>,
    /// Contiguous.
    pub bias: Option<Tensor>,
}

impl MaskTensors {
    /// Returns the tensors of a configuration that [`check`] has accepted, the bias in the compute dtype.
    pub fn new(
        op: &'static str,
        config: &AttentionConfig,
        q: &Tensor,
        sizes: &Sizes,
    ) -> Result<Self> {
        let wide = Operand::from(q).wide_dtype();
        Self::with_bias_in(|_| wide, op, config, q, sizes)
    }

    /// Returns the same for flash attention's kernels. Those of a GPU read a bias in its dtype.
    pub fn of_flash(
        op: &'static str,
        config: &AttentionConfig,
        q: &Tensor,
        sizes: &Sizes,
    ) -> Result<Self> {
        match graph::target().unwrap_or_else(|| Target::of(q.device())) {
            Target::Cpu => Self::new(op, config, q, sizes),
            Target::Cuda => Self::with_bias_in(|bias| bias, op, config, q, sizes),
        }
    }

    fn with_bias_in(
        dtype: impl FnOnce(DType) -> DType,
        op: &'static str,
        config: &AttentionConfig,
        q: &Tensor,
        sizes: &Sizes,
    ) -> Result<Self> {
        let scores = scores(q, sizes.keys);
        let visible = config.key_mask.as_ref().map(|mask| {
            let dims = mask.check(op, &scores)?;
            let visible = mask.visible.reshape(&dims)?;
            Result::Ok(match graph::is_meta(q) || graph::is_meta(&visible) {
                true => visible,
                false => visible.to_device(q.device())?,
            })
        });
        let bias = config.bias.as_ref().map(|bias| {
            let dims = bias.check(op, q, &scores)?;
            let bias = contiguous(&bias.0)?;
            let bias = ops::cast(&bias, dtype(bias.dtype()))?;
            Result::Ok(bias.reshape(&dims)?)
        });
        Ok(Self {
            visible: visible.transpose()?,
            bias: bias.transpose()?,
        })
    }

    pub fn is_none(&self) -> bool {
        self.visible.is_none() && self.bias.is_none()
    }

    /// Returns q, k and v, and the bias if there is one.
    pub fn inputs<'a>(&'a self, qkv: [&'a Tensor; 3]) -> Vec<&'a Tensor> {
        qkv.into_iter().chain(&self.bias).collect()
    }
}

/// Checks that mask and bias broadcast to the scores, and the bias's dtype and device.
pub(super) fn check(
    op: &'static str,
    config: &AttentionConfig,
    q: &Tensor,
    keys: usize,
) -> Result<()> {
    let scores = scores(q, keys);
    if let Some(mask) = &config.key_mask {
        mask.check(op, &scores)?;
    }
    if let Some(bias) = &config.bias {
        bias.check(op, q, &scores)?;
    }
    Ok(())
}

/// Returns the dimensions of the scores of q (..., H, Tq, Dh).
fn scores(q: &Tensor, keys: usize) -> Vec<usize> {
    ops::with_last_dim(q.dims(), keys)
}

/// Returns the dimensions (B, H, Tq, Tk) of a tensor that broadcasts to `scores` (..., H, Tq, Tk), with 1 where it is
/// repeated; `None` if it does not broadcast, or is repeated in some of the leading dimensions only.
fn four_dims(dims: &[usize], scores: &[usize]) -> Option<[usize; 4]> {
    let missing = scores.len().checked_sub(dims.len())?;
    let dims = [&vec![1; missing], dims].concat();
    let fits = dims.iter().zip(scores).all(|(x, of)| x == of || *x == 1);
    let [leading @ .., queries, keys] = &dims[..] else {
        return None;
    };
    let (heads, leading) = leading.split_last().unwrap_or((&1, &[]));
    let all = &scores[..leading.len()];
    let batch = match leading {
        _ if leading.iter().all(|x| *x == 1) => 1,
        _ if leading == all => all.iter().product(),
        _ => return None,
    };
    fits.then_some([batch, *heads, *queries, *keys])
}

fn broadcasting(what: &str, scores: &[usize]) -> String {
    match scores.len() > 4 {
        false => format!("{what} that broadcasts to the scores {scores:?}"),
        true => format!(
            "{what} that broadcasts to the scores {scores:?}, in all or none of the dimensions before the heads"
        ),
    }
}
