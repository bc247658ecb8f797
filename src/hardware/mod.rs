//! Devices by name, and the machine's memory and arithmetic.
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
use candle_core::{Device, DeviceLocation};
use std::collections::HashMap;
use std::path::Path;
use std::sync::{Mutex, OnceLock};

/// Returns the device called `name`: `cpu`, `cuda`, `cuda:1`, `metal`, `metal:0`.
///
/// There is one device per ordinal: the same name returns the same device, on the same stream. (candle's own
/// constructors return a new one each time, and its tensors cannot be combined with those of the old one.) Nothing on a
/// GPU waits for another stream: call [`Device::synchronize`] before a tensor is moved to another GPU or another handle
/// of this one.
///
/// ```
/// assert!(tallow::device("cpu")?.is_cpu());
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// [`Error::Device`] for an unknown name, a kind that this build does not support (the error names the feature), or a
/// missing device; [`Error::Config`] for an environment variable that asks for more than 4,096 threads
/// (`RAYON_NUM_THREADS`, `CANDLE_NUM_THREADS`).
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

/// Returns the name of a device, as [`device`] accepts it.
///
/// ```
/// use tallow::hardware;
///
/// let device = hardware::device("cpu")?;
/// assert_eq!(hardware::device_name(&device), "cpu");
/// # Ok::<(), tallow::Error>(())
/// ```
pub fn device_name(device: &Device) -> String {
    match device.location() {
        DeviceLocation::Cpu => "cpu".into(),
        DeviceLocation::Cuda { gpu_id } => format!("cuda:{gpu_id}"),
        DeviceLocation::Metal { gpu_id } => format!("metal:{gpu_id}"),
    }
}

/// Describes a device: the processor's model and number of threads for the CPU; model, memory and compute capability
/// for a GPU.
///
/// ```
/// let device = tallow::device("cpu")?;
/// assert!(tallow::hardware::description(&device).ends_with(" threads"));
/// # Ok::<(), tallow::Error>(())
/// ```
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

/// Returns the memory of the machine in bytes, or this process's limit if that is less. On Linux the limits are those
/// of its control group and all of that group's ancestors (versions 1 and 2), and `ulimit -v` and `-d`. Read once.
/// `None` if the system does not report it.
///
/// [`available_bytes`] has an example.
pub fn total_bytes() -> Option<u64> {
    static TOTAL: OnceLock<Option<u64>> = OnceLock::new();
    *TOTAL.get_or_init(|| Some(host_memory::host_memory(Path::new("/"))?.total_bytes))
}

/// Returns the host memory that can still be allocated, in bytes: what the system reports as available, or what is left
/// of the tightest limit that [`total_bytes`] describes.
///
/// Page cache counts as free. `None` if the system does not report it.
///
/// A system that overcommits grants more memory than it has, and kills the process when it writes to it. tallow
/// therefore refuses work that needs more than this. After `memory::system::reserve_scratch` the buffers that threads
/// keep are already subtracted. Under `ulimit -v` the real limit is lower, since allocators reserve more addresses than
/// they hand out.
///
/// ```
/// use tallow::hardware::{available_bytes, total_bytes};
///
/// if let (Some(available), Some(total)) = (available_bytes(), total_bytes()) {
///     assert!(available <= total);
/// }
/// ```
pub fn available_bytes() -> Option<u64> {
    Some(host_memory::host_memory(Path::new("/"))?.available_bytes)
}

/// Like [`available_bytes`], for the memory of tensors on `device`. On CUDA it is the driver's free memory plus the
/// pool's unused memory, after waiting for the device. Metal shares the host's memory.
///
/// ```
/// use tallow::hardware::{available_bytes, available_bytes_on};
///
/// let device = tallow::device("cpu")?;
/// assert_eq!(available_bytes_on(&device).is_some(), available_bytes().is_some());
/// # Ok::<(), tallow::Error>(())
/// ```
pub fn available_bytes_on(device: &Device) -> Option<u64> {
    match device {
        Device::Cuda(_) => cuda::available_bytes(device),
        _ => available_bytes(),
    }
}

/// Refuses more memory than is available. If that is not known, only a saturated count is refused.
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

/// Returns the error of an allocation that was refused.
pub(crate) fn not_granted(what: &str, wanted_bytes: u64) -> Error {
    Error::OutOfMemory {
        what: what.into(),
        wanted_bytes,
        available_bytes: available_bytes().unwrap_or_default(),
    }
}

/// Returns the unit that runs bf16 matmuls on the CPU. It is AMX-BF16 if the processor and the system grant it, else
/// AVX512-BF16 on AMD's processors, where it has twice the rate of f32 (on Intel's it gains nothing). `None` means that
/// bf16 is widened and multiplied in f32, as f16 always is.
///
/// All units sum in f32 and round results once, to nearest, ties to even; AArch64's `bfdot` rounds its sums to odd.
/// Units treat denormal factors and sums, those below 2^-126, as zero. Widening keeps denormals, and sums in another
/// order. Bits therefore differ between kinds of processors; on one machine they are the same in every run and for any
/// number of threads.
///
/// On AMX-BF16, attention in bf16 also uses the unit for its tiles, for heads of 64 elements and more. Values that are
/// computed in f32 there, such as the probabilities, are split into two bf16 terms, with an error of at most 2^-15 of a
/// product. On other units two terms would take as long as f32. A unit that the variable below selects is used for
/// attention's tiles of any width.
///
/// The environment variable `TALLOW_BF16_MATMUL`, read once, selects the unit: `amx-bf16`, `avx512-bf16`, `f32` for
/// widening, or `neon bf16` on AArch64, where it is never the default, since it has only been tested in an emulator. If
/// the selected unit is missing, bf16 is widened.
///
/// ```
/// use tallow::hardware::{bf16_matmul_unit, half_arithmetic};
/// assert!(bf16_matmul_unit().is_none_or(|unit| half_arithmetic().contains(&unit)));
/// ```
pub fn bf16_matmul_unit() -> Option<HalfArithmetic> {
    crate::kernels::cpu::gemm::bf16::unit()?.arithmetic()
}
