//! What a graph holds for backward, tensor by tensor.
//!
//! What lives here: the walk over a graph ([`saved_tensors`]) and its sums; in `watch`, what ops say of their tensors
//! while they run. What does not: what is alive without a graph ([`record`](crate::memory::record())).

mod watch;

pub use watch::{GraphWatch, watch_graphs};

use crate::probe::Path;
use crate::report::{Column, Fields, Report};
use candle_core::{DType, Tensor};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use watch::{OUTPUT, heard, storage_of};

/// A tensor that a graph holds.
#[derive(Clone, Debug, PartialEq)]
pub struct SavedTensor {
    /// The op that has made it; `None` for candle's own ops, and for all that ran before.
    pub path: Option<Path>,
    /// `output`, `parameter`, or what the op calls what it keeps beside: `probabilities`, `lse`.
    pub what: &'static str,
    /// Its shape: of several tensors on one storage, the first one's.
    pub shape: Vec<usize>,
    /// Its dtype.
    pub dtype: DType,
    /// The size of its storage.
    pub bytes: u64,
}

/// The `what` of a leaf.
const PARAMETER: &str = "parameter";

impl SavedTensor {
    /// A [`Var`](candle_core::Var), which is there without a graph too.
    pub fn is_parameter(&self) -> bool {
        self.what == PARAMETER
    }

    /// The op with its place, as tables name it: `layers.0/attn/q_proj/linear`, or `candle`.
    pub fn origin(&self) -> String {
        match self.path {
            Some(path) => path.to_string(),
            None => "candle".into(),
        }
    }

    /// The outermost part of the model that it is in: `layers.0`, `lm_head`, or `candle`.
    pub fn block(&self) -> String {
        let names = self.path.map(Path::names).unwrap_or_default();
        names.into_iter().next().unwrap_or_else(|| "candle".into())
    }
}

/// What a graph holds for backward, each storage once, in the order of forward.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SavedTensors {
    /// All of it, parameters included.
    pub tensors: Vec<SavedTensor>,
}

impl SavedTensors {
    /// What is there because of the graph: all but the parameters.
    pub fn residuals(&self) -> impl Iterator<Item = &SavedTensor> {
        self.tensors.iter().filter(|tensor| !tensor.is_parameter())
    }

    /// The size of the residuals.
    pub fn residual_bytes(&self) -> u64 {
        self.residuals().map(|tensor| tensor.bytes).sum()
    }

    /// The size of the parameters that the graph ends in.
    pub fn parameter_bytes(&self) -> u64 {
        let parameters = self.tensors.iter().filter(|tensor| tensor.is_parameter());
        parameters.map(|tensor| tensor.bytes).sum()
    }

    /// Number and size of the residuals of each part of the model ([`SavedTensor::block`]), in the order of forward.
    pub fn by_block(&self) -> Vec<(String, usize, u64)> {
        self.by(SavedTensor::block)
    }

    /// Number and size of the residuals by op and what it keeps, the largest first.
    pub fn by_op(&self) -> Vec<(String, usize, u64)> {
        let mut sums = self.by(|tensor| match tensor.path {
            Some(path) => format!("{}: {}", path.name(), tensor.what),
            None => "candle".into(),
        });
        sums.sort_by_key(|(_, _, bytes)| std::cmp::Reverse(*bytes)); // stable
        sums
    }

    fn by(&self, name: impl Fn(&SavedTensor) -> String) -> Vec<(String, usize, u64)> {
        let mut sums: Vec<(String, usize, u64)> = Vec::new();
        for tensor in self.residuals() {
            let name = name(tensor);
            match sums.iter_mut().find(|(known, ..)| *known == name) {
                Some((_, count, bytes)) => (*count, *bytes) = (*count + 1, *bytes + tensor.bytes),
                None => sums.push((name, 1, tensor.bytes)),
            }
        }
        sums
    }

    /// The `count` largest residuals, the largest first.
    pub fn largest(&self, count: usize) -> Vec<&SavedTensor> {
        let mut tensors: Vec<&SavedTensor> = self.residuals().collect();
        tensors.sort_by_key(|tensor| std::cmp::Reverse(tensor.bytes)); // stable: of equals the first
        tensors.truncate(count);
        tensors
    }

