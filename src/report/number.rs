//! Numbers as people read them.

const BYTES_PER_MIB: f64 = (1u64 << 20) as f64;

/// Bytes as MiB: `bytes / 2^20`.
pub fn bytes_to_mib(bytes: u64) -> f64 {
    bytes as f64 / BYTES_PER_MIB
}

/// Bytes in words, with one decimal.
///
/// ```
/// assert_eq!(tallow::report::format_mib(3 << 19), "1.5 MiB");
/// assert_eq!(tallow::report::format_mib(5 << 30), "5,120.0 MiB");
/// ```
pub fn format_mib(bytes: u64) -> String {
    format!("{} MiB", group(&fixed(bytes_to_mib(bytes), 1)))
}

/// A count with a comma between thousands.
///
/// ```
/// assert_eq!(tallow::report::group_digits(128_625_408), "128,625,408");
/// ```
pub fn group_digits(count: u64) -> String {
    group(&count.to_string())
}

/// Commas between the thousands of a plain decimal number, which may have a sign and a fraction.
pub(super) fn group(number: &str) -> String {
    let (sign, digits) = match number.strip_prefix('-') {
        Some(rest) => ("-", rest),
        None => ("", number),
    };
    let (whole, fraction) = match digits.find('.') {
        Some(point) => digits.split_at(point),
        None => (digits, ""),
    };
    let mut grouped = String::from(sign);
    for (index, digit) in whole.chars().enumerate() {
        if index > 0 && (whole.len() - index).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped + fraction
}

/// Decimals that show a time or a rate in three or four digits.
pub(super) fn decimals_of(value: f64) -> usize {
    let under = [1000.0, 100.0, 1.0]
        .iter()
        .filter(|limit| value.abs() < **limit);
    under.count()
}

/// Decimals after which every f64 has zeros only: the smallest is 2^-1074.
const MAX_DECIMALS: usize = 1074;

/// `value` with a fixed number of decimals, and no minus before a zero. At most [`MAX_DECIMALS`] are shown.
pub(super) fn fixed(value: f64, decimals: usize) -> String {
    let decimals = decimals.min(MAX_DECIMALS); // formatting panics from 2^16 on
    let text = format!("{value:.decimals$}");
    match text.strip_prefix('-') {
        Some(digits) if digits.chars().all(|c| c == '0' || c == '.') => digits.to_string(),
        _ => text,
    }
}
