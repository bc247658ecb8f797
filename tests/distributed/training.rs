//! Training runs of several processes: they have the losses of one process, and another number of processes can resume
//! their checkpoint.

use super::{at_most, join, ranks, succeed};
use candle_core::Device;
use rstest::rstest;
use std::path::Path;
use tallow::data::Tokens;
use tallow::distributed::{Communicator, ReplicatedConfig};
use tallow::model::{TransformerConfig, TransformerLM};
use tallow::train::{TrainConfig, Trainer};
use tallow::{Error, Result};

const FILE: &str = "TALLOW_TEST_FILE";

#[rstest]
#[cfg_attr(feature = "cuda", ignore = "needs two CUDA devices")]
fn losses(#[values(2, 3, 4)] count: usize) {
    succeed("training", at_most(count));
}

/// Three ranks write a checkpoint, four resume it. (On GPUs two ranks do both.)
#[test]
#[cfg_attr(feature = "cuda", ignore = "needs two CUDA devices")]
fn resumed_by_others() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("run.safetensors");
    let file = [(FILE, file.display().to_string())];
    for count in [3, 4] {
        let ended = ranks("training", at_most(count), &file);
        assert!(ended.success, "{}", ended.text);
    }
}

fn trainer(device: &Device, file: Option<&Path>, steps: usize) -> Result<Trainer> {
    let model = TransformerConfig {
        vocab_size: 256,
        context_length: 16,
        d_model: 16,
        num_layers: 2,
        num_heads: 2,
        d_ff: 24,
        ..Default::default()
    };
    let text = "the ranks of a job have one run, whatever their number. ".repeat(20);
    let (train, validation) = Tokens::from_bytes(text)?.split(0.3)?;
    let config = TrainConfig {
        batch_size: 1,
        sequence_length: 16,
        accumulation: 12, // divisible by two, three and four ranks
        steps,
        ..Default::default()
    };
    match file.filter(|file| file.exists()) {
        Some(file) => Trainer::resume(file, &model, config, train, validation, device),
        None => Trainer::new(
            TransformerLM::new(&model, 5, device)?,
            config,
            train,
            validation,
        ),
    }
}

/// Compares six steps with those of one process, the optimizer replicated or sharded. With a file, one job runs the
/// first three steps and the next job the rest.
pub fn as_one_process() -> Result<()> {
    let ranks = join(60)?;
    let file = std::env::var(FILE).ok();
    let file = file.as_deref().map(Path::new);
    let device = ranks.device();
    let mut alone = trainer(device, None, 6)?;
    while alone.step()?.is_some() {}
    let wanted = alone.evaluate()?;
    for sharded in [false, true] {
        if file.is_some() && !sharded {
            continue; // one run per file
        }
        let steps = match file {
            Some(file) if !file.exists() => 3,
            _ => 6,
        };
        let mut together = trainer(device, file, steps)?;
        together.replicate(&ranks, ReplicatedConfig::default())?;
        if sharded {
            together.shard_optimizer()?;
        }
        while together.step()?.is_some() {}
        near(&together.history().losses, &alone.history().losses[..steps]);
        if steps == 6 {
            near(&[together.evaluate()?], &[wanted]);
        }
        if let Some(file) = file {
            together.save(file)?;
        }
    }
    one_that_differs(&ranks)
}

fn near(losses: &[f64], wanted: &[f64]) {
    assert_eq!(losses.len(), wanted.len());
    for (loss, wanted) in losses.iter().zip(wanted) {
        assert!((loss - wanted).abs() < 2e-5, "{loss} {wanted}");
    }
}

/// Checks that another learning rate on rank 1 alone is an error on every rank.
fn one_that_differs(ranks: &Communicator) -> Result<()> {
    let mut run = trainer(ranks.device(), None, 6 + ranks.rank().min(1))?;
    let error = run
        .replicate(ranks, ReplicatedConfig::default())
        .unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::Rank { rank: 1, .. }), "{text}");
    assert!(
        text.contains("steps: 7") && text.contains("steps: 6"),
        "{text}"
    );
    Ok(())
}
