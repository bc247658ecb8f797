//! Token ids and targets outside the vocabulary are refused before any kernel runs.

use super::case::cast;
use super::refusals::{dtype, ids, refused, shape, x};
use candle_core::{DType, Tensor};
use rstest::rstest;
use tallow::{Error, Result, ops};

#[rstest]
#[case::u8(DType::U8)]
#[case::f32(DType::F32)]
fn ids_and_targets_that_are_neither_u32_nor_i64(#[case] wrong: DType) {
    let tokens = cast(&ids(&[0, 1]), wrong);
    let parts = ["ids in u32 or i64", wrong.as_str(), "to_dtype"];
    dtype("embedding", &parts, || ops::embedding(&tokens, &x(&[5, 3])));
    if wrong == DType::U8 {
        dtype("cross_entropy", &parts, || {
            ops::cross_entropy(&x(&[2, 5]), &tokens)
        });
    } else {
        // Targets in a float dtype are probabilities.
        shape("cross_entropy", &["probabilities", "targets [2]"], || {
            ops::cross_entropy(&x(&[2, 5]), &tokens)
        });
    }
}

#[test]
fn ids_outside_the_vocabulary() {
    let check = |parts: &[&str], wanted: (i64, usize, usize), f: &dyn Fn() -> Result<Tensor>| {
        refused(|error| matches!(error, Error::TokenId { .. }), parts, f);
        match f().unwrap_err() {
            Error::TokenId {
                id,
                position,
                vocab_size,
                ..
            } => {
                assert_eq!((id, position, vocab_size), wanted);
            }
            other => panic!("{other:?}"),
        }
    };
    let square = ids(&[0, 4, 1, 5, 9, 2]).reshape((2, 3)).unwrap();
    let parts = [
        "embedding",
        "id 5 at position 3",
        "vocabulary of 5",
        "0 to 4",
    ];
    check(&parts, (5, 3, 5), &|| ops::embedding(&square, &x(&[5, 3])));
    // Positions are logical indices, not memory offsets.
    let turned = square.t().unwrap();
    let parts = ["id 5 at position 1", "vocabulary of 5"];
    check(&parts, (5, 1, 5), &|| ops::embedding(&turned, &x(&[5, 3])));
    let parts = ["embedding", "id 0 at position 0", "vocabulary of 0"];
    check(&parts, (0, 0, 0), &|| {
        ops::embedding(&ids(&[0]), &x(&[0, 3]))
    });

    let logits = x(&[2, 3, 5]);
    let parts = ["cross_entropy", "id 5 at position 3", "vocabulary of 5"];
    check(&parts, (5, 3, 5), &|| ops::cross_entropy(&logits, &square));
    // The ignored id is accepted, the next invalid one is refused.
    let parts = ["cross_entropy", "id 9 at position 4"];
    check(&parts, (9, 4, 5), &|| {
        ops::cross_entropy_ignoring(&logits, &square, 5)
    });
    let last = i64::from(u32::MAX);
    check(&["4294967295"], (last, 0, 5), &|| {
        ops::cross_entropy(&x(&[1, 5]), &ids(&[u32::MAX]))
    });
}

/// Ids in i64, PyTorch's dtype for them, are accepted.
#[test]
fn ids_in_i64() {
    let wide = |ids: &[i64]| Tensor::new(ids, &candle_core::Device::Cpu).unwrap();
    let values = |x: Result<Tensor>| x.unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
    let (table, logits) = (x(&[5, 3]), x(&[3, 5]));
    assert_eq!(
        values(ops::embedding(&wide(&[4, 0, 2]), &table)),
        values(ops::embedding(&ids(&[4, 0, 2]), &table))
    );
    assert_eq!(
        values(ops::cross_entropy_ignoring(&logits, &wide(&[4, 7, 2]), 7)),
        values(ops::cross_entropy_ignoring(&logits, &ids(&[4, 7, 2]), 7))
    );
    for outside in [-1, 5, 1 << 32, i64::MIN] {
        let parts = [&format!("id {outside} at position 1"), "vocabulary of 5"];
        let check = |error: &Error| matches!(error, Error::TokenId { .. });
        refused(check, &parts, || {
            ops::embedding(&wide(&[4, outside]), &table)
        });
        refused(check, &parts, || {
            ops::cross_entropy(&x(&[2, 5]), &wide(&[4, outside]))
        });
    }
}

/// Any i64 can be the ignored target: PyTorch's -100, a class, ids outside u32.
#[test]
fn ignored_targets_in_i64() {
    let values = |x: Result<Tensor>| x.unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
    let (logits, weight, h) = (x(&[3, 5]), x(&[5, 4]), x(&[3, 4]));
    let rows = |x: &Tensor| {
        Tensor::cat(&[x.narrow(0, 0, 1).unwrap(), x.narrow(0, 2, 1).unwrap()], 0).unwrap()
    };
    let two = ids(&[4, 2]); // the targets of rows 0 and 2
    for ignored in [
        -100,
        -1,
        3,
        i64::from(u32::MAX),
        1 << 32,
        (1 << 32) + 4,
        i64::MIN,
        i64::MAX,
    ] {
        let targets = Tensor::new(&[4, ignored, 2], &candle_core::Device::Cpu).unwrap();
        let expected = values(ops::cross_entropy(&rows(&logits), &two));
        let ops = [
            ops::cross_entropy_ignoring(&logits, &targets, ignored),
            ops::reference::cross_entropy(&logits, &targets, Some(ignored)),
        ];
        for loss in ops {
            assert!((values(loss)[0] - expected[0]).abs() < 1e-12, "{ignored}");
        }
        let expected = values(ops::linear_cross_entropy(&rows(&h), &weight, &two));
        let ops = [
            ops::linear_cross_entropy_ignoring(&h, &weight, &targets, ignored),
            ops::reference::linear_cross_entropy(&h, &weight, &targets, Some(ignored)),
        ];
        for loss in ops {
            assert!((values(loss)[0] - expected[0]).abs() < 1e-12, "{ignored}");
        }
    }
    // Another id outside the vocabulary is still refused.
    let targets = Tensor::new(&[4i64, -100, -1], &candle_core::Device::Cpu).unwrap();
    let parts = ["cross_entropy", "id -1 at position 2", "vocabulary of 5"];
    let check = |error: &Error| matches!(error, Error::TokenId { .. });
    refused(check, &parts, || {
        ops::cross_entropy_ignoring(&logits, &targets, -100)
    });
}

#[test]
fn a_mean_of_nothing() {
    let data = |parts: &[&str], f: &dyn Fn() -> Result<Tensor>| {
        refused(|error| matches!(error, Error::Data { .. }), parts, f);
    };
    let parts = [
        "cross_entropy",
        "at least one target",
        "2 targets, all ignored",
    ];
    data(&parts, &|| {
        ops::cross_entropy_ignoring(&x(&[2, 5]), &ids(&[3, 3]), 3)
    });
    data(&["linear_cross_entropy", "2 targets, all ignored"], &|| {
        ops::linear_cross_entropy_ignoring(&x(&[2, 4]), &x(&[5, 4]), &ids(&[3, 3]), 3)
    });
    data(&["0 targets"], &|| {
        ops::cross_entropy(&x(&[0, 5]), &ids(&[]))
    });
}
