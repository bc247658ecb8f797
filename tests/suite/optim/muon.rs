//! Muon beyond what all rules share: its groups, shapes, scales, the iteration in bf16, and planned steps.

use super::{elements, noise, relative, store};
use crate::check::refusal;
use crate::settings::meta_of;
use candle_core::{DType, Device, Tensor, Var};
use rstest::rstest;
use tallow::attention::Algorithm;
use tallow::compile::{Batch, Plan, Step, StepConfig, Target};
use tallow::internals::{Category, Op};
use tallow::model::{TransformerConfig, TransformerLM};
use tallow::optim::{
    AdamWConfig, IterationDType, MuonConfig, Optimizer, Scaling, is_hidden_matrix,
    muon_for_matrices, usual_groups,
};
use tallow::profile::Profiler;

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

/// Returns a model and its optimizer on `device`, always the same.
fn made(device: &Device, rule: MuonConfig) -> (TransformerLM, Optimizer) {
    let weights = TransformerLM::new(&model(), 3, &Device::Cpu).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    weights.save(&path).unwrap();
    let model = TransformerLM::load(&model(), &path, device).unwrap();
    let optimizer = Optimizer::with_groups(usual_groups(model.parameters(), rule)).unwrap();
    (model, optimizer)
}

/// Returns tokens and targets (2, 37) of step `i`.
fn batch(i: usize, device: &Device) -> [Tensor; 2] {
    [1, 2].map(|first| {
        let ids = (0..74).map(|k| ((k * 31 + first + i) % 97) as u32);
        let ids = Tensor::from_iter(ids, device).unwrap();
        ids.reshape((2, 37)).unwrap()
    })
}

/// Runs three planned steps, and eager ones with the planned gradients. After each step it calls `compare` for each
/// parameter, with its values by both and at first.
fn planned_and_eager(
    device: &Device,
    rule: MuonConfig,
    compare: impl Fn(&str, &Var, &Var, &Tensor),
) {
    let ((eager, mut eager_optimizer), (planned, mut optimizer)) =
        (made(device, rule), made(device, rule));
    let starts = eager.parameters().into_iter();
    let starts: Vec<Tensor> = starts.map(|(_, var)| var.copy().unwrap()).collect();
    let mut step = Step::for_model(&planned, &optimizer, &StepConfig::default()).unwrap();
    for i in 0..3 {
        let [tokens, targets] = batch(i, device);
        step.run(&mut optimizer, (&tokens, &targets)).unwrap();
        let gradients = step.gradients().unwrap();
        let vars = eager.parameters();
        let gradients: Vec<_> = vars
            .iter()
            .zip(gradients)
            .map(|((_, var), (_, gradient))| (var, gradient))
            .collect();
        eager_optimizer.step(&store(&gradients)).unwrap();
        let (planned, eager) = (planned.parameters(), eager.parameters());
        for (((name, a), (_, b)), start) in planned.iter().zip(&eager).zip(&starts) {
            compare(&format!("{name}, step {i}"), a, b, start);
        }
    }
}

fn in_bf16() -> MuonConfig {
    MuonConfig {
        dtype: IterationDType::Bf16,
        ..muon()
    }
}

/// Planned steps have the bits of eager ones with the planned gradients.
#[test]
fn planned_steps_are_eager_ones() {
    for rule in [muon(), in_bf16()] {
        planned_and_eager(&Device::Cpu, rule, |name, a, b, _| {
            assert_eq!(elements(a), elements(b), "{name}");
        });
    }
}

/// Clipping and the optimizer in backward change which matrices are in a batch, but no bits.
#[test]
fn the_optimizer_in_backward() {
    let run = |optimizer_in_backward: bool| {
        let (model, mut optimizer) = made(&Device::Cpu, muon());
        let config = StepConfig {
            optimizer_in_backward,
            clip_norm: (!optimizer_in_backward).then_some(f64::INFINITY),
            ..Default::default()
        };
        let mut step = Step::for_model(&model, &optimizer, &config).unwrap();
        for i in 0..2 {
            let [tokens, targets] = batch(i, &Device::Cpu);
            step.run(&mut optimizer, (&tokens, &targets)).unwrap();
        }
        let parameters = model.parameters().into_iter();
        parameters
            .map(|(_, var)| elements(&var))
            .collect::<Vec<_>>()
    };
    assert_eq!(run(true), run(false));
}

