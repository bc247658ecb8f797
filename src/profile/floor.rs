//! Floors: the least time of a call at rates that the device reached.

use crate::compile::{Phase, Plan};
use crate::ops::cost::Cost;
use crate::precision::without_autocast;
use crate::{Error, Result, hardware, ops};
use candle_core::{DType, Device, DeviceLocation, Tensor};
use indexmap::IndexSet;
use rayon::prelude::*;
use std::collections::HashMap;
use std::fmt;
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::Instant;

/// Rates measured on a device: matmul FLOP/s in each dtype, and bytes per second of a copy.
///
/// The floor of a call with a given [`Cost`] is
///
/// ```text
/// max(matmul FLOPs / matmul rate of its dtype, (bytes read + bytes written) / copy rate)
/// ```
///
/// The roofline model of Williams, Waterman and Patterson (2009), with measured rates in place of those of a data
/// sheet. A call can be faster than its floor: a tensor that the call before left in a cache is read faster than a
/// copy reads memory, matmuls of some shapes reach more than those measured, and flash attention skips hidden scores
/// whose FLOPs are counted ([`Cost`]).
///
/// ```
/// use candle_core::{DType, Device};
/// use tallow::profile::{Cost, DeviceRates};
///
/// let rates = DeviceRates::measure(&Device::Cpu, &[DType::F32])?;
/// let add = Cost { read_bytes: 2e9, written_bytes: 1e9, ..Default::default() };
/// assert_eq!(rates.floor_seconds(&add, DType::F32), Some(3e9 / rates.memory_bytes));
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceRates {
    /// Matmul FLOP/s for each dtype: [`ops::linear`] with large square matrices.
    pub matmul_flops: Vec<(DType, f64)>,
    /// Bytes per second, read and written, of a copy that no cache holds.
    pub memory_bytes: f64,
}

/// The floor of one call of a plan, in a step.
#[derive(Clone, Debug, PartialEq)]
pub struct CallFloor {
    /// The path of the module in the model.
    pub path: String,
    /// The op's name.
    pub op: &'static str,
    /// The phase of the step.
    pub phase: Phase,
    /// How often the call runs in a step, for instance once in each micro-batch.
    pub runs: usize,
    /// The floor of these runs together, in seconds.
    pub seconds: f64,
}

/// Writes the rates: `matmuls 300 GFLOP/s in f32, 785 TFLOP/s in bf16; a copy 29 GB/s, reads plus writes`.
impl fmt::Display for DeviceRates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rates = self.matmul_flops.iter();
        let rates = rates.map(|(dtype, rate)| match rate / 1e9 {
            gflops if gflops < 1e4 => format!("{gflops:.0} GFLOP/s in {}", dtype.as_str()),
            gflops => format!("{:.0} TFLOP/s in {}", gflops / 1e3, dtype.as_str()),
        });
        let rates = rates.collect::<Vec<_>>().join(", ");
        let copied = self.memory_bytes / 1e9;
        write!(
            f,
            "matmuls {rates}; a copy {copied:.0} GB/s, reads plus writes"
        )
    }
}

impl DeviceRates {
    /// Measures the rates of `device` for matmuls in `dtypes`.
    ///
    /// Measuring a rate takes some 0.1 s. Later calls return the same rate; after a change of the number of threads or
    /// of [TF32](hardware::set_tf32) they measure again. Other work on the device makes the rates too low.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] or the device's error if the tensors do not fit: three matrices of 8,192 rows and a copy
    /// of 512 MiB on a GPU, 1,024 to 4,096 rows and 128 MiB on a CPU. A dtype in which the device has no matmul.
    pub fn measure(device: &Device, dtypes: &[DType]) -> Result<Self> {
        let dtypes: IndexSet<&DType> = dtypes.iter().collect();
        let matmul_flops = dtypes.into_iter().map(|dtype| {
            let rate = remembered(device, Some(*dtype), || matmul_rate(device, *dtype))?;
            Ok((*dtype, rate))
        });
        Ok(Self {
            matmul_flops: matmul_flops.collect::<Result<_>>()?,
            memory_bytes: remembered(device, None, || copy_rate(device))?,
        })
    }

    /// Returns the matmul FLOP/s in `dtype`, if they were measured: the denominator of an MFU.
    pub fn matmul_rate(&self, dtype: DType) -> Option<f64> {
        let mut rates = self.matmul_flops.iter();
        rates
            .find(|(measured, _)| *measured == dtype)
            .map(|(_, rate)| *rate)
    }

    /// Returns the floor of a call whose matmuls are in `dtype`, in seconds; `None` if it has matmuls and the rate of
    /// `dtype` was not measured.
    pub fn floor_seconds(&self, cost: &Cost, dtype: DType) -> Option<f64> {
        let rate = match self.matmul_rate(dtype) {
            Some(rate) => rate,
            None if cost.matmul_flops == 0.0 => f64::INFINITY,
            None => return None,
        };
        Some(cost.least_seconds(rate, self.memory_bytes))
    }
}

