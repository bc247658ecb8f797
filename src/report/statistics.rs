//! Mean, deviation and median of timings, speedups, and power-law fits of growth.

use std::collections::HashSet;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::Fields;
use super::column::NOT_AVAILABLE;
use super::words::{decimals_of, fixed, group};
use crate::{Error, Result};

/// Summary statistics of samples in milliseconds.
///
/// Statistics that cannot be computed are `None` (`null` in JSON, `n/a` in tables), never 0. The result does not depend
/// on the order of the samples, not even in the last bit.
///
/// ```
/// use tallow::report::Statistics;
///
/// let times = Statistics::new(&[12.0, 10.0, 11.0, 15.0])?;
/// assert_eq!(times.mean_ms, 12.0);
/// assert_eq!(times.median_ms, 11.5);
/// assert_eq!(Statistics::new(&[12.0])?.std_ms, None); // one sample has no spread
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Statistics {
    /// The number of samples.
    pub n: usize,
    /// Arithmetic mean.
    pub mean_ms: f64,
    /// Sample standard deviation, `sqrt(sum((x - mean)^2) / (n - 1))`; `None` for one sample.
    pub std_ms: Option<f64>,
    /// The smallest sample.
    pub min_ms: f64,
    /// The largest sample.
    pub max_ms: f64,
    /// The middle sample, or the mean of the two in the middle.
    pub median_ms: f64,
    /// Coefficient of variation, `100 * std / |mean|`; `None` for one sample or a mean of zero.
    pub cv_percent: Option<f64>,
}

impl Statistics {
    /// Computes the statistics of `samples_ms`, in any order.
    ///
    /// # Errors
    /// [`Error::Data`] if there are no samples, or one is NaN or infinite.
    pub fn new(samples_ms: &[f64]) -> Result<Self> {
        if samples_ms.is_empty() {
            return Err(Error::data("statistics", "none")
                .must_be("at least one sample", "measure at least one step"));
        }
        if let Some(position) = samples_ms.iter().position(|x| !x.is_finite()) {
            let got = format!("{} at position {position}", samples_ms[position]);
            return Err(Error::data("statistics", got)
                .must_be("finite samples", "leave out what could not be measured"));
        }

        let mut sorted_ms = samples_ms.to_vec();
        sorted_ms.sort_by(f64::total_cmp);
        let n = sorted_ms.len();
        let (min_ms, max_ms) = (sorted_ms[0], sorted_ms[n - 1]);

        // Summing the distances from the minimum keeps equal samples exact.
        let mean_ms = min_ms + sorted_ms.iter().map(|x| x - min_ms).sum::<f64>() / n as f64;
        let mean_ms = mean_ms.clamp(min_ms, max_ms);
        let std_ms = (n > 1).then(|| {
            let squares: f64 = sorted_ms.iter().map(|x| (x - mean_ms).powi(2)).sum();
            (squares / (n - 1) as f64).sqrt()
        });
        let cv_percent = std_ms
            .filter(|_| mean_ms != 0.0)
            .map(|std| 100.0 * std / mean_ms.abs());

        Ok(Self {
            n,
            mean_ms,
            std_ms,
            min_ms,
            max_ms,
            median_ms: f64::midpoint(sorted_ms[(n - 1) / 2], sorted_ms[n / 2]),
            cv_percent,
        })
    }

    /// Returns the public fields under their own names, for a row of a [`Report`](super::Report).
    pub fn fields(&self) -> Fields {
        Fields::of(self).unwrap_or_default()
    }
}

/// Mean and standard deviation with three or four digits of the mean: `9.14 ± 0.38`.
impl fmt::Display for Statistics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |ms| group(&fixed(ms, decimals_of(self.mean_ms)));
        let std = self.std_ms.map_or(NOT_AVAILABLE.into(), text);
        write!(f, "{} ± {std}", text(self.mean_ms))
    }
}

/// The speedup of one timing over another: the ratio of their means, with its error.
///
/// `ratio = mean_before / mean_after`. Its standard error follows from those of the means by first-order propagation:
/// `ratio * sqrt((s_b / m_b)^2 / n_b + (s_a / m_a)^2 / n_a)`. The interval is two standard errors either way, about
/// 95%.
///
/// ```
/// use tallow::report::{Speedup, Statistics, Verdict};
///
/// let eager = Statistics::new(&[10.0, 10.1, 9.9, 10.0])?;
/// let planned = Statistics::new(&[5.0, 5.1, 4.9, 5.0])?;
/// let speedup = Speedup::new(&eager, &planned).expect("several samples each");
/// assert_eq!(speedup.ratio, 2.0);
/// assert_eq!(speedup.verdict(), Verdict::Faster);
/// assert_eq!(speedup.to_string(), "2.00x");
///
/// let noisy = Statistics::new(&[5.0, 25.0, 4.9, 5.0])?;
/// let unclear = Speedup::new(&eager, &noisy).expect("several samples each");
/// assert_eq!(unclear.verdict(), Verdict::Unclear);
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Speedup {
    /// The mean before divided by the mean after: 2 is twice as fast.
    pub ratio: f64,
    /// Two standard errors of the ratio.
    pub error: f64,
}

