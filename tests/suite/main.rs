//! All integration tests in one binary, because linking candle is slow.

mod accumulate;
mod attention_benchmark;
mod backward;
mod bench;
mod check;
mod checkpoint;
mod child;
mod compile;
mod cs336;
mod custom_model;
mod data;
mod distributed;
mod end_to_end;
mod families;
mod flash;
mod fused;
mod golden;
mod graph;
mod memory;
mod model;
mod modules;
mod opinfo;
mod ops;
mod optim;
mod precision;
mod probe;
mod profile;
mod report;
mod settings;
mod tf32;
mod tokenizer;
mod toy_model;
mod train;

/// Returns the GPU of CUDA tests, which are ignored (`needs a CUDA device`) unless requested.
#[cfg(feature = "cuda")]
fn gpu() -> candle_core::Device {
    tallow::device("cuda:0").unwrap()
}

/// Counts allocations for the memory tests, at almost no cost.
#[global_allocator]
static ALLOCATOR: tallow::memory::tracker::Tracker<memory::refused::Refusing> =
    tallow::memory::tracker::Tracker::new(memory::refused::Refusing);

/// Sentences of the examples, used by several of their modules that tests load.
#[allow(dead_code)] // examples use more of it
#[path = "../../examples/common/words.rs"]
mod words;
