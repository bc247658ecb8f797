//! Tensors that a pass saves for backward.

use super::lifetimes::after_forward;
use crate::graph::{Graph, Source, ValueId};
use crate::report::{Column, Report};
use candle_core::DType;
use serde_json::json;

/// A tensor that is alive for backward.
#[derive(Clone, Debug, PartialEq)]
pub struct SavedTensor {
    /// The path of the op that makes it, `layers.0/attn/q_proj/linear`; a parameter's name.
    pub path: String,
    /// The outermost module around the op, `layers.0`; outside of modules, the op's name.
    pub module: String,
    /// The op's name; empty for a parameter.
    pub op: &'static str,
    /// `output`, `parameter`, or the op's name for what it saves in addition to its output: `probabilities`, `lse`.
    pub what: &'static str,
    /// The tensor's shape.
    pub shape: Vec<usize>,
    /// Dtype of its elements.
    pub dtype: DType,
    /// Size of its elements, in bytes.
    pub bytes: u64,
}

/// The `what` of a leaf.
const PARAMETER: &str = "parameter";

impl SavedTensor {
    /// Returns whether it is a parameter (a [`Var`](candle_core::Var)), which is alive without a graph too.
    pub fn is_parameter(&self) -> bool {
        self.what == PARAMETER
    }
}

/// Tensors that a pass saves for backward, each once, in the order of forward.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SavedTensors {
    /// All tensors, parameters included.
    pub tensors: Vec<SavedTensor>,
}

impl SavedTensors {
    /// Yields the tensors that are alive because of the graph: all but the parameters.
    pub fn residuals(&self) -> impl Iterator<Item = &SavedTensor> {
        self.tensors.iter().filter(|tensor| !tensor.is_parameter())
    }

    /// Returns the bytes of the residuals.
    pub fn residual_bytes(&self) -> u64 {
        self.residuals().map(|tensor| tensor.bytes).sum()
    }

    /// Returns the bytes of the parameters that the graph depends on.
    pub fn parameter_bytes(&self) -> u64 {
        let parameters = self.tensors.iter().filter(|tensor| tensor.is_parameter());
        parameters.map(|tensor| tensor.bytes).sum()
    }

    /// Returns name, number and bytes of the residuals of each part of the model ([`SavedTensor::module`]), in the
    /// order of forward.
    pub fn by_module(&self) -> Vec<(String, usize, u64)> {
        let mut sums: Vec<(String, usize, u64)> = Vec::new();
        for SavedTensor { module, bytes, .. } in self.residuals() {
            match sums.iter_mut().find(|(known, ..)| known == module) {
                Some((_, count, sum)) => (*count, *sum) = (*count + 1, *sum + bytes),
                None => sums.push((module.clone(), 1, *bytes)),
            }
        }
        sums
    }

    /// Returns the `count` largest residuals, the largest first.
    pub fn largest(&self, count: usize) -> Vec<&SavedTensor> {
        let mut tensors: Vec<&SavedTensor> = self.residuals().collect();
        tensors.sort_by_key(|tensor| std::cmp::Reverse(tensor.bytes)); // stable: of equals the first
        tensors.truncate(count);
        tensors
    }

    /// Returns a table of the five largest residuals and the sums of the model's parts.
    pub fn report(&self) -> Report {
        let largest = self.largest(5).into_iter().map(|tensor| {
            let shape = format!("{:?}", tensor.shape);
            json!([
                tensor.path,
                tensor.what,
                tensor.bytes,
                shape,
                tensor.dtype.as_str(),
                1
            ])
        });
        let all = (
            "all".into(),
            self.residuals().count(),
            self.residual_bytes(),
        );
        let sums = self.by_module().into_iter();
        let sums = sums.map(|(module, count, bytes)| (format!("all of {module}"), count, bytes));
        let sums = sums.chain([all]);
        let sums = sums.map(|(name, count, bytes)| json!([name, "", bytes, "", "", count]));
        let columns = vec![
            Column::text("origin", "Origin"),
            Column::text("what", "What"),
            Column::mib("bytes", "Size"),
            Column::text("shape", "Shape"),
            Column::text("dtype", "Dtype"),
            Column::count("count", "Tensors"),
        ];
        Report::table(columns, largest.chain(sums))
    }
}

/// Returns what a traced function saves for backward: parameters that it reads, and values that it makes and that are
/// alive when forward is done. Views of a tensor count as that tensor. Inputs and constants are not included.
///
/// Nothing is saved if the function's first output is not tracked.
///
/// ```
/// use candle_core::DType;
/// use tallow::{graph, memory, ops};
///
/// let weight = graph::weights(DType::F32).get((7, 5), "weight")?;
/// let x = graph::input("x", (3, 5), DType::F32)?;
/// let graph = graph::trace(graph::Target::Cpu, || ops::sum(&ops::linear(&x, &weight)?))?;
/// let saved = memory::saved_tensors(&graph);
/// let of: Vec<_> = saved.tensors.iter().map(|t| (t.path.as_str(), t.what, t.bytes)).collect();
/// assert_eq!(
///     of,
///     [
///         ("weight", "parameter", 4 * 7 * 5),
///         ("linear", "output", 4 * 3 * 7),
///         ("sum", "output", 4)
///     ]
/// );
/// assert_eq!(saved.residual_bytes(), 4 * (3 * 7 + 1));
/// # Ok::<(), tallow::Error>(())
/// ```
pub fn saved_tensors(graph: &Graph) -> SavedTensors {
    let is_tracked = graph.outputs.first().is_some_and(|output| output.tracked);
    if !is_tracked {
        return SavedTensors::default();
    }
    let parameters = graph.values.iter().enumerate().filter_map(|(i, value)| {
        let name = match &value.source {
            Source::Weight(name) if value.tracked => name.clone(),
            _ => return None,
        };
        let (module, op) = (String::new(), "");
        Some(tensor(graph, ValueId(i), (name, module, op), PARAMETER))
    });
    let made = after_forward(graph).into_iter().map(|(id, node)| {
        let kept = node.saved.iter().find(|kept| kept.value == id);
        let module = node.module.names().into_iter().next();
        let module = module.unwrap_or_else(|| node.op.to_string());
        let of = (node.path.clone(), module, node.op);
        tensor(graph, id, of, kept.map_or("output", |kept| kept.name))
    });
    SavedTensors {
        tensors: parameters.chain(made).collect(),
    }
}

fn tensor(
    graph: &Graph,
    id: ValueId,
    (path, module, op): (String, String, &'static str),
    what: &'static str,
) -> SavedTensor {
    let value = graph.value(id);
    SavedTensor {
        path,
        module,
        op,
        what,
        shape: value.shape.clone(),
        dtype: value.dtype,
        bytes: value.bytes() as u64,
    }
}
