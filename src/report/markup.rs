//! Markdown and LaTeX output.

use std::io::{self, Write};
use std::iter::once;

use super::column::plain;
use super::text::{ColumnText, divide, fields, in_a_sentence, join_columns, move_constant_columns};
use super::words::one_line;
use super::{Answer, Fields, Report};

/// Writes the headers as lists, the table, the notes as a numbered list, and the detail tables.
pub(super) fn write_markdown(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    let escape = escape_markdown;
    let headers = report.headers().into_iter();
    for (title, fields) in headers.filter(|(_, fields)| !fields.is_empty()) {
        writeln!(out, "**{title}**\n")?;
        for (key, value) in fields {
            writeln!(out, "- {}: {}", escape(key), escape(&plain(value)))?;
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
        writeln!(out, "- **{}** {}", escape(question), escape(answer))?;
    }
    if !report.notes.is_empty() {
        writeln!(out)?;
    }
    for (number, note) in (1..).zip(&report.notes) {
        writeln!(out, "{number}. {}", escape(note))?;
    }
    for detail in &report.details {
        writeln!(out, "\n**{}**\n", escape(&detail.title))?;
        write_markdown(detail, out)?;
    }
    Ok(())
}

/// Writes the table with its source aligned too, because people read Markdown before it is rendered.
fn write_table(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    let columns = report.column_texts().into_iter().map(|column| {
        let texts = column.escaped(escape_markdown);
        let widths = texts.iter().map(|text| text.chars().count());
        let width = widths.fold(3, usize::max);
        let texts = texts.iter().map(|text| column.padded(text, width));
        let mut lines: Vec<String> = texts.collect();
        let rule = match column.right {
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
    let text = format!(" {} ", text.replace("\r\n", "\n")); // each character has a neighbour on both sides
    let chars: Vec<char> = text.chars().collect();
    let escaped = chars.windows(3).map(|near| match near[1] {
        '\n' => "<br>".into(),
        '_' if near[0].is_alphanumeric() && near[2].is_alphanumeric() => "_".into(),
        c @ ('\\' | '|' | '`' | '*' | '_' | '<' | '>' | '[' | ']' | '~' | '&' | '$') => {
            format!("\\{c}")
        }
        c if c.is_control() => " ".into(),
        c => c.into(),
    });
    escaped.collect()
}

/// The largest number of columns in a LaTeX table, which is what fits on a page.
const LATEX_COLUMNS: usize = 8;

/// Writes a table to include in a paper, with its answers and notes as text below it. Environment and configuration are
/// comments, so the file can be included anywhere and still documents where the numbers come from.
pub(super) fn write_latex(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    let machine = report.environment.get("hardware").cloned();
    write_latex_within(report, &Fields::from_iter([("machine", machine)]), out)
}

/// Writes a table whose caption ends in `known`: the values that are equal in all rows around it, and the machine.
fn write_latex_within(report: &Report, known: &Fields, out: &mut dyn Write) -> io::Result<()> {
    let headers = report.headers().into_iter();
    for (key, value) in headers.flat_map(|(_, fields)| fields) {
        let comment = format!("{key}: {}", plain(value));
        writeln!(out, "% {}", one_line(&comment))?;
    }
    let mut columns = report.column_texts();
    let mut same = move_constant_columns(&mut columns);
    // The caption has the first column too if it does not tell rows apart.
    if let Some(first) = columns.first()
        && let Some(cell) = first.cells.first()
        && first.is_of_names()
        && first.agrees()
    {
        same.insert(in_a_sentence(&first.column.heading()), cell.as_str());
    }
    for (key, value) in known.iter() {
        if same.get(key).is_none() {
            same.insert(key, value.clone());
        }
    }
    if !columns.is_empty() {
        for columns in divide(columns, |columns| columns.len() <= LATEX_COLUMNS) {
            write_latex_table(&report.title, &columns, &same, out)?;
        }
    }
    for Answer { question, answer } in &report.answers {
        let [question, answer] = [question, answer].map(|text| escape_latex(text));
        writeln!(out, "\n\\paragraph{{{question}}} {answer}")?;
    }
    if !report.notes.is_empty() {
        writeln!(out, "\n\\begin{{enumerate}}")?;
        for note in &report.notes {
            writeln!(out, "\\item {}", escape_latex(note))?;
        }
        writeln!(out, "\\end{{enumerate}}")?;
    }
    for detail in &report.details {
        writeln!(out)?;
        write_latex_within(detail, &same, out)?;
    }
    Ok(())
}

/// Writes a table, with `same` in its caption.
fn write_latex_table(
    title: &str,
    columns: &[ColumnText<'_>],
    same: &Fields,
    out: &mut dyn Write,
) -> io::Result<()> {
    let texts = columns.iter().map(|column| column.escaped(escape_latex));
    let mut lines = join_columns(&texts.collect::<Vec<_>>(), " & ").into_iter();
    let alignment = columns
        .iter()
        .map(|column| if column.right { 'r' } else { 'l' });
    let alignment: String = alignment.collect();
    let same = fields(same);
    let separator = if title.is_empty() || same.is_empty() {
        ""
    } else {
        ". "
    };
    let caption = escape_latex(&format!("{title}{separator}{same}"));

    writeln!(
        out,
        "% needs \\usepackage{{booktabs}}\n\\begin{{table}}[ht]\n\\centering"
    )?;
    if !caption.is_empty() {
        writeln!(out, "\\caption{{{caption}}}")?;
    }
    writeln!(out, "\\begin{{tabular}}{{{alignment}}}\n\\toprule")?;
    if let Some(heading) = lines.next() {
        writeln!(out, "{heading} \\\\\n\\midrule")?;
    }
    for line in lines {
        writeln!(out, "{line} \\\\")?;
    }
    writeln!(out, "\\bottomrule\n\\end{{tabular}}\n\\end{{table}}")
}

fn escape_latex(text: &str) -> String {
    let text = one_line(text);
    let before = once(' ').chain(text.chars());
    let escaped = text.chars().zip(before).map(|(c, before)| match c {
        '&' | '%' | '$' | '#' | '_' | '{' | '}' => format!("\\{c}"),
        '\\' => "\\textbackslash{}".into(),
        '~' => "\\textasciitilde{}".into(),
        '^' => "\\textasciicircum{}".into(),
        '<' => "\\textless{}".into(),
        '>' => "\\textgreater{}".into(),
        '|' => "\\textbar{}".into(),
        '`' => "\\textasciigrave{}".into(),
        // At the start of a row these two would be parsed as arguments of the preceding \\.
        '[' | '*' => format!("{{{c}}}"),
        // Two hyphens would become a dash.
        '-' if before == '-' => "{-}".into(),
        c => c.into(),
    });
    escaped.collect()
}
