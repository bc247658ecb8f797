//! Devices by name, and what a machine has: memory, arithmetic, peak FLOP/s.
//!
//! ```
//! use tallow::hardware;
//!
//! let device = hardware::device("cpu")?;
//! assert_eq!(hardware::device_name(&device), "cpu");
//! let (available, total) = (hardware::available_bytes_on(&device), hardware::total_bytes());
//! if let (Some(available), Some(total)) = (available, total) {
//!     println!("{} of {} MiB of memory are available", available >> 20, total >> 20);
//! }
//! # Ok::<(), tallow::Error>(())
//! ```

#[cfg(feature = "cuda")]
pub(crate) mod cuda;
#[cfg(not(feature = "cuda"))]
#[path = "no_cuda.rs"]
pub(crate) mod cuda;
#[cfg(all(feature = "cuda", feature = "report"))]
pub(crate) mod cupti;
#[cfg(target_os = "linux")]
mod host_memory;
#[cfg(not(target_os = "linux"))]
#[path = "host_memory_elsewhere.rs"]
mod host_memory;
mod tf32;
mod threads;

pub use crate::kernels::cpu::half_arithmetic::{HalfArithmetic, half_arithmetic};
pub use tf32::{set_tf32, tf32};
pub(crate) use threads::check_threads;

use crate::{Error, Result};
use candle_core::{DType, Device, DeviceLocation};
use std::collections::HashMap;
use std::path::Path;
use std::sync::{Mutex, OnceLock};

/// The device called `name`: `cpu`, `cuda`, `cuda:1`, `metal`, `metal:0`.
///
/// One device an ordinal: asking again gives the same device, on the same stream. (candle's own constructors give a new
/// one each time, and its tensors do not mix with the old one's.) Nothing on a GPU waits for another stream:
/// synchronise ([`Device::synchronize`]) before a tensor is moved to another GPU or another handle of this one.
///
/// ```
/// assert!(tallow::device("cpu")?.is_cpu());
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// A name that is none of these; a kind that this build has no support for (the error names the feature); a device that
/// is not there; an environment variable that asks for more than 4,096 threads (`RAYON_NUM_THREADS`,
/// `CANDLE_NUM_THREADS`).
pub fn device(name: &str) -> Result<Device> {
    static OPENED: OnceLock<Mutex<HashMap<String, Device>>> = OnceLock::new();

    let refuse = |problem: &str, hint: &str| {
        Err(Error::Device {
            name: name.into(),
            problem: problem.into(),
            hint: hint.into(),
        })
    };
    check_threads()?;
    let (kind, ordinal) = name.split_once(':').unwrap_or((name, "0"));
    let Ok(ordinal) = ordinal.parse::<usize>() else {
        return refuse(
            "the part after the colon is not a number",
            "write cuda:0, say",
        );
    };
    let (built, feature) = match kind {
        "cpu" if ordinal == 0 => return Ok(Device::Cpu),
        "cpu" => return refuse("there is one CPU device", "write cpu"),
        "cuda" => (cfg!(feature = "cuda"), "cuda"),
        "metal" => (cfg!(feature = "metal"), "metal"),
        _ => return refuse("no such kind of device", "use cpu, cuda:N or metal:N"),
    };
    if !built {
        return refuse(
            "this build has no support for it",
            &format!("build with --features {feature}"),
        );
    }
    let mut opened = OPENED
        .get_or_init(Mutex::default)
        .lock()
        .unwrap_or_else(|e| e.into_inner());
    let key = format!("{kind}:{ordinal}");
    if let Some(device) = opened.get(&key) {
        return Ok(device.clone());
    }
    let device = match kind {
        "cuda" => cuda::open(ordinal),
        _ => Device::new_metal(ordinal),
    }
    .or_else(|e| refuse(&e.to_string(), "is it there, and free?"))?;
    opened.insert(key, device.clone());
    Ok(device)
}

/// The name that [`device`] knows a device by.
pub fn device_name(device: &Device) -> String {
    match device.location() {
        DeviceLocation::Cpu => "cpu".into(),
        DeviceLocation::Cuda { gpu_id } => format!("cuda:{gpu_id}"),
        DeviceLocation::Metal { gpu_id } => format!("metal:{gpu_id}"),
    }
}

/// What a device is, in the words of the machine: the processor's model for the CPU; a GPU's model, memory and compute
/// capability.
#[cfg(feature = "report")]
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

