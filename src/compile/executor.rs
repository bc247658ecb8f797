//! Executors: they run a plan on the model's device, with the tensors of the model and the optimizer.

use super::buffer::Location;
use super::cpu;
#[cfg(feature = "cuda")]
use super::cuda;
use super::op::BufferRange;
use super::phase_times::PhaseTimes;
use super::plan::Plan;
use crate::distributed::Communicator;
use crate::inplace::{for_elements, storage_address, with_all_mut_bytes};
use crate::kernels::Update;
use crate::optim::PlannedUpdate;
use crate::{Error, Result};
use candle_core::{Device, Shape, Storage, Tensor, Var, WithDType};

/// The memory of a plan on a device, and the code that runs its calls.
#[derive(Debug)]
pub(super) enum Executor {
    Cpu(cpu::Executor),
    #[cfg(feature = "cuda")]
    Gpu(Box<cuda::SerializedDrop>),
}

impl Executor {
    /// Allocates the memory of a plan, except for the arena.
    ///
    /// # Errors
    /// On a GPU, shapes that its kernels do not support; out of memory.
    pub fn new(plan: &Plan, device: &Device) -> Result<Self> {
        match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(gpu) => Ok(Self::Gpu(Box::new(cuda::SerializedDrop::new(plan, gpu)?))),
            _ => Ok(Self::Cpu(cpu::Executor::new(plan)?)),
        }
    }

    /// Takes over the arena of another plan's executor on the same device, or allocates one.
    ///
    /// # Errors
    /// An arena that does not fit in the device's memory; then neither executor has one.
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

    /// Runs the calls before the micro-batches and those of every micro-batch: all except the update.
    pub fn run_micro_batches(&mut self, plan: &Plan, tensors: &Tensors<'_>) -> Result<()> {
        match self {
            Self::Cpu(executor) => on_cpu(tensors, |external| {
                let controls = Controls {
                    communicator: tensors.communicator,
                    loss_divisor: tensors.loss_divisor,
                    ..Default::default()
                };
                executor.run_micro_batches(plan, external, &controls)
            }),
            #[cfg(feature = "cuda")]
            Self::Gpu(executor) => executor.run_micro_batches(plan, tensors),
        }
    }

    /// Runs every call. Returns whether the update ran; it does not after an overflow. After an error neither
    /// parameters nor optimizer state have changed. (An update in backward is an exception, but nothing can fail after
    /// it.)
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
            Self::Cpu(executor) => {
                on_cpu(tensors, |external| executor.run(plan, external, &controls))
            }
            #[cfg(feature = "cuda")]
            Self::Gpu(executor) => executor.run(plan, tensors, &controls),
        }
    }

    /// Enables or disables the timing of phases in later runs.
    pub fn time_phases(&mut self, plan: &Plan, on: bool) {
        match self {
            Self::Cpu(executor) => executor.time_phases(plan, on),
            #[cfg(feature = "cuda")]
            Self::Gpu(executor) => executor.time_phases(plan, on),
        }
    }

    /// Returns the phase times of the last run, if they are measured.
    pub fn phase_times(&self) -> Result<Option<PhaseTimes>> {
        match self {
            Self::Cpu(executor) => executor.phase_times(),
            #[cfg(feature = "cuda")]
            Self::Gpu(executor) => executor.phase_times(),
        }
    }

    /// Reads an operand that the plan keeps after a run.
    pub fn read<T: WithDType>(&mut self, plan: &Plan, operand: &BufferRange) -> Result<Vec<T>> {
        match self {
            Self::Cpu(executor) => Ok(executor.read(plan, operand)),
            #[cfg(feature = "cuda")]
            Self::Gpu(executor) => executor.read(plan, operand),
        }
    }

    /// Copies an operand that the plan keeps to a new tensor of this shape on the plan's device.
    pub fn copy(&self, plan: &Plan, operand: &BufferRange, shape: &Shape) -> Result<Tensor> {
        match self {
            Self::Cpu(executor) => Ok(executor.copy(plan, operand, shape)?),
            #[cfg(feature = "cuda")]
            Self::Gpu(executor) => executor.copy(plan, operand, shape),
        }
    }

    /// Makes the next run renew the copies of weights that persist from run to run.
    pub fn refresh(&mut self) {
        match self {
            Self::Cpu(_) => {} // no copies persist
            #[cfg(feature = "cuda")]
            Self::Gpu(executor) => executor.refresh(),
        }
    }
}

