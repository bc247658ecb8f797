//! Old against new: temporary.
use super::replay::{Buffer, Formula, What};
use super::stack::Stack;
use super::walk::walk;
use super::*;
use crate::attention::Algorithm;
use crate::model::TransformerConfig;
use crate::nn::Checkpointing;
use crate::precision::{Precision, Regime};

fn residents(config: &TransformerConfig, w: &Workload) -> Vec<Buffer> {
    let p = config.num_parameters() as f64;
    let width = w.precision.parameter_dtype().size_in_bytes();
    let ids = w.batch_size as f64 * w.sequence_length as f64;
    let b = |holds, what, elements, width| Buffer { holds, what: What::Named(what), formula: Formula::Letters(""), elements, width, count: 1.0 };
    let mut all = vec![b(Holds::Weights, "weights", p, width)];
    if w.mode == Mode::TrainStep {
        all.push(b(Holds::Optimizer, "m", p, 4));
        all.push(b(Holds::Optimizer, "v", p, 4));
        if width < 4 { all.push(b(Holds::Optimizer, "w", p, 4)); }
    }
    all.push(b(Holds::Inputs, "t", 2.0 * ids, 4));
    let positions = config.context_length.max(w.sequence_length) as f64;
    all.push(b(Holds::Inputs, "cos", positions * config.head_dim() as f64, width));
    all
}

fn sums(buffers: impl Iterator<Item = (Holds, f64)>) -> Vec<(Holds, f64)> {
    let mut sums: std::collections::BTreeMap<Holds, f64> = Default::default();
    for (h, x) in buffers { *sums.entry(h).or_default() += x; }
    sums.into_iter().collect()
}

