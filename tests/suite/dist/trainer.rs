//! Runs of several ranks are runs of one with all their batches.

use super::{bits, config, on_ranks};
use candle_core::Device;
use rstest::rstest;
use tallow::data::Tokens;
use tallow::dist::ReplicatedConfig;
use tallow::model::{TransformerConfig, TransformerLM};
use tallow::nn::DropoutRates;
use tallow::train::{TrainConfig, Trainer};
use tallow::{Error, Result};

fn text() -> (Tokens, Tokens) {
    let text = "to be, or not to be, that is the question: ".repeat(12);
    Tokens::from_bytes(text).unwrap().split(0.3).unwrap()
}

fn model_config() -> TransformerConfig {
    TransformerConfig {
        vocab_size: 256,
        dropout: DropoutRates::all(0.1),
        ..config()
    }
}

fn train_config(steps: usize) -> TrainConfig {
    TrainConfig {
        batch_size: 2,
        sequence_length: 12,
        accumulation: 2,
        steps,
        ..Default::default()
    }
}

fn trainer(steps: usize) -> Result<Trainer> {
    let model = TransformerLM::new(&model_config(), 3, &Device::Cpu)?;
    let (train, validation) = text();
    Trainer::new(model, train_config(steps), train, validation)
}

/// What a run has come to: losses, an evaluation, the weights' bits.
type Outcome = (Vec<u64>, f64, Vec<Vec<u32>>);

fn run(mut trainer: Trainer) -> Result<(Outcome, Trainer)> {
    while trainer.step()?.is_some() {}
    let evaluation = trainer.evaluate()?;
    let losses = trainer.history().losses.iter().map(|loss| loss.to_bits());
    let losses = losses.collect();
    let weights = trainer.model().parameters().into_iter();
    let weights = weights.map(|(_, var)| bits(&var)).collect();
    Ok(((losses, evaluation, weights), trainer))
}

/// Two ranks with a batch each have the bits of one rank with two, dropout and all; eager, since a plan adds a second
/// micro-batch's gradients product by product.
#[test]
fn bits_of_one_rank() {
    let (alone, _) = run(trainer(4).unwrap()).unwrap();
    let together = on_ranks(2, |ranks| {
        let mut trainer = trainer(4)?;
        trainer.replicate(&ranks, ReplicatedConfig::default())?;
        Ok(run(trainer)?.0)
    });
    for together in together {
        assert!(together.0 == alone.0 && together.2 == alone.2);
        assert!(
            (together.1 - alone.1).abs() < 1e-6,
            "{} {}",
            together.1,
            alone.1
        );
    }
}

/// Rank 0 writes a run of two, one rank goes on with it, and two again; planned or not, with the optimizer's state on
/// both ranks or divided between them.
#[rstest]
fn resumed_by_another_number(
    #[values(false, true)] planned: bool,
    #[values(false, true)] sharded: bool,
) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.safetensors");
    let path = &path;
    let resume = |steps: usize| {
        let (train, validation) = text();
        let config = train_config(steps);
        Trainer::resume(
            path,
            &model_config(),
            config,
            train,
            validation,
            &Device::Cpu,
        )
    };
    let whole = on_ranks(2, |ranks| {
        let mut trainer = trainer(6)?;
        trainer.replicate(&ranks, ReplicatedConfig::default())?;
        if planned {
            trainer.compile()?;
        }
        Ok(run(trainer)?.0)
    });
    on_ranks(2, |ranks| {
        let mut trainer = trainer(3)?;
        trainer.replicate(&ranks, ReplicatedConfig::default())?;
        if sharded {
            trainer.shard_optimizer()?;
        }
        if planned {
            trainer.compile()?;
        }
        let (_, trainer) = run(trainer)?;
        trainer.save(path)?;
        ranks.barrier() // rank 0 has written it
    });
    let again = on_ranks(2, |ranks| {
        let mut trainer = resume(6)?;
        trainer.replicate(&ranks, ReplicatedConfig::default())?;
        if sharded {
            trainer.shard_optimizer()?;
        }
        if planned {
            trainer.compile()?;
        }
        Ok(run(trainer)?.0)
    });
    assert!(again[0].0 == whole[0].0 && again[0].2 == whole[0].2 && again[1].2 == whole[0].2);
    let mut alone = resume(6).unwrap();
    if planned {
        alone.compile().unwrap();
    }
    let ((losses, ..), _) = run(alone).unwrap();
    for (loss, wanted) in losses.iter().zip(&whole[0].0) {
        let (loss, wanted) = (f64::from_bits(*loss), f64::from_bits(*wanted));
        assert!((loss - wanted).abs() < 1e-5, "{loss} {wanted}");
    }
}

#[test]
fn what_is_refused() {
    let errors = on_ranks(3, |ranks| {
        let mut trainer = trainer(1)?;
        Ok(trainer
            .replicate(&ranks, ReplicatedConfig::default())
            .unwrap_err())
    });
    for error in errors {
        let words = "accumulation must be a multiple of the number of ranks, 3";
        assert!(error.to_string().contains(words), "{error}");
    }
    let ranks = tallow::dist::Communicator::alone(&Device::Cpu);
    let mut alone = trainer(1).unwrap();
    let error = alone.shard_optimizer().unwrap_err();
    assert!(
        error.to_string().contains("call replicate before"),
        "{error}"
    );
    alone
        .replicate(&ranks, ReplicatedConfig::default())
        .unwrap();
    alone.shard_optimizer().unwrap();
    assert!(alone.shard_optimizer().is_err());
    let mut planned = trainer(1).unwrap();
    planned.compile().unwrap();
    let error = planned
        .replicate(&ranks, ReplicatedConfig::default())
        .unwrap_err();
    assert!(matches!(error, Error::Order { .. }), "{error}");
}
