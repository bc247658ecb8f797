//! Autocast policies: the class of each op.

use super::lists;
use crate::probe::Operand;
use crate::{Error, Result};
use candle_core::DType;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

/// The class of an op: the dtype in which it computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OpClass {
    /// The lower dtype: matmuls, which are faster in it and sum in f32.
    Lower,
    /// f32: large sums, exponentials, losses.
    F32,
    /// The widest dtype of the inputs, at least the lower one.
    Widest,
    /// The dtype of the inputs; different dtypes are promoted (f16 + f32 is f32).
    Follow,
}

impl OpClass {
    /// Returns the name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lower => "lower",
            Self::F32 => "f32",
            Self::Widest => "widest",
            Self::Follow => "follow",
        }
    }
}

impl fmt::Display for OpClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// An autocast policy: a lower dtype, and the class of each op, by PyTorch's name or this crate's.
///
/// PyTorch has two policies: in [`cuda`](Self::cuda) softmax, layer norm, exponentials and sums compute in f32, in
/// [`cpu`](Self::cpu) they follow their inputs. Both may be used on any device and changed by [`with`](Self::with).
/// `Display` prints a table:
///
/// ```
/// use candle_core::DType;
/// use tallow::precision::{Autocast, OpClass};
///
/// let policy = Autocast::cpu(DType::BF16).with("softmax", OpClass::F32);
/// assert_eq!(policy.class("softmax"), OpClass::F32);
/// assert_eq!(policy.class("linear"), OpClass::Lower);
/// assert_eq!(policy.class("no op of PyTorch's"), OpClass::Follow);
/// println!("{policy}");
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Autocast {
    /// `None` if casts are disabled.
    lower: Option<DType>,
    classes: BTreeMap<Cow<'static, str>, OpClass>,
    caches_weights: bool,
}

impl Autocast {
    /// Returns PyTorch's policy for CUDA with the lower dtype `lower`; PyTorch's default is f16.
    ///
    /// [`enter`](Self::enter) returns an error for a dtype that is neither f16 nor bf16.
    pub fn cuda(lower: DType) -> Self {
        Self::of_lists(
            lower,
            lists::CUDA_LOWER,
            lists::CUDA_F32,
            lists::CUDA_WIDEST,
        )
    }

    /// Returns PyTorch's policy for the CPU with the lower dtype `lower`; PyTorch's default is bf16.
    ///
    /// [`enter`](Self::enter) returns an error for a dtype that is neither f16 nor bf16.
    pub fn cpu(lower: DType) -> Self {
        Self::of_lists(lower, lists::CPU_LOWER, lists::CPU_F32, lists::CPU_WIDEST)
    }

    /// Returns a policy without casts, for a part of a region (`torch.autocast(enabled=False)`).
    pub fn disabled() -> Self {
        Self {
            lower: None,
            classes: BTreeMap::new(),
            caches_weights: false,
        }
    }

    fn of_lists(
        dtype: DType,
        lower: &'static str,
        f32: &'static str,
        widest: &'static str,
    ) -> Self {
        let mut classes: BTreeMap<Cow<'_, str>, OpClass> = BTreeMap::new();
        let lists = [
            (lower, OpClass::Lower),
            (f32, OpClass::F32),
            (widest, OpClass::Widest),
        ];
        for (names, class) in lists {
            classes.extend(names.split_whitespace().map(|name| (name.into(), class)));
        }
        for (own, pytorch) in lists::own() {
            let class = classes.get(pytorch).copied();
            classes.insert(own.into(), class.unwrap_or(OpClass::Follow));
        }
        Self {
            lower: Some(dtype),
            classes,
            caches_weights: true,
        }
    }

    /// Sets the class of `op`. PyTorch's names include this crate's ops: `scaled_dot_product_attention` sets
    /// `attention::naive` and `attention::flash`, `linear` sets `swiglu_linear` and `geglu_linear`.
    ///
    /// Custom names are allowed: [`ops::cast_for`](crate::ops::cast_for) looks up any name.
    pub fn with(mut self, op: &str, class: OpClass) -> Self {
        let own = lists::own().filter(|(_, pytorch)| *pytorch == op);
        for name in own.map(|(own, _)| own).chain([op]) {
            self.classes.insert(name.to_string().into(), class);
        }
        self
    }

    /// Sets whether cast weights are cached until the outermost region ends (PyTorch's `cache_enabled`); on by default.
    ///
    /// Without the cache a weight is cast at each use. The copy is freed with the op under
    /// [`no_grad`](crate::no_grad), otherwise with the graph.
    pub fn with_weight_cache(self, caches_weights: bool) -> Self {
        Self {
            caches_weights,
            ..self
        }
    }

    /// Returns the lower dtype; `None` if casts are [disabled](Self::disabled).
    pub fn compute_dtype(&self) -> Option<DType> {
        self.lower
    }

    /// Returns the class of `op`; [`OpClass::Follow`] for unknown names.
    pub fn class(&self, op: &str) -> OpClass {
        self.classes.get(op).copied().unwrap_or(OpClass::Follow)
    }

    /// Returns all known ops with their classes, sorted by name.
    pub fn classes(&self) -> impl Iterator<Item = (&str, OpClass)> {
        self.classes.iter().map(|(op, class)| (op.as_ref(), *class))
    }

