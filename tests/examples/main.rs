//! The examples under hostile input: each command line runs or is refused with a message; none panics or hangs. This
//! binary does not link candle; `cargo test` builds the examples.

mod family;
mod flags;
mod layout;
mod memory;
mod outputs;
mod process;
mod refusals;
mod runs;
mod stdout;
