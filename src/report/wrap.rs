//! Lines of text.

use textwrap::{Options, WordSeparator, WordSplitter, WrapAlgorithm};

/// Words in lines of at most `width` characters, the second and later ones after `indent` spaces. A word that is
/// longer than a line is cut.
pub(super) fn wrap(text: &str, width: Option<usize>, indent: usize) -> Vec<String> {
    let text = one_line(text);
    let Some(width) = width else {
        return vec![text];
    };
    let indent = " ".repeat(indent);
    let options = Options::new(width.max(indent.len() + 1))
        .subsequent_indent(&indent)
        .word_separator(WordSeparator::AsciiSpace)
        .word_splitter(WordSplitter::NoHyphenation)
        .wrap_algorithm(WrapAlgorithm::FirstFit);
    let lines = textwrap::wrap(&text, options);
    lines.into_iter().map(|line| line.into_owned()).collect()
}

/// Control characters would move the cursor.
pub(super) fn one_line(text: &str) -> String {
    text.replace("\r\n", " ")
        .replace(|c: char| c.is_control(), " ")
}
