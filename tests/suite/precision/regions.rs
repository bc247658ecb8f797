//! The extent of autocast regions.

use super::*;
use crate::check::refusal;
use candle_core::{Device, Module};
use candle_nn::{VarBuilder, VarMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use tallow::precision::current;
use tallow::{Error, Result, autocast, ops};

/// Returns the dtype of a matmul of f32 tensors here.
fn matmul_dtype() -> DType {
    let x = numbers(&[3, 3], DType::F32, 1);
    ops::matmul(&x, &x).unwrap().dtype()
}

#[test]
fn regions_nest_and_the_innermost_holds() {
    assert_eq!(matmul_dtype(), DType::F32);
    let done = autocast(Autocast::cuda(DType::BF16), || {
        assert_eq!(matmul_dtype(), DType::BF16);
        autocast(Autocast::cpu(DType::F16), || {
            assert_eq!(matmul_dtype(), DType::F16);
            autocast(Autocast::disabled(), || {
                assert_eq!((matmul_dtype(), current()), (DType::F32, None));
                autocast(Autocast::cuda(DType::F16), || {
                    assert_eq!(matmul_dtype(), DType::F16);
                    Ok(())
                })
            })?;
            assert_eq!(
                (matmul_dtype(), current()),
                (DType::F16, Some(Autocast::cpu(DType::F16)))
            );
            Ok(())
        })?;
        assert_eq!(matmul_dtype(), DType::BF16);
        Ok(7)
    });
    assert_eq!(done.unwrap(), 7);
    assert_eq!((matmul_dtype(), current()), (DType::F32, None));
}

#[test]
fn errors_and_panics_end_them() {
    let failed: Result<()> = autocast(Autocast::cuda(DType::BF16), || {
        autocast(Autocast::cuda(DType::F16), || {
            Err(Error::Plot("on purpose".into()))
        })
    });
    assert!(failed.unwrap_err().to_string().contains("on purpose"));
    assert_eq!(matmul_dtype(), DType::F32);

    let caught = autocast(Autocast::cuda(DType::BF16), || {
        let caught = catch_unwind(AssertUnwindSafe(|| {
            autocast::<()>(Autocast::cuda(DType::F16), || panic!("inside"))
        }));
        assert_eq!(matmul_dtype(), DType::BF16);
        Ok(caught.is_err())
    });
    assert!(caught.unwrap());
    let caught = catch_unwind(|| {
        let _region = Autocast::cuda(DType::F16).enter().unwrap();
        panic!("inside");
    });
    assert!(caught.is_err());
    assert_eq!((matmul_dtype(), current()), (DType::F32, None));
}

#[test]
fn guards_end_their_own_region_in_whatever_order() {
    let outer = Autocast::cuda(DType::BF16).enter().unwrap();
    let inner = Autocast::cuda(DType::F16).enter().unwrap();
    drop(outer);
    assert_eq!(matmul_dtype(), DType::F16);
    drop(inner);
    assert_eq!(matmul_dtype(), DType::F32);
}

#[test]
fn threads_have_their_own() {
    autocast(Autocast::cuda(DType::BF16), || {
        std::thread::scope(|scope| {
            let elsewhere = scope.spawn(|| {
                let before = matmul_dtype();
                let _region = Autocast::cuda(DType::F16).enter().unwrap();
                (before, matmul_dtype())
            });
            assert_eq!(elsewhere.join().unwrap(), (DType::F32, DType::F16));
        });
        assert_eq!(matmul_dtype(), DType::BF16);
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_lower_dtype_must_be_lower() {
    for dtype in [DType::F32, DType::F64, DType::U32, DType::F8E4M3] {
        for policy in [Autocast::cuda(dtype), Autocast::cpu(dtype)] {
            refusal(
                autocast::<()>(policy.clone(), || panic!("nothing may run")),
                &[
                    "autocast",
                    "f16 or bf16",
                    dtype.as_str(),
                    "Autocast::disabled",
                ],
            );
            assert!(policy.enter().is_err());
        }
    }
    assert_eq!(matmul_dtype(), DType::F32);
}

/// The error of a candle_nn layer inside of a region names the layer of this crate; converted, it runs.
#[test]
fn layers_of_candle_nn_are_named() {
    let policy = || Autocast::cuda(DType::BF16);
    let map = VarMap::new();
    let vb = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
    let x = numbers(&[3, 4], DType::F32, 1);
    let linear = candle_nn::linear_no_bias(4, 4, vb.pp("a")).unwrap();
    let norm = candle_nn::layer_norm(4, 1e-5, vb.pp("b")).unwrap();
    let rms_norm = candle_nn::rms_norm(4, 1e-5, vb.pp("c")).unwrap();
    let layers: [(&dyn Module, &str); 3] = [
        (&linear, "nn::Linear::try_from"),
        (&norm, "nn::LayerNorm"),
        (&rms_norm, "nn::RmsNorm"),
    ];
    for (layer, named) in layers {
        let narrow = || ops::matmul(&x, &numbers(&[4, 4], DType::F32, 2));
        let refused = autocast(policy(), || Ok(layer.forward(&narrow()?)?));
        refusal(
            refused,
            &["autocast", "one dtype", named, "candle_nn ignore autocast"],
        );
    }
    let sum = autocast(policy(), || {
        Ok((&x + ops::matmul(&x, &numbers(&[4, 4], DType::F32, 2))?)?)
    });
    refusal(sum, &["autocast", "f32 and bf16", "ops::add"]);
    let ours = tallow::nn::Linear::try_from(linear.clone()).unwrap();
    let y = autocast(policy(), || {
        ours.forward(&ops::matmul(&x, &numbers(&[4, 4], DType::F32, 2))?)
    });
    assert_eq!(y.unwrap().dtype(), DType::BF16);
    // Where nothing is cast, the error is candle's.
    let half = x.to_dtype(DType::BF16).unwrap();
    let disabled = autocast(Autocast::disabled(), || Ok(linear.forward(&half)?));
    assert!(matches!(disabled, Err(Error::Candle(_))));
}
