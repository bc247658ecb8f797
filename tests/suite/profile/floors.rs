//! Floors of calls at given rates, of plans and of recordings.

use super::{BATCH, LENGTH, config, exclusive, record};
use crate::check::refusal;
use candle_core::{DType, Device, Tensor};
use rstest::rstest;
use tallow::Error;
use tallow::attention::Algorithm;
use tallow::compile::{Batch, Step, StepConfig, Target};
use tallow::model::TransformerLM;
use tallow::nn;
use tallow::optim::{AdamWConfig, Optimizer};
use tallow::precision::Precision;
use tallow::profile::{Cost, DeviceRates, Grouping, ProfileReport, Profiler, Selection};

fn rates() -> DeviceRates {
    DeviceRates {
        matmul_flops: vec![(DType::F32, 1e9), (DType::BF16, 3e9), (DType::F64, 4e8)],
        memory_bytes: 5e9,
    }
}

#[track_caller]
fn assert_near(found: f64, expected: f64) {
    assert!(
        (found / expected - 1.0).abs() < 1e-12,
        "{found}, {expected}"
    );
}

#[test]
fn a_floor_is_the_longer_of_two_times() {
    let cost = |matmul_flops, read_bytes, written_bytes| Cost {
        matmul_flops,
        other_flops: 1e15, // not in a floor
        read_bytes,
        written_bytes,
        ..Default::default()
    };
    let seconds = |cost, dtype| rates().floor_seconds(&cost, dtype);
    assert_eq!(seconds(cost(2e9, 1e9, 1e9), DType::F32), Some(2.0));
    assert_eq!(seconds(cost(3e9, 1e9, 1e9), DType::BF16), Some(1.0));
    assert_eq!(seconds(cost(2e9, 15e9, 5e9), DType::F32), Some(4.0));
    assert_eq!(seconds(cost(0.0, 5e9, 5e9), DType::F16), Some(2.0));
    assert_eq!(seconds(cost(1.0, 5e9, 5e9), DType::F16), None);
}

/// With one of the rates out of the way, the floors are a step's bytes, or its FLOPs, over the other.
#[rstest]
fn floors_of_a_plan_add_up(#[values(1, 3)] accumulation: usize) {
    let step = StepConfig {
        accumulation,
        clip_norm: Some(1.0),
        ..Default::default()
    };
    let model = TransformerLM::meta(&config()).unwrap();
    let batch = Batch::meta(BATCH * accumulation, LENGTH).unwrap();
    let (plan, _) = Step::plan_for_model(Target::Cpu, &model, &step, batch).unwrap();
    assert_eq!(plan.matmul_dtypes(), [DType::F32]);
    let sum = |matmul_flops, memory_bytes| {
        let rates = DeviceRates {
            matmul_flops: vec![(DType::F32, matmul_flops)],
            memory_bytes,
        };
        let floors = plan.floors(&rates).unwrap();
        floors.iter().map(|floor| floor.seconds).sum::<f64>()
    };
    assert_near(sum(1e9, f64::INFINITY), plan.flops() / 1e9);
    assert_near(sum(f64::INFINITY, 1e9), plan.traffic_bytes() / 1e9);
    let both = plan.flops() / 1e9 + plan.traffic_bytes() / 1e9;
    assert!(sum(1e9, 1e9) < both && sum(1e9, 1e9) > plan.flops() / 1e9);
    let floors = plan.floors(&rates()).unwrap();
    let head = |name: &str| floors.iter().find(|floor| floor.op == name).unwrap().runs;
    assert_eq!((head("rms_norm"), head("adamw")), (accumulation, 1));
}

