//! Initial weights: their distribution, and that a seed determines every bit.

use super::*;
use crate::check::refusal;
use candle_nn::Init;
use std::collections::HashSet;
use tallow::nn::{LayerNorm, Linear};

/// Returns a configuration with enough weights for exact moments.
fn middling() -> TransformerConfig {
    TransformerConfig {
        vocab_size: 500,
        d_model: 64,
        num_heads: 4,
        d_ff: 96,
        ..mini()
    }
}

#[test]
fn moments_by_layer() {
    /// The variance of a standard normal distribution truncated at 3.
    const CUT_VARIANCE: f64 = 0.973_34;

    let model = TransformerLM::new(&middling(), 3, &CPU).unwrap();
    let mut pooled = Vec::new();
    for (name, var) in model.parameters() {
        let values = elements(&var);
        if name.contains("ln") {
            assert!(values.iter().all(|v| *v == 1.0), "{name}");
            continue;
        }
        let std = match *var.dims() {
            _ if name.starts_with("token_embeddings") => 1.0,
            [d_out, d_in] => (2.0 / (d_in + d_out) as f64).sqrt(),
            _ => panic!("{name} is no matrix"),
        };
        let values: Vec<f64> = values.iter().map(|v| v / std).collect();
        let n = values.len() as f64;
        let mean = values.iter().sum::<f64>() / n;
        let variance = values.iter().map(|v| v * v).sum::<f64>() / n;
        // Five standard errors each.
        assert!(mean.abs() < 5.0 / n.sqrt(), "{name}: mean {mean}");
        let spread = 5.0 * (2.0 / n).sqrt();
        assert!(
            (variance / CUT_VARIANCE - 1.0).abs() < spread,
            "{name}: variance {variance}"
        );
        let largest = values.iter().fold(0.0, |top: f64, v| top.max(v.abs()));
        // f32 rounding of std may put a value slightly above 3.
        assert!(largest <= 3.0 + 1e-6, "{name}: {largest}");
        assert!(largest > 2.7, "{name}: {largest} is cut too early");
        pooled.extend(values);
    }
    let n = pooled.len() as f64;
    let variance = pooled.iter().map(|v| v * v).sum::<f64>() / n;
    // Exact enough to distinguish truncation at 3 from none (1.0) or at 2.5 (0.911).
    assert!((variance / CUT_VARIANCE - 1.0).abs() < 0.015, "{variance}");
}

#[test]
fn a_seed_settles_every_bit() {
    assert_eq!(all_bits(&mini_model(7)), all_bits(&mini_model(7)));
    let (seven, eight) = (all_bits(&mini_model(7)), all_bits(&mini_model(8)));
    for ((name, a), (_, b)) in seven.iter().zip(&eight) {
        assert_eq!(a == b, name.contains("ln"), "{name}");
        if !name.contains("ln") {
            let shared = a.iter().zip(b).filter(|(a, b)| a == b).count();
            assert!(shared * 100 < a.len(), "{name} shares {shared} values");
        }
    }
}

#[test]
fn no_two_weights_are_drawn_alike() {
    let matrices = all_bits(&mini_model(7)).into_iter();
    let matrices: Vec<_> = matrices.filter(|(name, _)| !name.contains("ln")).collect();
    // The order of a weight's first values identifies its random numbers, whatever the scale.
    let order = |bits: &[u64]| {
        let mut order: Vec<usize> = (0..18).collect();
        order.sort_by(|a, b| f64::from_bits(bits[*a]).total_cmp(&f64::from_bits(bits[*b])));
        order
    };
    let orders: HashSet<_> = matrices.iter().map(|(_, bits)| order(bits)).collect();
    assert_eq!(orders.len(), matrices.len());
}

/// Name, shape and seed determine a weight; creation order, other layers and threads do not matter.
#[test]
fn a_layer_alone_draws_what_the_model_draws() {
    let all = all_bits(&mini_model(7));
    let wanted = &all.last().unwrap().1;
    let vb = nn::seeded(7, DType::F32, &CPU);
    let head = Linear::new(18, 29, vb.pp("lm_head")).unwrap();
    assert_eq!(&bits(head.weight()), wanted);
    for threads in [1, 2, 3] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        assert_eq!(pool.unwrap().install(|| all_bits(&mini_model(7))), all);
    }
}

#[test]
fn dtypes_start_from_the_same_point() {
    let wide = model_of(&mini(), 7, DType::F64);
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let narrow = model_of(&mini(), 7, dtype);
        for ((name, wide), (_, narrow)) in wide.parameters().iter().zip(narrow.parameters()) {
            assert_eq!(narrow.dtype(), dtype, "{name}");
            let rounded = wide.to_dtype(DType::F32).unwrap();
            let rounded = rounded.to_dtype(dtype).unwrap();
            assert_eq!(bits(&rounded), bits(&narrow), "{name} {dtype:?}");
        }
    }
}

/// A GPU draws the CPU's bits, for any length and dtype.
#[cfg(feature = "cuda")]
#[test]
#[ignore = "needs a CUDA device"]
fn a_gpu_draws_the_same() {
    let gpu = crate::gpu();
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
        for elements in [1, 3, 8, 1000, 1_234_567] {
            let draw = |device| {
                let vb = nn::seeded(7 << 33 | 5, dtype, device);
                let normal = Init::Randn {
                    mean: 0.3,
                    stdev: 0.7,
                };
                vb.get_with_hints(elements, "weight", normal).unwrap()
            };
            let (wanted, got) = (draw(&CPU), draw(&gpu));
            assert!(got.device().is_cuda() && got.dtype() == dtype);
            let got = got.to_device(&CPU).unwrap();
            assert!(bits(&got) == bits(&wanted), "{elements} in {dtype:?}");
        }
    }
    let config = mini();
    let model = TransformerLM::new(&config, 7, &gpu).unwrap();
    for ((name, wanted), (_, got)) in mini_model(7).parameters().iter().zip(model.parameters()) {
        assert_eq!(bits(&got.to_device(&CPU).unwrap()), bits(wanted), "{name}");
    }
}

#[test]
fn what_a_seeded_builder_does_not_draw() {
    let vb = seeded(DType::F32);
    let norm = LayerNorm::new(6, 1e-5, vb.pp("norm")).unwrap();
    assert_eq!(elements(norm.weight()), [1.0; 6]);
    assert_eq!(elements(norm.bias().unwrap()), [0.0; 6]);
    let uniform = Init::Uniform { lo: 0.0, up: 1.0 };
    refusal(
        vb.pp("noise").get_with_hints(4, "weight", uniform),
        &["noise.weight", "Uniform"],
    );
    refusal(vb.get_unchecked("weight"), &["shape"]);
}
