//! Measuring several runs in turns, for comparison.

use super::{EndToEnd, EndToEndRow, Status, Step};
use crate::Result;
use candle_core::Device;

/// Measures runs in turns: each run once a round, for `rounds` rounds. Changes of the machine (clock frequency, other
/// work) then affect all runs alike.
///
/// Each run gets the rows of [`EndToEnd::run`], over the samples of all rounds: `rounds` times its `steps`. Memory is
/// that of the last round, because in the first one kernels also allocate what they keep until the process ends. Every
/// round initializes and warms up a new model. `on_step` is called after every step with the run's index in `runs`. 0
/// rounds count as 1.
///
/// ```
/// use tallow::bench::{EndToEnd, alternate};
/// use tallow::memory::Mode;
/// use tallow::model::TransformerConfig;
/// use tallow::precision::Precision;
///
/// let run = EndToEnd {
///     config: TransformerConfig {
///         vocab_size: 50, context_length: 8, d_model: 16, num_layers: 1, num_heads: 2, d_ff: 32,
///         ..Default::default()
///     },
///     batch_size: 2,
///     sequence_length: 8,
///     mode: Mode::ForwardBackward,
///     warmup_steps: 1,
///     steps: 3,
///     ..Default::default()
/// };
/// let runs = [run.clone(), EndToEnd { step: Precision::BF16.into(), ..run }];
/// let rows = alternate(&runs, 2, &tallow::device("cpu")?, |_, _, _| ())?;
/// let [f32_rows, bf16_rows] = &rows[..] else { unreachable!() };
/// assert_eq!(f32_rows[0].statistics().map(|times| times.n), Some(6));
/// assert_eq!(bf16_rows[0].precision, Precision::BF16);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Those of [`EndToEnd::run`].
pub fn alternate(
    runs: &[EndToEnd],
    rounds: usize,
    device: &Device,
    mut on_step: impl FnMut(usize, Step, f64),
) -> Result<Vec<Vec<EndToEndRow>>> {
    let predicted = runs.iter().map(|run| run.predict(device));
    let predicted = predicted.collect::<Result<Vec<_>>>()?.into_iter();
    let mut turns: Vec<_> = runs
        .iter()
        .zip(predicted)
        .map(|turn| (turn, None))
        .collect();
    for _ in 0..rounds.max(1) {
        for (i, ((run, row), measured)) in turns.iter_mut().enumerate() {
            if row.status == Status::OutOfMemory {
                continue;
            }
            match run.measure(device, |step, ms| on_step(i, step, ms)) {
                Err(error) if error.is_out_of_memory() => row.set_out_of_memory(&error, device),
                round => match measured {
                    None => *measured = Some(round?),
                    Some(earlier) => earlier.join(round?),
                },
            }
        }
    }
    let rows = turns
        .into_iter()
        .map(|((run, row), measured)| match measured {
            Some(measured) if row.status == Status::Ok => run.rows(&row, &measured),
            _ => Ok(vec![row]),
        });
    rows.collect()
}
