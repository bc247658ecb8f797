//! Tracking in candle's graph: nothing under `no_grad` or from plain tensors, otherwise each input separately.

use super::case::{Case, KERNEL, LAYOUTS, REFERENCE, bits};
use super::cases;
use super::every;
use candle_core::{DType, Tensor, Var};
use rstest::rstest;
use std::panic::catch_unwind;
use tallow::ops::{self, KernelPolicy, with_kernel_policy};
use tallow::{is_grad_enabled, no_grad};

fn apply(case: &Case, operands: &[Tensor], policy: KernelPolicy) -> Tensor {
    with_kernel_policy(policy, || (case.apply)(operands)).unwrap()
}

fn vars(case: &Case, dtype: DType) -> Vec<Tensor> {
    let operands = case.operands(dtype);
    let vars = operands.iter().map(|x| Var::from_tensor(x).unwrap());
    vars.map(|var| var.as_tensor().clone()).collect()
}

#[rstest]
#[case::kernel(KERNEL, DType::F32)]
#[case::reference(REFERENCE, DType::F32)]
#[case::reference_in_half(REFERENCE, DType::BF16)]
#[case::kernels_in_half(KernelPolicy::Prefer, DType::F16)]
fn no_grad_records_nothing_and_changes_nothing(#[case] policy: KernelPolicy, #[case] dtype: DType) {
    for case in every::small() {
        for layout in LAYOUTS {
            let vars: Vec<Tensor> = case
                .operands(dtype)
                .iter()
                .map(|x| {
                    let base = Var::from_tensor(&layout.base(x)).unwrap();
                    layout.view(&base, x.dims())
                })
                .collect();
            let recorded = apply(&case, &vars, policy);
            let quiet = no_grad(|| apply(&case, &vars, policy));
            assert!(recorded.track_op(), "{}, {layout:?}", case.name);
            assert!(!quiet.track_op(), "{}, {layout:?}", case.name);
            assert_eq!(bits(&recorded), bits(&quiet), "{}, {layout:?}", case.name);
        }
    }
}

#[rstest]
#[case::kernel(KERNEL)]
#[case::reference(REFERENCE)]
fn plain_tensors_are_not_tracked(#[case] policy: KernelPolicy) {
    for case in every::small() {
        let out = apply(&case, &case.operands(DType::F32), policy);
        assert!(!out.track_op(), "{}", case.name);
    }
}

/// An input that is the only Var has the gradient that it has among Vars. An intermediate tensor passes its gradient
/// on.
#[rstest]
#[case::kernel(KERNEL)]
#[case::reference(REFERENCE)]
fn each_input_alone(#[case] policy: KernelPolicy) {
    for case in every::small() {
        let together = case.run(DType::F32, policy);
        let differentiable = case.inputs.iter().enumerate();
        let differentiable = differentiable.filter(|(_, input)| input.differentiable);
        for ((i, input), (_, together)) in differentiable.zip(&together.gradients) {
            let mut operands = case.operands(DType::F32);
            let var = Var::from_tensor(&operands[i]).unwrap();
            for passed_on in [false, true] {
                operands[i] = match passed_on {
                    false => var.as_tensor().clone(),
                    true => var.affine(1.0, 0.0).unwrap(),
                };
                let out = apply(&case, &operands, policy);
                let loss = (&out * case.upstream(&out)).unwrap().sum_all().unwrap();
                let gradients = loss.backward().unwrap();
                let alone = gradients.get(&var).expect("a gradient");
                assert_eq!(bits(alone), bits(together), "{}: {}", case.name, input.name);
            }
        }
    }
}

/// Tables of angles have no gradient, even if only they are Vars.
#[rstest]
#[case::kernel(KERNEL)]
#[case::reference(REFERENCE)]
fn angles_are_not_tracked(#[case] policy: KernelPolicy) {
    let case = cases::rope(&[2], 5, 6, 1);
    let mut operands = vars(&case, DType::F32);
    operands[0] = operands[0].detach();
    assert!(!apply(&case, &operands, policy).track_op());
}

#[test]
fn no_grad_nests_and_ends_on_panic() {
    assert!(is_grad_enabled());
    no_grad(|| {
        no_grad(|| assert!(!is_grad_enabled()));
        assert!(!is_grad_enabled());
    });
    assert!(is_grad_enabled());
    let caught = catch_unwind(|| no_grad(|| panic!("inside no_grad")));
    assert!(caught.is_err() && is_grad_enabled());
    let case = cases::relu(&[3], 1);
    assert!(apply(&case, &vars(&case, DType::F32), KERNEL).track_op());
}

#[test]
fn no_grad_holds_for_its_thread_alone() {
    let elsewhere = || std::thread::spawn(is_grad_enabled).join().unwrap();
    assert!(no_grad(elsewhere));
}

/// `detach` ends the graph for one of two operands.
#[test]
fn detached_inputs_stop_the_gradient() {
    let x = Var::new(&[[1f32, -2.0], [3.0, 4.0]], &candle_core::Device::Cpu).unwrap();
    let out = ops::swiglu(&ops::relu(&x.detach()).unwrap(), &x).unwrap();
    let gradients = out.sum_all().unwrap().backward().unwrap();
    let silu = |g: f64| g / (1.0 + (-g).exp());
    let gradient = super::case::elements(gradients.get(&x).unwrap());
    for (found, relu) in gradient.into_iter().zip([1.0, 0.0, 3.0, 4.0]) {
        assert!((found - silu(relu)).abs() < 1e-6, "{found} for {relu}");
    }
}
