//! How the flags' values are read. What no run can mean is refused as the flags are parsed, by every example alike.

use clap::builder::{PathBufValueParser, RangedU64ValueParser, TypedValueParser};
use std::path::PathBuf;

/// The most that a number of steps, passes or rounds may be. Each leaves a sample in memory.
const MOST: u64 = 1_000_000_000;

/// How often something is done.
pub fn count() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=MOST)
}

/// How often something is done, which may be not at all.
pub fn count_from_0() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(0..=MOST)
}

/// An amount of memory: 0.000001 is 1 KiB.
pub fn gib(text: &str) -> Result<f64, String> {
    let expected = "a number of GiB from 0.000001 to 1000000000";
    number(text, expected, |gib| (1e-6..=1e9).contains(&gib))
}

/// The time that a measurement may take, in ms; `None` for as long as it takes.
#[derive(Clone, Copy, Debug)]
pub struct TimeBudget(pub Option<f64>);

pub fn time_budget(text: &str) -> Result<TimeBudget, String> {
    if text == "none" {
        return Ok(TimeBudget(None));
    }
    let expected = "a number of ms from 0.001 to 1000000000, or none";
    let ms = number(text, expected, |ms| (1e-3..=1e9).contains(&ms))?;
    Ok(TimeBudget(Some(ms)))
}

/// A learning rate, a decay, a norm, a temperature.
pub fn from_0(text: &str) -> Result<f64, String> {
    number(text, "a finite number, at least 0", |x| {
        x.is_finite() && x >= 0.0
    })
}

/// A rate, an amount.
pub fn over_0(text: &str) -> Result<f64, String> {
    number(text, "a finite number over 0", |x| x.is_finite() && x > 0.0)
}

/// A number that makes a difference.
pub fn not_0(text: &str) -> Result<f64, String> {
    number(text, "a finite number that is not 0", |x| {
        x.is_finite() && x != 0.0
    })
}

/// A part of something that leaves another part.
pub fn part(text: &str) -> Result<f64, String> {
    number(text, "a number over 0 and under 1", |x| x > 0.0 && x < 1.0)
}

/// A share that leaves something, as that of a running mean.
pub fn under_1(text: &str) -> Result<f64, String> {
    number(text, "a number from 0 to under 1", |x| {
        (0.0..1.0).contains(&x)
    })
}

/// A sum of probabilities.
pub fn probability(text: &str) -> Result<f64, String> {
    number(text, "a number over 0 and at most 1", |x| {
        x > 0.0 && x <= 1.0
    })
}

/// The file of a picture, by a name that says its format.
pub fn picture() -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().try_map(|path: PathBuf| {
        let ends_in = |name: &str| {
            path.extension()
                .is_some_and(|e| e.eq_ignore_ascii_case(name))
        };
        match (ends_in("svg"), ends_in("png"), cfg!(feature = "png")) {
            (true, ..) | (_, true, true) => Ok(path),
            (_, true, false) => {
                Err("this build draws no PNG: name an .svg, or build with --features png")
            }
            _ => Err("a picture's name ends in .svg or .png"),
        }
    })
}

fn number(text: &str, expected: &str, is_in: impl Fn(f64) -> bool) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number| is_in(*number));
    number.ok_or_else(|| format!("must be {expected}"))
}
