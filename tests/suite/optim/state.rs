//! Optimizer state saved and restored, in memory and in files.

use super::{elements, named, noise, noisy_gradient, store, var};
use crate::check::refusal;
use candle_core::{DType, Device, Tensor, Var};
use rstest::rstest;
use std::path::Path;
use tallow::Error;
use tallow::optim::{AdamWConfig, Optimizer, ParameterGroup, decay_matrices_only};

/// Returns a matrix and a vector of one dtype, and their optimizer with two groups.
fn setup(dtype: DType, lr: f64) -> (Vec<Var>, Optimizer) {
    let matrix = Tensor::from_vec(noise(21, 1), (3, 7), &Device::Cpu).unwrap();
    let matrix = Var::from_tensor(&matrix.to_dtype(dtype).unwrap()).unwrap();
    let vars = vec![matrix, var(&noise(5, 2), dtype)];
    let config = AdamWConfig {
        lr,
        betas: (0.9, 0.95),
        ..Default::default()
    };
    let groups = decay_matrices_only(named(&[&vars[0], &vars[1]]), config);
    (vars, Optimizer::with_groups(groups).unwrap())
}

fn steps(vars: &[Var], optimizer: &mut Optimizer, range: std::ops::Range<usize>) {
    for t in range {
        let gradients: Vec<_> = vars
            .iter()
            .map(|var| (var, noisy_gradient(var, t)))
            .collect();
        optimizer.step(&store(&gradients)).unwrap();
    }
}

/// Returns everything that later steps depend on.
fn everything(vars: &[Var], optimizer: &Optimizer) -> Vec<Vec<f64>> {
    let state = optimizer
        .state()
        .into_iter()
        .map(|(_, tensor)| elements(&tensor));
    vars.iter().map(|var| elements(var)).chain(state).collect()
}

#[rstest]
#[case(DType::F32)]
#[case(DType::F64)]
#[case(DType::BF16)]
fn continues_with_the_same_bits(#[case] dtype: DType) {
    // A learning rate with many digits, as schedules produce, which a careless JSON parser would get wrong by one bit.
    let lr = 1e-4 / 7.0;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("optimizer.safetensors");
    let (vars, mut optimizer) = setup(dtype, 0.5);
    optimizer.set_learning_rate(lr);
    steps(&vars, &mut optimizer, 0..5);
    optimizer.save(&path).unwrap();
    let weights: Vec<Tensor> = vars.iter().map(|var| var.copy().unwrap()).collect();
    let snapshot: Vec<(String, Tensor)> = optimizer
        .state()
        .into_iter()
        .map(|(name, tensor)| (name, tensor.copy().unwrap()))
        .collect();
    steps(&vars, &mut optimizer, 5..9);
    let unbroken = everything(&vars, &optimizer);

    let (vars, mut resumed) = setup(dtype, 0.25);
    steps(&vars, &mut resumed, 100..103); // replaced by the load
    for (var, weight) in vars.iter().zip(&weights) {
        var.set(weight).unwrap();
    }
    resumed.load(&path).unwrap();
    assert_eq!((resumed.steps(), resumed.learning_rate()), (5, lr));
    assert_eq!(resumed.groups()[1].rule, optimizer.groups()[1].rule);
    steps(&vars, &mut resumed, 5..9);
    assert_eq!(everything(&vars, &resumed), unbroken);

    let (vars, mut restored) = setup(dtype, lr);
    for (var, weight) in vars.iter().zip(&weights) {
        var.set(weight).unwrap();
    }
    restored.load_state(snapshot, 5).unwrap();
    steps(&vars, &mut restored, 5..9);
    assert_eq!(everything(&vars, &restored), unbroken);
}

#[test]
fn state_is_named_after_the_parameters() {
    let (_, optimizer) = setup(DType::F32, 0.1);
    let names = |optimizer: &Optimizer| -> Vec<String> {
        optimizer
            .state()
            .into_iter()
            .map(|(name, _)| name)
            .collect()
    };
    assert_eq!(
        names(&optimizer),
        ["exp_avg.a", "exp_avg_sq.a", "exp_avg.b", "exp_avg_sq.b"]
    );
    let (_, optimizer) = setup(DType::F16, 0.1);
    assert_eq!(
        names(&optimizer)[..3],
        ["exp_avg.a", "exp_avg_sq.a", "master.a"]
    );
}

