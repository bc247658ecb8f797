//! Ignored targets: the loss of a step is the mean over all counted targets of its micro-batches and ranks.

use super::*;
use candle_core::{DType, Device, Tensor};
use rstest::rstest;
use tallow::data::{Batch, Batches};
use tallow::nn::ForwardContext;
use tallow::precision::Precision;

pub const IGNORED: i64 = -100;

/// The number of counted targets in each row of 16; a step has four rows.
pub const COUNTED: [[usize; 4]; 6] = [
    [16, 15, 16, 15],
    [16, 16, 8, 15],
    [0, 16, 1, 16], // a micro-batch without counted targets
    [0, 0, 0, 0],   // a step without counted targets
    [0, 0, 3, 16],  // one of two ranks without counted targets
    [8, 16, 15, 16],
];

/// Rows of ids whose first targets are counted, in batches of `batch_size`.
#[derive(Clone, Debug)]
pub struct MaskedRows {
    pub counted: Vec<usize>,
    pub batch_size: usize,
}

impl MaskedRows {
    pub fn new(counted: &[[usize; 4]], batch_size: usize) -> Self {
        Self {
            counted: counted.concat(),
            batch_size,
        }
    }
}

impl Batches for MaskedRows {
    fn len(&self) -> usize {
        self.counted.len() / self.batch_size
    }

    fn batch(&self, index: u64, device: &Device) -> tallow::Result<Batch> {
        let first = index as usize * self.batch_size;
        let (mut inputs, mut targets) = (Vec::<i64>::new(), Vec::<i64>::new());
        for row in first..first + self.batch_size {
            let ids = (0..17).map(|i| (((row * 31 + i) * 2_654_435_761) >> 7) % VOCAB);
            let ids: Vec<i64> = ids.map(|id| id as i64).collect();
            inputs.extend(&ids[..16]);
            let counts = |i: usize| i <= self.counted[row % self.counted.len()];
            targets.extend((1..17).map(|i| if counts(i) { ids[i] } else { IGNORED }));
        }
        let shape = (self.batch_size, 16);
        Ok(Batch {
            inputs: Tensor::from_vec(inputs, shape, device)?,
            targets: Tensor::from_vec(targets, shape, device)?,
        })
    }
}

fn sizes() -> TransformerConfig {
    TransformerConfig {
        context_length: 16,
        ..super::sizes()
    }
}

/// Returns settings of four rows per step, in batches of `batch_size`.
pub fn settings(batch_size: usize, precision: Precision) -> TrainConfig {
    TrainConfig {
        batch_size,
        sequence_length: 16,
        accumulation: 4 / batch_size,
        steps: COUNTED.len(),
        precision,
        schedule: Schedule::Constant { lr: 1e-2 },
        ignore_index: Some(IGNORED),
        ..super::settings()
    }
}

fn start(batch_size: usize, precision: Precision) -> Trainer {
    start_on(&Device::Cpu, batch_size, precision)
}

fn start_on(device: &Device, batch_size: usize, precision: Precision) -> Trainer {
    let model = TransformerLM::new(&sizes(), 5, device).unwrap();
    let data = MaskedRows::new(&COUNTED, batch_size);
    let config = settings(batch_size, precision);
    Trainer::new(model, config, data.clone(), data).unwrap()
}

/// Returns the mean loss over the counted targets of one step, computed from the means of its rows.
fn weighted_mean(model: &TransformerLM, step: usize, precision: Precision) -> f64 {
    let rows = MaskedRows::new(&COUNTED, 1);
    let mut sum = 0.0;
    for (row, counted) in (4 * step as u64..).zip(COUNTED[step]) {
        if counted > 0 {
            let batch = rows.batch(row, &Device::Cpu).unwrap();
            let (inputs, targets) = (&batch.inputs, &batch.targets);
            let inputs = inputs.narrow(1, 0, counted).unwrap(); // with a causal mask, later positions have no effect
            let targets = targets.narrow(1, 0, counted).unwrap();
            let context = ForwardContext::default();
            let loss = precision.run(|| model.loss_with(&inputs, &targets, &context, None));
            let loss = loss.unwrap().to_dtype(DType::F64).unwrap();
            sum += loss.to_scalar::<f64>().unwrap() * counted as f64;
        }
    }
    sum / COUNTED[step].iter().sum::<usize>() as f64
}

/// Four micro-batches with different counts have the loss, norm and weights of one batch of four rows.
#[rstest]
fn every_target_has_the_same_weight(
    #[values(Precision::F32, Precision::BF16, Precision::F16)] precision: Precision,
) {
    let tolerance = if precision == Precision::F32 {
        1e-5
    } else {
        4e-3
    };
    for batch_size in [4, 2, 1] {
        let mut parts = start(batch_size, precision);
        let mut judge = start(4, precision);
        for (step, counted) in COUNTED.iter().enumerate() {
            let expected = weighted_mean(parts.model(), step, precision);
            let before = bits(&parts);
            let report = parts.step().unwrap().unwrap();
            let wanted = judge.step().unwrap().unwrap();
            let tokens = counted.iter().sum();
            assert_eq!((report.step, report.tokens), (step + 1, tokens));
            assert_eq!(report.skipped, wanted.skipped, "step {step}");
            if tokens == 0 {
                assert!(report.skipped && report.loss.is_nan() && report.grad_norm.is_nan());
                assert!(
                    bits(&parts) == before,
                    "a step without targets updates nothing"
                );
                continue;
            }
            approx::assert_relative_eq!(report.loss, expected, max_relative = tolerance);
            if precision == Precision::F32 {
                let (norm, wanted_norm) = (report.grad_norm, wanted.grad_norm);
                approx::assert_relative_eq!(report.loss, wanted.loss, max_relative = 1e-5);
                approx::assert_relative_eq!(norm, wanted_norm, max_relative = 1e-4);
            }
        }
        assert!(parts.step().unwrap().is_none());
        assert_eq!(parts.history().losses.len(), COUNTED.len());
    }
}

