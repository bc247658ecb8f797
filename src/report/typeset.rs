//! LaTeX and Typst: a table to include in a paper. What is not the table is a comment, so that the file can be
//! included anywhere and still says where its numbers come from.

use std::io::{self, Write};

use super::Report;
use super::column::plain;

/// A `tabular` with booktabs rules.
pub(super) fn write_latex(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    write_comments(report, "%", out)?;
    if report.columns.is_empty() {
        return Ok(());
    }
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
    writeln!(out, "\\bottomrule\n\\end{{tabular}}")?;
    for detail in &report.details {
        writeln!(out, "\n% {}", one_line(&detail.title))?;
        write_latex(detail, out)?;
    }
    Ok(())
}

/// A `#table`, its cells string literals: in them Typst gives no character a meaning.
pub(super) fn write_typst(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    write_comments(report, "//", out)?;
    if report.columns.is_empty() {
        return Ok(());
    }
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
    writeln!(out, ")")?;
    for detail in &report.details {
        writeln!(out, "\n// {}", one_line(&detail.title))?;
        write_typst(detail, out)?;
    }
    Ok(())
}

/// Environment, configuration and notes, each a line after `marker`.
fn write_comments(report: &Report, marker: &str, out: &mut dyn Write) -> io::Result<()> {
    for (_, fields) in report.headers() {
        for (key, value) in fields.iter() {
            let comment = format!("{key}: {}", plain(value));
            writeln!(out, "{marker} {}", one_line(&comment))?;
        }
    }
    for (i, note) in report.notes.iter().enumerate() {
        writeln!(out, "{marker} note {}: {}", i + 1, one_line(note))?;
    }
    Ok(())
}

/// Without anything that ends a line: Typst counts the two Unicode separators as such.
fn one_line(text: &str) -> String {
    text.replace("\r\n", " ").replace(
        |c: char| c.is_control() || matches!(c, '\u{2028}' | '\u{2029}'),
        " ",
    )
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
