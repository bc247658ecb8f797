//! Attention, planned.
//!
//! What lives here: [`Attention`], its plan (`plan`), and what it asks of the tensors that it is given (`arguments`). What does
//! not: attention in a model, which is planned with what stands around it.

mod arguments;
mod plan;

use super::executor::Executor;
use super::lower::{Lowered, Target};
use super::plan::{Operand, Plan};
use super::run::Tensors;
use crate::attention::{Algorithm, AttentionConfig};
use crate::{Error, Result};
use arguments::{check, check_device, check_dtype, check_start};
use candle_core::{DType, Device, Shape, Tensor, WithDType};

const OP: &str = "compile::Attention";

/// `softmax(scale q k^T) v` and its gradients for one shape, planned once: q, k, v and the output (..., T, Dh), in f32, bf16 or
/// f16, on the CPU or on a CUDA GPU.
///
/// The mathematics of [`attention::naive`](crate::attention::naive()), the probabilities kept for backward. They, output and
/// gradients lie in one arena: a run allocates nothing.
///
/// On the CPU a block of queries goes through scores, softmax and weighted sum while it is in cache; probabilities are kept as
/// exponentials and what each row of them is multiplied by, what a mask hides is never there, and no other matrix of (T, T)
/// ever is. In half precision products and sums are f32's, and output and gradients are rounded once. For bf16 the
/// exponentials are kept in f16, which has three bits more, in half the memory that eager naive attention's probabilities
/// take; for f16, as those, in f32. What rounding took from the output is kept for backward too.
///
/// On a GPU ([`new_on`](Self::new_on)) products are cuBLASLt's, with sums in f32. The scores are where their softmax will be,
/// (..., T, T) in the dtype of q, k and v, as eager attention on a GPU has them, and lie there once: backward reads the
/// probabilities as they were rounded. The scores' gradients are there for as many heads at once as 1 GiB holds. Of what a mask
/// hides, blocks as a whole are neither computed nor read. Each half is recorded as a CUDA graph when it comes the second time
/// with its tensors where they were, and then is one launch; with others it is launched call by call. In f16 the scores'
/// gradients are rounded to f16: scale what d_out comes from.
///
/// With [`Algorithm::Flash`] ([`with_algorithm`](Self::with_algorithm)) the tiles of [`attention::flash`](crate::attention::flash())
/// instead: of (T, T) there is nothing, kept are the output, a number a query and, in half precision, what rounding took from the
/// output. The same kernels as eagerly, and the same bits, without the gradients that candle adds to zeros. On the CPU they take
/// tiles and sums of dq for themselves, as they do eagerly.
///
/// It stands outside of candle's graph: [`backward`](Self::backward) is called with the output's gradient, by whoever has
/// it.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use tallow::attention::{AttentionConfig, Mask};
/// use tallow::compile::Attention;
///
/// let q = Tensor::randn(0f32, 1.0, (2, 3, 5, 8), &Device::Cpu)?; // (B, H, T, Dh)
/// let config = AttentionConfig { mask: Mask::Causal, ..Default::default() };
/// let mut attention = Attention::new((2, 3, 5, 8), DType::F32, &config)?;
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
    algorithm: Algorithm,
    plan: Plan,
    executor: Executor,
    /// Where a run leaves the output, and the gradients of q, k and v.
    out: Operand,
    gradients: Vec<Operand>,
    device: Device,
    /// (..., T, Dh).
    shape: Shape,
    dtype: DType,
    /// q, k and v of the last forward, which backward reads again.
    inputs: Option<[Tensor; 3]>,
    /// Whether the last forward's gradients are there.
    has_gradients: bool,
}

impl Attention {
    /// Plans attention on q, k, v of this shape, (..., T, Dh), and dtype, on the CPU, and allocates its arena.
    ///
    /// # Errors
    /// [`Error::Shape`] for fewer than two dimensions or a size of 0; [`Error::DType`] for another dtype than f32, bf16 and
    /// f16; [`Error::OutOfMemory`] for an arena that does not fit the machine's memory.
    pub fn new(shape: impl Into<Shape>, dtype: DType, config: &AttentionConfig) -> Result<Self> {
        Self::new_on(&Device::Cpu, shape, dtype, config)
    }

    /// As [`new`](Self::new), on `device`, where q, k and v will be.
    ///
    /// # Errors
    /// As [`new`](Self::new); [`Error::Placement`] for a device that is neither the CPU nor a CUDA GPU of compute capability
    /// 8.0 or later.
    pub fn new_on(
        device: &Device,
        shape: impl Into<Shape>,
        dtype: DType,
        config: &AttentionConfig,
    ) -> Result<Self> {
        Self::with_algorithm(Algorithm::Naive, device, shape, dtype, config)
    }

