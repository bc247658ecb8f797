//! Attention, planned.
//!
//! What lives here: [`Attention`], what it is planned for ([`AttentionPlanConfig`]), its plan (`plan`), and what it
//! asks of the tensors that it is given (`arguments`). What does not: attention in a model, which is planned with what
//! stands around it.

mod arguments;
mod config;
mod plan;

pub use config::AttentionPlanConfig;

use super::executor::Executor;
use super::plan::{BufferRange, Plan};
use super::run::Tensors;
use super::traced::Target;
use crate::attention::Algorithm;
use crate::{Error, Result};
use arguments::{check, check_start};
use candle_core::{Device, Shape, Tensor, WithDType};
use config::check_device;
use plan::Planned;

const OP: &str = "compile::Attention";

/// `softmax(scale q k^T) v` and its gradients for fixed shapes, planned once: q (..., H, Tq, Dh), k and v (..., Hkv,
/// Tk, Dh), the output (..., H, Tq, Dh), in f32, bf16 or f16, on the CPU or on a CUDA GPU.
///
/// The mathematics of [`attention::naive`](crate::attention::naive()), the probabilities kept for backward. They,
/// output and gradients lie in one arena: a run allocates nothing.
///
/// On the CPU, where q, k and v have one shape, a block of queries goes through scores, softmax and weighted sum while
/// it is in cache; probabilities are kept as exponentials and what each row of them is multiplied by, what a mask hides
/// is never there, and no other matrix of (T, T) ever is. In half precision products and sums are f32's, and output and
/// gradients are rounded once. For bf16 the exponentials are kept in f16, which has three bits more, in half the memory
/// that eager naive attention's probabilities take; for f16, as those, in f32. What rounding took from the output is
/// kept for backward too. Other shapes, windows and first keys are computed by the eager op's kernels, which keep the
/// probabilities.
///
/// On a GPU products are cuBLASLt's, with sums in f32. The scores are where their softmax will be, (..., Tq, Tk) in the
/// dtype of q, k and v, as eager attention on a GPU has them, and lie there once: backward reads the probabilities as
/// they were rounded. The scores' gradients are there for as many heads at once as 1 GiB holds. Of what a mask hides,
/// blocks as a whole are neither computed nor read. Each half is recorded as a CUDA graph when it comes the second time
/// with its tensors where they were, and then is one launch; with others it is launched call by call. In f16 the
/// scores' gradients are rounded to f16: scale what d_out comes from.
///
/// With [`Algorithm::Flash`] the tiles of [`attention::flash`](crate::attention::flash()) instead: of (Tq, Tk) there is
/// nothing, kept are the output, a number or two a query ([`lse`](Self::lse)) and, in half precision, what rounding
/// took from the output. The same kernels as eagerly, and the same bits. On the CPU they take tiles and sums of dq for
/// themselves, as they do eagerly.
///
/// It stands outside of candle's graph: [`backward`](Self::backward) is called with the output's gradient, by code that
/// has it.
///
/// ```
/// use candle_core::{DType, Tensor};
/// use tallow::attention::{AttentionConfig, Mask};
/// use tallow::compile::{Attention, AttentionPlanConfig};
///
/// let device = tallow::device("cpu")?;
/// let q = Tensor::randn(0f32, 1.0, (2, 3, 5, 8), &device)?; // (B, H, T, Dh)
/// let config = AttentionPlanConfig {
///     attention: AttentionConfig { mask: Mask::Causal, ..Default::default() },
///     ..AttentionPlanConfig::new((2, 3, 5, 8), DType::F32)
/// };
/// let mut attention = Attention::new(&device, &config)?;
/// attention.forward(&q, &q, &q)?;
/// let out: &[f32] = attention.output_values()?; // as it lies in the arena, row by row
/// assert_eq!(out.len(), 2 * 3 * 5 * 8);
/// attention.backward(&q.ones_like()?)?;
/// let [dq, dk, dv] = attention.gradients()?; // copies
/// assert_eq!(dq.dims(), [2, 3, 5, 8]);
/// println!("{}", attention.plan().explain());
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Debug)]
pub struct Attention {
    config: AttentionPlanConfig,
    plan: Plan,
    executor: Executor,
    /// Where a run leaves the output, the gradients of q, k and v, and flash attention the log-sum-exp.
    out: BufferRange,
    gradients: Vec<BufferRange>,
    lse: Option<BufferRange>,
    device: Device,
    /// Where it is planned, if there are any.
    first_keys: Option<Tensor>,
    /// q, k and v of the last forward, which backward reads again.
    inputs: Option<[Tensor; 3]>,
    /// Whether the last forward's gradients are there.
    has_gradients: bool,
}