#[test]
fn its_own_state_can_be_put_back() {
    let (vars, mut optimizer) = setup(DType::F32, 0.1);
    steps(&vars, &mut optimizer, 0..2);
    let before = everything(&vars, &optimizer);
    let state = optimizer.state();
    optimizer.load_state(state, 2).unwrap();
    assert_eq!(everything(&vars, &optimizer), before);
}

#[test]
fn a_state_that_does_not_fit_is_refused_by_name() {
    let (vars, mut optimizer) = setup(DType::F32, 0.1);
    steps(&vars, &mut optimizer, 0..2);
    let before = everything(&vars, &optimizer);
    let good = optimizer.state();
    let tensor = |dtype| Tensor::zeros((3, 7), dtype, &Device::Cpu).unwrap();
    let mut missing = good.clone();
    missing.remove(3);
    let mut misshapen = good.clone();
    misshapen[1].1 = tensor(DType::F32).t().unwrap();
    let mut wrong_dtype = good.clone();
    wrong_dtype[0].1 = tensor(DType::F64);
    let mut extra = good.clone();
    extra.push(("exp_avg.other".into(), tensor(DType::F32)));
    for (state, name, got) in [
        (missing, "exp_avg_sq.b", "nothing"),
        (misshapen, "exp_avg_sq.a", "[7, 3]"),
        (wrong_dtype, "exp_avg.a", "f64"),
        (extra, "exp_avg.other", "[3, 7]"),
    ] {
        let error = refusal(optimizer.load_state(state, 7), &[name, got]);
        assert!(matches!(error, Error::Data { .. }), "{error}");
    }
    assert_eq!(
        (everything(&vars, &optimizer), optimizer.steps()),
        (before, 2)
    );
}

/// Numbers that no run can have, and that the next step would spread, are refused by name, and nothing changes.
#[test]
fn a_state_with_numbers_that_cannot_be() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("optimizer.safetensors");
    let (vars, mut optimizer) = setup(DType::F32, 0.1);
    steps(&vars, &mut optimizer, 0..2);
    let before = everything(&vars, &optimizer);
    for (entry, value, got) in [
        (0, f32::NAN, "NaN at element 4"),
        (0, f32::NEG_INFINITY, "-inf at element 4"),
        (1, f32::NAN, "NaN at element 4"),
        (3, -0.5, "-0.5 at element 4"),
    ] {
        let mut state = optimizer.state();
        let (name, tensor) = &mut state[entry];
        let mut spoiled = tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        spoiled[4] = value;
        *tensor = Tensor::from_vec(spoiled, tensor.shape(), &Device::Cpu).unwrap();
        let name = name.clone();
        let tensors: std::collections::HashMap<_, _> = state.iter().cloned().collect();
        refusal(optimizer.load_state(state, 7), &[&name, got]);

        // Also from a file that another program wrote.
        optimizer.save(&path).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        let mut texts = header.metadata().clone().unwrap();
        texts.remove("tallow.crc32").unwrap();
        std::fs::write(&path, safetensors::serialize(tensors, Some(texts)).unwrap()).unwrap();
        let error = refusal(optimizer.load(&path), &[&name, got]);
        assert!(matches!(error, Error::Weight { .. }), "{error}");
    }
    let negative = Tensor::full(-0.5f32, 5, &Device::Cpu).unwrap();
    let mut state = optimizer.state();
    state[2].1 = negative; // a mean of gradients may be negative
    optimizer.load_state(state, 2).unwrap();
    assert_ne!(everything(&vars, &optimizer), before);
}

/// A damaged bit in the optimizer's file, and a state that has diverged.
#[test]
fn a_damaged_file_and_one_that_would_be() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("optimizer.safetensors");
    let (vars, mut optimizer) = setup(DType::F32, 0.1);
    steps(&vars, &mut optimizer, 0..2);
    optimizer.save(&path).unwrap();
    let whole = std::fs::read(&path).unwrap();
    let mut damaged = whole.clone();
    *damaged.last_mut().unwrap() ^= 1; // the result is still a valid number
    std::fs::write(&path, damaged).unwrap();
    refusal(optimizer.load(&path), &["exp_avg_sq.b has the CRC-32"]);

    std::fs::write(&path, &whole).unwrap();
    let nan = vars[1].affine(f64::NAN, 0.0).unwrap().detach();
    let gradients = [(&vars[0], noisy_gradient(&vars[0], 0)), (&vars[1], nan)];
    optimizer.step(&store(&gradients)).unwrap();
    refusal(optimizer.save(&path), &["exp_avg.b", "NaN at element 0"]);
    assert!(std::fs::read(&path).unwrap() == whole);
}

