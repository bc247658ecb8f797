//! Kernels of planned calls: name, parameters, and the functions that run them.

#[cfg(feature = "cuda")]
use super::Operands;
use super::{Accumulate, Slices};
use crate::graph::{self, Attribute};
use crate::kernels::Mask;
use crate::ops::operand::{check_granted, is_half};
use crate::ops::{matmul_kernel, reserve_scratch};
use candle_core::{DType, Result, bail};
use std::fmt;

/// Builds a kernel from a name and its body, given parameters and slices. `$T` is the element type of the first
/// operand, or of the operand `$of`.
macro_rules! kernel {
    ($name:expr, |$T:ident, $k:pat_param, $s:ident| $body:expr) => {
        $crate::ops::lowering::kernel!(@ $name, dtype(), |$T, $k, $s| $body)
    };
    ($name:expr, of $of:literal, |$T:ident, $k:pat_param, $s:ident| $body:expr) => {
        $crate::ops::lowering::kernel!(@ $name, dtype_of($of), |$T, $k, $s| $body)
    };
    (@ $name:expr, $dtype:ident($($of:literal)?), |$T:ident, $k:pat_param, $s:ident| $body:expr) => {
        $crate::ops::lowering::Kernel::new($name, |$k, $s| {
            $crate::ops::cpu::for_stored!($s.$dtype($($of)?)?, $T => {
                $body;
                Ok(())
            })
        })
    };
}
pub(crate) use kernel;

/// Adds a GPU launch to a kernel; `$l` are the operands on the GPU.
macro_rules! on_gpu {
    ($kernel:expr, |$k:pat_param, $l:ident| $body:expr) => {{
        let kernel = $kernel.with_gpu_kernel();
        #[cfg(feature = "cuda")]
        let kernel = kernel.launched_by(|$k, $l| {
            $body?;
            Ok(())
        });
        kernel
    }};
}
pub(crate) use on_gpu;

/// The name of a matmul kernel.
pub(crate) const MATMUL: &str = "matmul";

