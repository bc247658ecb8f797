//! Empty attention: no batch, no heads or no queries. Out is empty, and gradients are zero or empty. Without keys, out
//! and the gradient of q are zeros.

use super::problem::{
    Attend, DTYPES, FLASH, MASKS, Problem, REFERENCE, Sizes, skips_on_gpu, tensor,
};
use candle_core::DType;
use rstest::rstest;
use tallow::attention;

/// Naive attention, with the log-sum-exp -inf of queries that see no key.
const NAIVE: Attend = |q, k, v, config| {
    let lse = tensor(
        &vec![f64::NEG_INFINITY; q.elem_count() / 24],
        &q.dims()[..3],
        DType::F64,
    );
    let wide = if q.dtype() == DType::F64 {
        DType::F64
    } else {
        DType::F32
    };
    Ok((attention::naive(q, k, v, config)?, lse.to_dtype(wide)?))
};
const NAIVE_REFERENCE: Attend = |q, k, v, config| {
    let (_, lse) = NAIVE(q, k, v, config)?;
    Ok((attention::reference::naive(q, k, v, config)?, lse))
};

#[rstest]
#[case::no_batch((0, 4, 2), 5)]
#[case::no_heads((2, 0, 2), 5)]
#[case::no_heads_at_all((2, 0, 0), 5)]
#[case::no_queries((2, 4, 2), 0)]
fn nothing_to_do(
    #[values(FLASH, REFERENCE, NAIVE, NAIVE_REFERENCE)] attend: Attend,
    #[case] heads: (usize, usize, usize),
    #[case] queries: usize,
) {
    if skips_on_gpu("candle's operations on no elements are errors of the driver") {
        return;
    }
    for mask in MASKS {
        for dtype in DTYPES {
            let sizes = Sizes::new(heads, (queries, 7), 24);
            let found = Problem::random(sizes, mask, None, 51).run(dtype, attend);
            assert!(found.out.is_empty() && found.lse.is_empty() && found.dq.is_empty());
            let k_elements: usize = sizes.k_shape().iter().product();
            assert_eq!(found.dk, vec![0.0; k_elements], "{mask:?} {dtype:?}");
            assert_eq!(found.dv, vec![0.0; k_elements], "{mask:?} {dtype:?}");
        }
    }
}

#[rstest]
fn no_keys(#[values(FLASH, REFERENCE, NAIVE, NAIVE_REFERENCE)] attend: Attend) {
    if skips_on_gpu("candle's operations on no elements are errors of the driver") {
        return;
    }
    for mask in MASKS {
        for dtype in DTYPES {
            let sizes = Sizes::new((2, 4, 2), (5, 0), 24);
            let problem = Problem::random(sizes, mask, None, 53);
            let found = problem.run(dtype, attend);
            assert_eq!(found.out, vec![0.0; problem.q.len()], "{mask:?} {dtype:?}");
            assert_eq!(found.lse, vec![f64::NEG_INFINITY; 2 * 4 * 5]);
            assert_eq!(found.dq, vec![0.0; problem.q.len()], "{mask:?} {dtype:?}");
            assert!(found.dk.is_empty() && found.dv.is_empty());
        }
    }
}

/// With sizes of one, out is v, lse the only score, and dv is d_out.
#[rstest]
fn one_of_everything(#[values(FLASH, REFERENCE)] attend: Attend) {
    for mask in MASKS {
        for dtype in DTYPES {
            let problem = Problem::random(Sizes::new((1, 1, 1), (1, 1), 1), mask, None, 52);
            let found = problem.run(dtype, attend);
            assert_eq!(found.out, problem.v, "{mask:?} {dtype:?}");
            assert_eq!(found.dv, problem.d_out, "{mask:?} {dtype:?}");
            let score = problem.q[0] * problem.k[0];
            assert!((found.lse[0] - score).abs() <= 1e-6 * score.abs());
            assert!(found.dq[0].abs() <= 1e-6 && found.dk[0].abs() <= 1e-6);
        }
    }
}
