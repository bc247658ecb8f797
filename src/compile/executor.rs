//! Who runs a plan: the executor of the device that the model is on, with the model's and the optimizer's own tensors.

use super::cpu;
#[cfg(feature = "cuda")]
use super::cuda;
use super::phase_times::PhaseTimes;
use super::plan::{BufferRange, Plan};
use super::run::{Controls, Tensors};
use crate::Result;
use crate::inplace::{Element, storage_address, with_mut_slice, with_mut_slices};
use crate::kernels::Update;
use candle_core::{CpuStorage, DType, Device, Shape, Storage, Tensor, WithDType};
use half::{bf16, f16};

/// A plan's memory, and what runs its calls.
#[derive(Debug)]
pub(super) enum Executor {
    Cpu(cpu::Executor),
    #[cfg(feature = "cuda")]
    Gpu(Box<cuda::Undisturbed>),
}

impl Executor {
    /// Allocates what a plan takes, but for the arena.
    ///
    /// # Errors
    /// On a GPU, shapes that its kernels do not take; memory that is refused.
    pub fn new(plan: &Plan, device: &Device) -> Result<Self> {
        match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(gpu) => Ok(Self::Gpu(Box::new(cuda::Undisturbed::new(plan, gpu)?))),
            _ => Ok(Self::Cpu(cpu::Executor::new(plan)?)),
        }
    }

    /// Takes the arena that the executor of another plan on the same device had, or allocates one.
    ///
    /// # Errors
    /// An arena that does not fit the device's memory: then neither has one.
    pub fn take_arena(&mut self, plan: &Plan, from: Option<&mut Self>) -> Result<()> {
        match (self, from) {
            (Self::Cpu(executor), Some(Self::Cpu(from))) => executor.take_arena(plan, from),
            (Self::Cpu(executor), _) => executor.take_arena(plan, &mut cpu::Executor::default()),
            #[cfg(feature = "cuda")]
            (Self::Gpu(executor), Some(Self::Gpu(from))) => executor.take_arena(plan, Some(from)),
            #[cfg(feature = "cuda")]
            (Self::Gpu(executor), _) => executor.take_arena(plan, None),
        }
    }

    /// Runs the calls of every micro-batch, and those before: all but the update.
    pub fn run_micro_batches(&mut self, plan: &Plan, tensors: &Tensors<'_>) -> Result<()> {
        match self {
            Self::Cpu(executor) => on_cpu(tensors, |lent| {
                let controls = Controls {
                    communicator: tensors.communicator,
                    loss_divisor: tensors.loss_divisor,
                    ..Default::default()
                };
                executor.run_micro_batches(plan, lent, &controls)
            }),
            #[cfg(feature = "cuda")]
            Self::Gpu(executor) => executor.run_micro_batches(plan, tensors),
        }
    }

    /// Runs every call: whether the update was among them, or an overflow has ended the step before. After an error
    /// neither parameters nor optimizer state have changed (an update in backward apart, which nothing can fail after).
    pub fn run(
        &mut self,
        plan: &Plan,
        tensors: &Tensors<'_>,
        clip_norm: f64,
        loss_scale: Option<f64>,
    ) -> Result<bool> {
        let updates = tensors.updates.iter().map(|planned| planned.update);
        let updates: Vec<Update> = updates.collect();
        let controls = Controls {
            updates: &updates,
            clip_norm,
            loss_scale,
            communicator: tensors.communicator,
            loss_divisor: tensors.loss_divisor,
        };
        match self {
            Self::Cpu(executor) => on_cpu(tensors, |lent| executor.run(plan, lent, &controls)),
            #[cfg(feature = "cuda")]
            Self::Gpu(executor) => executor.run(plan, tensors, &controls),
        }
    }

    /// Times the phases of runs from now on, or no more.
    pub fn time_phases(&mut self, plan: &Plan, on: bool) {
        match self {
            Self::Cpu(executor) => executor.time_phases(plan, on),
            #[cfg(feature = "cuda")]
            Self::Gpu(executor) => executor.time_phases(plan, on),
        }
    }

    /// What the phases of the last run took, if they are timed.
    pub fn phase_times(&self) -> Result<Option<PhaseTimes>> {
        match self {
            Self::Cpu(executor) => executor.phase_times(),
            #[cfg(feature = "cuda")]
            Self::Gpu(executor) => executor.phase_times(),
        }
    }

    /// What a run has left in an operand that the plan keeps.
    pub fn read<T: WithDType>(&mut self, plan: &Plan, operand: &BufferRange) -> Result<Vec<T>> {
        match self {
            Self::Cpu(executor) => Ok(executor.read(plan, operand)),
            #[cfg(feature = "cuda")]
            Self::Gpu(executor) => executor.read(plan, operand),
        }
    }

    /// The same copied to a tensor of that shape, where the plan is run.
    pub fn copy(&self, plan: &Plan, operand: &BufferRange, shape: &Shape) -> Result<Tensor> {
        match self {
            Self::Cpu(executor) => match plan.buffer_of(operand).dtype {
                DType::BF16 => copied(executor.values::<bf16>(plan, operand), shape),
                DType::F16 => copied(executor.values::<f16>(plan, operand), shape),
                DType::F64 => copied(executor.values::<f64>(plan, operand), shape),
                _ => copied(executor.values::<f32>(plan, operand), shape),
            },
            #[cfg(feature = "cuda")]
            Self::Gpu(executor) => executor.copy(plan, operand, shape),
        }
    }

    /// Has the copies of weights that last from run to run renewed in the next.
    pub fn refresh(&mut self) {
        match self {
            Self::Cpu(_) => {} // none last
            #[cfg(feature = "cuda")]
            Self::Gpu(executor) => executor.refresh(),
        }
    }
}

