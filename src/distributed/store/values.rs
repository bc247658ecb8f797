//! The values that ranks set, within bounds.

use std::collections::{BTreeMap, HashMap};

/// What is stored: a number of entries, and the bytes of their keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Stored {
    pub entries: usize,
    pub bytes: usize,
}

/// What one rank may store. Ranks store some hundred KiB to meet: names and shapes of weights, NCCL's identifier.
pub(super) const MOST_OF_A_RANK: Stored = Stored {
    entries: 1 << 10,
    bytes: 32 << 20,
};

/// What all ranks may store together.
pub(super) const MOST_OF_ALL: Stored = Stored {
    entries: 1 << 17,
    bytes: 256 << 20,
};

/// Values by key, each counted for the rank that set it last.
#[derive(Default)]
pub(super) struct Values {
    entries: HashMap<String, Entry>,
    of_ranks: BTreeMap<usize, Stored>,
    of_all: Stored,
}

struct Entry {
    rank: usize,
    value: Vec<u8>,
}

impl Values {
    pub(super) fn get(&self, key: &str) -> Option<&[u8]> {
        self.entries.get(key).map(|entry| entry.value.as_slice())
    }

    /// Removes a value.
    pub(super) fn take(&mut self, key: &str) -> Option<Vec<u8>> {
        self.remove(key).map(|entry| entry.value)
    }

    /// Gives a key its value.
    ///
    /// # Errors
    /// What the bound is, where the value would exceed one. The key keeps the value that it has.
    pub(super) fn set(&mut self, rank: usize, key: String, value: Vec<u8>) -> Result<(), String> {
        let before = self.remove(&key);
        let bytes = key.len() + value.len();
        let of_rank = self.of_ranks.get(&rank).copied().unwrap_or_default();
        let bounds = [
            (of_rank, MOST_OF_A_RANK, "of a rank"),
            (self.of_all, MOST_OF_ALL, "of all ranks"),
        ];
        let full = bounds.into_iter().find(|(stored, most, _)| {
            stored.entries >= most.entries || stored.bytes.saturating_add(bytes) > most.bytes
        });
        let Some((stored, most, whose)) = full else {
            self.insert(key, Entry { rank, value });
            return Ok(());
        };
        if let Some(before) = before {
            self.insert(key, before);
        }
        Err(format!(
            "at most {} values and {} bytes {whose} ({} and {} are stored)",
            most.entries, most.bytes, stored.entries, stored.bytes
        ))
    }

    fn insert(&mut self, key: String, entry: Entry) {
        let bytes = key.len() + entry.value.len();
        for stored in [
            &mut self.of_all,
            self.of_ranks.entry(entry.rank).or_default(),
        ] {
            stored.entries += 1;
            stored.bytes += bytes;
        }
        self.entries.insert(key, entry);
    }

    fn remove(&mut self, key: &str) -> Option<Entry> {
        let entry = self.entries.remove(key)?;
        let bytes = key.len() + entry.value.len();
        for stored in [
            &mut self.of_all,
            self.of_ranks.entry(entry.rank).or_default(),
        ] {
            stored.entries -= 1;
            stored.bytes -= bytes;
        }
        Some(entry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_bounded_by_number_and_bytes() {
        let mut values = Values::default();
        for number in 0..MOST_OF_A_RANK.entries {
            values.set(1, number.to_string(), Vec::new()).unwrap();
        }
        let refused = values.set(1, "more".into(), Vec::new()).unwrap_err();
        assert!(refused.starts_with("at most 1024 values"), "{refused}");
        assert_eq!(values.get("more"), None);
        values.set(1, "7".into(), vec![7]).unwrap(); // in place of another
        values.set(2, "more".into(), vec![2]).unwrap(); // another rank's
        values.take("8").unwrap();
        values.set(1, "again".into(), Vec::new()).unwrap();

        let mut values = Values::default();
        let megabytes = |count: usize| vec![0; count << 20];
        values.set(0, "a".into(), megabytes(16)).unwrap();
        values.set(0, "b".into(), megabytes(15)).unwrap();
        let refused = values.set(0, "a".into(), megabytes(20)).unwrap_err();
        assert!(refused.contains("33554432 bytes of a rank"), "{refused}");
        assert_eq!(values.get("a").unwrap().len(), 16 << 20); // what it had
        for rank in 1..15 {
            values.set(rank, rank.to_string(), megabytes(16)).unwrap();
        }
        let refused = values.set(15, "15".into(), megabytes(2)).unwrap_err();
        assert!(
            refused.contains("268435456 bytes of all ranks"),
            "{refused}"
        );
        values.take("b").unwrap();
        values.set(15, "15".into(), megabytes(2)).unwrap();
        for key in ["a", "15"]
            .map(String::from)
            .into_iter()
            .chain((1..15).map(|rank| rank.to_string()))
        {
            values.take(&key).unwrap();
        }
        assert_eq!(values.of_all, Stored::default());
    }
}
