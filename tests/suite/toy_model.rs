//! `model::ToyModel`, and the rows of the tables that `examples/toy_model_dtypes` prints.

#[path = "../../examples/toy_model_dtypes/layer_norm.rs"]
mod layer_norm;
#[path = "../../examples/toy_model_dtypes/table.rs"]
mod table;

use crate::check::refusal;
use crate::settings::{scaler_from, with_lr};
use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use rstest::rstest;
use std::collections::HashMap;
use tallow::model::ToyModel;
use tallow::nn::Layer;
use tallow::optim::Optimizer;
use tallow::precision::Autocast;
use tallow::report::Fields;
use tallow::{autocast, nn, no_grad, ops};

const CPU: Device = Device::Cpu;

/// A row of the table: a tensor, and its dtype under CUDA's policy in f16 and bf16, then under the CPU's.
type Row = (&'static str, [&'static str; 4]);

/// Expected dtypes. CUDA's column for f16 is the exercise's answer, and bf16's its counterpart. The CPU's are those
/// that PyTorch 2.15 printed for this model under `torch.autocast("cpu")`.
const EXPECTED: [Row; 15] = [
    ("parameter fc1.weight", ["f32"; 4]),
    ("parameter ln.weight", ["f32"; 4]),
    ("parameter ln.bias", ["f32"; 4]),
    ("parameter fc2.weight", ["f32"; 4]),
    ("input", ["f32"; 4]),
    ("fc1", LOWER),
    ("relu", LOWER),
    ("layer norm", ["f32", "f32", "f16", "bf16"]),
    ("logits inside the model", LOWER),
    ("logits outside the model", LOWER),
    ("loss", ["f32"; 4]),
    ("gradient fc1.weight", ["f32"; 4]),
    ("gradient ln.weight", ["f32"; 4]),
    ("gradient ln.bias", ["f32"; 4]),
    ("gradient fc2.weight", ["f32"; 4]),
];
const LOWER: [&str; 4] = ["f16", "bf16", "f16", "bf16"];

#[test]
fn every_dtype_of_the_table() {
    let rows = table::rows(0, &CPU).unwrap();
    let keys = table::policies().map(|(key, _, _)| key);
    assert_eq!(keys, ["cuda_f16", "cuda_bf16", "cpu_f16", "cpu_bf16"]);
    let text = |row: &Fields, key: &str| row.get(key).unwrap().as_str().unwrap().to_string();
    assert_eq!(rows.len(), EXPECTED.len());
    for (row, (tensor, dtypes)) in rows.iter().zip(EXPECTED) {
        assert_eq!(text(row, "tensor"), tensor);
        assert_eq!(keys.map(|key| text(row, key)), dtypes, "{tensor}");
    }
}

/// Returns the row of `layer_norm::rows` with these values.
fn found(activations: &str, stored: &str, computed: &str) -> Fields {
    let values = [
        ("activations", activations),
        ("stored", stored),
        ("computed", computed),
    ];
    let has_values = |row: &Fields| {
        values
            .iter()
            .all(|(key, value)| row.get(key) == Some(&(*value).into()))
    };
    layer_norm::rows().into_iter().find(has_values).unwrap()
}

/// Returns an error of a row in percent; infinite if it is null.
fn percent(row: &Fields, key: &str) -> f64 {
    row.get(key).unwrap().as_f64().unwrap_or(f64::INFINITY)
}

