//! What a measurement was made with and on.

use crate::hardware;
use crate::report::Fields;
use candle_core::Device;

/// The header of a report, as far as a library knows it: the device, this crate's version and features, the threads; of
/// a CPU also the [half-precision arithmetic](hardware::half_arithmetic) that it has.
pub fn environment(on: &Device) -> Fields {
    let features: Vec<&str> = [
        ("train", cfg!(feature = "train")),
        ("report", cfg!(feature = "report")),
        ("png", cfg!(feature = "png")),
        ("hf", cfg!(feature = "hf")),
        ("files", cfg!(feature = "files")),
        ("serde", cfg!(feature = "serde")),
        ("cuda", cfg!(feature = "cuda")),
        ("cudnn", cfg!(feature = "cudnn")),
        ("mpi", cfg!(feature = "mpi")),
        ("nvtx", cfg!(feature = "nvtx")),
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
    fields.insert("device", hardware::device_name(on));
    fields.insert("hardware", hardware::description(on));
    if on.is_cpu() {
        fields.insert("half arithmetic", half_arithmetic());
    }
    if on.is_cuda() {
        let products = if hardware::tf32(on) { "TF32" } else { "exact" };
        fields.insert("f32 products", products);
    }
    fields.insert("threads", rayon::current_num_threads());
    fields.insert("tallow", env!("CARGO_PKG_VERSION"));
    fields.insert("features", features);
    fields
}

/// What the CPU has, and what of it is used.
fn half_arithmetic() -> String {
    let units = hardware::half_arithmetic();
    if units.is_empty() {
        return "none; kernels compute in f32".into();
    }
    let names: Vec<&str> = units.iter().map(|unit| unit.name()).collect();
    let names = names.join(", ");
    match hardware::bf16_matmul_unit() {
        None => format!("{names}; unused, kernels compute in f32"),
        Some(unit) => format!("{names}; bf16 products by {unit}, all else in f32"),
    }
}