/// The memory of the machine, in bytes, or what this process may have of it where that is less: on Linux the limits of
/// its control group and of all above it (versions 1 and 2), and `ulimit -v` and `-d`. Read once. `None` where the
/// system does not say.
pub fn total_bytes() -> Option<u64> {
    static TOTAL: OnceLock<Option<u64>> = OnceLock::new();
    *TOTAL.get_or_init(|| Some(host_memory::room(Path::new("/"))?.total_bytes))
}

/// Host memory that can still be allocated, in bytes: what the system calls available, or what is left of the least
/// limit that [`total_bytes`] counts.
///
/// Page cache counts as free. `None` where the system does not say.
///
/// A system that overcommits grants more than it has, and ends the process when that is written. So work is refused
/// beforehand, by what is left here. After `memory::system::reserve_scratch` what threads keep is not in it. Under
/// `ulimit -v` an allocator may need more addresses than it hands out.
pub fn available_bytes() -> Option<u64> {
    Some(host_memory::room(Path::new("/"))?.available_bytes)
}

/// As [`available_bytes`], of the memory that tensors on `device` are in. On CUDA, what the driver has left and what
/// the pool holds unused; waits for the device. Metal shares the host's.
pub fn available_bytes_on(device: &Device) -> Option<u64> {
    match device {
        Device::Cuda(_) => cuda::available_bytes(device),
        _ => available_bytes(),
    }
}

/// Refuses more memory than is available. Where that is not known, only a count that has saturated is refused.
///
/// # Errors
/// [`Error::OutOfMemory`].
pub(crate) fn check_available(
    what: &str,
    wanted_bytes: u64,
    available_bytes: Option<u64>,
) -> Result<()> {
    let available_bytes = available_bytes.unwrap_or(u64::MAX - 1);
    match wanted_bytes <= available_bytes {
        true => Ok(()),
        false => Err(Error::OutOfMemory {
            what: what.into(),
            wanted_bytes,
            available_bytes,
        }),
    }
}

/// The error of an allocation that was refused.
pub(crate) fn not_granted(what: &str, wanted_bytes: u64) -> Error {
    Error::OutOfMemory {
        what: what.into(),
        wanted_bytes,
        available_bytes: available_bytes().unwrap_or_default(),
    }
}

/// What matrix products of bf16 run on, on the CPU: AMX-BF16 where the processor and the system grant it, else
/// AVX512-BF16 on processors of AMD, on which it multiplies at twice f32's rate (on Intel's it gains nothing); `None`
/// where bf16 is widened and multiplied in f32, as f16 is everywhere.
///
/// All sum in f32, and results are rounded once, to the nearest, ties to even. All take denormal factors and sums,
/// those below 2^-126, as zero. AArch64's `bfdot` rounds its sums to odd. Widening takes denormal numbers as they are,
/// and sums in another order: bits differ from one kind of processor to another, while on one machine they are the same
/// in every run and for any number of threads.
///
/// On AMX-BF16 attention of bf16 multiplies its tiles too, of heads of 64 elements and more. What is computed in f32
/// there, such as the probabilities, is split into two terms of bf16, which leaves out 2^-15 of a product at most.
/// Other units would take as long for two terms as f32 takes. A unit that the variable below names multiplies
/// attention's tiles of any width.
///
/// `TALLOW_BF16_PRODUCTS` in the environment, read once, chooses: `amx-bf16`, `avx512-bf16`, `f32` for widening, or
/// `neon bf16` on AArch64, where it is never the default: it has run in an emulator alone. A unit that is not there is
/// not used, and bf16 is widened then.
///
/// ```
/// use tallow::hardware::{bf16_products, half_arithmetic};
/// assert!(bf16_products().is_none_or(|unit| half_arithmetic().contains(&unit)));
/// ```
pub fn bf16_products() -> Option<HalfArithmetic> {
    crate::kernels::cpu::gemm::bf16::unit()?.arithmetic()
}

/// What the CPU's multiply-add units allow in f32, measured: FLOP/s of all threads together, each running independent
/// fused multiply-adds on registers.
///
/// Takes about 0.1 s. `None` for other dtypes and devices.
///
/// This is the honest denominator of an MFU on a CPU, where no data sheet knows the clock under vector load.
pub fn measure_peak_flops(device: &Device, dtype: DType) -> Option<f64> {
    let known = device.is_cpu() && dtype == DType::F32;
    known.then(crate::kernels::cpu::simd::measure_multiply_add_rate)
}
