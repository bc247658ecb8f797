//! The CPU kernels beside what bounds them: `floor/copy` is the memory rate, `floor/multiply-add` the arithmetic rate.
//!
//! `cargo bench --bench kernels [-- FILTER]`. Criterion's `thrpt` is in GiB/s (bytes that must move) for the
//! memory-bound kernels, in Gelem/s (1 element = 1 FLOP) for matrix products. Shapes are those of the tiny preset at
//! batch 4, context 256: N = 1024 tokens, D = 512, F = 1344, H = 16, Dh = 32, V = 10,000. A name without a dtype is
//! f32's.

use candle_core::{DType, WithDType};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use half::{bf16, f16};
use rayon::prelude::*;
use std::hint::black_box;
use tallow::kernels::cpu::activation;
use tallow::kernels::cpu::gemm::{Batched, MatRef, Threads, matmul, matmul_batched};
use tallow::kernels::cpu::heads::{HeadSizes, split};
use tallow::kernels::cpu::{
    Stored, adamw, attention::flash, relu, rope, rows::cross_entropy, rows::embedding,
    rows::layer_norm, rows::rms_norm, rows::softmax, simd, swiglu,
};
use tallow::kernels::{Activation, Mask, Update};

const TOKENS: usize = 1024;
const D: usize = 512;
const F: usize = 1344;
const V: usize = 10_000;
const HEADS: HeadSizes = HeadSizes {
    batch: 4,
    length: 256,
    heads: 16,
    head_dim: 32,
};

/// `n` values in (-1, 1) that no branch predictor or denormal profits from.
fn values<T: WithDType>(n: usize) -> Vec<T> {
    let value = |i| T::from_f64(f64::from(((i as f32) * 0.618).sin()));
    (0..n).map(value).collect()
}

/// A bench of a kernel that moves `count` values of type `T`.
fn memory<T: WithDType>(c: &mut Criterion, name: &str, count: usize, mut kernel: impl FnMut()) {
    let mut group = c.benchmark_group("memory");
    group.throughput(Throughput::Bytes((size_of::<T>() * count) as u64));
    let name = match T::DTYPE {
        DType::F32 => name.into(),
        half => format!("{name} {}", half.as_str()),
    };
    group.bench_function(name, |b| b.iter(&mut kernel));
    group.finish();
}

fn floor(c: &mut Criterion) {
    let n = 1 << 24;
    let (from, mut to) = (values::<f32>(n), vec![0f32; n]);
    memory::<f32>(c, "floor/copy", 2 * n, || {
        to.par_chunks_mut(1 << 16)
            .zip(from.par_chunks(1 << 16))
            .for_each(|(to, from)| to.copy_from_slice(from));
    });
    println!(
        "floor/multiply-add: {:.1} GFLOP/s in f32, all threads",
        simd::measure_multiply_add_rate() / 1e9
    );
}

fn products(c: &mut Criterion) {
    let mut group = c.benchmark_group("gemm");
    for (depth, out) in [(D, D), (D, F), (F, D), (D, V)] {
        let (x, w, dy) = (
            values(TOKENS * depth),
            values(out * depth),
            values(TOKENS * out),
        );
        let x = MatRef::new(&x, TOKENS, depth);
        let w = MatRef::new(&w, out, depth);
        let dy = MatRef::new(&dy, TOKENS, out);
        group.throughput(Throughput::Elements((2 * TOKENS * depth * out) as u64));
        let shape = format!("{TOKENS}x{depth}x{out}");
        for (direction, a, b) in [("x W^T", x, w.t()), ("dy W", dy, w), ("dy^T x", dy.t(), x)] {
            let size = match direction {
                "x W^T" => TOKENS * out,
                "dy W" => TOKENS * depth,
                _ => out * depth,
            };
            let mut c = vec![0f32; size];
            group.bench_function(BenchmarkId::new(direction, &shape), |bench| {
                bench.iter(|| matmul(a, b, &mut c, false, Threads::All));
            });
        }
    }
    let (batch, t, dh) = (HEADS.batch * HEADS.heads, HEADS.length, HEADS.head_dim);
    let (q, k) = (values(batch * t * dh), values(batch * t * dh));
    let heads = |data, transposed| Batched {
        data,
        rows: t,
        cols: dh,
        transposed,
    };
    let mut scores = vec![0f32; batch * t * t];
    group.throughput(Throughput::Elements((2 * batch * t * t * dh) as u64));
    group.bench_function("q k^T", |bench| {
        bench.iter(|| matmul_batched(batch, heads(&q, false), heads(&k, true), &mut scores));
    });
    let square = Batched {
        data: &scores,
        rows: t,
        cols: t,
        transposed: false,
    };
    let mut out = vec![0f32; batch * t * dh];
    group.bench_function("p v", |bench| {
        bench.iter(|| matmul_batched(batch, square, heads(&k, false), &mut out));
    });
    group.finish();
}

