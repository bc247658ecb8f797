//! `tallow::backward` against candle's own backward.

use crate::check::{elements, refusal};
use crate::settings::with_weights;
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result as CandleResult, Tensor, Var};
use rstest::rstest;
use tallow::attention::Algorithm;
use tallow::memory::tracker;
use tallow::model::TransformerLM;
use tallow::ops::{KernelPolicy, with_kernel_policy};
use tallow::precision::{Precision, Regime};
use tallow::{Error, Result, backward, backward_from, nn, ops};

const CPU: Device = Device::Cpu;

fn numbers(dims: &[usize], salt: u32) -> Tensor {
    let count: usize = dims.iter().product();
    let number =
        |i: usize| (((i as u32 * 2_654_435_761) ^ salt.wrapping_mul(97_531)) % 1999) as f32;
    let all: Vec<f32> = (0..count).map(|i| number(i) / 1000.0 - 1.0).collect();
    Tensor::from_vec(all, dims, &CPU).unwrap()
}

fn var(dims: &[usize], salt: u32) -> Var {
    Var::from_tensor(&numbers(dims, salt)).unwrap()
}

/// Returns the bits of the numbers; zeros, whose sign may differ, count as +0.
fn bits(x: &Tensor) -> Vec<u64> {
    let elements = elements(x).into_iter();
    elements.map(|x| (x + 0.0).to_bits()).collect()
}

fn all_bits(gradients: &GradStore, vars: &[Var]) -> Vec<Option<Vec<u64>>> {
    vars.iter()
        .map(|var| gradients.get(var).map(bits))
        .collect()
}

/// Checks that both backwards give the same gradients of `loss` for `vars`.
fn same(loss: impl Fn() -> Result<Tensor>, vars: &[Var]) {
    let wanted = all_bits(&loss().unwrap().backward().unwrap(), vars);
    let kept = loss().unwrap();
    for loss in [loss().unwrap(), kept.clone(), kept] {
        let found = all_bits(&backward(loss).unwrap(), vars);
        assert_eq!(found, wanted);
    }
}

/// Returns a meta model.
fn meta(layers: usize, attention: Algorithm, checkpointing: &str) -> TransformerLM {
    let model = crate::checkpoint::model::meta(layers, attention);
    model.with_checkpointing(checkpointing.parse().unwrap())
}

fn ids(salt: u32) -> Tensor {
    let ids = (0..66).map(|i: u32| (i * i + 7 * salt) % 29).collect();
    Tensor::from_vec::<_, u32>(ids, (2, 33), &CPU).unwrap()
}

#[rstest]
fn a_model_has_candles_gradients(
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
    #[values("none", "block", "every-2")] checkpointing: &str,
    #[values(
        Precision::F32,
        Precision::BF16,
        Precision::BF16.with_dropped_casts(true),
        Precision::F16.with_regime(Regime::Full)
    )]
    precision: Precision,
    #[values(KernelPolicy::Prefer, KernelPolicy::Reference)] policy: KernelPolicy,
) {
    let weights = nn::seeded(3, precision.parameter_dtype(), &CPU);
    let meta = meta(3, attention, checkpointing);
    let model = with_weights(&meta, weights);
    let parameters = model.parameters().into_iter();
    let vars: Vec<Var> = parameters.map(|(_, var)| var).collect();
    let loss = || with_kernel_policy(policy, || precision.run(|| model.loss(&ids(1), &ids(2))));
    same(loss, &vars);
}

type Function = fn(&[Var]) -> Result<Tensor>;

fn gelu(x: &Tensor) -> Result<Tensor> {
    ops::gelu(x, ops::Gelu::Erf)
}

