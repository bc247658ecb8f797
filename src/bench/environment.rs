//! What a measurement was made with and on.

use crate::device;
use crate::report::Fields;
use candle_core::Device;

/// The header of a report, as far as a library knows it: the device, this crate's version and features, the threads.
pub fn environment(on: &Device) -> Fields {
    let features: Vec<&str> = [
        ("cuda", cfg!(feature = "cuda")),
        ("cudnn", cfg!(feature = "cudnn")),
        ("nccl", cfg!(feature = "nccl")),
        ("metal", cfg!(feature = "metal")),
        ("mkl", cfg!(feature = "mkl")),
        ("accelerate", cfg!(feature = "accelerate")),
    ]
    .into_iter()
    .filter_map(|(name, on)| on.then_some(name))
    .collect();
    let features = match features.is_empty() {
        true => "none".to_string(),
        false => features.join(", "),
    };
    let mut fields = Fields::new();
    fields.insert("device", device::device_name(on));
    fields.insert("hardware", device::description(on));
    fields.insert("threads", rayon::current_num_threads());
    fields.insert("tallow", env!("CARGO_PKG_VERSION"));
    fields.insert("features", features);
    fields
}