#[test]
fn the_numbers_behind_the_answer() {
    let variance = |activations, stored, computed| {
        let row = found(activations, stored, computed);
        percent(&row, "variance_error_percent").abs()
    };
    let output = |activations, stored, computed| {
        let row = found(activations, stored, computed);
        percent(&row, "output_error_percent").abs()
    };
    // f16 overflows, whatever the dtype of the sums, and the output is useless.
    for computed in ["f16", "f16, sums in f32"] {
        let variance_of = found("large", "f16", computed);
        assert_eq!(variance_of.get("variance"), Some(&"inf".into()));
        assert_eq!(output("large", "f16", computed), 100.0);
        assert!(variance("small", "f16", computed) > 50.0);
    }
    // bf16 does not overflow or underflow, but is coarser than f16 wherever f16 works.
    for activations in ["large", "small"] {
        assert!(variance(activations, "bf16", "bf16, sums in f32") < 1.0);
    }
    for activations in ["ordinary", "offset"] {
        let f16 = output(activations, "f16", "f16, sums in f32");
        let bf16 = output(activations, "bf16", "bf16, sums in f32");
        assert!(bf16 > 3.0 * f16, "{activations}: {bf16} {f16}");
    }
    // Sums in bf16 stop far below the correct values.
    let [still, sums] = ["bf16", "bf16, sums in f32"].map(|computed| {
        percent(
            &found("ordinary", "bf16", computed),
            "variance_error_percent",
        )
    });
    assert!(
        still < 0.0 && still.abs() > 10.0 * sums.abs(),
        "{still} {sums}"
    );
    // f32 is accurate, from the same inputs.
    for activations in ["ordinary", "large", "offset", "small"] {
        for stored in ["f16", "bf16"] {
            let row = found(activations, stored, "f32");
            for key in ["variance_error_percent", "output_error_percent"] {
                assert!(percent(&row, key).abs() < 1e-2, "{row:?}");
            }
        }
    }
}

#[test]
fn answers_follow_the_figures() {
    let [sensitive, brain] = layer_norm::answers(&layer_norm::rows()).map(|own| own.answer);
    let output = |activations, dtype: &str| {
        let row = found(activations, dtype, &format!("{dtype}, sums in f32"));
        percent(&row, "output_error_percent")
    };
    let variance = |activations, stored, computed| {
        let row = found(activations, stored, computed);
        percent(&row, "variance_error_percent").abs()
    };
    assert_eq!(half::f16::MAX.to_f32(), 65_504.0);
    let small = variance("small", "f16", "f16, sums in f32");
    for part in [
        "f16 ends at 65,504".into(),
        format!(
            "the variance is inf and the output is off by {:.2}%",
            output("large", "f16")
        ),
        format!("smallest number: the variance is off by {small:.2}%"),
        "at most 0.01%".into(),
    ] {
        assert!(sensitive.contains(&part), "{part}: {sensitive}");
    }
    let sums = variance("ordinary", "bf16", "bf16");
    for part in [
        "For its range, no".into(),
        "For its accuracy, yes".into(),
        format!("off by {:.2}% in bf16", output("offset", "bf16")),
        format!("{:.2}% in f16", output("offset", "f16")),
        format!("variance of ordinary activations is off by {sums:.2}%"),
    ] {
        assert!(brain.contains(&part), "{part}: {brain}");
    }
}

#[test]
fn it_is_its_parts() {
    let model = ToyModel::new(7, 3, nn::seeded(1, DType::F64, &CPU)).unwrap();
    let numbers: Vec<f64> = (0..35).map(|i| (f64::from(i) * 0.7).sin() * 2.0).collect();
    let x = Tensor::from_vec(numbers, (5, 7), &CPU).unwrap();
    let parameters: HashMap<_, _> = model.parameters().into_iter().collect();
    let fc1 = x.matmul(&parameters["fc1.weight"].t().unwrap()).unwrap();
    let relu = fc1.relu().unwrap();
    let (weight, bias) = (&parameters["ln.weight"], &parameters["ln.bias"]);
    let ln = ops::reference::layer_norm(&relu, weight, bias, ToyModel::EPS).unwrap();
    let logits = ln.matmul(&parameters["fc2.weight"].t().unwrap()).unwrap();
    let got = model.activations(&x).unwrap();
    let pairs = [
        (&got.fc1, &fc1),
        (&got.relu, &relu),
        (&got.ln, &ln),
        (&got.logits, &logits),
    ];
    for (got, wanted) in pairs {
        assert_eq!(got.dims(), wanted.dims());
        let difference = (got - wanted).unwrap().abs().unwrap().max_all().unwrap();
        assert!(difference.to_scalar::<f64>().unwrap() < 1e-13);
    }
    let forward = Module::forward(&model, &x).unwrap();
    assert_eq!(
        forward.to_vec2::<f64>().unwrap(),
        got.logits.to_vec2::<f64>().unwrap()
    );
    assert!(got.logits.track_op());
    let untracked = no_grad(|| model.activations(&x)).unwrap();
    assert!(
        ![
            &untracked.fc1,
            &untracked.relu,
            &untracked.ln,
            &untracked.logits
        ]
        .iter()
        .any(|t| t.track_op())
    );
}