    /// As [`new_on`](Self::new_on), by an algorithm that is chosen.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use tallow::attention::{Algorithm, AttentionConfig};
    /// use tallow::compile::Attention;
    ///
    /// let (shape, config) = ((1, 2, 100, 16), AttentionConfig::default());
    /// let q = Tensor::randn(0f32, 1.0, shape, &Device::Cpu)?;
    /// let mut attention =
    ///     Attention::with_algorithm(Algorithm::Flash, &Device::Cpu, shape, DType::F32, &config)?;
    /// attention.forward(&q, &q, &q)?;
    /// attention.backward(&q)?;
    /// let naive = Attention::plan_for(shape, DType::F32, &config)?;
    /// assert!(attention.plan().peak_bytes() < naive.peak_bytes() / 2);
    /// # Ok::<(), tallow::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`new_on`](Self::new_on); [`Error::Shape`] and, on a GPU, [`Error::Placement`] for what flash attention's
    /// kernels do not take: heads over 256, on a GPU of no multiple of 8 (in f32 of 4), or a scale that is not above 0.
    pub fn with_algorithm(
        algorithm: Algorithm,
        device: &Device,
        shape: impl Into<Shape>,
        dtype: DType,
        config: &AttentionConfig,
    ) -> Result<Self> {
        let shape = shape.into();
        check_dtype(dtype)?;
        check_device(device)?;
        let target = Executor::target(device);
        let (lowered, gradients) = Self::lowered(algorithm, target, shape.clone(), dtype, config)?;
        Ok(Self {
            algorithm,
            executor: Executor::new(&lowered.plan, device)?,
            device: device.clone(),
            plan: lowered.plan,
            out: lowered.output,
            gradients,
            shape,
            dtype,
            inputs: None,
            has_gradients: false,
        })
    }

    /// The plan alone, for the CPU: what would be done, and what memory it would take.
    ///
    /// ```
    /// use candle_core::DType;
    /// use tallow::attention::{AttentionConfig, Mask};
    /// use tallow::compile::Attention;
    ///
    /// let bytes = |mask, dtype| {
    ///     let config = AttentionConfig { mask, ..Default::default() };
    ///     Ok::<u64, tallow::Error>(Attention::plan_for((8, 4096, 64), dtype, &config)?.peak_bytes())
    /// };
    /// let full = bytes(Mask::Full, DType::F32)?;
    /// assert!(bytes(Mask::Causal, DType::F32)? < full * 6 / 10);
    /// assert!(bytes(Mask::Full, DType::BF16)? < full * 6 / 10); // exponentials in f16
    /// # Ok::<(), tallow::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`new`](Self::new), whatever the machine has.
    pub fn plan_for(
        shape: impl Into<Shape>,
        dtype: DType,
        config: &AttentionConfig,
    ) -> Result<Plan> {
        Self::plan_on(&Device::Cpu, shape, dtype, config)
    }

    /// As [`plan_for`](Self::plan_for), for `device`.
    ///
    /// # Errors
    /// As [`new_on`](Self::new_on), whatever the machine has.
    pub fn plan_on(
        device: &Device,
        shape: impl Into<Shape>,
        dtype: DType,
        config: &AttentionConfig,
    ) -> Result<Plan> {
        Self::plan_with_algorithm(Algorithm::Naive, device, shape, dtype, config)
    }

    /// As [`plan_on`](Self::plan_on), by an algorithm that is chosen.
    ///
    /// # Errors
    /// As [`with_algorithm`](Self::with_algorithm), whatever the machine and the GPU's kernels take.
    pub fn plan_with_algorithm(
        algorithm: Algorithm,
        device: &Device,
        shape: impl Into<Shape>,
        dtype: DType,
        config: &AttentionConfig,
    ) -> Result<Plan> {
        check_dtype(dtype)?;
        check_device(device)?;
        let (lowered, _) =
            Self::lowered(algorithm, Executor::target(device), shape, dtype, config)?;
        Ok(lowered.plan)
    }

    fn lowered(
        algorithm: Algorithm,
        target: Target,
        shape: impl Into<Shape>,
        dtype: DType,
        config: &AttentionConfig,
    ) -> Result<(Lowered, Vec<Operand>)> {
        let shape = shape.into();
        plan::check_sizes(algorithm, &shape, config)?;
        plan::of(algorithm, &shape, dtype, config, target)
    }

