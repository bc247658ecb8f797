//! What a measurement looks like once it is made: statistics over samples, tables in six formats, line charts.
//!
//! - [`Statistics`] turns samples into mean, deviation and quantiles;
//! - [`Report`] holds what was measured, where and how, and writes it as text, Markdown, CSV, JSON, LaTeX or Typst
//!   ([`Format`]); [`Layout`] fits text to a terminal; [`pivot()`] puts the phases of a configuration side by side;
//! - [`PowerLaw`] says how fast a measured thing grows;
//! - [`plot`] draws charts, as SVG or PNG.
//!
//! Nothing here takes a measurement: timing lives in `bench`, memory in `memory`.
//!
//! ```
//! use tallow::report::{Column, Fields, Format, Report, Statistics};
//!
//! let times = Statistics::new(&[116.7, 117.4, 118.6])?;
//! let mut row = Fields::new();
//! row.insert("phase", "forward");
//! row.insert("status", "ok");
//! row.merge(times.fields());
//!
//! let report = Report {
//!     columns: vec![
//!         Column::text("phase", "Phase"),
//!         Column::number("mean_ms", "Mean", "ms", 2),
//!     ],
//!     rows: vec![row],
//!     ..Default::default()
//! };
//! let mut out = Vec::new();
//! report.write_to(Format::Markdown, &mut out)?;
//! let lines: Vec<_> = out.split(|&byte| byte == b'\n').collect();
//! assert_eq!(lines[0], b"| Phase   | Mean (ms) |");
//! assert_eq!(lines[2], b"| forward |    117.57 |");
//! # Ok::<(), tallow::Error>(())
//! ```

mod column;
mod data;
mod document;
mod fields;
mod markup;
pub(crate) mod picture;
pub mod plot;
mod statistics;
mod text;
mod words;
mod write;

pub use column::Column;
pub use document::Report;
pub use fields::{Fields, mean_and_std, pivot};
pub use statistics::{PowerLaw, Statistics};
pub use text::Layout;
pub use words::{NOTE_CHARS, bytes_to_mib, counted, format_mib, group_digits, list_in_note};
pub use write::{Format, save_document};
