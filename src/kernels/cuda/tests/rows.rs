//! Row kernels: norms with x wider than y, gates and probabilities in place, heads in wider rows, casts.

use super::super::norm::{self, Gradients, Inputs, Outputs};
use super::super::{cast, gated, rope, softmax};
use super::{Buffer, Element, assert_close, bits, gpu, numbers, poison, wide};
use crate::kernels::workspace::norm_partials;
use crate::kernels::{Gate, Mask, Norm};
use candle_core::cuda_backend::CudaDevice;
use half::{bf16, f16};

#[test]
#[ignore = "needs a CUDA device"]
fn norms_of_a_wider_stream() {
    let gpu = gpu();
    // Rows of one warp and of many; one and several rows per block, also in turns; idle threads.
    for (rows, width) in [
        (1, 1),
        (7, 65),
        (5, 512),
        (3001, 64),
        (301, 1000),
        (3, 8192),
    ] {
        for offset in [0, 1] {
            for of in [Norm::Rms, Norm::OffsetRms, Norm::Layer] {
                norm::<f32, f32>(&gpu, of, rows, width, offset);
                norm::<f32, bf16>(&gpu, of, rows, width, offset);
                norm::<f32, f16>(&gpu, of, rows, width, offset);
                norm::<bf16, bf16>(&gpu, of, rows, width, offset);
            }
        }
    }
}

/// Returns y, the statistics, dx, dw and db in f64; `s` is the input of the norm.
fn exact(of: Norm, eps: f64, s: &[f64], dy: &[f64], weight: &[f64], bias: &[f64]) -> [Vec<f64>; 5] {
    let width = weight.len();
    let count = width as f64;
    let [mut y, mut statistics, mut dx] = [Vec::new(), Vec::new(), Vec::new()];
    let [mut dw, mut db] = [vec![0.0; width], vec![0.0; width]];
    let first = if of == Norm::OffsetRms { 1.0 } else { 0.0 };
    let weight: Vec<f64> = weight.iter().map(|w| first + w).collect();
    let mean = |x: &[f64]| match of {
        Norm::Rms | Norm::OffsetRms => 0.0,
        Norm::Layer => x.iter().sum::<f64>() / count,
    };
    for (s, dy) in s.chunks(width).zip(dy.chunks(width)) {
        let of_row = mean(s);
        let squares: f64 = s.iter().map(|s| (s - of_row).powi(2)).sum();
        let rstd = 1.0 / (squares / count + eps).sqrt();
        if of == Norm::Layer {
            statistics.push(of_row);
        }
        statistics.push(rstd);
        let h: Vec<f64> = s.iter().map(|s| (s - of_row) * rstd).collect();
        let g: Vec<f64> = dy.iter().zip(&weight).map(|(dy, w)| dy * w).collect();
        let of_g = mean(&g);
        let of_gh = g.iter().zip(&h).map(|(g, h)| g * h).sum::<f64>() / count;
        for i in 0..width {
            y.push(h[i] * weight[i] + bias[i]);
            dx.push(rstd * (g[i] - of_g - h[i] * of_gh));
            dw[i] += dy[i] * h[i];
            db[i] += dy[i];
        }
    }
    [y, statistics, dx, dw, db]
}