    pub(super) fn caches_weights(&self) -> bool {
        self.caches_weights
    }

    pub(super) fn check(&self) -> Result<()> {
        match self.lower {
            None | Some(DType::F16 | DType::BF16) => Ok(()),
            Some(other) => Err(Error::dtype("autocast", other.as_str()).must_be(
                "f16 or bf16",
                "f32 needs no region; Autocast::disabled() casts nothing",
            )),
        }
    }

    /// Returns the dtype that `op` computes in for these inputs; `None` if none needs a cast.
    pub(super) fn decide(&self, op: &str, inputs: &[Operand<'_>]) -> Option<DType> {
        let lower = self.lower?;
        let class = self.class(op);
        let target = match class {
            OpClass::Lower => lower,
            OpClass::F32 => DType::F32,
            OpClass::Widest => {
                let dtypes = inputs.iter().map(|input| input.dtype);
                let castable = dtypes.filter(|dtype| is_castable(*dtype));
                widest(&castable.chain([lower]).collect::<Vec<_>>())?
            }
            OpClass::Follow => promoted(inputs)?,
        };
        let changes = |input: &Operand<'_>| is_castable(input.dtype) && input.dtype != target;
        inputs.iter().any(changes).then_some(target)
    }
}

/// Prints a table of all known ops, by class.
impl fmt::Display for Autocast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(lower) = self.lower else {
            return write!(f, "autocast is off");
        };
        let width = self
            .classes
            .keys()
            .map(|op| op.len())
            .max()
            .unwrap_or_default();
        writeln!(f, "{:width$}  class   computes in", "op")?;
        for (op, class) in self.classes() {
            let dtype = match class {
                OpClass::Lower => lower.as_str(),
                OpClass::F32 => "f32",
                OpClass::Widest => "the widest of its inputs",
                OpClass::Follow => "its inputs'",
            };
            writeln!(f, "{op:width$}  {class:6}  {dtype}")?;
        }
        Ok(())
    }
}

/// Whether policies cast this dtype: half precision and f32.
pub(crate) fn is_castable(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16 | DType::F32)
}

/// Returns the dtype of PyTorch's type promotion: the widest float dtype of the tensors with dimensions, or, if none of
/// them is a float, of the scalars. f16 and bf16 are promoted to f32; integers do not count. Returns `None` without
/// floats.
pub(crate) fn promoted(operands: &[Operand<'_>]) -> Option<DType> {
    let of = |scalars| {
        let asked = operands
            .iter()
            .filter(move |o| o.dims.is_empty() == scalars);
        widest(&asked.map(|o| o.dtype).collect::<Vec<_>>())
    };
    of(false).or_else(|| of(true))
}

fn widest(dtypes: &[DType]) -> Option<DType> {
    let has = |dtype| dtypes.contains(&dtype);
    match (
        has(DType::F64),
        has(DType::F32),
        has(DType::F16),
        has(DType::BF16),
    ) {
        (true, ..) => Some(DType::F64),
        (_, true, ..) | (_, _, true, true) => Some(DType::F32),
        (_, _, true, _) => Some(DType::F16),
        (_, _, _, true) => Some(DType::BF16),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use DType::{BF16, F16, F32, F64, U32};

    #[test]
    fn each_class_decides_as_pytorch_does() {
        let policy = Autocast::cuda(BF16);
        let table: [(&str, &[DType], Option<DType>); 18] = [
            ("linear", &[F32, F32], Some(BF16)),
            ("linear", &[BF16, F32], Some(BF16)),
            ("linear", &[F16, BF16], Some(BF16)),
            ("linear", &[BF16, BF16], None),
            ("linear", &[F64, F64], None),
            ("linear", &[F32, F64], Some(BF16)), // of the f32, not of the f64
            ("softmax", &[BF16], Some(F32)),
            ("softmax", &[F32], None),
            ("softmax", &[F64], None),
            ("softmax", &[U32], None),
            ("addcmul", &[BF16, BF16], None),
            ("addcmul", &[BF16, F32], Some(F32)),
            ("addcmul", &[F16, F16], Some(F32)), // where PyTorch raises: f16 in a bf16 region
            ("addcmul", &[F64, BF16], None),
            ("add", &[BF16, F32], Some(F32)),
            ("add", &[F16, BF16], Some(F32)),
            ("add", &[F32, F64], Some(F64)),
            ("unheard_of", &[BF16, BF16], None),
        ];
        for (op, inputs, wanted) in table {
            let inputs = inputs.iter().map(|&dtype| Operand { dims: &[1], dtype });
            let inputs: Vec<Operand<'_>> = inputs.collect();
            assert_eq!(policy.decide(op, &inputs), wanted, "{op} {inputs:?}");
            assert_eq!(Autocast::disabled().decide(op, &inputs), None);
        }
    }

    #[test]
    fn no_name_is_on_two_lists() {
        let cuda = [lists::CUDA_LOWER, lists::CUDA_F32, lists::CUDA_WIDEST];
        let cpu = [lists::CPU_LOWER, lists::CPU_F32, lists::CPU_WIDEST];
        for lists in [cuda, cpu] {
            let all = lists.join(" ");
            let mut names: Vec<&str> = all.split_whitespace().collect();
            let count = names.len();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), count);
        }
    }
}
