//! The op that stands for a recomputed function.

use super::run::{Input, Run, Source};
use super::{NAME, refuse};
use crate::Result;
use crate::grad::with_grad;
use crate::hardware::device_name;
use crate::ops::record::{Attach, Entry, Node, Slot, token};
use crate::ops::{KernelPolicy, current_kernel_policy, with_kernel_policy};
use crate::precision::{self, Autocast, without_autocast};
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, Layout, MetalStorage, Shape, Storage, Tensor, bail,
};
use std::sync::{Arc, Mutex, PoisonError};

type Function = dyn Fn(&[Tensor]) -> Result<Tensor> + Send + Sync;

/// The node of a recomputed function: its leaves, and what is needed to run it again.
pub(super) struct Segment {
    f: Box<Function>,
    kept: Vec<Input>,
    conditions: Conditions,
    sources: Vec<(Source, Arc<Slot>)>,
    /// The tensors of the sources.
    inputs: Vec<Tensor>,
    entry: Entry,
}

/// The node in candle's graph: maps a token to the output, which is already computed.
struct InGraph {
    segment: Arc<Segment>,
    /// The output, until forward has copied it.
    output: Mutex<Option<Tensor>>,
}

impl Segment {
    /// Attaches a node to `output`, the result of a function of the saved inputs.
    pub fn apply(
        (f, kept): (Box<Function>, Vec<Input>),
        conditions: Conditions,
        output: Tensor,
        sources: Vec<Source>,
        inputs: &[&Tensor],
    ) -> Result<Tensor> {
        let mut token = token(&output)?;
        let mut attached = Vec::with_capacity(sources.len());
        let mut tensors = Vec::with_capacity(sources.len());
        for source in sources {
            let slot = Arc::<Slot>::default();
            let tensor = match &source {
                Source::Input(i) => inputs[*i],
                Source::Variable(variable) => variable,
            };
            token = token.apply_op2(tensor, Attach(Arc::clone(&slot)))?;
            tensors.push(tensor.clone());
            attached.push((source, slot));
        }
        if attached.is_empty() {
            return Ok(output);
        }
        let segment = Arc::new(Self {
            f,
            kept,
            conditions,
            sources: attached,
            inputs: tensors,
            entry: Entry::default(),
        });
        let output = token.apply_op1(InGraph {
            segment: Arc::clone(&segment),
            output: Mutex::new(Some(output)),
        })?;
        segment.entry.write(&output, &segment);
        Ok(output)
    }

    fn sources(&self) -> impl ExactSizeIterator<Item = &Source> {
        self.sources.iter().map(|(source, _)| source)
    }
}

impl Node for Segment {
    fn inputs(&self) -> Vec<Tensor> {
        self.inputs.clone()
    }

    fn backward(&self, y: &Tensor, dy: &Tensor) -> candle_core::Result<Vec<Option<Tensor>>> {
        let run = || Run::new(&self.f, self.kept.iter().cloned());
        let run = self.conditions.restored(run)?;
        if !run.is_like(y, self.sources()) {
            return Err(refuse(
                "run again, the function read other variables or made another shape or dtype",
                "it must compute the same each time",
            )
            .into());
        }
        Ok(run.backward(dy, self.sources())?)
    }
}

impl InGraph {
    /// Copies the output; it can be called once.
    fn forward<S: BackendStorage>(
        &self,
        here: impl Fn(&Storage) -> Option<&S>,
    ) -> candle_core::Result<(S, Shape)>
    where
        S::Device: BackendDevice<Storage = S>,
    {
        let mut output = self.output.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(output) = output.take() else {
            bail!("{NAME}: forward came a second time");
        };
        let (storage, layout) = output.storage_and_layout();
        let Some(storage) = here(&storage) else {
            let place = device_name(output.device());
            bail!("{NAME}: the output is on {place}, and not where its graph is");
        };
        let shape = layout.shape().clone();
        let mut copy = storage.device().zeros_impl(&shape, storage.dtype())?;
        storage.copy_strided_src(&mut copy, 0, layout)?;
        Ok((copy, shape))
    }
}

impl CustomOp1 for InGraph {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        self.forward(|storage| match storage {
            Storage::Cpu(storage) => Some(storage),
            _ => None,
        })
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> candle_core::Result<(CudaStorage, Shape)> {
        self.forward(|storage| match storage {
            Storage::Cuda(storage) => Some(storage),
            _ => None,
        })
    }

    fn metal_fwd(
        &self,
        _: &MetalStorage,
        _: &Layout,
    ) -> candle_core::Result<(MetalStorage, Shape)> {
        self.forward(|storage| match storage {
            Storage::Metal(storage) => Some(storage),
            _ => None,
        })
    }

    fn bwd(
        &self,
        token: &Tensor,
        output: &Tensor,
        d_output: &Tensor,
    ) -> candle_core::Result<Option<Tensor>> {
        let gradients = self.segment.backward(output, d_output)?;
        for ((_, slot), gradient) in self.segment.sources.iter().zip(gradients) {
            slot.put(gradient);
        }
        Ok(Some(token.zeros_like()?))
    }
}

/// The policies of forward, which backward restores.
pub(super) struct Conditions {
    /// `None` without autocast.
    autocast: Option<Autocast>,
    kernels: KernelPolicy,
}

impl Conditions {
    /// Returns the current policies.
    pub fn current() -> Self {
        Self {
            autocast: precision::current(),
            kernels: current_kernel_policy(),
        }
    }

    /// Runs `f` under these policies, with gradient tracking.
    pub fn restored<T>(&self, f: impl FnOnce() -> Result<T>) -> Result<T> {
        let f = || with_grad(true, f);
        with_kernel_policy(self.kernels, || match &self.autocast {
            Some(policy) => precision::autocast(policy.clone(), f),
            None => without_autocast(f),
        })
    }
}
