//! The dtype that several have in common.

use candle_core::{DType, Tensor};

/// Whether a policy may cast it: half precision and f32. f64 is never narrowed, and integers are no numbers to
/// round.
pub(crate) fn is_castable(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16 | DType::F32)
}

/// What promotion asks of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Operand {
    pub dtype: DType,
    /// Whether it is a tensor without dimensions.
    pub is_scalar: bool,
}

impl From<&Tensor> for Operand {
    fn from(x: &Tensor) -> Self {
        Self {
            dtype: x.dtype(),
            is_scalar: x.rank() == 0,
        }
    }
}

/// What PyTorch computes in for these: the widest float among the tensors with dimensions, or, where none of them is a
/// float, among the scalars; f32 for f16 beside bf16 (neither holds the other). Integers have no say beside floats.
/// `None` without a float that it knows.
pub(crate) fn promoted(operands: &[Operand]) -> Option<DType> {
    let of = |scalars| {
        let asked = operands.iter().filter(move |o| o.is_scalar == scalars);
        widest(&asked.map(|o| o.dtype).collect::<Vec<_>>())
    };
    of(false).or_else(|| of(true))
}

/// The widest float, whatever has dimensions.
pub(super) fn widest(dtypes: &[DType]) -> Option<DType> {
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
    use DType::{BF16, F16, F32, F64, I64, U32};

    fn tensor(dtype: DType) -> Operand {
        Operand {
            dtype,
            is_scalar: false,
        }
    }

    fn scalar(dtype: DType) -> Operand {
        Operand {
            dtype,
            is_scalar: true,
        }
    }

    #[test]
    fn the_widest_float_wins_and_the_two_halves_meet_in_f32() {
        let table = [
            (F16, F16, Some(F16)),
            (BF16, BF16, Some(BF16)),
            (F16, BF16, Some(F32)),
            (F16, F32, Some(F32)),
            (BF16, F32, Some(F32)),
            (BF16, F64, Some(F64)),
            (F32, F64, Some(F64)),
            (F16, I64, Some(F16)),
            (U32, F32, Some(F32)),
            (U32, I64, None),
        ];
        for (a, b, wanted) in table {
            for of in [tensor, scalar] {
                assert_eq!(promoted(&[of(a), of(b)]), wanted, "{a:?} {b:?}");
                assert_eq!(promoted(&[of(b), of(a)]), wanted, "{b:?} {a:?}");
            }
        }
    }

    /// `torch.result_type(torch.ones(5, dtype=a), torch.tensor(1, dtype=b))`.
    #[test]
    fn a_scalar_has_a_say_only_beside_integers() {
        let table = [
            (BF16, F32, Some(BF16)),
            (BF16, F16, Some(BF16)),
            (F16, F64, Some(F16)),
            (F32, F64, Some(F32)),
            (F64, F32, Some(F64)),
            (BF16, I64, Some(BF16)),
            (I64, BF16, Some(BF16)),
            (I64, F64, Some(F64)),
            (U32, I64, None),
        ];
        for (dims, none, wanted) in table {
            let (x, s) = (tensor(dims), scalar(none));
            assert_eq!(
                promoted(&[x, s]),
                wanted,
                "{dims:?} and a scalar in {none:?}"
            );
            assert_eq!(
                promoted(&[s, x]),
                wanted,
                "{dims:?} and a scalar in {none:?}"
            );
        }
        let three = [scalar(F64), tensor(F16), tensor(BF16)];
        assert_eq!(promoted(&three), Some(F32));
    }
}
