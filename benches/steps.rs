//! Benchmarks of training steps on the CPU: the tiny preset (22.7 M parameters) at batch 4, context 256.
//!
//! `cargo bench --bench steps [-- PATTERN]` runs them, eager and planned, in f32 and bf16. Criterion's `thrpt` line is
//! the rate in tokens per second, which it calls elements. `cargo run --example e2e_benchmark` measures other models
//! and devices, with memory. Its allocator keeps freed pages, so its eager steps are faster than these.

use candle_core::{Device, Tensor};
use criterion::{Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use std::hint::black_box;
use std::time::Duration;
use tallow::compile::{Step, StepConfig};
use tallow::model::{TransformerConfig, TransformerLM};
use tallow::ops;
use tallow::optim::{AdamWConfig, Optimizer};
use tallow::precision::Precision;
use tallow::{Result, backward};

const BATCH: usize = 4;
const LENGTH: usize = 256;

/// A model with its optimizer, and a batch.
struct Training {
    model: TransformerLM,
    optimizer: Optimizer,
    tokens: Tensor,
    targets: Tensor,
}

impl Training {
    fn new() -> Result<Self> {
        let config = TransformerConfig::default();
        let model = TransformerLM::new(&config, 0, &Device::Cpu)?;
        let ids = |seed: usize| {
            let ids = (0..BATCH * LENGTH).map(|i| ((i * 37 + seed) % config.vocab_size) as u32);
            Tensor::from_iter(ids, &Device::Cpu)?.reshape((BATCH, LENGTH))
        };
        Ok(Self {
            optimizer: Optimizer::new(model.parameters(), AdamWConfig::default())?,
            model,
            tokens: ids(0)?,
            targets: ids(37)?,
        })
    }

    fn loss(&self, precision: Precision) -> Result<Tensor> {
        precision.run(|| ops::cross_entropy(&self.model.forward(&self.tokens)?, &self.targets))
    }

    fn step(&mut self, precision: Precision) -> Result<()> {
        let gradients = backward(self.loss(precision)?)?;
        self.optimizer.step(&gradients)
    }

    fn planned(&self, precision: Precision) -> Result<Step<'static>> {
        let config = StepConfig {
            precision,
            ..Default::default()
        };
        Step::for_model(&self.model, &self.optimizer, &config)
    }
}

fn measure(criterion: &mut Criterion) -> Result<()> {
    for precision in [Precision::F32, Precision::BF16] {
        let mut group = criterion.benchmark_group(precision.name());
        group.sampling_mode(SamplingMode::Flat);
        group.throughput(Throughput::Elements((BATCH * LENGTH) as u64));

        let mut eager = Training::new()?;
        group.bench_function("eager forward", |bencher| {
            bencher.iter(|| eager.loss(precision).map(black_box).expect("a loss"));
        });
        group.bench_function("eager forward+backward", |bencher| {
            let pass = || backward(eager.loss(precision)?);
            bencher.iter(|| pass().map(black_box).expect("gradients"));
        });
        group.bench_function("eager step", |bencher| {
            bencher.iter(|| eager.step(precision).expect("a step"));
        });

        let mut training = Training::new()?;
        let mut planned = training.planned(precision)?;
        group.bench_function("planned forward+backward", |bencher| {
            let (tokens, targets) = (&training.tokens, &training.targets);
            bencher.iter(|| {
                let loss = planned.forward_backward((tokens, targets));
                loss.expect("gradients")
            });
        });
        group.bench_function("planned step", |bencher| {
            let (tokens, targets) = (&training.tokens, &training.targets);
            bencher.iter(|| {
                let loss = planned.run(&mut training.optimizer, (tokens, targets));
                loss.expect("a step")
            });
        });
    }
    Ok(())
}

fn all(criterion: &mut Criterion) {
    if let Err(error) = measure(criterion) {
        panic!("{error}");
    }
}

criterion_group! {
    name = steps;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_secs(2))
        .measurement_time(Duration::from_secs(5));
    targets = all
}
criterion_main!(steps);
