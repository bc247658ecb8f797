//! A full GPU: rows report out of memory, and runs continue. This is a separate binary because cargo runs test binaries
//! one after the other. Tests of the same binary would find no free memory on the GPU, or use memory that this test
//! counts on.

use candle_core::{DType, Device, Tensor};
use tallow::attention::Algorithm;
use tallow::bench::{
    AttentionRun, AttentionTask, EndToEnd, EndToEndRow, Execution, Status, alternate,
};
use tallow::hardware::available_bytes_on;
use tallow::memory::{AttentionWorkload, Mode};
use tallow::model::TransformerConfig;
use tallow::nn::Checkpointing;
use tallow::report::Fields;

#[global_allocator]
static ALLOCATOR: tallow::memory::tracker::Tracker<std::alloc::System> =
    tallow::memory::tracker::Tracker::new(std::alloc::System);

const GIB: u64 = 1 << 30;

/// Returns a training step that fits in 1 GiB, or one that needs more.
fn step(execution: Execution, fits: bool, available_bytes: Option<u64>) -> EndToEnd {
    let (batch_size, sequence_length) = match fits {
        true => (1, 32),
        false => (24, 512),
    };
    EndToEnd {
        size: String::new(),
        config: TransformerConfig {
            context_length: 512,
            ..Default::default()
        },
        attention: Algorithm::Naive,
        checkpointing: Checkpointing::None,
        batch_size,
        sequence_length,
        mode: Mode::TrainStep,
        warmup_steps: 0,
        steps: 2,
        execution,
        step: Default::default(),
        seed: 1,
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
        warmup_steps: 0,
        iterations: 2,
        ..Default::default()
    }
}

fn fields(rows: &[EndToEndRow]) -> Vec<Fields> {
    rows.iter().map(|row| Fields::of(row).unwrap()).collect()
}

fn text(row: &Fields, key: &str) -> String {
    let text = row.get(key).and_then(|value| value.as_str());
    text.unwrap_or_else(|| panic!("{key}")).to_string()
}

fn number(row: &Fields, key: &str) -> f64 {
    let number = row.get(key).and_then(|value| value.as_f64());
    number.unwrap_or_else(|| panic!("{key}"))
}

/// Allocates until about 1 GiB is left, whatever the size of the GPU. The driver may use some memory for a large
/// allocation itself, so the free memory is read again after each.
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

/// Checks that the row ran out of memory by the driver's error or by the plan's.
fn assert_ran_out(rows: &[Fields]) {
    let [row] = rows else {
        panic!("{rows:?}");
    };
    assert_eq!(text(row, "status"), "OOM");
    let reason = text(row, "reason");
    let answers = ["OUT_OF_MEMORY", "the arena of a planned step: needs"];
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
    let rows = |run: EndToEnd| fields(&run.run(&gpu, |_, _| ()).unwrap());
    let executions = [Execution::Eager, Execution::Planned];
    // Warms up while memory is free, so that later only the step's own memory is missing.
    for execution in executions {
        assert_ran(&rows(step(execution, true, None)));
    }
    let fillers = fill(&gpu);
    for execution in executions {
        let left = available_bytes_on(&gpu);
        let refused = rows(step(execution, false, left));
        assert_eq!(text(&refused[0], "status"), "OOM");
        // The refusal comes from the estimate, not from the driver: it has no reason, or only that the estimate is a
        // lower bound.
        let reason = refused[0].get("reason").map(ToString::to_string);
        assert!(
            reason.is_none_or(|reason| reason.contains("lower bound")),
            "{refused:?}"
        );
        let wanted = number(&refused[0], "estimate_bytes");
        assert!(wanted > number(&refused[0], "available_bytes"));
        // The same without a limit; then a step that fits.
        assert_ran_out(&rows(step(execution, false, None)));
        assert_ran(&rows(step(execution, true, None)));
        let turns = [false, true].map(|fits| step(execution, fits, None));
        let turns = alternate(&turns, 2, &gpu, |_, _, _| ()).unwrap();
        assert_ran_out(&fields(&turns[0]));
        assert_ran(&fields(&turns[1]));
    }
    let rows_of = |length| attention(length).run(&gpu, |_, _| ()).unwrap().rows();
    assert_ran_out(&rows_of(8192).unwrap());
    assert_ran(&rows_of(256).unwrap());
    let profiled = |fits| {
        let step = step(Execution::Eager, fits, None);
        step.profile_memory(&gpu, Default::default()).unwrap()
    };
    let (row, profile) = profiled(false);
    assert_eq!(
        (row.status, profile.is_some()),
        (Status::OutOfMemory, false)
    );
    assert!(profiled(true).0.peak_bytes() < Some(GIB));
    drop(fillers);
    for execution in executions {
        assert_ran(&rows(step(execution, false, None)));
    }
    assert!(profiled(false).0.peak_bytes() > Some(GIB));
}