/// Attention in tiles: FLOPs are those of the products that the mask leaves, 4 Tq Tk Dh forward and 10 backward.
fn flash(c: &mut Criterion) {
    let mut group = c.benchmark_group("flash");
    group.sample_size(10);
    for (batch, heads, length, head_dim, mask) in [
        (8, 1, 4096, 64, Mask::Full),
        (1, 12, 2048, 64, Mask::Causal),
        (4, 16, 256, 32, Mask::Causal),
    ] {
        let sizes = flash::Sizes {
            batch,
            heads,
            kv_heads: heads,
            queries: length,
            keys: length,
            head_dim,
            value_dim: head_dim,
            mask,
            scale: 1.0 / (head_dim as f64).sqrt(),
        };
        let tiles = flash::Tiles::for_head_dim(head_dim);
        let (rows, n) = (batch * heads * length, batch * heads * length * head_dim);
        let inputs = values(n + 3); // each begins elsewhere
        let view = |first: usize| flash::Heads {
            data: &inputs[first..first + n],
            strides: [heads * length * head_dim, length * head_dim, head_dim, 1],
        };
        let [q, k, v, d_out] = [0, 1, 2, 3].map(view);
        let (mut out, mut lse) = (vec![0f32; n], vec![0f32; 2 * rows]);
        let shape = format!("{batch}x{heads}x{length}x{head_dim} {mask:?}");
        let pairs = match mask {
            Mask::Full => length * length,
            _ => length * (length + 1) / 2,
        };
        let product = (2 * batch * heads * pairs * head_dim) as u64;
        group.throughput(Throughput::Elements(2 * product));
        group.bench_function(BenchmarkId::new("forward", &shape), |bench| {
            bench.iter(|| {
                let outputs = flash::Outputs {
                    out: &mut out,
                    rounding_error: &mut [],
                    lse: &mut lse,
                };
                flash::forward(&sizes, &tiles, q, k, v, outputs);
            });
        });
        let (mut dq, mut dk, mut dv) = (vec![0f32; n], vec![0f32; n], vec![0f32; n]);
        group.throughput(Throughput::Elements(5 * product));
        group.bench_function(BenchmarkId::new("backward", &shape), |bench| {
            bench.iter(|| {
                let inputs = flash::Inputs {
                    q,
                    k,
                    v,
                    out: flash::Heads { data: &out, ..q },
                    rounding_error: None,
                    lse: &lse,
                    d_out,
                };
                let gradients = flash::Gradients {
                    dq: &mut dq,
                    dk: &mut dk,
                    dv: &mut dv,
                };
                flash::backward(&sizes, &tiles, inputs, gradients);
            });
        });
    }
    group.finish();
}

fn norms<T: Stored<Wide = f32>>(c: &mut Criterion) {
    let n = TOKENS * D;
    let (x, dy): (Vec<T>, Vec<T>) = (values(n), values(n));
    let (w, b) = (values(D), values(D));
    let (mut y, mut dx) = (vec![T::zero(); n], vec![T::zero(); n]);
    let (mut rstd, mut statistics) = (vec![0f32; TOKENS], vec![0f32; 2 * TOKENS]);
    let (mut dw, mut db) = (vec![0f32; D], vec![0f32; D]);
    memory::<T>(c, "rms_norm forward", 2 * n, || {
        rms_norm::forward(&x, &w, 1e-5, &mut y, &mut rstd);
    });
    // x and dy are read twice: for dx by rows, for dw by columns.
    memory::<T>(c, "rms_norm backward", 3 * n, || {
        rms_norm::backward(&dy, &x, &w, &rstd, &mut dx, &mut dw);
    });
    memory::<T>(c, "layer_norm forward", 2 * n, || {
        layer_norm::forward(&x, &w, &b, 1e-5, &mut y, &mut statistics);
    });
    memory::<T>(c, "layer_norm backward", 3 * n, || {
        layer_norm::backward(&dy, &x, &w, &statistics, &mut dx, &mut dw, &mut db);
    });
}

