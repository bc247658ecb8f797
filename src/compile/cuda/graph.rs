//! A run recorded: many launches as one.

use crate::Result;
use candle_core::cuda_backend::cudarc::driver::CudaGraph;
use candle_core::cuda_backend::cudarc::driver::sys::{
    CUgraphInstantiate_flags, CUstreamCaptureMode,
};
use candle_core::cuda_backend::{CudaDevice, WrapErr};

/// What there is of a run.
#[derive(Default)]
pub(super) enum Recorded {
    /// It was never run: what it needs is not loaded.
    #[default]
    Nothing,
    /// It was run once.
    Warm,
    /// The graphs of its segments.
    Graphs(Vec<Graph>),
}

/// A CUDA graph, launched through one executor alone.
pub(super) struct Graph(CudaGraph);

// SAFETY: a graph may be used from any thread, by one at a time: it is reached through `&mut` of its executor alone.
unsafe impl Send for Graph {}
// SAFETY: as above.
unsafe impl Sync for Graph {}

impl Graph {
    pub(super) fn launch(&self) -> Result<()> {
        Ok(self.0.launch().w()?)
    }
}

/// Records what `launch` launches on the stream of `gpu`, none of which is run. The caller sees to it that no handle of
/// the GPU is made meanwhile.
pub(super) fn record(gpu: &CudaDevice, launch: impl FnOnce() -> Result<()>) -> Result<Graph> {
    let stream = gpu.cuda_stream();
    stream
        .begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        .w()?;
    let launched = launch();
    // Ended whatever happened, or the stream would record for ever.
    let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let ended = stream.end_capture(flags).w();
    launched?;
    match ended? {
        Some(graph) => Ok(Graph(graph)),
        None => Err(candle_core::Error::msg("the driver recorded no graph").into()),
    }
}
