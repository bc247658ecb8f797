//! Segments of a run, each launched call by call or replayed as a CUDA graph.

use super::call::Launcher;
use super::graph::{self, Graph, Recorded};
use super::{Executor, RunScope};
use crate::compile::calls;
use crate::compile::phase_times::Parts;
use crate::compile::plan::Plan;
use crate::{Result, probe};
use candle_core::cuda_backend::cudarc::driver::CudaEvent;
use candle_core::cuda_backend::cudarc::driver::sys::CUevent_flags;
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use std::ops::{ControlFlow, Range};

/// Ranges of calls that are launched together, each with its micro-batch.
pub(super) type Segment = Vec<(Range<usize>, usize)>;

impl Executor {
    /// Returns the segments of a run: one segment or, if phases are timed or profiled, one for each run of calls of one
    /// phase.
    pub(super) fn segments(&self, plan: &Plan, extent: RunScope) -> Vec<Segment> {
        let micro_batches = 0..plan.micro_batches();
        let mut calls: Segment = micro_batches
            .map(|number| (plan.per_micro_batch(), number))
            .collect();
        if extent != RunScope::MicroBatches {
            calls.push((plan.per_micro_batch().end..plan.calls().len(), 0));
        }
        if self.clock.is_none() && !probe::is_listening() {
            return vec![calls];
        }
        let made;
        let parts = match &self.clock {
            Some(clock) => &clock.parts,
            None => {
                made = Parts::new(plan);
                &made
            }
        };
        let pieces = calls.into_iter().flat_map(|(calls, micro_batch)| {
            let pieces = parts.pieces(calls).into_iter();
            pieces.map(move |piece| vec![(piece, micro_batch)])
        });
        pieces.collect()
    }

    /// Calls `launch` for each segment of a run, in order, and records the times between.
    fn run_segments(
        &mut self,
        segments: &[Segment],
        mut launch: impl FnMut(&mut Self, usize, &Segment) -> Result<()>,
    ) -> Result<()> {
        if let Some(clock) = &mut self.clock {
            clock.start();
        }
        for (number, segment) in segments.iter().enumerate() {
            if let (Some(clock), Some((calls, _))) = (&mut self.clock, segment.first()) {
                record_event(&self.gpu, &mut self.events, number)?;
                clock.begins(calls.start, number);
            }
            launch(self, number, segment)?;
        }
        if let Some(clock) = &mut self.clock {
            record_event(&self.gpu, &mut self.events, segments.len())?;
            clock.ends(segments.len());
        }
        Ok(())
    }

    pub(super) fn launch_all(
        &mut self,
        plan: &Plan,
        extent: RunScope,
        segments: &[Segment],
    ) -> Result<()> {
        self.run_segments(segments, |executor, _, segment| {
            executor.launch(plan, segment, extent)
        })
    }

    pub(super) fn launch(
        &mut self,
        plan: &Plan,
        segment: &Segment,
        extent: RunScope,
    ) -> Result<()> {
        for (calls, micro_batch) in segment {
            let mut launcher = self.launcher(plan, calls, *micro_batch, extent);
            let _end = calls::run(plan, calls.clone(), *micro_batch, |index, call| {
                launcher.launch(index, call)?;
                Ok(ControlFlow::Continue(()))
            })?;
        }
        self.exchanges.wait_for_all(&self.gpu)
    }

    /// Records the launches of a segment. The probe is not notified; it is when the graph is replayed.
    fn record(&mut self, plan: &Plan, segment: &Segment, extent: RunScope) -> Result<Graph> {
        let gpu = self.gpu.clone();
        let mut graph = graph::record(&gpu, segment, |launched| {
            for (calls, micro_batch) in segment {
                let mut launcher = self.launcher(plan, calls, *micro_batch, extent);
                for index in calls.clone().filter(|i| plan.is_run_in(*i, *micro_batch)) {
                    launcher.launch(index, &plan.calls()[index])?;
                    launched(index)?;
                }
            }
            self.exchanges.wait_for_all(&gpu)
        })?;
        let mut calls = segment
            .iter()
            .flat_map(|(calls, _)| &plan.calls()[calls.clone()]);
        let exchanges = self.exchanges.world_size() > 1 && calls.any(|call| call.op.is_exchange());
        if exchanges {
            graph.kernels = None; // kernels run concurrently with exchanges
        }
        Ok(graph)
    }

    fn launcher<'a>(
        &'a mut self,
        plan: &'a Plan,
        calls: &Range<usize>,
        micro_batch: usize,
        extent: RunScope,
    ) -> Launcher<'a> {
        let Some(device_pointers) = &self.device_pointers else {
            panic!("a call was launched before its operands were placed");
        };
        Launcher {
            gpu: &self.gpu,
            plan,
            device_pointers,
            run_values: &self.run_values,
            cublas_lt: &mut self.cublas_lt,
            updates: self.updates.as_ref(),
            exchanges: &mut self.exchanges,
            micro_batch,
            checks: extent == RunScope::Checked,
            launched: calls.start,
            end: calls.end,
        }
    }

    /// Replays the recorded run; records it first if it has been run before.
    ///
    /// Recording runs nothing, and another thread can invalidate it: while a stream is recorded, the driver refuses to
    /// synchronise the context or to load a kernel. After such an error the calls are launched one by one, which
    /// reports the actual error if there is one, and the next run is recorded.
    pub(super) fn run_recorded(
        &mut self,
        plan: &Plan,
        extent: RunScope,
        segments: &[Segment],
    ) -> Result<()> {
        let place = extent as usize;
        if let Recorded::Nothing = self.recorded[place] {
            self.recorded[place] = Recorded::Warm;
            return self.launch_all(plan, extent, segments);
        }
        if !self.recorded[place].is_of(segments) {
            let graphs = segments.iter();
            let graphs = graphs.map(|segment| self.record(plan, segment, extent));
            match graphs.collect() {
                Err(_) => return self.launch_all(plan, extent, segments),
                Ok(graphs) => self.recorded[place] = Recorded::Graphs(graphs),
            }
        }
        let mut phase = calls::ProbedPhase::default();
        self.run_segments(segments, |executor, number, _| {
            let Recorded::Graphs(graphs) = &executor.recorded[place] else {
                unreachable!("recorded above");
            };
            let graph = &graphs[number];
            match &graph.segment[..] {
                [(calls, _)] if probe::is_listening() => {
                    let launch = || graph.launch();
                    calls::replay(
                        plan,
                        calls.clone(),
                        graph.kernels.as_deref(),
                        &mut phase,
                        launch,
                    )
                }
                _ => graph.launch(),
            }
        })
    }
}

/// Records the event with this number on the stream of `gpu`.
fn record_event(gpu: &CudaDevice, events: &mut Vec<CudaEvent>, number: usize) -> Result<()> {
    let stream = gpu.cuda_stream();
    while events.len() <= number {
        let timed = Some(CUevent_flags::CU_EVENT_DEFAULT);
        events.push(stream.context().new_event(timed).w()?);
    }
    Ok(events[number].record(&stream).w()?)
}
