//! GitHub's Markdown.

use std::io::{self, Write};

use super::Report;
use super::column::plain;

/// Headers as lists, the table, notes as a numbered list, the detail tables.
pub(super) fn write(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    for (title, fields) in report.headers() {
        writeln!(out, "**{title}**\n")?;
        for (key, value) in fields.iter() {
            writeln!(out, "- {}: {}", escape(key), escape(&plain(value)))?;
        }
        writeln!(out)?;
    }
    if !report.columns.is_empty() {
        write_table(report, out)?;
    }
    if !report.notes.is_empty() {
        writeln!(out)?;
    }
    for (i, note) in report.notes.iter().enumerate() {
        writeln!(out, "{}. {}", i + 1, escape(note))?;
    }
    for detail in &report.details {
        writeln!(out, "\n**{}**\n", escape(&detail.title))?;
        write(detail, out)?;
    }
    Ok(())
}

/// The source is aligned as well: people read it before it is rendered.
fn write_table(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    let escape_all = |cells: Vec<String>| cells.iter().map(|c| escape(c)).collect();
    let headings: Vec<String> = escape_all(report.headings());
    let rows: Vec<Vec<String>> = report.cells().into_iter().map(escape_all).collect();
    let right = report.right_aligned();

    let mut widths: Vec<usize> = headings.iter().map(|h| h.chars().count().max(3)).collect();
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let rule: Vec<String> = widths
        .iter()
        .zip(&right)
        .map(|(&width, &right)| match right {
            true => format!("{}:", "-".repeat(width - 1)),
            false => "-".repeat(width),
        })
        .collect();

    for row in [&headings, &rule].into_iter().chain(&rows) {
        for ((cell, &width), &right) in row.iter().zip(&widths).zip(&right) {
            match right {
                true => write!(out, "| {cell:>width$} ")?,
                false => write!(out, "| {cell:width$} ")?,
            }
        }
        writeln!(out, "|")?;
    }
    Ok(())
}

/// Plain text as Markdown that shows exactly it. An underscore within a word means nothing in Markdown, and stays.
fn escape(text: &str) -> String {
    let text = text.replace("\r\n", "\n");
    let mut escaped = String::with_capacity(text.len());
    let mut before = ' ';
    let mut rest = text.chars().peekable();
    while let Some(c) = rest.next() {
        let in_word =
            before.is_alphanumeric() && rest.peek().is_some_and(|next| next.is_alphanumeric());
        match c {
            '\n' => escaped.push_str("<br>"),
            '_' if in_word => escaped.push('_'),
            '\\' | '|' | '`' | '*' | '_' | '<' | '>' | '[' | ']' | '~' | '&' | '$' => {
                escaped.push('\\');
                escaped.push(c);
            }
            c if c.is_control() => escaped.push(' '),
            c => escaped.push(c),
        }
        before = c;
    }
    escaped
}