/// The memory of a plan is predicted.
#[test]
fn planned_memory_is_predicted() {
    for target in [Target::Cpu, Target::Cuda] {
        for rule in [muon(), in_bf16()] {
            let config = StepConfig {
                optimizer: rule.into(),
                ..Default::default()
            };
            let meta = meta_of(&model(), Algorithm::Flash);
            let sizes = Batch::meta(2, 37).unwrap();
            let (plan, _) = Step::plan_for_model(target, &meta, &config, sizes).unwrap();
            let (_, optimizer) = made(&Device::Cpu, rule);
            let state = optimizer.state().into_iter();
            let bytes = state.map(|(_, x)| x.elem_count() * x.dtype().size_in_bytes());
            let planned = plan.category_bytes(Category::OptimizerState);
            assert_eq!(planned, bytes.sum::<usize>() as u64);
            check_batches(&plan);
        }
    }
    let (planned, optimizer) = made(&Device::Cpu, muon());
    let mut step = Step::for_model(&planned, &optimizer, &StepConfig::default()).unwrap();
    let [tokens, targets] = batch(0, &Device::Cpu);
    let prepared = step.prepare((&tokens, &targets)).unwrap().total_bytes();
    let config = StepConfig {
        optimizer: muon().into(),
        ..Default::default()
    };
    let meta = meta_of(&model(), planned.attention());
    let sizes = Batch::meta(2, 37).unwrap();
    let (predicted, _) = Step::plan_for_model(Target::Cpu, &meta, &config, sizes).unwrap();
    assert_eq!(predicted.total_bytes(), prepared);
}

/// Checks a plan's batches: matrices of one shape, each updated once, with scratch memory of at most four times that of
/// the matrix that needs most.
fn check_batches(plan: &Plan) {
    let (mut matrices, mut updated, mut scratch) = (0, 0, Vec::new());
    for call in plan.calls() {
        match &call.op {
            Op::Momentum { .. } => updated += 1,
            Op::Orthogonalize { count, shape, rule } => {
                matrices += count;
                let written = call.writes.iter();
                let bytes = written.map(|operand| plan.buffer(operand.buffer).unwrap().bytes());
                let bytes = bytes.sum::<u64>();
                scratch.push((bytes / *count as u64, bytes));
                let cost = plan.cost(call).unwrap();
                let [s, l] = [shape[0].min(shape[1]), shape[0].max(shape[1])];
                let flops = rule.steps * count * (4 * s * s * l + 2 * s * s * s);
                assert_eq!(cost.matmul_flops, flops as f64);
            }
            _ => {}
        }
    }
    assert_eq!([matrices, updated], [2 * 7; 2]);
    assert!(scratch.len() < matrices);
    let largest = scratch.iter().map(|(of_one, _)| of_one).max().unwrap();
    assert!(
        scratch
            .iter()
            .all(|(_, of_all)| *of_all <= 4 * largest + 4 * 64),
        "{scratch:?}"
    );
}

/// Profiles show the iteration as an op, with its FLOPs, eager and planned.
#[test]
fn profiles_show_the_iteration() {
    let (model, mut optimizer) = made(&Device::Cpu, muon());
    let mut step = Step::for_model(&model, &optimizer, &StepConfig::default()).unwrap();
    let [tokens, targets] = batch(0, &Device::Cpu);
    step.prepare((&tokens, &targets)).unwrap();
    let loss = model.loss(&tokens, &targets).unwrap();
    let gradients = tallow::backward(loss).unwrap();
    let matrices = optimizer.groups()[0].parameters.iter();
    let flops = matrices.map(|(_, var)| {
        let [rows, columns] = [var.dims()[0], var.dims()[1]];
        let (s, l) = (rows.min(columns), rows.max(columns));
        muon().steps * (4 * s * s * l + 2 * s * s * s)
    });
    let expected = flops.sum::<usize>() as f64;
    for planned in [false, true] {
        let profiler = Profiler::start_on_this_thread().unwrap();
        match planned {
            true => {
                step.run(&mut optimizer, (&tokens, &targets)).unwrap();
            }
            false => optimizer.step(&gradients).unwrap(),
        }
        let recording = profiler.finish().unwrap();
        let iterations = recording.spans.iter();
        let iterations = iterations.filter(|span| span.path.to_string().ends_with("orthogonalize"));
        let flops = iterations.map(|span| span.cost().unwrap().matmul_flops);
        assert_eq!(flops.sum::<f64>(), expected, "planned {planned}");
    }
}

