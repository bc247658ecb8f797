//! A GPU that is full: rows that say so, and runs that go on.

use super::{number, run, text};
use crate::child;
use candle_core::{DType, Tensor};
use tallow::attention::Algorithm;
use tallow::bench::{AttentionRun, EndToEnd, Execution, Sampling, alternate};
use tallow::hardware::available_bytes_on;
use tallow::memory::{AttentionWorkload, Mode};
use tallow::model::TransformerConfig;
use tallow::report::Fields;

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
        execution,
        available_bytes,
        warmup_steps: 0,
        steps: 2,
        ..run(Mode::TrainStep)
    }
}

fn attention(sequence_length: usize) -> AttentionRun {
    AttentionRun {
        workload: AttentionWorkload {
            algorithm: Algorithm::Naive,
            sequence_length,
            ..Default::default()
        },
        sampling: Sampling {
            warmup_steps: 0,
            iterations: 2,
            ..Default::default()
        },
        execution: Execution::Eager,
    }
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

/// Alone in its process, whose end gives the memory back whatever happens.
#[test]
#[ignore = "needs a CUDA device"]
fn a_full_gpu_is_a_row() {
    if child::ran("bench::gpu::a_full_gpu_is_a_row") {
        return;
    }
    let gpu = crate::gpu();
    let rows = |run: EndToEnd| run.run(&gpu, |_, _| ()).unwrap();
    let executions = [Execution::Eager, Execution::Planned];
    // Once while there is room, so that nothing but the step's own memory is missing later.
    for execution in executions {
        assert_ran(&rows(step(execution, true, None)));
    }
    let there = available_bytes_on(&gpu).unwrap();
    let filler = Tensor::zeros((there - GIB) as usize, DType::U8, &gpu).unwrap();
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
    drop(filler);
    for execution in executions {
        assert_ran(&rows(step(execution, false, None)));
    }
    assert!(profiled(false).unwrap().peak_bytes > GIB);
}
