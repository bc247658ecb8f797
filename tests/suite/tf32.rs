//! TF32: where there is none; and that products of f32 on a GPU follow the switch, those of backward too.

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
    set_tf32(&cpu, false).unwrap(); // as it is
}
