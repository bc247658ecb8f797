//! A model of your own from its layers to a planned step: loss, AdamW, bf16, predicted memory, files.
//!
//! The example is a classifier of token sequences: an embedding, the mean over the sequence, a linear layer.
//!
//! A model is a struct of layers. Its [`Layer::visit`](crate::nn::Layer::visit) names the weights, for the optimizer and
//! for files. The loss reads its inputs by name. It calls [`ops`](crate::ops) and layers of [`nn`](crate::nn), since
//! only these are traced and planned; [views](crate::graph#meta-tensors) may be candle's. It returns a scalar f32. With
//! [`Precision::BF16`](crate::precision::Precision::BF16) a linear layer's output is bf16, and its cross-entropy f32.
//! Other losses [must end in f32](crate::compile#half-precision) themselves.
//!
//! A plan needs no weights: a model of [`graph::weights`](crate::graph::weights()) has shapes alone, so that the memory
//! of a step is known before anything is allocated. The step itself is made with the real model and its optimizer, with
//! the same [`StepConfig`](crate::compile::StepConfig) and f32 weights.
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
//!         ops::cross_entropy(&self.head.forward(&pooled)?, &inputs.get("classes")?)
//!     }
//! }
//!
//! impl Layer for Classifier {
//!     fn visit(&self, path: &str, visit: &mut dyn FnMut(String, &Tensor)) {
//!         self.table.visit(&nn::join(path, "table"), visit);
//!         self.head.visit(&nn::join(path, "head"), visit);
//!     }
//! }
//! # let folder = std::env::temp_dir().join(format!("tallow-own-model-{}", std::process::id()));
//! # std::fs::create_dir_all(&folder).map_err(|e| tallow::Error::io("write", &folder, e))?;
//! let device = tallow::device("cpu")?;
//! let tokens = Tensor::new(&[[1u32, 2, 3, 4], [5, 6, 7, 8]], &device)?; // (B, T)
//! let classes = Tensor::new(&[0u32, 3], &device)?; // (B)
//! let batch = [("tokens", &tokens), ("classes", &classes)];
//! let config = StepConfig { precision: Precision::BF16, clip_norm: Some(1.0), ..Default::default() };
//!
//! let meta = Classifier::new(graph::weights(DType::F32))?; // parameters are f32, matmuls bf16
//! let plan = Step::plan_for(&device, PlanKind::TrainStep, &config, batch, |inputs| meta.loss(inputs))?;
//! println!("a step needs {} bytes\n{}", plan.total_bytes(), planned_breakdown(&plan));
//!
//! let model = Classifier::new(nn::seeded(0, DType::F32, &device))?;
//! let mut optimizer = Optimizer::new(model.parameters(), AdamWConfig::default())?;
//! let mut step = Step::new(&optimizer, &config, |inputs| model.loss(inputs))?;
//! let first = step.run(&mut optimizer, batch)?;
//! let second = step.run(&mut optimizer, batch)?;
//! assert!(second < first);
//!
//! nn::save(&model, folder.join("model.safetensors"))?;
//! optimizer.save(folder.join("optimizer.safetensors"))?;
//!
//! // Later: another model and optimizer go on where these stopped.
//! let model = Classifier::new(nn::seeded(1, DType::F32, &device))?;
//! let mut optimizer = Optimizer::new(model.parameters(), AdamWConfig::default())?;
//! nn::load(&model, folder.join("model.safetensors"))?;
//! optimizer.load(folder.join("optimizer.safetensors"))?;
//! let mut step = Step::new(&optimizer, &config, |inputs| model.loss(inputs))?;
//! assert!(step.run(&mut optimizer, batch)? < second);
//! # let _ = std::fs::remove_dir_all(&folder);
//! # Ok::<(), tallow::Error>(())
//! ```
//!
//! On the CPU `total_bytes` lacks the kernels' [scratch memory](crate::compile#what-a-plan-is-exact-about), which grows
//! with the number of threads: `RAYON_NUM_THREADS`, or one for each core.
//!
//! # The same model eagerly
//!
//! [`backward`](crate::backward()) and [`Optimizer::step`](crate::optim::Optimizer::step) train it without a plan; bf16
//! is then
//! [`autocast`](crate::autocast()). An eager loss takes tensors instead of [`Inputs`](crate::compile::Inputs). The
//! example `examples/custom_model.rs` runs one loss both ways.
