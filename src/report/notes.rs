//! Sentences under a table.

/// The most characters of a note: more is not read.
pub const NOTE_CHARS: usize = 200;

/// `start: a, b, c and 5 more.`, with as many of `items` as a note of [`NOTE_CHARS`] holds; `start.` if there are none.
///
/// ```
/// use tallow::report::{NOTE_CHARS, list_in_note};
///
/// let rows: Vec<String> = (0..100).map(|i| format!("T {i}")).collect();
/// assert_eq!(list_in_note("Noisy rows", &rows[..3]), "Noisy rows: T 0, T 1, T 2.");
/// let note = list_in_note("Noisy rows", &rows);
/// assert!(note.chars().count() <= NOTE_CHARS && note.ends_with(" more."), "{note}");
/// ```
pub fn list_in_note(start: &str, items: &[String]) -> String {
    if items.is_empty() {
        return format!("{start}.");
    }
    let with = |shown: usize| {
        let list = items[..shown].join(", ");
        match (shown, items.len() - shown) {
            (_, 0) => format!("{start}: {list}."),
            (0, rest) => format!("{start}: {rest}."),
            (_, rest) => format!("{start}: {list} and {rest} more."),
        }
    };
    let fits = |shown: &usize| with(*shown).chars().count() <= NOTE_CHARS;
    with((0..=items.len()).rev().find(fits).unwrap_or(0))
}

/// A count with its noun: `1 shape`, `1,024 shapes`.
///
/// ```
/// assert_eq!(tallow::report::counted(1, "shape"), "1 shape");
/// assert_eq!(tallow::report::counted(1024, "shape"), "1,024 shapes");
/// ```
pub fn counted(count: usize, noun: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{} {noun}{plural}", super::group_digits(count as u64))
}
