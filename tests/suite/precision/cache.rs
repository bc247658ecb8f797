//! The cast of a weight: computed once per region, and freed with it.

use super::*;
use crate::child;
use crate::settings::with_lr;
use candle_core::TensorId;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use tallow::memory::tracker;
use tallow::optim::Optimizer;
use tallow::{Result, autocast, no_grad, ops};

const BF16: DType = DType::BF16;

fn cast_id(x: &Tensor) -> TensorId {
    let [cast] = ops::cast_for("linear", [x]).unwrap();
    assert_ne!(cast.id(), x.id());
    cast.id()
}

fn inside<T>(f: impl FnOnce() -> T) -> T {
    autocast(Autocast::cuda(BF16), || Ok(f())).unwrap()
}

#[test]
fn a_weight_is_cast_once_until_the_outermost_region_ends() {
    let w = var(&[3, 5], DType::F32, 1);
    let first = inside(|| {
        let first = cast_id(&w);
        assert_eq!(cast_id(&w), first);
        let nested = inside(|| cast_id(&w));
        assert_eq!(nested, first);
        assert_eq!(cast_id(&w), first); // the end of an inner region clears nothing
        assert_eq!(
            autocast(Autocast::cpu(BF16), || Ok(cast_id(&w))).unwrap(),
            first
        );
        assert_ne!(
            autocast(Autocast::cuda(DType::F16), || Ok(cast_id(&w))).unwrap(),
            first
        );
        first
    });
    assert_ne!(inside(|| cast_id(&w)), first);
}

#[test]
fn only_weights_are_kept() {
    let w = var(&[4, 5], DType::F32, 1);
    let half = var(&[4, 5], DType::F16, 1);
    inside(|| {
        let activation = (w.as_tensor() * 2.0).unwrap();
        let view = w.narrow(0, 0, 2).unwrap();
        let constant = w.as_detached_tensor();
        for other in [&activation, &view, &constant, half.as_tensor()] {
            assert_ne!(cast_id(other), cast_id(other));
        }
    });
    let policy = Autocast::cuda(BF16).with_weight_cache(false);
    let (a, b) = autocast(policy, || Ok((cast_id(&w), cast_id(&w)))).unwrap();
    assert_ne!(a, b);
}

/// A cast made under `no_grad` has no graph, so a shared one would lose the weight's gradient.
#[test]
fn casts_under_no_grad_are_others() {
    let w = var(&[3, 5], DType::F32, 1);
    let x = numbers(&[2, 5], DType::F32, 2);
    let (evaluated, y) = inside(|| {
        let evaluated = no_grad(|| ops::linear(&x, &w)).unwrap();
        let y = ops::linear(&x, &w).unwrap();
        let [tracked] = ops::cast_for("linear", [w.as_tensor()]).unwrap();
        let untracked = no_grad(|| ops::cast_for("linear", [w.as_tensor()])).unwrap();
        assert!(tracked.track_op() && !untracked[0].track_op());
        assert_eq!(no_grad(|| cast_id(&w)), untracked[0].id());
        (evaluated, y)
    });
    same(&evaluated, &y);
    assert!(!evaluated.track_op());
    let gradients = y.sum_all().unwrap().backward().unwrap();
    assert!(
        elements(gradients.get(&w).unwrap())
            .iter()
            .all(|g| *g != 0.0)
    );
}

/// A weight's gradient includes both uses of one cast.
#[test]
fn a_weight_used_twice_gets_both_gradients() {
    let w = var(&[5, 5], DType::F32, 1);
    let x = numbers(&[2, 5], DType::F32, 2);
    let loss = |w_again: &Tensor| -> Result<Tensor> {
        let y = ops::linear(&x, &w)?;
        ops::sum(&ops::linear(&y, w_again)?)
    };
    let once = autocast(Autocast::cuda(BF16), || loss(&w)).unwrap();
    let shared = once.backward().unwrap();
    let other = Var::from_tensor(&w.as_tensor().copy().unwrap()).unwrap();
    let twice = autocast(Autocast::cuda(BF16), || loss(&other)).unwrap();
    let apart = twice.backward().unwrap();
    let sum = (apart.get(&w).unwrap() + apart.get(&other).unwrap()).unwrap();
    let got = shared.get(&w).unwrap();
    assert_eq!(got.dtype(), DType::F32);
    for (got, wanted) in elements(got).iter().zip(elements(&sum)) {
        assert!(
            (got - wanted).abs() <= wanted.abs() / 256.0,
            "{got} {wanted}"
        ); // one rounding more
    }
}

/// An optimizer's step inside a region takes effect there.
#[test]
fn a_step_ends_its_weights_casts() {
    let w = var(&[5, 5], DType::F32, 1);
    let x = numbers(&[2, 5], DType::F32, 2);
    let config = with_lr(0.25);
    let mut optimizer = Optimizer::new(vec![("w".to_string(), w.clone())], config).unwrap();
    inside(|| {
        let before = ops::linear(&x, &w).unwrap();
        let gradients = ops::sum(&before).unwrap().backward().unwrap();
        optimizer.step(&gradients).unwrap();
        let after = ops::linear(&x, &w).unwrap();
        let fresh = ops::linear(&x, &w.as_tensor().copy().unwrap()).unwrap();
        same(&after, &fresh);
        assert_ne!(elements(&after), elements(&before));
    });
}

#[test]
fn copies_are_freed_with_the_region() {
    if child::ran("precision::cache::copies_are_freed_with_the_region") {
        return;
    }
    let w = var(&[1000, 1000], DType::F32, 1);
    let bytes = || tracker::current_bytes().unwrap() as i64;
    ops::cast(&w, BF16).unwrap(); // starts the threads, which keep their memory
    let before = bytes();
    let copies = |bytes: i64| (bytes - before) as f64 / 2e6;
    inside(|| {
        for _ in 0..3 {
            cast_id(&w);
        }
        assert!(
            (0.99..1.01).contains(&copies(bytes())),
            "{}",
            copies(bytes())
        );
        inside(|| cast_id(&w));
        assert!(
            (0.99..1.01).contains(&copies(bytes())),
            "{}",
            copies(bytes())
        );
    });
    assert!(copies(bytes()) < 0.01, "{}", copies(bytes()));
    let caught = catch_unwind(AssertUnwindSafe(|| {
        inside(|| {
            cast_id(&w);
            resume_unwind(Box::new("inside")); // without the memory of a message and a backtrace
        })
    }));
    assert!(caught.is_err());
    assert!(copies(bytes()) < 0.01, "{}", copies(bytes()));
    let failed = autocast::<()>(Autocast::cuda(BF16), || {
        cast_id(&w);
        Err(tallow::Error::Plot("on purpose".into()))
    });
    assert!(failed.is_err());
    assert!(copies(bytes()) < 0.01, "{}", copies(bytes()));
}