fn elementwise<T: Stored<Wide = f32>>(c: &mut Criterion) {
    let n = TOKENS * F;
    let (gate, up, dy): (Vec<T>, Vec<T>, Vec<T>) = (values(n), values(n), values(n));
    let (mut y, mut z) = (vec![T::zero(); n], vec![T::zero(); n]);
    for f in [
        Activation::Tanh,
        Activation::Sigmoid,
        Activation::Silu,
        Activation::Gelu,
        Activation::GeluTanh,
    ] {
        memory::<T>(c, &format!("activation {f:?} forward"), 2 * n, || {
            activation::forward(f, &gate, &mut y);
        });
        memory::<T>(c, &format!("activation {f:?} backward"), 3 * n, || {
            activation::backward(f, &dy, &gate, &mut y);
        });
    }
    memory::<T>(c, "swiglu forward", 3 * n, || {
        swiglu::forward(&gate, &up, &mut y)
    });
    memory::<T>(c, "swiglu backward", 5 * n, || {
        swiglu::backward(&dy, &gate, &up, &mut y, &mut z);
    });
    memory::<T>(c, "relu forward", 2 * n, || relu::forward(&gate, &mut y));
    memory::<T>(c, "relu backward", 3 * n, || {
        relu::backward(&dy, &gate, &mut y)
    });

    let n = TOKENS * D;
    let mut y = vec![T::zero(); n];
    let half = HEADS.head_dim / 2;
    let angles = values(HEADS.length * half);
    memory::<T>(c, "rope", 2 * n, || {
        rope::rotate(&dy[..n], &angles, &angles, HEADS.head_dim, false, &mut y);
    });
    memory::<T>(c, "split_heads", 2 * n, || split(HEADS, &dy[..n], &mut y));
}

fn rows<T: Stored<Wide = f32>>(c: &mut Criterion) {
    let (t, n) = (
        HEADS.length,
        HEADS.batch * HEADS.heads * HEADS.length * HEADS.length,
    );
    let (x, dp): (Vec<T>, Vec<T>) = (values(n), values(n));
    let (mut p, mut dx) = (vec![T::zero(); n], vec![T::zero(); n]);
    for (name, mask) in [("full", Mask::Full), ("causal", Mask::Causal)] {
        memory::<T>(c, &format!("softmax forward {name}"), 2 * n, || {
            softmax::forward(&x, t, t, 0.2, mask, &mut p);
        });
        memory::<T>(c, &format!("softmax backward {name}"), 3 * n, || {
            // As the op has it: from p where it is not rounded.
            match (T::as_wide(&dp), T::as_wide(&p), T::as_wide_mut(&mut dx)) {
                (Some(dp), Some(p), Some(dx)) => softmax::backward(dp, p, t, t, 0.2, mask, dx),
                _ => softmax::backward_from_scores(&dp, &x, t, t, 0.2, mask, &mut dx),
            }
        });
    }

    let logits: Vec<T> = values(TOKENS * V);
    let target = |row: usize| Some(row * 7 % V);
    let (mut loss, mut lse) = (vec![0f32; TOKENS], vec![0f32; TOKENS]);
    let mut dlogits = vec![T::zero(); TOKENS * V];
    // The row is read twice, for its maximum and for the sum; the second time from cache.
    memory::<T>(c, "cross_entropy forward", TOKENS * V, || {
        cross_entropy::forward(&logits, V, target, &mut loss, &mut lse);
    });
    memory::<T>(c, "cross_entropy backward", 2 * TOKENS * V, || {
        cross_entropy::backward(&logits, V, target, &lse, 1e-3, &mut dlogits);
    });

    let ids: Vec<u32> = (0..TOKENS).map(|i| (i * 37 % V) as u32).collect();
    let (table, dy): (Vec<T>, Vec<T>) = (values(V * D), values(TOKENS * D));
    let (mut y, mut dtable) = (vec![T::zero(); TOKENS * D], vec![T::zero(); V * D]);
    memory::<T>(c, "embedding forward", 2 * TOKENS * D, || {
        embedding::forward(&table, D, &ids, &mut y);
    });
    // The table's gradient is cleared, then each row of dy is added to one row of it.
    memory::<T>(c, "embedding backward", V * D + 3 * TOKENS * D, || {
        embedding::backward(&dy, D, &ids, &mut dtable);
    });
    black_box((loss, lse));
}

fn optimizer(c: &mut Criterion) {
    let n = 1 << 24;
    let gradient: Vec<f32> = values(n);
    let [mut parameter, mut exp_avg] = [values(n), values(n)];
    let mut exp_avg_sq: Vec<f32> = values::<f32>(n).iter().map(|v| v * v).collect();
    let update = Update::new(1e-3, (0.9, 0.999), 1e-8, 0.01, 10);
    memory::<f32>(c, "adamw", 7 * n, || {
        adamw::step(
            &mut parameter,
            &gradient,
            &mut exp_avg,
            &mut exp_avg_sq,
            &update,
        );
    });
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20);
    targets = floor, products, flash, norms::<f32>, norms::<bf16>, norms::<f16>, elementwise::<f32>,
        elementwise::<bf16>, elementwise::<f16>, rows::<f32>, rows::<bf16>, rows::<f16>, optimizer
}
criterion_main!(benches);
