//! Estimates inverted: the largest batch, the longest sequence and the cheapest checkpointing that fit in memory.

use super::workload::{check, check_pass, check_some, lifetimes, optimizer_state};
use super::{Mode, Workload};
use crate::Result;
use crate::model::TransformerConfig;
use crate::nn::Checkpointing;
use std::iter::{once, successors};
use std::num::NonZeroUsize;

/// A quarter of all sizes. The bytes of larger token tensors do not fit in 64 bits.
const LARGEST: usize = usize::MAX / 4 + 1;

/// Returns the largest batch size that fits in `available_bytes`, or `None` if one sequence does not fit. The
/// workload's own batch size is ignored.
///
/// ```
/// use tallow::memory::{Workload, largest_batch_size};
/// use tallow::model::TransformerConfig;
/// use tallow::precision::Precision;
///
/// let f32 = Workload { sequence_length: 512, ..Default::default() };
/// let bf16 = Workload { precision: Precision::BF16, ..f32.clone() };
/// let config = TransformerConfig { context_length: 512, ..TransformerConfig::preset("small")? };
/// assert_eq!(largest_batch_size(&config, &f32, 16 << 30)?, Some(21));
/// assert_eq!(largest_batch_size(&config, &bf16, 16 << 30)?, Some(28));
/// // Weights, gradients and AdamW's two are 2 GiB.
/// assert_eq!(largest_batch_size(&config, &bf16, 1 << 30)?, None);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Those of [`estimate`](crate::memory::estimate()).
pub fn largest_batch_size(
    config: &TransformerConfig,
    workload: &Workload,
    available_bytes: u64,
) -> Result<Option<usize>> {
    check(config, workload)?;
    check_some("sequence_length", workload.sequence_length)?;
    let mut workload = workload.clone();
    largest(|batch_size| {
        workload.batch_size = batch_size;
        Ok(peak_bytes(config, &workload)? <= available_bytes as f64)
    })
}

/// Returns the smallest T that does not fit in `available_bytes`. The workload's own T and the configuration's context
/// length are ignored.
///
/// ```
/// use tallow::attention::Algorithm;
/// use tallow::memory::{Workload, smallest_sequence_not_fitting};
/// use tallow::model::TransformerConfig;
///
/// let naive = Workload { batch_size: 4, ..Default::default() };
/// let flash = Workload { attention: Algorithm::Flash, ..naive.clone() };
/// let config = TransformerConfig::preset("small")?;
/// // Kernels' scratch grows with the threads: with two, 1,806 and 3,475.
/// assert!((1_600..1_850).contains(&smallest_sequence_not_fitting(&config, &naive, 16 << 30)?));
/// assert!((3_300..3_550).contains(&smallest_sequence_not_fitting(&config, &flash, 16 << 30)?));
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Those of [`estimate`](crate::memory::estimate()).
pub fn smallest_sequence_not_fitting(
    config: &TransformerConfig,
    workload: &Workload,
    available_bytes: u64,
) -> Result<usize> {
    check(config, workload)?;
    check_some("batch_size", workload.batch_size)?;
    let mut workload = workload.clone();
    let largest = largest(|sequence_length| {
        workload.sequence_length = sequence_length;
        Ok(peak_bytes(config, &workload)? <= available_bytes as f64)
    })?;
    Ok(largest.unwrap_or(0) + 1)
}

/// Returns the largest size whose peak fits in `available_bytes`, or `None` if size 1 does not fit. The size may be a
/// batch size, a length, or anything else whose peak does not shrink as it grows.
///
/// ```
/// use tallow::compile::{Batch, Step, StepConfig, Target};
/// use tallow::memory::largest_that_fits;
/// use tallow::model::{TransformerConfig, TransformerLM};
///
/// // The largest batch of planned steps on a GPU, which need not be there.
/// let model = TransformerLM::meta(&TransformerConfig::preset("small")?)?;
/// let batch_size = largest_that_fits(8 << 30, |batch_size| {
///     let batch = Batch::meta(batch_size, 256)?;
///     let (plan, _) = Step::plan_for_model(Target::Cuda, &model, &StepConfig::default(), batch)?;
///     Ok(plan.total_bytes())
/// })?;
/// assert!(batch_size.is_some_and(|batch_size| batch_size > 8));
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Those of `peak_bytes`.
pub fn largest_that_fits(
    available_bytes: u64,
    peak_bytes: impl Fn(usize) -> Result<u64>,
) -> Result<Option<usize>> {
    largest(|size| Ok(peak_bytes(size)? <= available_bytes))
}

