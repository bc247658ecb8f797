//! Lines of text.

/// Words in lines of at most `width` characters, the second and later ones after `indent` spaces. A word that is
/// longer than a line is cut.
pub(super) fn wrap(text: &str, width: Option<usize>, indent: usize) -> Vec<String> {
    let Some(width) = width else {
        return vec![one_line(text)];
    };
    let room = width.max(indent + 1);
    let mut lines: Vec<String> = Vec::new();
    let mut line = String::new();
    for word in one_line(text).split(' ') {
        let mut word: Vec<char> = word.chars().collect();
        let length = line.chars().count();
        if !line.trim().is_empty() && length + 1 + word.len() > room {
            lines.push(std::mem::replace(&mut line, " ".repeat(indent)));
        } else if !line.trim().is_empty() {
            line.push(' ');
        }
        while line.chars().count() + word.len() > room {
            let rest = word.split_off(room - line.chars().count());
            line.extend(word);
            lines.push(std::mem::replace(&mut line, " ".repeat(indent)));
            word = rest;
        }
        line.extend(word);
    }
    lines.push(line);
    for line in &mut lines {
        line.truncate(line.trim_end().len());
    }
    lines
}

/// Control characters would move the cursor.
pub(super) fn one_line(text: &str) -> String {
    text.replace("\r\n", " ")
        .replace(|c: char| c.is_control(), " ")
}