#[test]
fn parameters_by_name_shared_with_a_varmap() {
    let vars = VarMap::new();
    let model = ToyModel::new(7, 3, VarBuilder::from_varmap(&vars, DType::F32, &CPU)).unwrap();
    let names_and_shapes: Vec<_> = model
        .parameters()
        .into_iter()
        .map(|(name, var)| (name, var.dims().to_vec()))
        .collect();
    let expected = [
        ("fc1.weight", vec![10, 7]),
        ("ln.weight", vec![10]),
        ("ln.bias", vec![10]),
        ("fc2.weight", vec![3, 10]),
    ];
    assert_eq!(
        names_and_shapes,
        expected.map(|(name, dims)| (name.to_string(), dims))
    );
    assert_eq!(vars.all_vars().len(), 4);
    let mut visited = Vec::new();
    model.visit("toy", &mut |name, _| visited.push(name));
    assert_eq!(visited[1], "toy.ln.weight");
    let x = Tensor::ones((2, 8), DType::F32, &CPU).unwrap();
    refusal(model.forward(&x), &["linear: expected x (..., 7)"]);
}

/// f32 parameters with f16 inside the region: gradients overflow while the scale is too large, those steps are skipped,
/// and the model still learns.
#[rstest]
#[case(Autocast::cuda(DType::F16))]
#[case(Autocast::cpu(DType::F16))]
fn learns_in_f16_under_autocast_with_a_scaler(#[case] policy: Autocast) {
    let model = ToyModel::new(12, 3, nn::seeded(5, DType::F32, &CPU)).unwrap();
    let numbers: Vec<f32> = (0..64 * 12).map(|i| (i as f32 * 7.7).sin() * 1.7).collect();
    let largest =
        |row: &[f32]| (0..3u32).max_by(|i, j| row[*i as usize].total_cmp(&row[*j as usize]));
    let targets: Vec<u32> = numbers.chunks(12).filter_map(largest).collect();
    let targets = Tensor::new(targets, &CPU).unwrap();
    let x = Tensor::from_vec(numbers, (64, 12), &CPU).unwrap();
    let config = with_lr(3e-2);
    let mut optimizer = Optimizer::new(model.parameters(), config).unwrap();
    let mut scaler = scaler_from(2f64.powi(30));
    let (mut losses, mut skipped) = (Vec::new(), 0);
    for _ in 0..80 {
        let loss = autocast(policy.clone(), || {
            ops::cross_entropy(&model.forward(&x)?, &targets)
        })
        .unwrap();
        losses.push(loss.to_scalar::<f32>().unwrap());
        let mut gradients = scaler.scale(&loss).unwrap().backward().unwrap();
        if !scaler.step(&mut optimizer, &mut gradients).unwrap() {
            skipped += 1;
        }
        scaler.update().unwrap();
    }
    assert!((5..20).contains(&skipped), "{skipped}");
    assert_eq!(optimizer.steps(), 80 - skipped);
    assert_eq!(scaler.loss_scale(), 2f64.powi(30 - skipped as i32));
    assert!(
        losses[skipped - 1] == losses[0] && losses[79] < 0.6 * losses[0],
        "{losses:?}"
    );
}
