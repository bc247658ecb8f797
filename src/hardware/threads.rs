//! The number of threads that the environment asks for.

use crate::{Error, Result};
use std::sync::OnceLock;

/// The most threads that are started. Each thread has scratch memory and looks for work at all others, so tens of
/// thousands of them come to nothing for hours. Far above the cores of any machine.
const MOST_THREADS: usize = 4096;

const VARIABLES: [&str; 2] = ["RAYON_NUM_THREADS", "CANDLE_NUM_THREADS"];

/// Checks, before a pool of threads is started, that the environment asks for a number of threads that can work. The
/// environment is read once.
///
/// # Errors
/// [`Error::Config`] with the variable and its value.
pub(crate) fn check_threads() -> Result<()> {
    static TOO_MANY: OnceLock<Option<(&str, usize)>> = OnceLock::new();
    match TOO_MANY.get_or_init(|| too_many(|variable| std::env::var(variable).ok())) {
        None => Ok(()),
        Some((variable, threads)) => Err(Error::config("environment", variable, threads).must_be(
            format!("at most {MOST_THREADS}"),
            "unset it for one thread per core",
        )),
    }
}

/// The first variable that asks for too many threads, with their number. What is not a number is ignored, as rayon and
/// candle ignore it.
fn too_many(value: impl Fn(&str) -> Option<String>) -> Option<(&'static str, usize)> {
    VARIABLES.into_iter().find_map(|variable| {
        let threads: usize = value(variable)?.parse().ok()?;
        (threads > MOST_THREADS).then_some((variable, threads))
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
