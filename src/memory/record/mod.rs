//! Every block of memory with its origin: recorded while a step runs, summed, drawn, and written for PyTorch's viewers.

mod recording;
mod snapshot;
mod timeline;

pub(crate) use recording::blocks_taken;
pub(super) use recording::buffer;
pub use recording::{
    Block, Holdings, MemoryRecording, Origin, PhaseSpan, RecordConfig, Recorder, record, record_on,
};
pub use snapshot::Snapshot;
pub use timeline::timeline;

use super::breakdown::MemoryKind;
