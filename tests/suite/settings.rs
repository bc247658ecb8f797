//! Configurations with one setting of a test, and defaults otherwise.

use candle_core::DType;
use candle_nn::VarBuilder;
use tallow::attention::{Algorithm, AttentionConfig, Mask};
use tallow::compile::StepConfig;
use tallow::model::{LoadOptions, TransformerConfig, TransformerLM};
use tallow::nn::AttentionLayerConfig;
use tallow::optim::{AdamWConfig, GradScaler, GradScalerConfig};
use tallow::precision::Precision;

pub fn in_precision(precision: Precision) -> StepConfig {
    StepConfig {
        precision,
        ..Default::default()
    }
}

/// Returns a meta model of this configuration with this attention.
pub fn meta_of(config: &TransformerConfig, attention: Algorithm) -> TransformerLM {
    let model = TransformerLM::meta(config).unwrap();
    model.with_attention(attention).unwrap()
}

/// Returns a meta model with weights.
pub fn with_weights(meta: &TransformerLM, weights: VarBuilder<'_>) -> TransformerLM {
    let model = TransformerLM::from_var_builder(meta.config(), weights).unwrap();
    let model = model.with_attention(meta.attention()).unwrap();
    model.with_checkpointing(meta.checkpointing())
}

pub fn with_mask(mask: Mask) -> AttentionConfig {
    AttentionConfig {
        mask,
        ..Default::default()
    }
}

/// Returns the configuration of causal attention with heads of dimension D / H.
pub fn causal(d_model: usize, num_heads: usize) -> AttentionLayerConfig {
    AttentionLayerConfig {
        d_model,
        num_heads,
        mask: Mask::Causal,
        ..Default::default()
    }
}

pub fn with_lr(lr: f64) -> AdamWConfig {
    AdamWConfig {
        lr,
        ..Default::default()
    }
}

pub fn loaded_as(dtype: DType) -> LoadOptions {
    LoadOptions {
        dtype,
        ..Default::default()
    }
}

pub fn scaler_from(init_scale: f64) -> GradScaler {
    let config = GradScalerConfig {
        init_scale,
        ..Default::default()
    };
    GradScaler::new(config).unwrap()
}
