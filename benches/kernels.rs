//! Benchmarks of the CPU kernels, next to the two rates that bound them: `memory/copy` is the machine's memory rate,
//! `arithmetic/multiply-add` its arithmetic rate in f32.
//!
//! `cargo bench --bench kernels [-- PATTERN]` runs all of them, or those whose names match the pattern. Criterion's
//! `thrpt` line is the rate. In `memory/` it counts the bytes that must move. In `arithmetic/` it counts FLOPs, which
//! criterion calls elements (1 Gelem/s is 1 GFLOP/s). Shapes are those of the tiny preset at batch 4, context 256: N =
//! 1024 tokens, D = 512, F = 1344, H = 16, Dh = 32, V = 10,000. A name without a dtype means f32.

use candle_core::{DType, WithDType};
use criterion::measurement::WallTime;
use criterion::{
    BenchmarkGroup, Criterion, SamplingMode, Throughput, criterion_group, criterion_main,
};
use half::{bf16, f16};
use rayon::prelude::*;
use std::hint::black_box;
use std::time::Duration;
use tallow::attention::Mask;
use tallow::internals::gemm::{Batched, MatRef, Threads, matmul, matmul_batched};
use tallow::internals::heads::{HeadSizes, split};
use tallow::internals::muon::{Iteration, Scratch, orthogonalize};
use tallow::internals::update::{AdamW, Lion, Sgd, step};
use tallow::internals::{
    Activation, Gate, KeyRanges, Norm, PerScore, Stored, Update, activation, cross_entropy,
    embedding, extremes, flash, gated, index, multiply_adds, norm, relu, rope, select, softmax,
    sums,
};

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

/// Returns `n` values in (-1, 1) without a pattern that a branch predictor could learn, and without denormals.
fn values<T: WithDType>(n: usize) -> Vec<T> {
    let value = |i| T::from_f64(f64::from(((i as f32) * 0.618).sin()));
    (0..n).map(value).collect()
}

/// A criterion group: the kernels bound by memory, or those bound by arithmetic.
struct Bench<'a> {
    group: BenchmarkGroup<'a, WallTime>,
}

impl<'a> Bench<'a> {
    fn new(criterion: &'a mut Criterion, name: &str) -> Self {
        let mut group = criterion.benchmark_group(name);
        group.sampling_mode(SamplingMode::Flat); // the slowest kernels need half a second
        Self { group }
    }

    fn run(&mut self, name: &str, rate: Throughput, mut kernel: impl FnMut()) {
        self.group.throughput(rate);
        self.group
            .bench_function(name, |bencher| bencher.iter(&mut kernel));
    }

    /// Times a kernel that does `flop` multiplications and additions.
    fn products(&mut self, name: &str, flop: usize, kernel: impl FnMut()) {
        self.run(name, Throughput::Elements(flop as u64), kernel);
    }

    /// Times a kernel that moves `count` values of type `T`.
    fn memory<T: WithDType>(&mut self, name: &str, count: usize, kernel: impl FnMut()) {
        let name = match T::DTYPE {
            DType::F32 => name.into(),
            half => format!("{name} {}", half.as_str()),
        };
        let bytes = (size_of::<T>() * count) as u64;
        self.run(&name, Throughput::Bytes(bytes), kernel);
    }
}

fn copy(bench: &mut Bench) {
    let n = 1 << 24;
    let (from, mut to) = (values::<f32>(n), vec![0f32; n]);
    bench.memory::<f32>("copy", 2 * n, || {
        to.par_chunks_mut(1 << 16)
            .zip(from.par_chunks(1 << 16))
            .for_each(|(to, from)| to.copy_from_slice(from));
    });
}

/// Measures multiply-adds on every thread of the pool.
fn multiply_add(bench: &mut Bench) {
    let flop = multiply_adds() as usize * rayon::current_num_threads();
    bench.products("multiply-add", flop, || {
        black_box(rayon::broadcast(|_| multiply_adds()));
    });
}

