//! The environment of a measurement.

use crate::hardware;
use crate::report::Fields;
use candle_core::Device;

/// Returns the environment for the header of a report: device, version and features of this crate, number of threads;
/// for a CPU also its [half-precision arithmetic](hardware::half_arithmetic).
///
/// ```
/// let fields = tallow::bench::environment(&tallow::device("cpu")?);
/// assert_eq!(fields.get("device"), Some(&"cpu".into()));
/// assert!(fields.get("threads").is_some());
/// # Ok::<(), tallow::Error>(())
/// ```
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
    let mut fields = Fields::new();
    fields.insert("device", hardware::device_name(on));
    fields.insert("hardware", hardware::description(on));
    if on.is_cpu() {
        fields.insert("half arithmetic", half_arithmetic());
    }
    if on.is_cuda() {
        let products = if hardware::tf32(on) { "TF32" } else { "exact" };
        fields.insert("f32 matmuls", products);
    }
    fields.insert("threads", rayon::current_num_threads());
    fields.insert("tallow", env!("CARGO_PKG_VERSION"));
    fields.insert("features", features.join(", "));
    fields
}

/// Describes the CPU's half-precision units, and whether they are used.
fn half_arithmetic() -> String {
    let units = hardware::half_arithmetic();
    if units.is_empty() {
        return "none; kernels compute in f32".into();
    }
    let names: Vec<&str> = units.iter().map(|unit| unit.name()).collect();
    let names = names.join(", ");
    match hardware::bf16_matmul_unit() {
        None => format!("{names}; unused, kernels compute in f32"),
        Some(unit) => format!("{names}; bf16 matmuls by {unit}, all else in f32"),
    }
}
