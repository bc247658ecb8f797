//! A recording as a trace for Perfetto and Chrome.

use super::recording::{Kernel, OperandShape, Recording, Span, extent, short};
use crate::probe::Kind;
use crate::{Result, files};
use serde_json::{Value, json};
use std::path::Path;

const PROCESS: u32 = 1;

impl Recording {
    /// Writes the recording in Chrome's trace event format, for <https://ui.perfetto.dev> or `chrome://tracing`. Each
    /// range is a complete event (`X`) with path, phase, shapes, FLOPs and bytes as arguments. Threads have their
    /// names. The allocated bytes are a counter (`C`) if a [tracker](crate::memory::tracker) is installed. Times are in
    /// microseconds, exact to the nanosecond. A GPU's streams follow the threads, each kernel with the place that
    /// launched it.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io) for a path that cannot be written; an existing file stays as it was.
    pub fn save_trace(&self, path: impl AsRef<Path>) -> Result<()> {
        files::write_bytes(path.as_ref(), self.trace().to_string().as_bytes())
    }

    /// Returns the trace as JSON; see [`save_trace`](Self::save_trace).
    pub fn trace(&self) -> Value {
        let mut events = vec![metadata("process_name", 0, env!("CARGO_PKG_NAME"))];
        let threads = self.threads.iter().enumerate();
        events.extend(threads.map(|(number, name)| metadata("thread_name", number, name)));

        // Events of a thread by time, outer before inner, as recorded.
        let mut order: Vec<usize> = (0..self.spans.len()).collect();
        order.sort_by_key(|&i| (self.spans[i].thread, i));
        events.extend(order.iter().map(|&i| complete(&self.spans[i])));

        let mut streams: Vec<u32> = self.kernels.iter().map(|kernel| kernel.stream).collect();
        streams.sort_unstable();
        streams.dedup();
        let first = self.threads.len();
        for (i, stream) in streams.iter().enumerate() {
            let name = format!("GPU stream {stream}");
            events.push(metadata("thread_name", first + i, &name));
            let kernels = self.kernels.iter().filter(|k| k.stream == *stream);
            events.extend(kernels.map(|kernel| self.kernel_event(kernel, first + i)));
        }

        let mut samples: Vec<(u64, u64)> = self
            .spans
            .iter()
            .filter_map(|span| Some((span.end_ns, span.allocated_bytes?)))
            .collect();
        samples.sort_by_key(|(at_ns, _)| *at_ns);
        events.extend(samples.into_iter().map(|(at_ns, bytes)| {
            json!({
                "ph": "C", "name": "allocated", "pid": PROCESS, "tid": 0,
                "ts": microseconds(at_ns), "args": { "bytes": bytes },
            })
        }));
        json!({ "displayTimeUnit": "ms", "traceEvents": events })
    }

    fn kernel_event(&self, kernel: &Kernel, thread: usize) -> Value {
        let launcher = kernel.span.and_then(|span| self.spans.get(span));
        let arguments = json!({
            "kernel": &*kernel.name,
            "grid": kernel.grid.map(extent),
            "block": kernel.block.map(extent),
            "path": launcher.map(|span| span.path.to_string()),
            "phase": launcher.map(|span| span.phase),
        });
        json!({
            "ph": "X", "name": short(&kernel.name), "cat": "kernel", "pid": PROCESS, "tid": thread,
            "ts": microseconds(kernel.start_ns), "dur": microseconds(kernel.duration_ns()), "args": arguments,
        })
    }
}

fn metadata(what: &str, thread: usize, name: &str) -> Value {
    json!({ "ph": "M", "name": what, "pid": PROCESS, "tid": thread, "args": { "name": name } })
}

fn complete(span: &Span) -> Value {
    let mut arguments = json!({ "path": span.path.to_string(), "phase": span.phase });
    if let Some(output) = &span.output {
        let inputs = span.inputs.iter().map(OperandShape::to_string);
        arguments["inputs"] = inputs.collect::<Vec<_>>().into();
        arguments["output"] = output.to_string().into();
    }
    if let Some(cost) = span.cost() {
        arguments["product_flops"] = cost.matmul_flops.into();
        arguments["flops"] = cost.flops().into();
        arguments["bytes"] = cost.bytes().into();
    }
    let (category, name) = match span.kind {
        Kind::Step => ("step", span.name()),
        Kind::Phase => ("phase", span.name()),
        Kind::Module => ("module", span.name()),
        Kind::Op => ("op", span.name()),
        Kind::OpBackward => ("op", format!("{} backward", span.name())),
        Kind::Range => ("range", span.name()),
    };
    json!({
        "ph": "X", "name": name, "cat": category, "pid": PROCESS, "tid": span.thread,
        "ts": microseconds(span.start_ns), "dur": microseconds(span.duration_ns()), "args": arguments,
    })
}

fn microseconds(ns: u64) -> f64 {
    ns as f64 / 1e3
}