/// The report of a recorded step has the floors of its plan, and its rows add up to the measured time.
#[rstest]
fn a_recorded_step_has_the_floors_of_its_plan(
    #[values(
        (Precision::F32, DType::F32),
        (Precision::BF16, DType::F32),
        (Precision::F32, DType::F64)
    )]
    (precision, weights): (Precision, DType),
    #[values(Grouping::Name, Grouping::Layer, Grouping::Path)] grouping: Grouping,
) {
    let _lock = exclusive();
    let device = Device::Cpu;
    let seeded = nn::seeded(5, weights, &device);
    let model = TransformerLM::from_var_builder(&config(), seeded).unwrap();
    let mut optimizer = Optimizer::new(model.parameters(), AdamWConfig::default()).unwrap();
    let settings = StepConfig {
        precision,
        ..Default::default()
    };
    let mut step = Step::for_model(&model, &optimizer, &settings).unwrap();
    let tokens: Vec<u32> = (0..(BATCH * LENGTH) as u32).collect();
    let tokens = Tensor::from_vec(tokens, (BATCH, LENGTH), &device).unwrap();
    step.run(&mut optimizer, (&tokens, &tokens)).unwrap(); // casts the weights
    let profiler = Profiler::start_on_this_thread().unwrap();
    for _ in 0..3 {
        let _step = tallow::profile::step();
        step.run(&mut optimizer, (&tokens, &tokens)).unwrap();
    }
    let recording = profiler.finish().unwrap();
    let plan = step.plan().unwrap();
    assert_eq!(recording.matmul_dtypes(), plan.matmul_dtypes());
    let computed = if precision == Precision::BF16 {
        DType::BF16
    } else {
        weights
    };
    assert_eq!(plan.matmul_dtypes(), [computed]);
    let all = Selection::default();
    let report = ProfileReport::with_floors(&recording, &all, grouping, &rates()).unwrap();
    let sum = report.sum("sum", |_| true);
    let planned: f64 = plan
        .floors(&rates())
        .unwrap()
        .iter()
        .map(|floor| floor.seconds)
        .sum();
    assert_near(sum.floor_ns.unwrap(), 3.0 * 1e9 * planned);
    assert_eq!(sum.total_ns, report.whole_ns);
    assert_near(
        sum.floor_ns.unwrap() + sum.lost_ns().unwrap(),
        report.whole_ns as f64,
    );
    let lost = report.rows.iter().filter(|row| !row.is_gap());
    let lost: Vec<f64> = lost.map(|row| row.lost_ns().unwrap()).collect();
    assert!(lost.is_sorted_by(|a, b| a >= b), "{lost:?}");
    let gaps = report.rows.iter().filter(|row| row.is_gap());
    for gap in gaps {
        assert_eq!(gap.lost_ns(), Some(gap.total_ns as f64), "{}", gap.name);
    }
    let table = report.table();
    for (row, fields) in report.rows.iter().zip(&table.rows) {
        let lost = fields.get("lost_ms_per_step").unwrap().as_f64().unwrap();
        assert!(
            (3e6 * lost - row.lost_ns().unwrap()).abs() < 1e-3,
            "{}",
            row.name
        );
    }
    assert!(
        table
            .columns
            .iter()
            .any(|column| column.key == "floor_ms_per_step")
    );
}

/// The bytes of an op that contains others are theirs.
#[test]
fn an_eager_step_has_floors() {
    let recording = record(Algorithm::Naive, Precision::BF16);
    let all = Selection::default();
    let floors = |rates| {
        let report = ProfileReport::with_floors(&recording, &all, Grouping::Name, rates).unwrap();
        report.sum("", |_| true).floor_ns.unwrap()
    };
    let costs = recording.spans.iter().filter_map(|span| span.cost());
    let bytes: f64 = costs.map(|cost| cost.bytes()).sum();
    let rates = DeviceRates {
        matmul_flops: vec![(DType::F32, f64::INFINITY), (DType::BF16, f64::INFINITY)],
        memory_bytes: 1e9,
    };
    assert!(floors(&rates) <= bytes && floors(&rates) > 0.5 * bytes);
    let plain = ProfileReport::new(&recording, &all, Grouping::Name).unwrap();
    assert!(plain.rows.iter().all(|row| row.floor_ns.is_none()));
}

#[test]
fn floors_that_are_not_known() {
    let recording = record(Algorithm::Naive, Precision::F32);
    let (all, by_kernel) = (Selection::default(), Grouping::Kernel);
    let error = refusal(
        ProfileReport::with_floors(&recording, &all, by_kernel, &rates()),
        &["grouping must be Name, Path or Layer", "Kernel"],
    );
    assert!(matches!(error, Error::Config { .. }));
    let halves = DeviceRates {
        matmul_flops: vec![(DType::F16, 1e9)],
        ..rates()
    };
    let report = ProfileReport::with_floors(&recording, &all, Grouping::Name, &halves).unwrap();
    let row = |name: &str| report.rows.iter().find(|row| row.name == name).unwrap();
    assert_eq!(row("linear").floor_ns, None);
    assert!(row("add").floor_ns.is_some());

    let model = TransformerLM::meta(&config()).unwrap();
    let batch = Batch::meta(BATCH, LENGTH).unwrap();
    let step = StepConfig::default();
    let (plan, _) = Step::plan_for_model(Target::Cpu, &model, &step, batch).unwrap();
    let error = refusal(
        plan.floors(&halves),
        &["matmul_flops must be a rate for f32", "matmul_dtypes()"],
    );
    assert!(matches!(error, Error::Config { .. }));
}

#[test]
fn rates_are_measured_once() {
    let dtypes = [DType::F32, DType::BF16, DType::F32];
    let rates = DeviceRates::measure(&Device::Cpu, &dtypes).unwrap();
    let measured = rates.matmul_flops.iter().map(|(dtype, _)| *dtype);
    assert_eq!(measured.collect::<Vec<_>>(), [DType::F32, DType::BF16]);
    let text = rates.to_string();
    assert!(
        text.contains("FLOP/s in f32, ") && text.contains(" in bf16; a copy "),
        "{text}"
    );
    assert!(rates.memory_bytes > 0.0 && rates.matmul_flops.iter().all(|(_, rate)| *rate > 0.0));
    let again = DeviceRates::measure(&Device::Cpu, &dtypes).unwrap();
    assert_eq!(rates, again);
}
