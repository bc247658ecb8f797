//! The examples as a hostile user types them: refused with a message, or run; no panic, no hang. This binary links
//! nothing of candle; `cargo test` builds the examples beside it.

mod family;
mod flags;
mod layout;
mod memory;
mod outputs;
mod process;
mod refusals;
mod runs;
mod stdout;
