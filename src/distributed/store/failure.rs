//! What ranks are doing, and why the job cannot go on.

use crate::Error;
use std::fmt;
use std::time::Duration;

/// Characters of a failure's text: what a person reads.
const MAX_TEXT: usize = 4 << 10;

/// What a rank is doing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Doing {
    /// How many operations of all ranks it has begun.
    pub entered: u64,
    /// The operation that it has been in for longest; outside, its last one.
    pub what: String,
    /// Its number among the operations of all ranks, from 1; 0 if it is of some ranks only.
    pub number: u64,
    /// For how long it has been inside, if it is.
    pub inside: Option<Duration>,
}

impl fmt::Display for Doing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.inside, self.what.as_str()) {
            (None, "") => return f.write_str("its own work"),
            (None, _) => f.write_str("its own work after ")?,
            (Some(_), _) => {}
        }
        f.write_str(&self.what)?;
        match self.number {
            0 => Ok(()),
            number => write!(f, " (operation {number})"),
        }
    }
}

/// Why the job cannot go on, and whose failure it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub rank: usize,
    pub during: String,
    pub problem: String,
    pub hint: String,
}

impl Failure {
    pub(crate) fn new(
        rank: usize,
        during: impl fmt::Display,
        problem: impl Into<String>,
        hint: &str,
    ) -> Self {
        let cut = |text: String| match text.char_indices().nth(MAX_TEXT) {
            Some((end, _)) => format!("{}...", &text[..end]),
            None => text,
        };
        Self {
            rank,
            during: cut(during.to_string()),
            problem: cut(problem.into()),
            hint: hint.into(),
        }
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        let Failure {
            rank,
            during,
            problem,
            hint,
        } = failure;
        Self::Rank {
            rank,
            during,
            problem,
            hint,
        }
    }
}
