//! Markdown and LaTeX output.

use std::io::{self, Write};
use std::iter::once;

use super::column::plain;
use super::text::{ColumnText, divide, fields, in_a_sentence, join_columns, move_constant_columns};
use super::words::one_line;
use super::{Answer, Fields, Report};

/// Writes the headers as lists, the table, the notes as a numbered list, and the detail tables.
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
    if !report.answers.is_empty() {
        writeln!(out, "\n**Answers**\n")?;
    }
    for Answer { question, answer } in &report.answers {
        let [question, answer] = [question, answer].map(|text| escape_markdown(text));
        writeln!(out, "- **{question}** {answer}")?;
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

/// Writes the table with its source aligned too, because people read Markdown before it is rendered.
fn write_table(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    let columns = report.column_texts().into_iter().map(|strip| {
        let texts = once(strip.column.heading()).chain(strip.cells.iter().cloned());
        let texts: Vec<String> = texts.map(|text| escape_markdown(&text)).collect();
        let width = texts.iter().map(|text| text.chars().count()).max();
        let width = width.unwrap_or(0).max(3);
        let texts = texts.iter().map(|text| strip.padded(text, width));
        let mut lines: Vec<String> = texts.collect();
        let rule = match strip.right {
            true => format!("{}:", "-".repeat(width - 1)),
            false => "-".repeat(width),
        };
        lines.insert(1, rule);
        lines
    });
    for line in join_columns(&columns.collect::<Vec<_>>(), " | ") {
        writeln!(out, "| {line} |")?;
    }
    Ok(())
}

/// Escapes plain text for Markdown. An underscore within a word has no meaning in Markdown and is not escaped.
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

/// The largest number of columns in a LaTeX table, which is what fits on a page. A column of names whose cells are all
/// equal moves into the caption. A table with more columns is divided, and each part begins with the columns that tell
/// rows apart.
pub const LATEX_COLUMNS: usize = 8;

/// Writes a table to include in a paper, with its answers and notes as text below it. Environment and configuration are
/// comments, so the file can be included anywhere and still documents where the numbers come from.
pub(super) fn write_latex(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    let machine = report.environment.get("hardware").cloned();
    write_latex_within(report, &Fields::from_iter([("machine", machine)]), out)
}

/// Writes a table whose caption ends in `known`: the values that are equal in all rows around it, and the machine.
fn write_latex_within(report: &Report, known: &Fields, out: &mut dyn Write) -> io::Result<()> {
    let header = report.headers().flat_map(|(_, fields)| fields.iter());
    for (key, value) in header {
        let comment = format!("{key}: {}", plain(value));
        writeln!(out, "% {}", one_line(&comment))?;
    }
    let mut strips = report.column_texts();
    let mut same = move_constant_columns(&mut strips);
    // The caption has the first column too if it does not tell rows apart.
    if let Some(first) = strips
        .first()
        .filter(|first| first.is_of_names() && first.agrees())
        && let Some(cell) = first.cells.first()
    {
        same.insert(in_a_sentence(&first.column.heading()), cell.as_str());
    }
    for (key, value) in known.iter() {
        if same.get(key).is_none() {
            same.insert(key, value.clone());
        }
    }
    if !strips.is_empty() {
        for strips in divide(strips, |strips| strips.len() <= LATEX_COLUMNS) {
            write_latex_table(report, &strips, &same, out)?;
        }
    }
    for Answer { question, answer } in &report.answers {
        let [question, answer] = [question, answer].map(|text| escape_latex(text));
        writeln!(out, "\n\\paragraph{{{question}}} {answer}")?;
    }
    if !report.notes.is_empty() {
        let notes = report.notes.iter().map(|note| escape_latex(note));
        let items: Vec<String> = notes.map(|note| format!("\\item {note}\n")).collect();
        writeln!(
            out,
            "\n\\begin{{enumerate}}\n{}\\end{{enumerate}}",
            items.concat()
        )?;
    }
    for detail in &report.details {
        writeln!(out)?;
        write_latex_within(detail, &same, out)?;
    }
    Ok(())
}

/// Writes a table, with `same` in its caption.
fn write_latex_table(
    report: &Report,
    strips: &[ColumnText<'_>],
    same: &Fields,
    out: &mut dyn Write,
) -> io::Result<()> {
    let columns = strips.iter().map(|strip| {
        let texts = once(strip.column.heading()).chain(strip.cells.iter().cloned());
        texts.map(|text| escape_latex(&text)).collect()
    });
    let lines = join_columns(&columns.collect::<Vec<_>>(), " & ").into_iter();
    let lines: Vec<String> = lines.map(|line| format!("{line} \\\\\n")).collect();
    let alignment = strips
        .iter()
        .map(|strip| if strip.right { 'r' } else { 'l' });
    let alignment: String = alignment.collect();

    writeln!(
        out,
        "% needs \\usepackage{{booktabs}}\n\\begin{{table}}[ht]\n\\centering"
    )?;
    let caption = [report.title.clone(), fields(same)];
    let caption: Vec<String> = caption
        .into_iter()
        .filter(|part| !part.is_empty())
        .collect();
    if !caption.is_empty() {
        let caption = escape_latex(&caption.join(". "));
        writeln!(out, "\\caption{{{caption}}}")?;
    }
    writeln!(out, "\\begin{{tabular}}{{{alignment}}}")?;
    let (heading, rows) = (&lines[0], lines[1..].concat());
    write!(out, "\\toprule\n{heading}\\midrule\n{rows}")?;
    writeln!(out, "\\bottomrule\n\\end{{tabular}}\n\\end{{table}}")
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
            // At the start of a row these two would be parsed as arguments of the preceding \\.
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
