//! What must be run again for a step to fit.

use super::Workload;
use super::estimate::{check, check_some};
use super::walk::walk;
use crate::Result;
use crate::model::TransformerConfig;
use crate::nn::Checkpointing;
use std::num::NonZeroUsize;

/// The checkpointing with which `available_bytes` hold the workload at the least cost: it runs the fewest blocks again, and
/// among those that run as many, takes the least memory; `None` if not even the most frugal fits. The workload's own
/// checkpointing is of no account.
///
/// All but the last segment of blocks are run again, so long segments cost less and take more. Where the graph as a whole
/// fits, it is that ([`Checkpointing::None`]); then the graph let go of block by block, which costs no FLOPs either
/// ([`Checkpointing::Release`]); then segments.
///
/// ```
/// use tallow::memory::{Workload, recommend};
/// use tallow::model::TransformerConfig;
/// use tallow::nn::Checkpointing;
///
/// let config = TransformerConfig { context_length: 1024, ..TransformerConfig::medium() };
/// let workload = Workload { batch_size: 4, sequence_length: 1024, ..Default::default() };
/// let within = |gib: u64| recommend(&config, &workload, gib << 30);
/// assert_eq!(within(64)?, Some(Checkpointing::None));
/// assert_eq!(within(8)?, Some(Checkpointing::Block));
/// assert_eq!(within(7)?, None); // weights, gradients and AdamW's two alone are 6.3 GiB
/// for gib in [12, 16, 24] {
///     let strategy = within(gib)?.unwrap();
///     println!("{gib} GiB: {strategy}, {} of 24 blocks run again", strategy.recomputed_blocks(24));
/// }
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// As [`estimate`](super::estimate()).
pub fn recommend(
    config: &TransformerConfig,
    workload: &Workload,
    available_bytes: u64,
) -> Result<Option<Checkpointing>> {
    check(config, workload)?;
    check_some("batch_size", workload.batch_size)?;
    check_some("sequence_length", workload.sequence_length)?;
    let layers = config.num_layers;
    let fits = |checkpointing| {
        let workload = Workload {
            checkpointing,
            ..workload.clone()
        };
        let peak_bytes = walk(config, &workload).peak_bytes;
        (peak_bytes <= available_bytes as f64).then_some(peak_bytes)
    };
    let free = [Checkpointing::None, Checkpointing::Release];
    if let Some(strategy) = free.into_iter().find(|strategy| fits(*strategy).is_some()) {
        return Ok(Some(strategy));
    }
    let mut best: Option<(usize, f64, Checkpointing)> = None;
    for strategy in segments(layers) {
        let again = strategy.recomputed_blocks(layers);
        if best.is_some_and(|(fewest, ..)| again > fewest) {
            continue;
        }
        if let Some(peak_bytes) = fits(strategy)
            && best.is_none_or(|(fewest, least, _)| (again, peak_bytes) < (fewest, least))
        {
            best = Some((again, peak_bytes, strategy));
        }
    }
    Ok(best.map(|(_, _, strategy)| strategy))
}

/// By segments of every length that leaves something to run again.
fn segments(layers: usize) -> impl Iterator<Item = Checkpointing> {
    let lengths = (1..layers).filter_map(NonZeroUsize::new);
    lengths.map(|blocks| match blocks.get() {
        1 => Checkpointing::Block,
        _ => Checkpointing::Every(blocks),
    })
}
