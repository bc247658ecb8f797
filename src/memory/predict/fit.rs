//! What fits: the estimate asked the other way round.

use super::Workload;
use super::model::peak_bytes;
use super::workload::{check, check_some};
use crate::Result;
use crate::model::TransformerConfig;

/// A quarter of all sizes: no 64 bits count the bytes of as many tokens.
const LARGEST: usize = usize::MAX / 4 + 1;

/// The largest batch that `available_bytes` hold; `None` if not even one sequence fits. The workload's own batch size
/// is not read.
///
/// ```
/// use tallow::memory::{Workload, largest_batch_size};
/// use tallow::model::TransformerConfig;
/// use tallow::precision::Precision;
///
/// let f32 = Workload { sequence_length: 512, ..Default::default() };
/// let bf16 = Workload { precision: Precision::BF16, ..f32.clone() };
/// let config = TransformerConfig { context_length: 512, ..TransformerConfig::small() };
/// assert_eq!(largest_batch_size(&config, &f32, 16 << 30)?, Some(21));
/// assert_eq!(largest_batch_size(&config, &bf16, 16 << 30)?, Some(28));
/// assert_eq!(largest_batch_size(&config, &bf16, 1 << 30)?, None); // weights, gradients and AdamW's two are 2 GiB
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// As [`estimate`](crate::memory::estimate()).
pub fn largest_batch_size(
    config: &TransformerConfig,
    workload: &Workload,
    available_bytes: u64,
) -> Result<Option<usize>> {
    check(config, workload)?;
    check_some("sequence_length", workload.sequence_length)?;
    largest(|batch_size| {
        let workload = Workload {
            batch_size,
            ..workload.clone()
        };
        Ok(peak_bytes(config, &workload)? <= available_bytes as f64)
    })
}

/// The smallest T that `available_bytes` do not hold. The workload's own T and the configuration's context length are
/// of no breakdown.
///
/// ```
/// use tallow::attention::Algorithm;
/// use tallow::memory::{Workload, smallest_sequence_beyond};
/// use tallow::model::TransformerConfig;
///
/// let naive = Workload { batch_size: 4, ..Default::default() };
/// let flash = Workload { attention: Algorithm::Flash, ..naive.clone() };
/// let config = TransformerConfig::small();
/// // Kernels' scratch grows with the threads: with two, 1,806 and 3,475.
/// assert!((1_600..1_850).contains(&smallest_sequence_beyond(&config, &naive, 16 << 30)?));
/// assert!((3_300..3_550).contains(&smallest_sequence_beyond(&config, &flash, 16 << 30)?));
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// As [`estimate`](crate::memory::estimate()).
pub fn smallest_sequence_beyond(
    config: &TransformerConfig,
    workload: &Workload,
    available_bytes: u64,
) -> Result<usize> {
    check(config, workload)?;
    check_some("batch_size", workload.batch_size)?;
    let largest = largest(|sequence_length| {
        let workload = Workload {
            sequence_length,
            ..workload.clone()
        };
        Ok(peak_bytes(config, &workload)? <= available_bytes as f64)
    })?;
    Ok(largest.unwrap_or(0) + 1)
}

/// The largest size, of a batch, a length or anything of which more takes no less, whose peak `available_bytes` hold;
/// `None` if theirs of size 1 is beyond.
///
/// ```
/// use tallow::compile::{Batch, Step, StepConfig, Target};
/// use tallow::memory::largest_that_fits;
/// use tallow::model::TransformerConfig;
///
/// // The largest batch of planned steps on a GPU, which need not be there.
/// let config = TransformerConfig::small();
/// let batch_size = largest_that_fits(8 << 30, |batch_size| {
///     let batch = Batch::hollow(batch_size, 256)?;
///     let (plan, _) = Step::plan_of(Target::Cuda, &config, &StepConfig::default(), batch)?;
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

/// The largest size from 1 on that fits, as all before it do.
fn largest(fits: impl Fn(usize) -> Result<bool>) -> Result<Option<usize>> {
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
