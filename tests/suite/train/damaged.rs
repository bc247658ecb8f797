//! Damaged checkpoints: flipped bits, impossible numbers, and files that change during the read.

use super::*;
use candle_core::Device;
use std::fs;
use tallow::train::Checkpoint;

/// Returns a model whose checkpoint is a small file.
fn tiny() -> TransformerConfig {
    TransformerConfig {
        d_model: 4,
        num_layers: 1,
        num_heads: 1,
        d_ff: 4,
        ..sizes()
    }
}

fn resume_tiny(path: &Path) -> Result<Trainer> {
    let (train, held_out) = (training(), validation());
    Trainer::resume(path, &tiny(), settings(), train, held_out, &Device::Cpu)
}

/// One flipped bit in every byte of the file is either detected or has no effect.
#[test]
fn a_flipped_bit_anywhere_is_found_or_harmless() {
    let (_folder, path) = checkpoint();
    let model = TransformerLM::new(&tiny(), 5, &Device::Cpu).unwrap();
    let mut trainer = Trainer::new(model, settings(), training(), validation()).unwrap();
    take(&mut trainer, 3);
    trainer.evaluate().unwrap();
    trainer.save(&path).unwrap();
    let whole = fs::read(&path).unwrap();
    let data_start = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let mut harmless = 0;
    for position in 0..whole.len() {
        let mut damaged = whole.clone();
        damaged[position] ^= 1 << (position * 5 % 8);
        fs::write(&path, damaged).unwrap();
        match resume_tiny(&path) {
            Err(error) => assert!(error.to_string().contains("run.safetensors"), "{error}"),
            Ok(resumed) => {
                assert!(position < data_start, "byte {position} of a tensor");
                assert_eq!(bits(&resumed), bits(&trainer), "{position}");
                assert_eq!(resumed.history(), trainer.history(), "{position}");
                harmless += 1;
            }
        }
    }
    // Only the key of the checksums is unprotected: with a changed key the file has none.
    assert!(
        harmless <= "tallow.crc32".len(),
        "{harmless} of {}",
        whole.len()
    );
}

/// Writes a file without checksums and with one element of a tensor changed.
fn spoil(path: &Path, name: &str, element: usize, value: f32) {
    super::refusals::forge(path, str::to_string, |_| Some(vec![]));
    let mut bytes = fs::read(path).unwrap();
    let (header, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let (start, _) = metadata.info(name).unwrap().data_offsets;
    let at = 8 + header + start + 4 * element;
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    fs::write(path, bytes).unwrap();
}

/// Numbers that would destroy the run in the next step are refused: a negative mean of squares, NaN, infinity.
#[test]
fn numbers_that_cannot_be_are_refused() {
    let (_folder, path) = checkpoint();
    for (name, value, parts) in [
        (
            "optimizer.exp_avg_sq.lm_head.weight",
            -1e-9,
            ["numbers from 0", "element 7"],
        ),
        (
            "optimizer.exp_avg_sq.lm_head.weight",
            f32::NAN,
            ["numbers from 0", "NaN"],
        ),
        (
            "optimizer.exp_avg.lm_head.weight",
            f32::INFINITY,
            ["finite numbers", "inf"],
        ),
        (
            "layers.0.ln1.weight",
            f32::NAN,
            ["finite numbers", "NaN at element 7"],
        ),
    ] {
        let mut trainer = start(settings());
        take(&mut trainer, 1);
        trainer.save(&path).unwrap();
        spoil(&path, name, 7, value);
        let parts = ["run.safetensors", name, parts[0], parts[1]];
        refusal(resume(&path, settings()), &parts);
    }
    // The same file with a valid number resumes, so the number was the reason.
    start(settings()).save(&path).unwrap();
    spoil(&path, "optimizer.exp_avg.lm_head.weight", 7, -0.5);
    resume(&path, settings()).unwrap();
}

/// Weights that are not finite do not overwrite a saved checkpoint.
#[test]
fn a_run_that_has_diverged_keeps_the_old_file() {
    let (_folder, path) = checkpoint();
    let mut trainer = start(settings());
    take(&mut trainer, 2);
    trainer.save(&path).unwrap();
    let old = fs::read(&path).unwrap();
    let (name, weight) = trainer.model().parameters().remove(3);
    weight
        .set(&weight.affine(f64::INFINITY, 0.0).unwrap())
        .unwrap();
    let parts = ["run.safetensors", &name, "finite numbers"];
    let error = refusal(trainer.save(&path), &parts);
    assert!(matches!(error, Error::Weight { .. }), "{error:?}");
    refusal(trainer.model().save(&path), &parts);
    assert!(fs::read(&path).unwrap() == old);
    assert_eq!(resume(&path, settings()).unwrap().steps_taken(), 2);
}

/// A file that is truncated and rewritten in place during the read gives an error or the complete run, and the process
/// survives.
#[test]
fn a_file_that_shrinks_while_it_is_read() {
    let (_folder, path) = checkpoint();
    let mut trainer = start(settings());
    take(&mut trainer, 2);
    trainer.save(&path).unwrap();
    let whole = fs::read(&path).unwrap();
    let expected = bits(&trainer);
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let ordering = std::sync::atomic::Ordering::Relaxed;
            while !stop.load(ordering) {
                fs::write(&path, &whole).unwrap();
                let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
                file.set_len(5000).unwrap();
            }
        });
        let mut refused = 0;
        for _ in 0..300 {
            match resume(&path, settings()) {
                Ok(resumed) => assert_eq!(bits(&resumed), expected),
                Err(error) => {
                    assert!(error.to_string().contains("run.safetensors"), "{error}");
                    refused += 1;
                }
            }
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(refused > 0);
    });
}

