//! Every op against PyTorch's own operator samples (`fixtures/opinfo`): outputs and gradients in f64, f32 and bf16, by
//! kernels and references.
//!
//! `TALLOW_OPINFO=FOLDER` uses the samples in that folder instead (`fixtures/generate.py opinfo --whole FOLDER`).
//! `TALLOW_TEST_DEVICE=cuda:0` runs on a GPU.

mod express;
mod fixture;

use crate::check::elements;
use crate::flash::problem::device;
use candle_core::{DType, Device, Tensor, Var};
use express::{Call, Implementation, implementations};
use fixture::{File, Sample, folder, index};
use std::panic::{AssertUnwindSafe, catch_unwind};
use tallow::Result;
use tallow::ops::{KernelPolicy, with_kernel_policy};

/// The dtypes of the runs, in the order of the fixture's `dtypes` and `distances`.
const RUNS: [DType; 3] = [DType::F64, DType::F32, DType::BF16];

#[test]
fn kernels_are_as_near_as_pytorch() {
    judge_all(KernelPolicy::Prefer);
}

#[test]
fn references_are_as_near_as_pytorch() {
    judge_all(KernelPolicy::Reference);
}

fn judge_all(policy: KernelPolicy) {
    let (folder, device) = (folder(), device());
    let mut failures = Vec::new();
    let mut judged = 0;
    let index = index(&folder);
    for (name, count) in &index {
        let file = File::read(&folder, name);
        assert_eq!(file.samples.len(), *count, "{name}");
        for (number, sample) in file.samples.iter().enumerate() {
            for (run, dtype) in RUNS.iter().enumerate() {
                for (way, apply) in implementations(name) {
                    let roundings = match way == "naive" && device.is_cuda() {
                        true => 2.0,
                        false => 1.0,
                    };
                    let judged = || judge(sample, run, apply, &device, roundings);
                    let found = with_kernel_policy(policy, judged);
                    let what = format!("{way}, {name} {number}, {dtype:?}");
                    failures.extend(found.into_iter().map(|why| format!("{what}: {why}")));
                }
                judged += 1;
            }
        }
    }
    let samples: usize = index.values().sum();
    assert_eq!(judged, RUNS.len() * samples);
    let (count, failures) = (failures.len(), failures.join("\n"));
    assert_eq!(
        count, 0,
        "of {samples} samples in three dtypes:\n{failures}"
    );
}

/// Returns the failures of this sample's output and gradients in the dtype of `run`.
///
/// `roundings` is the smallest error allowed in half precision, in roundings. On a GPU naive attention has a second
/// one, because its probabilities and their gradients are rounded before the matmuls. PyTorch's three ops do that too:
/// on 200 problems of these sizes their errors were 4.6e-3 in dq and 4.3e-3 in dk, and up to 6.4e-3 (bf16, one H200,
/// PyTorch 2.11).
fn judge(
    sample: &Sample,
    run: usize,
    way: Implementation,
    device: &Device,
    roundings: f64,
) -> Vec<String> {
    // On a GPU neither backward nor broadcast_as of candle works on empty tensors.
    if device.is_cuda() && sample.is_empty() {
        return Vec::new();
    }
    // A panic is a failure of one sample; the others still run.
    let found = catch_unwind(AssertUnwindSafe(|| results(sample, run, way, device)));
    let found = match found {
        Ok(Ok(found)) => found,
        Ok(Err(error)) => return vec![format!("{}: {error}", sample.describe())],
        Err(_) => return vec![format!("{}: panicked", sample.describe())],
    };
    let mut failures = Vec::new();
    for (at, (found, expected)) in found.iter().zip(&sample.results).enumerate() {
        let what = if at == 0 {
            "out".into()
        } else {
            format!("gradient {at}")
        };
        let wrong = match found {
            None => Some("missing".into()),
            Some(found) => {
                let dtype = expected.dtype(run);
                let bound = bound(RUNS[run], dtype, expected.distances, roundings);
                let exact = sample.exact(at, RUNS[run]);
                compare(found, &exact, sample.dtype(at, run), bound)
            }
        };
        failures.extend(wrong.map(|why| format!("{}: {what}: {why}", sample.describe())));
    }
    failures
}

