//! Reports as Markdown, LaTeX and Typst.

use std::io::{self, Write};

use super::Report;
use super::column::plain;
use super::words::one_line;

/// Headers as lists, the table, notes as a numbered list, the detail tables.
pub(super) fn write_markdown(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    for (title, fields) in report.headers() {
        writeln!(out, "**{title}**\n")?;
        for (key, value) in fields.iter() {
            writeln!(
                out,
                "- {}: {}",
                escape_markdown(key),
                escape_markdown(&plain(value))
            )?;
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
        writeln!(out, "{}. {}", i + 1, escape_markdown(note))?;
    }
    for detail in &report.details {
        writeln!(out, "\n**{}**\n", escape_markdown(&detail.title))?;
        write_markdown(detail, out)?;
    }
    Ok(())
}

/// The source is aligned as well: people read it before it is rendered.
fn write_table(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    let escape_all = |cells: Vec<String>| cells.iter().map(|c| escape_markdown(c)).collect();
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
fn escape_markdown(text: &str) -> String {
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

/// A table to include in a paper. What is not the table is a comment after `marker`, so that the file can be included
/// anywhere and still says where its numbers come from.
pub(super) fn write_typeset(
    report: &Report,
    marker: &str,
    table: fn(&Report, &mut dyn Write) -> io::Result<()>,
    out: &mut dyn Write,
) -> io::Result<()> {
    let fields = report.headers().flat_map(|(_, fields)| fields.iter());
    for (key, value) in fields {
        let comment = format!("{key}: {}", plain(value));
        writeln!(out, "{marker} {}", one_line(&comment))?;
    }
    for (i, note) in report.notes.iter().enumerate() {
        writeln!(out, "{marker} note {}: {}", i + 1, one_line(note))?;
    }
    if report.columns.is_empty() {
        return Ok(());
    }
    table(report, out)?;
    for detail in &report.details {
        writeln!(out, "\n{marker} {}", one_line(&detail.title))?;
        write_typeset(detail, marker, table, out)?;
    }
    Ok(())
}

pub(super) fn latex_table(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    let line = |cells: &[String]| {
        let cells: Vec<_> = cells.iter().map(|cell| escape_latex(cell)).collect();
        format!("{} \\\\", cells.join(" & "))
    };
    let alignment: String = report
        .right_aligned()
        .iter()
        .map(|&right| if right { 'r' } else { 'l' })
        .collect();

    writeln!(out, "% needs \\usepackage{{booktabs}}")?;
    writeln!(out, "\\begin{{tabular}}{{{alignment}}}")?;
    writeln!(out, "\\toprule\n{}\n\\midrule", line(&report.headings()))?;
    for row in report.cells() {
        writeln!(out, "{}", line(&row))?;
    }
    writeln!(out, "\\bottomrule\n\\end{{tabular}}")
}

/// A `#table`, its cells string literals: in them Typst gives no character a meaning.
pub(super) fn typst_table(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    let line = |cells: &[String]| {
        let cells: Vec<_> = cells.iter().map(|cell| quote_typst(cell)).collect();
        cells.join(", ")
    };
    // A tuple of one needs its comma.
    let alignment: String = report
        .right_aligned()
        .iter()
        .map(|&right| if right { "right, " } else { "left, " })
        .collect();

    writeln!(out, "#table(")?;
    writeln!(out, "  columns: {},", report.columns.len())?;
    writeln!(out, "  align: ({}),", alignment.trim_end_matches(' '))?;
    writeln!(out, "  table.header({}),", line(&report.headings()))?;
    for row in report.cells() {
        writeln!(out, "  {},", line(&row))?;
    }
    writeln!(out, ")")
}

fn escape_latex(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    let mut before = ' ';
    for c in one_line(text).chars() {
        match c {
            '&' | '%' | '$' | '#' | '_' | '{' | '}' => {
                escaped.push('\\');
                escaped.push(c);
            }
            '\\' => escaped.push_str("\\textbackslash{}"),
            '~' => escaped.push_str("\\textasciitilde{}"),
            '^' => escaped.push_str("\\textasciicircum{}"),
            '<' => escaped.push_str("\\textless{}"),
            '>' => escaped.push_str("\\textgreater{}"),
            '|' => escaped.push_str("\\textbar{}"),
            '`' => escaped.push_str("\\textasciigrave{}"),
            // At the start of a row these two would belong to the \\ before it.
            '[' | '*' => {
                escaped.push('{');
                escaped.push(c);
                escaped.push('}');
            }
            // Two hyphens would become a dash.
            '-' if before == '-' => escaped.push_str("{-}"),
            c => escaped.push(c),
        }
        before = c;
    }
    escaped
}

fn quote_typst(text: &str) -> String {
    let text = text.replace("\r\n", "\n");
    let mut quoted = String::from("\"");
    for c in text.chars() {
        match c {
            '\\' => quoted.push_str("\\\\"),
            '"' => quoted.push_str("\\\""),
            '\n' => quoted.push_str("\\n"),
            c if c.is_control() => quoted.push(' '),
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}
