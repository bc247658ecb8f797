//! A kernel as a planned call has it.

#[cfg(feature = "cuda")]
use super::Named;
use super::Slices;
use crate::attention::Mask;
use crate::graph::{self, Attribute};
use candle_core::{Result, bail};
use std::fmt;
#[cfg(feature = "cuda")]
use {
    crate::kernels::cuda::{View, matmul::Products},
    candle_core::DType,
    candle_core::cuda_backend::CudaDevice,
    std::cell::RefCell,
};

/// A kernel by name, of what it does with its parameters and slices; `$T` is the type of its first operand's elements.
macro_rules! kernel {
    ($name:expr, |$T:ident, $k:pat_param, $s:ident| $body:expr) => {
        $crate::ops::lowering::Kernel::new($name, |$k, $s| {
            $crate::ops::cpu::for_stored!($s.dtype()?, $T => {
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

/// What computes a call.
type Run = fn(&Kernel, &Slices<'_>) -> Result<()>;

/// What launches a kernel on a GPU.
#[cfg(feature = "cuda")]
type Launch = fn(&Kernel, &Operands<'_>) -> Result<()>;

/// The operands of one call on a GPU.
#[cfg(feature = "cuda")]
pub(crate) struct Operands<'a> {
    pub gpu: &'a CudaDevice,
    /// What multiplies matrices.
    pub products: RefCell<&'a mut Products>,
    pub reads: Named<View<'a>>,
    pub writes: Named<View<'a>>,
}

#[cfg(feature = "cuda")]
impl<'a> Operands<'a> {
    /// What is read as `name`.
    pub fn x(&self, name: &str) -> Result<View<'a>> {
        match self.reads.get(name) {
            Some(view) => Ok(*view),
            None => bail!("{name} is not read"),
        }
    }

    /// What is written as `name`.
    pub fn y(&self, name: &str) -> Result<View<'a>> {
        match self.writes.get(name) {
            Some(view) => Ok(*view),
            None => bail!("{name} is not written"),
        }
    }
}

/// A kernel as a planned call has it: its name, its parameters, and the function that runs it on the CPU, and where it
/// has one, what launches it on a GPU.
#[derive(Clone)]
pub struct Kernel {
    name: &'static str,
    attributes: Vec<(&'static str, Attribute)>,
    view: Option<graph::View>,
    flops: f64,
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
            flops: 0.0,
            run,
            is_on_gpu: false,
            #[cfg(feature = "cuda")]
            launch: None,
        }
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
        self.attributes.extend(attributes);
        self
    }

    /// With sizes.
    pub(crate) fn sized<const N: usize>(mut self, sizes: [(&'static str, usize); N]) -> Self {
        let sizes = sizes.map(|(name, size)| (name, Attribute::Count(size)));
        self.attributes.extend(sizes);
        self
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

    /// As reports call it.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Its parameters.
    pub fn attributes(&self) -> &[(&'static str, Attribute)] {
        &self.attributes
    }

    /// FLOPs of its matrix products: the model's work, whatever the kernel leaves out.
    pub fn flops(&self) -> f64 {
        self.flops
    }

    pub(crate) fn view(&self) -> Result<&graph::View> {
        match &self.view {
            Some(view) => Ok(view),
            None => bail!("{}: no view", self.name),
        }
    }

    pub(crate) fn count(&self, name: &str) -> Result<usize> {
        match find(&self.attributes, name) {
            Some(Attribute::Count(count)) => Ok(count),
            _ => bail!("{}: no {name}", self.name),
        }
    }

    pub(crate) fn number(&self, name: &str) -> Result<f64> {
        match find(&self.attributes, name) {
            Some(Attribute::Number(number)) => Ok(number),
            _ => bail!("{}: no {name}", self.name),
        }
    }

    pub(crate) fn mask(&self) -> Result<Mask> {
        match find(&self.attributes, "mask") {
            Some(Attribute::Mask(mask)) => Ok(mask),
            _ => bail!("{}: no mask", self.name),
        }
    }

    pub(crate) fn flag(&self, name: &str) -> bool {
        matches!(find(&self.attributes, name), Some(Attribute::Flag(true)))
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
    pub(crate) fn run(&self, slices: &Slices<'_>) -> Result<()> {
        (self.run)(self, slices)
    }
}

/// The attribute with this name.
pub(super) fn find(attributes: &[(&'static str, Attribute)], name: &str) -> Option<Attribute> {
    let mut attributes = attributes.iter();
    attributes.find_map(|(other, value)| (*other == name).then_some(*value))
}

/// By name and parameters: the function follows from the name.
impl PartialEq for Kernel {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name && self.attributes == other.attributes && self.view == other.view
    }
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?} {:?}", self.name, self.attributes, self.view)
    }
}
