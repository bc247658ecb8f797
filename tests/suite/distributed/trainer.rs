//! Training runs of several ranks equal those of one rank with all their batches.

use super::{bits, config, on_ranks};
use crate::check::refusal;
use crate::train::masked::{COUNTED, MaskedRows, settings};
use candle_core::{DType, Device};
use rstest::rstest;
use tallow::attention::Algorithm;
use tallow::data::Tokens;
use tallow::distributed::{Communicator, FullyShard, FullyShardConfig, ReplicatedConfig};
use tallow::model::{TransformerConfig, TransformerLM};
use tallow::nn::{self, DropoutRates};
use tallow::optim::{GradScalerConfig, MuonConfig, Rule, Scaling, Schedule};
use tallow::precision::Precision;
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
        attention: Some(Algorithm::Flash),
        ..Default::default()
    }
}

fn muon() -> Rule {
    let config = MuonConfig {
        lr: 1e-3,
        scaling: Scaling::Moonlight,
        ..Default::default()
    };
    config.into()
}

fn trainer(steps: usize) -> Result<Trainer> {
    let model = TransformerLM::new(&model_config(), 3, &Device::Cpu)?;
    let (train, validation) = text();
    Trainer::new(model, train_config(steps), train, validation)
}

/// Returns a run of ranks with the full model each.
fn replicated(ranks: &Communicator, config: TrainConfig) -> Result<Trainer> {
    let model = TransformerLM::new(&model_config(), 3, &Device::Cpu)?;
    let (train, validation) = text();
    let mut trainer = Trainer::new(model, config, train, validation)?;
    trainer.replicate(ranks, ReplicatedConfig::default())?;
    Ok(trainer)
}

/// Returns a run of ranks with shards of the model.
fn sharded_trainer(sharded: &FullyShard, config: TrainConfig) -> Result<Trainer> {
    let vb = sharded.builder(nn::seeded(3, DType::F32, &Device::Cpu));
    let model = TransformerLM::from_var_builder(&model_config(), vb)?;
    let (train, validation) = text();
    Trainer::fully_sharded(model, sharded, config, train, validation)
}

/// The results of a run: losses, an evaluation, the weights' bits.
type Outcome = (Vec<u64>, f64, Vec<Vec<u64>>);

fn run(mut trainer: Trainer) -> Result<(Outcome, Trainer)> {
    while trainer.step()?.is_some() {}
    let evaluation = trainer.evaluate()?;
    let losses = trainer.history().losses.iter().map(|loss| loss.to_bits());
    let losses = losses.collect();
    let weights = trainer.model().parameters().into_iter();
    let weights = weights.map(|(_, var)| bits(&var)).collect();
    Ok(((losses, evaluation, weights), trainer))
}

/// Two ranks with one batch each equal one rank with two, including dropout, up to the order of sums.
#[test]
fn two_ranks_are_one_of_two_batches() {
    let (alone, _) = run(trainer(4).unwrap()).unwrap();
    let together = on_ranks(2, |ranks| {
        let mut trainer = trainer(4)?;
        trainer.replicate(&ranks, ReplicatedConfig::default())?;
        Ok(run(trainer)?.0)
    });
    for together in together {
        for (loss, wanted) in together.0.iter().zip(&alone.0) {
            let (loss, wanted) = (f64::from_bits(*loss), f64::from_bits(*wanted));
            assert!((loss - wanted).abs() < 1e-5, "{loss} {wanted}");
        }
        for (weight, wanted) in together.2.iter().flatten().zip(alone.2.iter().flatten()) {
            let (weight, wanted) = (f64::from_bits(*weight), f64::from_bits(*wanted));
            assert!((weight - wanted).abs() < 1e-5, "{weight} {wanted}");
        }
        assert!(
            (together.1 - alone.1).abs() < 1e-6,
            "{} {}",
            together.1,
            alone.1
        );
    }
}

