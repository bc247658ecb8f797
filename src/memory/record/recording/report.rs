//! A recording as tables.

use super::{Block, MemoryRecording};
use crate::probe::Path;
use crate::report::{Column, Fields, Report};

impl Block {
    /// Where it came from, as tables name it: what it is labelled, its path, or `candle` for what candle does between
    /// ops.
    pub fn origin(&self) -> String {
        match (&self.name, self.path) {
            (Some(name), _) => name.clone(),
            (None, Path::ROOT) if self.taken_at.is_none() => "before the recording".into(),
            (None, Path::ROOT) => "candle".into(),
            (None, path) => path.to_string(),
        }
    }
}

impl MemoryRecording {
    /// The peak of each phase, and what was alive then, by what it was there for.
    pub fn phase_report(&self) -> Report {
        let mut columns = vec![
            Column::text("phase", "Phase"),
            Column::mib("peak_bytes", "Peak"),
        ];
        let mut rows = Vec::new();
        let mut held = Vec::new();
        for phase in &self.phases {
            let mut row = Fields::new();
            row.insert("phase", phase.name);
            row.insert("peak_bytes", self.peak_bytes_in(phase));
            for (kind, bytes) in self.holdings_at(self.worst_in(phase)).iter() {
                row.insert(key(kind.name()), bytes);
                if !held.contains(&kind) {
                    held.push(kind);
                }
            }
            rows.push(row);
        }
        held.sort();
        for (minor, kind) in (1..).zip(held) {
            let column = Column::mib(key(kind.name()), kind.name());
            columns.push(column.under("Of which").minor(minor));
            for row in &mut rows {
                if row.get(&key(kind.name())).is_none() {
                    row.insert(key(kind.name()), 0);
                }
            }
        }
        Report {
            columns,
            rows,
            notes: self.notes(),
            ..Default::default()
        }
    }

    /// The `count` largest blocks that were taken, with their origin; blocks that are alike are one row.
    pub fn largest_report(&self, count: usize) -> Report {
        let mut alike: Vec<(&Block, usize)> = Vec::new();
        for block in self.largest(usize::MAX) {
            let same = |(known, _): &&mut (&Block, usize)| {
                known.bytes == block.bytes
                    && (known.path, known.phase, known.kind)
                        == (block.path, block.phase, block.kind)
            };
            match alike.iter_mut().find(same) {
                Some((_, blocks)) => *blocks += 1,
                None => alike.push((block, 1)),
            }
        }
        let rows = alike.into_iter().take(count).map(|(block, blocks)| {
            let mut row = Fields::new();
            row.insert("bytes", block.bytes);
            row.insert("blocks", blocks);
            row.insert("holds", block.kind.name());
            row.insert("phase", block.phase);
            row.insert("origin", block.origin());
            row
        });
        Report {
            columns: vec![
                Column::mib("bytes", "Each"),
                Column::count("blocks", "Blocks"),
                Column::text("holds", "Holds"),
                Column::text("phase", "Phase"),
                Column::text("origin", "Origin"),
            ],
            rows: rows.collect(),
            notes: self.notes(),
            ..Default::default()
        }
    }

    /// What a reader must know to judge the sums.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if self.lost_events > 0 {
            notes.push(format!(
                "{} events found no room in a recording of {}: sums by origin are incomplete; record with a larger \
                 capacity",
                self.lost_events, self.config.capacity
            ));
        }
        if self.unknown_blocks > 0 {
            notes.push(format!(
                "{} blocks were given back that had been taken before the recording, of unknown size: sums after them \
                 are too large; label them",
                self.unknown_blocks
            ));
        }
        notes
    }
}

fn key(name: &str) -> String {
    format!("{}_bytes", name.replace(' ', "_"))
}
