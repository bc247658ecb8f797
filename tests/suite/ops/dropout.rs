//! Dropout drops the expected share, other elements for each key, and the same in backward.

use super::case::normal;
use candle_core::{DType, Device, Tensor, Var};
use rstest::rstest;
use tallow::attention::{self, AttentionConfig, FirstKeys, Mask};
use tallow::graph::{self, Target};
use tallow::ops::{self, Dropout, DropoutKey, KernelPolicy, with_kernel_policy};

const CPU: Device = Device::Cpu;

fn dropout(probability: f64, key: DropoutKey) -> Dropout {
    Dropout { probability, key }
}

/// Returns the probability rounded to the 16 bits that dropout uses.
fn rounded_rate(probability: f64) -> f64 {
    (probability * 65_536.0).round() / 65_536.0
}

/// Returns, for each of `elements` ones, whether it is kept.
fn kept(probability: f64, key: &DropoutKey, elements: usize) -> Vec<bool> {
    let x = Tensor::ones(elements, DType::F32, &CPU).unwrap();
    let y = ops::dropout(&x, &dropout(probability, key.clone())).unwrap();
    let y = y.to_vec1::<f32>().unwrap();
    let scale = (1.0 / (1.0 - rounded_rate(probability))) as f32;
    assert!(y.iter().all(|y| *y == 0.0 || *y == scale));
    y.into_iter().map(|y| y != 0.0).collect()
}

/// The counts are within five standard deviations: of all elements, of every eighth (a fixed position in the
/// generator's words), and of pairs at some distances.
#[rstest]
fn as_many_as_it_should(#[values(0.001, 0.1, 0.5, 0.9)] p: f64) {
    let elements = 1_000_003;
    let kept = kept(p, &DropoutKey::new(3, 0).unwrap(), elements);
    let p = rounded_rate(p);
    let near = |count: usize, of: usize, expected: f64| {
        let (mean, deviation) = (
            of as f64 * expected,
            (of as f64 * expected * (1.0 - expected)).sqrt(),
        );
        assert!(
            (count as f64 - mean).abs() <= 5.0 * deviation,
            "{count} of {of}, {mean} expected"
        );
    };
    near(kept.iter().filter(|kept| **kept).count(), elements, 1.0 - p);
    for place in 0..8 {
        let words: Vec<bool> = kept.iter().skip(place).step_by(8).copied().collect();
        near(
            words.iter().filter(|kept| **kept).count(),
            words.len(),
            1.0 - p,
        );
    }
    let both = |apart: usize| {
        kept.iter()
            .zip(&kept[apart..])
            .filter(|(a, b)| **a && **b)
            .count()
    };
    for apart in [1, 2, 8, 128, 1024, 16_384] {
        near(both(apart), elements - apart, (1.0 - p).powi(2));
    }
}

/// With any two keys, half of the elements have the same outcome.
#[test]
fn every_key_has_its_own() {
    let key =
        |seed, step, micro_batch| DropoutKey::of_micro_batch(seed, step, micro_batch).unwrap();
    let first = key(3, 5, 0);
    let others = [
        key(4, 5, 0),
        key(3 + (1 << 32), 5, 0),
        key(3, 6, 0),
        key(3, 5, 1),
        first.at(1),
        first.at(1 << 8),
        first.at((1 << 24) - 1),
    ];
    let elements = 100_000;
    let of = |key: &DropoutKey| kept(0.5, key, elements);
    assert_eq!(of(&first), of(&key(3, 5, 0).at(0)));
    assert_eq!(of(&first.at(7)), of(&first.at(3).at(4)));
    assert_eq!(of(&first), of(&first.at(1 << 24)));
    for (i, other) in others.iter().enumerate() {
        let alike = of(&first)
            .iter()
            .zip(of(other))
            .filter(|(a, b)| **a == *b)
            .count();
        assert!((49_000..51_000).contains(&alike), "{i}: {alike} alike");
    }
    let all = DropoutKey::of_step(3, 5, 0..2).unwrap();
    let rows = [0, 1].map(|micro_batch| key(3, 5, micro_batch).tensor().clone());
    let rows = Tensor::cat(&rows, 0).unwrap();
    assert_eq!(
        all.to_vec2::<u32>().unwrap(),
        rows.to_vec2::<u32>().unwrap()
    );
}

#[test]
fn backward_drops_the_same() {
    let key = DropoutKey::new(9, 2).unwrap();
    let x = Var::from_tensor(&normal(&[7, 301], 1)).unwrap();
    let y = ops::dropout(&x, &dropout(0.4, key.clone())).unwrap();
    let dy = normal(&[7, 301], 2);
    let loss = (&y * &dy).unwrap().sum_all().unwrap();
    let dx = tallow::backward(loss).unwrap().remove(&x).unwrap();
    let wanted = ops::dropout(&dy, &dropout(0.4, key)).unwrap();
    let flat = |x: &Tensor| x.flatten_all().unwrap().to_vec1::<f64>().unwrap();
    assert_eq!(flat(&dx), flat(&wanted));
}