/// Rank 0 writes a run of two ranks; one rank resumes it, and also two, with the optimizer's state replicated or
/// sharded.
#[rstest]
fn resumed_by_another_number(#[values(false, true)] sharded: bool) {
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
        Ok(run(trainer)?.0)
    });
    on_ranks(2, |ranks| {
        let mut trainer = trainer(3)?;
        trainer.replicate(&ranks, ReplicatedConfig::default())?;
        if sharded {
            trainer.shard_optimizer()?;
        }
        let (_, trainer) = run(trainer)?;
        trainer.save(path)?;
        ranks.barrier() // rank 0 has written the file
    });
    let again = on_ranks(2, |ranks| {
        let mut trainer = resume(6)?;
        trainer.replicate(&ranks, ReplicatedConfig::default())?;
        if sharded {
            trainer.shard_optimizer()?;
        }
        Ok(run(trainer)?.0)
    });
    assert!(again[0].0 == whole[0].0 && again[0].2 == whole[0].2 && again[1].2 == whole[0].2);
    let alone = resume(6).unwrap();
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
    let ranks = tallow::distributed::Communicator::single_rank(&Device::Cpu);
    let mut alone = trainer(1).unwrap();
    refusal(alone.shard_optimizer(), &["call replicate before"]);
    alone
        .replicate(&ranks, ReplicatedConfig::default())
        .unwrap();
    alone.shard_optimizer().unwrap();
    assert!(alone.shard_optimizer().is_err());
    let mut planned = trainer(1).unwrap();
    planned.plan().unwrap();
    let error = planned
        .replicate(&ranks, ReplicatedConfig::default())
        .unwrap_err();
    assert!(matches!(error, Error::Order { .. }), "{error}");
}

/// Ranks whose settings or data differ do not train: all get an error with the rank and the difference.
#[rstest]
#[case::learning_rate(|config: &mut TrainConfig| config.schedule = Schedule::Constant { lr: 2e-3 }, "lr: 0.002")]
#[case::seed(|config: &mut TrainConfig| config.seed += 1, "seed")]
#[case::batch(|config: &mut TrainConfig| config.batch_size += 1, "batch_size")]
fn ranks_of_other_settings_are_refused(
    #[case] change: fn(&mut TrainConfig),
    #[case] field: &str,
    #[values(false, true)] in_parts: bool,
) {
    let errors = on_ranks(3, |ranks| {
        let mut config = TrainConfig {
            accumulation: 3,
            ..train_config(1)
        };
        if ranks.rank() == 1 {
            change(&mut config);
        }
        Ok(match in_parts {
            true => {
                let sharded = FullyShard::new(&ranks, FullyShardConfig::default())?;
                sharded_trainer(&sharded, config).unwrap_err()
            }
            false => replicated(&ranks, config).unwrap_err(),
        })
    });
    for error in errors {
        let text = error.to_string();
        assert!(matches!(error, Error::Rank { rank: 1, .. }), "{text}");
        assert!(
            text.contains("configuration is") && text.contains(field),
            "{text}"
        );
    }
}

