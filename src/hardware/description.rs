//! A device in words.

use super::{cuda, device_name};
use candle_core::Device;

/// What a device is, in the words of the machine: the processor's model for the CPU; a GPU's model, memory and compute
/// capability.
pub fn description(device: &Device) -> String {
    if !device.is_cpu() {
        return cuda::description(device).unwrap_or_else(|| device_name(device));
    }
    let threads = rayon::current_num_threads();
    let model = sysinfo::System::new().ok().and_then(|mut system| {
        system.refresh_cpu_specifics(sysinfo::CpuRefreshKind::nothing());
        Some(system.cpus().first()?.brand().trim().to_string())
    });
    match model {
        Some(model) if !model.is_empty() => format!("{model}, {threads} threads"),
        _ => format!("cpu, {threads} threads"),
    }
}
