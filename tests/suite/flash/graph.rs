//! Tracking in candle's graph: nothing under `no_grad` or from plain tensors, one node for any number of tiles, and
//! each input separately.

use super::problem::{Attend, DTYPES, FLASH, Problem, REFERENCE, Sizes, elements};
use candle_core::{DType, Tensor, Var};
use rstest::rstest;
use tallow::attention::Mask;
use tallow::no_grad;

fn problem() -> Problem {
    Problem::random(Sizes::new((2, 4, 2), (70, 67), 8), Mask::Causal, None, 71)
}

fn vars(problem: &Problem, dtype: DType) -> [Tensor; 3] {
    let operands = problem.operands(dtype);
    operands.map(|x| Var::from_tensor(&x).unwrap().into_inner())
}

#[rstest]
fn no_grad_records_nothing_and_changes_nothing(#[values(FLASH, REFERENCE)] attend: Attend) {
    let problem = problem();
    for dtype in DTYPES {
        let [q, k, v] = vars(&problem, dtype);
        let (out, lse) = attend(&q, &k, &v, &problem.config).unwrap();
        let (quiet_out, quiet_lse) = no_grad(|| attend(&q, &k, &v, &problem.config)).unwrap();
        assert!(out.track_op() && !quiet_out.track_op(), "{dtype:?}");
        assert!(!lse.track_op() && !quiet_lse.track_op(), "{dtype:?}");
        assert_eq!(elements(&out), elements(&quiet_out), "{dtype:?}");
        assert_eq!(elements(&lse), elements(&quiet_lse), "{dtype:?}");
    }
}

#[rstest]
fn plain_tensors_are_not_tracked(#[values(FLASH, REFERENCE)] attend: Attend) {
    let problem = problem();
    let [q, k, v] = problem.operands(DType::F32);
    let (out, lse) = attend(&q, &k, &v, &problem.config).unwrap();
    assert!(!out.track_op() && !lse.track_op());
}

/// An input that is the only Var has the gradient that it has among Vars. An intermediate tensor passes its gradient
/// on.
#[rstest]
fn each_input_alone(#[values(FLASH, REFERENCE)] attend: Attend) {
    let problem = problem();
    for dtype in DTYPES {
        let together = problem.run(dtype, attend);
        let together = [together.dq, together.dk, together.dv];
        for (i, together) in together.iter().enumerate() {
            let mut operands = problem.operands(dtype);
            let var = Var::from_tensor(&operands[i]).unwrap();
            for passed_on in [false, true] {
                operands[i] = match passed_on {
                    false => var.as_tensor().clone(),
                    true => var.affine(1.0, 0.0).unwrap(),
                };
                let [q, k, v] = &operands;
                let (out, lse) = attend(q, k, v, &problem.config).unwrap();
                assert!(out.track_op() && !lse.track_op());
                let loss = (out * problem.d_out(dtype)).unwrap().sum_all().unwrap();
                let gradients = loss.backward().unwrap();
                let alone = elements(gradients.get(&var).expect("a gradient"));
                assert_eq!(&alone, together, "{dtype:?}, input {i}, {passed_on}");
            }
        }
    }
}

/// The log-sum-exp has no gradient: alone it gives none, and added to the loss it changes none.
#[rstest]
fn lse_carries_no_gradient(#[values(FLASH, REFERENCE)] attend: Attend) {
    let problem = problem();
    let vars = vars(&problem, DType::F32);
    let [q, k, v] = &vars;
    let (out, lse) = attend(q, k, v, &problem.config).unwrap();
    let gradients = lse.sum_all().unwrap().backward().unwrap();
    assert!(vars.iter().all(|x| gradients.get(x).is_none()));
    let out = (out * problem.d_out(DType::F32))
        .unwrap()
        .sum_all()
        .unwrap();
    let both = (&out + lse.sum_all().unwrap()).unwrap();
    let [out, both] = [out, both].map(|loss| loss.backward().unwrap());
    for x in &vars {
        let of = |gradients: &candle_core::backprop::GradStore| elements(gradients.get(x).unwrap());
        assert_eq!(of(&out), of(&both));
    }
}

#[rstest]
fn backward_twice(#[values(FLASH, REFERENCE)] attend: Attend) {
    let problem = problem();
    let vars = vars(&problem, DType::BF16);
    let [q, k, v] = &vars;
    let (out, _) = attend(q, k, v, &problem.config).unwrap();
    let loss = out.sum_all().unwrap();
    let [one, other] = [(); 2].map(|()| loss.backward().unwrap());
    for x in &vars {
        assert_eq!(
            elements(one.get(x).unwrap()),
            elements(other.get(x).unwrap())
        );
    }
}

/// candle walks its graph recursively, so a node for each of a thousand tiles of keys would overflow the stack.
#[rstest]
fn many_tiles_are_one_node(#[values(FLASH, REFERENCE)] attend: Attend) {
    let sizes = Sizes::new((1, 1, 1), (3, 64_000), 1);
    let problem = Problem::random(sizes, Mask::Full, None, 72);
    let run = move || problem.run(DType::F32, attend);
    let small_stack = std::thread::Builder::new().stack_size(256 * 1024);
    let results = small_stack.spawn(run).unwrap().join().unwrap();
    assert!(results.dq.iter().any(|x| *x != 0.0));
}
