//! Every integration test, in one binary: linking candle is dear.

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

/// The GPU that tests of CUDA run on: those are ignored, `needs a CUDA device`, unless asked for.
#[cfg(feature = "cuda")]
fn gpu() -> candle_core::Device {
    tallow::device("cuda:0").unwrap()
}

/// Counting costs next to nothing, and the memory tests need it.
#[global_allocator]
static ALLOCATOR: tallow::memory::tracker::Tracker<memory::refused::Refusing> =
    tallow::memory::tracker::Tracker::new(memory::refused::Refusing);

/// Sentences of the examples, which several of their modules that tests load build on.
#[allow(dead_code)] // examples use more of it
#[path = "../../examples/common/words.rs"]
mod words;
