//! A function as one op.

use super::conditions::Conditions;
use super::ops::{Attach, Slot, token};
use super::refuse;
use super::run::{Input, Run, Source};
use crate::graph::SegmentKind;
use crate::hardware::device_name;
use crate::{Result, probe};
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, Layout, MetalStorage, Shape, Storage, Tensor, bail,
};
use std::sync::{Arc, Mutex, PoisonError};

/// Where backward finds the function's graph.
pub(super) enum Graph {
    /// It is recomputed, each time.
    Recompute(Recompute),
    /// It is kept, for one backward.
    Kept(Mutex<Option<Run>>),
}

/// A function of some inputs.
type Function = dyn Fn(&[Tensor]) -> Result<Tensor> + Send + Sync;

/// All that it takes to run a function again.
pub(super) struct Recompute {
    pub f: Box<Function>,
    pub inputs: Vec<Input>,
    pub conditions: Conditions,
}

impl Graph {
    pub fn kept(run: Run) -> Self {
        Self::Kept(Mutex::new(Some(run)))
    }

    fn name(&self) -> &'static str {
        let kind = match self {
            Self::Recompute(_) => SegmentKind::Checkpoint,
            Self::Kept(_) => SegmentKind::Release,
        };
        kind.name()
    }

    /// Tells listeners what is in the graph that is kept.
    fn tell_kept(&self, path: probe::Path) {
        if let Self::Kept(kept) = self
            && probe::is_listening()
        {
            let kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
            for tensor in kept.iter().flat_map(Run::residuals) {
                probe::kept_by(path, "released", tensor);
            }
        }
    }
}

/// The op: a token to the function's output, which was computed before.
pub(super) struct Segment {
    graph: Graph,
    sources: Vec<(Source, Arc<Slot>)>,
    /// Until forward has copied it.
    output: Mutex<Option<Tensor>>,
}

impl Segment {
    /// `output` with this graph.
    pub fn apply(
        graph: Graph,
        output: Tensor,
        sources: Vec<Source>,
        inputs: &[&Tensor],
    ) -> Result<Tensor> {
        let mut token = token(&output)?;
        let mut attached = Vec::with_capacity(sources.len());
        for source in sources {
            let slot = Arc::<Slot>::default();
            let tensor = match &source {
                Source::Input(i) => inputs[*i],
                Source::Variable(variable) => variable,
            };
            token = token.apply_op2(tensor, Attach(Arc::clone(&slot)))?;
            attached.push((source, slot));
        }
        if attached.is_empty() {
            return Ok(output);
        }
        let path = probe::op_path(graph.name());
        graph.tell_kept(path);
        let segment = Self {
            graph,
            sources: attached,
            output: Mutex::new(Some(output)),
        };
        let output = token.apply_op1(segment)?;
        probe::produced(path, &output);
        Ok(output)
    }

    /// The graph of one backward.
    fn run(&self, output: &Tensor) -> Result<Run> {
        let name = self.graph.name();
        match &self.graph {
            Graph::Recompute(again) => {
                let run = again.run()?;
                let sources = self.sources.iter().map(|(source, _)| source);
                match run.is_like(output, sources) {
                    true => Ok(run),
                    false => Err(refuse(
                        name,
                        "run again, the function read other variables or made another shape or dtype",
                        "it must compute the same each time",
                    )),
                }
            }
            Graph::Kept(kept) => {
                let kept = kept.lock().unwrap_or_else(PoisonError::into_inner).take();
                kept.ok_or_else(|| {
                    refuse(
                        name,
                        "backward came a second time, and the first one freed the graph",
                        "run forward again, or keep the graph: call the function itself, or checkpoint it",
                    )
                })
            }
        }
    }

    /// The output that forward was made for, once.
    fn take_output(&self) -> candle_core::Result<Tensor> {
        let output = self
            .output
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        match output {
            Some(output) => Ok(output),
            None => bail!("{}: forward came a second time", self.graph.name()),
        }
    }

    fn elsewhere<T>(&self, output: &Tensor) -> candle_core::Result<T> {
        bail!(
            "{}: the output is on {}, and not where its graph is",
            self.graph.name(),
            device_name(output.device())
        )
    }
}

impl Recompute {
    fn run(&self) -> Result<Run> {
        self.conditions
            .restored(|| Run::new(&self.f, self.inputs.iter().cloned()))
    }
}

impl CustomOp1 for Segment {
    fn name(&self) -> &'static str {
        self.graph.name()
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let output = self.take_output()?;
        let (storage, layout) = output.storage_and_layout();
        match &*storage {
            Storage::Cpu(storage) => copy(storage, layout),
            _ => self.elsewhere(&output),
        }
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> candle_core::Result<(CudaStorage, Shape)> {
        let output = self.take_output()?;
        let (storage, layout) = output.storage_and_layout();
        match &*storage {
            Storage::Cuda(storage) => copy(storage, layout),
            _ => self.elsewhere(&output),
        }
    }

    fn metal_fwd(
        &self,
        _: &MetalStorage,
        _: &Layout,
    ) -> candle_core::Result<(MetalStorage, Shape)> {
        let output = self.take_output()?;
        let (storage, layout) = output.storage_and_layout();
        match &*storage {
            Storage::Metal(storage) => copy(storage, layout),
            _ => self.elsewhere(&output),
        }
    }

    fn bwd(
        &self,
        token: &Tensor,
        output: &Tensor,
        d_output: &Tensor,
    ) -> candle_core::Result<Option<Tensor>> {
        let run = self.run(output)?;
        let sources = self.sources.iter().map(|(source, _)| source);
        let gradients = run.backward(self.graph.name(), d_output, sources)?;
        for ((_, slot), gradient) in self.sources.iter().zip(gradients) {
            slot.put(gradient);
        }
        Ok(Some(token.zeros_like()?))
    }
}

/// The elements in their order, in a storage of their own.
fn copy<S: BackendStorage>(storage: &S, layout: &Layout) -> candle_core::Result<(S, Shape)>
where
    S::Device: BackendDevice<Storage = S>,
{
    let shape = layout.shape().clone();
    let mut copy = storage.device().zeros_impl(&shape, storage.dtype())?;
    storage.copy_strided_src(&mut copy, 0, layout)?;
    Ok((copy, shape))
}
