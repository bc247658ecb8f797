//! Estimated step times of several GPUs.

use crate::check::refusal;
use tallow::compile::{Batch, Plan, Rates, Step, StepConfig, StepRanks, Target, Timeline};
use tallow::distributed::{Exchange, FullyShardConfig, ReplicatedConfig, Shard};
use tallow::internals::Op;
use tallow::model::{TransformerConfig, TransformerLM};
use tallow::precision::Precision;

const RATES: Rates = Rates {
    matmul_flops: 1e12,
    memory_bytes: 1e11,
    kernel_seconds: 1e-6,
    reduce_bytes: 1e10,
    gather_bytes: 5e9,
    exchange_seconds: 1e-5,
    contention: 0.25,
};

fn model() -> TransformerLM {
    let config = TransformerConfig {
        vocab_size: 1000,
        context_length: 32,
        d_model: 64,
        num_layers: 4,
        num_heads: 4,
        d_ff: 256,
        ..Default::default()
    };
    TransformerLM::meta(&config).unwrap()
}

fn alone() -> StepConfig {
    StepConfig::default()
}

fn replicated(exchange: Exchange) -> StepConfig {
    let dtype = None;
    StepConfig {
        ranks: StepRanks::Replicated(ReplicatedConfig { exchange, dtype }),
        ..alone()
    }
}

