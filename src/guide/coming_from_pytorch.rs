//! For readers who know PyTorch: what takes the place of each part, and which differences matter.
//!
//! # What takes the place of what
//!
//! | PyTorch | tallow |
//! |---|---|
//! | `nn.Module`, `state_dict()`, `parameters()` | [`Layer`], [`Layer::weights`], [`Layer::parameters`] |
//! | `nn.Parameter`, `nn.Linear`, `nn.RMSNorm`, ... | [`nn::Parameter`](crate::nn::Parameter), [`nn`](crate::nn) |
//! | `torch.nn.functional` | [`ops`](crate::ops), [`attention`](crate::attention) |
//! | `sum(dim)`, `mean(dim, keepdim=True)` | [`ops::sum_over`], [`ops::mean_keepdim`] |
//! | `max(dim).values`, `logsumexp(dim)`, `var(dim)` | [`ops::max_over`], [`ops::logsumexp`], [`ops::var`] |
//! | `2 * x + 1`, `sqrt`, `abs`, `clamp` | [`ops::affine`], [`ops::sqrt`], [`ops::abs`], [`ops::clamp`] |
//! | `x > 0`, `torch.where`, `masked_fill` | [`ops::gt`], [`ops::where_cond`], [`ops::masked_fill`] |
//! | `topk`, `argmax`, `gather`, `scatter_add` | [`ops::topk`], [`ops::argmax`], [`ops::gather`], [`ops::scatter_add`] |
//! | `index_select`, `index_add`, `one_hot`, `stack` | [`ops::index_select`], [`ops::index_add`], [`ops::one_hot`], [`ops::stack`] |
//! | `cross_entropy(label_smoothing=...)` | [`ops::cross_entropy_with`] |
//! | `mse_loss`, `binary_cross_entropy_with_logits` | [`ops::mse_loss`], [`ops::bce_with_logits`] |
//! | `loss.backward()`, `.grad` | [`backward`](crate::backward()), which returns the gradients |
//! | `tensor.backward(gradient)` | [`backward_from`](crate::backward_from) |
//! | `torch.no_grad()` | [`no_grad`](crate::no_grad()) |
//! | `torch.autocast` | [`autocast`](crate::autocast()) with [`Autocast::cuda`] or [`Autocast::cpu`] |
//! | `torch.amp.GradScaler` | [`optim::GradScaler`](crate::optim::GradScaler) |
//! | `torch.optim.AdamW`, parameter groups | [`optim::AdamW`](crate::optim::AdamW), [`AdamW::with_groups`] |
//! | `lr_scheduler` | [`optim::Schedule`](crate::optim::Schedule), [`AdamW::set_learning_rate`] |
//! | `clip_grad_norm_`, `clip_grad_value_` | [`clip_grad_norm`], [`clip_grad_value`] |
//! | accumulation of `.grad` | [`optim::GradientAccumulator`](crate::optim::GradientAccumulator) |
//! | `torch.utils.checkpoint` | [`nn::checkpoint`](crate::nn::checkpoint()), [`TransformerLM::with_checkpointing`] |
//! | `torch.compile` | a planned step: [`compile::Step`](crate::compile::Step) |
//! | `scaled_dot_product_attention` | [`attention::flash`], [`attention::naive`] |
//! | its boolean `attn_mask` | [`KeyMask::new`](crate::attention::KeyMask::new), in u8: 1 shows |
//! | its float `attn_mask` | [`ScoreBias`](crate::attention::ScoreBias), with a gradient if it is tracked |
//! | `key_padding_mask` (true hides) | [`KeyMask::padding`](crate::attention::KeyMask::padding) (1 shows) |
//! | FlexAttention: documents, windows, soft caps | [`AttentionConfig`](crate::attention::AttentionConfig) |
//! | `torch.set_float32_matmul_precision("high")` | [`hardware::set_tf32`](crate::hardware::set_tf32) |
//! | `torch.profiler`, `record_function` | [`profile::Profiler`], [`profile::range`] |
//! | `torch.cuda.max_memory_allocated` | [`memory::Meter`](crate::memory::Meter) |
//! | `torch.cuda.memory._record_memory_history` | [`memory::record_on`], [`memory::Snapshot`] |
//! | the meta device | [`graph::input`](crate::graph::input()), [`graph::weights`](crate::graph::weights) |
//! | `torch.fx`, `torch.export` | [`graph::trace`](crate::graph::trace()) |
//! | `torchrun`, `init_process_group` | `torchrun`, [`distributed::init`](crate::distributed::init) |
//! | `DistributedDataParallel` | [`distributed::Replicated`](crate::distributed::Replicated), [`Trainer::replicate`] |
//! | `ZeroRedundancyOptimizer` | [`AdamW::shard`](crate::optim::AdamW::shard), [`Trainer::shard_optimizer`] |
//! | FSDP, `fully_shard` | [`distributed::FullyShard`](crate::distributed::FullyShard), [`Trainer::fully_sharded`] |
//! | `DataLoader` | [`data::RandomBatches`], [`data::SequentialBatches`] |
//! | a `Dataset` of your own | [`data::Batches`](crate::data::Batches) |
//! | `torch.save`, `torch.load` | [`nn::save`](crate::nn::save()), [`TransformerLM::save`], [`AdamW::save`], [`Trainer::save`] |
//! | `AutoModelForCausalLM.from_pretrained` | [`hf::load`](crate::hf::load), after [`hf::find`](crate::hf::find()) |
//! | `Trainer` of `transformers` or Lightning | [`train::Trainer`](crate::train::Trainer) |
//!
//! # A training loop
//!
//! ```
//! use candle_core::{DType, Tensor};
//! use tallow::autocast;
//! use tallow::model::{TransformerConfig, TransformerLM};
//! use tallow::optim::{AdamW, AdamWConfig, Schedule, clip_grad_norm};
//! use tallow::precision::Autocast;
//!
//! let device = tallow::device("cpu")?;
//! let config = TransformerConfig {
//!     vocab_size: 10, context_length: 4, d_model: 8, num_layers: 1, num_heads: 2, d_ff: 16,
//!     ..Default::default()
//! };
//! let model = TransformerLM::new(&config, 0, &device)?; // parameters in f32
//! let mut optimizer = AdamW::new(model.parameters(), AdamWConfig::default())?;
//! let schedule = Schedule::WarmupCosine { max_lr: 1e-3, min_lr: 1e-4, warmup_steps: 2, total_steps: 5 };
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
//! use tallow::optim::{AdamW, AdamWConfig};
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
//! let mut optimizer = AdamW::new(model.parameters(), AdamWConfig::default())?;
//! let config = StepConfig { precision: Precision::BF16, clip_norm: Some(1.0), ..Default::default() };
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
//! Convolutions, a key/value cache, class weights in the cross-entropy, optimizers other than AdamW, tensor and pipeline
//! parallelism. candle's own ops cover some of these, eagerly.
//!
//! [`ops::sum_over`]: crate::ops::sum_over
//! [`ops::mean_keepdim`]: crate::ops::mean_keepdim
//! [`ops::max_over`]: crate::ops::max_over
//! [`ops::logsumexp`]: crate::ops::logsumexp
//! [`ops::var`]: crate::ops::var
//! [`ops::affine`]: crate::ops::affine
//! [`ops::sqrt`]: crate::ops::sqrt
//! [`ops::abs`]: crate::ops::abs
//! [`ops::clamp`]: crate::ops::clamp
//! [`ops::gt`]: crate::ops::gt
//! [`ops::where_cond`]: crate::ops::where_cond
//! [`ops::masked_fill`]: crate::ops::masked_fill
//! [`ops::topk`]: crate::ops::topk()
//! [`ops::argmax`]: crate::ops::argmax
//! [`ops::gather`]: crate::ops::gather
//! [`ops::scatter_add`]: crate::ops::scatter_add
//! [`ops::index_select`]: crate::ops::index_select
//! [`ops::index_add`]: crate::ops::index_add
//! [`ops::one_hot`]: crate::ops::one_hot
//! [`ops::stack`]: crate::ops::stack
//! [`ops::cross_entropy_with`]: crate::ops::cross_entropy_with
//! [`ops::mse_loss`]: crate::ops::mse_loss
//! [`ops::bce_with_logits`]: crate::ops::bce_with_logits
//! [`attention::flash`]: crate::attention::flash()
//! [`attention::naive`]: crate::attention::naive()
//! [`profile::Profiler`]: crate::profile::Profiler
//! [`profile::range`]: crate::profile::range
//! [`memory::record_on`]: crate::memory::record_on()
//! [`memory::Snapshot`]: crate::memory::Snapshot
//! [`data::RandomBatches`]: crate::data::RandomBatches
//! [`data::SequentialBatches`]: crate::data::SequentialBatches
//! [`Layer`]: crate::nn::Layer
//! [`Layer::weights`]: crate::nn::Layer::weights
//! [`Layer::parameters`]: crate::nn::Layer::parameters
//! [`Autocast::cuda`]: crate::precision::Autocast::cuda
//! [`Autocast::cpu`]: crate::precision::Autocast::cpu
//! [`AdamW::with_groups`]: crate::optim::AdamW::with_groups
//! [`AdamW::set_learning_rate`]: crate::optim::AdamW::set_learning_rate
//! [`AdamW::save`]: crate::optim::AdamW::save
//! [`clip_grad_norm`]: crate::optim::clip_grad_norm
//! [`clip_grad_value`]: crate::optim::clip_grad_value
//! [`TransformerLM::with_checkpointing`]: crate::model::TransformerLM::with_checkpointing
//! [`TransformerLM::save`]: crate::model::TransformerLM::save
//! [`Trainer::save`]: crate::train::Trainer::save
//! [`Trainer::replicate`]: crate::train::Trainer::replicate
//! [`Trainer::shard_optimizer`]: crate::train::Trainer::shard_optimizer
//! [`Trainer::fully_sharded`]: crate::train::Trainer::fully_sharded
