//! Kernel policies: ops run kernels where they exist, references otherwise or on request, and fallbacks are recorded.

use super::case::{Case, KERNEL, REFERENCE, bits, cast, normal};
use super::cases;
use super::every;
use candle_core::{DType, Device, Tensor};
use std::panic::catch_unwind;
use tallow::attention::{self, AttentionConfig, Mask};
use tallow::ops::{self, Fallback, Gelu, KernelPolicy, RotaryPairs, fallbacks, with_kernel_policy};
use tallow::{Error, Result};

/// Returns the names that the ops of a case report.
fn op_names(case: &Case) -> Vec<&str> {
    match case.name.split(' ').next().unwrap() {
        "attention" => vec!["attention::naive", "matmul_transposed", "matmul"],
        "cross_entropy_ignoring" => vec!["cross_entropy"],
        name => vec![name],
    }
}

fn apply(case: &Case, dtype: DType, policy: KernelPolicy) -> Result<Tensor> {
    with_kernel_policy(policy, || (case.apply)(&case.operands(dtype)))
}

/// 8-bit floats have no kernel.
#[test]
fn strict_refuses_what_has_no_kernel() {
    for case in every::small() {
        let dtype = DType::F8E4M3;
        let error = apply(&case, dtype, KernelPolicy::Strict).unwrap_err();
        let text = error.to_string();
        let wanted = [
            op_names(&case)[0],
            dtype.as_str(),
            "cpu",
            "no kernel",
            "KernelPolicy::Prefer",
        ];
        assert!(wanted.iter().all(|part| text.contains(part)), "{text}");
        assert!(matches!(error, Error::NoKernel { .. }), "{error:?}");
    }
}

/// Half precision has kernels: nothing is refused or listed.
#[test]
fn strict_finds_half_kernels() {
    for case in every::small() {
        for dtype in [DType::BF16, DType::F16] {
            let [strict, preferred] = [KERNEL, KernelPolicy::Prefer]
                .map(|policy| bits(&apply(&case, dtype, policy).unwrap()));
            assert_eq!(strict, preferred, "{}", case.name);
        }
        let name = op_names(&case)[0];
        let listed = fallbacks().into_iter().find(|f| f.op == name && is_half(f));
        assert_eq!(listed, None, "{}", case.name);
    }
}

fn is_half(fallback: &Fallback) -> bool {
    fallback.dtype == "f16" || fallback.dtype == "bf16"
}

#[test]
fn prefer_falls_back_and_says_so() {
    let x = Tensor::new(&[-1f32, 2.0], &Device::Cpu).unwrap();
    let y = ops::relu(&x.to_dtype(DType::F8E4M3).unwrap()).unwrap();
    let y = y.to_dtype(DType::F32).unwrap();
    assert_eq!(y.to_vec1::<f32>().unwrap(), [0.0, 2.0]);
    let list = fallbacks();
    assert!(list.is_sorted());
    let listed = |f: &&Fallback| f.op == "relu" && f.dtype == "f8e4m3" && f.device == "cpu";
    assert_eq!(list.iter().filter(listed).count(), 1, "{list:?}");
    for case in every::small() {
        // Neither a kernel nor a requested reference is a fallback.
        for dtype in [DType::F32, DType::F64] {
            for policy in [KernelPolicy::Prefer, REFERENCE] {
                apply(&case, dtype, policy).unwrap();
            }
        }
    }
    let wrong = |f: &Fallback| f.dtype == "f32" || f.dtype == "f64";
    assert!(!fallbacks().iter().any(wrong), "{:?}", fallbacks());
}

/// `Prefer` is the default and runs the kernel.
#[test]
fn prefer_is_the_default_and_takes_kernels() {
    assert_eq!(KernelPolicy::default(), KernelPolicy::Prefer);
    // Softmax's kernel and reference differ in the last bits.
    let case = cases::softmax(&[3], (33, 65), (0.3, 3.0), Mask::Full, 1);
    let operands = case.operands(DType::F32);
    let plain = bits(&(case.apply)(&operands).unwrap());
    assert_eq!(plain, bits(&case.value(&operands, KernelPolicy::Prefer)));
    assert_eq!(plain, bits(&case.value(&operands, KERNEL)));
    assert_ne!(plain, bits(&case.value(&operands, REFERENCE)));
}

