//! What must be run again for a step to fit.

use super::model;
use super::workload::{check_pass, optimizer_state};
use super::{Mode, Workload};
use crate::model::TransformerConfig;
use crate::nn::Checkpointing;
use crate::{Error, Result};
use std::iter::successors;
use std::num::NonZeroUsize;

/// The checkpointing with which `available_bytes` hold the workload at the least cost.
///
/// It recomputes the fewest blocks, and among those that recompute as many, takes the least memory; `None` if not even
/// the most frugal fits. The workload's own checkpointing is not read.
///
/// All but the last segment of blocks are recomputed, so long segments cost less and take more. Where the graph as a
/// whole fits, it is that ([`Checkpointing::None`]); then segments, of every length up to 256 blocks and of lengths
/// 1/128 apart beyond.
///
/// ```
/// use tallow::memory::{Workload, recommend};
/// use tallow::model::TransformerConfig;
/// use tallow::nn::Checkpointing;
///
/// let config = TransformerConfig { context_length: 1024, ..TransformerConfig::medium() };
/// let workload = Workload { batch_size: 4, sequence_length: 1024, ..Default::default() };
/// let within = |gib: u64| recommend(&config, &workload, gib << 30);
/// assert_eq!(within(24)?, Some(Checkpointing::None));
/// assert_eq!(within(8)?.map(|strategy| strategy.recomputed_blocks(24)), Some(22)); // every-2
/// assert_eq!(within(7)?, None); // weights, gradients and AdamW's two alone are 6.3 GiB
/// for gib in [10, 12, 16] {
///     let strategy = within(gib)?.unwrap();
///     println!("{gib} GiB: {strategy}, {} of 24 blocks run again", strategy.recomputed_blocks(24));
/// }
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// As [`estimate`](crate::memory::estimate()).
pub fn recommend(
    config: &TransformerConfig,
    workload: &Workload,
    available_bytes: u64,
) -> Result<Option<Checkpointing>> {
    check_pass(config, workload)?;
    let layers = config.num_layers;
    if least_bytes(config, workload) > available_bytes as f64 {
        return Ok(None);
    }
    let fits = |checkpointing| {
        let peak_bytes = peak(config, workload, checkpointing)?;
        Ok::<_, Error>((peak_bytes <= available_bytes as f64).then_some(peak_bytes))
    };
    if fits(Checkpointing::None)?.is_some() {
        return Ok(Some(Checkpointing::None));
    }
    let mut best: Option<(usize, f64, Checkpointing)> = None;
    for strategy in segments(layers) {
        let again = strategy.recomputed_blocks(layers);
        if best.is_some_and(|(fewest, ..)| again > fewest) {
            continue;
        }
        if let Some(peak_bytes) = fits(strategy)?
            && best.is_none_or(|(fewest, least, _)| (again, peak_bytes) < (fewest, least))
        {
            best = Some((again, peak_bytes, strategy));
        }
    }
    Ok(best.map(|(_, _, strategy)| strategy))
}

/// The checkpointing that takes the least memory of those that [`recommend`] tries, whatever it costs, and its peak in
/// bytes.
///
/// ```
/// use tallow::memory::{Workload, most_frugal, recommend};
/// use tallow::model::TransformerConfig;
///
/// let config = TransformerConfig::medium();
/// let workload = Workload { batch_size: 4, sequence_length: 256, ..Default::default() };
/// let (_, peak_bytes) = most_frugal(&config, &workload)?;
/// assert!(recommend(&config, &workload, peak_bytes)?.is_some());
/// assert_eq!(recommend(&config, &workload, peak_bytes - 1)?, None);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// As [`estimate`](crate::memory::estimate()).
pub fn most_frugal(
    config: &TransformerConfig,
    workload: &Workload,
) -> Result<(Checkpointing, u64)> {
    check_pass(config, workload)?;
    let mut best = (Checkpointing::None, f64::INFINITY);
    for strategy in [Checkpointing::None]
        .into_iter()
        .chain(segments(config.num_layers))
    {
        let peak_bytes = peak(config, workload, strategy)?;
        if peak_bytes < best.1 {
            best = (strategy, peak_bytes);
        }
    }
    Ok((best.0, best.1 as u64)) // saturates
}

fn peak(
    config: &TransformerConfig,
    workload: &Workload,
    checkpointing: Checkpointing,
) -> Result<f64> {
    let workload = Workload {
        checkpointing,
        ..workload.clone()
    };
    model::peak_bytes(config, &workload)
}

/// What no checkpointing changes: weights, and as far as the mode has them gradients and the optimizer's state.
fn least_bytes(config: &TransformerConfig, workload: &Workload) -> f64 {
    let width = workload.precision.parameter_dtype().size_in_bytes();
    let gradients = match workload.mode.has_backward() {
        true => width,
        false => 0,
    };
    let state = match workload.mode {
        Mode::TrainStep => {
            let state = optimizer_state(width, workload.moments);
            let widths: usize = state.map(|(_, width)| width).sum();
            widths as f64 * config.num_parameters() as f64
        }
        _ => 0.0,
    };
    config.num_parameters() as f64 * (width + gradients) as f64 + state
}

/// By segments that leave something to run again: of every length up to 256 blocks, of lengths 1/128 apart beyond.
fn segments(layers: usize) -> impl Iterator<Item = Checkpointing> {
    let lengths = successors(Some(1), |length: &usize| {
        Some(length + (length / 128).max(1))
    });
    let lengths = lengths.take_while(move |length| *length < layers);
    lengths
        .filter_map(NonZeroUsize::new)
        .map(|blocks| match blocks.get() {
            1 => Checkpointing::Block,
            _ => Checkpointing::Every(blocks),
        })
}
