//! A run recorded: many launches as one.

use super::segments::Segment;
use crate::Result;
use candle_core::cuda_backend::cudarc::driver::CudaGraph;
use candle_core::cuda_backend::cudarc::driver::sys::{
    CUgraphInstantiate_flags, CUstream, CUstreamCaptureMode, CUstreamCaptureStatus,
    cuGraphGetNodes, cuStreamGetCaptureInfo_v3,
};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use std::ptr::null_mut;

/// What there is of a run.
#[derive(Default)]
pub(super) enum Recorded {
    /// It was never run: what it needs is not loaded.
    #[default]
    Nothing,
    /// It was run once.
    Warm,
    /// The graphs of its segments, in order.
    Graphs(Vec<Graph>),
}

impl Recorded {
    /// Whether these segments were recorded.
    pub(super) fn is_of(&self, segments: &[Segment]) -> bool {
        match self {
            Self::Graphs(graphs) => graphs.iter().map(|graph| &graph.segment).eq(segments),
            Self::Nothing | Self::Warm => false,
        }
    }
}

/// A CUDA graph, launched through one executor alone.
pub(super) struct Graph {
    graph: CudaGraph,
    pub segment: Segment,
    /// Which call each kernel (copy, fill) is of, in the order in which they run, if one stream was recorded: a chain.
    /// Exchanges run on another, beside it.
    pub kernels: Option<Vec<usize>>,
}

// SAFETY: a graph may be used from any thread, by one at a time: it is reached through `&mut` of its executor alone.
unsafe impl Send for Graph {}
// SAFETY: as above.
unsafe impl Sync for Graph {}

impl Graph {
    pub(super) fn launch(&self) -> Result<()> {
        Ok(self.graph.launch().w()?)
    }
}

/// Records what `launch` launches on the stream of `gpu`, none of which is run; it tells, after each call, which one it
/// has launched. The caller sees to it that no handle of the GPU is made meanwhile.
pub(super) fn record(
    gpu: &CudaDevice,
    segment: &Segment,
    launch: impl FnOnce(&mut dyn FnMut(usize) -> Result<()>) -> Result<()>,
) -> Result<Graph> {
    let stream = gpu.cuda_stream();
    stream
        .begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        .w()?;
    let mut kernels = Vec::new();
    let launched = launch(&mut |call| {
        kernels.resize(nodes(stream.cu_stream())?, call);
        Ok(())
    });
    // Ended whatever happened, or the stream would record for ever.
    let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let ended = stream.end_capture(flags).w();
    launched?;
    match ended? {
        Some(graph) => Ok(Graph {
            graph,
            segment: segment.clone(),
            kernels: Some(kernels),
        }),
        None => Err(candle_core::Error::msg("the driver recorded no graph").into()),
    }
}

/// How many nodes the graph has that `stream` records.
fn nodes(stream: CUstream) -> Result<usize> {
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    let (mut graph, mut count) = (null_mut(), 0);
    // SAFETY: a stream; the driver writes the status and the graph, and leaves out what is null.
    unsafe {
        cuStreamGetCaptureInfo_v3(
            stream,
            &mut status,
            null_mut(),
            &mut graph,
            null_mut(),
            null_mut(),
            null_mut(),
        )
    }
    .result()
    .w()?;
    // SAFETY: the graph that is recorded; no nodes are asked for, their number alone.
    unsafe { cuGraphGetNodes(graph, null_mut(), &mut count) }
        .result()
        .w()?;
    Ok(count)
}
