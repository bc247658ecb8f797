//! A custom model: GPT-2 (`custom_model/gpt2.rs`), trained eagerly or from a plan, traced and profiled.
//!
//! ```text
//! cargo run --example custom_model
//! cargo run --example custom_model -- --planned
//! cargo run --example custom_model -- --trace --n-layer 1
//! cargo run --example custom_model -- --nodes --format csv
//! cargo run --example custom_model -- --graph gpt2.dot && dot -Tsvg gpt2.dot -o gpt2.svg
//! cargo run --example custom_model -- --steps 50 --n-embd 128 --format markdown
//! ```

#![deny(clippy::print_stdout, clippy::print_stderr)] // common::stdout and common::print_progress do not panic

mod common;
#[path = "custom_model/gpt2.rs"]
mod gpt2;

use candle_core::{D, DType, Device, Tensor};
use clap::Parser;
use clap::builder::RangedU64ValueParser;
use common::{Common, Effects, Output, ops, stdout, values};
use gpt2::{Gpt2, Gpt2Config};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use tallow::attention::Algorithm;
use tallow::compile::{Step, StepConfig};
use tallow::graph::{self, Graph, Target};
use tallow::memory::{self, Estimate, Mode};
use tallow::nn::{self, Layer};
use tallow::optim::{AdamWConfig, Optimizer};
use tallow::profile::{
    self, Cost, Grouping, NodeCost, ProfileReport, Profiler, Selection, node_costs, node_table,
};
use tallow::report::{Fields, Report, format_mib, group_digits};
use tallow::{Error, Result, no_grad};

/// The number of steps before the profiler starts.
const WARMUP_STEPS: usize = 1;

/// Trains GPT-2, written from this crate's layers and ops, and says what each op of a step costs
#[derive(Parser)]
#[command(version)]
struct Flags {
    /// Print the traced forward, op by op, and end: no weight is made
    #[arg(long, conflicts_with_all = ["nodes", "graph"])]
    trace: bool,

    /// Print a table of the traced forward, with what each op keeps and costs, and end
    #[arg(long, conflicts_with = "graph")]
    nodes: bool,

    /// Write the traced forward there as a picture for Graphviz, and end
    #[arg(long, value_name = "FILE")]
    graph: Option<PathBuf>,

    /// Run the steps from a plan that is made of the trace, on the CPU
    #[arg(long)]
    planned: bool,

    /// Steps of AdamW that are profiled
    #[arg(long, default_value_t = 10, value_parser = values::count())]
    steps: usize,

    /// Sequences in a batch
    #[arg(long, default_value_t = 4, value_parser = values::count())]
    batch_size: usize,

    /// Tokens of a sequence, and positions of the model
    #[arg(long, default_value_t = 64, value_parser = values::count())]
    n_positions: usize,

    /// The size of the vocabulary
    #[arg(long, default_value_t = 256, value_parser = values::count())]
    vocab_size: usize,

    /// The width of the residual stream
    #[arg(long, default_value_t = 64, value_parser = values::count())]
    n_embd: usize,

    /// How many blocks, at most 200: candle's backward wants stack for each
    #[arg(long, default_value_t = 2, value_parser = RangedU64ValueParser::<usize>::new().range(1..=200))]
    n_layer: usize,

    /// How many attention heads
    #[arg(long, default_value_t = 4, value_parser = values::count())]
    n_head: usize,

    #[command(flatten)]
    output: Output,

    #[command(flatten)]
    common: Common,
}

fn main() -> ExitCode {
    let flags = Flags::effects().parse();
    common::run(|| flags.common.around(|| flags.run()))
}

impl Flags {
    fn effects() -> Effects<Self> {
        Effects::<Self>::new()
            .of_output(|flags| &flags.output)
            .only(
                "without --trace and --graph",
                &["format", "output", "columns"],
                |flags| !flags.trace && flags.graph.is_none(),
            )
            .only(
                "where steps are run: without --trace, --nodes and --graph",
                &["planned", "steps", "seed"],
                |flags| !flags.trace && !flags.nodes && flags.graph.is_none(),
            )
    }

