//! The dtype that several have in common.

use candle_core::DType;

/// Whether a policy may cast it: half precision and f32. f64 is nobody's to narrow, and integers are no numbers to round.
pub(crate) fn is_castable(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16 | DType::F32)
}

/// What PyTorch computes in for these: the widest float, f32 for f16 beside bf16 (neither holds the other). Integers have
/// no say beside floats. `None` without a float that it knows.
pub(crate) fn promoted(dtypes: &[DType]) -> Option<DType> {
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

    #[test]
    fn the_widest_float_wins_and_the_two_halves_meet_in_f32() {
        use DType::{BF16, F16, F32, F64, I64, U32};
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
            assert_eq!(promoted(&[a, b]), wanted, "{a:?} {b:?}");
            assert_eq!(promoted(&[b, a]), wanted, "{b:?} {a:?}");
        }
    }
}
