//! TF32: refused on the CPU; on a GPU f32 matmuls follow the switch, also in backward.

#[cfg(feature = "cuda")]
pub mod gpu;

use crate::check::refusal;
use candle_core::Device;
use tallow::hardware::{set_tf32, tf32};

#[test]
fn the_cpu_has_none() {
    let cpu = Device::Cpu;
    refusal(
        set_tf32(&cpu, true),
        &["\"cpu\"", "no TF32", "8.0", "cuda:0"],
    );
    assert!(!tf32(&cpu));
    set_tf32(&cpu, false).unwrap(); // already off
}
