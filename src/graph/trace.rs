//! Tracing a function.

use super::data::{Graph, Source, Target, TraceEvent};
use super::session::{self, twice, with_session};
use crate::probe::{self, Listener};
use crate::{Error, Result};
use candle_core::Tensor;
use std::sync::Arc;

/// What a traced function returns.
pub trait Outputs {
    /// Its tensors, in order.
    fn tensors(&self) -> Vec<&Tensor>;
}

impl Outputs for Tensor {
    fn tensors(&self) -> Vec<&Tensor> {
        vec![self]
    }
}

impl Outputs for (Tensor, Tensor) {
    fn tensors(&self) -> Vec<&Tensor> {
        vec![&self.0, &self.1]
    }
}

impl Outputs for Vec<Tensor> {
    fn tensors(&self) -> Vec<&Tensor> {
        self.iter().collect()
    }
}

/// What `f` does, on `target`, without doing it: `f` is called once, its ops check their operands' shapes and dtypes as
/// always, and compute nothing.
///
/// Everything that decides what runs is as `f` and its caller have it: [`autocast`](crate::autocast()) regions,
/// [`no_grad`](crate::no_grad()), the kernel policy. Ops of this crate on real tensors are traced too, and give hollow
/// ones. Token ids are not read, so that ids outside of the vocabulary are not found.
///
/// Drops are told of values that ops make, as they happen: of what the graph of a gradient keeps, when that graph goes.
/// A value that is read after its drop was told (a tensor taken out of its graph outlives it) is never dropped.
///
/// # Errors
/// Those of `f`; a computation by candle itself on a hollow tensor, with the op before it; a trace inside of a trace.
pub fn trace<T: Outputs>(target: Target, f: impl FnOnce() -> Result<T>) -> Result<Graph> {
    Ok(trace_with_tensors(target, f)?.graph)
}

/// A graph, and a tensor of each of its values: of a weight the variable itself, of what ops make a hollow one.
pub(crate) struct Traced {
    pub graph: Graph,
    pub tensors: Vec<Tensor>,
}

/// As [`trace`].
pub(crate) fn trace_with_tensors<T: Outputs>(
    target: Target,
    f: impl FnOnce() -> Result<T>,
) -> Result<Traced> {
    struct Quiet;
    impl Listener for Quiet {}

    let _listening = probe::listen(Arc::new(Quiet)); // ops have paths only while there is a listener
    let _root = probe::at_root(); // wherever this is called from
    let _open = session::open(target)?;
    let result = f().map_err(explained)?;
    with_session(|session| {
        session.told_drops();
        for output in result.tensors() {
            let operand = session.operand(output)?;
            session.graph.outputs.push(operand);
        }
        Ok(Traced {
            graph: std::mem::take(&mut session.graph),
            tensors: std::mem::take(&mut session.held),
        })
    })
}

/// An error of candle's on a hollow tensor in words of the model: candle names the dtype of an empty storage.
fn explained(error: Error) -> Error {
    let text = error.to_string();
    if !text.contains("F4") && !text.contains("f4") {
        return error;
    }
    let last = with_session(|session| {
        let mut events = session.graph.events.iter().rev();
        Ok(events.find_map(|event| match event {
            TraceEvent::Node(node) => Some(node.path.clone()),
            _ => None,
        }))
    });
    Error::Order {
        op: "graph::trace",
        problem: match last.ok().flatten() {
            Some(path) => format!("after {path}, candle was to compute on a hollow tensor itself"),
            None => "before any op, candle was to compute on a hollow tensor itself".into(),
        },
        hint: "use the op of tallow::ops: add for +, cast for to_dtype, contiguous before reshape, say".into(),
    }
}

/// Calls the weight or input `x` by `name` in the trace that is open: a variable with elements, whose name nothing else
/// knows.
///
/// # Errors
/// No open trace, a name that is another value's, a tensor that an op has made.
pub fn name(x: &Tensor, name: &str) -> Result<()> {
    with_session(|session| {
        let id = session.value(x)?;
        let named = match session.graph.values[id.0].source {
            Source::Weight(_) => Source::Weight(name.into()),
            Source::Input(_) | Source::Constant => Source::Input(name.into()),
            Source::Node => {
                return Err(Error::Order {
                    op: "graph::name",
                    problem: format!("{name:?} was made by an op"),
                    hint: "weights and inputs have names".into(),
                });
            }
        };
        let is_new = session.graph.values[id.0].source != named;
        if is_new && !session.sources.insert(named.clone()) {
            return Err(twice(name));
        }
        if is_new {
            session.sources.remove(&session.graph.values[id.0].source);
        }
        session.graph.values[id.0].source = named;
        Ok(())
    })
}