/// Calls `run` with the elements of all tensors, which are on the CPU.
fn on_cpu<R>(
    tensors: &Tensors<'_>,
    run: impl FnOnce(&cpu::ExternalBuffers<'_>) -> Result<R>,
) -> Result<R> {
    // Each storage once: a second lock of one thread would wait for a writer that waits for the first.
    let addresses: Vec<usize> = tensors.arguments.iter().map(storage_address).collect();
    let firsts = addresses
        .iter()
        .map(|address| addresses.iter().position(|x| x == address));
    let firsts: Vec<usize> = firsts.flatten().collect();
    let mut guards = Vec::with_capacity(addresses.len());
    for (i, (x, first)) in tensors.arguments.iter().zip(&firsts).enumerate() {
        guards.push((*first == i).then(|| x.storage_and_layout().0));
    }
    let arguments = tensors.arguments.iter().zip(&firsts).map(|(x, first)| {
        let (start, end) = x.layout().contiguous_offsets().unwrap_or((0, 0)); // checked
        let Some(storage) = &guards[*first] else {
            unreachable!("the first of a storage is locked");
        };
        match &**storage {
            Storage::Cpu(CpuStorage::F32(x)) => Ok(bytes_read(&x[start..end])),
            Storage::Cpu(CpuStorage::BF16(x)) => Ok(bytes_read(&x[start..end])),
            Storage::Cpu(CpuStorage::F16(x)) => Ok(bytes_read(&x[start..end])),
            Storage::Cpu(CpuStorage::F64(x)) => Ok(bytes_read(&x[start..end])),
            Storage::Cpu(CpuStorage::U32(x)) => Ok(bytes_read(&x[start..end])),
            Storage::Cpu(CpuStorage::I64(x)) => Ok(bytes_read(&x[start..end])),
            Storage::Cpu(CpuStorage::U8(x)) => Ok(bytes_read(&x[start..end])),
            _ => candle_core::bail!(
                "expected an argument on the CPU, of a float dtype, u32, i64 or u8"
            ),
        }
    });
    let arguments = arguments.collect::<candle_core::Result<Vec<_>>>()?;
    let count = tensors.parameters.len();
    let parameters = tensors.parameters.iter().map(|(_, var)| var.as_tensor());
    let updates = tensors.updates.iter();
    let moments = updates.flat_map(|planned| &planned.moments).flatten();
    let all: Vec<&Tensor> = parameters.chain(moments).collect();
    let mut result = None;
    let run_with = |output: Option<*mut [u8]>| {
        with_mut_bytes(&all, |slices| {
            let (parameters, mut moments) = slices.split_at(count);
            let of_each = tensors.updates.iter().map(|planned| {
                let (own, rest) = moments.split_at(planned.moments.iter().flatten().count());
                moments = rest;
                own.try_into().ok()
            });
            let moments: Vec<Option<[*mut [u8]; 2]>> = of_each.collect();
            let lent = cpu::ExternalBuffers {
                parameters,
                moments: &moments,
                output,
                arguments: &arguments,
            };
            result = Some(run(&lent));
        })
    };
    match tensors.output {
        None => run_with(None)?,
        Some(output) => match output.dtype() {
            DType::BF16 => with_mut_slice::<bf16>(output, |x| run_with(Some(bytes(x))))?,
            DType::F16 => with_mut_slice::<f16>(output, |x| run_with(Some(bytes(x))))?,
            DType::F64 => with_mut_slice::<f64>(output, |x| run_with(Some(bytes(x))))?,
            _ => with_mut_slice::<f32>(output, |x| run_with(Some(bytes(x))))?,
        },
    }
    match result {
        Some(result) => result,
        None => unreachable!("what was lent was not used"),
    }
}

/// Lends the elements of variables and their state as bytes.
fn with_mut_bytes(tensors: &[&Tensor], f: impl FnOnce(&[*mut [u8]])) -> candle_core::Result<()> {
    // Behind a pointer, or every dtype that follows another would be a type of its own.
    type Borrower<'f> = Box<dyn FnOnce(&[*mut [u8]]) + 'f>;

    fn lend(tensors: &[&Tensor], lent: Vec<*mut [u8]>, f: Borrower<'_>) -> candle_core::Result<()> {
        let dtype = tensors.first().map(|tensor| tensor.dtype());
        let other = tensors
            .iter()
            .position(|tensor| Some(tensor.dtype()) != dtype);
        let alike = other.unwrap_or(tensors.len());
        match dtype {
            None => {
                f(&lent);
                Ok(())
            }
            Some(DType::F64) => lend_as::<f64>(tensors.split_at(alike), lent, f),
            Some(DType::BF16) => lend_as::<bf16>(tensors.split_at(alike), lent, f),
            Some(DType::F16) => lend_as::<f16>(tensors.split_at(alike), lent, f),
            Some(_) => lend_as::<f32>(tensors.split_at(alike), lent, f),
        }
    }

    fn lend_as<T: Element>(
        (first, rest): (&[&Tensor], &[&Tensor]),
        mut lent: Vec<*mut [u8]>,
        f: Borrower<'_>,
    ) -> candle_core::Result<()> {
        let mut result = Ok(());
        with_mut_slices::<T>(first, |slices| {
            let of = |slice: &*mut [T]| {
                std::ptr::slice_from_raw_parts_mut(slice.cast(), slice.len() * size_of::<T>())
            };
            lent.extend(slices.iter().map(of));
            result = lend(rest, lent, f);
        })?;
        result
    }

    lend(tensors, Vec::with_capacity(tensors.len()), Box::new(f))
}

fn bytes<T>(elements: &mut [T]) -> *mut [u8] {
    let len = size_of_val(elements);
    std::ptr::slice_from_raw_parts_mut(elements.as_mut_ptr().cast(), len)
}

fn bytes_read<T>(elements: &[T]) -> *const [u8] {
    let start = elements.as_ptr().cast();
    std::ptr::slice_from_raw_parts(start, size_of_val(elements))
}

fn copied<T: WithDType>(values: &[T], shape: &Shape) -> Result<Tensor> {
    Ok(Tensor::from_slice(values, shape, &Device::Cpu)?)
}
