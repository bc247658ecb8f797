//! A kernel as a planned call has it.

#[cfg(feature = "cuda")]
use super::Operands;
use super::{Accumulate, Slices};
use crate::graph::{self, Attribute};
use crate::kernels::Mask;
use crate::ops::operand::check_granted;
use crate::ops::{product, reserve_scratch};
use candle_core::{DType, Result, bail};
use std::fmt;

/// A kernel by name, of what it does with its parameters and slices; `$T` is the type of the elements of its first
/// operand, or of the one named `$of`.
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

/// A kernel with what launches it on a GPU; `$l` are its operands there, and what launches take.
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

/// The name of a matrix product.
pub(crate) const PRODUCT: &str = "matmul";

/// What computes a call.
type Run = fn(&Kernel, &Slices<'_>) -> Result<()>;

/// What launches a kernel on a GPU.
#[cfg(feature = "cuda")]
type Launch = fn(&Kernel, &Operands<'_>) -> Result<()>;

/// A kernel as a planned call has it: its name, its parameters, and the function that runs it on the CPU, and where it
/// has one, what launches it on a GPU.
#[derive(Clone)]
pub struct Kernel {
    name: &'static str,
    attributes: Vec<(&'static str, Attribute)>,
    view: Option<graph::View>,
    /// The outputs that it can add to, and whether it does.
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

    /// One that only GPUs have.
    pub(crate) fn of_gpus(name: &'static str) -> Self {
        Self::new(name, |k, _| bail!("{} was planned for a GPU", k.name))
    }

    /// Renames the kernel.
    pub(crate) fn named(self, name: &'static str) -> Self {
        Self { name, ..self }
    }

    /// Of which a GPU has one too: see [`on_gpu`].
    pub(crate) fn with_gpu_kernel(self) -> Self {
        Self {
            is_on_gpu: true,
            ..self
        }
    }

    /// With what launches it there.
    #[cfg(feature = "cuda")]
    pub(crate) fn launched_by(self, launch: Launch) -> Self {
        Self {
            launch: Some(launch),
            ..self
        }
    }

    /// Whether a GPU has this kernel.
    pub fn is_on_gpu(&self) -> bool {
        self.is_on_gpu
    }

    /// With a parameter.
    pub(crate) fn with(mut self, name: &'static str, value: Attribute) -> Self {
        self.attributes.push((name, value));
        self
    }

    /// With all of these.
    pub(crate) fn with_all(mut self, attributes: &[(&'static str, Attribute)]) -> Self {
        self.attributes.reserve_exact(attributes.len());
        self.attributes.extend(attributes);
        self
    }

    /// With sizes.
    pub(crate) fn sized<const N: usize>(self, sizes: [(&'static str, usize); N]) -> Self {
        self.with_all(&sizes.map(|(name, size)| (name, Attribute::Count(size))))
    }

    /// With the places of elements.
    pub(crate) fn viewing(self, view: graph::View) -> Self {
        Self {
            view: Some(view),
            ..self
        }
    }

    /// With what its matrix products cost.
    pub(crate) fn costing(self, flops: f64) -> Self {
        Self { flops, ..self }
    }

    /// With how many scores it computes, and does not write.
    pub(crate) fn scoring(self, scores: f64) -> Self {
        Self { scores, ..self }
    }

    /// With what it takes for itself on the CPU, beside what it writes.
    pub(crate) fn with_workspace(self, workspace: Workspace) -> Self {
        Self {
            workspace: Some(workspace),
            ..self
        }
    }

    /// Which reads what it writes: elements that it changes in place.
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

    /// As reports call it.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Its parameters.
    pub fn attributes(&self) -> &[(&'static str, Attribute)] {
        &self.attributes
    }

    /// Whether it is a matrix product and nothing else.
    pub fn is_product(&self) -> bool {
        self.name == PRODUCT
    }

    /// Its parameters in words, as `explain` prints them.
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

    /// FLOPs of its matrix products: the model's work, as [`flops`](crate::model::flops) counts it, whatever the kernel
    /// leaves out or does twice.
    pub fn flops(&self) -> f64 {
        self.flops
    }

    /// What it takes for itself on the CPU, beside what it writes, where its first operand is in this dtype.
    pub(crate) fn workspace(&self, dtype: Option<DType>) -> Option<Workspace> {
        match (self.is_product(), dtype) {
            (true, Some(dtype)) => product::packed(self, dtype).ok(),
            _ => self.workspace,
        }
    }

    /// How many scores it computes and does not write, as attention does.
    pub(crate) fn scores(&self) -> f64 {
        self.scores
    }

    /// Returns whether the kernel adds to `operand`; `None` if it cannot.
    pub fn accumulate(&self, operand: &str) -> Option<Accumulate> {
        let mut sums = self.sums.iter();
        sums.find_map(|(name, accumulate)| (*name == operand).then_some(*accumulate))
    }

    /// Whether the kernel adds to `operand` in this micro-batch of a step.
    pub(crate) fn adds(&self, operand: &str, micro_batch: usize) -> bool {
        let accumulate = self.accumulate(operand);
        accumulate.is_some_and(|accumulate| accumulate.adds(micro_batch))
    }

    /// Whether what it writes is also read: what is added to or changed in place.
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

    /// A count that not every such kernel has. An error of candle's allocates, so [`count`](Self::count) does not ask.
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

    /// A number that not every such kernel has.
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

    /// A flag that not every such kernel has.
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
    /// Those of the kernel; [`Error::OutOfMemory`](crate::Error::OutOfMemory) where the allocator does not grant what
    /// it needs for itself.
    pub(crate) fn run(&self, slices: &Slices<'_>) -> Result<()> {
        let mut dtype = None;
        if self.is_product() {
            dtype = Some(slices.dtype()?);
            reserve_scratch(dtype != Some(DType::F32))?;
        }
        if let Some(workspace) = self.workspace(dtype) {
            check_granted(workspace.what, workspace.bytes() as u64)?;
        }
        (self.run)(self, slices)
    }
}

/// Memory that a kernel takes for itself while it runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Workspace {
    /// What it is for.
    pub what: &'static str,
    /// How many elements, in letters.
    pub formula: &'static str,
    /// How many elements. In f64: exact to 2^53, and no overflow beyond.
    pub elements: f64,
    /// Bytes an element.
    pub element_bytes: usize,
}

impl Workspace {
    pub(crate) fn bytes(&self) -> f64 {
        self.elements * self.element_bytes as f64
    }
}

/// The attribute with this name.
pub(super) fn find(attributes: &[(&'static str, Attribute)], name: &str) -> Option<Attribute> {
    let mut attributes = attributes.iter();
    attributes.find_map(|(other, value)| (*other == name).then_some(*value))
}

/// By name and parameters: the function follows from these.
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