impl Plan {
    /// Returns the floor of each call of a step, in order, at rates measured on a device.
    ///
    /// Two kinds of calls are left out: those that run in the first step and in no later one, and exchanges with other
    /// ranks, whose floor is that of the network. The sum of the floors is the time of a step whose kernels run one
    /// after another and without a pause, each at the device's rate.
    ///
    /// ```
    /// use candle_core::{DType, Device};
    /// use tallow::compile::{Batch, Step, StepConfig};
    /// use tallow::model::{TransformerConfig, TransformerLM};
    /// use tallow::profile::DeviceRates;
    ///
    /// let (device, config) = (Device::Cpu, StepConfig::default());
    /// let model = TransformerLM::meta(&TransformerConfig::preset("small")?)?;
    /// let (plan, _) = Step::plan_for_model(&device, &model, &config, Batch::meta(4, 256)?)?;
    /// let rates = DeviceRates::measure(&device, &plan.matmul_dtypes())?;
    /// let floors = plan.floors(&rates)?;
    /// let seconds: f64 = floors.iter().map(|floor| floor.seconds).sum();
    /// println!("a step takes {seconds:.3} s or more");
    /// # Ok::<(), tallow::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Config`] if `rates` lack a dtype of [`matmul_dtypes`](Self::matmul_dtypes).
    pub fn floors(&self, rates: &DeviceRates) -> Result<Vec<CallFloor>> {
        let calls = self.calls().iter().enumerate();
        let computed = calls.filter(|(_, call)| !call.op.is_exchange());
        let floors = computed.filter_map(|(index, call)| {
            let (runs, cost) = (self.runs_per_step(index), self.cost(call)?);
            let dtype = self.compute_dtype(call)?;
            (runs > 0).then(|| match rates.floor_seconds(&cost, dtype) {
                Some(seconds) => Ok(CallFloor {
                    path: call.path.clone(),
                    op: call.op.name(),
                    phase: call.phase,
                    runs,
                    seconds: runs as f64 * seconds,
                }),
                None => Err(
                    Error::config("DeviceRates", "matmul_flops", "no rate for it").must_be(
                        format!("a rate for {}", dtype.as_str()),
                        "measure the plan's matmul_dtypes()",
                    ),
                ),
            })
        });
        floors.collect()
    }

    /// Returns the dtypes of the plan's matmuls, for [`DeviceRates::measure`].
    pub fn matmul_dtypes(&self) -> Vec<DType> {
        let calls = self.calls().iter();
        let calls =
            calls.filter(|call| self.cost(call).is_some_and(|cost| cost.matmul_flops > 0.0));
        let dtypes: IndexSet<DType> = calls.filter_map(|call| self.compute_dtype(call)).collect();
        dtypes.into_iter().collect()
    }
}

/// Returns the rate of a device, measured at the first call; `dtype` is that of matmuls, or `None` for the copy.
fn remembered(
    device: &Device,
    dtype: Option<DType>,
    measure: impl FnOnce() -> Result<f64>,
) -> Result<f64> {
    type Key = (DeviceLocation, Option<DType>, bool, usize);
    static RATES: LazyLock<Mutex<HashMap<Key, f64>>> = LazyLock::new(Mutex::default);

    let tf32 = dtype == Some(DType::F32) && hardware::tf32(device);
    let threads = rayon::current_num_threads(); // of the pool that computes on the CPU
    let key = (device.location(), dtype, tf32, threads);
    // Held while measuring: measurements on two threads would slow each other down.
    let mut rates = RATES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(rate) = rates.get(&key) {
        return Ok(*rate);
    }
    let rate = measure()?;
    rates.insert(key, rate);
    Ok(rate)
}

fn matmul_rate(device: &Device, dtype: DType) -> Result<f64> {
    let n = match device.is_cpu() {
        true => match rayon::current_num_threads() {
            ..8 => 1 << 10,
            8..32 => 1 << 11,
            _ => 1 << 12,
        },
        false => 1 << 13,
    };
    check_memory(device, n * n * (4 + 3 * dtype.size_in_bytes()))?;
    // Zeros would draw less power, and a GPU then runs at a higher clock.
    let random = || Tensor::rand(-1f32, 1f32, (n, n), device)?.to_dtype(dtype);
    let (x, w) = (random()?, random()?);
    let seconds = least_seconds(device, || {
        without_autocast(|| ops::linear(&x, &w)).map(drop)
    })?;
    Ok(2.0 * (n as f64).powi(3) / seconds)
}

fn copy_rate(device: &Device) -> Result<f64> {
    let bytes: usize = if device.is_cpu() {
        128 << 20
    } else {
        512 << 20
    };
    check_memory(device, 2 * bytes)?;
    if device.is_cpu() {
        let elements = bytes / size_of::<u64>();
        let (from, mut to) = (vec![1u64; elements], vec![0u64; elements]);
        let seconds = least_seconds(device, || {
            let parts = to.par_chunks_mut(1 << 15).zip(from.par_chunks(1 << 15));
            parts.for_each(|(to, from)| to.copy_from_slice(from));
            Ok(())
        })?;
        return Ok(2.0 * bytes as f64 / seconds);
    }
    let from = Tensor::zeros(bytes / size_of::<f32>(), DType::F32, device)?;
    let seconds = least_seconds(device, || Ok(from.copy().map(drop)?))?;
    Ok(2.0 * bytes as f64 / seconds)
}

/// Refuses a measurement that does not fit in memory.
fn check_memory(device: &Device, wanted_bytes: usize) -> Result<()> {
    let available_bytes = hardware::available_bytes_on(device);
    hardware::check_available("measured rates", wanted_bytes as u64, available_bytes)
}

/// Returns the time of `work` in the fastest of three rounds of at least 20 ms, after a first run.
fn least_seconds(device: &Device, mut work: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut round = |count: u32| -> Result<f64> {
        device.synchronize()?;
        let start = Instant::now();
        (0..count).try_for_each(|_| work())?;
        device.synchronize()?;
        Ok(start.elapsed().as_secs_f64() / f64::from(count))
    };
    round(1)?; // threads start, kernels load
    let once = round(1)?;
    let count = (0.02 / once).ceil().clamp(1.0, 1e4) as u32;
    let mut least = f64::INFINITY;
    for _ in 0..3 {
        least = least.min(round(count)?);
    }
    Ok(least)
}