/// Evaluations weight targets too, and require at least one.
#[test]
fn an_evaluation() {
    let mut trainer = start(1, Precision::F32);
    let model = trainer.model().clone();
    let counted = COUNTED.iter().map(|counted| counted.iter().sum::<usize>());
    let counted: Vec<usize> = counted.collect();
    let sum = (0..COUNTED.len()).filter(|step| counted[*step] > 0);
    let sum = sum.map(|step| weighted_mean(&model, step, Precision::F32) * counted[step] as f64);
    let expected = sum.sum::<f64>() / counted.iter().sum::<usize>() as f64;
    let got = trainer.evaluate().unwrap();
    approx::assert_relative_eq!(got, expected, max_relative = 1e-5);

    let (training, nothing) = (MaskedRows::new(&COUNTED, 1), MaskedRows::new(&[[0; 4]], 1));
    let config = settings(1, Precision::F32);
    let mut trainer = Trainer::new(model, config, training, nothing).unwrap();
    refusal(
        trainer.evaluate(),
        &["Trainer::evaluate", "at least one target that counts"],
    );
}

/// A run continues after a step without targets, whether it is stopped before or after that step.
#[rstest]
fn resumed_around_a_step_without_targets(#[values(3, 4)] stop: usize) {
    let mut whole = start(1, Precision::F16);
    take(&mut whole, usize::MAX);
    let mut first = start(1, Precision::F16);
    take(&mut first, stop);
    let (_folder, path) = checkpoint();
    first.save(&path).unwrap();
    let (data, config) = (MaskedRows::new(&COUNTED, 1), settings(1, Precision::F16));
    let resumed = |data: MaskedRows| {
        let (device, config) = (Device::Cpu, config.clone());
        Trainer::resume(&path, &sizes(), config, data.clone(), data, &device)
    };
    let mut second = resumed(data).unwrap();
    take(&mut second, usize::MAX);
    assert_eq!(bits(&second), bits(&whole));
    assert_eq!(second.history().skipped, whole.history().skipped);
    assert!(second.history().skipped.contains(&4));
    let mut others = COUNTED;
    others[5][0] = 9;
    refusal(resumed(MaskedRows::new(&others, 1)), &["training data"]);
}

/// In text with runs of separators, batches without targets do not end the run.
#[test]
fn texts_with_empty_documents() {
    let mut ids = noise(60, 0).to_vec().unwrap();
    ids.extend([3; 60]);
    ids.extend(noise(60, 9).to_vec().unwrap());
    let tokens = || Tokens::from_ids(ids.clone(), VOCAB).unwrap();
    let config = TrainConfig {
        batch_size: 1,
        separator: Some(3),
        steps: 40,
        ..super::settings()
    };
    let mut trainer = Trainer::new(model(), config, tokens(), tokens()).unwrap();
    let reports = take(&mut trainer, usize::MAX);
    assert_eq!(reports.len(), 40);
    let empty = reports.iter().filter(|report| report.tokens == 0).count();
    assert!((1..20).contains(&empty), "{empty} steps without targets");
    assert_eq!(trainer.history().skipped.len(), empty);
    assert_eq!(trainer.optimizer().steps(), 40 - empty);
    trainer.evaluate().unwrap();
}

/// Batches of other sizes than the step's are refused, and so are masked targets without an ignored id.
#[test]
fn refused_batches() {
    let model = || TransformerLM::new(&sizes(), 5, &Device::Cpu).unwrap();
    let rows = || MaskedRows::new(&COUNTED, 2);
    let config = settings(1, Precision::F32);
    let mut trainer = Trainer::new(model(), config, rows(), rows()).unwrap();
    refusal(trainer.step(), &["training batches [1, 16]", "[2, 16]"]);
    let config = TrainConfig {
        ignore_index: None,
        ..settings(2, Precision::F32)
    };
    let mut trainer = Trainer::new(model(), config, rows(), rows()).unwrap();
    refusal(trainer.step(), &["-100"]);
}

/// A GPU weights targets as the CPU does.
#[rstest]
#[ignore = "needs a CUDA device"]
fn on_a_gpu(#[values(Precision::F32, Precision::BF16, Precision::F16)] precision: Precision) {
    let gpu = tallow::device("cuda").unwrap();
    let (mut on_gpu, mut on_cpu) = (start_on(&gpu, 1, precision), start(1, precision));
    for (name, var) in on_cpu.model().parameters() {
        let (_, same) = on_gpu
            .model()
            .parameters()
            .into_iter()
            .find(|(other, _)| *other == name)
            .unwrap();
        same.set(&var.to_device(&gpu).unwrap()).unwrap(); // initial weights on GPUs come from another generator
    }
    let tolerance = if precision == Precision::F32 {
        1e-4
    } else {
        2e-2
    };
    for counted in COUNTED {
        let wanted = on_cpu.step().unwrap().unwrap();
        let got = on_gpu.step().unwrap().unwrap();
        assert_eq!(
            (got.tokens, got.skipped),
            (counted.iter().sum(), wanted.skipped)
        );
        if got.tokens > 0 {
            approx::assert_relative_eq!(got.loss, wanted.loss, max_relative = tolerance);
        }
    }
    let (got, wanted) = (on_gpu.evaluate().unwrap(), on_cpu.evaluate().unwrap());
    approx::assert_relative_eq!(got, wanted, max_relative = tolerance);
}