#[test]
fn a_file_that_does_not_fit_is_refused_and_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("optimizer.safetensors");
    let (vars, mut optimizer) = setup(DType::F32, 0.1);
    steps(&vars, &mut optimizer, 0..2);
    optimizer.save(&path).unwrap();
    let before = everything(&vars, &optimizer);

    let (_, mut other_dtype) = setup(DType::F64, 0.1);
    let error = other_dtype.load(&path).unwrap_err();
    assert!(
        matches!(&error, Error::Weight { name, .. } if name == "exp_avg.a"),
        "{error}"
    );

    let one_group = |parameters| {
        Optimizer::with_groups(vec![ParameterGroup {
            parameters,
            rule: AdamWConfig::default().into(),
        }])
        .unwrap()
    };
    let error = one_group(named(&[&vars[0], &vars[1]]))
        .load(&path)
        .unwrap_err();
    assert!(
        matches!(&error, Error::Resume { field, .. } if field == "parameter groups"),
        "{error}"
    );
    let error = one_group(named(&[&vars[0]])).load(&path).unwrap_err();
    assert!(
        matches!(&error, Error::Weight { name, .. } if name == "exp_avg.b"),
        "{error}"
    );
    let group = |var: &Var, name: &str| ParameterGroup {
        parameters: vec![(name.to_string(), var.clone())],
        rule: AdamWConfig::default().into(),
    };
    let mut swapped =
        Optimizer::with_groups(vec![group(&vars[1], "b"), group(&vars[0], "a")]).unwrap();
    refusal(swapped.load(&path), &["parameter b in group 1"]);

    let whole = std::fs::read(&path).unwrap();
    let check_damaged = |optimizer: &mut Optimizer, bytes: &[u8]| {
        let damaged = folder.path().join("damaged.safetensors");
        std::fs::write(&damaged, bytes).unwrap();
        let error = refusal(optimizer.load(&damaged), &["damaged.safetensors"]);
        assert!(matches!(error, Error::Format { .. }), "{error}");
    };
    for length in [0, 7, 20, whole.len() / 2, whole.len() - 1] {
        check_damaged(&mut optimizer, &whole[..length]);
    }
    check_damaged(
        &mut optimizer,
        b"not at all a safetensors file, but long enough to hold a header's length",
    );
    let plain = folder.path().join("plain.safetensors");
    let tensors = std::collections::HashMap::from([("x", vars[0].detach())]);
    candle_core::safetensors::save(&tensors, &plain).unwrap();
    let error = optimizer.load(&plain).unwrap_err();
    assert!(matches!(error, Error::Format { .. }), "{error}");

    let error = optimizer.load(folder.path().join("absent")).unwrap_err();
    assert!(matches!(error, Error::Io { action: "read", .. }), "{error}");
    assert_eq!(
        (everything(&vars, &optimizer), optimizer.steps()),
        (before, 2)
    );
}

fn files(folder: &Path) -> Vec<String> {
    let names = std::fs::read_dir(folder).unwrap();
    names
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

#[test]
fn saving_replaces_whole_files_and_leaves_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("optimizer.safetensors");
    let (vars, mut optimizer) = setup(DType::F32, 0.1);
    optimizer.save(&path).unwrap();
    let first = std::fs::read(&path).unwrap();
    optimizer.save(&path).unwrap();
    assert_eq!(
        first,
        std::fs::read(&path).unwrap(),
        "equal states give equal files"
    );
    steps(&vars, &mut optimizer, 0..1);
    optimizer.save(&path).unwrap();
    assert_ne!(first, std::fs::read(&path).unwrap());
    assert_eq!(files(folder.path()), ["optimizer.safetensors"]);

    // A folder at the path cannot be replaced by a rename; a missing folder cannot be written to.
    let taken = folder.path().join("taken");
    std::fs::create_dir_all(taken.join("inside")).unwrap();
    for bad in [taken, folder.path().join("absent").join("file")] {
        let error = optimizer.save(&bad).unwrap_err();
        assert!(
            matches!(
                error,
                Error::Io {
                    action: "write",
                    ..
                }
            ),
            "{error}"
        );
    }
    let mut left = files(folder.path());
    left.sort();
    assert_eq!(left, ["optimizer.safetensors", "taken"]);
}