    /// The five largest, and the sum of each part of the model, as a table.
    pub fn report(&self) -> Report {
        let mut rows = Vec::new();
        for tensor in self.largest(5) {
            let mut row = Fields::new();
            row.insert("origin", tensor.origin());
            row.insert("what", tensor.what);
            row.insert("shape", format!("{:?}", tensor.shape));
            row.insert("dtype", tensor.dtype.as_str());
            row.insert("count", 1);
            row.insert("bytes", tensor.bytes);
            rows.push(row);
        }
        let all = self.residuals().count();
        let sums = self.by_block().into_iter();
        let sums = sums.map(|(block, count, bytes)| (format!("all of {block}"), count, bytes));
        for (name, count, bytes) in sums.chain([("all".into(), all, self.residual_bytes())]) {
            let mut row = Fields::new();
            row.insert("origin", name);
            for key in ["what", "shape", "dtype"] {
                row.insert(key, "");
            }
            row.insert("count", count);
            row.insert("bytes", bytes);
            rows.push(row);
        }
        Report {
            columns: vec![
                Column::text("origin", "Saved for backward"),
                Column::text("what", "What"),
                Column::text("shape", "Shape"),
                Column::text("dtype", "Dtype"),
                Column::count("count", "Tensors"),
                Column::mib("bytes", "Size"),
            ],
            rows,
            ..Default::default()
        }
    }
}

/// What the graph that ends in `output` holds for backward.
///
/// Names, and what ops of this crate keep beside their inputs and outputs, are known of those that ran forward while
/// somebody [watched](watch_graphs); of all others, and of candle's own, what the graph shows: their outputs.
///
/// Not seen are tensors that take no gradient, token ids and tables of positions, which the graph holds too.
///
/// ```
/// use candle_core::{DType, Device, Tensor, Var};
/// use tallow::{memory, ops};
///
/// let weight = Var::ones((7, 5), DType::F32, &Device::Cpu)?;
/// let x = Tensor::ones((3, 5), DType::F32, &Device::Cpu)?;
/// let watch = memory::watch_graphs();
/// let y = ops::linear(&x, &weight)?;
/// let loss = y.sqr()?.sum_all()?; // candle's own
/// let saved = memory::saved_tensors(&loss);
/// drop(watch);
/// let of: Vec<_> = saved.tensors.iter().map(|t| (t.origin(), t.what, t.bytes)).collect();
/// assert_eq!(of[0], ("candle".into(), "parameter", 4 * 7 * 5));
/// assert_eq!(of[1], ("linear".into(), "output", 4 * 3 * 7));
/// assert_eq!(of[2], ("candle".into(), "output", 4 * 3 * 7));
/// assert_eq!(saved.residual_bytes(), 4 * (2 * 3 * 7 + 1));
/// # Ok::<(), tallow::Error>(())
/// ```
pub fn saved_tensors(output: &Tensor) -> SavedTensors {
    let heard = heard();
    let mut places = HashMap::new();
    let mut tensors: Vec<SavedTensor> = Vec::new();
    let mut add = |storage: usize, tensor: SavedTensor| match places.entry(storage) {
        Entry::Vacant(place) => {
            place.insert(tensors.len());
            tensors.push(tensor);
        }
        // Made by an op of candle's inside of one of ours, whose output is a view of it.
        Entry::Occupied(place) => {
            let known = &mut tensors[*place.get()];
            if known.path.is_none() && !known.is_parameter() {
                known.path = tensor.path;
            }
        }
    };
    // Backward's order, turned round: what made a storage comes before what views it.
    for node in output.sorted_nodes().into_iter().rev() {
        let made = heard.made.get(&node.id());
        for kept in made.iter().flat_map(|made| &made.kept) {
            let tensor = SavedTensor {
                path: Some(kept.path),
                what: kept.what,
                shape: kept.shape.clone(),
                dtype: kept.dtype,
                bytes: kept.bytes,
            };
            add(kept.storage, tensor);
        }
        let (storage, bytes) = storage_of(node);
        let tensor = SavedTensor {
            path: made.map(|made| made.path),
            what: match node.is_variable() {
                true => PARAMETER,
                false => OUTPUT,
            },
            shape: node.dims().to_vec(),
            dtype: node.dtype(),
            bytes,
        };
        add(storage, tensor);
    }
    SavedTensors { tensors }
}
