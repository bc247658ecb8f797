//! Cross-entropy with class weights, and of probabilities, composed of other ops.

use super::{CrossEntropyConfig, check, cross_entropy_with};
use crate::grad::no_grad;
use crate::ops::arithmetic::{add, add_scaled, div, mul};
use crate::ops::cast::cast;
use crate::ops::compare::eq;
use crate::ops::dispatch::check_one_device;
use crate::ops::elementwise::affine;
use crate::ops::index::gather_checked;
use crate::ops::linear::last_dim;
use crate::ops::loss::Reduction;
use crate::ops::operand::{check_size, check_supported};
use crate::ops::reduce::{log_softmax, sum, sum_over};
use crate::ops::select::masked_fill;
use crate::ops::statistics::logsumexp;
use crate::probe::Operand;
use crate::{Error, Result};
use candle_core::{D, Tensor};

const OP: &str = "cross_entropy";

/// Computes the loss of targets whose classes have weights.
pub(super) fn weighted(
    logits: &Tensor,
    targets: &Tensor,
    weights: &Tensor,
    config: &CrossEntropyConfig,
) -> Result<Tensor> {
    let (smoothing, z_loss) = (config.label_smoothing, config.z_loss);
    let classes = last_dim(OP, logits)?;
    let weights = &checked_weights(logits, weights, classes)?;
    // Several ops read the logits then: widened once for all, their gradient is rounded once.
    let wide = match smoothing > 0.0 || z_loss > 0.0 {
        true => Some(cast(logits, weights.dtype())?),
        false => None,
    };
    let logits = wide.as_ref().unwrap_or(logits);
    let of_rows = CrossEntropyConfig {
        reduction: Reduction::None,
        ignore_index: config.ignore_index,
        ..Default::default()
    };
    let checked = check(logits, targets, config)?; // a mean of ignored targets only is an error
    let of_targets = |table: &Tensor| -> Result<Tensor> {
        let (table, ids) = (table.reshape((1, classes))?, &checked.ids);
        let weights = gather_checked(
            &table,
            1,
            ids,
            &[1, targets.elem_count()],
            config.ignore_index,
        )?;
        Ok(weights.reshape(targets.shape())?)
    };
    let of_target = no_grad(|| of_targets(weights))?; // 0 for ignored ones
    let mut losses = mul(&cross_entropy_with(logits, targets, &of_rows)?, &of_target)?;
    if let Some(wide) = &wide {
        let mut others = None;
        if smoothing > 0.0 {
            let smooth = sum_over(&mul(&log_softmax(wide)?, weights)?, D::Minus1)?;
            losses = affine(&losses, 1.0 - smoothing, 0.0)?;
            others = Some(affine(&smooth, -smoothing / classes as f64, 0.0)?);
        }
        if z_loss > 0.0 {
            let term = affine(&squared_lse(wide)?, z_loss, 0.0)?;
            others = Some(match others {
                Some(others) => add(&others, &term)?,
                None => term,
            });
        }
        if let Some(others) = others {
            // Ignored rows have no effect, not even NaN.
            let is_ignored = no_grad(|| {
                let counts = of_targets(&affine(weights, 0.0, 1.0)?)?;
                eq(&counts, &affine(&counts, 0.0, 0.0)?)
            })?;
            losses = add(&losses, &masked_fill(&others, &is_ignored, 0.0)?)?;
        }
    }
    match config.reduction {
        Reduction::None => Ok(losses),
        Reduction::Sum => sum(&losses),
        Reduction::Mean => div(&sum(&losses)?, &sum(&of_target)?),
    }
}

/// Computes the loss of targets that are probabilities of the classes.
pub(super) fn of_probabilities(
    logits: &Tensor,
    targets: &Tensor,
    config: &CrossEntropyConfig,
) -> Result<Tensor> {
    check_supported(OP, logits)?;
    check_supported(OP, targets)?;
    let classes = last_dim(OP, logits)?;
    if logits.dims() != targets.dims() {
        let got = format!(
            "targets {:?} in {}",
            targets.dims(),
            targets.dtype().as_str()
        );
        return Err(Error::shape(OP, got).must_be(
            format!("probabilities of the logits' shape, {:?}", logits.dims()),
            "class ids are u32 or i64, one for each row",
        ));
    }
    if let Some(id) = config.ignore_index {
        return Err(
            Error::config("CrossEntropyConfig", "ignore_index", id).must_be(
                "None for targets that are probabilities",
                "a row of zeros has no loss",
            ),
        );
    }
    check_one_device(OP, ("logits", logits), ("targets", targets))?;
    check_size(OP, logits.dims(), logits.dtype(), logits.device())?;
    let dtype = Operand::from(logits).wide_dtype();
    let (wide, targets) = (cast(logits, dtype)?, cast(targets, dtype)?);
    let smoothing = config.label_smoothing;
    let targets = match smoothing > 0.0 {
        true => affine(&targets, 1.0 - smoothing, smoothing / classes as f64)?,
        false => targets,
    };
    let mut terms = mul(&targets, &log_softmax(&wide)?)?;
    if let Some(weights) = &config.class_weights {
        terms = mul(&terms, &checked_weights(logits, weights, classes)?)?;
    }
    let mut losses = affine(&sum_over(&terms, D::Minus1)?, -1.0, 0.0)?;
    if config.z_loss > 0.0 {
        losses = add_scaled(&losses, &squared_lse(&wide)?, config.z_loss)?;
    }
    config.reduction.of(OP, &losses)
}

/// Returns the weights of the classes in the dtype of the loss.
fn checked_weights(logits: &Tensor, weights: &Tensor, classes: usize) -> Result<Tensor> {
    check_supported(OP, logits)?;
    check_supported(OP, weights)?;
    if weights.dims() != [classes] {
        return Err(
            Error::shape(OP, format!("class_weights {:?}", weights.dims())).must_be(
                format!("class_weights [{classes}]"),
                "one weight for each class",
            ),
        );
    }
    check_one_device(OP, ("logits", logits), ("class_weights", weights))?;
    no_grad(|| cast(weights, Operand::from(logits).wide_dtype()))
}

fn squared_lse(wide: &Tensor) -> Result<Tensor> {
    let lse = logsumexp(wide, D::Minus1)?;
    mul(&lse, &lse)
}
