//! The lists of PyTorch 2.15 by op name (ATen/autocast_mode.h and autocast_mode.cpp, both policies).
//!
//! An op on no list follows its inputs. The names of this crate's ops on the lists are at the end.

/// The ops of CUDA's policy in lower precision; names are separated by spaces, as in all lists.
pub(super) const CUDA_LOWER: &str = "\
    addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d \
    conv_transpose2d conv_transpose3d convolution einsum gru_cell linalg_multi_dot linalg_vecdot linear \
    lstm_cell matmul mm mv prelu rnn_relu_cell rnn_tanh_cell scaled_dot_product_attention";

/// The ops of CUDA's policy in f32, including those with an output dtype of f32 (softmax, sum, ...) and
/// cross_entropy_loss, which PyTorch composes of log_softmax and nll_loss. rms_norm is on PyTorch's list but not here:
/// see [`rms_norm`](crate::ops::rms_norm()).
pub(super) const CUDA_F32: &str = "\
    acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss cosine_similarity cumprod \
    cumsum dist erfinv exp expm1 frobenius_norm group_norm hinge_embedding_loss huber_loss kl_div l1_loss \
    layer_norm linalg_matrix_norm linalg_vector_norm log log10 log1p log2 log_softmax logsumexp \
    margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss nll_loss nll_loss2d norm \
    nuclear_norm pdist poisson_nll_loss pow prod reciprocal renorm rsqrt sinh smooth_l1_loss \
    soft_margin_loss softmax softplus sum tan triplet_margin_loss upsample_bicubic2d upsample_bilinear2d \
    upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d \
    cross_entropy_loss";

pub(super) const CUDA_WIDEST: &str = "\
    addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot";

pub(super) const CPU_LOWER: &str = "\
    addbmm addmm baddbmm bmm conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d \
    conv_transpose3d linalg_vecdot linear matmul mm prelu scaled_dot_product_attention";

pub(super) const CPU_F32: &str = "\
    adaptive_avg_pool3d avg_pool3d binary_cross_entropy binary_cross_entropy_with_logits cdist \
    cholesky_inverse cholesky_solve cosine_embedding_loss cross_entropy_loss ctc_loss fft_fft fft_fft2 \
    fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_irfft fft_irfft2 fft_irfftn fft_rfft \
    fft_rfft2 fft_rfftn geqrf grid_sampler hinge_embedding_loss huber_loss inverse kl_div l1_loss \
    linalg_cholesky linalg_cond linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh \
    linalg_householder_product linalg_inv linalg_lstsq linalg_matrix_rank linalg_qr linalg_solve linalg_svd \
    linalg_svdvals linalg_tensorinv linalg_tensorsolve lu_solve margin_ranking_loss max_pool3d max_unpool2d \
    max_unpool3d mse_loss multi_margin_loss multilabel_margin_loss nanquantile nll_loss nll_loss2d orgqr \
    ormqr pinverse poisson_nll_loss polar prod quantile reflection_pad1d reflection_pad2d replication_pad1d \
    replication_pad2d replication_pad3d smooth_l1_loss soft_margin_loss stft svd trace triangular_solve \
    triplet_margin_loss view_as_complex";

pub(super) const CPU_WIDEST: &str = "\
    cat index_copy stack";

/// This crate's ops with other names on the lists. A fused op has the class of its matmuls.
const OWN_AS: [(&str, &str); 14] = [
    ("add_scaled", "add"),
    ("attention::flash", "scaled_dot_product_attention"),
    ("attention::naive", "scaled_dot_product_attention"),
    ("bce_with_logits", "binary_cross_entropy_with_logits"),
    ("concat", "cat"),
    ("cross_entropy", "cross_entropy_loss"),
    ("geglu_linear", "linear"),
    ("gelu_tanh", "gelu"),
    ("linear_bias", "linear"),
    ("linear_cross_entropy", "linear"),
    ("masked_softmax", "softmax"),
    ("matmul_transposed", "matmul"),
    ("offset_rms_norm", "rms_norm"),
    ("swiglu_linear", "linear"),
];

/// This crate's ops that are looked up by their own names.
const OWN: &str = "\
    abs add affine clamp div dropout embedding eq exp gather ge geglu gelu gt index_add layer_norm le linear log \
    log_sigmoid log_softmax lt masked_fill matmul max mean merge_heads min mul ne pow relu repeat_heads rms_norm rope rsqrt \
    scatter_add sigmoid silu soft_cap softmax split_heads sqrt sub sum swiglu tanh topk where_cond";

/// Returns this crate's ops with their names on the lists.
pub(super) fn own() -> impl Iterator<Item = (&'static str, &'static str)> {
    let same = OWN.split_whitespace().map(|op| (op, op));
    same.chain(OWN_AS)
}
