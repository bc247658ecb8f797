//! CUDA graphs: recorded runs that are replayed by one launch.

use super::segments::Segment;
use crate::Result;
use candle_core::cuda_backend::cudarc::driver::CudaGraph;
use candle_core::cuda_backend::cudarc::driver::sys::{
    CUgraphInstantiate_flags, CUstream, CUstreamCaptureMode, CUstreamCaptureStatus,
    cuGraphGetNodes, cuStreamGetCaptureInfo_v3,
};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use std::ptr::null_mut;

#[derive(Default)]
pub(super) enum Recorded {
    /// Never run: kernels are not loaded yet.
    #[default]
    Nothing,
    /// Run once, not recorded.
    Warm,
    /// Recorded: the graphs of its segments, in order.
    Graphs(Vec<Graph>),
}

impl Recorded {
    /// Returns whether exactly these segments are recorded.
    pub(super) fn is_of(&self, segments: &[Segment]) -> bool {
        match self {
            Self::Graphs(graphs) => graphs.iter().map(|graph| &graph.segment).eq(segments),
            Self::Nothing | Self::Warm => false,
        }
    }
}

/// A CUDA graph that only one executor launches.
pub(super) struct Graph {
    graph: CudaGraph,
    pub segment: Segment,
    /// The index of the call that launched each kernel (or copy, or fill), in execution order. Only known if a single
    /// stream was recorded; exchanges run on a second one.
    pub kernels: Option<Vec<usize>>,
}

// SAFETY: a graph may be used from any thread, by one at a time; it is only reached through `&mut` of its executor.
unsafe impl Send for Graph {}
// SAFETY: as above.
unsafe impl Sync for Graph {}

impl Graph {
    pub(super) fn launch(&self) -> Result<()> {
        Ok(self.graph.launch().w()?)
    }
}

/// Records what `launch` launches on the stream of `gpu`, without running it. `launch` reports each call after its
/// launch. The caller must ensure that no handle of the GPU is created meanwhile.
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
    // The capture must end even after an error, or the stream would record forever.
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

/// Returns the number of nodes of the graph that `stream` is recording.
fn nodes(stream: CUstream) -> Result<usize> {
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    let (mut graph, mut count) = (null_mut(), 0);
    // SAFETY: a valid stream; the driver writes status and graph, and skips the outputs that are null.
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
    // SAFETY: the graph that is being recorded; with null for the nodes only their number is written.
    unsafe { cuGraphGetNodes(graph, null_mut(), &mut count) }
        .result()
        .w()?;
    Ok(count)
}
