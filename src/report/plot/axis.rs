//! Axes: their range, their ticks and the tick labels.

use crate::report::words::{fixed, group};
use std::iter::once;

const MAX_LOG_TICKS: usize = 9;

const LINEAR_TICKS: f64 = 6.0;

/// A fitted axis. Positions on it are the values, or their decimal logarithms if the axis is logarithmic.
pub(super) struct Axis {
    log: bool,
    /// The first and the last position, which always differ.
    low: f64,
    high: f64,
    /// The pixels of these positions.
    pixels: (f64, f64),
    /// The values that have ticks, with their labels.
    pub ticks: Vec<(f64, String)>,
}

impl Axis {
    /// Returns the axis between two pixels that spans `values`: at least one value, all finite, positive if `log`.
    /// `has_room` adds some space at both ends, so that no line touches the frame, but none below zero if no value is
    /// negative.
    pub fn fit(
        values: impl Iterator<Item = f64>,
        log: bool,
        has_room: bool,
        pixels: (f64, f64),
    ) -> Self {
        let mut values: Vec<f64> = values.collect();
        values.sort_by(f64::total_cmp);
        values.dedup();
        let ends = [values.first(), values.last()];
        let [first, last] = ends.map(|end| end.map_or(0.0, |value| position(*value, log)));
        // A single value gets an axis around it.
        let margin = match first == last {
            false => 0.0,
            true if log => 0.5,
            true if first == 0.0 => 1.0,
            true => first.abs() / 2.0,
        };
        let (mut low, mut high) = (first - margin, last + margin);
        if has_room {
            let room = (high - low) * 0.05;
            (low, high) = (low - room, high + room);
            if !log && first >= 0.0 {
                low = low.max(0.0);
            }
        }
        let ticks = match log {
            true => log_ticks(values, low, high),
            false => linear_ticks(low, high),
        };
        Self {
            log,
            low,
            high,
            pixels,
            ticks,
        }
    }

    /// Returns the pixel of a value.
    pub fn pixel(&self, value: f64) -> f64 {
        let share = (position(value, self.log) - self.low) / (self.high - self.low);
        let pixel = self.pixels.0 + share * (self.pixels.1 - self.pixels.0);
        f64::from(pixel.round() as i32) // a number even for NaN
    }
}

fn position(value: f64, log: bool) -> f64 {
    if log { value.log10() } else { value }
}

/// Returns ticks at the values themselves if these are few integers and far enough apart (256, 1024, 4096 are more
/// useful than 100, 1000), else at round numbers, or as on a linear axis if there would be fewer than three.
fn log_ticks(values: Vec<f64>, low: f64, high: f64) -> Vec<(f64, String)> {
    let apart = (high - low) / (1.5 * MAX_LOG_TICKS as f64);
    let few = (2..=MAX_LOG_TICKS).contains(&values.len());
    let whole = values.iter().all(|value| value.fract() == 0.0);
    let mut pairs = values.windows(2);
    let spread = pairs.all(|pair| pair[1].log10() - pair[0].log10() >= apart);
    let ticks = match few && whole && spread {
        true => values,
        false => round_numbers(low, high),
    };
    match ticks.is_empty() {
        true => linear_ticks(10f64.powf(low), 10f64.powf(high)),
        false => ticks.into_iter().map(|t| (t, label(t, t))).collect(),
    }
}

/// Returns the most detailed readable list of round numbers between two logarithms: 1, 2 and 5, powers of ten, or only
/// some of these. It is empty if there are fewer than three.
fn round_numbers(low: f64, high: f64) -> Vec<f64> {
    let exponents = (low.floor() as i32)..=(high.ceil() as i32);
    let numbers = |digits: &[f64], stride: usize| -> Vec<f64> {
        let powers = exponents.clone().map(|exponent| 10f64.powi(exponent));
        let numbers = powers.flat_map(|power| digits.iter().map(move |digit| digit * power));
        let inside = numbers.filter(|number| (low..=high).contains(&number.log10()));
        inside.step_by(stride).collect()
    };
    let powers = (1..=exponents.clone().count()).map(|stride| numbers(&[1.0], stride));
    let mut lists = once(numbers(&[1.0, 2.0, 5.0], 1)).chain(powers);
    let readable = lists.find(|numbers| numbers.len() <= MAX_LOG_TICKS);
    readable
        .filter(|numbers| numbers.len() > 2)
        .unwrap_or_default()
}

/// Returns ticks at multiples of 1, 2 or 5 times a power of ten.
fn linear_ticks(low: f64, high: f64) -> Vec<(f64, String)> {
    let rough = (high - low) / LINEAR_TICKS;
    let magnitude = 10f64.powf(rough.log10().floor());
    let steps = [1.0, 2.0, 5.0].map(|factor| factor * magnitude);
    let step = steps.into_iter().find(|step| *step >= rough);
    let step = step.unwrap_or(10.0 * magnitude);
    // Adding up steps would accumulate rounding: 0.30000000000000004 for 0.3.
    let first = (low / step).ceil();
    (0..=(2.0 * LINEAR_TICKS) as usize)
        .map(|index| (first + index as f64) * step)
        .take_while(|tick| *tick <= high + step * 1e-9)
        .map(|tick| (tick, label(tick, step)))
        .collect()
}

/// Formats a tick with the decimals down to the first digit of `step`. Very large and very small ticks get an exponent.
fn label(tick: f64, step: f64) -> String {
    let decimals = (-step.log10() - 1e-9).ceil().max(0.0) as usize;
    match (1e-4..1e7).contains(&tick.abs().max(step)) {
        true => group(&fixed(tick, decimals)),
        false => {
            let digits = format!("{tick:.3e}").parse();
            format!("{:e}", digits.unwrap_or(tick))
        }
    }
}
