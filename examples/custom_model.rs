//! A custom model: an encoder-decoder (`custom_model/model.rs`) learns to copy sequences of different lengths. It is
//! trained eagerly or from a plan (`--planned`); its memory is estimated and measured, and its ops are profiled.

mod common;
#[path = "custom_model/model.rs"]
mod model;

use candle_core::{DType, Device, Tensor};
use clap::{CommandFactory, Parser};
use common::effects;
use common::{Common, Output, values};
use model::{EncoderDecoder, PADDING};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tallow::compile::{Batch, Step, StepConfig};
use tallow::memory::{Estimate, Meter, Mode, estimate_graph};
use tallow::nn::{self, Layer};
use tallow::optim::{AdamWConfig, Optimizer};
use tallow::profile::{Grouping, ProfileReport, Profiler, Selection, step};
use tallow::report::{Fields, Report, format_mib};
use tallow::{Result, graph};

const VOCAB_SIZE: usize = 16; // padding, the beginning of a target, and 14 symbols
const WIDTH: usize = 32;
const SHAPE: (usize, usize) = (32, 8); // (B, T)
const INPUTS: [&str; 4] = ["source", "visible", "target", "next"];

/// Trains an encoder-decoder, written from this crate's layers, and says what each op of a step costs
#[derive(Parser)]
#[command(version)]
struct Flags {
    /// Run the steps from a plan
    #[arg(long)]
    planned: bool,

    /// Steps of AdamW that are profiled
    #[arg(long, default_value_t = 100, value_parser = values::count())]
    steps: usize,

    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    common: Common,
}

fn main() -> std::process::ExitCode {
    let flags: Flags = effects::parse(Flags::command(), |_| Vec::new());
    common::run(|| flags.common.around(|| flags.run()))
}

impl Flags {
    fn run(&self) -> Result<()> {
        self.output.check_with([])?;
        let device = self.common.device()?;
        let estimated = estimate(&device)?.peak_bytes;
        let vb = nn::seeded(self.common.seed, DType::F32, &device);
        let model = EncoderDecoder::new(VOCAB_SIZE, SHAPE.1, WIDTH, vb)?;
        let mut optimizer = Optimizer::new(model.parameters(), AdamWConfig::default())?;
        let mut planned = Step::new(&optimizer, &StepConfig::default(), |inputs| {
            let [source, visible, target, next] = INPUTS.map(|name| inputs.get(name));
            model.loss([&source?, &visible?, &target?, &next?])
        })?;
        let mut random = ChaCha8Rng::seed_from_u64(self.common.seed);
        let mut train = || -> Result<f32> {
            let batch = batch(&mut random, &device)?;
            let _step = step();
            if self.planned {
                return planned.run(&mut optimizer, Batch::new(INPUTS.into_iter().zip(&batch)));
            }
            let loss = model.loss(batch.each_ref())?;
            let value = loss.to_scalar()?;
            optimizer.step(&tallow::backward(loss)?)?;
            Ok(value)
        };
        let first = train()?; // it makes the plan
        let meter = Meter::new(&device);
        let profiler = Profiler::start_on(&device)?;
        let last = (0..self.steps).try_fold(first, |_, _| train())?;
        let (recording, peak) = (profiler.finish()?, meter.peak_bytes());
        let profile = ProfileReport::new(&recording, &Selection::default(), Grouping::Name)?;
        let plan_bytes = planned.plan().map(|plan| plan.total_bytes());
        self.output.publish(&Report {
            environment: self.common.environment(&device),
            configuration: Fields::from_iter([
                ("eager step's peak, estimated", Some(format_mib(estimated))),
                ("planned step, predicted", plan_bytes.map(format_mib)),
                ("the process's peak, measured", peak.map(format_mib)),
                ("first loss", Some(format!("{first:.4}"))),
                ("last loss", Some(format!("{last:.4}"))),
            ]),
            columns: ProfileReport::columns(),
            rows: profile.fields(),
            shown_rows: common::ops::lines(&profile).0,
            ..Default::default()
        })
    }
}

/// Estimates the memory of an eager step from its trace.
fn estimate(device: &Device) -> Result<Estimate> {
    let model = EncoderDecoder::new(VOCAB_SIZE, SHAPE.1, WIDTH, graph::weights(DType::F32))?;
    let ids = |name| graph::input(name, SHAPE, DType::U32);
    let visible = graph::input("visible", SHAPE, DType::U8)?;
    let inputs = [&ids("source")?, &visible, &ids("target")?, &ids("next")?];
    let traced = graph::trace(device.into(), || model.loss(inputs))?;
    estimate_graph(&traced, Mode::TrainStep)
}

/// Draws the inputs of a step, each (B, T). The next tokens are the source; the target is the source, shifted.
fn batch(random: &mut ChaCha8Rng, device: &Device) -> Result<[Tensor; 4]> {
    let (mut source, mut target) = (Vec::new(), Vec::new());
    for _ in 0..SHAPE.0 {
        let length = random.random_range(1..=SHAPE.1);
        let symbol = |_| random.random_range(2..VOCAB_SIZE as u32);
        let mut tokens: Vec<u32> = (0..length).map(symbol).collect();
        tokens.resize(SHAPE.1, PADDING);
        target.extend([&[1], &tokens[..SHAPE.1 - 1]].concat());
        source.extend(tokens);
    }
    let source = Tensor::from_vec(source, SHAPE, device)?;
    let target = Tensor::from_vec(target, SHAPE, device)?;
    Ok([source.clone(), source.ne(PADDING)?, target, source])
}