/// A fully sharded run equals a replicated one. Two ranks write one file each; two, three and one resume them.
#[rstest]
fn in_parts(#[values(TrainConfig::default().optimizer, muon())] optimizer: Rule) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.safetensors");
    let path = &path;
    let config = |steps: usize| TrainConfig {
        accumulation: 6,
        max_grad_norm: Some(0.5),
        keep: 2,
        optimizer,
        ..train_config(steps)
    };
    let sharded_trainer = |ranks: &Communicator, steps: usize| -> Result<(Trainer, FullyShard)> {
        let sharded = FullyShard::new(ranks, FullyShardConfig::default())?;
        let (train, validation) = text();
        let trainer = match path.exists() {
            true => Trainer::resume_fully_sharded(
                path,
                &model_config(),
                &sharded,
                config(steps),
                train,
                validation,
            )?,
            false => sharded_trainer(&sharded, config(steps))?,
        };
        Ok((trainer, sharded))
    };
    let all = |mut trainer: Trainer| -> Result<(Vec<f64>, Vec<u64>, Trainer)> {
        while trainer.step()?.is_some() {}
        let evaluation = trainer.evaluate()?;
        let mut losses = trainer.history().losses.clone();
        losses.push(evaluation);
        let weights = match trainer.gather_model()? {
            Some(model) => model
                .parameters()
                .iter()
                .flat_map(|(_, var)| bits(var))
                .collect(),
            None => Vec::new(),
        };
        Ok((losses, weights, trainer))
    };
    let near = |losses: &[f64], wanted: &[f64]| {
        assert_eq!(losses.len(), wanted.len());
        for (loss, wanted) in losses.iter().zip(wanted) {
            assert!((loss - wanted).abs() < 1e-5, "{losses:?} {wanted:?}");
        }
    };
    let wanted = on_ranks(2, |ranks| {
        let trainer = replicated(&ranks, config(6))?;
        Ok(all(trainer)?.0)
    });
    let whole = on_ranks(2, |ranks| {
        let (losses, weights, _) = all(sharded_trainer(&ranks, 6)?.0)?;
        Ok((losses, weights))
    });
    near(&whole[0].0, &wanted[0]);
    // Of three saves two are kept: the shard files that they name exist, and no others.
    on_ranks(2, |ranks| {
        let (mut trainer, _sharded) = sharded_trainer(&ranks, 3)?;
        while trainer.step()?.is_some() {
            trainer.save(path)?;
        }
        ranks.barrier()
    });
    let files = || {
        let files = std::fs::read_dir(folder.path()).unwrap();
        let files = files.map(|file| file.unwrap().file_name().into_string().unwrap());
        files.filter(|name| name.contains(".part-")).count()
    };
    assert_eq!(files(), 4);
    let three_steps = std::fs::read(path).unwrap();
    // The same ranks continue with the same bits.
    let again = on_ranks(2, |ranks| {
        let (losses, weights, _) = all(sharded_trainer(&ranks, 6)?.0)?;
        Ok((losses, weights))
    });
    assert!(again[0].0 == whole[0].0 && again[0].1 == whole[0].1);
    // Another number of ranks, and one rank with the full model.
    let by_three = on_ranks(3, |ranks| Ok(all(sharded_trainer(&ranks, 6)?.0)?.0));
    near(&by_three[0], &whole[0].0);
    let resume = || {
        let (train, validation) = text();
        let config = config(6);
        Trainer::resume(
            path,
            &model_config(),
            config,
            train,
            validation,
            &Device::Cpu,
        )
    };
    let alone = resume().unwrap();
    near(&all(alone).unwrap().0, &whole[0].0);
    TransformerLM::load(&model_config(), path, &Device::Cpu).unwrap();
    // Swapped shard files of two ranks, and shard files of another step: the same sizes with other values.
    let part = |step: &str, rank: &str| {
        let parts = std::fs::read_dir(folder.path()).unwrap();
        let mut parts = parts.map(|file| file.unwrap().path());
        let is_wanted = |path: &std::path::PathBuf| {
            let name = path.file_name().unwrap().to_string_lossy();
            name.contains(&format!(".part-{step}-")) && name.ends_with(&format!("-{rank}-of-2"))
        };
        parts.find(is_wanted).unwrap()
    };
    let first = part("3", "0");
    for (other, words) in [
        (
            part("3", "1"),
            "expected the part of rank 0 of 2 in the save 3-",
        ),
        (part("2", "0"), "got that of rank 0 of 2 in the save 2-"),
    ] {
        let own = std::fs::read(&first).unwrap();
        std::fs::copy(other, &first).unwrap();
        let error = refusal(resume(), &[words]);
        assert!(matches!(error, Error::Format { .. }), "{error}");
        std::fs::write(&first, own).unwrap();
    }
    resume().unwrap();
    // If a shard cannot be written, the old files stay, and all ranks get an error.
    let errors = on_ranks(2, |ranks| {
        let (trainer, sharded) = sharded_trainer(&ranks, 6)?;
        if ranks.rank() == 1 {
            let (_, part) = sharded.parameters().swap_remove(0);
            part.set(&(part.as_tensor() * f64::NAN)?)?;
        }
        Ok(trainer.save(path).unwrap_err().to_string())
    });
    assert!(errors[0].contains("another rank"), "{}", errors[0]);
    assert!(errors[1].contains("finite"), "{}", errors[1]);
    assert!(std::fs::read(path).unwrap() == three_steps);
    resume().unwrap();
    // With a missing shard file the run cannot be resumed.
    let parts = std::fs::read_dir(folder.path()).unwrap();
    for part in parts.map(|file| file.unwrap().path()) {
        if part.to_string_lossy().contains(".part-3-") && part.to_string_lossy().contains("-1-of") {
            std::fs::remove_file(part).unwrap();
        }
    }
    let error = resume().unwrap_err();
    assert!(matches!(error, Error::Io { .. }), "{error}");
}