/// The conclusion from a [`Speedup`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The ratio is clear, and its interval is entirely above 1.
    Faster,
    /// The ratio is clear, and its interval is entirely below 1.
    Slower,
    /// The ratio is clear, and its interval contains 1.
    Equal,
    /// The ratio is not [clear](Speedup::is_clear): one outlier is enough for that. More steps or a quieter machine
    /// help.
    Unclear,
}

impl Speedup {
    /// The largest error, as a fraction of the ratio, at which the ratio alone is printed.
    pub const CLEAR: f64 = 0.2;

    /// Compares two timings; `None` if either has one sample, or a mean that is not positive.
    pub fn new(before: &Statistics, after: &Statistics) -> Option<Self> {
        let relative = |of: &Statistics| Some((of.std_ms? / of.mean_ms).powi(2) / of.n as f64);
        let ratio = before.mean_ms / after.mean_ms;
        let error = 2.0 * ratio * (relative(before)? + relative(after)?).sqrt();
        let is_positive = before.mean_ms > 0.0 && after.mean_ms > 0.0;
        let is_usable = is_positive && ratio.is_finite() && error.is_finite();
        is_usable.then_some(Self { ratio, error })
    }

    /// Returns whether the error is at most [`CLEAR`](Self::CLEAR) times the ratio.
    pub fn is_clear(&self) -> bool {
        self.error <= Self::CLEAR * self.ratio
    }

    /// Returns what the interval shows.
    pub fn verdict(&self) -> Verdict {
        let (low, high) = (self.ratio - self.error, self.ratio + self.error);
        match self.is_clear() {
            true if low > 1.0 => Verdict::Faster,
            true if high < 1.0 => Verdict::Slower,
            true => Verdict::Equal,
            false => Verdict::Unclear,
        }
    }
}

/// `1.24x`, or `between 0.9x and 1.6x` if the ratio is not clear.
impl fmt::Display for Speedup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (low, high) = (self.ratio - self.error, self.ratio + self.error);
        match self.is_clear() {
            true => write!(f, "{:.2}x", self.ratio),
            false => write!(f, "between {:.1}x and {high:.1}x", low.max(0.0)),
        }
    }
}

/// `y = coefficient * x^exponent`, fitted to measurements; quadratic growth has the exponent 2.
///
/// ```
/// use tallow::report::PowerLaw;
///
/// let law = PowerLaw::fit(&[(256.0, 3.0), (1024.0, 48.0), (4096.0, 768.0)]).expect("three points");
/// assert!((law.exponent - 2.0).abs() < 1e-12);
/// assert_eq!(law.points, 3);
/// assert_eq!(PowerLaw::fit(&[(256.0, 3.0), (1024.0, 48.0)]), None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PowerLaw {
    /// The slope of log y over log x.
    pub exponent: f64,
    /// y at x = 1.
    pub coefficient: f64,
    /// The number of points in the fit.
    pub points: usize,
    /// R^2 of the line: the fraction of the variance of log y that it explains; 1 for points on a line.
    pub r_squared: f64,
}

impl PowerLaw {
    /// Fits a line through (log x, log y) by least squares.
    ///
    /// Returns `None` for fewer than three different x: a line fits any two points, so it would not show how y grows.
    /// Points are ignored unless both x and y are finite and positive.
    pub fn fit(points: &[(f64, f64)]) -> Option<Self> {
        let usable = |value: f64| value.is_finite() && value > 0.0;
        let logs: Vec<(f64, f64)> = points
            .iter()
            .filter(|(x, y)| usable(*x) && usable(*y))
            .map(|(x, y)| (x.ln(), y.ln()))
            .collect();
        let different: HashSet<u64> = logs.iter().map(|(x, _)| x.to_bits()).collect();
        if different.len() < 3 {
            return None;
        }
        let n = logs.len() as f64;
        let mean_x = logs.iter().map(|(x, _)| x).sum::<f64>() / n;
        let mean_y = logs.iter().map(|(_, y)| y).sum::<f64>() / n;
        let distances = logs.iter().map(|(x, y)| (x - mean_x, y - mean_y));
        let covariance: f64 = distances.clone().map(|(x, y)| x * y).sum();
        let variance: f64 = distances.clone().map(|(x, _)| x.powi(2)).sum();
        let total: f64 = distances.map(|(_, y)| y.powi(2)).sum();
        let exponent = covariance / variance;
        let explained = exponent * covariance;
        Some(Self {
            exponent,
            coefficient: (mean_y - exponent * mean_x).exp(),
            points: logs.len(),
            r_squared: if total > 0.0 { explained / total } else { 1.0 },
        })
    }

    /// Returns whether R^2 is at least 0.95, so that the exponent is worth reporting.
    pub fn fits(&self) -> bool {
        self.r_squared >= 0.95
    }
}
