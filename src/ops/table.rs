//! The list of this module's ops.

use super::info::OpInfo;

/// Returns every op of this module.
pub(crate) fn infos() -> impl Iterator<Item = &'static OpInfo> {
    let several = [
        super::matmul::INFOS,
        super::softmax::INFOS,
        super::heads::INFOS,
        super::activation::INFOS,
        super::gated::INFOS,
        super::gated_linear::INFOS,
        super::cast::INFOS,
        super::arithmetic::INFOS,
        super::elementwise::INFOS,
        super::reduce::INFOS,
        super::extremes::INFOS,
        super::compare::INFOS,
        super::select::INFOS,
        super::index::INFOS,
        super::record::INFOS,
    ];
    let single = [
        &super::linear::INFO,
        &super::linear_bias::INFO,
        &super::linear_cross_entropy::INFO,
        &super::cross_entropy::INFO,
        &super::rms_norm::INFO,
        &super::rms_norm::OFFSET_INFO,
        &super::layer_norm::INFO,
        &super::rope::INFO,
        &super::embedding::INFO,
        &super::soft_cap::INFO,
        &super::dropout::INFO,
        &super::relu::INFO,
        &super::repeat_heads::INFO,
        &super::concat::INFO,
        &super::topk::INFO,
    ];
    single.into_iter().chain(several.into_iter().flatten())
}
