//! PyTorch's memory snapshot, for the viewers that read it.

use super::{Block, MemoryRecording};
use crate::files;
use crate::probe::Path as Place;
use crate::{Error, Result};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::UNIX_EPOCH;

/// A [`MemoryRecording`] in the format of PyTorch's CUDA allocator, for the viewer at pytorch.org/memory_viz and for
/// `torch/cuda/_memory_viz.py`.
///
/// There is one device, the host or the GPU that was recorded, with one segment. Blocks get new addresses in it, from
/// an allocator that always uses the smallest gap: the process's real addresses are too far apart to draw. The frames
/// of a block are its path, the innermost first: `linear` in `layers.0/attn/q_proj`, `q_proj` in `layers.0/attn`, and
/// so on to the phase. Known blocks from before the recording are drawn as alive from the start.
///
/// Only blocks from the recording's threshold on are included, with the sizes requested: rounding and caches of an
/// allocator are not.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Snapshot {
    segments: Vec<Segment>,
    device_traces: Vec<Vec<TraceEntry>>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
struct Segment {
    device: i32,
    address: u64,
    total_size: u64,
    allocated_size: u64,
    active_size: u64,
    requested_size: u64,
    stream: i32,
    segment_type: &'static str,
    segment_pool_id: (i32, i32),
    is_expandable: bool,
    frames: Vec<Frame>,
    blocks: Vec<SegmentBlock>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
struct SegmentBlock {
    address: u64,
    size: u64,
    requested_size: u64,
    state: &'static str,
    frames: Vec<Frame>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
struct TraceEntry {
    action: &'static str,
    addr: u64,
    size: u64,
    stream: i32,
    time_us: u64,
    frames: Vec<Frame>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
struct Frame {
    filename: String,
    line: u32,
    name: String,
}

const BASE: u64 = 1 << 32;

impl Snapshot {
    /// Creates the snapshot at the end of a recording, with the trace of all allocations before it.
    pub fn new(recording: &MemoryRecording) -> Self {
        let mut arena = Arena::default();
        let mut addresses = vec![0; recording.blocks.len()];
        for (place, block) in recording.blocks.iter().enumerate() {
            if block.allocated_at.is_none() {
                addresses[place] = arena.allocate(block.bytes);
            }
        }
        let began = recording.began.duration_since(UNIX_EPOCH);
        let began_us = began.unwrap_or_default().as_micros() as u64;
        let mut trace = Vec::new();
        for (change, sample) in recording.changes().into_iter().zip(&recording.curve) {
            let Some((is_allocation, place)) = change else {
                continue;
            };
            let block = &recording.blocks[place];
            let actions: &[&'static str] = if is_allocation {
                addresses[place] = arena.allocate(block.bytes);
                &["alloc"]
            } else {
                arena.free(addresses[place], block.bytes);
                &["free_requested", "free_completed"]
            };
            trace.extend(actions.iter().map(|action| TraceEntry {
                action,
                addr: BASE + addresses[place],
                size: block.bytes,
                stream: 0,
                time_us: began_us + sample.at_ns / 1000,
                frames: frames(block),
            }));
        }
        let blocks = recording.blocks.iter().zip(&addresses);
        let at_end = blocks.filter(|(block, _)| block.freed_at.is_none());
        let segment = segment(at_end.collect(), arena.end);
        Self {
            segments: segment.into_iter().collect(),
            device_traces: vec![trace],
        }
    }

    /// Writes the snapshot as pickle, protocol 3, as `torch.cuda.memory._dump_snapshot` does; all of PyTorch's tools
    /// read it.
    ///
    /// # Errors
    /// [`Error::Io`] with the path if it cannot be written.
    pub fn save_pickle(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        files::write_atomically(path, |mut file| {
            serde_pickle::to_writer(&mut file, self, Default::default())
                .map_err(|e| Error::io("write", path, std::io::Error::other(e)))
        })
    }