fn products(bench: &mut Bench) {
    for (depth, out) in [(D, D), (D, F), (F, D), (D, V)] {
        let (x, w, dy) = (
            values(TOKENS * depth),
            values(out * depth),
            values(TOKENS * out),
        );
        let x = MatRef::new(&x, TOKENS, depth);
        let w = MatRef::new(&w, out, depth);
        let dy = MatRef::new(&dy, TOKENS, out);
        let flop = 2 * TOKENS * depth * out;
        let shape = format!("{TOKENS}x{depth}x{out}");
        for (direction, a, b) in [("x W^T", x, w.t()), ("dy W", dy, w), ("dy^T x", dy.t(), x)] {
            let size = match direction {
                "x W^T" => TOKENS * out,
                "dy W" => TOKENS * depth,
                _ => out * depth,
            };
            let mut c = vec![0f32; size];
            bench.products(&format!("gemm {direction} {shape}"), flop, || {
                matmul(a, b, &mut c, false, Threads::All);
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
    let flop = 2 * batch * t * t * dh;
    bench.products("gemm q k^T", flop, || {
        matmul_batched(batch, heads(&q, false), heads(&k, true), &mut scores);
    });
    let square = Batched {
        data: &scores,
        rows: t,
        cols: t,
        transposed: false,
    };
    let mut out = vec![0f32; batch * t * dh];
    bench.products("gemm p v", flop, || {
        matmul_batched(batch, square, heads(&k, false), &mut out);
    });
}

/// Measures flash attention. FLOPs are those of the matmuls that the mask leaves: 4 Tq Tk Dh forward and 10 Tq Tk Dh
/// backward, of each head. A padding mask hides the last quarter of every other sequence; a bias has a term for each
/// pair, the same for all heads.
fn flash_attention(bench: &mut Bench) {
    for (batch, heads, length, head_dim, mask, tensors) in [
        (8, 1, 4096, 64, Mask::Full, ""),
        (8, 1, 4096, 64, Mask::Full, "padding"),
        (8, 1, 4096, 64, Mask::Full, "bias"),
        (1, 12, 2048, 64, Mask::Causal, ""),
        (4, 16, 256, 32, Mask::Causal, ""),
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
            soft_cap: None,
        };
        let tiles = flash::Tiles::for_head_dim(head_dim);
        let (rows, n) = (batch * heads * length, batch * heads * length * head_dim);
        let inputs = values(n + 3); // each view has another offset
        let view = |first: usize| flash::Heads {
            data: &inputs[first..first + n],
            strides: [heads * length * head_dim, length * head_dim, head_dim, 1],
        };
        let [q, k, v, d_out] = [0, 1, 2, 3].map(view);
        let (mut out, mut lse) = (vec![0f32; n], vec![0f32; 2 * rows]);
        let key =
            |i: usize| u8::from((i / length).is_multiple_of(2) || i % length < length / 4 * 3);
        let padding: Vec<u8> = (0..batch * length).map(key).collect();
        let terms: Vec<f32> = values(if tensors == "bias" {
            length * length
        } else {
            0
        });
        let masks = match tensors {
            "padding" => flash::Masks {
                visible: Some(PerScore::new(&padding, [batch, 1, 1, length])),
                bias: None,
            },
            "bias" => flash::Masks {
                visible: None,
                bias: Some(PerScore::new(&terms, [1, 1, length, length])),
            },
            _ => flash::Masks::NONE,
        };
        let shape = format!("{batch}x{heads}x{length}x{head_dim} {mask:?} {tensors}");
        let shape = shape.trim_end();
        let pairs = match mask {
            Mask::Full if tensors == "padding" => length * length * 7 / 8,
            Mask::Full => length * length,
            _ => length * (length + 1) / 2,
        };
        let product = 2 * batch * heads * pairs * head_dim;
        bench.products(&format!("flash forward {shape}"), 2 * product, || {
            let outputs = flash::Outputs {
                out: &mut out,
                rounding_error: &mut [],
                lse: &mut lse,
            };
            let inputs = flash::ForwardInputs {
                q,
                k,
                v,
                first_keys: &[],
                masks,
                dropout: None,
            };
            flash::forward(&sizes, &tiles, inputs, outputs);
        });
        let (mut dq, mut dk, mut dv) = (vec![0f32; n], vec![0f32; n], vec![0f32; n]);
        bench.products(&format!("flash backward {shape}"), 5 * product, || {
            let inputs = flash::Inputs {
                q,
                k,
                v,
                out: flash::Heads { data: &out, ..q },
                rounding_error: None,
                lse: &lse,
                d_out,
                first_keys: &[],
                masks,
                dropout: None,
            };
            let gradients = flash::Gradients {
                dq: &mut dq,
                dk: &mut dk,
                dv: &mut dv,
            };
            flash::backward(&sizes, &tiles, inputs, gradients);
        });
    }
}

fn norms<T: Stored<Wide = f32>>(bench: &mut Bench) {
    let n = TOKENS * D;
    let (x, dy): (Vec<T>, Vec<T>) = (values(n), values(n));
    let (w, b) = (values(D), values(D));
    let (mut y, mut dx) = (vec![T::zero(); n], vec![T::zero(); n]);
    let (mut dw, mut db) = (vec![0f32; D], vec![0f32; D]);
    for (name, of) in [("rms_norm", Norm::Rms), ("layer_norm", Norm::Layer)] {
        let mut statistics = vec![0f32; TOKENS * of.statistics()];
        let mut partials = vec![0f32; norm::partials_len(of, TOKENS, D)];
        let inputs = norm::Inputs {
            x: &x[..],
            weight: &w[..],
            bias: if of == Norm::Layer { &b } else { &[] },
        };
        bench.memory::<T>(&format!("{name} forward"), 2 * n, || {
            let outputs = norm::Outputs {
                y: &mut y[..],
                statistics: &mut statistics,
            };
            norm::forward(of, 1e-5, inputs, None, outputs);
        });
        bench.memory::<T>(&format!("{name} backward"), 3 * n, || {
            let gradients = norm::Gradients {
                dx: &mut dx[..],
                add_dx: false,
                dw: &mut dw,
                add_dw: false,
                db: &mut db,
                add_db: false,
            };
            let dy = norm::OutputGradient::Read(&dy[..]);
            norm::backward(of, dy, inputs, &statistics, gradients, &mut partials);
        });
    }
}

fn elementwise<T: Stored<Wide = f32>>(bench: &mut Bench) {
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
        bench.memory::<T>(&format!("activation {f:?} forward"), 2 * n, || {
            activation::forward(f, &gate, &mut y);
        });
        bench.memory::<T>(&format!("activation {f:?} backward"), 3 * n, || {
            activation::backward(f, &dy, &gate, &mut y);
        });
    }
    bench.memory::<T>("swiglu forward", 3 * n, || {
        gated::forward(Gate::Silu, &gate, &up, &mut y)
    });
    bench.memory::<T>("swiglu backward", 5 * n, || {
        gated::backward(Gate::Silu, [&dy, &gate, &up], &mut y, &mut z);
    });
    bench.memory::<T>("relu forward", 2 * n, || relu::forward(&gate, &mut y));
    bench.memory::<T>("relu backward", 3 * n, || {
        relu::backward(&dy, &gate, &mut y)
    });

    let n = TOKENS * D;
    let mut y = vec![T::zero(); n];
    for (name, sizes) in [("rows", [D, 1]), ("columns", [TOKENS, D])] {
        let count = n / sizes[0];
        bench.memory::<T>(&format!("sum of {name} forward"), n + count, || {
            sums::forward(&dy[..n], sizes, 1.0, &mut z[..count], None);
        });
        bench.memory::<T>(&format!("sum of {name} backward"), n + count, || {
            sums::backward(&dy[..count], sizes, 0.5, &mut y);
        });
        bench.memory::<T>(&format!("max of {name} forward"), n + count, || {
            extremes::forward::<T, true>(&dy[..n], sizes, &mut z[..count]);
        });
        bench.memory::<T>(&format!("max of {name} backward"), 2 * (n + count), || {
            extremes::backward([&up[..count], &z[..count]], &dy[..n], sizes, &mut y);
        });
    }
    let half = HEADS.head_dim / 2;
    let angles = values(HEADS.length * half);
    bench.memory::<T>("rope", 2 * n, || {
        rope::rotate(&dy[..n], &angles, &angles, HEADS.head_dim, false, &mut y);
    });
    bench.memory::<T>("split_heads", 2 * n, || split(HEADS, &dy[..n], &mut y));
}

fn rows<T: Stored<Wide = f32>>(bench: &mut Bench) {
    let (t, n) = (
        HEADS.length,
        HEADS.batch * HEADS.heads * HEADS.length * HEADS.length,
    );
    let (x, dp): (Vec<T>, Vec<T>) = (values(n), values(n));
    let (mut p, mut dx) = (vec![T::zero(); n], vec![T::zero(); n]);
    for (name, mask) in [("full", Mask::Full), ("causal", Mask::Causal)] {
        let seen = KeyRanges::by_mask(mask, t, t);
        bench.memory::<T>(&format!("softmax forward {name}"), 2 * n, || {
            softmax::forward(&x, seen, 0.2, &mut p);
        });
        bench.memory::<T>(&format!("softmax backward {name}"), 3 * n, || {
            // Backward as the op runs it: from p if T is f32, else from the scores.
            match (T::as_wide(&dp), T::as_wide(&p), T::as_wide_mut(&mut dx)) {
                (Some(dp), Some(p), Some(dx)) => softmax::backward(dp, p, seen, 0.2, dx),
                _ => softmax::backward_from_scores(&dp, &x, seen, 0.2, &mut dx),
            }
        });
    }

    let logits: Vec<T> = values(TOKENS * V);
    let target = |row: usize| Some(row * 7 % V);
    let terms = cross_entropy::Terms {
        smoothing: 0.0,
        z_loss: 0.0,
    };
    let (mut loss, mut lse) = (vec![0f32; TOKENS], vec![0f32; TOKENS]);
    let mut dlogits = vec![T::zero(); TOKENS * V];
    // Each row is read twice, for its maximum and for its sum, but the second time from cache.
    bench.memory::<T>("cross_entropy forward", TOKENS * V, || {
        cross_entropy::forward(&logits, V, target, terms, &mut loss, &mut lse);
    });
    bench.memory::<T>("cross_entropy backward", 2 * TOKENS * V, || {
        cross_entropy::backward(&logits, V, target, terms, &lse, |_| 1e-3, &mut dlogits);
    });

    let ids: Vec<u32> = (0..TOKENS).map(|i| (i * 37 % V) as u32).collect();
    let (table, dy): (Vec<T>, Vec<T>) = (values(V * D), values(TOKENS * D));
    let (mut y, mut dtable) = (vec![T::zero(); TOKENS * D], vec![T::zero(); V * D]);
    bench.memory::<T>("embedding forward", 2 * TOKENS * D, || {
        embedding::forward(&table, D, &ids, &mut y);
    });
    // The table's gradient is set to zero, then each row of dy is added to one of its rows.
    bench.memory::<T>("embedding backward", V * D + 3 * TOKENS * D, || {
        embedding::backward(&dy, D, &ids, None, &mut dtable);
    });
    black_box((loss, lse));
}

/// Measures the choice of experts, 2 of 64 for each token, and selections of elements by masks and indices.
fn routing(bench: &mut Bench) {
    let (experts, k, n) = (64, 2, TOKENS * D);
    let (scores, x) = (values::<f32>(TOKENS * experts), values::<f32>(n));
    let mut chosen = vec![0u32; TOKENS * k];
    bench.memory::<f32>("topk", scores.len() + chosen.len(), || {
        index::topk(&scores, experts, k, &mut chosen);
    });
    let ids: Vec<u32> = (0..n).map(|i| (i * 37 % D) as u32).collect();
    let sizes = index::Sizes {
        n: D,
        k: D,
        inner: 1,
    };
    let mut y = vec![0f32; n];
    let mut is_less = vec![0u8; n];
    bench.memory::<f32>("compare", 2 * n + n / 4, || {
        select::compare(&x, &x[..], &mut is_less, |a, b| a < b);
    });
    bench.memory::<f32>("select", 3 * n + n / 4, || {
        select::select(&is_less, [Some(&x[..]), Some(&x)], 0.0, &mut y);
    });
    bench.memory::<f32>("gather", 3 * n, || {
        index::gather(&x, &ids, sizes, None, &mut y);
    });
    // The output is set to zero, then read and written once for each value.
    bench.memory::<f32>("scatter_add", 5 * n, || {
        index::scatter_add(None, &x, &ids, sizes, None, &mut y);
    });
}

fn optimizer(bench: &mut Bench) {
    let n = 1 << 24;
    let gradient: Vec<f32> = values(n);
    let [mut parameter, mut exp_avg] = [values(n), values(n)];
    let mut exp_avg_sq: Vec<f32> = values::<f32>(n).iter().map(|v| v * v).collect();
    let adamw = Update::from(AdamW::new(1e-3, (0.9, 0.999), 1e-8, 0.01, 10));
    bench.memory::<f32>("adamw", 7 * n, || {
        let states = [&mut exp_avg[..], &mut exp_avg_sq[..]];
        step::<AdamW, f32, f32, 2>(&mut parameter, &gradient, 1.0, states, &adamw);
    });
    let sgd = Sgd {
        lr: 1e-3,
        weight_decay: 0.01,
        momentum: 0.9,
        share: 1.0,
        nesterov: true,
    };
    let update = Update::from(sgd);
    bench.memory::<f32>("sgd", 3 * n, || {
        step::<Sgd, f32, f32, 0>(&mut parameter, &gradient, 1.0, [], &update);
    });
    bench.memory::<f32>("sgd momentum", 5 * n, || {
        step::<Sgd, f32, f32, 1>(&mut parameter, &gradient, 1.0, [&mut exp_avg], &update);
    });
    let lion = Update::from(Lion {
        decay: 0.999,
        one_minus_beta1: 0.1,
        one_minus_beta2: 0.01,
        lr: 1e-4,
    });
    bench.memory::<f32>("lion", 5 * n, || {
        step::<Lion, f32, f32, 1>(&mut parameter, &gradient, 1.0, [&mut exp_avg], &lion);
    });
}

/// Measures Muon's iteration: 5 steps of the matrices of blocks, one and several together.
fn muon(bench: &mut Bench) {
    for (count, rows, columns) in [(1, D, D), (1, F, D), (4, D, D), (16, 64, 64)] {
        let iteration = Iteration {
            steps: 5,
            eps: 1e-7,
            in_bf16: false,
            shape: [rows, columns],
        };
        let (n, side) = (count * rows * columns, rows.min(columns));
        let (mut matrices, mut next): (Vec<f32>, Vec<f32>) = (values(n), vec![0.0; n]);
        let [mut gram, mut square] = [(); 2].map(|()| vec![0f32; count * side * side]);
        let flop = count * iteration.flops() as usize;
        bench.products(&format!("muon {count} of {rows}x{columns}"), flop, || {
            let scratch = Scratch {
                x: &mut [],
                next: &mut next,
                gram: &mut gram,
                square: &mut square,
            };
            orthogonalize::<f32, f32>(&iteration, &mut matrices, scratch);
        });
    }
}

fn memory(criterion: &mut Criterion) {
    let bench = &mut Bench::new(criterion, "memory");
    copy(bench);
    norms::<f32>(bench);
    norms::<bf16>(bench);
    norms::<f16>(bench);
    elementwise::<f32>(bench);
    elementwise::<bf16>(bench);
    elementwise::<f16>(bench);
    rows::<f32>(bench);
    rows::<bf16>(bench);
    rows::<f16>(bench);
    routing(bench);
    optimizer(bench);
}

fn arithmetic(criterion: &mut Criterion) {
    let bench = &mut Bench::new(criterion, "arithmetic");
    multiply_add(bench);
    products(bench);
    muon(bench);
    flash_attention(bench);
}

criterion_group! {
    name = kernels;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(1));
    targets = memory, arithmetic
}
criterion_main!(kernels);
