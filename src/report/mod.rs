//! Reports of measurements: statistics over samples, tables in five formats, charts.
//!
//! - [`Statistics`] are mean, deviation, median and extremes of samples. [`Speedup`] compares two of them, and [`PowerLaw`] is
//!   fitted to measurements; both state whether their figures decide.
//! - [`Report`] holds rows and columns, answers, notes and the environment. It is written as text, Markdown, CSV, JSON
//!   or LaTeX ([`Format`]); [`Report::to_text`] wraps it to the width of a terminal.
//! - [`plot`] draws charts as SVG or PNG.
//!
//! Measuring is done by `bench` (time) and `memory` (bytes).

mod column;
mod data;
mod document;
mod fields;
mod markup;
pub(crate) mod picture;
pub mod plot;
mod statistics;
pub(crate) mod svg;
mod text;
mod words;
mod write;

pub use column::Column;
pub use document::{Answer, Report};
pub use fields::Fields;
pub use statistics::{PowerLaw, Speedup, Statistics, Verdict};
pub use words::{NOTE_CHARS, bytes_to_mib, counted, format_mib, group_digits, list_in_note};
pub use write::Format;
