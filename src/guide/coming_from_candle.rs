//! For readers who know candle: tallow adds ops, layers and tools to candle's tensors; it is no other tensor library.
//!
//! [`Tensor`](candle_core::Tensor), [`Var`](candle_core::Var), [`Device`](candle_core::Device),
//! [`GradStore`](candle_core::backprop::GradStore), [`VarMap`](candle_nn::VarMap) and
//! [`VarBuilder`](candle_nn::VarBuilder) are candle's own. You can replace one op, one layer or the optimizer of an
//! existing program and keep the rest. [`tallow::candle`](crate::candle) is the version of `candle-core` that tallow
//! depends on.
//!
//! # Which ops to replace first
//!
//! In candle 0.11 some fused ops have no backward. Their output is not part of the graph, and `loss.backward()` reports
//! nothing: every parameter before such an op simply has no gradient. This has been known since candle's issue
//! [#2168](https://github.com/huggingface/candle/issues/2168). Layers call these ops too: `RmsNorm::forward` and
//! `LayerNorm::forward` use them on contiguous inputs.
//!
//! | candle, no gradient | candle, with gradient | tallow, fused, with gradient |
//! |---|---|---|
//! | `ops::softmax_last_dim` | `ops::softmax` | [`ops::softmax`](crate::ops::softmax()), with scale and mask |
//! | `ops::rms_norm`, `RmsNorm` | `ops::rms_norm_slow` | [`ops::rms_norm`], [`nn::RmsNorm`] |
//! | `ops::layer_norm`, `LayerNorm` | `ops::layer_norm_slow` | [`ops::layer_norm`], [`nn::LayerNorm`] |
//! | `rotary_emb::rope_i` | `rotary_emb::rope_i_slow` | [`ops::rope`](crate::ops::rope()): adjacent pairs |
//! | `rotary_emb::rope` | `rotary_emb::rope_slow` | [`ops::rope_with`] and [`RotaryPairs::Halves`] |
//! | `ops::sdpa` | composed by hand | [`attention::flash`], [`attention::naive`] |
//!
//! [`ops::rms_norm`]: crate::ops::rms_norm()
//! [`ops::layer_norm`]: crate::ops::layer_norm()
//! [`ops::rope_with`]: crate::ops::rope_with()
//! [`nn::RmsNorm`]: crate::nn::RmsNorm
//! [`nn::LayerNorm`]: crate::nn::LayerNorm
//! [`RotaryPairs::Halves`]: crate::ops::RotaryPairs::Halves
//! [`attention::flash`]: crate::attention::flash()
//! [`attention::naive`]: crate::attention::naive()
//!
//! Note the names: candle's `rope` rotates by halves, tallow's [`rope`](crate::ops::rope()) adjacent pairs.
//!
//! candle's other ops and layers have gradients. [`names`](super::names#candles-names) lists tallow's op or layer for
//! each. tallow's have kernels for forward and backward, follow autocast, and can be traced and planned. Ops with
//! kernels have the same formula in plain candle ops in [`ops::reference`](mod@crate::ops::reference).
//!
//! # Gradients
//!
//! `loss.backward()` works on tallow's ops. [`backward`](crate::backward()) computes the same gradients in less time
//! and memory:
//!
//! | | `loss.backward()` | `tallow::backward(loss)` |
//! |---|---|---|
//! | saved tensors | live until the graph is dropped | are freed as soon as their op's backward is done |
//! | a gradient's first contribution | is added to zeros | is used directly |
//! | the loss | is borrowed | is taken by value; `loss.detach()` keeps its number |
//!
//! Backward runs from the loss to the inputs. From the first of candle's own ops that it reaches, candle computes the
//! rest, also of tallow's ops earlier in the model: the gradients are the same, but the savings in the table end there.
//! Write sums and products of activations with [`ops::add`](crate::ops::add) and [`ops::mul`](crate::ops::mul), not
//! with `+` and `*`. Views (`narrow`, `transpose`, `reshape`) are no obstacle.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use candle_nn::{VarBuilder, VarMap};
//! use tallow::optim::{AdamWConfig, Optimizer, parameters_of};
//! use tallow::{nn, ops};
//!
//! let device = Device::Cpu;
//! let weights = VarMap::new();
//! let vb = VarBuilder::from_varmap(&weights, DType::F32, &device);
//! let norm = nn::RmsNorm::new(8, 1e-5, vb.pp("norm"))?; // was candle_nn::rms_norm, same arguments
//! let map = nn::Linear::new(8, 3, vb.pp("map"))?; // was candle_nn::linear_no_bias, same arguments
//!
//! let x = Tensor::randn(0f32, 1.0, (4, 8), &device)?;
//! let classes = Tensor::new(&[0u32, 1, 2, 0], &device)?;
//! let mut optimizer = Optimizer::new(parameters_of(&weights), AdamWConfig::default())?;
//! let loss = ops::cross_entropy(&map.forward(&norm.forward(&x)?)?, &classes)?;
//! let gradients = tallow::backward(loss)?; // was loss.backward()?
//! optimizer.step(&gradients)?;
//! # Ok::<(), tallow::Error>(())
//! ```
//!
//! [`optim::Optimizer`](crate::optim::Optimizer) also implements `candle_nn::Optimizer`. A parameter without a gradient
//! is an error that names it ([`Error::MissingGradient`](crate::Error::MissingGradient)), where candle's optimizers
//! skip it. So a graph that is cut by a candle op shows in the first step. The state is f32 for parameters in half
//! precision.
//!
//! [`no_grad`](crate::no_grad()) stops tallow's ops from building a graph. candle has no such switch, so its own ops on
//! a `Var` are still tracked inside.
//!
//! # Replacing attention
//!
//! [`attention::flash`] takes the place of two matmuls and a softmax:
//!
//! - Keys and values keep their own number of heads: leave out `repeat_kv`.
//! - Divide an additive mask of 0 and -inf from the terms that are trained. What hides keys becomes a
//!   [`KeyMask`](crate::attention::KeyMask) of u8, whose hidden tiles are skipped, or a
//!   [`Mask`](crate::attention::Mask) such as `Causal`. Other terms become a
//!   [`ScoreBias`](crate::attention::ScoreBias).
//! - Under [`autocast`](crate::autocast()) the output is in half precision. candle's own linear layer then fails for
//!   want of equal dtypes: convert it with `nn::Linear::try_from`, which shares its variables.
//! - Write [`ops::split_heads`](crate::ops::split_heads()) and [`ops::merge_heads`](crate::ops::merge_heads()) for
//!   `reshape`, `transpose` and `contiguous`.
//!
//! ```
//! use candle_core::{D, DType, Device, Tensor};
//! use candle_nn::VarMap;
//! use tallow::attention::{self, AttentionConfig, KeyMask, ScoreBias};
//! use tallow::{nn, ops};
//!
//! # fn main() -> tallow::Result<()> {
//! let device = Device::Cpu;
//! let (heads, kv_heads, head_dim) = (4, 2, 8);
//! let weights = VarMap::new();
//! let vb = candle_nn::VarBuilder::from_varmap(&weights, DType::F32, &device);
//! let [q, k, v, output] = ["q", "k", "v", "o"].map(|name| {
//!     let width = if ["k", "v"].contains(&name) { kv_heads * head_dim } else { heads * head_dim };
//!     candle_nn::linear(32, width, vb.pp(name))
//! });
//! let (q, k, v, output) = (q?, k?, v?, output?); // candle's layers
//! let bias =
//!     vb.get_with_hints((heads, 5, 5), "bias", candle_nn::Init::Randn { mean: 0.0, stdev: 1.0 })?;
//! let x = Tensor::randn(0f32, 1.0, (2, 5, 32), &device)?; // (B, T, D)
//! let visible = Tensor::new(&[[1u8, 1, 1, 1, 1], [1, 1, 1, 0, 0]], &device)?; // (B, T)
//!
//! // Before, in candle.
//! let split = |x: &Tensor, heads: usize| -> candle_core::Result<Tensor> {
//!     let x = x.reshape((2, 5, heads, head_dim))?.transpose(1, 2)?.contiguous()?;
//!     x.unsqueeze(2)?.repeat((1, 1, 4 / heads, 1, 1))?.reshape((2, 4, 5, head_dim)) // repeat_kv
//! };
//! use candle_core::Module;
//! let qs = split(&q.forward(&x)?, heads)?;
//! let ks = split(&k.forward(&x)?, kv_heads)?;
//! let vs = split(&v.forward(&x)?, kv_heads)?;
//! let hidden = visible.eq(0u8)?.reshape((2, 1, 1, 5))?.to_dtype(DType::F32)?.affine(-1e30, 0.0)?;
//! let scores = (qs.matmul(&ks.t()?)? / (head_dim as f64).sqrt())?;
//! let scores = scores.broadcast_add(&bias.unsqueeze(0)?)?.broadcast_add(&hidden)?;
//! let out = candle_nn::ops::softmax(&scores, D::Minus1)?.matmul(&vs)?;
//! let before = output.forward(&out.transpose(1, 2)?.reshape((2, 5, 32))?)?;
//!
//! // With tallow, and the same variables.
//! let [q, k, v, output] = [q, k, v, output].map(nn::Linear::try_from);
//! let (q, k, v, output) = (q?, k?, v?, output?);
//! let config = AttentionConfig {
//!     key_mask: Some(KeyMask::padding(&visible)?),
//!     bias: Some(ScoreBias::new(&bias)?),
//!     ..Default::default()
//! };
//! let qs = ops::split_heads(&q.forward(&x)?, heads)?; // (B, H, T, Dh)
//! let ks = ops::split_heads(&k.forward(&x)?, kv_heads)?;
//! let vs = ops::split_heads(&v.forward(&x)?, kv_heads)?;
//! let after = output.forward(&ops::merge_heads(&attention::flash(&qs, &ks, &vs, &config)?)?)?;
//! assert!((before - &after)?.abs()?.max_all()?.to_scalar::<f32>()? < 1e-5);
//!
//! let gradients = tallow::backward(ops::sum(&ops::mul(&after, &after)?)?)?;
//! assert!(weights.all_vars().iter().all(|var| gradients.get(var).is_some())); // bias included
//! # Ok(())
//! # }
//! ```
//!
//! # `VarBuilder`
//!
//! Layers are built from any `VarBuilder`, and the names of weights are those of its prefixes.
//!
//! - From a `VarMap`, a layer shares its variables. [`parameters_of`](crate::optim::parameters_of) lists them for the
//!   optimizer, sorted by name.
//! - From a file (`VarBuilder::from_mmaped_safetensors`), each weight becomes a new variable, so a loaded layer can be
//!   trained. [`nn::freeze`](crate::nn::freeze()) freezes weights by name.
//! - [`nn::seeded`](crate::nn::seeded()) draws initial values from a seed: the same bits on any device and with any
//!   number of threads.
//!
//! Layers list their weights themselves: [`Layer::parameters`](crate::nn::Layer::parameters) needs no `VarMap`. Layers
//! with a `forward` of one tensor implement candle's `Module`. An [`Error`](crate::Error) converts into
//! `candle_core::Error` and back, so `?` works in functions of either result.
//!
//! # Devices
//!
//! Use [`tallow::device("cuda:0")`](crate::device()) in place of `Device::new_cuda(0)`. candle returns a new device on
//! each call, whose tensors cannot be combined with those of another; tallow returns the same one for the same name.
//!
//! # Kernels and fallbacks
//!
//! On the CPU ops have kernels in f32, f64, f16 and bf16, on NVIDIA GPUs in f32, f16 and bf16. Elsewhere an op runs its
//! reference, in candle's ops. [`KernelPolicy`](crate::ops::KernelPolicy) decides:
//!
//! | policy | an op without a kernel |
//! |---|---|
//! | `Prefer`, the default | runs its reference; [`ops::fallbacks`](crate::ops::fallbacks) lists it |
//! | `Strict` | is an error |
//! | `Reference` | as every op: runs its reference |
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use tallow::ops::{self, KernelPolicy, with_kernel_policy};
//!
//! let x = Tensor::ones((2, 8), DType::F32, &Device::Cpu)?;
//! let weight = Tensor::ones(8, DType::F32, &Device::Cpu)?;
//! let kernel = with_kernel_policy(KernelPolicy::Strict, || ops::rms_norm(&x, &weight, 1e-5))?;
//! let reference = with_kernel_policy(KernelPolicy::Reference, || ops::rms_norm(&x, &weight, 1e-5))?;
//! assert!((kernel - reference)?.abs()?.max_all()?.to_scalar::<f32>()? < 1e-6);
//! # Ok::<(), tallow::Error>(())
//! ```
//!
//! # Speed of your program
//!
//! - Build with `--release`, or set `opt-level = 3` in your own `[profile.dev]`. Cargo ignores the profile of a
//!   dependency, so a plain `cargo run` of your program runs unoptimized kernels:
//!
//!   ```toml
//!   [profile.dev]
//!   opt-level = 3
//!   ```
//!
//! - Call [`tallow::init`](crate::init()) first in `main`: candle's worker threads then sleep sooner, and leave the
//!   cores to kernels.
//! - candle's CPU backend allocates for every op. An allocator that keeps freed pages makes eager steps faster
//!   ([how](crate#speed-of-a-program-that-uses-it)).
//! - A [planned step](crate::compile::Step) has no graph and no allocations. It accepts a loss that is written with
//!   tallow's ops and layers. Views are allowed; candle's own arithmetic on a value that depends on an input is an
//!   error.