/// The variables have shapes (4, 6), (4, 6) and (6).
#[rstest]
#[case::residual(|v: &[Var]| {
    let x = ops::relu(&v[0])?;
    let y = ops::add(&x, &gelu(&x)?)?;
    ops::sum(&ops::add(&y, &ops::add(&x, &v[1])?)?)
})]
#[case::one_variable_many_times(|v: &[Var]| {
    let x = ops::mul(&v[0], &v[0])?;
    let x = ops::add(&ops::add(&x, &v[0])?, &v[0])?;
    ops::sum(&ops::mul(&x, &v[0])?)
})]
#[case::transposed(|v: &[Var]| {
    let x = ops::relu(&v[0])?;
    let x = x.reshape((2, 2, 6))?.transpose(0, 1)?.transpose(1, 2)?;
    ops::sum(&ops::mul(&ops::contiguous(&x)?, &ops::contiguous(&x)?)?)
})]
#[case::parts_of_one(|v: &[Var]| {
    let x = ops::silu(&v[0])?;
    let parts = [x.narrow(1, 0, 3)?, x.narrow(1, 2, 3)?, x.narrow(0, 1, 2)?.narrow(1, 1, 3)?];
    let [a, b, c] = parts.map(|part| ops::sum(&gelu(&part).unwrap()).unwrap());
    ops::add(&ops::add(&a, &b)?, &c)
})]
#[case::a_view_read_twice(|v: &[Var]| {
    let x = ops::relu(&v[0])?;
    let part = x.narrow(0, 0, 2)?;
    let sums = [ops::sum(&gelu(&part)?)?, ops::sum(&ops::silu(&part)?)?, ops::sum(&ops::mul(&x, &v[1])?)?];
    ops::add(&ops::add(&sums[0], &sums[1])?, &sums[2])
})]
#[case::a_view_of_a_variable(|v: &[Var]| ops::sum(&ops::mul(&ops::contiguous(&v[0].t()?)?, &v[1].reshape((6, 4))?)?))]
#[case::broadcast(|v: &[Var]| {
    let bias = ops::relu(&v[2])?.broadcast_as((4, 6))?;
    ops::sum(&ops::mul(&gelu(&bias)?, &v[0])?)
})]
#[case::candles_loss(|v: &[Var]| Ok((ops::linear(&v[0], &v[1])?.sqr()?.mean_all()? * 3.0)?))]
#[case::candle_between(|v: &[Var]| {
    let x = gelu(&v[0])?;
    let y = ops::relu(&x.broadcast_mul(&v[2])?)?; // candle's op
    let z = ops::mul(&y, &ops::add(&x, &v[0])?)?;
    ops::sum(&ops::mul(&z, &ops::relu(&v[0])?)?)
})]
#[case::candle_reads_what_is_ours(|v: &[Var]| {
    let x = gelu(&v[0])?;
    let mean = x.mean_keepdim(1)?.broadcast_as((4, 6))?; // candle's op
    let y = ops::mul(&x, &mean)?;
    ops::sum(&ops::add(&y, &v[0])?)
})]
#[case::not_everything_is_reached(|v: &[Var]| {
    let x = ops::relu(&v[0])?;
    ops::sum(&ops::mul(&x, &ops::relu(&v[1])?.detach())?)
})]
#[case::nothing(|v: &[Var]| ops::sum(&ops::relu(&v[0].narrow(0, 0, 0)?)?))]
fn functions_have_candles_gradients(#[case] f: Function) {
    let vars = [var(&[4, 6], 1), var(&[4, 6], 2), var(&[6], 3)];
    same(|| f(&vars), &vars);
}

#[test]
fn a_loss_has_one_element() {
    let one = [var(&[1, 1], 1)];
    same(|| Ok(one[0].as_tensor().clone()), &one); // the variable itself
    for loss in [var(&[4, 6], 1), var(&[0], 1)] {
        let got = format!("{:?}", loss.dims());
        let parts = ["backward", "a loss of one element", &got, "backward_from"];
        refusal(tallow::backward(loss.as_tensor().clone()), &parts);
    }
}

#[test]
fn from_a_gradient() -> CandleResult<()> {
    let (x, w) = (var(&[3, 5], 1), var(&[4, 5], 2));
    let dy = numbers(&[3, 4], 3);
    let y = || ops::linear(&ops::relu(&x).unwrap(), &w).unwrap();
    let wanted = (y() * &dy)?.sum_all()?.backward()?;
    // A gradient that is a view, and is not changed.
    let given = dy.t()?.contiguous()?.t()?;
    let found = backward_from(y(), &given).unwrap();
    let vars = [x.clone(), w.clone()];
    assert_eq!(all_bits(&found, &vars), all_bits(&wanted, &vars));
    assert_eq!(bits(&given), bits(&dy));

    let error = backward_from(y(), &numbers(&[4, 3], 1)).unwrap_err();
    assert!(matches!(
        error,
        Error::Shape {
            op: "backward_from",
            ..
        }
    ));
    let error = backward_from(y(), &dy.to_dtype(DType::F64)?).unwrap_err();
    assert!(matches!(
        error,
        Error::DType {
            op: "backward_from",
            ..
        }
    ));
    Ok(())
}