/// In f16 all ranks skip the same steps, whichever shard overflows, and continue with the same scale, like replicated
/// ranks.
#[test]
fn loss_scaling_of_parts() {
    let config = || TrainConfig {
        precision: Precision::F16,
        loss_scaling: GradScalerConfig {
            init_scale: 2f64.powi(26), // the first steps overflow
            growth_interval: 3,
            ..Default::default()
        },
        max_grad_norm: Some(0.5),
        ..train_config(16)
    };
    let run = |mut trainer: Trainer| -> Result<(Vec<f64>, Vec<usize>, Option<u64>)> {
        while trainer.step()?.is_some() {}
        let history = trainer.history();
        let scale = trainer.loss_scale().map(f64::to_bits);
        Ok((history.losses.clone(), history.skipped.clone(), scale))
    };
    let wanted = on_ranks(2, |ranks| run(replicated(&ranks, config())?));
    let in_parts = on_ranks(2, |ranks| {
        let sharded = FullyShard::new(&ranks, FullyShardConfig::default())?;
        run(sharded_trainer(&sharded, config())?)
    });
    let (losses, skipped, scale) = &wanted[0];
    assert!(!skipped.is_empty() && skipped.len() < 16, "{skipped:?}");
    for (of_rank, of_skipped, of_scale) in &in_parts {
        assert_eq!((of_skipped, of_scale), (skipped, scale));
        for (loss, wanted) in of_rank.iter().zip(losses) {
            assert!((loss - wanted).abs() < 2e-3, "{of_rank:?} {losses:?}");
        }
    }
}

/// Ranks weight targets as one rank does, also in a step where one rank has no targets; a step without any targets is
/// skipped by all.
#[rstest]
fn masked_targets(
    #[values("replicated", "sharded optimizer", "fully sharded")] strategy: &str,
    #[values(Precision::F32, Precision::F16)] precision: Precision,
) {
    let sizes = TransformerConfig {
        context_length: 16,
        dropout: DropoutRates::default(),
        ..model_config()
    };
    let settings = |accumulation| TrainConfig {
        attention: Some(Algorithm::Flash),
        ..settings(accumulation, precision)
    };
    let rows = || MaskedRows::new(&COUNTED, 1);
    let whole = {
        let model = TransformerLM::new(&sizes, 3, &Device::Cpu).unwrap();
        let rows = MaskedRows::new(&COUNTED, 4);
        let mut trainer = Trainer::new(model, settings(4), rows.clone(), rows).unwrap();
        let reports = std::iter::from_fn(|| trainer.step().unwrap());
        reports.collect::<Vec<_>>()
    };
    for world_size in [2, 4] {
        let together = on_ranks(world_size, |ranks| {
            let config = settings(1);
            let mut trainer = if strategy == "fully sharded" {
                let sharded = FullyShard::new(&ranks, FullyShardConfig::default())?;
                let vb = sharded.builder(nn::seeded(3, DType::F32, &Device::Cpu));
                let model = TransformerLM::from_var_builder(&sizes, vb)?;
                Trainer::fully_sharded(model, &sharded, config, rows(), rows())?
            } else {
                let model = TransformerLM::new(&sizes, 3, &Device::Cpu)?;
                let mut trainer = Trainer::new(model, config, rows(), rows())?;
                trainer.replicate(&ranks, ReplicatedConfig::default())?;
                if strategy == "sharded optimizer" {
                    trainer.shard_optimizer()?;
                }
                trainer
            };
            let mut reports = Vec::new();
            while let Some(report) = trainer.step()? {
                reports.push(report);
            }
            Ok((reports, trainer.evaluate()?))
        });
        let tolerance = if precision == Precision::F32 {
            1e-5
        } else {
            2e-2
        };
        for (reports, evaluation) in &together {
            assert_eq!(*evaluation, together[0].1);
            for ((got, wanted), counted) in reports.iter().zip(&whole).zip(COUNTED) {
                assert_eq!(
                    (got.tokens, got.skipped),
                    (counted.iter().sum(), wanted.skipped)
                );
                if got.tokens > 0 {
                    approx::assert_relative_eq!(got.loss, wanted.loss, max_relative = tolerance);
                }
            }
        }
    }
}