impl Attention {
    /// Plans attention on `device`, where q, k and v will be, and allocates its arena.
    ///
    /// # Errors
    /// [`Error::Shape`] for fewer than two dimensions, a size of 0, shapes that do not fit each other; [`Error::DType`]
    /// for another dtype than f32, bf16 and f16; [`Error::Placement`] for a device that is neither the CPU nor a CUDA
    /// GPU of compute capability 8.0 or later; [`Error::OutOfMemory`] for an arena that does not fit the device's
    /// memory; [`Error::Config`] for dropout. For what flash attention's kernels do not take (heads over 256, on a GPU
    /// of no multiple of 8, in f32 of 4, or a scale that is not above 0), [`Error::Shape`] and, on a GPU,
    /// [`Error::Placement`].
    pub fn new(device: &Device, config: &AttentionPlanConfig) -> Result<Self> {
        check_device(device)?;
        let Planned {
            lowered,
            gradients,
            lse,
        } = plan::of(config, Target::from(device))?;
        Ok(Self {
            executor: Executor::new(&lowered.plan, device)?,
            device: device.clone(),
            config: config.clone(),
            plan: lowered.plan,
            out: lowered.output,
            gradients,
            lse,
            first_keys: match &config.attention.first_keys {
                Some(first_keys) => Some(first_keys.to_device(device)?.tensor().clone()),
                None => None,
            },
            inputs: None,
            has_gradients: false,
        })
    }

    /// The plan alone: what would be done on `device`, and what memory it would take.
    ///
    /// ```
    /// use candle_core::DType;
    /// use tallow::attention::{Algorithm, AttentionConfig, Mask};
    /// use tallow::compile::{Attention, AttentionPlanConfig};
    ///
    /// let device = tallow::device("cpu")?;
    /// let bytes = |mask, dtype, algorithm| {
    ///     let attention = AttentionConfig { mask, ..Default::default() };
    ///     let shape = AttentionPlanConfig::new((8, 4096, 64), dtype);
    ///     let config = AttentionPlanConfig { attention, algorithm, ..shape };
    ///     Ok::<u64, tallow::Error>(Attention::plan_for(&device, &config)?.peak_bytes())
    /// };
    /// let full = bytes(Mask::Full, DType::F32, Algorithm::Naive)?;
    /// assert!(bytes(Mask::Causal, DType::F32, Algorithm::Naive)? < full * 6 / 10);
    /// assert!(bytes(Mask::Full, DType::BF16, Algorithm::Naive)? < full * 6 / 10); // exponentials in f16
    /// assert!(bytes(Mask::Full, DType::F32, Algorithm::Flash)? < full / 10);
    /// # Ok::<(), tallow::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`new`](Self::new), whatever the machine has and the GPU's kernels take.
    pub fn plan_for(device: &Device, config: &AttentionPlanConfig) -> Result<Plan> {
        check_device(device)?;
        Self::plan_of(Target::from(device), config)
    }

    /// As [`plan_for`](Self::plan_for), for a GPU, which need not be there.
    pub(crate) fn plan_for_gpu(config: &AttentionPlanConfig) -> Result<Plan> {
        Self::plan_of(Target::Cuda, config)
    }

    fn plan_of(target: Target, config: &AttentionPlanConfig) -> Result<Plan> {
        Ok(plan::of(config, target)?.lowered.plan)
    }

