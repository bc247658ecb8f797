//! A model of your own from its layers to a planned step: loss, AdamW, bf16, predicted memory, files.
//!
//! The example is a classifier of token sequences: an embedding, the mean over the sequence, a linear layer. Its loss
//! is the cross-entropy plus a term that keeps the logits small, the z-loss.
//!
//! If your model is a [`TransformerLM`](crate::model::TransformerLM) and only the loss is your own, start from
//! [`TransformerLM::hidden_states`](crate::model::TransformerLM::hidden_states): its example has a loss of two terms.
//!
//! A model is a struct of layers. Its [`Layer::visit`](crate::nn::Layer::visit) names the weights, for the optimizer
//! and for files.
//!
//! The loss reads its inputs by name. It calls [`ops`](crate::ops) and layers of [`nn`](crate::nn), since only these
//! are traced and planned; [views](crate::graph#meta-tensors) may be candle's. It returns a scalar f32. With
//! [`Precision::BF16`](crate::precision::Precision::BF16) a linear layer's output is bf16. `cross_entropy`,
//! `log_softmax`, `logsumexp`, `exp` and `sum` of it are f32. `mean`, `relu`, `add` and `mul` of bf16 tensors stay
//! bf16: if the loss would be bf16, call [`ops::cast`](crate::ops::cast()) to f32 before its last `mean`.
//! [`compile`](crate::compile#half-precision) has the list of dtypes.
//!
//! A plan needs no weights: a model of [`graph::weights`](crate::graph::weights()) has shapes alone, so that the memory
//! of a step is known before the weights are allocated. The batch has tensors, as here, or meta tensors of
//! [`graph::input`](crate::graph::input()), which allocate nothing. The step itself is made with the real model and its
//! optimizer, with the same [`StepConfig`](crate::compile::StepConfig) and f32 weights.
//!
//! `Cargo.toml` needs `candle-core`, as in the README. `VarBuilder` comes from
//! [`tallow::candle_nn`](crate::candle_nn), so `candle-nn` is not needed.
//!
//! ```
//! use candle_core::{DType, Tensor};
//! use tallow::candle_nn::VarBuilder;
//! use tallow::compile::{Inputs, PlanKind, Step, StepConfig};
//! use tallow::memory::planned_breakdown;
//! use tallow::nn::{self, Embedding, Layer, Linear};
//! use tallow::optim::{AdamWConfig, Optimizer};
//! use tallow::precision::Precision;
//! use tallow::{Result, graph, ops};
//!
//! struct Classifier {
//!     table: Embedding,
//!     head: Linear,
//! }
//!
//! impl Classifier {
//!     fn new(vb: VarBuilder) -> Result<Self> {
//!         Ok(Self {
//!             table: Embedding::new(100, 16, vb.pp("table"))?, // V = 100, D = 16
//!             head: Linear::with_bias(16, 5, vb.pp("head"))?, // 5 classes
//!         })
//!     }
//!
//!     fn loss(&self, inputs: &Inputs) -> Result<Tensor> {
//!         let hidden = self.table.forward(&inputs.get("tokens")?)?; // (B, T, D)
//!         let pooled = ops::mean_over(&hidden, 1)?; // (B, D)
//!         let logits = self.head.forward(&pooled)?; // (B, 5), bf16 in the step below
//!         let cross_entropy = ops::cross_entropy(&logits, &inputs.get("classes")?)?; // f32
//!         let log_z = ops::logsumexp(&logits, 1)?; // (B), f32
//!         let z_loss = ops::mean(&ops::pow(&log_z, 2.0)?)?; // f32, since log_z is
//!         ops::add_scaled(&cross_entropy, &z_loss, 1e-4)
//!     }
//! }
//!
//! impl Layer for Classifier {
//!     fn visit(&self, path: &str, visit: &mut dyn FnMut(String, &Tensor)) {
//!         self.table.visit(&nn::join(path, "table"), visit);
//!         self.head.visit(&nn::join(path, "head"), visit);
//!     }
//! }
//!
//! fn main() -> Result<()> {
//!     let device = tallow::device("cpu")?;
//!     let tokens = Tensor::new(&[[1u32, 2, 3, 4], [5, 6, 7, 8]], &device)?; // (B, T)
//!     let classes = Tensor::new(&[0u32, 3], &device)?; // (B)
//!     let batch = [("tokens", &tokens), ("classes", &classes)];
//!     let config = StepConfig {
//!         precision: Precision::BF16,
//!         clip_norm: Some(1.0),
//!         ..Default::default()
//!     };
//!
//!     let meta = Classifier::new(graph::weights(DType::F32))?; // parameters are f32, matmuls bf16
//!     let plan = Step::plan_for(&device, PlanKind::TrainStep, &config, batch, |inputs| {
//!         meta.loss(inputs)
//!     })?;
//!     println!("a step needs {} bytes\n{}", plan.total_bytes(), planned_breakdown(&plan));
//!
//!     let model = Classifier::new(nn::seeded(0, DType::F32, &device))?;
//!     let mut optimizer = Optimizer::new(model.parameters(), AdamWConfig::default())?;
//!     let mut step = Step::new(&optimizer, &config, |inputs| model.loss(inputs))?;
//!     let first = step.run(&mut optimizer, batch)?;
//!     let second = step.run(&mut optimizer, batch)?;
//!     assert!(second < first);
//!
//!     let folder = std::env::temp_dir().join(format!("own-model-{}", std::process::id()));
//!     std::fs::create_dir_all(&folder).expect("a folder for the files");
//!     nn::save(&model, folder.join("model.safetensors"))?;
//!     optimizer.save(folder.join("optimizer.safetensors"))?;
//!
//!     // Later: another model and optimizer continue from the files.
//!     let model = Classifier::new(nn::seeded(1, DType::F32, &device))?;
//!     let mut optimizer = Optimizer::new(model.parameters(), AdamWConfig::default())?;
//!     nn::load(&model, folder.join("model.safetensors"))?;
//!     optimizer.load(folder.join("optimizer.safetensors"))?;
//!     let mut step = Step::new(&optimizer, &config, |inputs| model.loss(inputs))?;
//!     assert!(step.run(&mut optimizer, batch)? < second);
//! #   let _ = std::fs::remove_dir_all(&folder);
//!     Ok(())
//! }
//! ```
//!
//! Each file is replaced atomically, but not both together. A crash between the two saves leaves a new model with an
//! old optimizer. To rule that out, write both to a temporary folder, and rename it to a name that does not
//! exist yet, such as `step-1000`. ([`Trainer::save`](crate::train::Trainer::save) writes one file.)
//!
//! # Memory that the plan does not count
//!
//! On the CPU add the kernels' scratch memory, [`Plan::scratch_bytes`](crate::compile::Plan::scratch_bytes), to
//! `total_bytes`.
//! [`Step::plan_for`](crate::compile::Step::plan_for) counts all weights as trained, which is too much if some are
//! frozen; [`Step::prepare`](crate::compile::Step::prepare) on the real model is exact.
//!
//! # The same model eagerly
//!
//! [`backward`](crate::backward()) and [`Optimizer::step`](crate::optim::Optimizer::step) train it without a plan; bf16
//! is then
//! [`autocast`](crate::autocast()). An eager loss takes tensors instead of [`Inputs`](crate::compile::Inputs). The
//! example `examples/custom_model.rs` of the repository runs one loss both ways.
//!
//! # Mixtures of experts
//!
//! A step is planned for fixed shapes, so the number of tokens that an expert computes must not depend on the data.
//! There are two ways. Each expert computes every token and a mask drops what was not chosen: exact, but with the FLOPs
//! of all experts. Or each expert computes a fixed number of tokens, its capacity: those that give it the largest
//! weights.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use tallow::attention::Mask;
//! use tallow::ops::{self, Gelu};
//! use tallow::Result;
//!
//! const EXPERTS: usize = 4;
//!
//! /// The weights (N, E) of the two experts that each token chooses; 0 for the others.
//! fn weights(x: &Tensor, router: &Tensor) -> Result<Tensor> {
//!     let scores = ops::softmax(&ops::linear(x, router)?, 1.0, Mask::Full)?;
//!     let (_, chosen) = ops::topk(&scores, 2)?; // (N, 2)
//!     let mask = ops::sum_over(&ops::one_hot(&chosen, EXPERTS, x.dtype())?, 1)?;
//!     let weights = ops::mul(&scores, &mask)?;
//!     ops::div(&weights, &ops::sum_keepdim(&weights, 1)?)
//! }
//!
//! /// x (N, D) and the experts' outputs; w1 (E, F, D), w2 (E, D, F). Every expert computes every
//! /// token.
//! fn dense(x: &Tensor, router: &Tensor, w1: &Tensor, w2: &Tensor) -> Result<Tensor> {
//!     let weights = weights(x, router)?;
//!     let mut y = x.clone();
//!     for expert in 0..EXPERTS {
//!         let of = |w: &Tensor| w.narrow(0, expert, 1)?.squeeze(0);
//!         let h = ops::gelu(&ops::linear(x, &of(w1)?)?, Gelu::Tanh)?;
//!         let h = ops::linear(&h, &of(w2)?)?;
//!         y = ops::add(&y, &ops::mul(&h, &weights.narrow(1, expert, 1)?)?)?;
//!     }
//!     Ok(y)
//! }
//!
//! /// The same, but each expert computes the `capacity` tokens of the largest weights.
//! fn routed(
//!     x: &Tensor,
//!     router: &Tensor,
//!     w1: &Tensor,
//!     w2: &Tensor,
//!     capacity: usize,
//! ) -> Result<Tensor> {
//!     let (gates, tokens) = ops::topk(&weights(x, router)?.t()?, capacity)?; // (E, C)
//!     let (tokens, width) = (tokens.flatten_all()?, x.dims()[1]);
//!     let rows = ops::index_select(x, 0, &tokens)?.reshape((EXPERTS, capacity, width))?;
//!     let h = ops::gelu(&ops::matmul_transposed(&rows, w1)?, Gelu::Tanh)?;
//!     let h = ops::mul(&ops::matmul_transposed(&h, w2)?, &gates.unsqueeze(2)?)?;
//!     ops::index_add(x, 0, &tokens, &h.reshape((EXPERTS * capacity, width))?)
//! }
//!
//! let random = |dims: &[usize]| Tensor::randn(0f32, 0.5, dims, &Device::Cpu);
//! let (x, router) = (random(&[12, 8])?, random(&[EXPERTS, 8])?);
//! let (w1, w2) = (random(&[EXPERTS, 16, 8])?, random(&[EXPERTS, 8, 16])?);
//! let all = dense(&x, &router, &w1, &w2)?;
//! let off = (routed(&x, &router, &w1, &w2, 12)? - &all)?; // every expert has room for every token
//! assert!(off.abs()?.max_all()?.to_scalar::<f32>()? < 1e-5);
//! assert_eq!(routed(&x, &router, &w1, &w2, 6)?.dims(), all.dims());
//! # Ok::<(), tallow::Error>(())
//! ```
//!
//! A token that no expert has room for keeps its residual x. The choice has no gradient; the weights have one.
//! [`topk`](crate::ops::topk()) makes ids that are known to be valid, so that
//! [`index_select`](crate::ops::index_select) needs no check in a step.