/// The gradient passed by the caller is only read, although it is that of several tensors.
#[test]
fn the_first_gradient_is_not_written() -> CandleResult<()> {
    let x = var(&[3, 5], 1);
    let (dy, before) = (numbers(&[3, 5], 2), numbers(&[3, 5], 2));
    let y = ops::add(&x, &ops::add(&x, &x).unwrap()).unwrap();
    let found = backward_from(y, &dy).unwrap();
    assert_eq!(bits(&dy), bits(&before));
    assert_eq!(bits(found.get(&x).unwrap()), bits(&((&dy + &dy)? + &dy)?));
    Ok(())
}

/// Returned gradients are independent: changing one changes neither another nor the gradient passed by the caller.
#[test]
fn gradients_are_independent() -> CandleResult<()> {
    let (a, b) = (var(&[3, 5], 1), var(&[3, 5], 2));
    let (dy, before) = (numbers(&[3, 5], 3), numbers(&[3, 5], 3));
    let parameters = [("a".to_string(), a.clone()), ("b".to_string(), b.clone())];
    let mut accumulator = tallow::optim::GradientAccumulator::new(parameters.clone());
    let run = || backward_from(ops::add(&a, &b).unwrap(), &dy).unwrap();
    for _ in 0..3 {
        let mut gradients = run();
        tallow::optim::clip_grad_norm(&mut gradients, &parameters, 1e-3).unwrap();
        assert_eq!(bits(&dy), bits(&before));
        accumulator.add(run()).unwrap();
    }
    let sum = accumulator.sum().unwrap();
    assert_eq!(bits(sum.get(&b).unwrap()), bits(&((&dy + &dy)? + &dy)?));
    assert_eq!(bits(&dy), bits(&before));
    Ok(())
}

/// Saved tensors of a chain of ops are freed during backward, unless the caller still holds them.
#[test]
fn the_graph_is_freed() {
    if crate::child::ran("backward::the_graph_is_freed") {
        return;
    }
    const BYTES: u64 = 4 << 20;
    let x = var(&[1 << 20], 1);
    let chain = || {
        (0..10)
            .try_fold(x.as_tensor().clone(), |x, _| gelu(&x))
            .unwrap()
    };
    let peak = |loss: Tensor, run: fn(Tensor) -> GradStore| {
        let before = tracker::current_bytes().unwrap();
        tracker::reset_peak();
        drop(run(loss));
        tracker::peak_bytes().unwrap() - before
    };
    let loss = || ops::sum(&chain()).unwrap();
    let ours = peak(loss(), |loss| backward(loss).unwrap());
    let candles = peak(loss(), |loss| loss.backward().unwrap());
    // Two gradients in addition to the activations; the first activation is freed when the second gradient is
    // allocated.
    assert!(ours < 2 * BYTES + BYTES / 8, "{ours}");
    assert!(candles > 3 * BYTES, "{candles}");
    let (kept, tail) = (chain(), |x: &Tensor| {
        ops::sum(&ops::relu(x).unwrap()).unwrap()
    });
    let loss = tail(&kept);
    backward(loss).unwrap();
    assert_eq!(bits(&kept), bits(&chain()));
    backward(tail(&kept)).unwrap(); // its graph still exists
}

/// Backward runs on threads other than forward's, on several at the same time.
#[test]
fn threads_do_not_meet() {
    let model = with_weights(
        &meta(2, Algorithm::Naive, "every-1"),
        nn::seeded(1, DType::F32, &CPU),
    );
    let parameters = model.parameters().into_iter();
    let vars: Vec<Var> = parameters.map(|(_, var)| var).collect();
    let loss = model.loss(&ids(1), &ids(2)).unwrap();
    let wanted = all_bits(&loss.backward().unwrap(), &vars);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..3 {
                    let found = backward(loss.clone()).unwrap();
                    assert!(all_bits(&found, &vars) == wanted);
                }
            });
        }
    });
}