/// Settings that may change from run to run.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Controls<'a> {
    /// The update of each parameter, by index.
    pub updates: &'a [Update],
    /// The maximum norm of gradients, if the plan clips.
    pub clip_norm: f64,
    /// The loss scale, which a plan with loss scaling divides by again; `None` means 1 and no overflow check.
    pub loss_scale: Option<f64>,
    /// The divisor that turns a sum over targets into the step's mean loss; `None` if the loss is a mean.
    pub loss_divisor: Option<f64>,
    /// The communicator for exchanges between ranks.
    pub communicator: Option<&'a Communicator>,
}

impl Controls<'_> {
    /// Returns the gradient of the loss that backward starts from.
    pub fn loss_gradient(&self) -> f64 {
        self.loss_scale.unwrap_or(1.0) / self.loss_divisor.unwrap_or(1.0)
    }
}

/// Tensors outside of a plan's arena, borrowed for one run.
#[derive(Clone, Copy, Default)]
pub(super) struct Tensors<'a> {
    pub parameters: &'a [(String, Var)],
    /// The update of each parameter, by index; empty in a run without an update.
    pub updates: &'a [PlannedUpdate<'a>],
    /// Whether parameters and tensors of state are those of the executor's last run.
    #[cfg_attr(
        not(feature = "cuda"),
        expect(dead_code, reason = "only a GPU's executor keeps addresses")
    )]
    pub is_unchanged: bool,
    pub output: Option<&'a Tensor>,
    /// The arguments, by index: contiguous, inputs with all of their micro-batches. Arguments that the run's calls do
    /// not read may be missing.
    pub arguments: &'a [Tensor],
    /// The communicator for exchanges between ranks, if the plan has them.
    pub communicator: Option<&'a Communicator>,
    /// See [`Controls::loss_divisor`].
    pub loss_divisor: Option<f64>,
}

/// Returns the error for gradients with a norm that is not finite. `culprit` is the parameter's index; `None` means
/// that only the norm of all gradients together is not finite.
pub(super) fn not_finite(plan: &Plan, culprit: Option<usize>, norm: f64) -> Error {
    let buffer = culprit.and_then(|number| plan.at_location(Location::Parameter(number)));
    Error::Data {
        what: match buffer {
            Some(buffer) => format!("the gradient of parameter {}", buffer.name),
            None => "all gradients together".into(),
        },
        expected: "finite numbers".into(),
        got: format!("a norm of {norm}"),
        hint: "lower the learning rate, or skip this batch; nothing was updated".into(),
    }
}

/// Calls `run` with the data of all tensors, which must be on the CPU.
fn on_cpu<R>(
    tensors: &Tensors<'_>,
    run: impl FnOnce(&cpu::ExternalBuffers<'_>) -> Result<R>,
) -> Result<R> {
    // Each storage is locked once: a second read lock on this thread would deadlock if a writer waits in between.
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
        let (start, end) = x.layout().contiguous_offsets().unwrap_or((0, 0)); // checked to be contiguous
        match guards[*first].as_deref() {
            Some(Storage::Cpu(storage)) => {
                Ok(for_elements!(storage, x => bytes_of(&x[start..end])))
            }
            _ => candle_core::bail!("expected an argument on the CPU"),
        }
    });
    let arguments = arguments.collect::<candle_core::Result<Vec<_>>>()?;
    let parameters = tensors.parameters.iter().map(|(_, var)| var.as_tensor());
    let updates = tensors.updates.iter();
    let states = updates.flat_map(|planned| planned.states).flatten();
    let states = states.map(|(_, var)| var.as_tensor());
    let all: Vec<&Tensor> = parameters.chain(states).chain(tensors.output).collect();
    with_all_mut_bytes(&all, |external| {
        let (parameters, mut rest) = external.split_at(tensors.parameters.len());
        let states = tensors.updates.iter().map(|planned| {
            let (own, others) = rest.split_at(planned.states.map_or(0, <[_]>::len));
            rest = others;
            own
        });
        let states: Vec<&[*mut [u8]]> = states.collect();
        run(&cpu::ExternalBuffers {
            parameters,
            states: &states,
            output: rest.first().copied(),
            arguments: &arguments,
        })
    })?
}

fn bytes_of<T>(elements: &[T]) -> *const [u8] {
    let start = elements.as_ptr().cast();
    std::ptr::slice_from_raw_parts(start, size_of_val(elements))
}
