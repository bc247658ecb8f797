//! The fields of a frame, written and read one after the other.

use super::failure::{Doing, Failure};
use std::time::Duration;

/// A frame's content, field by field.
#[derive(Default)]
pub(crate) struct Message(pub Vec<u8>);

impl Message {
    pub(crate) fn letter(mut self, letter: u8) -> Self {
        self.0.push(letter);
        self
    }

    pub(crate) fn number(mut self, number: u64) -> Self {
        self.0.extend(number.to_le_bytes());
        self
    }

    pub(crate) fn bytes(mut self, bytes: &[u8]) -> Self {
        // Longer ones than a frame holds are refused before, or cut.
        self.0.extend((bytes.len() as u32).to_le_bytes());
        self.0.extend(bytes);
        self
    }

    pub(crate) fn doing(self, doing: &Doing) -> Self {
        let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let fields = self
            .number(doing.entered)
            .bytes(doing.what.as_bytes())
            .number(doing.number);
        fields
            .number(u64::from(doing.inside.is_some()))
            .number(doing.inside.map_or(0, ms))
    }

    pub(crate) fn failure(self, failure: &Failure) -> Self {
        let texts = [&failure.during, &failure.problem, &failure.hint];
        let message = self.number(failure.rank as u64);
        texts
            .iter()
            .fold(message, |message, text| message.bytes(text.as_bytes()))
    }
}

/// The fields that are left of a frame.
pub(crate) struct Fields<'a>(pub &'a [u8]);

impl<'a> Fields<'a> {
    /// What was read, if it is all that there was.
    pub(crate) fn end<T>(self, read: T) -> Option<T> {
        self.0.is_empty().then_some(read)
    }

    pub(crate) fn number(&mut self) -> Option<u64> {
        let (number, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*number))
    }

    pub(crate) fn index(&mut self) -> Option<usize> {
        self.number()?.try_into().ok()
    }

    pub(crate) fn bytes(&mut self) -> Option<&'a [u8]> {
        let (length, rest) = self.0.split_first_chunk()?;
        let (bytes, rest) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
        self.0 = rest;
        Some(bytes)
    }

    pub(crate) fn text(&mut self) -> Option<String> {
        String::from_utf8(self.bytes()?.to_vec()).ok()
    }

    pub(crate) fn doing(&mut self) -> Option<Doing> {
        let (entered, what, number) = (self.number()?, self.text()?, self.number()?);
        let (is_inside, ms) = (self.number()? != 0, self.number()?);
        let inside = is_inside.then(|| Duration::from_millis(ms));
        Some(Doing {
            entered,
            what,
            number,
            inside,
        })
    }

    pub(crate) fn failure(&mut self) -> Option<Failure> {
        let rank = self.index()?;
        let (during, problem, hint) = (self.text()?, self.text()?, self.text()?);
        Some(Failure {
            rank,
            during,
            problem,
            hint,
        })
    }
}
