//! Reports as Markdown, LaTeX and Typst.

use std::io::{self, Write};
use std::iter::once;

use super::Report;
use super::column::plain;
use super::text::Strip;
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
    let columns = report.strips().into_iter().map(|strip| {
        let texts = once(strip.column.heading()).chain(strip.cells);
        let texts: Vec<String> = texts.map(|text| escape_markdown(&text)).collect();
        let width = texts.iter().map(|text| text.chars().count()).max();
        let width = width.unwrap_or(0).max(3);
        let lines = texts.into_iter().map(|text| match strip.right {
            true => format!("{text:>width$}"),
            false => format!("{text:width$}"),
        });
        let mut lines: Vec<String> = lines.collect();
        lines.insert(
            1,
            match strip.right {
                true => format!("{}:", "-".repeat(width - 1)),
                false => "-".repeat(width),
            },
        );
        lines
    });
    let columns: Vec<Vec<String>> = columns.collect();
    for line in 0..report.shown().len() + 2 {
        let cells: Vec<&str> = columns.iter().map(|lines| lines[line].as_str()).collect();
        writeln!(out, "| {} |", cells.join(" | "))?;
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

/// The headings, then each row.
fn rows(report: &Report, strips: &[Strip<'_>]) -> Vec<Vec<String>> {
    let row = |row: usize| {
        strips
            .iter()
            .map(|strip| strip.cells[row].clone())
            .collect()
    };
    let rows = (0..report.shown().len()).map(row);
    once(report.headings()).chain(rows).collect()
}

pub(super) fn latex_table(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    let strips = report.strips();
    let lines = rows(report, &strips).into_iter().map(|cells| {
        let cells: Vec<_> = cells.iter().map(|cell| escape_latex(cell)).collect();
        format!("{} \\\\\n", cells.join(" & "))
    });
    let lines: Vec<String> = lines.collect();
    let alignment = strips
        .iter()
        .map(|strip| if strip.right { 'r' } else { 'l' });
    let alignment: String = alignment.collect();

    writeln!(out, "% needs \\usepackage{{booktabs}}")?;
    writeln!(out, "\\begin{{tabular}}{{{alignment}}}")?;
    write!(
        out,
        "\\toprule\n{}\\midrule\n{}",
        lines[0],
        lines[1..].concat()
    )?;
    writeln!(out, "\\bottomrule\n\\end{{tabular}}")
}

/// A `#table`, its cells string literals: in them Typst gives no character a meaning.
pub(super) fn typst_table(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    let strips = report.strips();
    let lines = rows(report, &strips).into_iter().map(|cells| {
        let cells: Vec<_> = cells.iter().map(|cell| quote_typst(cell)).collect();
        cells.join(", ")
    });
    let lines: Vec<String> = lines.collect();
    // A tuple of one needs its comma.
    let alignment = strips
        .iter()
        .map(|strip| if strip.right { "right, " } else { "left, " });
    let alignment: String = alignment.collect();

    writeln!(out, "#table(")?;
    writeln!(out, "  columns: {},", report.columns.len())?;
    writeln!(out, "  align: ({}),", alignment.trim_end_matches(' '))?;
    writeln!(out, "  table.header({}),", lines[0])?;
    for line in &lines[1..] {
        writeln!(out, "  {line},")?;
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
