//! Every public op on random operands: shapes that fit and that do not, empty ones, views, dtypes, policies. Each call
//! returns a consistent result or an error, and never panics.
//!
//! The test makes 20,000 calls (`TALLOW_FUZZ_CALLS`) from seed `TALLOW_FUZZ_SEED` on. A failure names its seed; with
//! that seed and one call it is repeated alone.

mod draw;
mod table;

use candle_core::{DType, Tensor};
use draw::{Call, Draw};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use table::OPS;
use tallow::ops::with_kernel_policy;
use tallow::{Result, autocast, no_grad};

#[test]
fn no_call_of_an_op_panics() {
    let number = |name, default| match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name}={text}")),
        Err(_) => default,
    };
    let first: u64 = number("TALLOW_FUZZ_SEED", 0);
    let calls: u64 = number("TALLOW_FUZZ_CALLS", 20_000);
    let mut differentiated = vec![0; OPS.len()];
    let mut failures: BTreeMap<&str, String> = BTreeMap::new(); // the first failure of each op
    for seed in first..first + calls {
        let mut draw = Draw::new(seed);
        let index = draw.under(OPS.len());
        let op = &OPS[index];
        let call = draw.call(op.operands);
        let outcome = catch_unwind(AssertUnwindSafe(|| run(op, &call, &mut draw)));
        let problem = match outcome {
            Ok(Ok(ran_backward)) => {
                differentiated[index] += u64::from(ran_backward);
                continue;
            }
            Ok(Err(problem)) => problem,
            Err(_) => "panicked".into(),
        };
        let failure = || format!("TALLOW_FUZZ_SEED={seed}: {} {problem}\n{call}", op.name);
        failures.entry(op.name).or_insert_with(failure);
    }
    let failures: Vec<String> = failures.into_values().collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    if calls >= 20_000 {
        for (op, count) in OPS.iter().zip(differentiated) {
            assert!(count > 0, "{}: no call came to its backward", op.name);
        }
    }
}

/// Returns whether the call had a gradient, or a description of its inconsistency.
fn run(op: &table::Op, call: &Call, draw: &mut Draw) -> std::result::Result<bool, String> {
    let apply = |draw: &mut Draw| with_kernel_policy(call.policy, || (op.apply)(&call.views, draw));
    let outcome: Result<Tensor> = match (&call.region, call.tracks) {
        (_, false) => no_grad(|| apply(draw)),
        (Some(region), true) => autocast(region.clone(), || apply(draw)),
        (None, true) => apply(draw),
    };
    let Ok(y) = outcome else {
        return Ok(false);
    };
    if let (true, Some(wanted)) = (call.fits, call.dims_of(op.result))
        && y.dims() != wanted
    {
        return Err(format!("gives {:?} where {wanted:?} is due", y.dims()));
    }
    if !y.dtype().is_float() && op.name != "contiguous" {
        return Err(format!("gives {:?}", y.dtype()));
    }
    // A layer's parameters also determine the dtype.
    let of_operand =
        op.name.starts_with("nn::") || call.views.iter().any(|x| x.dtype() == y.dtype());
    let may_differ = matches!(y.dtype(), DType::F32) || call.region.is_some() || op.name == "cast";
    if !(of_operand || may_differ) {
        return Err(format!("gives {:?}", y.dtype()));
    }
    check_elements(&y)?;
    if !y.is_contiguous() && op.name != "cast" {
        return Err(format!("is strided: {:?}", y.layout()));
    }
    // In candle, an empty matmul depends on its first operand only.
    let loses_factors = op.name.ends_with("::reference") && y.elem_count() == 0;
    let sources = || call.sources.iter().flatten();
    if !y.track_op() {
        let cut = call.tracks && !loses_factors && sources().next().is_some();
        return match cut {
            true => Err("cuts the graph".into()),
            false => Ok(false),
        };
    }
    let gradients = y.backward().map_err(|e| format!("backward: {e}"))?;
    for (i, source) in sources().enumerate() {
        let Some(gradient) = gradients.get(source) else {
            if loses_factors {
                continue;
            }
            return Err(format!("no gradient of operand {i} with one"));
        };
        if (gradient.dims(), gradient.dtype()) != (source.dims(), source.dtype()) {
            return Err(format!(
                "gradient {:?} in {:?}",
                gradient.dims(),
                gradient.dtype()
            ));
        }
        check_elements(gradient)?;
    }
    Ok(true)
}

/// Checks that the tensor has the elements of its shape, and that each can be read.
fn check_elements(x: &Tensor) -> std::result::Result<(), String> {
    let read = || match x.dtype() {
        // candle's conversion from these never ends at subnormal numbers.
        DType::F8E4M3 => Ok(vec![0.0; x.flatten_all()?.elem_count()]),
        _ => x.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>(),
    };
    let elements = read().map_err(|e: candle_core::Error| format!("cannot be read: {e}"))?;
    let wanted: usize = x.dims().iter().product();
    match elements.len() == wanted {
        true => Ok(()),
        false => Err(format!("{} elements for {:?}", elements.len(), x.dims())),
    }
}
