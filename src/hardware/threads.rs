//! Limits on the number of threads that the environment requests.

use crate::{Error, Result};
use std::sync::OnceLock;

/// The most threads that may be started, far above the cores of any machine. Each thread has scratch memory and looks
/// for work at all others, so tens of thousands of them make no progress for hours.
const MAX_THREADS: usize = 4096;

const VARIABLES: [&str; 2] = ["RAYON_NUM_THREADS", "CANDLE_NUM_THREADS"];

/// Checks that the environment requests a usable number of threads, before a thread pool is started. The environment is
/// read once.
///
/// # Errors
/// [`Error::Config`] with the variable and its value.
pub(crate) fn check_threads() -> Result<()> {
    static TOO_MANY: OnceLock<Option<(&str, usize)>> = OnceLock::new();
    match TOO_MANY.get_or_init(|| too_many(|variable| std::env::var(variable).ok())) {
        None => Ok(()),
        Some((variable, threads)) => Err(Error::config("environment", variable, threads).must_be(
            format!("at most {MAX_THREADS}"),
            "unset it for one thread per core",
        )),
    }
}

/// Returns the first variable that requests too many threads, with their number. A value that is not a number is
/// ignored, as by rayon and candle.
fn too_many(value: impl Fn(&str) -> Option<String>) -> Option<(&'static str, usize)> {
    VARIABLES.into_iter().find_map(|variable| {
        let threads: usize = value(variable)?.parse().ok()?;
        (threads > MAX_THREADS).then_some((variable, threads))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_that_ask_for_too_many_threads_are_found() {
        let of = |rayon: Option<&str>, candle: Option<&str>| {
            let [rayon, candle] = [rayon, candle].map(|value| value.map(str::to_string));
            too_many(move |variable| match variable {
                "RAYON_NUM_THREADS" => rayon.clone(),
                _ => candle.clone(),
            })
        };
        assert_eq!(of(None, None), None);
        assert_eq!(of(Some("4096"), Some("1")), None);
        assert_eq!(of(Some("many"), Some("")), None);
        assert_eq!(of(Some("70000"), None), Some(("RAYON_NUM_THREADS", 70_000)));
        assert_eq!(
            of(Some("2"), Some("4097")),
            Some(("CANDLE_NUM_THREADS", 4097))
        );
    }
}