/// If nothing is dropped the result is x itself; a dropped element is 0, even if it was NaN.
#[test]
fn edges() {
    let key = || DropoutKey::new(1, 1).unwrap();
    let x = Tensor::new(&[f32::NAN, f32::INFINITY, -0.0, 1e-45, 3.0], &CPU).unwrap();
    let bits = |x: &Tensor| {
        x.to_vec1::<f32>()
            .unwrap()
            .into_iter()
            .map(f32::to_bits)
            .collect::<Vec<_>>()
    };
    assert_eq!(
        bits(&ops::dropout(&x, &dropout(0.0, key())).unwrap()),
        bits(&x)
    );
    let all = Tensor::full(f32::NAN, 64, &CPU).unwrap();
    let nearly_all = ops::dropout(&all, &dropout(1.0 - 1e-16, key())).unwrap();
    assert_eq!(nearly_all.to_vec1::<f32>().unwrap(), [0.0; 64]);
    for p in [1.0, -0.1, 1.5, f64::NAN, f64::INFINITY] {
        for error in [
            ops::dropout(&x, &dropout(p, key())).unwrap_err(),
            ops::reference::dropout(&x, &dropout(p, key())).unwrap_err(),
        ] {
            let error = error.to_string();
            assert!(
                error.contains("probability") && error.contains("from 0 to under 1"),
                "{error}"
            );
        }
    }
}

/// A key that is an input of a plan has no value yet: the op can be traced with it, its reference cannot.
#[test]
fn of_a_meta_key() {
    let traced = |reference: bool| {
        graph::trace(Target::Cpu, || {
            let x = graph::input("x", (4, 8), DType::F32)?;
            let dropped = dropout(0.5, DropoutKey::input("dropout")?.at(3));
            match reference {
                false => ops::dropout(&x, &dropped),
                true => ops::reference::dropout(&x, &dropped),
            }
        })
    };
    let graph = traced(false).unwrap();
    let node = graph.nodes().next().unwrap();
    assert_eq!((node.op, node.extra_inputs.len()), ("dropout", 1));
    assert!(traced(true).is_err());
}

/// Attention drops probabilities after the softmax.
#[rstest]
fn of_attention(#[values(DType::F32, DType::F64, DType::BF16)] dtype: DType) {
    let draw = |heads: usize, seed| {
        let x = normal(&[2, heads, 9, 8], seed).to_dtype(dtype).unwrap();
        Var::from_tensor(&x).unwrap()
    };
    let [q, k, v] = [draw(4, 1), draw(2, 2), draw(2, 3)];
    let dropped = dropout(0.3, DropoutKey::new(1, 2).unwrap().at(5));
    let config = AttentionConfig {
        mask: Mask::Causal,
        dropout: Some(dropped.clone()),
        ..Default::default()
    };
    let out = attention::naive(&q, &k, &v, &config).unwrap();
    assert_eq!(out.dtype(), dtype);

    let wide = if dtype == DType::F64 {
        DType::F64
    } else {
        DType::F32
    };
    let of_heads = |x: &Var| ops::repeat_heads(&x.to_dtype(wide).unwrap(), 2).unwrap();
    let (k_wide, v_wide) = (of_heads(&k), of_heads(&v));
    let scores = ops::matmul_transposed(&q.to_dtype(wide).unwrap(), &k_wide).unwrap();
    let p = ops::softmax(&scores, 1.0 / 8f64.sqrt(), Mask::Causal).unwrap();
    let flat = p.reshape((8, 9, 9)).unwrap();
    let p = ops::dropout(&flat, &dropped)
        .unwrap()
        .reshape(p.shape())
        .unwrap();
    let wanted = ops::matmul(&p, &v_wide).unwrap().to_dtype(dtype).unwrap();
    let same = |a: &Tensor, b: &Tensor, what: &str| {
        let apart = (a.to_dtype(DType::F64).unwrap() - b.to_dtype(DType::F64).unwrap()).unwrap();
        let apart = apart
            .abs()
            .unwrap()
            .max_all()
            .unwrap()
            .to_scalar::<f64>()
            .unwrap();
        let bound = if dtype == DType::BF16 { 2e-2 } else { 1e-5 };
        assert!(apart <= bound, "{what} is {apart:.1e} off");
    };
    same(&out, &wanted, "out");
    let gradients = [out, wanted].map(|out| tallow::backward(ops::sum(&out).unwrap()).unwrap());
    for (name, x) in [("dq", &q), ("dk", &k), ("dv", &v)] {
        same(
            gradients[0].get(x).unwrap(),
            gradients[1].get(x).unwrap(),
            name,
        );
    }
    let certain = AttentionConfig {
        dropout: Some(dropout(1.0, DropoutKey::new(1, 2).unwrap())),
        ..config
    };
    for error in [
        attention::naive(&q, &k, &v, &certain).unwrap_err(),
        attention::flash(&q, &k, &v, &certain).unwrap_err(),
        attention::reference::flash(&q, &k, &v, &certain).unwrap_err(),
    ] {
        let error = error.to_string();
        assert!(error.contains("from 0 to under 1"), "{error}");
    }
}

