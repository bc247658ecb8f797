//! A GPU that is full: rows that say so, and runs that go on. A binary of its own, since cargo runs test binaries one
//! after the other: tests next to this one would find no memory on the GPU, and take some of what it counts on.

use candle_core::{DType, Device, Tensor};
use tallow::attention::Algorithm;
use tallow::bench::{AttentionRun, AttentionTask, EndToEnd, Execution, Sampling, alternate};
use tallow::hardware::available_bytes_on;
use tallow::memory::{AttentionWorkload, Mode};
use tallow::model::TransformerConfig;
use tallow::precision::Precision;
use tallow::report::Fields;

/// As the suite's.
#[global_allocator]
static ALLOCATOR: tallow::memory::tracker::Tracker<std::alloc::System> =
    tallow::memory::tracker::Tracker::new(std::alloc::System);

const GIB: u64 = 1 << 30;

/// A training step that takes more than 1 GiB, or one that takes less.
fn step(execution: Execution, fits: bool, available_bytes: Option<u64>) -> EndToEnd {
    let (batch_size, sequence_length) = match fits {
        true => (1, 32),
        false => (24, 512),
    };
    EndToEnd {
        config: TransformerConfig {
            context_length: 512,
            ..TransformerConfig::tiny()
        },
        batch_size,
        sequence_length,
        mode: Mode::TrainStep,
        precision: Precision::F32,
        warmup_steps: 0,
        steps: 2,
        optimizer: Default::default(),
        execution,
        optimizer_in_backward: false,
        memory_budget_bytes: None,
        seed: 1,
        peak_flops: Some(1e12),
        available_bytes,
    }
}

fn attention(sequence_length: usize) -> AttentionRun {
    AttentionRun {
        task: AttentionTask::Alone(AttentionWorkload {
            algorithm: Algorithm::Naive,
            sequence_length,
            ..Default::default()
        }),
        sampling: Sampling {
            warmup_steps: 0,
            iterations: 2,
            ..Default::default()
        },
        execution: Execution::Eager,
    }
}

fn text(row: &Fields, key: &str) -> String {
    let text = row.get(key).and_then(|value| value.as_str());
    text.unwrap_or_else(|| panic!("{key}")).to_string()
}

fn number(row: &Fields, key: &str) -> f64 {
    let number = row.get(key).and_then(|value| value.as_f64());
    number.unwrap_or_else(|| panic!("{key}"))
}

/// Takes memory until about 1 GiB is left, whatever the card has: a driver may need some for a large allocation's own
/// sake, so what is left is asked for again after each.
fn fill(gpu: &Device) -> Vec<Tensor> {
    let mut fillers = Vec::new();
    let left = || available_bytes_on(gpu).unwrap();
    while left() > GIB + GIB / 4 {
        let bytes = match left() - GIB {
            much if much > 4 * GIB => much - 2 * GIB,
            rest => rest,
        };
        fillers.push(Tensor::zeros(bytes as usize, DType::U8, gpu).unwrap());
    }
    assert!(left() > GIB - GIB / 4, "{} bytes are left", left());
    fillers
}

/// The driver's answer or the plan's, and what there was when more was asked for.
fn assert_ran_out(rows: &[Fields]) {
    let [row] = rows else {
        panic!("{rows:?}");
    };
    assert_eq!(text(row, "status"), "OOM");
    let reason = text(row, "reason");
    let answers = ["OUT_OF_MEMORY", "the arena of a planned step: wants"];
    assert!(
        answers.iter().any(|answer| reason.contains(answer)),
        "{reason}"
    );
    let available = number(row, "available_bytes");
    assert!(
        (0.5 * GIB as f64..1.5 * GIB as f64).contains(&available),
        "{row:?}"
    );
}

fn assert_ran(rows: &[Fields]) {
    assert!(
        rows.iter().all(|row| text(row, "status") == "ok"),
        "{rows:?}"
    );
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_full_gpu_is_a_row() {
    let gpu = tallow::device("cuda:0").unwrap();
    let rows = |run: EndToEnd| run.run(&gpu, |_, _| ()).unwrap();
    let executions = [Execution::Eager, Execution::Planned];
    // Once while there is room, so that nothing but the step's own memory is missing later.
    for execution in executions {
        assert_ran(&rows(step(execution, true, None)));
    }
    let fillers = fill(&gpu);
    for execution in executions {
        let left = available_bytes_on(&gpu);
        let refused = rows(step(execution, false, left));
        assert_eq!(text(&refused[0], "status"), "OOM");
        // Nothing of the driver's: at most that the estimate is a lower bound.
        let reason = refused[0].get("reason").map(ToString::to_string);
        assert!(
            reason.is_none_or(|reason| reason.contains("lower bound")),
            "{refused:?}"
        );
        let wanted = number(&refused[0], "estimate_bytes");
        assert!(wanted > number(&refused[0], "available_bytes"));
        // The same without a limit, and what comes after it.
        assert_ran_out(&rows(step(execution, false, None)));
        assert_ran(&rows(step(execution, true, None)));
        let turns = [false, true].map(|fits| step(execution, fits, None));
        let turns = alternate(&turns, 2, &gpu, |_, _, _| ()).unwrap();
        assert_ran_out(&turns[0]);
        assert_ran(&turns[1]);
    }
    assert_ran_out(&attention(8192).run(&gpu, |_, _| ()).unwrap());
    assert_ran(&attention(256).run(&gpu, |_, _| ()).unwrap());
    let profiled = |fits| {
        let step = step(Execution::Eager, fits, None);
        step.profile_memory(&gpu, Default::default())
    };
    let error = profiled(false).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    assert!(profiled(true).unwrap().peak_bytes < GIB);
    drop(fillers);
    for execution in executions {
        assert_ran(&rows(step(execution, false, None)));
    }
    assert!(profiled(false).unwrap().peak_bytes > GIB);
}