    fn config(&self) -> Gpt2Config {
        Gpt2Config {
            vocab_size: self.vocab_size,
            n_positions: self.n_positions,
            n_embd: self.n_embd,
            n_layer: self.n_layer,
            n_head: self.n_head,
            attention: Algorithm::Flash,
        }
    }

    fn run(&self) -> Result<()> {
        self.output.check_with([&self.graph])?;
        let device = self.common.device()?;
        let traced = self.traced(&device)?;
        self.output
            .check_columns([ProfileReport::columns(), node_table(&traced).columns])?;
        if let Some(path) = &self.graph {
            return fs::write(path, traced.to_dot()).map_err(|e| Error::io("write", path, e));
        }
        if self.trace {
            return stdout::line(traced);
        }
        if self.nodes {
            return self.output.publish(&node_table(&traced));
        }
        let estimate = memory::estimate_graph(&traced, Mode::TrainStep)?;
        let available_bytes = tallow::hardware::available_bytes_on(&device);
        common::memory::check("a training step", estimate.peak_bytes, available_bytes)?;
        let model = Gpt2::new(
            self.config(),
            nn::seeded(self.common.seed, DType::F32, &device),
        )?;
        let (summary, losses, without_kernels) = self.train(&model, &device)?;
        let right = self.share_right(&model, &device)?;
        let (lines, inside) = ops::lines(&summary);
        let report = Report {
            environment: self.common.environment(&device),
            configuration: self.configuration(&model, &traced, &estimate, &losses, right),
            columns: ProfileReport::columns(),
            rows: summary.fields(),
            shown_rows: lines,
            notes: inside.into_iter().chain(without_kernels).collect(),
            ..Default::default()
        };
        self.output.publish(&report)
    }

    /// Traces the loss of a batch with the device's kernels, using meta tensors as weights.
    fn traced(&self, device: &Device) -> Result<Graph> {
        let model = Gpt2::new(self.config(), graph::weights(DType::F32))?;
        let shape = (self.batch_size, self.n_positions);
        let tokens = graph::input("tokens", shape, DType::U32)?;
        let targets = graph::input("targets", shape, DType::U32)?;
        let target = match device.is_cuda() {
            true => Target::Cuda,
            false => Target::Cpu,
        };
        graph::trace(target, || model.loss(&tokens, &targets))
    }

    /// Trains on batches in which each token determines the next. Returns the steps' profile, their losses, and a note
    /// if a GPU's kernels cannot be recorded.
    fn train(
        &self,
        model: &Gpt2,
        device: &Device,
    ) -> Result<(ProfileReport, Vec<f32>, Option<String>)> {
        let config = AdamWConfig {
            lr: 1e-2,
            ..Default::default()
        };
        let mut optimizer = Optimizer::new(model.parameters(), config)?;
        let mut planned = match self.planned {
            true => Some(Step::new(&optimizer, &StepConfig::default(), |inputs| {
                model.loss(&inputs.get("tokens")?, &inputs.get("targets")?)
            })?),
            false => None,
        };
        let mut random = ChaCha8Rng::seed_from_u64(self.common.seed);
        let mut losses = Vec::new();
        let mut profiler = None;
        for step in 0..WARMUP_STEPS + self.steps {
            let [tokens, targets] = self.batch(&mut random, device)?;
            if step == WARMUP_STEPS {
                profiler = Some(start_profiler(device)?);
            }
            let _step = profile::step();
            losses.push(match &mut planned {
                Some(step) => step.run(&mut optimizer, (&tokens, &targets))?,
                None => eager_step(model, &mut optimizer, [&tokens, &targets])?,
            });
            common::progress(format!("step {step}: loss {:.4}", losses[step]));
        }
        let (recording, note) = match profiler {
            Some((profiler, note)) => (profiler.finish()?, note),
            None => return Err(candle_core::Error::msg("no step was profiled").into()),
        };
        let summary = ProfileReport::new(&recording, &Selection::default(), Grouping::Name)?;
        Ok((summary, losses, note))
    }