    /// As [`plan_with_algorithm`](Self::plan_with_algorithm), for a GPU, which need not be there.
    pub(crate) fn plan_for_card(
        algorithm: Algorithm,
        shape: impl Into<Shape>,
        dtype: DType,
        config: &AttentionConfig,
    ) -> Result<Plan> {
        check_dtype(dtype)?;
        Ok(
            Self::lowered(algorithm, Target::Cuda, shape, dtype, config)?
                .0
                .plan,
        )
    }

    /// Computes the output of q, k and v, (..., T, Dh) each: [`output`](Self::output) has it until the next run.
    ///
    /// q, k and v are read where they are, and kept (not copied) for [`backward`](Self::backward) until the next forward.
    ///
    /// # Errors
    /// Another shape or dtype than planned; tensors that are not contiguous, or on another device; for flash attention on a GPU,
    /// tensors that begin elsewhere than at a multiple of 16 bytes of their storage.
    pub fn forward(&mut self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<()> {
        for (what, tensor) in [("q", q), ("k", k), ("v", v)] {
            self.check(what, tensor)?;
        }
        (self.inputs, self.has_gradients) = (None, false);
        let tensors = Tensors {
            arguments: &[q, k, v],
            ..Default::default()
        };
        self.executor.run_micro_batches(&self.plan, &tensors)?;
        self.inputs = Some([q, k, v].map(Tensor::clone));
        Ok(())
    }

    /// Computes the gradients of the last forward's q, k and v from its output's, (..., T, Dh):
    /// [`gradients`](Self::gradients) has them until the next run.
    ///
    /// # Errors
    /// As [`forward`](Self::forward); [`Error::Order`] before it.
    pub fn backward(&mut self, d_out: &Tensor) -> Result<()> {
        self.check("d_out", d_out)?;
        let Some([q, k, v]) = &self.inputs else {
            return Err(before("backward", "forward"));
        };
        let tensors = Tensors {
            arguments: &[q, k, v, d_out],
            ..Default::default()
        };
        self.has_gradients = false;
        self.executor
            .run_after_micro_batches(&self.plan, &tensors)?;
        self.has_gradients = true;
        Ok(())
    }

    /// A copy of the last forward's output, where it was planned: (..., T, Dh).
    ///
    /// # Errors
    /// [`Error::Order`] before the first.
    pub fn output(&self) -> Result<Tensor> {
        self.check_output()?;
        self.executor.copy(&self.plan, &self.out, &self.shape)
    }

    /// The last forward's output as it lies in the arena, row by row: (..., T, Dh). On the CPU.
    ///
    /// # Errors
    /// As [`output`](Self::output); [`Error::DType`] if `T` is not the dtype that was planned for; [`Error::Placement`] on a
    /// card, whose memory is not the host's.
    pub fn output_values<T: WithDType>(&self) -> Result<&[T]> {
        self.check_output()?;
        self.values(&self.out)
    }

    /// Copies of the last backward's gradients of q, k and v, where they were planned: (..., T, Dh) each.
    ///
    /// # Errors
    /// [`Error::Order`] if there was none since the last forward.
    pub fn gradients(&self) -> Result<[Tensor; 3]> {
        self.check_gradients()?;
        let copy = |place: usize| {
            let gradient = &self.gradients[place];
            self.executor.copy(&self.plan, gradient, &self.shape)
        };
        Ok([copy(0)?, copy(1)?, copy(2)?])
    }

    /// The last backward's gradients of q, k and v as they lie in the arena: (..., T, Dh) each. On the CPU.
    ///
    /// # Errors
    /// As [`gradients`](Self::gradients), and as [`output_values`](Self::output_values).
    pub fn gradient_values<T: WithDType>(&self) -> Result<[&[T]; 3]> {
        self.check_gradients()?;
        let values = |place: usize| self.values(&self.gradients[place]);
        Ok([values(0)?, values(1)?, values(2)?])
    }

    /// Whether a run can read it where it lies.
    fn check(&self, what: &str, tensor: &Tensor) -> Result<()> {
        check(what, tensor, &self.shape, self.dtype, &self.device)?;
        match self.algorithm == Algorithm::Flash && self.device.is_cuda() {
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
    fn values<T: WithDType>(&self, operand: &Operand) -> Result<&[T]> {
        if T::DTYPE != self.dtype {
            return Err(Error::DType {
                op: OP,
                expected: format!("values asked for in {}, as planned", self.dtype.as_str()),
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
