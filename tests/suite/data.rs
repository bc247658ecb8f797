//! `tallow::data`: token files byte by byte, every error, and the guarantees of batches.

mod batches;
mod files;
mod refusals;
mod source_trees;
mod views;

use crate::check::refusal;
use std::fs;
use std::path::PathBuf;

use candle_core::{DType, Device, Tensor};
use tallow::Error;
use tallow::data::{Batch, TokenFormat, Tokens};
use tempfile::{TempDir, tempdir};

const CPU: Device = Device::Cpu;
const FORMATS: [TokenFormat; 3] = [
    TokenFormat::RawU16,
    TokenFormat::HeaderedU16,
    TokenFormat::HeaderedU32,
];

/// Returns a temporary folder, and a file in it.
fn file(content: &[u8]) -> (TempDir, PathBuf) {
    let folder = tempdir().unwrap();
    let path = folder.path().join("tokens.bin");
    fs::write(&path, content).unwrap();
    (folder, path)
}

/// Returns 1024 bytes: three little-endian integers, then zeros.
fn header(magic: u32, version: u32, count: i32) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend(magic.to_le_bytes());
    bytes.extend(version.to_le_bytes());
    bytes.extend(count.to_le_bytes());
    bytes.resize(1024, 0);
    bytes
}

/// Returns the tokens 0, 1, 2, ...: each is its own position.
fn counting(len: usize) -> Tokens {
    Tokens::from_ids((0..len as u32).collect::<Vec<_>>(), len).unwrap()
}

fn rows(tensor: &Tensor) -> Vec<Vec<u32>> {
    assert_eq!(tensor.dtype(), DType::U32);
    assert!(tensor.is_contiguous());
    tensor.to_vec2().unwrap()
}

fn both(batch: &Batch) -> (Vec<Vec<u32>>, Vec<Vec<u32>>) {
    (rows(&batch.inputs), rows(&batch.targets))
}