/// Returns the largest size that fits, by bisection: if a size fits, all smaller ones do.
fn largest(mut fits: impl FnMut(usize) -> Result<bool>) -> Result<Option<usize>> {
    let mut largest = 0; // known to fit
    let mut beyond = 1;
    while fits(beyond)? {
        if beyond >= LARGEST {
            return Ok(Some(LARGEST - 1));
        }
        largest = beyond;
        beyond *= 2;
    }
    while beyond - largest > 1 {
        let middle = largest + (beyond - largest) / 2;
        match fits(middle)? {
            true => largest = middle,
            false => beyond = middle,
        }
    }
    Ok(Some(largest).filter(|size| *size > 0))
}

/// Returns the peak, in f64: sums of bytes beyond 64 bits do not overflow.
fn peak_bytes(config: &TransformerConfig, workload: &Workload) -> Result<f64> {
    Ok(lifetimes(config, workload)?.1.peak_bytes)
}

/// Returns the cheapest checkpointing with which the workload fits in `available_bytes`, or `None` if none fits. The
/// workload's own checkpointing is ignored.
///
/// The cheapest recomputes the fewest blocks and, of those equal in this, needs the least memory. All but the last
/// segment of blocks are recomputed, so long segments cost less time and need more memory. If the whole graph fits, the
/// result is [`Checkpointing::None`]. Otherwise segments are tried: of every length up to 256 blocks, and of lengths
/// 1/128 apart beyond.
///
/// ```
/// use tallow::memory::{Workload, recommend};
/// use tallow::model::TransformerConfig;
/// use tallow::nn::Checkpointing;
///
/// let config = TransformerConfig { context_length: 1024, ..TransformerConfig::preset("medium")? };
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
/// Those of [`estimate`](crate::memory::estimate()).
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
    let mut workload = workload.clone();
    let mut best: Option<(usize, f64, Checkpointing)> = None;
    for strategy in strategies(layers) {
        let again = strategy.recomputed_blocks(layers);
        if best.is_some_and(|(fewest, ..)| again > fewest) {
            continue;
        }
        workload.checkpointing = strategy;
        let peak_bytes = peak_bytes(config, &workload)?;
        if peak_bytes <= available_bytes as f64
            && best.is_none_or(|(fewest, least, _)| (again, peak_bytes) < (fewest, least))
        {
            best = Some((again, peak_bytes, strategy));
        }
    }
    Ok(best.map(|(_, _, strategy)| strategy))
}

/// Returns the checkpointing that needs the least memory of those that [`recommend`] tries, whatever its cost, and its
/// peak in bytes.
///
/// ```
/// use tallow::memory::{Workload, least_memory_checkpointing, recommend};
/// use tallow::model::TransformerConfig;
///
/// let config = TransformerConfig::preset("medium")?;
/// let workload = Workload { batch_size: 4, sequence_length: 256, ..Default::default() };
/// let (_, peak_bytes) = least_memory_checkpointing(&config, &workload)?;
/// assert!(recommend(&config, &workload, peak_bytes)?.is_some());
/// assert_eq!(recommend(&config, &workload, peak_bytes - 1)?, None);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Those of [`estimate`](crate::memory::estimate()).
pub fn least_memory_checkpointing(
    config: &TransformerConfig,
    workload: &Workload,
) -> Result<(Checkpointing, u64)> {
    check_pass(config, workload)?;
    let mut workload = workload.clone();
    let mut best = (Checkpointing::None, f64::INFINITY);
    for strategy in strategies(config.num_layers) {
        workload.checkpointing = strategy;
        let peak_bytes = peak_bytes(config, &workload)?;
        if peak_bytes < best.1 {
            best = (strategy, peak_bytes);
        }
    }
    Ok((best.0, best.1 as u64)) // saturates
}

/// Returns the bytes that no checkpointing changes: weights and, depending on the mode, gradients and the optimizer's
/// state.
fn least_bytes(config: &TransformerConfig, workload: &Workload) -> f64 {
    let dtype = workload.precision.parameter_dtype();
    let width = dtype.size_in_bytes();
    let gradients = match workload.mode.has_backward() {
        true => width,
        false => 0,
    };
    let state = match workload.mode {
        Mode::TrainStep => {
            let state = optimizer_state(config, &workload.optimizer, dtype).into_iter();
            state
                .map(|(_, elements, width)| elements * width as f64)
                .sum()
        }
        _ => 0.0,
    };
    config.num_parameters() as f64 * (width + gradients) as f64 + state
}

/// Yields no checkpointing, then segments that leave something to recompute: of every length up to 256 blocks, and of
/// lengths 1/128 apart beyond.
fn strategies(layers: usize) -> impl Iterator<Item = Checkpointing> {
    let longer = |length: &usize| Some(length + (length / 128).max(1));
    let lengths = successors(Some(1), longer).take_while(move |length| *length < layers);
    let segments = lengths
        .filter_map(NonZeroUsize::new)
        .map(|blocks| match blocks.get() {
            1 => Checkpointing::Block,
            _ => Checkpointing::Every(blocks),
        });
    once(Checkpointing::None).chain(segments)
}