#[test]
fn policies_nest_end_on_panic_and_hold_for_one_thread() {
    // A dtype without kernels.
    let small = cast(&normal(&[1, 3, 2], 1), DType::F8E4M3);
    let strict = || ops::split_heads(&small, 2).is_err();
    assert!(!strict());
    with_kernel_policy(KernelPolicy::Strict, || {
        assert!(strict());
        assert!(!with_kernel_policy(KernelPolicy::Reference, strict));
        assert!(strict());
        let elsewhere = std::thread::scope(|scope| scope.spawn(strict).join().unwrap());
        assert!(!elsewhere);
    });
    assert!(!strict());
    let caught = catch_unwind(|| with_kernel_policy(KernelPolicy::Strict, || panic!("inside")));
    assert!(caught.is_err() && !strict());
}

/// The public references are those that `KernelPolicy::Reference` runs.
#[test]
fn references_can_be_called() {
    let cpu = Device::Cpu;
    let (x, weight, bias) = (normal(&[3, 6], 1), normal(&[6], 2), normal(&[6], 3));
    let square = normal(&[6, 6], 4);
    let (cos, sin) = cases::angles(3, 6);
    let ids = Tensor::new(&[5u32, 0, 5], &cpu).unwrap();
    let same = |direct: Result<Tensor>, op: &dyn Fn() -> Result<Tensor>| {
        let through_policy = with_kernel_policy(REFERENCE, op).unwrap();
        assert_eq!(bits(&direct.unwrap()), bits(&through_policy));
    };
    same(ops::reference::relu(&x), &|| ops::relu(&x));
    same(ops::reference::swiglu(&x, &x), &|| ops::swiglu(&x, &x));
    same(ops::reference::rms_norm(&x, &weight, 1e-5), &|| {
        ops::rms_norm(&x, &weight, 1e-5)
    });
    same(
        ops::reference::layer_norm(&x, &weight, &bias, 1e-5),
        &|| ops::layer_norm(&x, &weight, &bias, 1e-5),
    );
    same(ops::reference::softmax(&x, 0.5, Mask::Causal), &|| {
        ops::softmax(&x, 0.5, Mask::Causal)
    });
    same(ops::reference::rope(&x, &cos, &sin), &|| {
        ops::rope(&x, &cos, &sin)
    });
    let halves = RotaryPairs::Halves;
    same(ops::reference::rope_with(&x, &cos, &sin, halves), &|| {
        ops::rope_with(&x, &cos, &sin, halves)
    });
    same(ops::reference::linear(&x, &square), &|| {
        ops::linear(&x, &square)
    });
    same(ops::reference::linear_bias(&x, &square, &bias), &|| {
        ops::linear_bias(&x, &square, &bias)
    });
    let heads = normal(&[2, 3, 6], 5);
    same(ops::reference::repeat_heads(&heads, 2), &|| {
        ops::repeat_heads(&heads, 2)
    });
    for form in [Gelu::Erf, Gelu::Tanh] {
        same(ops::reference::gelu(&x, form), &|| ops::gelu(&x, form));
    }
    same(ops::reference::tanh(&x), &|| ops::tanh(&x));
    same(ops::reference::sigmoid(&x), &|| ops::sigmoid(&x));
    same(ops::reference::silu(&x), &|| ops::silu(&x));
    same(ops::reference::embedding(&ids, &x.t().unwrap()), &|| {
        ops::embedding(&ids, &x.t().unwrap())
    });
    same(ops::reference::matmul(&x, &square, false), &|| {
        ops::matmul(&x, &square)
    });
    same(ops::reference::matmul(&x, &square, true), &|| {
        ops::matmul_transposed(&x, &square)
    });
    same(ops::reference::cross_entropy(&x, &ids, None), &|| {
        ops::cross_entropy(&x, &ids)
    });
    same(ops::reference::cross_entropy(&x, &ids, Some(5)), &|| {
        ops::cross_entropy_ignoring(&x, &ids, 5)
    });
}

/// A scale of `None` is 1 / sqrt(Dh), and the default mask hides nothing.
#[test]
fn the_default_attention() {
    let (q, k, v) = (
        normal(&[1, 2, 3, 16], 1),
        normal(&[1, 2, 5, 16], 2),
        normal(&[1, 2, 5, 16], 3),
    );
    let default = attention::naive(&q, &k, &v, &AttentionConfig::default()).unwrap();
    let spelled = AttentionConfig {
        mask: Mask::Full,
        scale: Some(0.25),
        ..Default::default()
    };
    let spelled = attention::naive(&q, &k, &v, &spelled).unwrap();
    assert_eq!(bits(&default), bits(&spelled));
}