/// A plan is for the iteration of its optimizer.
#[test]
fn another_iteration_is_refused() {
    let (model, optimizer) = made(&Device::Cpu, muon());
    let mut other = Optimizer::with_groups(usual_groups(model.parameters(), in_bf16())).unwrap();
    let mut step = Step::for_model(&model, &optimizer, &StepConfig::default()).unwrap();
    let [tokens, targets] = batch(0, &Device::Cpu);
    refusal(
        step.run(&mut other, (&tokens, &targets)),
        &[
            "muon (momentum_buffer), 5 steps in f32, eps 1e-7",
            "muon (momentum_buffer), 5 steps in bf16, eps 1e-7",
            "plan the step for this optimizer",
        ],
    );
}

/// Many matrices of several shapes are updated as each is alone.
#[test]
fn batches_have_the_bits_of_single_matrices() {
    let shapes = [
        (30, 20),
        (20, 30),
        (30, 20),
        (64, 64),
        (30, 20),
        (20, 30),
        (1, 5),
    ];
    for dtype in [DType::F32, DType::BF16] {
        let vars = || {
            let vars = shapes.iter().enumerate();
            let vars = vars.map(|(i, (rows, columns))| matrix(*rows, *columns, dtype, i));
            vars.collect::<Vec<Var>>()
        };
        let (together, alone) = (vars(), vars());
        let gradients = |vars: &[Var]| {
            let gradients = vars.iter().enumerate();
            let gradients = gradients.map(|(i, var)| {
                let dims = var.dims();
                matrix(dims[0], dims[1], dtype, 50 + i).as_tensor().clone()
            });
            gradients.collect::<Vec<Tensor>>()
        };
        let named = |vars: &[Var]| {
            let names = (0..vars.len()).map(|i| i.to_string());
            names.zip(vars.iter().cloned()).collect::<Vec<_>>()
        };
        let mut optimizer = Optimizer::new(named(&together), MuonConfig::default()).unwrap();
        let pairs: Vec<_> = together.iter().zip(gradients(&together)).collect();
        optimizer.step(&store(&pairs)).unwrap();
        for (var, gradient) in alone.iter().zip(gradients(&alone)) {
            let mut optimizer =
                Optimizer::new(named(std::slice::from_ref(var)), MuonConfig::default()).unwrap();
            optimizer.step(&store(&[(var, gradient)])).unwrap();
        }
        for (a, b) in together.iter().zip(&alone) {
            assert_eq!(elements(a), elements(b));
        }
    }
}

/// Steps on a GPU.
#[cfg(feature = "cuda")]
mod on_a_gpu {
    use super::*;
    use crate::gpu;
    use crate::settings::scaler_from;
    use tallow::precision::Precision;

    fn copied(x: &Tensor) -> Tensor {
        x.to_device(&Device::Cpu).unwrap()
    }

    fn moves(var: &Var, start: &Tensor) -> Vec<f64> {
        elements(&copied(&(var.as_tensor() - start).unwrap()))
    }

    /// Eager steps are those of the CPU up to rounding. Momentum buffers have the CPU's bits.
    #[rstest]
    #[ignore = "needs a CUDA device"]
    fn eager_steps_are_the_cpus(
        #[values(DType::F32, DType::BF16, DType::F16)] dtype: DType,
        #[values(false, true)] in_bf16: bool,
    ) {
        let rule = MuonConfig {
            dtype: match in_bf16 {
                true => IterationDType::Bf16,
                false => IterationDType::Wide,
            },
            ..Default::default()
        };
        let shapes = [(40, 24), (24, 40), (40, 24), (33, 33), (130, 65)];
        let run = |device: &Device| {
            let vars = shapes.map(|(rows, columns)| {
                let zeros = Tensor::zeros((rows, columns), dtype, device).unwrap();
                Var::from_tensor(&zeros).unwrap()
            });
            let names = (0..vars.len()).map(|i| i.to_string());
            let mut optimizer = Optimizer::new(names.zip(vars.clone()), rule).unwrap();
            for step in 0..2 {
                let gradients = vars.iter().map(|var| {
                    let dims = var.dims();
                    let gradient = matrix(dims[0], dims[1], dtype, 7 + step);
                    (var, gradient.to_device(device).unwrap())
                });
                let gradients: Vec<_> = gradients.collect();
                optimizer.step(&store(&gradients)).unwrap();
            }
            let weights = vars.map(|var| elements(&copied(&var)));
            let state = optimizer.state().into_iter();
            let momentum = state.filter(|(name, _)| name.starts_with("momentum_buffer"));
            let momentum = momentum.map(|(_, state)| elements(&copied(&state)));
            (weights, momentum.collect::<Vec<_>>())
        };
        let (weights, momentum) = run(&gpu());
        let (wanted, wanted_momentum) = run(&Device::Cpu);
        assert!(momentum == wanted_momentum);
        let bound = match (dtype, in_bf16) {
            (_, true) => 0.05,
            (DType::F32, false) => 1e-4,
            _ => 1e-2, // the weight is rounded
        };
        for (found, wanted) in weights.iter().zip(&wanted) {
            let error = relative(found, wanted);
            assert!(error < bound, "{error}");
        }
        assert!(run(&gpu()).0 == weights);
    }

