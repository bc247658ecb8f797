//! Muon beyond what all rules share: its groups, shapes, scales, the iteration in bf16, and planned steps.

use super::{elements, noise, relative, store};
use crate::check::refusal;
use crate::settings::meta_of;
use candle_core::{DType, Device, Tensor, Var};
use rstest::rstest;
use tallow::attention::Algorithm;
use tallow::compile::{Batch, Step, StepConfig, Target};
use tallow::internals::Category;
use tallow::model::{TransformerConfig, TransformerLM};
use tallow::optim::{
    AdamWConfig, IterationDType, MuonConfig, Optimizer, Rule, Scaling, is_hidden_matrix,
    muon_for_matrices, usual_groups,
};

/// Returns a matrix of full rank. (One of sines, such as `noise`, has rank 2, and is orthogonal in two dimensions only.)
fn matrix(rows: usize, columns: usize, dtype: DType, seed: usize) -> Var {
    let values = noise(rows * columns, seed).into_iter();
    let values: Vec<f64> = values.map(|x| (x * 43_758.545_3).fract()).collect();
    let values = Tensor::from_vec(values, (rows, columns), &Device::Cpu);
    Var::from_tensor(&values.unwrap().to_dtype(dtype).unwrap()).unwrap()
}

/// Takes a step of `weight`, with a gradient that is rounded to `rounded` first.
fn step(config: MuonConfig, weight: &Var, rounded: DType, by_reference: bool) {
    let gradient = matrix(weight.dims()[0], weight.dims()[1], rounded, 77);
    let gradient = gradient.to_dtype(weight.dtype()).unwrap();
    let gradients = store(&[(weight, gradient)]);
    let mut optimizer = Optimizer::new([("w".to_string(), weight.clone())], config).unwrap();
    match by_reference {
        false => optimizer.step(&gradients).unwrap(),
        true => optimizer.step_reference(&gradients).unwrap(),
    }
}

/// A step in f32 differs from that in f64 by f32's rounding, by kernel and reference. With the iteration in bf16 the
/// kernel's error is at most twice that of the reference, which is that of PyTorch's bf16 matmuls.
#[rstest]
#[case(40, 24)]
#[case(24, 40)]
#[case(33, 33)]
fn the_iteration_in_bf16_is_close(#[case] rows: usize, #[case] columns: usize) {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let error = |in_bf16: bool, by_reference: bool| {
            let [exact, own] = [DType::F64, dtype]
                .map(|dtype| Var::zeros((rows, columns), dtype, &Device::Cpu).unwrap());
            step(MuonConfig::default(), &exact, dtype, false);
            let config = MuonConfig {
                dtype: match in_bf16 {
                    true => IterationDType::Bf16,
                    false => IterationDType::Wide,
                },
                ..Default::default()
            };
            step(config, &own, dtype, by_reference);
            relative(&elements(&own), &elements(&exact))
        };
        let bound = match dtype {
            DType::F32 => 1e-5,
            _ => 5e-3, // the weight is rounded
        };
        for by_reference in [false, true] {
            let wide = error(false, by_reference);
            assert!(wide < bound, "{dtype:?}: {wide}");
        }
        let [kernel, reference] = [error(true, false), error(true, true)];
        assert!(
            kernel > 1e-3 && kernel <= 2.0 * reference,
            "{dtype:?}: {kernel}, {reference}"
        );
    }
}

/// Singular values of a step are near 1: its Frobenius norm is near the root of the smaller side.
#[test]
fn a_step_is_nearly_orthogonal() {
    let weight = Var::zeros((30, 20), DType::F64, &Device::Cpu).unwrap();
    let config = MuonConfig {
        lr: 1.0,
        scaling: Scaling::Moonlight,
        ..Default::default()
    };
    step(config, &weight, DType::F64, false);
    let norm = elements(&weight).iter().map(|x| x * x).sum::<f64>().sqrt();
    let expected = 0.2 * 30f64.sqrt() * 20f64.sqrt();
    assert!((0.7..1.2).contains(&(norm / expected)), "{norm} {expected}");
}

#[test]
fn no_gradient_at_all_and_no_elements() {
    let weight = matrix(4, 3, DType::F32, 1);
    let before = elements(&weight);
    let empty = Var::zeros((0, 3), DType::F32, &Device::Cpu).unwrap();
    let zeros = [&weight, &empty].map(|var| (var, var.zeros_like().unwrap()));
    let parameters = [("w", &weight), ("empty", &empty)];
    let parameters = parameters.map(|(name, var)| (name.to_string(), var.clone()));
    let mut optimizer = Optimizer::new(parameters, MuonConfig::default()).unwrap();
    optimizer.step(&store(&zeros)).unwrap();
    assert_eq!(elements(&weight), before);
}

#[test]
fn the_same_bits_for_any_number_of_threads() {
    for dtype in [IterationDType::Wide, IterationDType::Bf16] {
        let with_threads = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
            pool.build().unwrap().install(|| {
                let weight = matrix(150, 97, DType::F32, 3);
                let config = MuonConfig {
                    dtype,
                    ..Default::default()
                };
                step(config, &weight, DType::F32, false);
                elements(&weight)
            })
        };
        assert_eq!(with_threads(1), with_threads(3), "{dtype:?}");
    }
}

