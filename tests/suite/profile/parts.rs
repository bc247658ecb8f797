//! The time of matmuls and softmax inside CPU ops.

use super::{BATCH, LENGTH, config, exclusive, record};
use crate::settings::in_precision;
use candle_core::{Device, Tensor};
use rstest::rstest;
use tallow::attention::Algorithm;
use tallow::compile::Step;
use tallow::model::TransformerLM;
use tallow::ops::{KernelPolicy, with_kernel_policy};
use tallow::optim::{AdamWConfig, Optimizer};
use tallow::precision::Precision;
use tallow::profile::{Grouping, Parts, ProfileReport, Profiler, Recording, Row, Selection};

fn rows(recording: &Recording) -> Vec<Row> {
    let report = ProfileReport::new(recording, &Selection::default(), Grouping::Name).unwrap();
    let rows = report.rows.into_iter();
    rows.filter(|row| !row.is_gap()).collect()
}

fn check(rows: &[Row]) {
    for row in rows {
        let Parts {
            matmul_ns,
            scores_ns,
            values_ns,
            softmax_ns,
            attention_ns,
        } = row.parts;
        assert!(row.parts.sum_ns() <= row.total_ns, "{row:?}");
        assert_eq!(attention_ns, 0);
        let is_attention = row.name.contains("attention");
        let multiplies = row.is_matmul();
        assert_eq!(matmul_ns > 0, multiplies || is_attention, "{row:?}");
        // Every matmul of attention is either of scores or of values, and no other op's is.
        let named_ns = scores_ns + values_ns;
        let expected_ns = if is_attention { matmul_ns } else { 0 };
        let rounding_ns = 10 * row.instances as u64; // from scaling a loop's parts
        assert!(named_ns.abs_diff(expected_ns) <= rounding_ns, "{row:?}");
        assert_eq!([scores_ns > 0, values_ns > 0], [is_attention; 2], "{row:?}");
        assert_eq!(
            softmax_ns > 0,
            is_attention || row.name == "softmax",
            "{row:?}"
        );
        // The rest is not empty for ops with a gate or a loss, and for attention.
        if ["swiglu_linear", "linear_cross_entropy"].contains(&row.name.as_str()) || is_attention {
            assert!(row.rest_ns() > 0, "{row:?}");
        }
    }
}

#[rstest]
fn eager_ops_tell_their_parts(
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
    #[values(Precision::F32, Precision::BF16)] precision: Precision,
) {
    let rows = rows(&record(attention, precision));
    assert!(rows.iter().any(|row| row.name.contains("attention")));
    check(&rows);
}

#[rstest]
fn planned_calls_tell_their_parts(
    #[values(Algorithm::Naive, Algorithm::Flash)] attention: Algorithm,
    #[values(Precision::F32, Precision::BF16)] precision: Precision,
) {
    let model = TransformerLM::new(&config(), 5, &Device::Cpu).unwrap();
    let model = model.with_attention(attention).unwrap();
    let mut optimizer = Optimizer::new(model.parameters(), AdamWConfig::default()).unwrap();
    let plan = in_precision(precision);
    let mut step = Step::for_model(&model, &optimizer, &plan).unwrap();
    let tokens = Tensor::zeros((BATCH, LENGTH), candle_core::DType::U32, &Device::Cpu).unwrap();
    step.prepare((&tokens, &tokens)).unwrap();
    let _lock = exclusive();
    let profiler = Profiler::start_on_this_thread().unwrap();
    step.run(&mut optimizer, (&tokens, &tokens)).unwrap();
    let recording = profiler.finish().unwrap();
    let rows = rows(&recording);
    assert!(rows.iter().any(|row| row.name.contains("attention")));
    check(&rows);
    let lines = tallow::profile::Balance::new(&recording).lines;
    assert!(
        lines
            .iter()
            .all(|line| !line.kind.name().starts_with("candle")),
        "{lines:?}"
    );
}

#[test]
fn references_are_parts_as_a_whole() {
    let record = || record(Algorithm::Naive, Precision::F32);
    let rows = rows(&with_kernel_policy(KernelPolicy::Reference, record));
    let row = |name: &str| rows.iter().find(|row| row.name == name).unwrap();
    assert_eq!(row("softmax").parts.softmax_ns, row("softmax").total_ns);
    assert_eq!(row("matmul").parts.matmul_ns, row("matmul").total_ns);
    assert_eq!(row("mask").parts, Parts::default());
}

/// A matmul of many tasks on many threads has no more time than its op's wall time.
#[test]
fn parts_are_scaled_to_the_wall_time() {
    let x = Tensor::ones((64, 96, 96), candle_core::DType::F32, &Device::Cpu).unwrap();
    let _lock = exclusive();
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(4)
        .build()
        .unwrap();
    let profiler = Profiler::start().unwrap();
    pool.install(|| tallow::ops::matmul(&x, &x)).unwrap();
    let recording = profiler.finish().unwrap();
    let span = recording
        .spans
        .iter()
        .find(|span| span.name() == "matmul")
        .unwrap();
    let matmul_ns = span.parts.matmul_ns;
    assert!(0 < matmul_ns && matmul_ns <= span.duration_ns(), "{span:?}");
}
