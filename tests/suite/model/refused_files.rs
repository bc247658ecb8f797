//! Files that hold no matching model, and paths that cannot be written.

use super::*;
use crate::settings::loaded_as;
use proptest::prelude::*;
use rstest::rstest;
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::{TempDir, tempdir};

fn load(path: &Path) -> tallow::Result<TransformerLM> {
    TransformerLM::load(&mini(), path, &CPU)
}

/// Returns a folder and the model file in it.
fn saved() -> (TempDir, PathBuf) {
    let folder = tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    mini_model(4).save(&path).unwrap();
    (folder, path)
}

/// Writes a file with changed weights of the model.
fn changed(change: impl FnOnce(&mut HashMap<String, Tensor>)) -> (TempDir, PathBuf) {
    let (folder, path) = saved();
    let mut weights = candle_core::safetensors::load(&path, &CPU).unwrap();
    change(&mut weights);
    candle_core::safetensors::save(&weights, &path).unwrap();
    (folder, path)
}

#[test]
fn any_missing_weight_is_named() {
    for (name, shape) in mini().parameter_shapes() {
        let (_folder, path) = changed(|weights| {
            weights.remove(&name).unwrap();
        });
        let expected = format!(
            "weight {name}: expected {:?}, got no such weight",
            shape.dims()
        );
        let parts = ["model.safetensors", &expected, "configuration"];
        let error = refusal(load(&path), &parts);
        assert!(matches!(error, Error::Weight { .. }), "{error:?}");
    }
}

#[test]
fn any_misshapen_weight_is_named() {
    for (name, shape) in mini().parameter_shapes() {
        let mut longer = shape.dims().to_vec();
        longer[0] += 1;
        let (_folder, path) = changed(|weights| {
            let weight = Tensor::zeros(longer.as_slice(), DType::F32, &CPU).unwrap();
            weights.insert(name.clone(), weight);
        });
        let expected = format!("weight {name}: expected {:?}, got {longer:?}", shape.dims());
        refusal(load(&path), &["model.safetensors", &expected]);
    }
}

/// A weight stored as (in, out) has the right number of elements, but the wrong shape.
#[test]
fn a_transposed_weight() {
    let name = "layers.0.ffn.w1.weight";
    let (_folder, path) = changed(|weights| {
        let transposed = weights[name].t().unwrap().contiguous().unwrap();
        weights.insert(name.into(), transposed);
    });
    refusal(load(&path), &[name, "expected [25, 18]", "got [18, 25]"]);
}

#[rstest]
#[case::u32(DType::U32, "u32")]
#[case::u8(DType::U8, "u8")]
#[case::i64(DType::I64, "i64")]
fn an_integer_weight(#[case] dtype: DType, #[case] got: &str) {
    let name = "layers.1.attn.k_proj.weight";
    let (_folder, path) = changed(|weights| {
        let weight = Tensor::zeros((18, 18), dtype, &CPU).unwrap();
        weights.insert(name.into(), weight);
    });
    let parts = [
        "model.safetensors",
        name,
        "expected a floating-point weight",
        got,
    ];
    refusal(load(&path), &parts);
}

/// A dtype that safetensors has and candle does not.
#[test]
fn a_boolean_weight() {
    let (_folder, path) = saved();
    let bytes = fs::read(&path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let name = "layers.1.attn.k_proj.weight";
    let flags = vec![1u8; 18 * 18];
    let flags =
        safetensors::tensor::TensorView::new(safetensors::Dtype::BOOL, vec![18, 18], &flags);
    let mut weights = file.tensors();
    weights.retain(|(kept, _)| kept != name);
    weights.push((name.into(), flags.unwrap()));
    let changed = safetensors::serialize(weights, None).unwrap();
    fs::write(&path, changed).unwrap();
    refusal(load(&path), &["model.safetensors", name]);
}

#[test]
fn a_weight_too_many() {
    let extra = |name: &str| {
        let (_folder, path) = changed(|weights| {
            let weight = Tensor::zeros(18, DType::F32, &CPU).unwrap();
            weights.insert(name.into(), weight);
        });
        refusal(
            load(&path),
            &["model.safetensors", name, "no such weight in 2 layers"],
        )
    };
    for name in [
        "lm_head.bias",
        "layers.2.ln1.weight",
        "my.optimizer.step",
        "optimizer",
    ] {
        assert!(matches!(extra(name), Error::Weight { .. }));
    }
}

/// The file of one configuration, loaded with another.
#[rstest]
#[case::fewer_layers(|c: &mut TransformerConfig| c.num_layers = 1, &["layers.1.", "no such weight in 1 layers"])]
#[case::more_layers(|c: &mut TransformerConfig| c.num_layers = 3, &["layers.2.ln1.weight", "got no such weight"])]
#[case::vocabulary(
    |c: &mut TransformerConfig| c.vocab_size = 30,
    &["token_embeddings.weight", "expected [30, 18]", "got [29, 18]"]
)]
#[case::width(
    |c: &mut TransformerConfig| c.d_model = 24,
    &["token_embeddings.weight", "expected [29, 24]", "got [29, 18]"]
)]
#[case::feed_forward(
    |c: &mut TransformerConfig| c.d_ff = 26,
    &["layers.0.ffn.w1.weight", "expected [26, 18]", "got [25, 18]"]
)]
fn of_another_configuration(#[case] change: fn(&mut TransformerConfig), #[case] parts: &[&str]) {
    let (_folder, path) = saved();
    let mut config = mini();
    change(&mut config);
    refusal(TransformerLM::load(&config, &path, &CPU), parts);
}

