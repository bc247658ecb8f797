//! Every integration test, in one binary: linking candle is dear.

mod data;
mod report;