    /// Writes the snapshot as JSON, which newer viewers read too.
    ///
    /// # Errors
    /// [`Error::Io`] with the path if it cannot be written.
    pub fn save_json(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        files::write_atomically(path, |file| {
            serde_json::to_writer(file, self).map_err(|e| Error::io("write", path, e.into()))
        })
    }
}

/// Returns the segment: live blocks and the gaps between them. `None` if there never was a block.
fn segment(mut alive: Vec<(&Block, &u64)>, end: u64) -> Option<Segment> {
    alive.sort_by_key(|(_, address)| **address);
    let mut blocks = Vec::new();
    let mut covered = 0;
    let gap = |from: u64, to: u64| SegmentBlock {
        address: BASE + from,
        size: to - from,
        requested_size: 0,
        state: "inactive",
        frames: Vec::new(),
    };
    for (block, &address) in alive {
        if covered < address {
            blocks.push(gap(covered, address));
        }
        blocks.push(SegmentBlock {
            address: BASE + address,
            size: block.bytes,
            requested_size: block.bytes,
            state: "active_allocated",
            frames: frames(block),
        });
        covered = address + block.bytes;
    }
    if covered < end {
        blocks.push(gap(covered, end));
    }
    let active_size = blocks.iter().map(|block| block.requested_size).sum();
    (end > 0).then_some(Segment {
        address: BASE,
        total_size: end,
        allocated_size: active_size,
        active_size,
        requested_size: active_size,
        segment_type: "large",
        blocks,
        ..Default::default()
    })
}

/// Returns the frames of a block, the innermost first: the op, the modules around it, the phase.
fn frames(block: &Block) -> Vec<Frame> {
    let frame = |name: &str, filename: &str| Frame {
        filename: filename.into(),
        line: 0,
        name: name.into(),
    };
    let mut frames = Vec::new();
    if let Some(name) = &block.name {
        frames.push(frame(name, block.kind.name()));
    }
    let mut path = block.path;
    while let Some(around) = path.parent() {
        let filename = match around {
            Place::ROOT => "model".into(),
            around => around.to_string(),
        };
        frames.push(frame(&path.name(), &filename));
        path = around;
    }
    if frames.is_empty() {
        let name = match block.allocated_at {
            Some(_) => "candle",
            None => "before the recording",
        };
        frames.push(frame(name, block.kind.name()));
    }
    if !block.phase.is_empty() {
        frames.push(frame(block.phase, "step"));
    }
    frames
}

/// Allocates addresses from 0 up, from the smallest gap that is large enough.
#[derive(Default)]
struct Arena {
    /// Sizes of gaps by address; adjacent gaps are merged.
    gaps: BTreeMap<u64, u64>,
    end: u64,
}

impl Arena {
    fn allocate(&mut self, bytes: u64) -> u64 {
        let fitting = self.gaps.iter().filter(|(_, size)| **size >= bytes);
        let smallest = fitting.min_by_key(|(address, size)| (**size, **address));
        let Some((address, size)) = smallest.map(|(address, size)| (*address, *size)) else {
            self.end += bytes;
            return self.end - bytes;
        };
        self.gaps.remove(&address);
        if size > bytes {
            self.gaps.insert(address + bytes, size - bytes);
        }
        address
    }

    fn free(&mut self, address: u64, bytes: u64) {
        let (mut from, mut to) = (address, address + bytes);
        let below = self.gaps.range(..address).next_back();
        if let Some((&gap, &size)) = below
            && gap + size == address
        {
            from = gap;
        }
        to += self.gaps.remove(&to).unwrap_or(0);
        self.gaps.insert(from, to - from);
    }
}

#[cfg(test)]
mod tests {
    use super::Arena;

    #[test]
    fn gaps_are_used_and_grow_together() {
        let mut arena = Arena::default();
        let [a, b, c] = [100, 50, 30].map(|bytes| arena.allocate(bytes));
        assert_eq!((a, b, c, arena.end), (0, 100, 150, 180));
        arena.free(a, 100);
        arena.free(c, 30);
        assert_eq!(arena.allocate(30), 150); // the smaller gap
        assert_eq!(arena.allocate(60), 0);
        arena.free(b, 50);
        assert_eq!(arena.allocate(90), 60); // 40 and 50 merged
        assert_eq!(arena.end, 180);
    }
}
