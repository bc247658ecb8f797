//! How fast something grows.

use serde::Serialize;

/// `y = coefficient * x^exponent`, fitted to measurements: 2 is what quadratic growth looks like.
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
    /// The slope in log y over log x.
    pub exponent: f64,
    /// y at x = 1.
    pub coefficient: f64,
    /// How many points it was fitted to.
    pub points: usize,
}

impl PowerLaw {
    /// The line of least squares through (log x, log y).
    ///
    /// `None` for fewer than three different x, since a line goes through any two points and would say nothing about
    /// the growth. Points whose x or y is not finite and positive are left out.
    pub fn fit(points: &[(f64, f64)]) -> Option<Self> {
        let usable = |value: f64| value.is_finite() && value > 0.0;
        let logs: Vec<(f64, f64)> = points
            .iter()
            .filter(|(x, y)| usable(*x) && usable(*y))
            .map(|(x, y)| (x.ln(), y.ln()))
            .collect();
        let mut different: Vec<f64> = logs.iter().map(|(x, _)| *x).collect();
        different.sort_by(f64::total_cmp);
        different.dedup();
        if different.len() < 3 {
            return None;
        }
        let n = logs.len() as f64;
        let mean_x = logs.iter().map(|(x, _)| x).sum::<f64>() / n;
        let mean_y = logs.iter().map(|(_, y)| y).sum::<f64>() / n;
        let covariance: f64 = logs.iter().map(|(x, y)| (x - mean_x) * (y - mean_y)).sum();
        let variance: f64 = logs.iter().map(|(x, _)| (x - mean_x).powi(2)).sum();
        let exponent = covariance / variance;
        Some(Self {
            exponent,
            coefficient: (mean_y - exponent * mean_x).exp(),
            points: logs.len(),
        })
    }
}