#[test]
fn the_replay_is_the_walk() {
    let mut precisions = vec![Precision::F32];
    for half in [Precision::BF16, Precision::F16] {
        for regime in [Regime::CudaAutocast, Regime::CpuAutocast] {
            let kept = half.with_regime(regime);
            precisions.extend([kept, kept.with_dropped_casts(true)]);
        }
        precisions.push(half.with_regime(Regime::Full));
    }
    let toy = |layers, d, f, h, v| TransformerConfig { vocab_size: v, context_length: 128, d_model: d, num_layers: layers, num_heads: h, d_ff: f, ..Default::default() };
    let mut configs = vec![("toy1", toy(1, 64, 128, 4, 300)), ("toy2", toy(2, 64, 256, 4, 8000)), ("toy3", toy(3, 64, 160, 4, 300)), ("toy9", toy(9, 64, 160, 4, 300)), ("deep", toy(50_000_000, 64, 160, 4, 300))];
    for name in ["tiny", "small", "medium", "large", "xl", "2.7b", "10b"] {
        configs.push((name, TransformerConfig::preset(name).unwrap()));
    }
    let strategies = ["none", "release", "block", "every-2", "every-3", "every-7", "sqrt"];
    let (mut all, mut wrong) = (0usize, 0usize);
    let mut kinds: std::collections::BTreeMap<String, (usize, f64)> = Default::default();
    let mut time = [0.0; 2];
    if std::env::var("FIGURES").is_ok() {
        let mut state = 1u64;
        let mut pick = |n: usize| { state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407); (state >> 33) as usize % n };
        for _ in 0..48 {
            let (name, config) = &configs[5 + pick(7)];
            let precision = precisions[pick(precisions.len())];
            let strategy = strategies[pick(strategies.len())];
            let mode = [Mode::Forward, Mode::ForwardKeepingGraph, Mode::ForwardBackward, Mode::TrainStep][pick(4)];
            let attention = Algorithm::ALL[pick(2)];
            let (batch_size, sequence_length) = [(1, 1), (3, 17), (4, 256), (2, 1024), (16, 2048), (64, 16384)][pick(6)];
            if mode == Mode::Forward && strategy != "none" { continue; }
            let w = Workload { batch_size, sequence_length, mode, attention, precision, checkpointing: strategy.parse().unwrap(), kernels: Kernels::Cuda };
            let old = walk(config, &w);
            println!("FIG (\"{name}\", {batch_size}, {sequence_length}, \"{attention}\", \"{precision}\", \"{strategy}\", Mode::{mode:?}, [{}, {}]),", old.after_forward_bytes as u64, old.peak_bytes as u64);
        }
        return;
    }
    if let Ok(n) = std::env::var("SPEED") {
        let w = Workload { batch_size: 2, sequence_length: 512, ..Default::default() };
        let config = TransformerConfig::small();
        let begun = std::time::Instant::now();
        let n: usize = n.parse().unwrap();
        for _ in 0..n { std::hint::black_box(Stack::new(&config, &w).unwrap()); }
        println!("SPEED trace {:?}", begun.elapsed() / n as u32);
        let stack = Stack::new(&config, &w).unwrap();
        let begun = std::time::Instant::now();
        for _ in 0..n { std::hint::black_box(stack.replay(w.mode, residents(&config, &w))); }
        println!("SPEED replay {:?}", begun.elapsed() / n as u32);
        let config = TransformerConfig::preset("10b").unwrap();
        let begun = std::time::Instant::now();
        for _ in 0..n { std::hint::black_box(estimate(&config, &w).unwrap()); }
        println!("SPEED estimate {:?}", begun.elapsed() / n as u32);
        return;
    }
    let threads: Vec<usize> = vec![1, 2];
    for n in threads {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(n).build().unwrap();
    pool.install(|| {
    for (name, config) in &configs {
        for (batch_size, sequence_length) in [(1, 1), (3, 17), (4, 256), (2, 1024), (16, 2048), (64, 16384)] {
            for attention in Algorithm::ALL {
                for &precision in &precisions {
                    for kernels in [Kernels::Cpu, Kernels::Cuda] {
                        if n == 2 && kernels == Kernels::Cuda { continue; }
                        for mode in [Mode::Forward, Mode::ForwardKeepingGraph, Mode::ForwardBackward, Mode::TrainStep] {
                            for strategy in strategies {
                                let checkpointing: Checkpointing = strategy.parse().unwrap();
                                let w = Workload { batch_size, sequence_length, mode, attention, precision, checkpointing, kernels };
                                let begun = std::time::Instant::now();
                                let old = walk(config, &w);
                                time[0] += begun.elapsed().as_secs_f64();
                                let begun = std::time::Instant::now();
                                let stack = Stack::new(config, &w).unwrap();
                                let new = stack.replay(mode, residents(config, &w));
                                time[1] += begun.elapsed().as_secs_f64();
                                all += 1;
                                let of_old = sums(old.at_peak.iter().map(|b| (b.holds, b.count * b.size.elements * b.width as f64)));
                                let of_new = sums(new.at_peak.iter().map(|b| (b.holds, b.bytes())));
                                if (old.peak_bytes, old.after_forward_bytes) != (new.peak_bytes, new.after_forward_bytes) || of_old != of_new {
                                                                        let key = format!("{attention} {precision} {kernels:?} {mode:?} {strategy}");
 if std::env::var("ONLY").is_ok_and(|only| !key.contains(&only)) { continue; }
                                    let known = mode == Mode::Forward && (strategy.starts_with("every") || strategy == "sqrt") && new.peak_bytes < old.peak_bytes && new.after_forward_bytes == old.after_forward_bytes; if known { continue; }
 wrong += 1; let worst = kinds.entry(key.clone()).or_default();
                                    worst.0 += 1;
                                    worst.1 = worst.1.max((new.peak_bytes / old.peak_bytes - 1.0).abs()).max((new.after_forward_bytes / old.after_forward_bytes - 1.0).abs());
                                    if wrong < 40 {
                                        println!("{name} B{batch_size} T{sequence_length} {key}: peak {} {} after {} {}\n   {of_old:?}\n   {of_new:?}", old.peak_bytes, new.peak_bytes, old.after_forward_bytes, new.after_forward_bytes);
                                        if wrong == 1 && std::env::var("GRAPH").is_ok() { println!("{}", stack.graph); }
 if wrong < 3 { for b in &old.at_peak { println!("old {:?} {} {} x{}", b.holds, b.what, b.size.elements * b.width as f64, b.count); }
                                        for b in &new.at_peak { println!("new {:?} {:?} {} x{}", b.holds, b.what, b.elements * b.width as f64, b.count); } }
                                    }
                                }
                            }
                        }
                    }
                }
            }
        }
    }
    });
    }
    for (key, (n, worst)) in &kinds { println!("{key}: {n} {worst:.2e}"); }
    println!("{wrong} of {all}; seconds {time:?}");
    assert_eq!(wrong, 0);
}