/// Returns the strategies: replicated, sharded optimizer, fully sharded.
fn strategies(world_size: usize) -> [(&'static str, StepConfig); 3] {
    let bucket_bytes = 1 << 16;
    let exchange = ReplicatedConfig {
        exchange: Exchange::Overlapped { bucket_bytes },
        dtype: None,
    };
    let parts = FullyShardConfig {
        dtype: None,
        bucket_bytes,
    };
    let own = Shard {
        rank: 0,
        world_size,
    };
    let [replicated, sharded, fully] = [
        StepRanks::Replicated(exchange),
        StepRanks::ShardedOptimizer(exchange, own),
        StepRanks::FullySharded(parts, own),
    ]
    .map(|ranks| StepConfig { ranks, ..alone() });
    [
        ("replicated", replicated),
        ("sharded", sharded),
        ("fully", fully),
    ]
}

/// Two sequences of 32 tokens.
const BATCH: [usize; 2] = [2, 32];

fn planned(config: &StepConfig) -> Plan {
    let batch = Batch::meta(BATCH[0], BATCH[1]).unwrap();
    Step::plan_for_model(Target::Cuda, &model(), config, batch)
        .unwrap()
        .0
}

fn estimated(config: &StepConfig, world_size: usize, rates: &Rates) -> Timeline {
    planned(config).timeline(world_size, rates).unwrap()
}

fn close(a: f64, b: f64) {
    assert!((a - b).abs() <= 1e-9 * b.abs().max(1e-12), "{a} {b}");
}

#[test]
fn a_step_is_its_kernels_and_what_shows_of_its_exchanges() {
    let alone = estimated(&alone(), 1, &RATES);
    assert_eq!((alone.exchange_seconds, alone.sent_bytes), (0.0, 0.0));
    close(alone.step_seconds, alone.kernel_seconds);
    for world_size in [2, 8] {
        for (name, config) in strategies(world_size) {
            let step = estimated(&config, world_size, &RATES);
            let parts = step.kernel_seconds + step.waiting_seconds + step.contention_seconds;
            close(step.step_seconds, parts);
            assert!(step.exchange_seconds > 0.0, "{name}");
            assert!(step.waiting_seconds < step.exchange_seconds, "{name}");
            // Contention is at most a quarter of the exchanges' time, which is within the step.
            assert!(step.contention_seconds > 0.0, "{name}");
            assert!(step.contention_seconds <= 0.25 * step.exchange_seconds * (1.0 + 1e-9));
            assert!(step.step_seconds >= step.exchange_seconds, "{name}");
        }
    }
}

/// On the CPU, calls before the micro-batches (here copies of weights) run in every step, and are counted.
#[test]
fn calls_before_the_micro_batches_are_counted() {
    let config = StepConfig {
        accumulation: 2,
        precision: Precision::BF16,
        ..alone()
    };
    let batch = Batch::meta(2 * BATCH[0], BATCH[1]).unwrap();
    let (plan, _) = Step::plan_for_model(Target::Cpu, &model(), &config, batch).unwrap();
    assert!(plan.per_micro_batch().start > 0);
    let rates = Rates {
        matmul_flops: 1e300,
        memory_bytes: 1e300,
        kernel_seconds: 1.0,
        ..RATES
    };
    let calls = plan.calls().iter().enumerate();
    let kernels = calls.filter(|(_, call)| matches!(call.op, Op::Kernel(_)));
    let runs: usize = kernels.map(|(i, _)| plan.runs_per_step(i)).sum();
    close(
        plan.timeline(1, &rates).unwrap().kernel_seconds,
        runs as f64,
    );
}

/// A rank sends the bytes of NCCL's ring and tree algorithms.
#[test]
fn what_a_rank_sends() {
    let parameter_bytes = 4.0 * model().num_parameters() as f64;
    for world_size in [2, 4] {
        let others = (world_size - 1) as f64 / world_size as f64;
        let [replicated, sharded, fully] =
            strategies(world_size).map(|(_, config)| estimated(&config, world_size, &RATES));
        let loss_bytes = 2.0 * others * 8.0; // one f64
        close(
            replicated.sent_bytes,
            2.0 * others * parameter_bytes + loss_bytes,
        );
        // Reduced to the owners and broadcast by them.
        close(
            sharded.sent_bytes,
            2.0 * others * parameter_bytes + loss_bytes,
        );
        // Gathered twice and scattered once. The embedding and the head, which only forward reads, are gathered once,
        // and so is forward's last bucket: the last norm and w2.
        let read_once = 4.0 * 2.0 * (1000.0 * 64.0);
        let kept = 4.0 * (64.0 + 64.0 * 256.0);
        let gathered = 2.0 * parameter_bytes - read_once - kept;
        close(
            fully.sent_bytes,
            others * (gathered + parameter_bytes) + loss_bytes,
        );
    }
}

#[test]
fn what_the_network_does_to_a_step() {
    let free = Rates {
        reduce_bytes: f64::INFINITY,
        gather_bytes: f64::INFINITY,
        exchange_seconds: 0.0,
        ..RATES
    };
    let quiet = Rates {
        contention: 0.0,
        ..RATES
    };
    for (name, config) in strategies(4) {
        let step = estimated(&config, 4, &free);
        close(step.step_seconds, step.kernel_seconds);
        let mut last = step.step_seconds;
        for rate in [1e10, 1e9, 1e8, 1e7] {
            let slower = Rates {
                reduce_bytes: rate,
                gather_bytes: rate,
                ..quiet
            };
            let step = estimated(&config, 4, &slower);
            assert!(step.step_seconds > last, "{name} at {rate}");
            assert!(step.step_seconds <= step.kernel_seconds + step.exchange_seconds);
            last = step.step_seconds;
        }
        let share = last / estimated(&config, 4, &quiet).kernel_seconds;
        assert!(
            share > 10.0,
            "{name}: a network that slow is all of the step"
        );
    }
    // Nothing overlaps an exchange after backward; the loss's exchange of 8 bytes is earlier.
    let flat = estimated(&replicated(Exchange::Flat), 4, &quiet);
    let of_loss = quiet.exchange_seconds + 12.0 / quiet.reduce_bytes;
    close(flat.waiting_seconds, flat.exchange_seconds - of_loss);
    let bucket_bytes = 1 << 16;
    let overlapped = replicated(Exchange::Overlapped { bucket_bytes });
    let overlapped = estimated(&overlapped, 4, &quiet);
    close(overlapped.sent_bytes, flat.sent_bytes);
    assert!(overlapped.waiting_seconds < flat.waiting_seconds);
}

#[test]
fn rates_are_fitted_to_a_step_that_was_measured() {
    let plan = planned(&alone());
    let fitted = RATES.fitted_to(&plan, 0.125).unwrap();
    close(plan.timeline(1, &fitted).unwrap().step_seconds, 0.125);
    assert_eq!(fitted.reduce_bytes, RATES.reduce_bytes);
}

/// Sharded strategies need less memory the more ranks there are.
#[test]
fn the_memory_of_a_rank() {
    let bytes = [0, 1, 2].map(|strategy| {
        [1, 8, 1024].map(|world_size| planned(&strategies(world_size)[strategy].1).total_bytes())
    });
    assert_eq!(bytes[0][0], bytes[0][2]);
    for divided in &bytes[1..] {
        assert!(divided[1] < divided[0] && divided[2] < divided[1]);
    }
}

#[test]
fn rates_that_cannot_be_are_refused() {
    let plan = planned(&alone());
    for (rates, field) in [
        (
            Rates {
                matmul_flops: 0.0,
                ..RATES
            },
            "matmul_flops",
        ),
        (
            Rates {
                memory_bytes: f64::NAN,
                ..RATES
            },
            "memory_bytes",
        ),
        (
            Rates {
                reduce_bytes: -1.0,
                ..RATES
            },
            "reduce_bytes",
        ),
        (
            Rates {
                kernel_seconds: -1.0,
                ..RATES
            },
            "kernel_seconds",
        ),
        (
            Rates {
                exchange_seconds: f64::INFINITY,
                ..RATES
            },
            "exchange_seconds",
        ),
        (
            Rates {
                contention: 1.0,
                ..RATES
            },
            "contention",
        ),
    ] {
        refusal(plan.timeline(2, &rates), &[field]);
    }
    for world_size in [0, usize::MAX] {
        refusal(plan.timeline(world_size, &RATES), &["world_size"]);
    }
    assert!(RATES.fitted_to(&plan, 0.0).is_err());
}