#[test]
fn parameters_are_floats() {
    let (_folder, path) = saved();
    for dtype in [DType::U32, DType::U8, DType::I64] {
        let options = loaded_as(dtype);
        let loaded = TransformerLM::load_with(&mini(), &path, &options, &CPU);
        refusal(loaded, &[dtype.as_str()]);
        refusal(
            TransformerLM::from_var_builder(&mini(), seeded(dtype)),
            &[dtype.as_str()],
        );
    }
}

/// A file cut anywhere: in the length, the header, or the data.
#[test]
fn truncated_files() {
    let (_folder, path) = saved();
    let whole = fs::read(&path).unwrap();
    let header = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    for length in [
        1,
        7,
        8,
        9,
        8 + header / 2,
        7 + header,
        8 + header,
        9 + header,
    ]
    .into_iter()
    .chain([whole.len() / 2, whole.len() - 1])
    {
        fs::write(&path, &whole[..length]).unwrap();
        let error = refusal(
            load(&path),
            &[
                "model.safetensors",
                "not a complete safetensors file",
                "truncated",
            ],
        );
        assert!(matches!(error, Error::Format { .. }), "{length}: {error:?}");
    }
}

#[test]
fn files_that_are_something_else() {
    let (folder, path) = saved();
    let whole = fs::read(&path).unwrap();
    let header = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let with = |position: usize, bytes: &[u8]| {
        let mut changed = whole.clone();
        changed[position..position + bytes.len()].copy_from_slice(bytes);
        changed
    };
    let contents = [
        b"Call me Ishmael. Some years ago, never mind how long precisely".to_vec(),
        vec![0; 5000],
        vec![0xff; 5000],
        with(0, &u64::MAX.to_le_bytes()),
        with(0, &(header as u64 - 1).to_le_bytes()),
        with(8, b"["),                      // not a JSON object
        with(8 + header / 2, b"\xff\xfe"),  // not UTF-8
        [&whole[..], b"trailing"].concat(), // bytes of no tensor
    ];
    for (i, content) in contents.into_iter().enumerate() {
        fs::write(&path, content).unwrap();
        let error = refusal(load(&path), &["model.safetensors", "safetensors file"]);
        assert!(matches!(error, Error::Format { .. }), "{i}: {error:?}");
    }
    fs::write(&path, "").unwrap();
    refusal(load(&path), &["model.safetensors", "the file is empty"]);
    let missing = folder.path().join("missing.safetensors");
    let error = refusal(load(&missing), &["missing.safetensors", "cannot read"]);
    assert!(matches!(error, Error::Io { .. }));
    let error = refusal(load(folder.path()), &["cannot read", "directory"]);
    assert!(matches!(error, Error::Io { .. }));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..Default::default() })]

    /// With any single byte of the header changed, the file is refused or gives a model of these sizes; it never
    /// panics.
    #[test]
    fn a_wrong_byte_in_the_header(position in 0usize..2200, flip in 1u8..=255) {
        let config = TransformerConfig { num_layers: 1, ..mini() };
        let folder = tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        TransformerLM::new(&config, 0, &CPU).unwrap().save(&path).unwrap();
        let mut bytes = fs::read(&path).unwrap();
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        bytes[position % (8 + header)] ^= flip;
        fs::write(&path, bytes).unwrap();
        match TransformerLM::load(&config, &path, &CPU) {
            Ok(model) => prop_assert_eq!(model.num_parameters(), config.num_parameters()),
            Err(error) => prop_assert!(error.to_string().contains("model.safetensors"), "{}", error),
        }
    }
}

#[test]
fn places_that_cannot_be_written() {
    let (folder, path) = saved();
    let before = fs::read(&path).unwrap();
    let model = mini_model(5);
    let places = [
        (folder.path().join("no folder").join("model.st"), "model.st"),
        (folder.path().to_path_buf(), "directory"),
        (path.join("model.st"), "model.st"), // below a file
    ];
    for (place, part) in places {
        let error = refusal(model.save(&place), &[part, "cannot write"]);
        assert!(matches!(error, Error::Io { .. }));
        assert!(
            error.to_string().contains(&place.display().to_string()),
            "{error}"
        );
    }
    #[cfg(target_os = "linux")]
    refusal(
        model.save("/dev/full"),
        &["/dev/full", "cannot write", "space"],
    );
    assert_eq!(fs::read(&path).unwrap(), before);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}