/// Returns the output, then the gradient of each differentiable operand; `None` if there is none.
fn results(
    sample: &Sample,
    run: usize,
    way: Implementation,
    device: &Device,
) -> Result<Vec<Option<Tensor>>> {
    let (mut leaves, mut operands) = (Vec::new(), Vec::new());
    for operand in &sample.operands {
        let value = operand.in_memory(RUNS[run])?.to_device(device)?;
        if operand.differentiable() {
            let leaf = Var::from_tensor(&value)?;
            operands.push(operand.view(&leaf)?);
            leaves.push((operand, leaf));
        } else {
            operands.push(operand.view(&value)?);
        }
    }
    let out = way(&Call {
        operands: &operands,
        settings: &sample.settings,
        out: &sample.results[0].shape,
    })?;
    let upstream = sample.upstream.to_dtype(out.dtype())?.to_device(device)?;
    let gradients = (&out * upstream.reshape(out.shape())?)?.backward()?;
    let mut found = vec![Some(out.to_device(&Device::Cpu)?)];
    for (operand, leaf) in leaves {
        found.push(match gradients.get(&leaf) {
            Some(gradient) => Some(operand.of_sample(gradient)?.to_device(&Device::Cpu)?),
            None => None,
        });
    }
    Ok(found)
}

/// Returns the bound of a tensor's error, relative by norm, in a run in `run` where PyTorch returns `dtype`.
/// `distances` are the fixture's: the effect of half an ulp of its inputs on f64's result, and PyTorch's own errors.
fn bound(run: DType, dtype: DType, distances: [Option<f64>; 3], roundings: f64) -> Option<f64> {
    let [shift, f32, bf16] = distances;
    // The effect of half an ulp of f32. If it exceeds a tenth of the result (a difference of nearly equal numbers), f32
    // has no correct digit, and PyTorch's error is random: the norm of one or two elements, for example.
    let shift_f32 = shift? * f64::EPSILON.recip() * f64::from(f32::EPSILON);
    let lost = if shift_f32 > 0.1 {
        4.0 * shift_f32
    } else {
        0.0
    };
    Some(match run {
        // PyTorch's own f64, which results are compared with, has an observed error of 4.5 ulps.
        DType::F64 => (4.0 * shift?).max(8.0 * epsilon(dtype)),
        DType::F32 => (3.0 * f32?).max(1e-6).max(lost),
        // One rounding of the result, and at least those of the file.
        _ => {
            let rounding = (roundings * epsilon(dtype) / 2.0).max(epsilon(DType::F32));
            (2.0 * bf16?).max(rounding).max(lost)
        }
    })
}

fn epsilon(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => f64::EPSILON,
        DType::F32 => f64::from(f32::EPSILON),
        DType::F16 => 2f64.powi(-10),
        _ => 2f64.powi(-7),
    }
}

/// Returns the largest finite number.
fn largest(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => f64::MAX,
        DType::F32 => f64::from(f32::MAX),
        DType::F16 => 65504.0,
        _ => half::bf16::MAX.to_f64(),
    }
}

/// Returns a description if `found` is wrong. `bound` is `None` where PyTorch overflows: then only shape and dtype are
/// compared.
fn compare(found: &Tensor, exact: &Tensor, dtype: DType, bound: Option<f64>) -> Option<String> {
    if (found.dims(), found.dtype()) != (exact.dims(), dtype) {
        let (shape, wanted) = (found.dims(), exact.dims());
        return Some(format!(
            "{shape:?} in {:?}, wanted {wanted:?} in {dtype:?}",
            found.dtype()
        ));
    }
    let bound = bound?;
    let (mut errors, mut size) = (0.0, 0.0);
    for (found, exact) in elements(found).into_iter().zip(elements(exact)) {
        let exact = match exact.abs() > largest(dtype) {
            true => exact.signum() * f64::INFINITY,
            false => exact,
        };
        if exact.is_finite() && found.is_finite() {
            errors += (found - exact) * (found - exact);
            size += exact * exact;
        } else if found != exact && !(found.is_nan() && exact.is_nan()) {
            return Some(format!("{found} where {exact} is right"));
        }
    }
    let size = if size == 0.0 { 1.0 } else { size.sqrt() };
    let error = errors.sqrt() / size;
    (error > bound).then(|| format!("off by {error:.3e}, {bound:.3e} allowed"))
}
