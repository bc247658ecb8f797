//! For a terminal.

use std::io::{self, Write};

use comfy_table::{Cell, CellAlignment, ContentArrangement, Table, presets};

use super::Report;
use super::column::plain;

/// Headers, the table, notes; an empty line between them.
pub(super) fn write(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    for (title, fields) in report.headers() {
        writeln!(out, "{title}")?;
        let width = fields
            .iter()
            .map(|(key, _)| key.chars().count())
            .max()
            .unwrap_or(0);
        for (key, value) in fields.iter() {
            let value = tidy(&plain(value)).replace('\n', &format!("\n{:1$}", "", width + 4));
            writeln!(out, "  {key:width$}  {value}")?;
        }
        writeln!(out)?;
    }
    if !report.columns.is_empty() {
        writeln!(out, "{}", table(report))?;
    }
    if !report.notes.is_empty() {
        writeln!(out)?;
    }
    for note in &report.notes {
        writeln!(out, "note: {}", tidy(note).replace('\n', "\n      "))?;
    }
    Ok(())
}

fn table(report: &Report) -> Table {
    let alignments: Vec<_> = report
        .right_aligned()
        .into_iter()
        .map(|right| match right {
            true => CellAlignment::Right,
            false => CellAlignment::Left,
        })
        .collect();
    let aligned = |cells: Vec<String>| -> Vec<Cell> {
        cells
            .into_iter()
            .zip(&alignments)
            .map(|(cell, alignment)| Cell::new(tidy(&cell)).set_alignment(*alignment))
            .collect()
    };

    let mut table = Table::new();
    table
        .load_style(presets::UTF8_FULL_CONDENSED)
        .set_content_arrangement(ContentArrangement::Disabled)
        .set_header(aligned(report.headings()));
    for row in report.cells() {
        table.add_row(aligned(row));
    }
    table
}

/// Keeps line breaks, in one spelling; other control characters would move the cursor.
fn tidy(text: &str) -> String {
    text.replace("\r\n", "\n")
        .replace(|c: char| c.is_control() && c != '\n', " ")
}