/// A function that computes a call on the CPU.
type Run = fn(&Kernel, &Slices<'_>) -> Result<()>;

/// A function that launches a call on a GPU.
#[cfg(feature = "cuda")]
type Launch = fn(&Kernel, &Operands<'_>) -> Result<()>;

/// The kernel of a planned call: its name, its parameters, the function that runs it on the CPU and, if it has one, the
/// function that launches it on a GPU.
#[derive(Clone)]
pub struct Kernel {
    name: &'static str,
    attributes: Vec<(&'static str, Attribute)>,
    view: Option<graph::View>,
    /// The outputs that it can add to, and whether it adds.
    sums: Vec<(&'static str, Accumulate)>,
    is_in_place: bool,
    flops: f64,
    scores: f64,
    workspace: Option<Workspace>,
    run: Run,
    is_on_gpu: bool,
    #[cfg(feature = "cuda")]
    launch: Option<Launch>,
}

impl Kernel {
    pub(crate) fn new(name: &'static str, run: Run) -> Self {
        Self {
            name,
            attributes: Vec::new(),
            view: None,
            sums: Vec::new(),
            is_in_place: false,
            flops: 0.0,
            scores: 0.0,
            workspace: None,
            run,
            is_on_gpu: false,
            #[cfg(feature = "cuda")]
            launch: None,
        }
    }

    /// Creates a kernel that exists only on GPUs.
    pub(crate) fn of_gpus(name: &'static str) -> Self {
        Self::new(name, |k, _| bail!("{} was planned for a GPU", k.name))
    }

    /// Renames the kernel.
    pub(crate) fn named(self, name: &'static str) -> Self {
        Self { name, ..self }
    }

    /// Marks the kernel as available on GPUs; see [`on_gpu`].
    pub(crate) fn with_gpu_kernel(self) -> Self {
        Self {
            is_on_gpu: true,
            ..self
        }
    }

    /// Sets the function that launches it on a GPU.
    #[cfg(feature = "cuda")]
    pub(crate) fn launched_by(self, launch: Launch) -> Self {
        Self {
            launch: Some(launch),
            ..self
        }
    }

    /// Returns whether the kernel exists on GPUs.
    pub fn is_on_gpu(&self) -> bool {
        self.is_on_gpu
    }

    pub(crate) fn with(mut self, name: &'static str, value: Attribute) -> Self {
        self.attributes.push((name, value));
        self
    }

    pub(crate) fn with_all(mut self, attributes: &[(&'static str, Attribute)]) -> Self {
        self.attributes.reserve_exact(attributes.len());
        self.attributes.extend(attributes);
        self
    }

    /// Adds sizes as parameters.
    pub(crate) fn sized<const N: usize>(self, sizes: [(&'static str, usize); N]) -> Self {
        self.with_all(&sizes.map(|(name, size)| (name, Attribute::Count(size))))
    }

    /// Sets the view that it reads or writes.
    pub(crate) fn viewing(self, view: graph::View) -> Self {
        Self {
            view: Some(view),
            ..self
        }
    }

    /// Sets the FLOPs of its matmuls.
    pub(crate) fn costing(self, flops: f64) -> Self {
        Self { flops, ..self }
    }

    /// Sets the number of scores that it computes but does not write.
    pub(crate) fn scoring(self, scores: f64) -> Self {
        Self { scores, ..self }
    }

    /// Sets the scratch memory that it needs on the CPU.
    pub(crate) fn with_workspace(self, workspace: Workspace) -> Self {
        Self {
            workspace: Some(workspace),
            ..self
        }
    }

    /// Declares that it changes its outputs in place, and so reads them.
    pub(crate) fn in_place(self) -> Self {
        Self {
            is_in_place: true,
            ..self
        }
    }

    /// Declares that the kernel can add to `operand`, and whether it does.
    pub(crate) fn summing(mut self, operand: &'static str, accumulate: Accumulate) -> Self {
        self.sums.reserve_exact(1);
        self.sums.push((operand, accumulate));
        self
    }

    /// Sets whether the kernel adds to `operand`.
    pub(crate) fn accumulating(mut self, operand: &str, accumulate: Accumulate) -> Self {
        let sums = self.sums.iter_mut();
        for (_, sum) in sums.filter(|(name, _)| *name == operand) {
            *sum = accumulate;
        }
        self
    }

    /// Returns the name in reports.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Returns the parameters.
    pub fn attributes(&self) -> &[(&'static str, Attribute)] {
        &self.attributes
    }

    /// Returns whether it is a single matmul.
    pub fn is_matmul(&self) -> bool {
        self.name == MATMUL
    }

    /// Returns the parameters in words, as `explain` prints them.
    pub fn sizes(&self) -> String {
        let attributes = self.attributes.iter();
        let words = attributes.filter_map(|(name, value)| match value {
            Attribute::Flag(true) => Some((*name).to_string()),
            Attribute::Flag(false) => None,
            value => Some(format!("{name} {value}")),
        });
        let sums = self.sums.iter();
        let sums = sums.filter(|(_, accumulate)| *accumulate != Accumulate::Never);
        let sums = sums.map(|(name, accumulate)| format!("{name} {accumulate}"));
        words.chain(sums).collect::<Vec<_>>().join(", ")
    }

    /// Returns the FLOPs of its matmuls: the model's work, as [`flops`](crate::model::flops) counts it, regardless of
    /// what the kernel skips or computes twice.
    pub fn flops(&self) -> f64 {
        self.flops
    }

    /// Returns the scratch memory that it needs on the CPU, if its first operand is in `dtype`.
    pub(crate) fn workspace(&self, dtype: Option<DType>) -> Option<Workspace> {
        match (self.is_matmul(), dtype) {
            (true, Some(dtype)) => matmul_kernel::packed(self, dtype).ok(),
            _ => self.workspace,
        }
    }

    /// Returns the number of scores that it computes but does not write, as attention does.
    pub(crate) fn scores(&self) -> f64 {
        self.scores
    }

    /// Returns whether the kernel adds to `operand`; `None` if it cannot.
    pub fn accumulate(&self, operand: &str) -> Option<Accumulate> {
        let mut sums = self.sums.iter();
        sums.find_map(|(name, accumulate)| (*name == operand).then_some(*accumulate))
    }

    /// Returns whether the kernel adds to `operand` in this micro-batch of a step.
    pub(crate) fn adds(&self, operand: &str, micro_batch: usize) -> bool {
        let accumulate = self.accumulate(operand);
        accumulate.is_some_and(|accumulate| accumulate.adds(micro_batch))
    }

    /// Returns whether it also reads an output: one that it adds to or changes in place.
    pub fn reads_what_it_writes(&self) -> bool {
        let mut sums = self.sums.iter();
        self.is_in_place || sums.any(|(_, accumulate)| *accumulate != Accumulate::Never)
    }

    pub(crate) fn view(&self) -> Result<&graph::View> {
        match &self.view {
            Some(view) => Ok(view),
            None => bail!("{}: no view", self.name),
        }
    }

    pub(crate) fn count(&self, name: &str) -> Result<usize> {
        match self.some_count(name) {
            Some(count) => Ok(count),
            None => bail!("{}: no {name}", self.name),
        }
    }

    /// Returns a count that is optional. It returns no error, because candle's errors allocate.
    pub(crate) fn some_count(&self, name: &str) -> Option<usize> {
        match find(&self.attributes, name)? {
            Attribute::Count(count) => Some(count),
            _ => None,
        }
    }

    pub(crate) fn some_integer(&self, name: &str) -> Option<i64> {
        match find(&self.attributes, name)? {
            Attribute::Integer(number) => Some(number),
            _ => None,
        }
    }

    pub(crate) fn number(&self, name: &str) -> Result<f64> {
        match self.some_number(name) {
            Some(number) => Ok(number),
            None => bail!("{}: no {name}", self.name),
        }
    }

    pub(crate) fn some_number(&self, name: &str) -> Option<f64> {
        match find(&self.attributes, name) {
            Some(Attribute::Number(number)) => Some(number),
            _ => None,
        }
    }

    pub(crate) fn mask(&self) -> Result<Mask> {
        match find(&self.attributes, "mask") {
            Some(Attribute::Mask(mask)) => Ok(mask),
            _ => bail!("{}: no mask", self.name),
        }
    }

    pub(crate) fn flag(&self, name: &str) -> bool {
        self.some_flag(name) == Some(true)
    }

    pub(crate) fn some_flag(&self, name: &str) -> Option<bool> {
        match find(&self.attributes, name) {
            Some(Attribute::Flag(flag)) => Some(flag),
            _ => None,
        }
    }

    /// Launches a call on a GPU.
    #[cfg(feature = "cuda")]
    pub(crate) fn launch(&self, operands: &Operands<'_>) -> Result<()> {
        if operands.reads.iter().any(|x| x.dtype == DType::F64) {
            bail!("{}: kernels on GPUs take f32 at most, not f64", self.name);
        }
        match self.launch {
            Some(launch) => launch(self, operands),
            None => bail!("{} was planned for the CPU", self.name),
        }
    }

    /// Computes a call.
    ///
    /// # Errors
    /// Those of the kernel; [`Error::OutOfMemory`](crate::Error::OutOfMemory) if the allocator refuses its scratch
    /// memory.
    pub(crate) fn run(&self, slices: &Slices<'_>) -> Result<()> {
        let mut dtype = None;
        if self.is_matmul() {
            dtype = Some(slices.dtype()?);
            reserve_scratch(dtype.is_some_and(is_half))?;
        }
        if let Some(workspace) = self.workspace(dtype) {
            check_granted(workspace.what, workspace.bytes() as u64)?;
        }
        (self.run)(self, slices)
    }
}

/// Scratch memory of a kernel while it runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Workspace {
    /// The purpose of the memory.
    pub what: &'static str,
    /// The number of elements, as a formula.
    pub formula: &'static str,
    /// The number of elements. f64 is exact to 2^53 and does not overflow.
    pub elements: f64,
    /// The bytes per element.
    pub element_bytes: usize,
}

impl Workspace {
    pub(crate) fn bytes(&self) -> f64 {
        self.elements * self.element_bytes as f64
    }
}

pub(super) fn find(attributes: &[(&'static str, Attribute)], name: &str) -> Option<Attribute> {
    let mut attributes = attributes.iter();
    attributes.find_map(|(other, value)| (*other == name).then_some(*value))
}

/// Compares name and parameters, which determine the function.
impl PartialEq for Kernel {
    fn eq(&self, other: &Self) -> bool {
        let parameters = |x: &Self| (x.name, x.is_in_place);
        parameters(self) == parameters(other)
            && self.sums == other.sums
            && self.attributes == other.attributes
            && self.view == other.view
    }
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            name,
            attributes,
            view,
            sums,
            ..
        } = self;
        write!(f, "{name} {attributes:?} {view:?} {sums:?}")
    }
}