fn norm<X: Element, Y: Element>(
    gpu: &CudaDevice,
    of: Norm,
    rows: usize,
    width: usize,
    offset: usize,
) {
    let n = rows * width;
    let [x, before] = [1, 2].map(|seed| numbers::<X>(n, seed));
    let [branch, dy] = [3, 4].map(|seed| numbers::<Y>(n, seed));
    let [weight, dw_before, db_before] = [5, 6, 7].map(|seed| numbers::<f32>(width, seed));
    let bias = match of {
        Norm::Rms | Norm::OffsetRms => vec![0.0; width],
        Norm::Layer => numbers::<f32>(width, 8),
    };
    let eps = if width <= 2 { 2.0 } else { 1e-5 }; // in shorter rows of LayerNorm dx is only a rounding error
    let exact_of = |s: &[f64]| exact(of, eps, s, &wide(&dy), &wide(&weight), &wide(&bias));
    let on_gpu = Buffer::new(gpu, &x, offset);
    let [weights, biases] = [&weight, &bias].map(|values| Buffer::new(gpu, values, offset));
    let (weight_view, bias_view) = (weights.view(gpu), biases.view(gpu));
    let inputs = |x, branch| Inputs {
        x,
        branch,
        weight: weight_view,
        bias: (of == Norm::Layer).then_some(bias_view),
    };
    let forward = |inputs, sum| {
        let y = Buffer::<Y>::unwritten(gpu, n, offset);
        let statistics = Buffer::<f32>::unwritten(gpu, rows * of.statistics(), offset);
        let outputs = Outputs {
            sum,
            y: y.view(gpu),
            statistics: statistics.view(gpu),
        };
        norm::forward(gpu, of, eps, inputs, outputs).unwrap();
        (y.read(gpu), statistics)
    };
    let x_view = on_gpu.view(gpu);
    let (y, statistics) = forward(inputs(x_view, None), None);
    let [exact_y, exact_statistics, ..] = exact_of(&wide(&x));
    assert_close("y", &y, &exact_y);
    assert_close("statistics", &statistics.read(gpu), &exact_statistics);

    // With the sum written over x.
    let x_apart = Buffer::new(gpu, &x, offset);
    let branch_on_gpu = Buffer::new(gpu, &branch, offset);
    let branch_view = branch_on_gpu.view(gpu);
    let (y, statistics) = forward(inputs(x_view, Some(branch_view)), Some(x_view));
    let sum = wide(&on_gpu.read(gpu));
    let exact_sum = wide(&x).into_iter().zip(wide(&branch));
    let exact_sum: Vec<f64> = exact_sum.map(|(x, branch)| x + branch).collect();
    assert_close("sum", &on_gpu.read(gpu), &exact_sum);
    let [exact_y, exact_statistics, exact_dx, exact_dw, exact_db] = exact_of(&sum);
    assert_close("y of the sum", &y, &exact_y);
    assert_close("its statistics", &statistics.read(gpu), &exact_statistics);

    // Without writing the sum, the results are the same.
    let (y_alone, alone) = forward(inputs(x_apart.view(gpu), Some(branch_view)), None);
    assert_eq!(bits(&y_alone), bits(&y));
    assert_eq!(bits(&alone.read(gpu)), bits(&statistics.read(gpu)));
    assert_eq!(bits(&x_apart.read(gpu)), bits(&x));

    let statistics_view = statistics.view(gpu);
    let backward = |inputs: Inputs| {
        let on_gpu = Buffer::new(gpu, &dy, offset);
        let dx = Buffer::new(gpu, &before, offset);
        let [dw, db] = [&dw_before, &db_before].map(|before| Buffer::new(gpu, before, offset));
        let copy = Buffer::<Y>::unwritten(gpu, n, offset);
        let partials = Buffer::<f32>::unwritten(gpu, norm_partials(of, rows, width), 0);
        let gradients = Gradients {
            dx: dx.view(gpu),
            add_dx: true,
            copy: Some(copy.view(gpu)),
            y: Some(on_gpu.view(gpu)), // in place of dy
            dw: dw.view(gpu),
            add_dw: true,
            db: (of == Norm::Layer).then(|| db.view(gpu)),
            add_db: true,
        };
        let (read, scratch) = ([on_gpu.view(gpu), statistics_view], partials.view(gpu));
        norm::backward(gpu, of, read, inputs, gradients, scratch).unwrap();
        partials.read(gpu);
        let [copy, y_again] = [copy, on_gpu].map(|buffer| buffer.read(gpu));
        (dx.read(gpu), copy, y_again, dw.read(gpu), db.read(gpu))
    };
    let with = |before: Vec<f64>, exact: Vec<f64>| -> Vec<f64> {
        before.iter().zip(exact).map(|(a, b)| a + b).collect()
    };
    let (dx, copy, y_again, dw, db) = backward(inputs(x_view, None));
    let exact_dx = with(wide(&before), exact_dx);
    assert_close("dx", &dx, &exact_dx);
    assert_close("dx once more", &copy, &exact_dx);
    assert_eq!(bits(&y_again), bits(&y));
    assert_close("dw", &dw, &with(wide(&dw_before), exact_dw));
    match of {
        Norm::Rms | Norm::OffsetRms => assert_eq!(bits(&db), bits(&db_before)),
        Norm::Layer => assert_close("db", &db, &with(wide(&db_before), exact_db)),
    }
    // Backward from x and a narrower branch gives the same bits as from their sum.
    if X::DTYPE != Y::DTYPE {
        let again = backward(inputs(x_apart.view(gpu), Some(branch_view)));
        assert_eq!(bits(&again.0), bits(&dx));
        assert_eq!(bits(&again.1), bits(&copy));
        assert_eq!(bits(&again.2), bits(&y_again));
        assert_eq!(bits(&again.3), bits(&dw));
        assert_eq!(bits(&again.4), bits(&db));
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn gates_in_place_and_packed() {
    let gpu = gpu();
    for (rows, width) in [(1, 1), (5, 7), (33, 24), (3, 1031), (257, 512), (700, 8)] {
        for offset in [0, 1] {
            for f in [Gate::Silu, Gate::Gelu, Gate::GeluTanh] {
                gate::<f32>(f, &gpu, rows, width, offset);
                gate::<f16>(f, &gpu, rows, width, offset);
                gate::<bf16>(f, &gpu, rows, width, offset);
            }
        }
    }
}

fn gate<T: Element>(f: Gate, gpu: &CudaDevice, rows: usize, width: usize, offset: usize) {
    let packed = numbers::<T>(rows * 2 * width, 1);
    let dy = numbers::<T>(rows * width, 2);
    let half = |second: usize| -> Vec<T> {
        let rows = packed.chunks(2 * width);
        rows.flat_map(|row| row[second * width..][..width].to_vec())
            .collect()
    };
    let (gate, up) = (half(0), half(1));
    let (mut y, mut dgate, mut dup) = (Vec::new(), Vec::new(), Vec::new());
    for ((g, u), d) in wide(&gate).into_iter().zip(wide(&up)).zip(wide(&dy)) {
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let (s, slope) = match f {
            Gate::Silu => (sigmoid(g), sigmoid(g) * sigmoid(-g)),
            Gate::Gelu => {
                let root = std::f64::consts::FRAC_1_SQRT_2;
                let density = (-0.5 * g * g).exp() / (2.0 * std::f64::consts::PI).sqrt();
                (
                    0.5 * (1.0 + candle_core::cpu::erf::erf_f64(g * root)),
                    density,
                )
            }
            Gate::GeluTanh => {
                let double = 2.0 * (2.0 / std::f64::consts::PI).sqrt();
                let s = sigmoid(double * (g + 0.044715 * g.powi(3)));
                (s, s * (1.0 - s) * double * (1.0 + 3.0 * 0.044715 * g * g))
            }
        };
        y.push(g * s * u);
        dgate.push(d * u * (s + g * slope));
        dup.push(d * g * s);
    }

    let [gate, up, dy_apart] = [&gate, &up, &dy].map(|values| Buffer::new(gpu, values, offset));
    let views = [gate.view(gpu), up.view(gpu), dy_apart.view(gpu)];
    gated::backward_in_place(gpu, f, views[0], views[1], views[2]).unwrap();
    assert_close("dgate", &gate.read(gpu), &dgate);
    assert_close("dup", &up.read(gpu), &dup);
    assert_close("y again", &dy_apart.read(gpu), &y);

    let gate_up = Buffer::new(gpu, &packed, offset);
    let out = Buffer::<T>::unwritten(gpu, rows * width, offset);
    gated::packed_forward(gpu, f, gate_up.view(gpu), out.view(gpu), width).unwrap();
    assert_close("packed y", &out.read(gpu), &y);
    assert_eq!(bits(&gate_up.read(gpu)), bits(&packed));
    let dy = Buffer::new(gpu, &dy, offset);
    gated::packed_backward_in_place(gpu, f, gate_up.view(gpu), dy.view(gpu), width).unwrap();
    let of_gates = dgate.chunks(width).zip(dup.chunks(width));
    let both: Vec<f64> = of_gates
        .flat_map(|(gate, up)| [gate, up].concat())
        .collect();
    assert_close("packed gradients", &gate_up.read(gpu), &both);
    assert_close("packed y again", &dy.read(gpu), &y);
}

#[test]
#[ignore = "needs a CUDA device"]
fn probabilities_in_place() {
    let gpu = gpu();
    for (queries, keys) in [(1, 1), (33, 41), (41, 33), (64, 64), (7, 1031), (3, 40_001)] {
        for mask in [Mask::Full, Mask::Causal, Mask::CausalEnd] {
            probabilities::<f32>(&gpu, mask, queries, keys);
            probabilities::<f16>(&gpu, mask, queries, keys);
            probabilities::<bf16>(&gpu, mask, queries, keys);
        }
    }
}

fn probabilities<T: Element>(gpu: &CudaDevice, mask: Mask, queries: usize, keys: usize) {
    let (batch, scale) = (2, 0.7);
    let scores = softmax::Scores {
        scale,
        mask,
        queries,
        keys,
        first_keys: None,
        heads: 1,
        first_head: 0,
        masked: false,
        shown: None,
    };
    let [x, dp] = [1, 2].map(|seed| numbers::<T>(batch * queries * keys, seed));
    let mut exact = vec![0.0; x.len()];
    for (row, (p, x)) in exact.chunks_mut(keys).zip(x.chunks(keys)).enumerate() {
        let visible = mask.visible(row % queries, queries, keys).end;
        for (p, x) in p[..visible].iter_mut().zip(x) {
            *p = (scale * x.to_f64()).exp();
        }
        let total: f64 = p.iter().sum();
        p.iter_mut()
            .for_each(|p| *p /= if total > 0.0 { total } else { 1.0 });
    }
    let p = Buffer::new(gpu, &x, 0);
    softmax::forward(gpu, scores, p.view(gpu), p.view(gpu)).unwrap();
    assert_close("p", &p.read(gpu), &exact);
    // Scores in f32, as matmuls write them, with results in any dtype.
    let [x, dp] = [x, dp].map(|values| -> Vec<f32> {
        let narrow = values.iter().map(|x| x.to_f64() as f32);
        narrow.collect()
    });
    let (x, dp_on_gpu) = (Buffer::new(gpu, &x, 0), Buffer::new(gpu, &dp, 0));
    softmax::forward(gpu, scores, x.view(gpu), p.view(gpu)).unwrap();
    assert_close("p of f32", &p.read(gpu), &exact);

    let p_as_it_is = wide(&p.read(gpu));
    let mut exact = wide(&dp);
    for (dx, p) in exact.chunks_mut(keys).zip(p_as_it_is.chunks(keys)) {
        let inner: f64 = dx.iter().zip(p).map(|(dp, p)| dp * p).sum();
        for (dx, p) in dx.iter_mut().zip(p) {
            *dx = scale * p * (*dx - inner);
        }
    }
    let dx = Buffer::<T>::unwritten(gpu, dp.len(), 0);
    let from = [dp_on_gpu.view(gpu), p.view(gpu)];
    softmax::backward_from_p(gpu, scores, from, dx.view(gpu)).unwrap();
    assert_close("dx", &dx.read(gpu), &exact);
}

#[test]
#[ignore = "needs a CUDA device"]
fn heads_turned_where_they_lie() {
    let gpu = gpu();
    for (length, heads, head_dim) in [(1, 1, 2), (33, 3, 24), (64, 2, 64), (5, 9, 10)] {
        turned::<f32>(&gpu, length, heads, head_dim);
        turned::<f16>(&gpu, length, heads, head_dim);
        turned::<bf16>(&gpu, length, heads, head_dim);
    }
}

/// Rotates q and k in packed rows of q, k and v.
fn turned<T: Element>(gpu: &CudaDevice, length: usize, heads: usize, head_dim: usize) {
    let (batch, row, half) = (3, 3 * heads * head_dim, head_dim / 2);
    let qkv = numbers::<T>(batch * length * row, 1);
    let angles = numbers::<f32>(length * half, 2);
    let [cos, sin] = [f32::cos, f32::sin].map(|f| angles.iter().map(|a| f(*a)).collect::<Vec<_>>());
    for back in [false, true] {
        let mut exact = wide(&qkv);
        for (position, row) in exact.chunks_mut(row).enumerate() {
            for (pair, x) in row[..2 * heads * head_dim].chunks_mut(2).enumerate() {
                let angle = position % length * half + pair % half;
                let (c, s) = (f64::from(cos[angle]), f64::from(sin[angle]));
                let s = if back { -s } else { s };
                (x[0], x[1]) = (x[0] * c - x[1] * s, x[0] * s + x[1] * c);
            }
        }
        let on_gpu = Buffer::new(gpu, &qkv, 0);
        let [cos, sin] = [&cos, &sin].map(|table| Buffer::new(gpu, table, 0));
        let sizes = rope::PackedHeads {
            batch,
            length,
            heads: 2 * heads,
            head_dim,
            row,
        };
        let tables = [cos.view(gpu), sin.view(gpu)];
        let turn = rope::Rotation {
            by_halves: false,
            inverse: back,
        };
        rope::in_place(gpu, on_gpu.view(gpu), tables, &sizes, turn).unwrap();
        assert_close("q, k, v", &on_gpu.read(gpu), &exact);
        let v = |values: &[T]| -> Vec<u64> {
            let rows = values.chunks(row);
            rows.flat_map(|row| bits(&row[2 * heads * head_dim..]))
                .collect()
        };
        assert_eq!(v(&on_gpu.read(gpu)), v(&qkv), "v is not turned");
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn casts_round_once() {
    let gpu = gpu();
    for n in [1, 5, 4096, 12_291] {
        for offset in [0, 1] {
            casts_from::<f32>(&gpu, n, offset);
            casts_from::<f16>(&gpu, n, offset);
            casts_from::<bf16>(&gpu, n, offset);
        }
    }
}

fn casts_from<X: Element>(gpu: &CudaDevice, n: usize, offset: usize) {
    casts::<X, f32>(gpu, n, offset);
    casts::<X, f16>(gpu, n, offset);
    casts::<X, bf16>(gpu, n, offset);
}

fn casts<X: Element, Y: Element>(gpu: &CudaDevice, n: usize, offset: usize) {
    let x = numbers::<X>(n, 1);
    let (from, to) = (
        Buffer::new(gpu, &x, offset),
        Buffer::new(gpu, &vec![poison::<Y>(); n], offset),
    );
    cast::cast(gpu, from.view(gpu), to.view(gpu)).unwrap();
    let exact: Vec<Y> = x.iter().map(|x| Y::from_f64(x.to_f64())).collect();
    assert_eq!(bits(&to.read(gpu)), bits(&exact));
}
