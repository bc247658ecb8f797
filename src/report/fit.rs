//! What goes where a table is too wide.

use super::strip::{Strip, over, spans, total, widths};

/// Words in a cell are not cut to fewer characters.
const LEAST_WORDS: usize = 20;

/// Leaves columns out until the others fit: the most minor first, of equals the last. Where only those are left that a
/// reader cannot do without, long words are cut before one of them goes.
pub(super) fn fit(strips: &mut Vec<Strip<'_>>, width: usize, left_out: &mut Vec<String>) {
    while total(&widths(strips)) > width {
        let of_minor = |i: &usize| (strips[*i].column.minor, *i);
        let most = (1..strips.len()).max_by_key(of_minor);
        let is_needed = most.is_none_or(|most| strips[most].column.minor == 0);
        if is_needed && cut_words(strips, width) {
            continue;
        }
        let Some(most) = most else { return };
        // What is compared goes together: half a comparison says nothing.
        let span = spans(strips).into_iter().find(|(_, end)| *end > most);
        let (first, end) = span.unwrap_or((most, most + 1));
        let minor = strips[most].column.minor;
        let goes = |i: usize, strip: &Strip<'_>| {
            (first.max(1)..end).contains(&i) && strip.column.minor == minor
        };
        let all = std::mem::take(strips).into_iter().enumerate();
        let (gone, kept): (Vec<_>, Vec<_>) = all.partition(|(i, strip)| goes(*i, strip));
        *strips = kept.into_iter().map(|(_, strip)| strip).collect();
        let gone: Vec<Strip<'_>> = gone.into_iter().map(|(_, strip)| strip).collect();
        let name = match &gone[..] {
            [only] => only.column.heading(),
            several => over(several),
        };
        left_out.insert(0, name);
    }
}

/// Cuts the widest column of words by what is too much; whether there was one to cut.
fn cut_words(strips: &mut [Strip<'_>], width: usize) -> bool {
    let widths = widths(strips);
    let too_much = total(&widths) - width;
    let least = |i: usize| {
        strips[i]
            .column
            .own_heading()
            .chars()
            .count()
            .max(LEAST_WORDS)
    };
    let is_long = |i: &usize| strips[*i].is_of_names() && widths[*i] > least(*i);
    let Some(widest) = (0..strips.len()).filter(is_long).max_by_key(|i| widths[*i]) else {
        return false;
    };
    let room = widths[widest].saturating_sub(too_much).max(least(widest));
    strips[widest]
        .cells
        .iter_mut()
        .for_each(|cell| cut(cell, room));
    true
}

/// Cuts a text to `room` characters: a path at its beginning, for its end says more, any other at its end.
pub(super) fn cut(text: &mut String, room: usize) {
    let length = text.chars().count();
    if length <= room {
        return;
    }
    let kept = room.saturating_sub(1);
    *text = match text.contains('/') {
        true => "…"
            .chars()
            .chain(text.chars().skip(length - kept))
            .collect(),
        false => text.chars().take(kept).chain("…".chars()).collect(),
    };
}
