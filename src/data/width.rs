//! Raw ids of 32 or 64 bits, which are not read as u16.

use super::source::Source;
use crate::{Error, Result};
use std::collections::BTreeSet;

/// u16 ids that are decoded together; a multiple of 4.
const SCAN_TOKENS: usize = 1 << 14;

/// Files of fewer ids of 32 bits are not judged.
const LEAST_IDS: usize = 16;

/// How many different ids there must be: a few may be a pattern of u16 ids that has a 0 at every second place.
const LEAST_DISTINCT: usize = 4;

/// The largest upper half of an id that is recognised: vocabularies have up to a million ids.
const MOST_UPPER: u32 = 15;

/// Refuses a file without a header whose ids have 32 or 64 bits, little-endian. Read as u16, each would be its lower
/// half and then its upper half, which is at most what the vocabulary allows: 0 where it has no more than 65,536 ids.
///
/// A file is refused only if *every* second u16 is that small while the others are not, and of different values. No
/// text is like that: each of its tokens would be followed by one of the first few ids.
pub(super) fn refuse_wider_ids(source: &Source, vocab_size: usize) -> Result<()> {
    let Source::File { file, .. } = source else {
        return Ok(());
    };
    let count = source.len();
    if !count.is_multiple_of(2) || count < 2 * LEAST_IDS {
        return Ok(());
    }
    let most_upper = ((vocab_size - 1) >> 16).min(MOST_UPPER as usize) as u32;
    let mut distinct = BTreeSet::new();
    let mut is_64_bits = count.is_multiple_of(4);
    let mut largest_upper = 0;
    let mut ids = vec![0; SCAN_TOKENS.min(count)];
    for start in (0..count).step_by(SCAN_TOKENS) {
        let ids = &mut ids[..SCAN_TOKENS.min(count - start)];
        source.decode(start, ids)?;
        for [lower, upper] in ids.as_chunks().0 {
            if *upper > most_upper {
                return Ok(()); // as a text's third or fourth token already is
            }
            largest_upper = largest_upper.max(*upper);
            if *lower > most_upper && distinct.len() < LEAST_DISTINCT {
                distinct.insert(*lower);
            }
        }
        is_64_bits &= ids.as_chunks().0.iter().all(|[_, _, a, b]| a | b == 0);
    }
    if distinct.len() < LEAST_DISTINCT {
        return Ok(());
    }
    let (places, width) = match is_64_bits {
        true => ("three of four u16 are 0", "i64"),
        false if largest_upper == 0 => ("every second u16 is 0", "u32"),
        false => ("every second u16 is an upper half", "u32"),
    };
    Err(Error::Format {
        path: file.path.clone(),
        problem: format!(
            "expected raw u16 ids, got what looks like raw {width} ids: {places}, in all {count}"
        ),
        hint: format!(
            "read it as {width} and write it with data::write_tokens as TokenFormat::HeaderedU32; if these are u16 \
             ids indeed, Tokens::open_as with TokenFormat::RawU16 (--token-format raw-u16) reads them"
        ),
    })
}
