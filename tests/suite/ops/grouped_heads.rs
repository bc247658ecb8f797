//! Grouped heads against the same attention with k and v repeated for each head of q.

use super::case::{Case, Input, KERNEL, LAYOUTS, Outcome, REFERENCE, bits, cast};
use super::cases::{self, MASKS, repeat_heads};
use super::compare::assert_agree;
use crate::settings::with_mask;
use candle_core::{DType, Tensor};
use rstest::rstest;
use tallow::attention::{self, Mask};
use tallow::ops::KernelPolicy;

/// Returns the case with each head of k and v repeated, so that none is shared.
fn repeated(case: &Case, mask: Mask) -> Case {
    let [q, k, v] = [0, 1, 2].map(|i| case.inputs[i].value.clone());
    let heads = q.dims()[q.rank() - 3];
    let (k, v) = (repeat_heads(&k, heads), repeat_heads(&v, heads));
    let inputs = vec![Input::new("q", q), Input::new("k", k), Input::new("v", v)];
    let config = with_mask(mask);
    Case::new(case.name.clone(), inputs, move |x| {
        attention::naive(&x[0], &x[1], &x[2], &config)
    })
}

/// Sums `gradient` (..., H, Tk, Dh) over the heads that share one of `kv_heads`.
fn summed(gradient: &Tensor, kv_heads: usize) -> Tensor {
    let (rank, dims) = (gradient.rank(), gradient.dims());
    let mut split = dims.to_vec();
    split[rank - 3] = kv_heads;
    split.insert(rank - 2, dims[rank - 3] / kv_heads);
    let groups = gradient.reshape(split).unwrap();
    groups.sum(rank - 2).unwrap()
}

/// Checks that output and dq have the bits of the repeated computation, and that dk and dv are sums of its gradients.
fn check(batch: &[usize], (heads, kv_heads): (usize, usize), policy: KernelPolicy) {
    for mask in MASKS {
        for (lengths, dims) in [((33, 41), (24, 24)), ((41, 33), (6, 17)), ((1, 7), (8, 8))] {
            let how = (None, mask);
            let case = cases::grouped_attention(batch, (heads, kv_heads), lengths, dims, how, 30);
            let repeated = repeated(&case, mask);
            for (dtype, limit) in [(DType::F64, 1e-14), (DType::F32, 2e-6)] {
                let (grouped, all) = (case.run(dtype, policy), repeated.run(dtype, policy));
                if policy == KERNEL {
                    assert_eq!(bits(&grouped.out), bits(&all.out), "{}", case.name);
                    let [dq, all_dq] = [&grouped, &all].map(|run| bits(&run.gradients[0].1));
                    assert_eq!(dq, all_dq, "{}: d_q", case.name);
                }
                let sums = all
                    .gradients
                    .iter()
                    .enumerate()
                    .map(|(i, (name, gradient))| {
                        let gradient = cast(gradient, DType::F64);
                        let gradient = match i {
                            0 => gradient,
                            _ => summed(&gradient, kv_heads),
                        };
                        (*name, gradient)
                    });
                let wanted = Outcome {
                    gradients: sums.collect(),
                    out: all.out,
                };
                assert_agree(&case, &grouped, &wanted, limit);
            }
        }
    }
}

#[rstest]
#[case::kernel(KERNEL)]
#[case::reference(REFERENCE)]
fn as_with_heads_repeated(#[case] policy: KernelPolicy) {
    for heads in [(4, 2), (6, 2), (6, 3), (5, 1), (3, 3)] {
        check(&[2], heads, policy);
    }
    check(&[], (4, 2), policy);
    check(&[3, 2], (4, 2), policy);
}

/// Neighbouring heads share a head of k and v: if each head of v holds another number, the output shows which one was
/// read.
#[rstest]
#[case::kernel(KERNEL)]
#[case::reference(REFERENCE)]
fn neighbours_share(#[case] policy: KernelPolicy) {
    let numbers = Tensor::new(&[1f64, 2.0, 3.0], &candle_core::Device::Cpu).unwrap();
    let v = numbers.reshape((1, 3, 1, 1)).unwrap();
    let v = v.broadcast_as((2, 3, 5, 1)).unwrap();
    let case = cases::grouped_attention(&[2], (6, 3), (1, 5), (4, 1), (None, Mask::Full), 31);
    let [q, k, _] = [0, 1, 2].map(|i| case.inputs[i].value.clone());
    let out = case.value(&[q, k, v], policy).flatten_all().unwrap();
    let out = out.to_vec1::<f64>().unwrap();
    for (got, wanted) in out.iter().zip([1.0, 1.0, 2.0, 2.0, 3.0, 3.0].repeat(2)) {
        assert!((got - wanted).abs() < 1e-14, "{out:?}");
    }
}

/// k and v may have any strides.
#[test]
fn on_any_strides() {
    for mask in MASKS {
        let how = (Some(0.3), mask);
        let case = cases::grouped_attention(&[2], (6, 2), (7, 9), (4, 5), how, 32);
        let plain = case.run(DType::F32, KERNEL);
        for layout in LAYOUTS {
            let run = case.run_in_layout(DType::F32, KERNEL, layout);
            assert_eq!(bits(&run.out), bits(&plain.out), "{layout:?}");
            for ((name, a), (_, b)) in run.gradients.iter().zip(&plain.gradients) {
                assert_eq!(bits(a), bits(b), "{layout:?}: d_{name}");
            }
        }
    }
}
