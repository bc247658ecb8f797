//! Checkpoints whose gradient cannot be computed are errors.

use super::{numbers, var};
use candle_core::{DType, Tensor};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tallow::{Error, Result, nn, ops};

fn error<T>(result: candle_core::Result<T>, parts: &[&str]) {
    let text = match result {
        Ok(_) => panic!("this must be refused"),
        Err(error) => error.to_string(),
    };
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
}

/// Returns a function that depends on the number of its call.
fn changing(
    f: impl Fn(usize, &Tensor) -> Result<Tensor> + Send + Sync + 'static,
) -> impl Fn([&Tensor; 1]) -> Result<Tensor> + Send + Sync + 'static {
    let calls = Arc::new(AtomicUsize::new(0));
    move |[x]| f(calls.fetch_add(1, Ordering::Relaxed), x)
}

#[test]
fn functions_that_change() {
    let x = var(&[2, 3], 1);
    let weights = [var(&[3, 3], 2), var(&[3, 3], 3)];
    let refused = ["checkpoint", "run again", "the same each time"];
    let other_variable = changing(move |call, x| ops::linear(x, &weights[call.min(1)]));
    let other_shape = changing(|call, x| Ok(x.narrow(1, 0, 3 - call)?));
    let other_dtype = changing(|call, x| match call {
        0 => ops::relu(x),
        _ => ops::cast(x, DType::F64),
    });
    let gone = changing(|call, x| Ok(if call == 0 { x.exp()? } else { x.detach() }));
    let fails = changing(|call, x| match call {
        0 => ops::relu(x),
        _ => ops::linear(x, &numbers(&[7, 7], 1)),
    });
    let backward = |y: Result<Tensor>| y.unwrap().sum_all().unwrap().backward();
    error(backward(nn::checkpoint(other_variable, [&x])), &refused);
    error(backward(nn::checkpoint(other_shape, [&x])), &refused);
    error(backward(nn::checkpoint(other_dtype, [&x])), &refused);
    error(backward(nn::checkpoint(gone, [&x])), &refused);
    error(
        backward(nn::checkpoint(fails, [&x])),
        &["linear", "(out, in)"],
    );
}

#[test]
fn errors_of_the_function_are_the_callers() {
    let (x, w) = (var(&[2, 3], 1), var(&[3, 4], 2));
    let result = nn::checkpoint(move |[x]| ops::linear(x, &w), [&x]);
    assert!(matches!(result, Err(Error::Shape { op: "linear", .. })));
}

/// An op without a gradient between input and output, where candle would panic.
#[test]
fn an_input_that_no_gradient_reaches() {
    struct WithoutBackward;
    impl candle_core::CustomOp1 for WithoutBackward {
        fn name(&self) -> &'static str {
            "deaf"
        }
        fn cpu_fwd(
            &self,
            x: &candle_core::CpuStorage,
            layout: &candle_core::Layout,
        ) -> candle_core::Result<(candle_core::CpuStorage, candle_core::Shape)> {
            Ok((x.clone(), layout.shape().clone()))
        }
        fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> candle_core::Result<Option<Tensor>> {
            Ok(None)
        }
    }
    let x = var(&[2, 3], 1);
    let h = x.exp().unwrap();
    let y = nn::checkpoint(|[h]| Ok(h.apply_op1(WithoutBackward)?), [&h]).unwrap();
    error(
        y.sum_all().unwrap().backward(),
        &["checkpoint", "input 0", "differentiable"],
    );
}
