//! Parsers of flags' values. Every example refuses values that no run can use while it parses its flags.

use clap::builder::{PathBufValueParser, RangedU64ValueParser, TypedValueParser};
use std::ops::RangeBounds;
use std::path::PathBuf;

/// The largest number of steps, passes or rounds. Each leaves a sample in memory.
const MOST: u64 = 1_000_000_000;

/// The smallest number above 0.
const OVER_0: f64 = f64::MIN_POSITIVE;

/// Returns the parser of a number of repetitions, at least 1.
pub fn count() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=MOST)
}

/// Returns the parser of a number of repetitions, which may be 0.
pub fn count_from_0() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(0..=MOST)
}

/// Parses an amount of memory in GiB; the smallest, 0.000001, is about 1 KiB.
pub fn gib(text: &str) -> Result<f64, String> {
    let expected = "a number of GiB from 0.000001 to 1000000000";
    number(text, expected, 1e-6..=1e9)
}

/// The time limit of a measurement in ms; `None` for no limit.
#[derive(Clone, Copy, Debug)]
pub struct TimeBudget(pub Option<f64>);

pub fn time_budget(text: &str) -> Result<TimeBudget, String> {
    if text == "none" {
        return Ok(TimeBudget(None));
    }
    let expected = "a number of ms from 0.001 to 1000000000, or none";
    number(text, expected, 1e-3..=1e9).map(|ms| TimeBudget(Some(ms)))
}

/// Parses a number from 0, such as a learning rate, weight decay, norm or temperature.
pub fn from_0(text: &str) -> Result<f64, String> {
    number(text, "a finite number, at least 0", 0.0..=f64::MAX)
}

/// Parses a number above 0, such as a rate or an amount.
pub fn over_0(text: &str) -> Result<f64, String> {
    number(text, "a finite number over 0", OVER_0..=f64::MAX)
}

/// Parses a fraction between 0 and 1, both excluded.
pub fn part(text: &str) -> Result<f64, String> {
    number(text, "a number over 0 and under 1", OVER_0..1.0)
}

/// A share that leaves something, as that of a running mean.
pub fn under_1(text: &str) -> Result<f64, String> {
    number(text, "a number from 0 to under 1", 0.0..1.0)
}

/// Parses a cumulative probability, above 0 and at most 1.
pub fn probability(text: &str) -> Result<f64, String> {
    number(text, "a number over 0 and at most 1", OVER_0..=1.0)
}

fn number(text: &str, expected: &str, range: impl RangeBounds<f64>) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number| range.contains(number));
    number.ok_or_else(|| format!("must be {expected}"))
}

/// Returns the parser of a picture's path, whose extension selects the format.
pub fn picture() -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().try_map(|path: PathBuf| {
        let ending = path.extension().unwrap_or_default().to_ascii_lowercase();
        match ending.to_str() {
            Some("svg") => Ok(path),
            Some("png") if cfg!(feature = "png") => Ok(path),
            Some("png") => {
                Err("this build draws no PNG: name an .svg, or build with --features png")
            }
            _ => Err("a picture's name ends in .svg or .png"),
        }
    })
}