    /// Computes the output of q (..., H, Tq, Dh), k and v (..., Hkv, Tk, Dh): [`output`](Self::output) has it until the
    /// next run.
    ///
    /// q, k and v are read where they are, and kept (not copied) for [`backward`](Self::backward) until the next
    /// forward.
    ///
    /// # Errors
    /// Another shape or dtype than planned; tensors that are not contiguous, or on another device; for flash attention
    /// on a GPU, tensors that begin elsewhere than at a multiple of 16 bytes of their storage.
    pub fn forward(&mut self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<()> {
        self.check("q", q, &self.config.q)?;
        self.check("k", k, &self.config.k)?;
        self.check("v", v, &self.config.v)?;
        (self.inputs, self.has_gradients) = (None, false);
        let arguments: Vec<&Tensor> = [q, k, v].into_iter().chain(&self.first_keys).collect();
        let tensors = Tensors {
            arguments: &arguments,
            ..Default::default()
        };
        self.executor.run_micro_batches(&self.plan, &tensors)?;
        self.inputs = Some([q, k, v].map(Tensor::clone));
        Ok(())
    }

    /// Computes the gradients of the last forward's q, k and v from its output's, (..., H, Tq, Dh):
    /// [`gradients`](Self::gradients) has them until the next run.
    ///
    /// # Errors
    /// As [`forward`](Self::forward); [`Error::Order`] before it.
    pub fn backward(&mut self, d_out: &Tensor) -> Result<()> {
        self.check("d_out", d_out, &self.out_shape())?;
        let Some([q, k, v]) = &self.inputs else {
            return Err(before("backward", "forward"));
        };
        let inputs = [q, k, v].into_iter().chain(&self.first_keys);
        let arguments: Vec<&Tensor> = inputs.chain([d_out]).collect();
        let tensors = Tensors {
            arguments: &arguments,
            ..Default::default()
        };
        self.has_gradients = false;
        self.executor
            .run_after_micro_batches(&self.plan, &tensors)?;
        self.has_gradients = true;
        Ok(())
    }

    /// A copy of the last forward's output, where it was planned: (..., H, Tq, Dh).
    ///
    /// # Errors
    /// [`Error::Order`] before the first.
    pub fn output(&self) -> Result<Tensor> {
        self.check_output()?;
        self.executor.copy(&self.plan, &self.out, &self.out_shape())
    }

    /// A copy of the last forward's `log(sum(exp(scores)))` of every query, where it was planned: (..., H, Tq) f32,
    /// -inf for a query that sees no key.
    ///
    /// # Errors
    /// [`Error::Order`] before the first forward, and of naive attention, which keeps probabilities instead.
    pub fn lse(&self) -> Result<Tensor> {
        self.check_output()?;
        let Some(lse) = &self.lse else {
            return Err(Error::Order {
                op: OP,
                problem: "naive attention keeps no log-sum-exp".into(),
                hint: "plan it with Algorithm::Flash".into(),
            });
        };
        let dims = self.config.q.dims();
        let shape = Shape::from(&dims[..dims.len() - 1]);
        self.executor.copy(&self.plan, lse, &shape)
    }

    /// (..., H, Tq, Dv).
    fn out_shape(&self) -> Shape {
        let mut dims = self.config.q.dims().to_vec();
        if let (Some(width), Some(of_v)) = (dims.last_mut(), self.config.v.dims().last()) {
            *width = *of_v;
        }
        Shape::from(dims)
    }

    /// The last forward's output as it lies in the arena, row by row: (..., H, Tq, Dh). On the CPU.
    ///
    /// # Errors
    /// As [`output`](Self::output); [`Error::DType`] if `T` is not the dtype that was planned for; [`Error::Placement`]
    /// on a GPU, whose memory is not the host's.
    pub fn output_values<T: WithDType>(&self) -> Result<&[T]> {
        self.check_output()?;
        self.values(&self.out)
    }

    /// Copies of the last backward's gradients of q, k and v, where they were planned: in their shapes.
    ///
    /// # Errors
    /// [`Error::Order`] if there was none since the last forward.
    pub fn gradients(&self) -> Result<[Tensor; 3]> {
        self.check_gradients()?;
        let copy = |place: usize, shape: &Shape| {
            let gradient = &self.gradients[place];
            self.executor.copy(&self.plan, gradient, shape)
        };
        let AttentionPlanConfig { q, k, v, .. } = &self.config;
        Ok([copy(0, q)?, copy(1, k)?, copy(2, v)?])
    }

    /// The last backward's gradients of q, k and v as they lie in the arena, row by row. On the CPU.
    ///
    /// # Errors
    /// As [`gradients`](Self::gradients), and as [`output_values`](Self::output_values).
    pub fn gradient_values<T: WithDType>(&self) -> Result<[&[T]; 3]> {
        self.check_gradients()?;
        let values = |place: usize| self.values(&self.gradients[place]);
        Ok([values(0)?, values(1)?, values(2)?])
    }

    /// Whether a run can read it where it lies.
    fn check(&self, what: &str, tensor: &Tensor, planned: &Shape) -> Result<()> {
        check(what, tensor, planned, self.config.dtype, &self.device)?;
        match self.config.algorithm == Algorithm::Flash && self.device.is_cuda() {
            true => check_start(what, tensor),
            false => Ok(()),
        }
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    fn check_output(&self) -> Result<()> {
        match self.inputs {
            None => Err(before("output", "forward")),
            Some(_) => Ok(()),
        }
    }

    fn check_gradients(&self) -> Result<()> {
        match self.has_gradients {
            false => Err(before("gradients", "backward")),
            true => Ok(()),
        }
    }

    /// What a run has left, where it lies.
    fn values<T: WithDType>(&self, operand: &BufferRange) -> Result<&[T]> {
        if T::DTYPE != self.config.dtype {
            return Err(Error::DType {
                op: OP,
                expected: format!(
                    "values asked for in {}, as planned",
                    self.config.dtype.as_str()
                ),
                got: T::DTYPE.as_str().into(),
                hint: "output and gradients give tensors, whatever the dtype".into(),
            });
        }
        let values = self.executor.values(&self.plan, operand);
        values.ok_or_else(|| Error::Placement {
            op: OP,
            expected: "values asked for of a plan on the CPU".into(),
            got: format!("{:?}", self.device.location()),
            hint: "output and gradients give tensors, wherever it is planned".into(),
        })
    }
}

fn before(what: &str, needs: &str) -> Error {
    Error::Order {
        op: OP,
        problem: format!("{what} without a {needs} before it"),
        hint: format!("call {needs} first"),
    }
}