/// Each row of the last dimension has its own bits, and a longer row begins with the bits of a shorter one.
#[test]
fn rows_begin_anew() {
    let key = DropoutKey::new(5, 1).unwrap();
    let of = |width: usize| {
        let x = Tensor::ones((3, width), DType::F32, &CPU).unwrap();
        let y = ops::dropout(&x, &dropout(0.5, key.clone())).unwrap();
        y.to_vec2::<f32>().unwrap()
    };
    for (short, long) in [(17, 24), (1, 5), (121, 128), (129, 136), (300, 304)] {
        for (short, long) in of(short).iter().zip(of(long)) {
            assert_eq!(short[..], long[..short.len()]);
        }
    }
}

/// Masks of packed documents and windows apply before dropout, in kernel and reference.
#[rstest]
fn of_packed_attention(#[values(DType::F32, DType::BF16)] dtype: DType) {
    let draw = |heads: usize, seed| {
        let x = normal(&[2, heads, 9, 8], seed).to_dtype(dtype).unwrap();
        Var::from_tensor(&x).unwrap()
    };
    let [q, k, v] = [draw(4, 1), draw(2, 2), draw(2, 3)];
    for mask in [Mask::Causal, Mask::Window(3.try_into().unwrap())] {
        let config = AttentionConfig {
            mask,
            first_keys: Some(FirstKeys::of_lengths(&[vec![4, 5], vec![1, 1, 7]]).unwrap()),
            dropout: Some(dropout(0.3, DropoutKey::new(1, 2).unwrap())),
            ..Default::default()
        };
        let run = |policy| {
            let out = with_kernel_policy(policy, || attention::naive(&q, &k, &v, &config));
            let out = out.unwrap();
            let dout = normal(&[2, 4, 9, 8], 4).to_dtype(dtype).unwrap();
            let loss = (&out * dout).unwrap().sum_all().unwrap();
            let mut gradients = tallow::backward(loss).unwrap();
            let gradients = [&q, &k, &v].map(|x| gradients.remove(x).unwrap());
            gradients.into_iter().chain([out.detach()])
        };
        let bound = if dtype == DType::F32 { 1e-5 } else { 2e-2 };
        for (got, wanted) in run(KernelPolicy::Strict).zip(run(KernelPolicy::Reference)) {
            let apart = (got - wanted).unwrap().to_dtype(DType::F64).unwrap();
            let apart = apart.abs().unwrap().max_all().unwrap();
            assert!(
                apart.to_scalar::<f64>().unwrap() <= bound,
                "{mask}: {apart}"
            );
        }
    }
}

/// A GPU has the CPU's bits, for any length and any offset.
#[cfg(feature = "cuda")]
#[rstest]
#[ignore = "needs a CUDA device"]
fn on_a_gpu(#[values(DType::F32, DType::F16, DType::BF16)] dtype: DType) {
    let gpu = crate::gpu();
    let shapes = [1, 3, 64, 4096, 4099, 1_000_003].map(|elements| (1, elements));
    for (rows, width) in shapes
        .into_iter()
        .chain([(1000, 1), (999, 3), (77, 41), (30, 4099)])
    {
        let elements = rows * width;
        for (p, micro_batch, site, skipped) in [(0.1, 0, 0, 0), (0.5, 3, 70_000, 1), (0.0, 1, 5, 3)]
        {
            let x = normal(&[elements + skipped], 4).to_dtype(dtype).unwrap();
            let key = DropoutKey::of_micro_batch(1 << 40 | 77, 123_456, micro_batch).unwrap();
            let dropped = dropout(p, key.at(site));
            let at = |device: &Device| {
                let x = x
                    .to_device(device)
                    .unwrap()
                    .narrow(0, skipped, elements)
                    .unwrap();
                let x = x.reshape((rows, width)).unwrap();
                let x = Var::from_tensor(&x).unwrap();
                let y = ops::dropout(&x, &dropped).unwrap();
                let loss = (&y * &y).unwrap().sum_all().unwrap();
                let dx = tallow::backward(loss).unwrap().remove(&x).unwrap();
                [y.detach(), dx].map(|x| {
                    let x = x.to_device(&CPU).unwrap().to_dtype(DType::F32).unwrap();
                    let x = x.flatten_all().unwrap();
                    let x = x.to_vec1::<f32>().unwrap().into_iter();
                    x.map(f32::to_bits).collect::<Vec<_>>()
                })
            };
            assert!(
                at(&CPU) == at(&gpu),
                "{rows} rows of {width} in {dtype:?}, p {p}"
            );
        }
    }
}