#[test]
fn only_matrices() {
    let vector = Var::zeros(3, DType::F32, &Device::Cpu).unwrap();
    refusal(
        Optimizer::new([("norm.weight".to_string(), vector)], MuonConfig::default()),
        &[
            "parameter norm.weight with two dimensions",
            "[3]",
            "muon_for_matrices",
        ],
    );
    let config = MuonConfig {
        dtype: IterationDType::Bf16,
        ..Default::default()
    };
    refusal(
        Optimizer::new([("w".to_string(), matrix(2, 2, DType::F64, 1))], config),
        &["f64", "iteration in bf16"],
    );
}

#[rstest]
#[case(MuonConfig { lr: -1.0, ..Default::default() }, "MuonConfig: lr must be at least 0")]
#[case(MuonConfig { momentum: 1.0, ..Default::default() }, "MuonConfig: momentum must be at least 0 and under 1")]
#[case(MuonConfig { eps: 0.0, ..Default::default() }, "MuonConfig: eps must be over 0")]
#[case(MuonConfig { steps: 0, ..Default::default() }, "MuonConfig: steps must be from 1 to 100, got 0")]
fn bad_hyperparameters(#[case] config: MuonConfig, #[case] text: &str) {
    refusal(config.validate(), &[text]);
}

fn model() -> TransformerConfig {
    TransformerConfig {
        vocab_size: 97,
        context_length: 37,
        d_model: 24,
        num_layers: 2,
        num_heads: 2,
        d_ff: 56,
        ..Default::default()
    }
}

fn muon() -> MuonConfig {
    MuonConfig {
        lr: 1e-3,
        weight_decay: 0.1,
        scaling: Scaling::Moonlight,
        ..Default::default()
    }
}

#[test]
fn groups_leave_embeddings_heads_and_vectors_to_adamw() {
    let model = TransformerLM::new(&model(), 0, &Device::Cpu).unwrap();
    let groups = usual_groups(model.parameters(), muon());
    assert_eq!(groups.len(), 3);
    assert_eq!(groups[0].parameters.len(), 2 * 7);
    assert!(
        groups[0]
            .parameters
            .iter()
            .all(|(name, _)| name.starts_with("layers."))
    );
    let others: Vec<_> = groups[1]
        .parameters
        .iter()
        .map(|(name, _)| name.as_str())
        .collect();
    assert_eq!(others.len(), 2, "{others:?}");
    assert_eq!(groups[1].rule.weight_decay(), 0.1);
    assert_eq!(groups[2].rule.weight_decay(), 0.0);
    assert!(!is_hidden_matrix("transformer.wte.weight", &[2, 2]));
    let none = muon_for_matrices(
        model.parameters(),
        muon(),
        AdamWConfig::default(),
        |_, _| false,
    );
    assert!(none[0].parameters.is_empty());
}

/// Planned steps have the bits of eager ones with the planned gradients, and their memory is predicted.
#[test]
fn planned_steps_are_eager_ones() {
    let make = || {
        let model = TransformerLM::new(&model(), 3, &Device::Cpu).unwrap();
        let optimizer = Optimizer::with_groups(usual_groups(model.parameters(), muon())).unwrap();
        (model, optimizer)
    };
    let ((eager, mut eager_optimizer), (planned, mut optimizer)) = (make(), make());
    let mut step = Step::for_model(&planned, &optimizer, &StepConfig::default()).unwrap();
    for i in 0..3 {
        let ids = |first: usize| {
            let ids = (0..74).map(|k| ((k * 31 + first + i) % 97) as u32);
            Tensor::from_iter(ids, &Device::Cpu)
                .unwrap()
                .reshape((2, 37))
                .unwrap()
        };
        let (tokens, targets) = (ids(1), ids(2));
        step.run(&mut optimizer, (&tokens, &targets)).unwrap();
        let gradients = step.gradients().unwrap();
        let vars = eager.parameters();
        let gradients: Vec<_> = vars
            .iter()
            .zip(gradients)
            .map(|((_, var), (_, gradient))| (var, gradient))
            .collect();
        eager_optimizer.step(&store(&gradients)).unwrap();
        for ((name, a), (_, b)) in planned.parameters().iter().zip(eager.parameters()) {
            assert_eq!(elements(a), elements(&b), "{name}, step {i}");
        }
    }
    let plan = step.plan().unwrap();
    let config = StepConfig {
        optimizer: muon().into(),
        ..Default::default()
    };
    let batch = Batch::meta(2, 37).unwrap();
    let meta = meta_of(&model(), Algorithm::Naive);
    let meta = meta.with_attention(planned.attention()).unwrap();
    let (predicted, _) = Step::plan_for_model(Target::Cpu, &meta, &config, batch).unwrap();
    assert_eq!(predicted.total_bytes(), plan.total_bytes());
    let state = optimizer.state().into_iter();
    let bytes = state.map(|(_, x)| x.elem_count() * x.dtype().size_in_bytes());
    let planned = plan.category_bytes(Category::OptimizerState);
    assert_eq!(planned, bytes.sum::<usize>() as u64);
}

#[test]
fn no_plan_on_a_gpu() {
    let config = StepConfig {
        optimizer: Rule::from(muon()),
        ..Default::default()
    };
    let meta = meta_of(&model(), Algorithm::Flash);
    let batch = Batch::meta(2, 37).unwrap();
    refusal(
        Step::plan_for_model(Target::Cuda, &meta, &config, batch),
        &["muon cannot be planned on a GPU", "run the step eagerly"],
    );
}
