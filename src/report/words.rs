//! Formatting of numbers, and of the sentences under a table.

use textwrap::{Options, WordSeparator, WordSplitter, WrapAlgorithm};

/// Bytes per MiB.
pub(super) const MIB: f64 = (1u64 << 20) as f64;

/// Converts bytes to MiB: `bytes / 2^20`.
///
/// ```
/// assert_eq!(tallow::report::bytes_to_mib(3 << 19), 1.5);
/// ```
pub fn bytes_to_mib(bytes: u64) -> f64 {
    bytes as f64 / MIB
}

/// Formats bytes as MiB with one decimal.
///
/// ```
/// assert_eq!(tallow::report::format_mib(3 << 19), "1.5 MiB");
/// assert_eq!(tallow::report::format_mib(5 << 30), "5,120.0 MiB");
/// ```
pub fn format_mib(bytes: u64) -> String {
    format!("{} MiB", group(&fixed(bytes_to_mib(bytes), 1)))
}

/// Formats a count with commas between thousands.
///
/// ```
/// assert_eq!(tallow::report::group_digits(128_625_408), "128,625,408");
/// ```
pub fn group_digits(count: u64) -> String {
    group(&count.to_string())
}

/// Puts commas between the thousands of a plain decimal number, which may have a sign and a fraction.
pub(super) fn group(number: &str) -> String {
    let mut grouped = number.to_string();
    let first = usize::from(number.starts_with('-'));
    let mut end = number.find('.').unwrap_or(number.len());
    while end > first + 3 {
        end -= 3;
        grouped.insert(end, ',');
    }
    grouped
}

/// Returns the number of decimals that show a time or a rate with three or four digits.
pub(super) fn decimals_of(value: f64) -> usize {
    let limits = [1000.0, 100.0, 1.0].into_iter();
    limits.filter(|limit| value.abs() < *limit).count()
}

/// The number of decimals after which every f64 has only zeros: the smallest is 2^-1074.
const MAX_DECIMALS: usize = 1074;

/// Formats `value` with a fixed number of decimals, at most [`MAX_DECIMALS`], and no minus sign before a zero.
pub(super) fn fixed(value: f64, decimals: usize) -> String {
    let decimals = decimals.min(MAX_DECIMALS); // formatting panics from 2^16 on
    let text = format!("{value:.decimals$}");
    match text.strip_prefix('-') {
        Some(digits) if digits.chars().all(|c| c == '0' || c == '.') => digits.to_string(),
        _ => text,
    }
}

/// The maximum length of a note in characters: nobody reads longer ones.
pub const NOTE_CHARS: usize = 200;

/// Returns `start: a, b, c and 5 more.`, with as many of `items` as [`NOTE_CHARS`] allow; `start.` if there are none.
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

/// Returns a count with its noun: `1 shape`, `1,024 shapes`.
///
/// ```
/// assert_eq!(tallow::report::counted(1, "shape"), "1 shape");
/// assert_eq!(tallow::report::counted(1024, "shape"), "1,024 shapes");
/// ```
pub fn counted(count: usize, noun: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{} {noun}{plural}", group_digits(count as u64))
}

/// Wraps text into lines of at most `width` characters; all but the first are indented by `indent` spaces. Words longer
/// than a line are broken.
pub(super) fn wrap(text: &str, width: Option<usize>, indent: usize) -> Vec<String> {
    let text = one_line(text);
    let Some(width) = width else {
        return vec![text];
    };
    let indent = " ".repeat(indent);
    let options = Options::new(width.max(indent.len() + 1))
        .subsequent_indent(&indent)
        .word_separator(WordSeparator::AsciiSpace)
        .word_splitter(WordSplitter::NoHyphenation)
        .wrap_algorithm(WrapAlgorithm::FirstFit);
    let lines = textwrap::wrap(&text, options);
    lines.into_iter().map(|line| line.into_owned()).collect()
}

/// Returns the text with characters that end a line or move the cursor replaced by spaces.
pub(super) fn one_line(text: &str) -> String {
    let is_bad = |c: char| c.is_control() || matches!(c, '\u{2028}' | '\u{2029}');
    text.replace("\r\n", " ").replace(is_bad, " ")
}