    /// Planned steps move the weights as eager ones with the planned gradients, up to the rounding of the matmuls.
    #[test]
    #[ignore = "needs a CUDA device"]
    fn planned_steps_are_eager_ones_on_a_gpu() {
        for (rule, bound) in [(muon(), 1e-3), (in_bf16(), 0.1)] {
            planned_and_eager(&gpu(), rule, |name, a, b, start| {
                let error = relative(&moves(a, start), &moves(b, start));
                assert!(error < bound, "{name}: {error}");
            });
        }
    }

    /// Two runs have the same bits, launched call by call or replayed, with clipping, accumulation and the optimizer in
    /// backward. The copies of weights in half precision are those of the updated weights. In f32 the weights move as
    /// on the CPU.
    #[rstest]
    #[ignore = "needs a CUDA device"]
    fn planned_steps_of_every_kind(
        #[values(Precision::F32, Precision::BF16)] precision: Precision,
        #[values((None, 1, false), (Some(0.5), 1, false), (None, 2, false), (None, 1, true))]
        (clip_norm, accumulation, optimizer_in_backward): (Option<f64>, usize, bool),
    ) {
        let config = StepConfig {
            precision,
            clip_norm,
            accumulation,
            optimizer_in_backward,
            ..Default::default()
        };
        let run = |device: &Device, is_planned_anew: bool| {
            let (model, mut optimizer) = made(device, muon());
            let starts = model.parameters().into_iter();
            let starts: Vec<Tensor> = starts.map(|(_, var)| var.copy().unwrap()).collect();
            let mut step = Step::for_model(&model, &optimizer, &config).unwrap();
            let mut losses = Vec::new();
            for i in 0..4 {
                if is_planned_anew {
                    step = Step::for_model(&model, &optimizer, &config).unwrap();
                }
                let [tokens, targets] = batch(i, device);
                losses.push(step.run(&mut optimizer, (&tokens, &targets)).unwrap());
            }
            let weights = model.parameters().into_iter();
            let moves = weights.zip(&starts).map(|((name, var), start)| {
                let is_updated_by_muon = var.rank() == 2 && is_hidden_matrix(&name, var.dims());
                (is_updated_by_muon, moves(&var, start))
            });
            (losses, moves.collect::<Vec<_>>())
        };
        let found = run(&gpu(), false);
        assert!(found == run(&gpu(), false));
        assert!(found == run(&gpu(), true));
        if precision == Precision::F32 {
            let (_, wanted) = run(&Device::Cpu, false);
            // AdamW's first step is the sign of the gradient, which rounding may flip.
            let pairs = found
                .1
                .iter()
                .zip(&wanted)
                .filter(|((of_muon, _), _)| *of_muon);
            for ((_, found), (_, wanted)) in pairs {
                let error = relative(found, wanted);
                assert!(error < 0.05, "{error}");
            }
        }
    }

    /// After an overflow nothing has changed, neither weights nor momentum buffers.
    #[test]
    #[ignore = "needs a CUDA device"]
    fn an_overflow_changes_nothing() {
        let gpu = gpu();
        let (model, mut optimizer) = made(&gpu, muon());
        let config = StepConfig {
            precision: Precision::F16,
            loss_scaling: true,
            ..Default::default()
        };
        let mut step = Step::for_model(&model, &optimizer, &config).unwrap();
        let all = |optimizer: &Optimizer| {
            let state = optimizer
                .state()
                .into_iter()
                .map(|(_, state)| elements(&copied(&state)));
            let weights = model.parameters().into_iter();
            let weights = weights.map(|(_, var)| elements(&copied(&var)));
            weights.chain(state).collect::<Vec<_>>()
        };
        for (scale, is_updated) in [(1.0, true), (1e38, false), (1.0, true)] {
            let before = all(&optimizer);
            let [tokens, targets] = batch(0, &gpu);
            let mut scaler = scaler_from(scale);
            let done = step.run_scaled(&mut optimizer, &mut scaler, (&tokens, &targets));
            assert_eq!(done.unwrap().updated(), is_updated);
            assert_eq!(all(&optimizer) != before, is_updated);
        }
        assert!(all(&optimizer).iter().flatten().all(|x| x.is_finite()));
    }
}
