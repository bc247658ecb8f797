//! Who runs a plan: the executor of the device that the model is on, with the model's and the optimizer's own tensors.

use super::buffer::Location;
use super::cpu;
#[cfg(feature = "cuda")]
use super::cuda;
use super::phase_times::PhaseTimes;
use super::plan::{BufferRange, Plan};
use crate::distributed::Communicator;
use crate::inplace::{for_elements, storage_address, with_all_mut_bytes};
use crate::kernels::Update;
use crate::optim::PlannedUpdate;
use crate::{Error, Result};
use candle_core::{Device, Shape, Storage, Tensor, Var, WithDType};

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
            Self::Cpu(executor) => Ok(executor.copy(plan, operand, shape)?),
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

/// What may change from run to run.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Controls<'a> {
    /// By parameter.
    pub updates: &'a [Update],
    /// The norm that gradients are clipped to, where the plan clips.
    pub clip_norm: f64,
    /// What the loss's gradient begins with, to be undone where the plan unscales; `None` for 1, and for no check
    /// either.
    pub loss_scale: Option<f64>,
    /// Of a loss that is a sum over targets: what makes it the step's mean.
    pub loss_divisor: Option<f64>,
    /// Of the ranks that gradients are averaged over.
    pub communicator: Option<&'a Communicator>,
}

impl Controls<'_> {
    /// The gradient of the loss.
    pub fn loss_gradient(&self) -> f64 {
        self.loss_scale.unwrap_or(1.0) / self.loss_divisor.unwrap_or(1.0)
    }
}

/// What lies outside of a plan's arena, lent for one run.
#[derive(Clone, Copy, Default)]
pub(super) struct Tensors<'a> {
    pub parameters: &'a [(String, Var)],
    /// By parameter; empty in a run without an update.
    pub updates: &'a [PlannedUpdate],
    /// What a forward alone gives out.
    pub output: Option<&'a Tensor>,
    /// What is read where it lies, by number, contiguous, inputs with all of their micro-batches; those that the run's
    /// calls do not read may be missing.
    pub arguments: &'a [Tensor],
    /// Of the ranks that gradients are averaged over, where a plan has it.
    pub communicator: Option<&'a Communicator>,
    /// [`Controls::loss_divisor`].
    pub loss_divisor: Option<f64>,
}

/// Gradients that cannot be clipped: those of parameter number `culprit`, or all together.
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
    let moments = updates.flat_map(|planned| &planned.moments).flatten();
    let all: Vec<&Tensor> = parameters.chain(moments).chain(tensors.output).collect();
    with_all_mut_bytes(&all, |lent| {
        let (parameters, mut rest) = lent.split_at(tensors.parameters.len());
        let moments = tensors.updates.iter().map(|planned| {
            let (own, others) = rest.split_at(planned.moments.iter().flatten().count());
            rest = others;
            own.try_into().ok()
        });
        let moments: Vec<Option<[*mut [u8]; 2]>> = moments.collect();
        run(&cpu::ExternalBuffers {
            parameters,
            moments: &moments,
            output: rest.first().copied(),
            arguments: &arguments,
        })
    })?
}

fn bytes_of<T>(elements: &[T]) -> *const [u8] {
    let start = elements.as_ptr().cast();
    std::ptr::slice_from_raw_parts(start, size_of_val(elements))
}
