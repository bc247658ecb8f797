//! For readers who know PyTorch: a training loop, eagerly and planned, and the differences that matter.
//!
//! [`names`](super::names) has PyTorch's names, module by module, and what takes the place of each.
//!
//! # A training loop
//!
//! ```
//! use candle_core::{DType, Tensor};
//! use tallow::autocast;
//! use tallow::model::{TransformerConfig, TransformerLM};
//! use tallow::optim::{AdamWConfig, Optimizer, Schedule, clip_grad_norm};
//! use tallow::precision::Autocast;
//!
//! let device = tallow::device("cpu")?;
//! let config = TransformerConfig {
//!     vocab_size: 10, context_length: 4, d_model: 8, num_layers: 1, num_heads: 2, d_ff: 16,
//!     ..Default::default()
//! };
//! let model = TransformerLM::new(&config, 0, &device)?; // parameters in f32
//! let mut optimizer = Optimizer::new(model.parameters(), AdamWConfig::default())?;
//! let schedule = Schedule::WarmupCosine {
//!     max_lr: 1e-3, min_lr: 1e-4, warmup_steps: 2, total_steps: 5,
//! };
//! let tokens = Tensor::new(&[[1u32, 2, 3, 4]], &device)?; // (B, T)
//! let targets = Tensor::new(&[[2u32, 3, 4, 5]], &device)?; // (B, T)
//! for step in 0..5 {
//!     optimizer.set_learning_rate(schedule.learning_rate(step));
//!     let loss = autocast(Autocast::cuda(DType::BF16), || model.loss(&tokens, &targets))?;
//!     let mut gradients = tallow::backward(loss)?; // outside of the region, as in PyTorch
//!     clip_grad_norm(&mut gradients, &model.parameters(), 1.0)?;
//!     optimizer.step(&gradients)?;
//! }
//! # Ok::<(), tallow::Error>(())
//! ```
//!
//! # The same loop, planned
//!
//! `torch.compile` compiles a model, and the loop stays yours. A planned step contains all of it: forward, loss,
//! backward, clipping and update. It is planned in its first run with each set of shapes.
//!
//! ```
//! use candle_core::Tensor;
//! use tallow::compile::{Step, StepConfig};
//! use tallow::model::{TransformerConfig, TransformerLM};
//! use tallow::optim::{AdamWConfig, Optimizer};
//! use tallow::precision::Precision;
//!
//! # let device = tallow::device("cpu")?;
//! # let config = TransformerConfig {
//! #     vocab_size: 10, context_length: 4, d_model: 8, num_layers: 1, num_heads: 2, d_ff: 16,
//! #     ..Default::default()
//! # };
//! # let model = TransformerLM::new(&config, 0, &device)?;
//! # let tokens = Tensor::new(&[[1u32, 2, 3, 4]], &device)?;
//! # let targets = Tensor::new(&[[2u32, 3, 4, 5]], &device)?;
//! let mut optimizer = Optimizer::new(model.parameters(), AdamWConfig::default())?;
//! let config = StepConfig {
//!     precision: Precision::BF16,
//!     clip_norm: Some(1.0),
//!     ..Default::default()
//! };
//! let mut step = Step::for_model(&model, &optimizer, &config)?;
//! for _ in 0..5 {
//!     let loss = step.run(&mut optimizer, (&tokens, &targets))?;
//!     assert!(loss.is_finite());
//! }
//! # Ok::<(), tallow::Error>(())
//! ```
//!
//! # Differences that matter
//!
//! **Gradients**
//!
//! - A tensor has no `.grad`, and there is no `zero_grad`. [`backward`](crate::backward()) takes the loss and returns a
//!   store of gradients. Sum several stores with [`GradientAccumulator`](crate::optim::GradientAccumulator).
//! - A parameter without a gradient is an error that names it. PyTorch skips it;
//!   [`MissingGradients::Skip`](crate::optim::MissingGradients) does the same.
//! - If the norm of the gradients is infinite or NaN, [`clip_grad_norm`] changes nothing and returns the norm.
//!   [`clip_grad_norm_checked`](crate::optim::clip_grad_norm_checked) is an error then.
//! - Under autocast a linear layer's weight gradient is summed and returned in f32. PyTorch rounds it to the lower
//!   dtype in between.
//!
//! **Modes and types**
//!
//! - There is no `train()` or `eval()`. A forward pass drops only if its
//!   [`ForwardContext`](crate::nn::ForwardContext) has a dropout key; [`Trainer`](crate::train::Trainer) and planned
//!   steps with a [`dropout_seed`](crate::compile::StepConfig::dropout_seed) supply one.
//! - candle does not promote dtypes, and most of tallow's ops refuse mixed dtypes outside of autocast;
//!   [`ops`](crate::ops) names those that promote.
//! - `state_dict` files: [`nn::save`](crate::nn::save()) writes the weights of any layer or model as safetensors, and
//!   [`nn::load`](crate::nn::load()) reads them in place.
//! - Autocast, `no_grad` and the kernel policy apply to tallow's ops on the calling thread. candle's own ops ignore
//!   them.
//! - There is no global random state. Models, batches and dropout have seeds; the same seed gives the same weights on
//!   every device.
//! - Out-of-range token ids are an error before a kernel runs, on a GPU too.
//!
//! **Defaults**
//!
//! - AdamW has PyTorch's defaults (weight decay 0.01 on every parameter).
//!   [`decay_matrices_only`](crate::optim::decay_matrices_only) makes two groups, and `Trainer` uses it.
//! - A new [`TransformerLM`](crate::model::TransformerLM) has naive attention, and the presets rotate adjacent pairs, as
//!   CS336's model does. [`hf::load`](crate::hf::load) sets flash attention, and the pairs of the family. `Trainer` uses
//!   the algorithm in [`TrainConfig::attention`](crate::train::TrainConfig::attention).
//! - The scaler accepts gradients in f16 and unscales them to f32, which PyTorch refuses.
//!   [`GradScaler`](crate::optim::GradScaler) lists the other differences.
//!
//! **Planned steps**
//!
//! - The loss is traced once for each set of shapes. Captured numbers, captured tensors and branches are fixed then.
//!   Whatever changes from run to run must be an input.
//! - There is no graph break. What cannot be planned is an error that names the op and its path;
//!   [`compile`](crate::compile#what-a-step-refuses) lists the cases. An eager loop runs them.
//! - The last four plans ([`Step::MAX_PLANS`](crate::compile::Step::MAX_PLANS)) are kept. Batches of many different
//!   lengths are planned again and again.
//! - On a GPU in half precision, call [`Step::refresh`](crate::compile::Step::refresh) after you have set or loaded
//!   weights.
//!
//! **Several GPUs**
//!
//! - Gradients are averaged during backward only in planned steps. An eager
//!   [`Replicated::average`](crate::distributed::Replicated::average) runs after backward, because candle has no hooks.
//! - Fully sharded models run only in planned steps. Elsewhere their weights are meta tensors.
//! - [`TrainConfig::accumulation`](crate::train::TrainConfig::accumulation) counts the batches of all ranks together. A
//!   step therefore has the same batches on one GPU and on four.
//!   [`StepConfig::accumulation`](crate::compile::StepConfig::accumulation) counts those of one rank.
//!
//! **What is missing**
//!
//! The rows of [`names`](super::names) that begin with "none", such as a key/value cache, tensor and pipeline
//! parallelism. Convolutions and recurrent layers are candle's, eagerly.
//!
//! [`clip_grad_norm`]: crate::optim::clip_grad_norm
