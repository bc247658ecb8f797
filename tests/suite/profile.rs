//! `tallow::profile`: times add up, pictures show what was recorded, and every error.

mod answers;
mod balance;
mod costs;
mod floors;
mod kernels;
mod parts;
mod pictures;
mod refusals;
#[path = "../../examples/profile/answers.rs"]
mod sentences;
mod summary;

use crate::check::bits;
use crate::words;
use candle_core::{Device, Tensor};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tallow::attention::Algorithm;
use tallow::model::{TransformerConfig, TransformerLM};
use tallow::optim::{AdamWConfig, Optimizer, clip_grad_norm};
use tallow::precision::Precision;
use tallow::probe::{Kind, Path};
use tallow::profile::{self, Profiler, Recording, Span};

/// Locks the profiler: only one can run at a time, and tests run in parallel.
fn exclusive() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

const STEPS: usize = 2;
const BATCH: usize = 2;
const LENGTH: usize = 7;

fn config() -> TransformerConfig {
    TransformerConfig {
        vocab_size: 19,
        context_length: LENGTH,
        d_model: 12,
        num_layers: 3,
        num_heads: 2,
        d_ff: 20,
        ..Default::default()
    }
}

/// Takes some training steps, and returns the bits of all weights.
fn train(attention: Algorithm, precision: Precision) -> Vec<u64> {
    let model = TransformerLM::new(&config(), 5, &Device::Cpu).unwrap();
    let model = model.with_attention(attention).unwrap();
    let mut optimizer = Optimizer::new(model.parameters(), AdamWConfig::default()).unwrap();
    let tokens: Vec<u32> = (0..(BATCH * LENGTH) as u32).collect();
    let tokens = Tensor::from_vec(tokens, (BATCH, LENGTH), &Device::Cpu).unwrap();
    for _ in 0..STEPS {
        let _step = profile::step();
        let loss = {
            let _phase = profile::phase("forward");
            precision.run(|| model.loss(&tokens, &tokens)).unwrap()
        };
        let mut gradients = {
            let _phase = profile::phase("backward");
            loss.backward().unwrap()
        };
        let _phase = profile::phase("optimizer");
        clip_grad_norm(&mut gradients, &model.parameters(), 0.01).unwrap();
        optimizer.step(&gradients).unwrap();
    }
    let parameters = model.parameters().into_iter();
    parameters.flat_map(|(_, var)| bits(&var)).collect()
}

fn record(attention: Algorithm, precision: Precision) -> Recording {
    let _lock = exclusive();
    let profiler = Profiler::start_on_this_thread().unwrap();
    train(attention, precision);
    profiler.finish().unwrap()
}

/// Returns an invented range on thread 0.
fn span(
    kind: Kind,
    path: &str,
    phase: &'static str,
    times: (u64, u64),
    parent: Option<usize>,
) -> Span {
    let names = path.split('/').filter(|name| !name.is_empty());
    Span {
        kind,
        path: names.fold(Path::ROOT, |path, name| path.child(name)),
        phase,
        thread: 0,
        start_ns: times.0,
        end_ns: times.1,
        parent,
        inputs: Vec::new(),
        output: None,
        cost: None,
        parts: Default::default(),
        allocated_bytes: None,
    }
}

#[test]
fn recording_changes_no_bit() {
    for attention in [Algorithm::Naive, Algorithm::Flash] {
        for precision in [Precision::F32, Precision::BF16] {
            let _lock = exclusive();
            let before = train(attention, precision);
            let profiler = Profiler::start_on_this_thread().unwrap();
            let during = train(attention, precision);
            assert!(!profiler.finish().unwrap().spans.is_empty());
            assert!(before == during, "{attention} {precision}");
        }
    }
}

#[test]
fn laps_and_the_trainer_open_steps() {
    use tallow::bench::Stopwatch;
    use tallow::data::Tokens;
    use tallow::train::{TrainConfig, Trainer};

    let _lock = exclusive();
    let profiler = Profiler::start_on_this_thread().unwrap();
    let device = Device::Cpu;
    let lap = |lap: &mut tallow::bench::Lap<'_>| lap.time("forward", || Ok::<_, tallow::Error>(()));
    Stopwatch::new(&device)
        .warmup(1)
        .measure_phases(2, lap)
        .unwrap();
    let model = TransformerLM::new(&config(), 0, &device).unwrap();
    let settings = TrainConfig {
        batch_size: 1,
        sequence_length: 5,
        steps: 2,
        ..Default::default()
    };
    let ids: Vec<u32> = (0..100).map(|i| i % 19).collect();
    let tokens = Tokens::from_ids(ids, 19).unwrap();
    let mut trainer = Trainer::new(model, settings, tokens.clone(), tokens).unwrap();
    while trainer.step().unwrap().is_some() {}
    let recording = profiler.finish().unwrap();
    let steps = recording
        .spans
        .iter()
        .filter(|span| span.kind == Kind::Step);
    assert_eq!(steps.count(), 3 + 2);
    for phase in ["forward", "backward", "optimizer"] {
        let of_phase = |span: &&Span| span.kind == Kind::Phase && span.phase == phase;
        assert!(
            recording.spans.iter().filter(of_phase).count() >= 2,
            "{phase}"
        );
    }
}

#[test]
fn ranges_open_at_the_end_end_there() {
    let _lock = exclusive();
    let profiler = Profiler::start_on_this_thread().unwrap();
    let open = profile::range("open");
    drop(profile::range("closed"));
    let recording = profiler.finish().unwrap();
    drop(open);
    let [open, closed] = &recording.spans[..] else {
        panic!("{:?}", recording.spans)
    };
    assert_eq!((open.parent, closed.parent), (None, Some(0)));
    assert_eq!(open.end_ns, recording.duration_ns);
    assert!(open.start_ns <= closed.start_ns && closed.end_ns <= open.end_ns);

    // Ranges that were open before the profiler started are not recorded.
    let open = tallow::probe::listen(std::sync::Arc::new(ListenerWithoutReplays));
    let before = profile::range("before");
    let profiler = Profiler::start_on_this_thread().unwrap();
    drop(before);
    drop(open);
    assert_eq!(profiler.finish().unwrap().spans, []);
}

struct ListenerWithoutReplays;
impl tallow::probe::Listener for ListenerWithoutReplays {}
