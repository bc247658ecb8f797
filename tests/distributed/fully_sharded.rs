//! Fully sharded data parallelism. A port of Stanford CS336's test: after ten steps of a small network, with or without
//! a tied weight, the gathered weights equal those of one process. On GPUs also a transformer.

use super::replicated::{BATCH, Network, numbers};
use super::sharded::{CONFIG, distinct};
use super::{at_most, join, succeed};
use candle_core::{DType, Tensor, Var};
use candle_nn::VarBuilder;
use rstest::rstest;
use std::collections::HashMap;
use tallow::Result;
use tallow::attention::Algorithm;
use tallow::compile::{Step, StepConfig};
use tallow::distributed::{
    Communicator, FullyShard, FullyShardConfig, Replicated, ReplicatedConfig,
};
use tallow::model::{TransformerConfig, TransformerLM};
use tallow::nn;
use tallow::optim::{MuonConfig, Optimizer, Rule, Scaling, usual_groups};
use tallow::precision::Precision;
use tallow::profile::Profiler;

#[rstest]
#[cfg_attr(feature = "cuda", ignore = "needs two CUDA devices")]
fn small_network(#[values(2, 3, 4)] ranks: usize) {
    succeed("fully sharded", at_most(ranks));
}

pub fn as_one_process() -> Result<()> {
    let ranks = join(60)?;
    for tied in [false, true] {
        for clip_norm in [None, Some(1e6)] {
            let config = StepConfig {
                clip_norm, // larger than any gradient norm here
                ..Default::default()
            };
            for rule in [CONFIG.into(), MuonConfig::default().into()] {
                ten_steps(&ranks, tied, &config, rule)?;
            }
        }
    }
    if ranks.device().is_cuda() {
        for (precision, exchange, clip_norm) in [
            (Precision::F32, None, None),
            (Precision::BF16, None, Some(1e6)),
            (Precision::BF16, Some(DType::BF16), None),
        ] {
            let muon = MuonConfig {
                lr: 1e-3,
                scaling: Scaling::Moonlight,
                ..Default::default()
            };
            for rule in [Rule::default(), muon.into()] {
                as_replicated(&ranks, precision, exchange, clip_norm, rule)?;
            }
        }
    }
    ranks.barrier()
}

fn ten_steps(ranks: &Communicator, tied: bool, config: &StepConfig, rule: Rule) -> Result<()> {
    let device = ranks.device();
    let alone = Network::new(1, tied, device)?;
    let mut wanted = Optimizer::new(distinct(&alone), rule)?;
    let sharded = FullyShard::new(ranks, FullyShardConfig::default())?;
    let given = Network::new(1, tied, device)?.parameters().into_iter();
    let given: HashMap<String, Tensor> =
        given.map(|(name, var)| (name, var.into_inner())).collect();
    let vb = sharded.builder(VarBuilder::from_tensors(given, DType::F32, device));
    let mut layers = Vec::new();
    for (i, layer) in alone.layers.iter().enumerate() {
        let name = if tied && i == 2 { 1 } else { i };
        let meta = vb.get(layer.dims(), &format!("layers.{name}"))?;
        layers.push(Var::from_tensor(&meta)?);
    }
    let network = Network { layers };
    let mut optimizer = Optimizer::new(sharded.parameters(), rule)?;
    let rows = BATCH / ranks.world_size();
    let mut step = Step::fully_sharded(&optimizer, config, &sharded, |inputs| {
        network.loss(&inputs.get("x")?, &inputs.get("y")?)
    })?;
    for number in 0..10 {
        let x = numbers(7 + number, (BATCH, 10), device)?;
        let y = numbers(70 + number, (BATCH, 5), device)?;
        wanted.step(&tallow::backward(alone.loss(&x, &y)?)?)?;
        let [x, y] = [x, y].map(|x| x.narrow(0, ranks.rank() * rows, rows));
        let (x, y) = (x?.contiguous()?, y?.contiguous()?);
        step.run(&mut optimizer, [("x", &x), ("y", &y)])?;
    }
    for (name, wanted) in distinct(&alone) {
        let values = |x: &Tensor| x.flatten_all().and_then(|x| x.to_vec1::<f32>());
        let found = values(&sharded.full_weight(&name)?)?;
        for (a, b) in found.into_iter().zip(values(&wanted)?) {
            let what = format!("{rule}, tied {tied}, {config:?}");
            assert!((a - b).abs() <= 1e-4, "{what}: {a} {b}");
        }
    }
    Ok(())
}