    /// Returns the fraction of a new batch's tokens that the model predicts.
    fn share_right(&self, model: &Gpt2, device: &Device) -> Result<f64> {
        let mut random = ChaCha8Rng::seed_from_u64(!self.common.seed);
        let [tokens, targets] = self.batch(&mut random, device)?;
        let logits = no_grad(|| model.forward(&tokens))?; // (B, T, V)
        let right = logits.argmax(D::Minus1)?.eq(&targets)?; // (B, T), 0 or 1
        let right = right.to_dtype(DType::F32)?.mean_all()?;
        Ok(right.to_scalar::<f32>()?.into())
    }

    /// Returns tokens and targets, each (B, T).
    fn batch(&self, random: &mut ChaCha8Rng, device: &Device) -> Result<[Tensor; 2]> {
        let (batch, length) = (self.batch_size, self.n_positions);
        let vocab = self.vocab_size as u64;
        let mut walks = Vec::with_capacity(batch * (length + 1));
        for _ in 0..batch {
            let mut token = random.random_range(0..vocab);
            for _ in 0..=length {
                walks.push(token as u32);
                token = (3 * token + 1) % vocab;
            }
        }
        let walks = Tensor::from_vec(walks, (batch, length + 1), device)?;
        let part = |start| walks.narrow(1, start, length)?.contiguous();
        Ok([part(0)?, part(1)?])
    }

    fn configuration(
        &self,
        model: &Gpt2,
        traced: &Graph,
        estimate: &Estimate,
        losses: &[f32],
        right: f64,
    ) -> Fields {
        let parameters = model.parameters().into_iter();
        let parameters: usize = parameters.map(|(_, var)| var.elem_count()).sum();
        let costs = node_costs(traced);
        let sum = |of: fn(&NodeCost) -> Option<Cost>| {
            let costs = costs.iter().filter_map(of);
            group_digits(costs.fold(Cost::default(), |a, b| a + b).flops() as u64)
        };
        let (first, last) = (losses.first(), losses.last());
        let loss = |loss: Option<&f32>| loss.map(|loss| format!("{loss:.4}"));
        let mut fields = Fields::new();
        fields.insert("parameters", group_digits(parameters as u64));
        fields.insert("batch size", self.batch_size);
        fields.insert("sequence length", self.n_positions);
        fields.insert("ops in the traced forward", traced.nodes().count());
        fields.insert("forward FLOPs, from the trace", sum(|cost| cost.forward));
        fields.insert("backward FLOPs, from the trace", sum(|cost| cost.backward));
        fields.insert(
            "eager step's peak, estimated",
            format_mib(estimate.peak_bytes),
        );
        fields.insert("first loss", loss(first));
        fields.insert("last loss", loss(last));
        fields.insert("next tokens predicted", format!("{:.1}%", 100.0 * right));
        fields
    }
}

/// Starts a profiler. If GPU kernels cannot be recorded, it waits for the GPU at each op, and a note gives the reason.
fn start_profiler(device: &Device) -> Result<(Profiler, Option<String>)> {
    match Profiler::start_on(device) {
        Err(Error::Order { problem, .. }) if device.is_cuda() => {
            let note = format!(
                "No kernels recorded, ops are timed by waiting for the GPU at each: {problem}."
            );
            Ok((Profiler::start_waiting_for(device)?, Some(note)))
        }
        profiler => Ok((profiler?, None)),
    }
}

/// Runs forward, backward and update op by op, and returns the loss before the update.
fn eager_step(
    model: &Gpt2,
    optimizer: &mut Optimizer,
    [tokens, targets]: [&Tensor; 2],
) -> Result<f32> {
    let loss = {
        let _phase = profile::phase("forward");
        model.loss(tokens, targets)?
    };
    let value = loss.detach();
    let gradients = {
        let _phase = profile::phase("backward");
        tallow::backward(loss)?
    };
    let _phase = profile::phase("optimizer");
    optimizer.step(&gradients)?;
    Ok(value.to_scalar()?)
}
