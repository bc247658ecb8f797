//! From PyTorch and candle to tallow: PyTorch's names, module by module, and what takes the place of each.
//!
//! Search this page for a name without its prefix: `logsumexp`, `GradScaler`, `no_sync`. The last section has the ops
//! and layers of candle. [`coming_from_pytorch`] has a training loop and the differences that matter;
//! [`coming_from_candle`] has the ops of candle that lose gradients.
//!
//! # How to read the tables
//!
//! | on the right | meaning |
//! |---|---|
//! | a link to an op or a layer | has a gradient, follows [`autocast`] and [`no_grad`], can be [traced] and [planned] |
//! | **view** | candle's method. It copies nothing and works wherever tallow's ops do |
//! | **candle's** | candle's method or layer: it runs eagerly, ignores [`autocast`] and [`no_grad`], fails in a trace |
//! | **composed** | a function in the code below the tables: it is made of tallow's ops and does what they do |
//! | **none** | not there; the row says what to do instead, if there is something |
//!
//! candle's ops have gradients unless a row says "no gradient". They may always prepare data, masks and constants
//! *before* a trace: a step gets what changes from run to run as an input, and keeps other tensors as constants.
//!
//! # `torch`
//!
//! ## Creation
//!
//! Constructors and reads of elements are candle's. Call them outside of a trace.
//!
//! | PyTorch | tallow |
//! |---|---|
//! | `tensor`, `as_tensor`, `from_numpy` | [`Tensor::new`], [`Tensor::from_vec`]; from a file [`Tensor::read_npy`] |
//! | `zeros`, `ones` | [`Tensor::zeros`], [`Tensor::ones`] |
//! | `zeros_like`, `ones_like` | [`Tensor::zeros_like`], [`Tensor::ones_like`] |
//! | `full`, `empty` | [`Tensor::full`]; no tensor is left uninitialized |
//! | `arange`, `linspace` | [`Tensor::arange`], [`Tensor::arange_step`]; `linspace` is [`ops::affine`] of a range |
//! | `eye` | [`Tensor::eye`] |
//! | `tril`, `triu` | [`ops::mul`] by [`Tensor::tril2`] or [`Tensor::triu2`]; in attention a [`Mask`] |
//! | `meshgrid` | [`Tensor::meshgrid`] |
//! | `rand`, `randn` | [`Tensor::rand`], [`Tensor::randn`], which have no seed on a CPU; weights: [`nn::seeded`] |
//! | `randint`, `randperm`, `bernoulli` | none: draw in Rust and pass the numbers to [`Tensor::from_vec`] |
//! | `multinomial` | none as an op; [`TransformerLM::generate`] samples tokens |
//! | `manual_seed`, `Generator` | each has a seed of its own: [`nn::seeded`], [`DropoutKey`], [`RandomBatches`] |
//! | `requires_grad=True` | [`Var::from_tensor`]; for the weight of a layer [`nn::Parameter`] |
//! | `device("cuda:0")`, `set_default_device` | [`device`]; every constructor takes the device, none is the default |
//! | `device("meta")`, `FakeTensorMode` | [`graph::input`], [`graph::weights`] |
//! | `x.to(device)`, `x.cuda()`, `x.cpu()` | [`Tensor::to_device`] |
//! | `x.item()`, `x.tolist()`, `x.numpy()` | [`Tensor::to_scalar`], [`Tensor::to_vec1`], `to_vec2`, `to_vec3` |
//! | `x.shape`, `x.size(d)`, `x.ndim` | [`Tensor::dims`], [`Tensor::dim`], [`Tensor::rank`] |
//! | `x.numel()`, `x.dtype`, `x.device` | [`Tensor::elem_count`], [`Tensor::dtype`], [`Tensor::device`] |
//!
//! ## Functions of each element
//!
//! | PyTorch | tallow |
//! |---|---|
//! | `a + b`, `a - b`, `a * b`, `a / b` | [`ops::add`], [`ops::sub`], [`ops::mul`], [`ops::div`] (they broadcast) |
//! | `2 * x + 1`, `-x`, `1 - x` | [`ops::affine`] |
//! | `add(a, b, alpha=s)`, `sub(a, b, alpha=s)` | [`ops::add_scaled`] with s, or with -s |
//! | `lerp(a, b, w)` | [`ops::add_scaled`] of a and `ops::sub(b, a)`, with w |
//! | `addcmul(x, a, b, value=s)` | [`ops::add_scaled`] of x and `ops::mul(a, b)`, with s; `addcdiv` by [`ops::div`] |
//! | `add_`, `mul_`, `copy_`, `fill_` | none: ops return new tensors. The values of a variable: [`Var::set`] |
//! | `abs`, `exp`, `log`, `sqrt`, `rsqrt` | [`ops::abs`], [`ops::exp`], [`ops::log`], [`ops::sqrt`], [`ops::rsqrt`] |
//! | `pow`, `square`, `reciprocal` | [`ops::pow`] with a number: 2.0, -1.0 |
//! | `a ** b` of tensors | [`ops::exp`] of [`ops::mul`] of b and [`ops::log`], for a above 0 |
//! | `log1p` | [`ops::log`] of `ops::affine(x, 1.0, 1.0)`, which is not exact near 0 |
//! | `expm1` | [`ops::exp`], then [`ops::affine`] with 1 and -1, which is not exact near 0 |
//! | `log2`, `log10` | [`ops::log`], then [`ops::affine`] with 1 / ln 2 or 1 / ln 10, and 0 |
//! | `tanh`, `sigmoid`, `relu` | [`ops::tanh`], [`ops::sigmoid`], [`ops::relu`] |
//! | `sin`, `cos` | candle's [`Tensor::sin`], [`Tensor::cos`]; rotary positions: [`nn::RotaryEmbedding`] |
//! | `erf` | candle's [`Tensor::erf`]; the exact GELU: [`Gelu::Erf`] |
//! | `sign`, `round` | candle's, no gradient: [`Tensor::sign`], [`Tensor::round`] |
//! | `floor`, `ceil` | candle's, no gradient: [`Tensor::floor`], [`Tensor::ceil`] |
//! | `clamp`, `clip`, `clamp_min`, `clamp_max` | [`ops::clamp`]; an infinite bound is none |
//! | `maximum`, `minimum` of two tensors | [composed] |
//! | `where`, `masked_fill` | [`ops::where_cond`], [`ops::masked_fill`]; scores of attention: [`KeyMask`] |
//! | `eq`, `ne`, `lt`, `le`, `gt`, `ge` | [`ops::eq`], [`ops::ne`], [`ops::lt`], ...: 0 and 1 in u8, no gradient |
//! | `logical_and`, `logical_not` | of floats 0 and 1: [`ops::mul`], [`ops::affine`] with -1 and 1 |
//! | `isnan`, `isfinite` | `ops::ne(x, x)` is 1 for NaN; of gradients: [`check_finite`] |
//! | `nan_to_num` | [`ops::masked_fill`] where `ops::ne(x, x)`; better hide the element before the op that makes it |
//! | `allclose`, `equal` | candle's `a.sub(&b)?.abs()?.max_all()?`, compared with the tolerance: [`Tensor::max_all`] |
//!
//! ## Matmuls
//!
//! | PyTorch | tallow |
//! |---|---|
//! | `a @ b`, `matmul`, `mm`, `bmm` | [`ops::matmul`]; to broadcast a batch: [`Tensor::broadcast_as`] before it |
//! | `a @ b.mT` | [`ops::matmul_transposed`] |
//! | `mv`, `dot`, `inner`, `vdot` | [`ops::matmul`] of unsqueezed views, or [`ops::sum_over`] of [`ops::mul`] |
//! | `outer`, `ger` | [composed]: `outer` |
//! | `addmm`, `baddbmm` | [`ops::linear_bias`]; [`ops::add`] of [`ops::matmul`] |
//! | `einsum`, `tensordot` | [composed], as in `scores`: matmuls of transposed views |
//! | `linalg.norm`, `linalg.vector_norm`, `norm` | [composed]: `norm`; of all gradients: [`grad_norm`] |
//! | `linalg.qr`, `linalg.svd`, `linalg.inv`, `linalg.solve` | none |
//! | `set_float32_matmul_precision("high")` | [`hardware::set_tf32`] |
//!
//! ## Reductions
//!
//! | PyTorch | tallow |
//! |---|---|
//! | `sum()`, `mean()` | [`ops::sum`], [`ops::mean`] |
//! | `sum(dim)`, `mean(dim)` | [`ops::sum_over`], [`ops::mean_over`]: one or several dimensions; `D::Minus1` is -1 |
//! | `sum(dim, keepdim=True)`, `mean(...)` | [`ops::sum_keepdim`], [`ops::mean_keepdim`] |
//! | `var`, `std`, `var_mean`, `std_mean` | [`ops::var`], [`ops::var_keepdim`]; `std` is its [`ops::sqrt`] |
//! | `max(dim)` | [`ops::topk`] with k = 1: values and indices |
//! | `max(dim).values`, `amax` | [`ops::max_over`], [`ops::max_keepdim`]; of all elements: name all dimensions |
//! | `min(dim).values`, `amin` | [`ops::min_over`], [`ops::min_keepdim`] |
//! | `argmax`, `argmin`, `max(dim).indices` | [`ops::argmax`], [`ops::argmin`]: u32, no gradient |
//! | `logsumexp` | [`ops::logsumexp`], [`ops::logsumexp_keepdim`] |
//! | `cumsum` | [composed]: a matmul with a triangle, n^2 work |
//! | `prod`, `cumprod` | none; of positive numbers [`ops::exp`] of the sum of [`ops::log`] |
//! | `sort`, `argsort` | candle's [`Tensor::sort_last_dim`]; no gradient: [`Tensor::arg_sort_last_dim`] |
//! | `topk` | [`ops::topk`] over the last dimension |
//! | `kthvalue`, `median`, `quantile` | [`Tensor::narrow`] of [`ops::topk`], or candle's [`Tensor::sort_last_dim`] |
//! | `any`, `all` | candle's [`Tensor::max_all`] or [`Tensor::min_all`] of a mask |
//! | `unique`, `bincount`, `histc`, `searchsorted` | none: [`Tensor::to_vec1`] and Rust's collections |
//!
//! ## Shapes and indices
//!
//! | PyTorch | tallow |
//! |---|---|
//! | `view`, `reshape`, `flatten`, `unflatten` | view: [`Tensor::reshape`], of other views after [`ops::contiguous`] |
//! | `transpose`, `permute`, `movedim` | view: [`Tensor::transpose`], [`Tensor::permute`] |
//! | `x.T`, `x.mT` | view: [`Tensor::t`], of the last two dimensions |
//! | `squeeze`, `unsqueeze`, `x[None]` | view: [`Tensor::squeeze`], [`Tensor::unsqueeze`] |
//! | `expand`, `expand_as`, `broadcast_to` | view: [`Tensor::broadcast_as`] |
//! | `x[i]`, `select`, `unbind` | view: [`Tensor::get`], [`Tensor::get_on_dim`] |
//! | `x[:, a:b]`, `narrow` | view: [`Tensor::narrow`], [`IndexOp::i`] with numbers and ranges |
//! | `chunk`, `split`, `tensor_split` | view: [`Tensor::chunk`]; by sizes: [`Tensor::narrow`] |
//! | `contiguous` | [`ops::contiguous`] |
//! | `clone` | candle's [`Tensor::copy`]; Rust's `clone()` shares the elements |
//! | `cat`, `concat`, `hstack`, `vstack` | [`ops::concat`] |
//! | `stack` | [`ops::stack`] |
//! | `repeat`, `tile` | [`ops::concat`] of the tensor with itself |
//! | `repeat_interleave` | [composed]; heads of keys and values: [`ops::repeat_heads`] |
//! | `roll` | [composed] |
//! | `flip` | candle's [`Tensor::flip`] |
//! | `x[ids]`, `index_select` | [`ops::index_select`]; of a table (V, D): [`ops::embedding`] |
//! | `gather`, `take_along_dim` | [`ops::gather`] |
//! | `scatter_add`, `index_add` | [`ops::scatter_add`], [`ops::index_add`], which return a new tensor |
//! | `scatter`, `x[a:b] = y` | candle's [`Tensor::scatter`], [`Tensor::slice_scatter`], which return a new tensor |
//! | `x[mask]`, `masked_select`, `nonzero` | none: the shape would depend on values. Multiply by the mask |
//!
//! ## Dtypes
//!
//! | PyTorch | tallow |
//! |---|---|
//! | `x.float()`, `x.bfloat16()`, `x.half()`, `x.to(dtype)` | [`ops::cast`] |
//! | `x.long()`, `x.int()`, `x.bool()` | candle's, no gradient: [`Tensor::to_dtype`]; ids are u32 or i64, masks u8 |
//! | `set_default_dtype` | none: every constructor takes a dtype; weights have that of their `VarBuilder` |
//! | `promote_types` | [`ops::add`], [`ops::mul`], ... promote as in PyTorch; other ops refuse mixed dtypes |
//! | `finfo` | Rust's constants: `f32::EPSILON`, `f32::MAX` |
//!
//! ## The compositions
//!
//! ```
//! use candle_core::{D, DType, Device, Tensor};
//! use tallow::{Result, ops};
//!
//! fn maximum(a: &Tensor, b: &Tensor) -> Result<Tensor> {
//!     ops::add(b, &ops::relu(&ops::sub(a, b)?)?)
//! }
//!
//! fn minimum(a: &Tensor, b: &Tensor) -> Result<Tensor> {
//!     ops::sub(a, &ops::relu(&ops::sub(a, b)?)?)
//! }
//!
//! /// (N) and (M) to (N, M).
//! fn outer(a: &Tensor, b: &Tensor) -> Result<Tensor> {
//!     ops::mul(&a.unsqueeze(1)?, b)
//! }
//!
//! /// `torch.einsum("bqhd,bkhd->bhqk", q, k)`.
//! fn scores(q: &Tensor, k: &Tensor) -> Result<Tensor> {
//!     ops::matmul_transposed(&q.transpose(1, 2)?, &k.transpose(1, 2)?)
//! }
//!
//! /// The Euclidean norm along the last dimension.
//! fn norm(x: &Tensor) -> Result<Tensor> {
//!     ops::sqrt(&ops::sum_over(&ops::mul(x, x)?, D::Minus1)?)
//! }
//!
//! /// Along the last dimension, of size n; the triangle is made once:
//! /// `Tensor::tril2(n, x.dtype(), &device)?`.
//! fn cumsum(x: &Tensor, triangle: &Tensor) -> Result<Tensor> {
//!     ops::linear(x, triangle)
//! }
//!
//! /// Each row of x (N, D) `times` times in succession.
//! fn repeat_interleave(x: &Tensor, times: usize) -> Result<Tensor> {
//!     let (n, d) = x.dims2()?;
//!     Ok(ops::contiguous(&x.unsqueeze(1)?.broadcast_as((n, times, d))?)?.reshape((n * times, d))?)
//! }
//!
//! fn roll(x: &Tensor, shift: usize, dim: usize) -> Result<Tensor> {
//!     let rest = x.dim(dim)? - shift;
//!     ops::concat(&[&x.narrow(dim, rest, shift)?, &x.narrow(dim, 0, rest)?], dim)
//! }
//!
//! let device = Device::Cpu;
//! let a = Tensor::new(&[[1f32, 5.0], [4.0, 2.0]], &device)?;
//! let b = Tensor::new(&[[3f32, 3.0], [3.0, 3.0]], &device)?;
//! assert_eq!(maximum(&a, &b)?.to_vec2::<f32>()?, [[3.0, 5.0], [4.0, 3.0]]);
//! assert_eq!(minimum(&a, &b)?.to_vec2::<f32>()?, [[1.0, 3.0], [3.0, 2.0]]);
//! assert_eq!(outer(&a.get(0)?, &b.get(0)?)?.to_vec2::<f32>()?, [[3.0, 3.0], [15.0, 15.0]]);
//! let q = Tensor::new(&[[[[1f32, 2.0]], [[3.0, 4.0]]]], &device)?; // (B, T, H, Dh) = (1, 2, 1, 2)
//! assert_eq!(scores(&q, &q)?.get(0)?.get(0)?.to_vec2::<f32>()?, [[5.0, 11.0], [11.0, 25.0]]);
//! assert_eq!(norm(&Tensor::new(&[[3f32, 4.0]], &device)?)?.to_vec1::<f32>()?, [5.0]);
//! let triangle = Tensor::tril2(2, DType::F32, &device)?;
//! assert_eq!(cumsum(&a, &triangle)?.to_vec2::<f32>()?, [[1.0, 6.0], [4.0, 6.0]]);
//! assert_eq!(
//!     repeat_interleave(&a, 2)?.to_vec2::<f32>()?,
//!     [[1.0, 5.0], [1.0, 5.0], [4.0, 2.0], [4.0, 2.0]]
//! );
//! assert_eq!(roll(&a, 1, 1)?.to_vec2::<f32>()?, [[5.0, 1.0], [2.0, 4.0]]);
//! # // Each of them can be traced too.
//! # use tallow::graph::{self, Target};
//! # let (x, y) = (graph::input("x", (2, 2), DType::F32)?, graph::input("y", (2, 2), DType::F32)?);
//! # let (v, q) = (graph::input("v", 2, DType::F32)?, graph::input("q", (1, 2, 1, 2), DType::F32)?);
//! # graph::trace(Target::Cpu, || maximum(&x, &y))?;
//! # graph::trace(Target::Cpu, || minimum(&x, &y))?;
//! # graph::trace(Target::Cpu, || outer(&v, &v))?;
//! # graph::trace(Target::Cpu, || scores(&q, &q))?;
//! # graph::trace(Target::Cpu, || norm(&x))?;
//! # graph::trace(Target::Cpu, || cumsum(&x, &triangle))?;
//! # graph::trace(Target::Cpu, || repeat_interleave(&x, 2))?;
//! # graph::trace(Target::Cpu, || roll(&x, 1, 1))?;
//! # Ok::<(), tallow::Error>(())
//! ```
//!
//! # `torch.autograd`
//!
//! | PyTorch | tallow |
//! |---|---|
//! | `loss.backward()` | [`backward`] |
//! | `y.backward(gradient)` | [`backward_from`] |
//! | `x.grad`, `zero_grad()` | [`GradStore::get`] of what [`backward`] returns; there is nothing to zero |
//! | accumulation in `.grad` | [`GradientAccumulator`] |
//! | `autograd.grad(y, x)` | make x a [`Var`] and read its gradient; `create_graph=True`: none |
//! | `retain_graph=True` | call [`backward`] with `loss.clone()` |
//! | `no_grad`, `inference_mode`, `set_grad_enabled(False)` | [`no_grad`] |
//! | `is_grad_enabled` | [`is_grad_enabled`] |
//! | `x.detach()` | view: [`Tensor::detach`] |
//! | `x.requires_grad_(False)` | [`nn::freeze`] by the weights' names, [`TransformerLM::freeze`] |
//! | `autograd.Function` | candle's [`CustomOp1`], [`CustomOp2`], [`CustomOp3`], with a `bwd` |
//! | `register_hook` | none: change the gradients after [`backward`] |
//! | `register_forward_hook` | [`probe::listen`] sees each layer and op begin and end, with shapes, not values |
//! | `detect_anomaly` | [`check_finite`], which names the parameter |
//! | `gradcheck`, `torch.func.vmap`, `jvp`, `hessian` | none |
//! | `graph.saved_tensors_hooks` | none; [`memory::saved_tensors`] lists what forward saves |
//! | `graph.save_on_cpu` | none: recompute instead, by [`nn::checkpoint`] |
//!
//! # `torch.nn`
//!
//! | PyTorch | tallow |
//! |---|---|
//! | `Module`, `forward` | a struct that implements [`Layer`], with a method; [`own_model`] shows one with its loss |
//! | `parameters()`, `named_parameters()` | [`Layer::parameters`] |
//! | `state_dict()`, `load_state_dict()` | [`Layer::weights`]; to and from a file [`nn::save`], [`nn::load`] |
//! | `Parameter` | [`nn::Parameter`] |
//! | `register_buffer` | a field with a plain tensor; [`Layer::visit`] it to have it in files |
//! | `ModuleList`, `ModuleDict`, `ParameterList` | a `Vec`, each element visited under a name from [`nn::join`] |
//! | `Sequential` | call one `forward` after the other; candle's [`Sequential`] lists no weights |
//! | `train()`, `eval()` | the context of a forward pass: [`ForwardContext::training`], or the default |
//! | `module.to(device)`, `module.to(dtype)` | choose both when you build it, in the `VarBuilder`: [`nn::seeded`] |
//! | `init.trunc_normal_`, `init.zeros_` | an [`Init`] for [`nn::Parameter::new`]; of a finished layer [`Var::set`] |
//! | `init.kaiming_uniform_` | [`Init::Kaiming`] with a builder of a [`VarMap`], without a seed; not [`nn::seeded`] |
//! | `a.weight = b.weight` (tied) | [`Linear::from_weights`] with the same tensor |
//! | LoRA, adapters | [`nn::Parameter`] has the code |
//! | `Linear` | [`Linear::with_bias`], or [`Linear::new`] without bias |
//! | `Embedding` | [`nn::Embedding`]; `padding_idx`: [`Embedding::with_padding`] |
//! | `EmbeddingBag` | [`ops::mean_over`] of [`ops::embedding`] |
//! | `LayerNorm`, `RMSNorm` | [`nn::LayerNorm`], [`nn::RmsNorm`] |
//! | `Dropout` | [`ForwardContext`] for the layers of [`nn`]; in a layer of yours [`ops::dropout`] |
//! | `ReLU`, `GELU`, `SiLU`, `Softmax`, ... | the functions of [`nn.functional`](#torchnnfunctional) |
//! | `MultiheadAttention(query, query, query)` | [`nn::Attention`]: causal or not by its configuration |
//! | `MultiheadAttention(query, key, value)` | [`nn::Attention::cross`]: k and v of one other sequence |
//! | `TransformerEncoderLayer` | [`nn::TransformerBlock`], which is causal |
//! | `TransformerDecoderLayer`, `Transformer` | none: write the block with these layers and ops |
//! | feed-forward networks | [`nn::Mlp`] of any activation, [`nn::SwiGlu`], [`nn::GeGlu`] |
//! | rotary embedding (torchtune, `transformers`) | [`nn::RotaryEmbedding`], [`RopeScaling`], [`ops::rope_with`] |
//! | `CrossEntropyLoss`, `MSELoss`, ... | the functions of [`nn.functional`](#torchnnfunctional) |
//! | `Identity`, `Flatten`, `Unflatten` | the tensor itself, view: [`Tensor::reshape`] |
//! | `Conv2d` with `kernel_size == stride` (patches) | composed: `patches`, then [`nn::Linear`] |
//! | `Conv1d`, `Conv2d` | candle's [`candle_nn::Conv1d`], [`candle_nn::Conv2d`] |
//! | `ConvTranspose2d` | candle's [`candle_nn::ConvTranspose2d`] |
//! | `BatchNorm2d`, `GroupNorm` | candle's [`candle_nn::BatchNorm`], [`candle_nn::GroupNorm`] |
//! | `LSTM`, `GRU` | candle's [`candle_nn::LSTM`], [`candle_nn::GRU`] |
//! | `utils.clip_grad_norm_` | [`clip_grad_norm`]; `error_if_nonfinite=True`: [`clip_grad_norm_checked`] |
//! | `utils.clip_grad_value_`, `utils.get_total_norm` | [`clip_grad_value`], [`grad_norm`] |
//! | `utils.rnn.pad_sequence` | pad ids in Rust; hide padding by [`KeyMask::of_lengths`] and an ignored target |
//! | `utils.parameters_to_vector` | none: iterate over [`Layer::parameters`] |
//! | `utils.parametrizations.weight_norm` | compute the weight by ops, then call [`ops::linear`] |
//! | number of parameters | sum of `elem_count()` over [`Layer::weights`]; [`TransformerLM::num_parameters`] |
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use tallow::{Result, ops};
//!
//! /// Images (B, C, H, W) to the patches (B, N, C P P) that a linear layer embeds, as in a vision
//! /// transformer.
//! fn patches(x: &Tensor, p: usize) -> Result<Tensor> {
//!     let (b, c, h, w) = x.dims4()?;
//!     let grid = x.reshape((b, c, h / p, p, w / p, p))?.permute([0, 2, 4, 1, 3, 5])?;
//!     Ok(ops::contiguous(&grid)?.reshape((b, (h / p) * (w / p), c * p * p))?)
//! }
//!
//! let x = Tensor::randn(0f32, 1.0, (2, 3, 8, 4), &Device::Cpu)?;
//! let kernel = Tensor::randn(0f32, 1.0, (5, 3, 2, 2), &Device::Cpu)?; // (D, C, P, P)
//! let y = ops::linear(&patches(&x, 2)?, &kernel.reshape((5, 12))?)?; // (B, N, D)
//! // Candle's, stride 2.
//! let convolved = x.conv2d(&kernel, 0, 2, 1, 1)?.flatten_from(2)?.transpose(1, 2)?;
//! assert!((y - convolved)?.abs()?.max_all()?.to_scalar::<f32>()? < 1e-4);
//! # use tallow::graph::{self, Target};
//! # let x = graph::input("x", (2, 3, 8, 4), candle_core::DType::F32)?;
//! # graph::trace(Target::Cpu, || patches(&x, 2))?;
//! # Ok::<(), tallow::Error>(())
//! ```
//!
//! # `torch.nn.functional`
//!
//! | PyTorch | tallow |
//! |---|---|
//! | `linear` | [`ops::linear`], [`ops::linear_bias`]: weights are (out, in), as in PyTorch |
//! | `embedding` | [`ops::embedding`], which takes the ids first; `padding_idx`: [`ops::embedding_with_padding`] |
//! | `one_hot` | [`ops::one_hot`] |
//! | `softmax(x, -1)` | `ops::softmax(x, 1.0, Mask::Full)`: [`ops::softmax`] |
//! | `log_softmax(x, -1)` | [`ops::log_softmax`] |
//! | `softmax(x, dim)`, `log_softmax(x, dim)` | [`ops::softmax`] of a transposed view, transposed back |
//! | `softmin`, a temperature | [`ops::softmax`] with scale -1, or 1 / temperature |
//! | `gumbel_softmax` | candle's [`gumbel_softmax`] returns ids, without a gradient |
//! | `relu`, `silu`, `tanh`, `sigmoid` | [`ops::relu`], [`ops::silu`], [`ops::tanh`], [`ops::sigmoid`] |
//! | `gelu(x)`, `gelu(x, approximate="tanh")` | [`ops::gelu`] with [`Gelu::Erf`], [`Gelu::Tanh`] |
//! | `relu6`, `hardtanh` | [`ops::clamp`] |
//! | `logsigmoid` | [`ops::log_sigmoid`]; `softplus` is its negative of -x |
//! | `leaky_relu`, `elu`, `mish`, `glu` | [composed][f]; candle's [`Tensor::elu`] |
//! | `relu(x) ** 2` | [`ops::mul`] of [`ops::relu`] with itself |
//! | SwiGLU, GeGLU (Liger, xformers) | [`ops::swiglu`], [`ops::geglu`] |
//! | SwiGLU, GeGLU with their matmuls | [`ops::swiglu_linear`], [`ops::geglu_linear`] |
//! | logit soft-capping | [`ops::soft_cap`] |
//! | `dropout` | [`ops::dropout`], whose [`DropoutKey`] selects the elements |
//! | `layer_norm`, `rms_norm` | [`ops::layer_norm`], [`ops::rms_norm`]; Gemma's: [`ops::offset_rms_norm`] |
//! | `normalize`, `cosine_similarity` | [composed][f] |
//! | `cross_entropy` | [`ops::cross_entropy`]; targets are class ids |
//! | `cross_entropy(ignore_index=...)` | [`ops::cross_entropy_ignoring`] |
//! | `cross_entropy(label_smoothing, weight, reduction)` | [`ops::cross_entropy_with`], also a z-loss |
//! | fused linear cross-entropy (Liger) | [`ops::linear_cross_entropy`], [`ops::linear_cross_entropy_with`] |
//! | `nll_loss` | [`ops::cross_entropy`] of the logits, or of the log-probabilities: the result is the same |
//! | `mse_loss`, `l1_loss` | [`ops::mse_loss`], [`ops::l1_loss`] |
//! | `huber_loss`, `smooth_l1_loss` | [composed][f]: `huber` |
//! | `binary_cross_entropy_with_logits` | [`ops::bce_with_logits`] |
//! | `kl_div` | [`ops::kl_div`] |
//! | `cosine_embedding_loss` | [`ops::relu`] and [`ops::mean`] of `cosine_similarity` |
//! | `triplet_margin_loss` | [`ops::relu`] and [`ops::mean`] of `norm` |
//! | InfoNCE and other contrastive losses | [`ops::cross_entropy`] of [`ops::matmul_transposed`] of two `normalize`d sets |
//! | `ctc_loss` | none |
//! | `pad` | [`ops::concat`] with [`Tensor::zeros`] |
//! | `conv1d`, `conv2d` | candle's [`Tensor::conv1d`], [`Tensor::conv2d`] |
//! | `avg_pool2d`, `max_pool2d` | candle's [`Tensor::avg_pool2d`], [`Tensor::max_pool2d`]; backward: kernel = stride |
//! | `interpolate` | candle's [`Tensor::upsample_nearest2d`]; backward if factors are whole |
//!
//! ## Activations, norms and losses
//!
//! ```
//! use candle_core::{D, Device, Tensor};
//! use tallow::attention::Mask;
//! use tallow::{Result, ops};
//!
//! fn softplus(x: &Tensor) -> Result<Tensor> {
//!     ops::affine(&ops::log_sigmoid(&ops::affine(x, -1.0, 0.0)?)?, -1.0, 0.0)
//! }
//!
//! fn mish(x: &Tensor) -> Result<Tensor> {
//!     ops::mul(x, &ops::tanh(&softplus(x)?)?)
//! }
//!
//! fn leaky_relu(x: &Tensor, slope: f64) -> Result<Tensor> {
//!     ops::add_scaled(&ops::relu(x)?, &ops::relu(&ops::affine(x, -1.0, 0.0)?)?, -slope)
//! }
//!
//! fn elu(x: &Tensor, alpha: f64) -> Result<Tensor> {
//!     let below = ops::exp(&ops::clamp(x, f64::NEG_INFINITY, 0.0)?)?;
//!     ops::add(&ops::relu(x)?, &ops::affine(&below, alpha, -alpha)?)
//! }
//!
//! /// Of the halves of the last dimension.
//! fn glu(x: &Tensor) -> Result<Tensor> {
//!     let halves = x.chunk(2, D::Minus1)?;
//!     ops::mul(&halves[0], &ops::sigmoid(&halves[1])?)
//! }
//!
//! /// To norm 1 along the last dimension; a norm under 1e-12 counts as 1e-12.
//! fn normalize(x: &Tensor) -> Result<Tensor> {
//!     let squares = ops::sum_keepdim(&ops::mul(x, x)?, D::Minus1)?;
//!     ops::mul(x, &ops::rsqrt(&ops::clamp(&squares, 1e-24, f64::INFINITY)?)?)
//! }
//!
//! fn cosine_similarity(a: &Tensor, b: &Tensor) -> Result<Tensor> {
//!     ops::sum_over(&ops::mul(&normalize(a)?, &normalize(b)?)?, D::Minus1)
//! }
//!
//! /// `smooth_l1_loss` is `huber` divided by its `beta`, which is delta here.
//! fn huber(x: &Tensor, y: &Tensor, delta: f64) -> Result<Tensor> {
//!     let distance = ops::abs(&ops::sub(x, y)?)?;
//!     let near = ops::clamp(&distance, f64::NEG_INFINITY, delta)?;
//!     let far = ops::sub(&distance, &near)?;
//!     ops::mean(&ops::add_scaled(&ops::affine(&ops::pow(&near, 2.0)?, 0.5, 0.0)?, &far, delta)?)
//! }
//!
//! let row = |values: [f32; 2]| Tensor::new(&[values], &Device::Cpu); // (1, 2)
//! let check = |y: Tensor, expected: &[f32]| -> Result<()> {
//!     let y = y.flatten_all()?.to_vec1::<f32>()?;
//!     assert_eq!(y.len(), expected.len());
//!     assert!(y.iter().zip(expected).all(|(y, e)| (y - e).abs() < 1e-6), "{y:?}, not {expected:?}");
//!     Ok(())
//! };
//! check(softplus(&row([0.0, 2.0])?)?, &[0.6931472, 2.126928])?;
//! check(mish(&row([0.0, 1.0])?)?, &[0.0, 0.8650984])?;
//! check(leaky_relu(&row([-2.0, 3.0])?, 0.1)?, &[-0.2, 3.0])?;
//! check(elu(&row([-1.0, 2.0])?, 1.0)?, &[-0.6321206, 2.0])?;
//! check(glu(&row([3.0, 0.0])?)?, &[1.5])?;
//! check(normalize(&row([3.0, 4.0])?)?, &[0.6, 0.8])?;
//! check(normalize(&row([0.0, 0.0])?)?, &[0.0, 0.0])?;
//! check(cosine_similarity(&row([3.0, 4.0])?, &row([4.0, 3.0])?)?, &[0.96])?;
//! check(huber(&row([0.0, 3.0])?, &row([0.5, 0.0])?, 1.0)?, &[1.3125])?;
//!
//! // `softmax(x, 0)` by a transposed view, and `nll_loss` of log-probabilities by
//! // `ops::cross_entropy`.
//! let x = Tensor::new(&[[1f32, 5.0], [3.0, 5.0]], &Device::Cpu)?;
//! check(ops::softmax(&x.t()?, 1.0, Mask::Full)?.t()?, &[0.1192029, 0.5, 0.8807971, 0.5])?;
//! let log_p = ops::log_softmax(&row([1.0, 3.0])?)?;
//! check(ops::cross_entropy(&log_p, &Tensor::new(&[1u32], &Device::Cpu)?)?, &[0.126928])?;
//! # // Each of them can be traced too.
//! # use tallow::graph::{self, Target};
//! # use candle_core::DType;
//! # let (x, y) = (graph::input("x", (1, 2), DType::F32)?, graph::input("y", (1, 2), DType::F32)?);
//! # let unary: [fn(&Tensor) -> Result<Tensor>; 6] =
//! #     [softplus, mish, |x| leaky_relu(x, 0.1), |x| elu(x, 1.0), glu, normalize];
//! # let binary: [fn(&Tensor, &Tensor) -> Result<Tensor>; 2] = [cosine_similarity, |x, y| huber(x, y, 1.0)];
//! # for f in unary {
//! #     graph::trace(Target::Cpu, || f(&x))?;
//! # }
//! # for f in binary {
//! #     graph::trace(Target::Cpu, || f(&x, &y))?;
//! # }
//! # Ok::<(), tallow::Error>(())
//! ```
//!
//! ## Attention
//!
//! | PyTorch | tallow |
//! |---|---|
//! | `scaled_dot_product_attention` | [`attention::flash`], [`attention::naive`], with an [`AttentionConfig`] |
//! | `is_causal=True` | [`Mask::Causal`] |
//! | `attn_mask`, boolean | [`KeyMask::new`], in u8: 1 shows |
//! | `attn_mask`, float | [`ScoreBias`], with a gradient if it is tracked |
//! | `key_padding_mask` (true hides) | [`KeyMask::padding`] (1 shows) |
//! | `scale`, `dropout_p` | [`AttentionConfig::scale`], [`AttentionConfig::dropout`] |
//! | `enable_gqa=True` | nothing to set: k and v may have fewer heads than q |
//! | `nn.attention.sdpa_kernel` | [`Algorithm`], or a call of the one that you choose |
//! | `nn.attention.bias.causal_lower_right` | [`Mask::CausalEnd`] |
//! | FlexAttention: windows, documents, soft caps | [`Mask::Window`], [`FirstKeys`], [`AttentionConfig::soft_cap`] |
//! | FlexAttention: other `score_mod`, `mask_mod` | [`ScoreBias`], [`KeyMask`]: tensors, not functions |
//! | `flash_attn_varlen_func`, `cu_seqlens` | [`FirstKeys::of_lengths`], with sequences packed into one |
//! | `return_lse=True` | [`flash_with_lse`], [`naive_with_lse`] |
//! | a key/value cache | none |
//!
//! # `torch.optim`
//!
//! | PyTorch | tallow |
//! |---|---|
//! | `AdamW` | an [`Optimizer`] with [`AdamWConfig`], with PyTorch's defaults |
//! | `Adam` without weight decay | [`AdamWConfig`] with [`AdamWConfig::weight_decay`] 0 |
//! | `SGD` | [`SgdConfig`] |
//! | `Lion` of `lion-pytorch` | [`LionConfig`] |
//! | `Muon` | [`MuonConfig`], with the groups of [`muon_for_matrices`] |
//! | `Adafactor` | none |
//! | 8-bit Adam (bitsandbytes) | none; [`Moments::Bf16`] halves the memory of the state |
//! | `param_groups` | [`Optimizer::with_groups`]; no decay of biases and norms: [`decay_matrices_only`] |
//! | `optimizer.step()` | [`Optimizer::step`] |
//! | `optimizer.zero_grad()` | none: each [`backward`] returns new gradients |
//! | `state_dict()`, `load_state_dict()` | [`Optimizer::state`], [`Optimizer::load_state`] |
//! | `torch.save(optimizer.state_dict(), ...)` | [`Optimizer::save`], [`Optimizer::load`] |
//! | `group["lr"] = ...` | [`Optimizer::set_learning_rate`], [`Optimizer::set_learning_rate_of`] |
//! | `foreach`, `fused` | always: on a GPU one launch updates all parameters in f32 |
//! | `amsgrad`, `maximize`, `closure` | none; to maximize, negate the loss by [`ops::affine`] |
//! | an optimizer in backward | [`StepConfig::optimizer_in_backward`] |
//! | parameters that have no gradient | an error, unless [`MissingGradients::Skip`] |
//! | `swa_utils.AveragedModel` | composed, below |
//!
//! ```
//! use candle_core::{DType, Device};
//! use tallow::nn::{self, Layer, Linear};
//! use tallow::{no_grad, ops};
//!
//! let model = Linear::new(4, 2, nn::seeded(0, DType::F32, &Device::Cpu))?;
//! let averaged = Linear::new(4, 2, nn::seeded(1, DType::F32, &Device::Cpu))?;
//! // After each step of the optimizer: averaged = decay * averaged + (1 - decay) * model.
//! let decay = 0.75;
//! for ((_, average), (_, weight)) in averaged.parameters().iter().zip(model.parameters()) {
//!     average.set(&no_grad(|| {
//!         ops::add_scaled(&ops::affine(average, decay, 0.0)?, &weight, 1.0 - decay)
//!     })?)?;
//! }
//! # let first = nn::seeded(1, DType::F32, &Device::Cpu);
//! # let expected = ((Linear::new(4, 2, first)?.weight() * 0.75)? + (model.weight() * 0.25)?)?;
//! # assert!((averaged.weight() - expected)?.abs()?.max_all()?.to_scalar::<f32>()? < 1e-6);
//! # Ok::<(), tallow::Error>(())
//! ```
//!
//! ## `torch.optim.lr_scheduler`
//!
//! | PyTorch | tallow |
//! |---|---|
//! | `scheduler.step()` | before each step [`Optimizer::set_learning_rate`] with [`Schedule::learning_rate`] |
//! | `get_last_lr()` | [`Optimizer::learning_rate`] |
//! | `ConstantLR` | [`Schedule::Constant`] |
//! | `CosineAnnealingLR`, with `LinearLR` before it | [`Schedule::WarmupCosine`]; without warm-up `warmup_steps` is 0 |
//! | `LinearLR` | [`Schedule::Linear`] |
//! | `PolynomialLR(power=1)` | [`Schedule::WarmupLinear`] |
//! | `get_cosine_schedule_with_warmup` | [`Schedule::WarmupCosine`] with `min_lr` 0 |
//! | `get_linear_schedule_with_warmup` | [`Schedule::WarmupLinear`] with `min_lr` 0 |
//! | `LambdaLR`, `StepLR`, `ExponentialLR`, `OneCycleLR` | [`Optimizer::set_learning_rate`] with any function of the step |
//! | `CosineAnnealingWarmRestarts` | [`Schedule::CosineRestarts`] |
//! | warm-up-stable-decay | [`Schedule::WarmupStableDecay`] |
//! | `ReduceLROnPlateau` | [`Optimizer::set_learning_rate`] after an evaluation |
//!
//! # `torch.amp`
//!
//! | PyTorch | tallow |
//! |---|---|
//! | `autocast("cuda", torch.bfloat16)` | [`autocast`] with [`Autocast::cuda`] |
//! | `autocast("cpu", torch.bfloat16)` | [`autocast`] with [`Autocast::cpu`] |
//! | `autocast(enabled=False)` | [`autocast`] with [`Autocast::disabled`] |
//! | `cache_enabled` | [`Autocast::with_weight_cache`] |
//! | `is_autocast_enabled`, `get_autocast_dtype` | [`precision::current`], [`Autocast::compute_dtype`] |
//! | `custom_fwd(cast_inputs=...)` | [`ops::cast_for`]; another class for an op: [`Autocast::with`] |
//! | `GradScaler` | [`GradScaler`] |
//! | `scaler.scale(loss)`, `scaler.unscale_` | [`GradScaler::scale`], [`GradScaler::unscale`] |
//! | `scaler.step`, `scaler.update` | [`GradScaler::step`], [`GradScaler::update`] |
//! | `scaler.get_scale()` | [`GradScaler::loss_scale`] |
//! | `scaler.state_dict()`, `load_state_dict()` | [`GradScaler::state`], [`GradScaler::load_state`] |
//! | autocast of a compiled step | [`StepConfig::precision`] |
//! | loss scaling of a compiled step | [`StepConfig::loss_scaling`], [`Step::run_scaled`] |
//! | a model in pure bf16 | a `VarBuilder` in bf16; [`Regime::Full`] |
//!
//! # `torch.utils.checkpoint`
//!
//! | PyTorch | tallow |
//! |---|---|
//! | `checkpoint(f, x)` | [`nn::checkpoint`]: pass tensors that have a graph as inputs |
//! | `checkpoint_sequential` | [`Checkpointing::Every`], by [`TransformerLM::with_checkpointing`] |
//! | `use_reentrant`, `preserve_rng_state` | not needed: dropout draws the same elements again |
//! | selective checkpointing | [`StepConfig::memory_budget_bytes`]: a planned step recomputes as little as it must |
//! | which checkpointing fits | [`memory::recommend`], [`memory::least_memory_checkpointing`] |
//!
//! # `torch.utils.data`
//!
//! | PyTorch | tallow |
//! |---|---|
//! | `Dataset` of tokens | [`Tokens`]: [`Tokens::bytes`], [`Tokens::open`], [`Tokens::from_ids`], [`Tokens::encoded`] |
//! | a `Dataset` of yours | [`Batches`]: any batch by its index |
//! | `IterableDataset` | none: a batch has an index, so that a run resumes with the same data |
//! | `DataLoader(shuffle=True)` | [`RandomBatches`] |
//! | `DataLoader(shuffle=False)` | [`SequentialBatches`] |
//! | `random_split` | [`Tokens::split`] |
//! | `TensorDataset` | [`Tensor::narrow`] of the data along dimension 0 |
//! | `collate_fn`, `Sampler` | the `batch` of your [`Batches`] |
//! | `DistributedSampler` | [`Trainer`] divides batches; in your loop, batch `step * world_size + rank` |
//! | `num_workers`, `pin_memory` | none: windows are cut from a file or from memory when they are needed |
//! | `StatefulDataLoader` | the index is the state |
//!
//! # `torch.distributed`
//!
//! | PyTorch | tallow |
//! |---|---|
//! | `torchrun` | torchrun, `srun`, `mpirun`, or [`distributed::launch`] |
//! | `init_process_group` | [`distributed::init`] with a [`DistConfig`] |
//! | `destroy_process_group` | drop the [`Communicator`] |
//! | backends `nccl`, `mpi`, `gloo` | NCCL on GPUs, MPI on CPUs; in tests [`distributed::threads`] |
//! | `get_rank`, `get_world_size` | [`Communicator::rank`], [`Communicator::world_size`] |
//! | `all_reduce`, `reduce` | [`Communicator::all_reduce`], [`Communicator::reduce`], with a [`Reduce`] |
//! | `broadcast` | [`Communicator::broadcast`] |
//! | `all_gather_into_tensor` | [`Communicator::all_gather`] |
//! | `reduce_scatter_tensor` | [`Communicator::reduce_scatter`] |
//! | `barrier`, `monitored_barrier` | [`Communicator::barrier`]; a rank that fails is named in [`Error::Rank`] |
//! | timeouts | [`DistConfig::timeout`], [`Communicator::apply_timeout`] |
//! | `all_gather_object` | none; numbers: [`Communicator::mean`]; settings: [`Communicator::check_equal`] |
//! | `all_to_all`, `gather`, `scatter`, `send`, `recv` | none |
//! | `new_group`, `DeviceMesh`, `DTensor` | none: all ranks are one group |
//! | `DistributedDataParallel` | [`Replicated`], [`Trainer::replicate`] |
//! | `no_sync()` | [`GradientAccumulator`], then [`Replicated::average`]; planned: [`StepConfig::accumulation`] |
//! | `bucket_cap_mb` | [`Exchange::Overlapped`] |
//! | `bf16_compress_hook` | [`ReplicatedConfig::dtype`] |
//! | `find_unused_parameters=True` | [`Replicated::with_missing`] |
//! | `ZeroRedundancyOptimizer`, ZeRO stage 1 | [`Optimizer::shard`], [`Trainer::shard_optimizer`] |
//! | FSDP, `fully_shard`, ZeRO stage 3 | [`FullyShard`], [`Trainer::fully_sharded`], [`Step::fully_sharded`] |
//! | `MixedPrecisionPolicy` | [`StepConfig::precision`], [`FullyShardConfig::dtype`] |
//! | `summon_full_params`, `full_tensor()` | [`FullyShard::full_weight`], [`Trainer::gather_model`] |
//! | `CPUOffloadPolicy` | none |
//! | `distributed.checkpoint` | [`Trainer::save`], [`Trainer::resume`], [`Trainer::resume_fully_sharded`] |
//! | tensor and pipeline parallelism | none |
//! | `elastic`, `--max-restarts` | `torchrun --max-restarts`, and resume: see [`several_hosts`] |
//!
//! # `torch.compile`, `torch.fx`, `torch.export`
//!
//! | PyTorch | tallow |
//! |---|---|
//! | `torch.compile(model)` | [`Step::for_model`], [`Step::new`]: forward, loss, backward and update in one plan |
//! | a compiled forward | [`Step::forward`] |
//! | `fullgraph=True` | always; [what a step refuses] is an error that names the op |
//! | `dynamic=True` | a plan for each set of shapes; the last [`Step::MAX_PLANS`] are kept |
//! | `mode="reduce-overhead"`, `CUDAGraph` | always: on a GPU the second run is recorded as a CUDA graph |
//! | `mode="max-autotune"` | none |
//! | recompilations | [`Step::plans`], [`Step::evicted_plans`]; plan ahead by [`Step::prepare`] |
//! | guards on captured values | [`Step::constants`], [`StepConfig::retrace_every`] |
//! | `_dynamo.explain`, inductor's output code | [`Plan::explain`] |
//! | `compiler.disable` | call that part outside of the step |
//! | `fx.symbolic_trace`, `export.export` | [`graph::trace`] returns a [`Graph`], which can be read but not run |
//! | `fx.Node`, `print_tabular` | [`graph::Node`], [`profile::node_table`] |
//! | `FxGraphDrawer` | [`Graph::to_dot`] |
//! | `library.custom_op`, Triton kernels | none in a plan; eagerly candle's [`CustomOp1`] |
//! | `jit.script`, `jit.trace`, `onnx.export` | none |
//! | `utils.flop_counter.FlopCounterMode` | [`model::flops`], [`profile::node_costs`], [`Plan::flops`] |
//!
//! # `torch.profiler`
//!
//! | PyTorch | tallow |
//! |---|---|
//! | `profile(activities=[CPU])` | [`Profiler::start`], [`Profiler::finish`] |
//! | `profile(activities=[CPU, CUDA])` | [`Profiler::start_on`] |
//! | `record_function` | [`profile::range`], [`profile::phase`] |
//! | `prof.step()`, `schedule(wait, warmup, active)` | [`profile::step`]; start the profiler after the warm-up |
//! | `key_averages().table()` | [`ProfileReport`] with a [`Grouping`], [`ProfileReport::table`] |
//! | `export_chrome_trace` | [`Recording::save_trace`] |
//! | `export_stacks` | [`Recording::save_flame_graph`] |
//! | `with_flops=True` | always: [`Row::flops_per_s`] |
//! | `profile_memory=True` | [`memory::record_on`] |
//! | `emit_nvtx`, `cuda.nvtx.range` | [`profile::emit_nvtx`] passes on all ranges, also yours: [`profile::range`] |
//! | `cuda.Event`, `elapsed_time` | [`Stopwatch`]; of a planned step [`Step::time_phases`], [`Step::phase_times`] |
//! | `cuda.synchronize` | [`Device::synchronize`] |
//! | `utils.benchmark.Timer` | [`Stopwatch`] |
//!
//! # `torch.cuda`
//!
//! | PyTorch | tallow |
//! |---|---|
//! | `is_available`, `device_count` | [`device`] returns an error if there is no such GPU |
//! | `get_device_name`, `get_device_properties` | [`hardware::description`] |
//! | `set_device`, `current_device` | none: tensors are made on the device that you pass |
//! | `Stream`, `stream()` | none: a device has one stream |
//! | `manual_seed` | see `manual_seed` [above](#creation) |
//! | `backends.cuda.matmul.allow_tf32` | [`hardware::set_tf32`] |
//! | `use_deterministic_algorithms` | not needed: each op of tallow gives the same bits in every run |
//! | `set_num_threads` | the environment variable `RAYON_NUM_THREADS` |
//! | `memory_allocated`, `max_memory_allocated` | [`Meter::current_bytes`], [`Meter::peak_bytes`] |
//! | `max_memory_reserved` | [`Meter::reserved_peak_bytes`] |
//! | `reset_peak_memory_stats` | [`Meter::reset_peak`] |
//! | `mem_get_info` | [`hardware::available_bytes_on`] |
//! | `empty_cache` | none |
//! | `memory_summary` | [`memory::record_on`], then [`MemoryRecording::phase_report`] |
//! | `memory._record_memory_history`, `_dump_snapshot` | [`memory::record_on`], [`Snapshot`] |
//! | `OutOfMemoryError` | [`Error::OutOfMemory`] |
//! | `set_per_process_memory_fraction` | for a planned step [`StepConfig::memory_budget_bytes`] |
//! | memory before a run | [`memory::estimate`], [`memory::estimate_graph`], [`Step::plan_for`] |
//!
//! # Files and Hugging Face
//!
//! | PyTorch, `transformers` | tallow |
//! |---|---|
//! | `torch.save`, `torch.load` of weights | [`nn::save`], [`nn::load`]: safetensors with names as in `state_dict()` |
//! | a checkpoint of a run | [`Trainer::save`], [`Trainer::resume`]; in your loop [`nn::save`], [`Optimizer::save`] |
//! | `safetensors.torch.load_file` | a `VarBuilder` of the file, from which any layer is built |
//! | `output_hidden_states=True`, the last one | [`TransformerLM::hidden_states`]; [`TransformerLM::head`] makes logits of it |
//! | `AutoModelForCausalLM.from_pretrained` | [`hf::load`], after [`hf::find`]; nothing is downloaded |
//! | `save_pretrained` | [`hf::save`] |
//! | `AutoConfig` | [`hf::config`] |
//! | `AutoTokenizer` | [`hf::Tokenizer`] |
//! | `model.generate` | [`TransformerLM::generate`] with a [`GenerateConfig`] |
//! | `Trainer`, Lightning | [`Trainer`] with a [`TrainConfig`] |
//!
//! # candle's names
//!
//! ## Ops that fail in a trace
//!
//! A trace runs a function on [meta tensors], on which candle cannot compute. The error names the op and what to do
//! instead, in these words:
//!
//! | candle | instead |
//! |---|---|
//! | `+` or broadcast_add | call ops::add |
//! | `-` or broadcast_sub | call ops::sub |
//! | `*` or broadcast_mul | call ops::mul |
//! | `/` or broadcast_div | call ops::div |
//! | matmul or a linear layer | call ops::matmul, ops::matmul_transposed, ops::linear or an nn::Linear (nn::Linear::try_from) |
//! | `x * 2.0`, sum or mean | call ops::affine, ops::sum, ops::mean, ops::sum_over or ops::mean_over |
//! | max, min or softmax | call ops::max_over, ops::min_over, ops::argmax, ops::softmax or ops::logsumexp |
//! | softmax | call ops::softmax or ops::log_softmax |
//! | a function of each element | call ops::exp, log, pow, sqrt, rsqrt, abs, tanh, sigmoid, relu, gelu or silu |
//! | sigmoid | call ops::sigmoid |
//! | powf | call ops::pow |
//! | elu | call ops::gelu or ops::silu |
//! | maximum, minimum or clamp | call ops::clamp or ops::relu |
//! | a comparison | call ops::eq, ne, lt, le, gt or ge |
//! | where_cond | call ops::where_cond or ops::masked_fill |
//! | to_dtype | call ops::cast |
//! | contiguous, or reshape of a view | call ops::contiguous before reshape |
//! | cat, stack or pad | call ops::concat or ops::stack |
//! | a lookup by index | call ops::embedding, index_select, gather, index_add or scatter_add |
//! | a norm | call ops::rms_norm or ops::layer_norm, or build an nn::RmsNorm or nn::LayerNorm by try_from |
//! | a sort | call ops::topk, or sort before the trace and pass the result as an input |
//! | to_vec, to_scalar or another read of the elements | return the tensor from the function and read it after a run |
//!
//! Views are no obstacle, and neither is what candle computes before the trace.
//!
//! ## Layers and functions that autocast does not see
//!
//! Under [`autocast`] these compute in the dtype of their weights, and fail with "dtype mismatch" on the output of a
//! layer of tallow in the lower dtype. [`ops::cast_for`] casts the inputs of candle's ops. The fused ops, which have no
//! gradient either, are in [`coming_from_candle`].
//!
//! | candle | tallow |
//! |---|---|
//! | `Linear`, `linear`, `linear_no_bias`, `linear_b` | [`nn::Linear`]; `Linear::try_from` shares the weights |
//! | `Embedding`, `embedding` | [`nn::Embedding`]; of the same table [`Embedding::from_weight`] |
//! | `LayerNorm`, `RmsNorm` | [`nn::LayerNorm`], [`nn::RmsNorm`]: candle's have no gradient on contiguous inputs |
//! | `ops::silu`, `ops::swiglu`, `ops::sigmoid` | [`ops::silu`], [`ops::swiglu`], [`ops::sigmoid`] |
//! | `Activation`, `ops::mish`, ... | [`ops::gelu`], [`ops::relu`]; others are [composed][f] |
//! | `ops::softmax`, `ops::log_softmax` | [`ops::softmax`], [`ops::log_softmax`] over the last dimension |
//! | `ops::dropout`, `Dropout` | [`ops::dropout`], with a seed |
//! | `loss::cross_entropy`, `loss::nll` | [`ops::cross_entropy`] |
//! | `loss::mse`, `loss::binary_cross_entropy_with_logit` | [`ops::mse_loss`], [`ops::bce_with_logits`] |
//! | `loss::huber` | [composed][f] |
//! | `SGD` | [`Optimizer`] with [`SgdConfig`] |
//! | `AdamW`, `ParamsAdamW` | [`Optimizer`] with [`AdamWConfig`] |
//! | `Optimizer::backward_step` | [`backward`], then [`Optimizer::step`] |
//! | `VarMap`, `VarBuilder`, `Init`, `Module` | stay candle's; the variables for an optimizer: [`parameters_of`] |
//! | `Conv1d`, `Conv2d`, `BatchNorm`, `GroupNorm`, `LSTM`, `GRU` | stay candle's; [`ops::cast`] their input to f32 |
//! | `kv_cache`, quantized tensors | stay candle's; they are for inference |
//! | `Tensor::backward` | [`backward`] |
//! | `safetensors::save`, `VarMap::save`, `VarMap::load` | [`nn::save`], [`nn::load`] |
//! | `Device::new_cuda` | [`device`], which returns the same device for the same name |
//!
//! [composed]: #the-compositions
//! [f]: #activations-norms-and-losses
//! [meta tensors]: crate::graph#meta-tensors
//! [planned]: crate::compile
//! [traced]: crate::graph::trace()
//! [what a step refuses]: crate::compile#what-a-step-refuses
//! [`CustomOp1`]: candle_core::CustomOp1
//! [`CustomOp2`]: candle_core::CustomOp2
//! [`CustomOp3`]: candle_core::CustomOp3
//! [`Device::synchronize`]: candle_core::Device::synchronize
//! [`GradStore::get`]: candle_core::backprop::GradStore::get
//! [`IndexOp::i`]: candle_core::IndexOp::i
//! [`Init`]: candle_nn::Init
//! [`Init::Kaiming`]: candle_nn::Init::Kaiming
//! [`Sequential`]: candle_nn::Sequential
//! [`Tensor::arange`]: candle_core::Tensor::arange
//! [`Tensor::arange_step`]: candle_core::Tensor::arange_step
//! [`Tensor::arg_sort_last_dim`]: candle_core::Tensor::arg_sort_last_dim
//! [`Tensor::avg_pool2d`]: candle_core::Tensor::avg_pool2d
//! [`Tensor::broadcast_as`]: candle_core::Tensor::broadcast_as
//! [`Tensor::ceil`]: candle_core::Tensor::ceil
//! [`Tensor::chunk`]: candle_core::Tensor::chunk
//! [`Tensor::conv1d`]: candle_core::Tensor::conv1d
//! [`Tensor::conv2d`]: candle_core::Tensor::conv2d
//! [`Tensor::copy`]: candle_core::Tensor::copy
//! [`Tensor::cos`]: candle_core::Tensor::cos
//! [`Tensor::detach`]: candle_core::Tensor::detach
//! [`Tensor::device`]: candle_core::Tensor::device
//! [`Tensor::dim`]: candle_core::Tensor::dim
//! [`Tensor::dims`]: candle_core::Tensor::dims
//! [`Tensor::dtype`]: candle_core::Tensor::dtype
//! [`Tensor::elem_count`]: candle_core::Tensor::elem_count
//! [`Tensor::elu`]: candle_core::Tensor::elu
//! [`Tensor::erf`]: candle_core::Tensor::erf
//! [`Tensor::eye`]: candle_core::Tensor::eye
//! [`Tensor::flip`]: candle_core::Tensor::flip
//! [`Tensor::floor`]: candle_core::Tensor::floor
//! [`Tensor::from_vec`]: candle_core::Tensor::from_vec
//! [`Tensor::full`]: candle_core::Tensor::full
//! [`Tensor::get`]: candle_core::Tensor::get
//! [`Tensor::get_on_dim`]: candle_core::Tensor::get_on_dim
//! [`Tensor::max_all`]: candle_core::Tensor::max_all
//! [`Tensor::max_pool2d`]: candle_core::Tensor::max_pool2d
//! [`Tensor::meshgrid`]: candle_core::Tensor::meshgrid
//! [`Tensor::min_all`]: candle_core::Tensor::min_all
//! [`Tensor::narrow`]: candle_core::Tensor::narrow
//! [`Tensor::new`]: candle_core::Tensor::new
//! [`Tensor::ones`]: candle_core::Tensor::ones
//! [`Tensor::ones_like`]: candle_core::Tensor::ones_like
//! [`Tensor::permute`]: candle_core::Tensor::permute
//! [`Tensor::rand`]: candle_core::Tensor::rand
//! [`Tensor::randn`]: candle_core::Tensor::randn
//! [`Tensor::rank`]: candle_core::Tensor::rank
//! [`Tensor::read_npy`]: candle_core::Tensor::read_npy
//! [`Tensor::reshape`]: candle_core::Tensor::reshape
//! [`Tensor::round`]: candle_core::Tensor::round
//! [`Tensor::scatter`]: candle_core::Tensor::scatter
//! [`Tensor::sign`]: candle_core::Tensor::sign
//! [`Tensor::sin`]: candle_core::Tensor::sin
//! [`Tensor::slice_scatter`]: candle_core::Tensor::slice_scatter
//! [`Tensor::sort_last_dim`]: candle_core::Tensor::sort_last_dim
//! [`Tensor::squeeze`]: candle_core::Tensor::squeeze
//! [`Tensor::t`]: candle_core::Tensor::t
//! [`Tensor::to_device`]: candle_core::Tensor::to_device
//! [`Tensor::to_dtype`]: candle_core::Tensor::to_dtype
//! [`Tensor::to_scalar`]: candle_core::Tensor::to_scalar
//! [`Tensor::to_vec1`]: candle_core::Tensor::to_vec1
//! [`Tensor::transpose`]: candle_core::Tensor::transpose
//! [`Tensor::tril2`]: candle_core::Tensor::tril2
//! [`Tensor::triu2`]: candle_core::Tensor::triu2
//! [`Tensor::unsqueeze`]: candle_core::Tensor::unsqueeze
//! [`Tensor::upsample_nearest2d`]: candle_core::Tensor::upsample_nearest2d
//! [`Tensor::zeros`]: candle_core::Tensor::zeros
//! [`Tensor::zeros_like`]: candle_core::Tensor::zeros_like
//! [`Var`]: candle_core::Var
//! [`Var::from_tensor`]: candle_core::Var::from_tensor
//! [`Var::set`]: candle_core::Var::set
//! [`VarMap`]: candle_nn::VarMap
//! [`candle_nn::BatchNorm`]: candle_nn::BatchNorm
//! [`candle_nn::Conv1d`]: candle_nn::Conv1d
//! [`candle_nn::Conv2d`]: candle_nn::Conv2d
//! [`candle_nn::ConvTranspose2d`]: candle_nn::ConvTranspose2d
//! [`candle_nn::GRU`]: candle_nn::GRU
//! [`candle_nn::GroupNorm`]: candle_nn::GroupNorm
//! [`candle_nn::LSTM`]: candle_nn::LSTM
//! [`gumbel_softmax`]: candle_nn::sampling::gumbel_softmax

// The names of the links above.
#[cfg(all(doc, feature = "report", feature = "train"))]
use {
    super::{coming_from_candle, coming_from_pytorch, own_model, several_hosts},
    crate::attention::*,
    crate::bench::Stopwatch,
    crate::compile::{Plan, Step, StepConfig},
    crate::data::{Batches, RandomBatches, SequentialBatches, Tokens},
    crate::distributed::*,
    crate::graph::Graph,
    crate::memory::{MemoryRecording, Meter, Snapshot},
    crate::model::{GenerateConfig, TransformerLM},
    crate::nn::{Checkpointing, Embedding, ForwardContext, Layer, Linear, RopeScaling},
    crate::ops::{DropoutKey, Gelu},
    crate::optim::*,
    crate::precision::{Autocast, Regime},
    crate::profile::{Grouping, ProfileReport, Profiler, Recording, Row},
    crate::train::{TrainConfig, Trainer},
    crate::*,
};
