//! The first key that each query attends to: documents packed into one sequence.

use crate::ops::inside_storage;
use crate::{Error, Result, graph};
use candle_core::{DType, Device, Shape, Tensor};

const OP: &str = "attention::FirstKeys";

/// The first key that each query attends to, in addition to the mask: u32 (B, Tq), not decreasing along a sequence, the
/// same for all heads.
///
/// With [`Mask::Causal`](super::Mask::Causal) and documents packed into one sequence, each document attends only to
/// itself. Positions are counted through the whole sequence, which makes no difference to rotary embeddings.
/// [`flash`](super::flash()) skips tiles of keys that no query of a tile attends to, forward and backward, so its time
/// is about that of the separate documents. [`naive`](super::naive()) skips them on the CPU; on a GPU it computes all
/// scores. The loss should ignore the target at a document's last token, which is the next document's first token
/// ([`ops::linear_cross_entropy_ignoring`](crate::ops::linear_cross_entropy_ignoring)).
///
/// In a plan they may be an [input](Self::input), so that each run has other documents.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use tallow::attention::{self, AttentionConfig, FirstKeys, Mask};
///
/// // Documents end with 0.
/// let tokens = Tensor::new(&[[7u32, 9, 0, 8, 8, 5, 0, 6]], &Device::Cpu)?; // (B, T)
/// let first_keys = FirstKeys::of_documents(&tokens, 0)?;
/// assert_eq!(first_keys.tensor().to_vec2::<u32>()?, [[0, 0, 0, 3, 3, 3, 3, 7]]);
///
/// let q = Tensor::randn(0f32, 1.0, (1, 2, 8, 16), &Device::Cpu)?; // (B, H, T, Dh)
/// let config = AttentionConfig {
///     mask: Mask::Causal,
///     first_keys: Some(first_keys),
///     ..Default::default()
/// };
/// let packed = attention::flash(&q, &q, &q, &config)?;
/// let second = q.narrow(2, 3, 4)?; // the second document alone
/// let causal = AttentionConfig { first_keys: None, ..config };
/// let alone = attention::flash(&second, &second, &second, &causal)?;
/// let difference = (packed.narrow(2, 3, 4)? - alone)?.abs()?.max_all()?;
/// assert!(difference.to_scalar::<f32>()? < 1e-6);
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct FirstKeys(Tensor);

/// Two are equal if they share the tensor. Elements are not compared, since they may be on a GPU.
impl PartialEq for FirstKeys {
    fn eq(&self, other: &Self) -> bool {
        self.0.id() == other.0.id()
    }
}

impl FirstKeys {
    /// Takes first keys from a u32 tensor (B, Tq), or with as many leading dimensions as q has before its heads. The
    /// tensor stays on its device.
    ///
    /// # Errors
    /// Another dtype; a scalar; first keys that decrease along a sequence.
    pub fn new(first_keys: &Tensor) -> Result<Self> {
        if first_keys.dtype() != DType::U32 {
            return Err(Error::dtype(OP, first_keys.dtype().as_str())
                .must_be("first keys in u32", "convert with to_dtype(DType::U32)"));
        }
        if first_keys.rank() == 0 {
            return Err(Error::shape(OP, "a scalar")
                .must_be("first keys (B, Tq)", "one for each query of each sequence"));
        }
        if !graph::is_meta(first_keys) {
            check(OP, first_keys)?;
        }
        Ok(Self(first_keys.contiguous()?))
    }

    /// Finds the documents in tokens (B, T), u32 or i64: each ends with the token `separator` or at the end of its
    /// sequence. The result is on the tokens' device.
    ///
    /// # Errors
    /// Tokens of another dtype or rank.
    pub fn of_documents(tokens: &Tensor, separator: u32) -> Result<Self> {
        let &[batch, length] = tokens.dims() else {
            return Err(Error::shape(OP, format!("{:?}", tokens.dims())).must_be(
                "tokens (B, T)",
                "several sequences, each of one document or more",
            ));
        };
        if !matches!(tokens.dtype(), DType::U32 | DType::I64) {
            return Err(Error::dtype(OP, tokens.dtype().as_str())
                .must_be("tokens in u32 or i64", "convert with to_dtype(DType::U32)"));
        }
        let ids = inside_storage(OP, tokens)?.flatten_all()?;
        let ids = ids.to_dtype(DType::I64)?.to_vec1::<i64>()?;
        let mut first_keys = Vec::with_capacity(ids.len());
        for sequence in ids.chunks(length.max(1)) {
            let mut first = 0u32;
            for (i, id) in (1..).zip(sequence) {
                first_keys.push(first);
                if *id == i64::from(separator) {
                    first = i;
                }
            }
        }
        let first_keys = Tensor::from_vec(first_keys, (batch, length), &Device::Cpu)?;
        Ok(Self(first_keys.to_device(tokens.device())?))
    }

