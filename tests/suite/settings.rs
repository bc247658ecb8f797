//! Configurations with one setting of a test, and defaults otherwise.

use candle_core::DType;
use tallow::attention::{AttentionConfig, Mask};
use tallow::compile::StepConfig;
use tallow::model::LoadOptions;
use tallow::optim::{AdamWConfig, GradScaler, GradScalerConfig};
use tallow::precision::Precision;

pub fn in_precision(precision: Precision) -> StepConfig {
    StepConfig {
        precision,
        ..Default::default()
    }
}

pub fn with_mask(mask: Mask) -> AttentionConfig {
    AttentionConfig {
        mask,
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