fn model() -> TransformerConfig {
    TransformerConfig {
        vocab_size: 1000,
        context_length: 128,
        d_model: 256,
        num_layers: 3,
        num_heads: 4,
        d_ff: 704,
        ..Default::default()
    }
}

/// Returns the token ids of a rank, (2, 128) u32.
fn ids(ranks: &Communicator, offset: usize) -> Result<Tensor> {
    let ids = (0..256).map(|i| ((i + offset + 300 * ranks.rank()) * 7919 % 1000) as u32);
    Ok(Tensor::from_iter(ids, ranks.device())?.reshape((2, 128))?)
}

/// Compares losses and weights of planned steps: fully sharded weights against replicated ones.
fn as_replicated(
    ranks: &Communicator,
    precision: Precision,
    exchange: Option<DType>,
    clip_norm: Option<f64>,
    rule: Rule,
) -> Result<()> {
    let (device, config) = (ranks.device(), model());
    let plan = StepConfig {
        precision,
        clip_norm,
        ..Default::default()
    };
    let (tokens, targets) = (ids(ranks, 0)?, ids(ranks, 1)?);
    let run = |mut step: Step<'_>, mut optimizer: Optimizer| -> Result<Vec<f32>> {
        let mut step = |_| step.run(&mut optimizer, (&tokens, &targets));
        let mut losses: Vec<f32> = (0..3).map(&mut step).collect::<Result<_>>()?;
        // Rank 0 is profiled. Its step runs in pieces, but exchanges the same tensors as the other rank's.
        let profiler = (ranks.rank() == 0).then(|| Profiler::start_on(device));
        let profiler = profiler.transpose()?;
        losses.extend((3..5).map(&mut step).collect::<Result<Vec<_>>>()?);
        if let Some(profiler) = profiler {
            assert!(!profiler.finish()?.kernels.is_empty());
        }
        Ok(losses)
    };
    let whole = TransformerLM::new(&config, 3, device)?.with_attention(Algorithm::Flash)?;
    let optimizer = Optimizer::with_groups(usual_groups(whole.parameters(), rule))?;
    let way = ReplicatedConfig {
        dtype: exchange,
        ..Default::default()
    };
    let replicated = Replicated::new(ranks, whole.parameters(), way)?;
    let step = Step::for_model(&whole, &optimizer, &plan)?.replicated(&optimizer, &replicated)?;
    let wanted = run(step, optimizer)?;
    let sharded = FullyShardConfig {
        dtype: exchange,
        bucket_bytes: 1 << 20, // one bucket holds some of the three blocks
    };
    let sharded = FullyShard::new(ranks, sharded)?;
    let vb = sharded.builder(nn::seeded(3, DType::F32, device));
    let model = TransformerLM::from_var_builder(&config, vb)?;
    let model = model.with_attention(Algorithm::Flash)?;
    let optimizer = Optimizer::with_groups(usual_groups(sharded.parameters(), rule))?;
    let step = Step::fully_sharded_for_model(&model, &optimizer, &plan, &sharded)?;
    let found = run(step, optimizer)?;
    for (a, b) in found.iter().zip(&wanted) {
        assert!(
            (a - b).abs() <= 1e-3 * b,
            "{rule}, {precision}, {exchange:?}: {found:?} {wanted:?}"
        );
    }
    for (name, wanted) in whole.parameters() {
        let off = (sharded.full_weight(&name)? - wanted.as_tensor())?.abs()?;
        let off = off.mean_all()?.to_scalar::<f32>()?;
        // One step of AdamW moves a weight by at most the learning rate, 1e-3, one of Muon by 2e-4 on average.
        assert!(
            off < 2e-4,
            "{rule}, {precision}, {exchange:?}, {name}: {off}"
        );
    }
    Ok(())
}
