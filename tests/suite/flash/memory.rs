//! Scratch memory of the flash kernel, at a size where materialized probabilities would need gigabytes.

use crate::child;
use tallow::attention::Mask;
use tallow::internals::flash::{
    ForwardInputs, Gradients, Heads, Inputs, Masks, Outputs, Sizes, Tiles, backward, forward,
};
use tallow::memory::tracker;

const MIB: u64 = 1 << 20;

/// B8 T16384 D64: scores and probabilities would be 8 GiB each.
#[test]
fn scratch_stays_small() {
    if child::ran("flash::memory::scratch_stays_small") {
        return;
    }
    let (batch, length, head_dim) = (8, 16_384, 64);
    let sizes = Sizes {
        batch,
        heads: 1,
        kv_heads: 1,
        queries: length,
        keys: length,
        head_dim,
        value_dim: head_dim,
        mask: Mask::Causal,
        scale: 0.125,
        soft_cap: None,
    };
    let tiles = Tiles::for_head_dim(head_dim);
    let n = batch * length * head_dim;
    let values =
        |phase: f32| -> Vec<f32> { (0..n).map(|i| (i as f32 * 0.37 + phase).sin()).collect() };
    let (q, k, v, d_out) = (values(0.0), values(1.0), values(2.0), values(3.0));
    let (mut out, mut lse) = (vec![0f32; n], vec![0f32; batch * length]);
    let (mut dq, mut dk, mut dv) = (vec![0f32; n], vec![0f32; n], vec![0f32; n]);
    let view = |data| Heads {
        data,
        strides: [length * head_dim, length * head_dim, head_dim, 1],
    };
    let [q, k, v, d_out] = [&q, &k, &v, &d_out].map(|data| view(data.as_slice()));

    let before = tracker::current_bytes().expect("the suite's allocator counts");
    tracker::reset_peak();
    let outputs = Outputs {
        out: &mut out,
        rounding_error: &mut [],
        lse: &mut lse,
    };
    let inputs = ForwardInputs {
        q,
        k,
        v,
        first_keys: &[],
        masks: Masks::NONE,
        dropout: None,
    };
    forward(&sizes, &tiles, inputs, outputs);
    let inputs = Inputs {
        q,
        k,
        v,
        out: view(&out),
        rounding_error: None,
        lse: &lse,
        d_out,
        first_keys: &[],
        masks: Masks::NONE,
        dropout: None,
    };
    let gradients = Gradients {
        dq: &mut dq,
        dk: &mut dk,
        dv: &mut dv,
    };
    backward(&sizes, &tiles, inputs, gradients);
    let beyond = tracker::peak_bytes().expect("as above") - before;
    let delta_bytes = 4 * (batch * length) as u64;
    println!("{} KiB", (beyond - delta_bytes) / 1024);
    assert!(beyond - delta_bytes < 64 * MIB, "{beyond} bytes");
    // The results are attention: some rows are compared with plain sums.
    for query in [0, 1, 777, length - 1] {
        let row = |x: Heads<'_, f32>, t: usize| x.data[t * head_dim..(t + 1) * head_dim].to_vec();
        let q_row = row(q, query);
        let scores: Vec<f64> = (0..=query)
            .map(|key| {
                let products = row(k, key).into_iter().zip(&q_row);
                products
                    .map(|(k, q)| f64::from(k) * f64::from(*q))
                    .sum::<f64>()
                    * 0.125
            })
            .collect();
        let sum: f64 = scores.iter().map(|score| score.exp()).sum();
        assert!((f64::from(lse[query]) - sum.ln()).abs() < 1e-5);
    }
}