/// A file declares the length of its history, and a sparse file can have any length: this is an error, not a crash.
#[test]
fn a_history_longer_than_the_run_or_than_memory_is_refused() {
    const LOSSES: u64 = 1 << 40;
    let (_folder, path) = checkpoint();
    start(settings()).save(&path).unwrap();
    let bytes = fs::read(&path).unwrap();
    let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let text = header.metadata().as_ref().unwrap()["tallow.train"].clone();
    let refused = |text: &str, parts: &[&str]| {
        let empty =
            |dtype| serde_json::json!({"dtype": dtype, "shape": [0], "data_offsets": [0, 0]});
        let header = serde_json::json!({
            "__metadata__": {"tallow.train": text},
            "history.evaluated_steps": empty("I64"),
            "history.evaluations": empty("F64"),
            "history.losses": {"dtype": "F64", "shape": [LOSSES], "data_offsets": [0, 8 * LOSSES]},
            "history.skipped": empty("I64"),
        });
        let header = header.to_string();
        let mut content = (header.len() as u64).to_le_bytes().to_vec();
        content.extend(header.bytes());
        fs::write(&path, &content).unwrap();
        let file = fs::File::options().write(true).open(&path).unwrap();
        file.set_len(content.len() as u64 + 8 * LOSSES).unwrap();
        refusal(Checkpoint::read(&path), parts)
    };
    let error = refused(
        &text,
        &[
            "run.safetensors",
            "history.losses",
            "expected 0 f64",
            "got f64 [1099511627776]",
        ],
    );
    assert!(matches!(error, Error::Weight { .. }), "{error:?}");
    let text = text.replace("\"step\":0", &format!("\"step\":{LOSSES}"));
    let error = refused(&text, &["run.safetensors", "history.losses"]);
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error:?}");
}

/// Tensor names in a file are untrusted, so control characters are escaped in errors.
#[test]
fn names_of_tensors_are_shown_escaped() {
    let (_folder, path) = checkpoint();
    start(settings()).save(&path).unwrap();
    super::refusals::forge(&path, str::to_string, |_| Some(vec![]));
    let bytes = fs::read(&path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let name = "lm_head\u{1b}[2J\0.weight";
    let tensors = file
        .tensors()
        .into_iter()
        .chain([(name.to_string(), file.tensor("lm_head.weight").unwrap())]);
    let named = safetensors::serialize(tensors.collect::<Vec<_>>(), None).unwrap();
    fs::write(&path, named).unwrap();
    let error = refusal(
        TransformerLM::load(&sizes(), &path, &Device::Cpu),
        &["run.safetensors", r"lm_head\u{1b}[2J\u{0}.weight"],
    );
    assert!(!error.to_string().contains(char::is_control));
}

/// Checkpoints from before checksums, with the history in the metadata, still resume.
#[test]
fn old_checkpoints_resume() {
    let (_folder, path) = checkpoint();
    let mut trainer = start(settings());
    take(&mut trainer, 4);
    trainer.evaluate().unwrap();
    trainer.save(&path).unwrap();
    super::refusals::forge(&path, str::to_string, |_| Some(vec![]));
    let mut resumed = resume(&path, settings()).unwrap();
    assert_eq!(resumed.history(), trainer.history());
    assert_eq!(take(&mut resumed, 3), take(&mut trainer, 3));
    assert_eq!(bits(&resumed), bits(&trainer));
}

/// A checksum is zlib's CRC-32 of a tensor's bytes, which other languages can compute.
#[test]
fn checksums_are_what_others_can_check() {
    let (_folder, path) = checkpoint();
    start(settings()).save(&path).unwrap();
    let bytes = fs::read(&path).unwrap();
    let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let texts = header.metadata().clone().unwrap();
    let sums: serde_json::Value = serde_json::from_str(&texts["tallow.crc32"]).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let crc32 = |bytes: &[u8]| {
        let sum = bytes.iter().fold(!0u32, |sum, byte| {
            (0..8).fold(sum ^ u32::from(*byte), |sum, _| {
                (sum >> 1) ^ (0xedb8_8320 * (sum & 1))
            })
        });
        format!("{:08x}", !sum)
    };
    assert_eq!(crc32(b"123456789"), "cbf43926"); // the check value of the standard
    for (name, view) in file.tensors() {
        assert_eq!(sums["tensors"][&name], crc32(view.data()), "{name}");
    }
    assert_eq!(sums["tensors"].as_object().unwrap().len(), file.len());
    assert_eq!(
        sums["texts"]["tallow.train"],
        crc32(texts["tallow.train"].as_bytes())
    );
    assert_eq!(Checkpoint::read(&path).unwrap().step, 0);
}
