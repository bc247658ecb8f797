//! For a terminal.

use super::column::plain;
use super::layout::{Arranged, arrange};
use super::wrap::wrap;
use super::{Fields, Layout, Report};

/// Configuration, table and notes, the detail tables, and last where it ran.
pub(super) fn text(report: &Report, layout: &Layout) -> String {
    let mut blocks = blocks(report, "Configuration", layout);
    for detail in &report.details {
        add_detail(&mut blocks, detail, layout);
    }
    blocks.extend(header("Environment", &report.environment, layout));
    match blocks.is_empty() {
        true => String::new(),
        false => blocks.join("\n\n") + "\n",
    }
}

/// A table under its title, and its own details after it.
fn add_detail(all: &mut Vec<String>, report: &Report, layout: &Layout) {
    let title = wrap(&report.title, layout.width, 2).join("\n");
    let name = match report.configuration.is_empty() {
        true => "In every row",
        false => "Configuration",
    };
    let own = blocks(report, name, layout).join("\n\n");
    all.push(format!("{title}\n{own}"));
    for detail in &report.details {
        add_detail(all, detail, layout);
    }
}

/// The header with what agrees in all rows, the table, the notes.
fn blocks(report: &Report, name: &str, layout: &Layout) -> Vec<String> {
    let given = &report.configuration;
    let Arranged { same, lines, note } = arrange(&report.columns, report.shown(), layout);
    let mut known = given.clone();
    for (title, value) in same.iter() {
        let said = [title.to_string(), format!("{title} {}", plain(value))];
        let is_said =
            (given.iter()).any(|(key, _)| said.iter().any(|s| s.eq_ignore_ascii_case(key)));
        if !is_said {
            known.insert(in_a_sentence(title), value.clone());
        }
    }
    let mut blocks: Vec<String> = header(name, &known, layout).into_iter().collect();
    if !lines.is_empty() {
        blocks.push(lines.join("\n"));
    }
    let notes: Vec<&String> = report.notes.iter().chain(&note).collect();
    let numbered = notes.iter().enumerate().flat_map(|(i, note)| {
        let text = format!("{}. {note}", i + 1);
        let indent = (i + 1).to_string().len() + 2;
        wrap(&text, layout.width, indent)
    });
    if !notes.is_empty() {
        blocks.push(numbered.collect::<Vec<_>>().join("\n"));
    }
    blocks
}

/// `Configuration: precision f32; data: 12,345 tokens`, without what is null.
fn header(name: &str, fields: &Fields, layout: &Layout) -> Option<String> {
    let parts = fields.iter().filter(|(_, value)| !value.is_null());
    let parts: Vec<String> = parts
        .map(|(key, value)| {
            let value = plain(value);
            let colon = if key.contains(' ') || value.contains(char::is_whitespace) {
                ":"
            } else {
                ""
            };
            format!("{key}{colon} {value}")
        })
        .collect();
    let text = format!("{name}: {}", parts.join("; "));
    (!parts.is_empty()).then(|| wrap(&text, layout.width, 2).join("\n"))
}

/// A title within a line: `Precision` becomes `precision`, `T` and `FLOPs` stay.
fn in_a_sentence(title: &str) -> String {
    let is_word = title.len() > 1 && !title.chars().skip(1).any(char::is_uppercase);
    match is_word {
        true => title.to_lowercase(),
        false => title.into(),
    }
}
