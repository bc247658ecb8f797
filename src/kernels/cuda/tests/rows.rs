//! Kernels on rows: norms beside a wider stream, gates and probabilities in place, heads in wider rows, casts.

use super::super::rms_norm::{self, Gradients, Inputs};
use super::super::{View, cast, rope, softmax, swiglu};
use super::{Buffer, Element, assert_close, bits, gpu, numbers, poison, wide};
use crate::kernels::Mask;
use crate::kernels::workspace::rms_norm_partials;
use candle_core::cuda_backend::CudaDevice;
use half::{bf16, f16};

#[test]
#[ignore = "needs a CUDA device"]
fn norms_of_a_wider_stream() {
    let gpu = gpu();
    // Rows of one warp and of many, one and several to a block, in turns; rows of threads beyond the last row.
    for (rows, width) in [
        (1, 1),
        (7, 65),
        (5, 512),
        (3001, 64),
        (301, 1000),
        (3, 8176),
    ] {
        for offset in [0, 1] {
            norm::<f32, f32>(&gpu, rows, width, offset);
            norm::<f32, bf16>(&gpu, rows, width, offset);
            norm::<f32, f16>(&gpu, rows, width, offset);
            norm::<bf16, bf16>(&gpu, rows, width, offset);
        }
    }
}