    /// Builds first keys from the documents' lengths in each sequence, which sum to T. The result is on the CPU.
    ///
    /// ```
    /// use tallow::attention::FirstKeys;
    /// let first_keys = FirstKeys::of_lengths(&[vec![2, 3], vec![5]])?;
    /// assert_eq!(first_keys.tensor().to_vec2::<u32>()?, [[0, 0, 2, 2, 2], [0, 0, 0, 0, 0]]);
    /// # Ok::<(), tallow::Error>(())
    /// ```
    ///
    /// # Errors
    /// Sequences of different lengths; more tokens than u32 counts.
    pub fn of_lengths(lengths: &[Vec<usize>]) -> Result<Self> {
        let sums = lengths.iter().map(|lengths| {
            let sum = lengths
                .iter()
                .try_fold(0usize, |sum, n| sum.checked_add(*n));
            sum.filter(|sum| u32::try_from(*sum).is_ok())
        });
        let sums: Vec<Option<usize>> = sums.collect();
        let length = match sums.first() {
            None => 0,
            Some(Some(length)) if sums.iter().all(|sum| *sum == Some(*length)) => *length,
            _ => {
                let sum_of = |sum: &Option<usize>| sum.map_or("too many".into(), |n| n.to_string());
                let sums: Vec<String> = sums.iter().map(sum_of).collect();
                return Err(Error::shape(OP, sums.join(", ")).must_be(
                    "lengths with the same sum in each sequence",
                    "add a document of padding to the shorter sequences",
                ));
            }
        };
        let mut first_keys = Vec::with_capacity(lengths.len() * length);
        for documents in lengths {
            let mut first = 0;
            for n in documents {
                first_keys.extend(std::iter::repeat_n(first as u32, *n));
                first += n;
            }
        }
        let shape = (lengths.len(), length);
        Ok(Self(Tensor::from_vec(first_keys, shape, &Device::Cpu)?))
    }

    /// Creates first keys (B, Tq) u32 as a meta tensor, as an input of a [trace](crate::graph::trace()). In the loss of
    /// a [`Step`](crate::compile::Step) write `FirstKeys::new(&inputs.get(name)?)` instead; each run checks them.
    ///
    /// # Errors
    /// Those of [`graph::input`](crate::graph::input()).
    pub fn input(name: &str, shape: impl Into<Shape>) -> Result<Self> {
        Self::new(&graph::input(name, shape, DType::U32)?)
    }

    /// Returns first keys (B, Tq) as a meta tensor, for estimates: only a trace can read them.
    pub(crate) fn meta(batch: usize, length: usize) -> Result<Self> {
        Ok(Self(graph::constant((batch, length), DType::U32)?))
    }

    /// Copies the first keys to another device. If they are on another device than q, each call of attention
    /// copies them.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn to_device(&self, device: &Device) -> Result<Self> {
        Ok(Self(self.0.to_device(device)?))
    }

    /// Returns the u32 tensor (B, Tq).
    pub fn tensor(&self) -> &Tensor {
        &self.0
    }

    /// Checks that each query of q (..., H, Tq, Dh) has a first key.
    pub(super) fn check_shape(&self, op: &'static str, q: &Tensor) -> Result<()> {
        let wanted = match q.dims() {
            [leading @ .., _, queries, _] => [leading, &[*queries]].concat(),
            [queries, _] => vec![*queries],
            _ => Vec::new(), // refused by the op
        };
        match self.0.dims() == wanted {
            true => Ok(()),
            false => Err(Error::shape(op, format!("{:?}", self.0.dims())).must_be(
                format!("first keys {wanted:?}, one for each query of each sequence"),
                format!("q is {:?}; all heads have the same first keys", q.dims()),
            )),
        }
    }

    /// Copies the first keys to the host, in order.
    pub(super) fn to_host(&self) -> candle_core::Result<Vec<u32>> {
        self.0.flatten_all()?.to_vec1()
    }
}

/// Checks that first keys (.., Tq), u32, do not decrease along a sequence.
pub(crate) fn check(op: &'static str, first_keys: &Tensor) -> Result<()> {
    let length = first_keys.dims().last().copied().unwrap_or(1).max(1);
    let all = inside_storage(op, first_keys)?
        .flatten_all()?
        .to_vec1::<u32>()?;
    for (sequence, first_keys) in all.chunks(length).enumerate() {
        if let Some(i) = first_keys.windows(2).position(|pair| pair[1] < pair[0]) {
            return Err(Error::Order {
                op,
                problem: format!(
                    "in sequence {sequence} the first key of query {} is {}, that of query {} is {}",
                    i + 1,
                    first_keys[i + 1],
                    i,
                    first_keys[i]
                ),
                hint: "first keys must not decrease from one query to the next".into(),
            });
        }
    }
    Ok(())
}