fn norm<X: Element, Y: Element>(gpu: &CudaDevice, rows: usize, width: usize, offset: usize) {
    let n = rows * width;
    let [x, before] = [1, 2].map(|seed| numbers::<X>(n, seed));
    let [branch, dy] = [3, 4].map(|seed| numbers::<Y>(n, seed));
    let [weight, dw_before] = [5, 6].map(|seed| numbers::<f32>(width, seed));
    let eps = 1e-5;
    let norms = |x: &[f64]| -> (Vec<f64>, Vec<f64>) {
        let rstd = x.chunks(width).map(|row| {
            let mean = row.iter().map(|x| x * x).sum::<f64>() / width as f64;
            1.0 / (mean + eps).sqrt()
        });
        let rstd: Vec<f64> = rstd.collect();
        let y = (0..x.len()).map(|i| x[i] * rstd[i / width] * f64::from(weight[i % width]));
        (y.collect(), rstd)
    };
    let on_gpu = Buffer::new(gpu, &x, offset);
    let weights = Buffer::new(gpu, &weight, offset);
    let y = Buffer::<Y>::room(gpu, n, offset);
    let rstd = Buffer::<f32>::room(gpu, rows, offset);
    let [x_view, weight_view, y_view, rstd_view] = [
        on_gpu.view(gpu),
        weights.view(gpu),
        y.view(gpu),
        rstd.view(gpu),
    ];
    rms_norm::forward(gpu, x_view, weight_view, eps, y_view, rstd_view).unwrap();
    let (exact_y, exact_rstd) = norms(&wide(&x));
    assert_close("y", &y.read(gpu), &exact_y);
    assert_close("rstd", &rstd.read(gpu), &exact_rstd);

    // The sum where x lies.
    let x_apart = Buffer::new(gpu, &x, offset);
    let branch_on_gpu = Buffer::new(gpu, &branch, offset);
    let inputs = [x_view, branch_on_gpu.view(gpu), weight_view];
    rms_norm::add_forward(gpu, inputs, eps, Some(x_view), [y_view, rstd_view]).unwrap();
    let sum = wide(&on_gpu.read(gpu));
    let exact_sum = wide(&x).into_iter().zip(wide(&branch));
    let exact_sum: Vec<f64> = exact_sum.map(|(x, branch)| x + branch).collect();
    assert_close("sum", &on_gpu.read(gpu), &exact_sum);
    let (exact_y, exact_rstd) = norms(&sum);
    assert_close("y of the sum", &y.read(gpu), &exact_y);
    assert_close("rstd of the sum", &rstd.read(gpu), &exact_rstd);

    // The same without the sum.
    let apart = [x_apart.view(gpu), branch_on_gpu.view(gpu), weight_view];
    let y_alone = Buffer::<Y>::room(gpu, n, offset);
    let rstd_alone = Buffer::<f32>::room(gpu, rows, offset);
    let outputs = [y_alone.view(gpu), rstd_alone.view(gpu)];
    rms_norm::add_forward(gpu, apart, eps, None, outputs).unwrap();
    assert_eq!(bits(&y_alone.read(gpu)), bits(&y.read(gpu)));
    assert_eq!(bits(&rstd_alone.read(gpu)), bits(&rstd.read(gpu)));
    assert_eq!(bits(&x_apart.read(gpu)), bits(&x));

    let (mut exact_dx, mut exact_dw) = (wide(&before), wide(&dw_before));
    for (row, rstd) in exact_rstd.iter().enumerate() {
        let at = |i: usize| row * width + i;
        let h = |i: usize| sum[at(i)] * rstd;
        let g = |i: usize| dy[at(i)].to_f64() * f64::from(weight[i]);
        let mean = (0..width).map(|i| g(i) * h(i)).sum::<f64>() / width as f64;
        for i in 0..width {
            exact_dx[at(i)] += rstd * (g(i) - h(i) * mean);
            exact_dw[i] += dy[at(i)].to_f64() * h(i);
        }
    }
    let backward = |x: View, branch: Option<View>| {
        let on_gpu = Buffer::new(gpu, &dy, offset);
        let (dx, dw) = (
            Buffer::new(gpu, &before, offset),
            Buffer::new(gpu, &dw_before, offset),
        );
        let copy = Buffer::<Y>::room(gpu, n, offset);
        let partials = Buffer::<f32>::room(gpu, rms_norm_partials(rows, width), 0);
        let inputs = Inputs {
            dy: on_gpu.view(gpu),
            x,
            branch,
            weight: weight_view,
            rstd: rstd_view,
        };
        let gradients = Gradients {
            dx: dx.view(gpu),
            add_dx: true,
            copy: Some(copy.view(gpu)),
            y: Some(on_gpu.view(gpu)), // where dy lies
            dw: dw.view(gpu),
            add_dw: true,
        };
        rms_norm::backward(gpu, inputs, gradients, partials.view(gpu)).unwrap();
        partials.read(gpu);
        let [copy, y_again] = [copy, on_gpu].map(|buffer| buffer.read(gpu));
        (dx.read(gpu), copy, y_again, dw.read(gpu))
    };
    let (dx, copy, y_again, dw) = backward(x_view, None);
    assert_close("dx", &dx, &exact_dx);
    assert_close("dx once more", &copy, &exact_dx);
    assert_eq!(bits(&y_again), bits(&y.read(gpu)));
    assert_close("dw", &dw, &exact_dw);
    // The same from what the sum is made of, where its branch is the narrower one.
    if X::DTYPE != Y::DTYPE {
        let again = backward(x_apart.view(gpu), Some(branch_on_gpu.view(gpu)));
        assert_eq!(bits(&again.0), bits(&dx));
        assert_eq!(bits(&again.1), bits(&copy));
        assert_eq!(bits(&again.2), bits(&y_again));
        assert_eq!(bits(&again.3), bits(&dw));
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn gates_in_place_and_packed() {
    let gpu = gpu();
    for (rows, width) in [(1, 1), (5, 7), (33, 24), (3, 1031), (257, 512), (700, 8)] {
        for offset in [0, 1] {
            gate::<f32>(&gpu, rows, width, offset);
            gate::<f16>(&gpu, rows, width, offset);
            gate::<bf16>(&gpu, rows, width, offset);
        }
    }
}

fn gate<T: Element>(gpu: &CudaDevice, rows: usize, width: usize, offset: usize) {
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
        let s = 1.0 / (1.0 + (-g).exp());
        y.push(g * s * u);
        dgate.push(d * u * s * (1.0 + g * (1.0 - s)));
        dup.push(d * g * s);
    }

    let [gate, up, dy_apart] = [&gate, &up, &dy].map(|values| Buffer::new(gpu, values, offset));
    let views = [gate.view(gpu), up.view(gpu), dy_apart.view(gpu)];
    swiglu::backward_in_place(gpu, views[0], views[1], views[2]).unwrap();
    assert_close("dgate", &gate.read(gpu), &dgate);
    assert_close("dup", &up.read(gpu), &dup);
    assert_close("y again", &dy_apart.read(gpu), &y);

    let gate_up = Buffer::new(gpu, &packed, offset);
    let out = Buffer::<T>::room(gpu, rows * width, offset);
    swiglu::packed_forward(gpu, gate_up.view(gpu), out.view(gpu), width).unwrap();
    assert_close("packed y", &out.read(gpu), &y);
    assert_eq!(bits(&gate_up.read(gpu)), bits(&packed));
    let dy = Buffer::new(gpu, &dy, offset);
    swiglu::packed_backward_in_place(gpu, gate_up.view(gpu), dy.view(gpu), width).unwrap();
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
    // As products leave them, for results in any dtype.
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
    let dx = Buffer::<T>::room(gpu, dp.len(), 0);
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

/// q and k of packed q, k and v.
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
        let sizes = rope::Turned {
            batch,
            length,
            heads: 2 * heads,
            head_dim,
            row,
        };
        let tables = [cos.view(gpu), sin.view(gpu)];
        let turn = rope::Turn {
            by_halves: false,
            back,
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
