//! What ops say of their tensors while they run.

use crate::memory::record::block_of;
use crate::probe::{self, Listener, Listening, Path};
use candle_core::{DType, Tensor, TensorId};
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

/// The `what` of an op's output.
pub(super) const OUTPUT: &str = "output";

/// What is told of a tensor that an op keeps, without the tensor: nothing may live longer because it is watched.
#[derive(Clone)]
pub(super) struct Kept {
    /// Who keeps it.
    keeper: Path,
    /// Who has made it: the keeper, or an op in a graph that the keeper keeps.
    pub path: Path,
    pub what: &'static str,
    pub shape: Vec<usize>,
    pub dtype: DType,
    pub storage: usize,
    pub bytes: u64,
}

/// An op whose output was tracked.
pub(super) struct Made {
    pub path: Path,
    pub kept: Vec<Kept>,
}

/// What has been heard.
#[derive(Default)]
pub(super) struct Heard {
    /// By the output's id, which is never given twice.
    pub made: HashMap<TensorId, Made>,
    /// Kept by an op whose output is still to come.
    pending: HashMap<ThreadId, Vec<Kept>>,
}

static HEARD: LazyLock<Mutex<Heard>> = LazyLock::new(Mutex::default);

pub(super) fn heard() -> MutexGuard<'static, Heard> {
    HEARD.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Ears;

impl Listener for Ears {
    fn produced(&self, path: Path, output: &Tensor) {
        let mut heard = heard();
        let thread = thread::current().id();
        let pending = heard.pending.remove(&thread).unwrap_or_default();
        // What another op keeps whose output is still to come: this one ran inside of it.
        let (kept, rest): (Vec<Kept>, Vec<Kept>) =
            pending.into_iter().partition(|kept| kept.keeper == path);
        if !rest.is_empty() {
            heard.pending.insert(thread, rest);
        }
        if output.track_op() {
            // An op made of others returns the last one's output: that one made it.
            let made = heard.made.entry(output.id());
            let made = made.or_insert_with(|| Made {
                path,
                kept: Vec::new(),
            });
            made.kept.extend(kept);
        }
    }

    fn kept(&self, keeper: Path, what: &'static str, tensor: &Tensor) {
        let (storage, bytes) = storage_of(tensor);
        let mut heard = heard();
        // A tensor in a graph that the keeper keeps: made by an op of its own, which keeps more.
        let made = heard.made.get(&tensor.id());
        let inner = made.iter().flat_map(|made| &made.kept);
        let inner = inner.map(|kept| Kept {
            keeper,
            ..kept.clone()
        });
        let mut all: Vec<Kept> = inner.collect();
        all.push(Kept {
            keeper,
            path: made.map_or(keeper, |made| made.path),
            what: made.map_or(what, |_| OUTPUT),
            shape: tensor.dims().to_vec(),
            dtype: tensor.dtype(),
            storage,
            bytes,
        });
        let thread = thread::current().id();
        heard.pending.entry(thread).or_default().extend(all);
    }
}

/// How many watch, and their one stay among the listeners. Listeners never lock this, so that they may come and go
/// under it.
#[derive(Default)]
struct Watches {
    count: usize,
    listening: Option<Listening>,
}

static WATCHES: LazyLock<Mutex<Watches>> = LazyLock::new(Mutex::default);

fn watches() -> MutexGuard<'static, Watches> {
    WATCHES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// While it lasts, ops are remembered by their outputs.
#[must_use = "ops are remembered until this is dropped"]
pub struct GraphWatch(());

/// Remembers which op makes which tensor, and what it keeps beside, so that
/// [`saved_tensors`](crate::memory::saved_tensors) can say.
///
/// It holds no tensor, only what is to be said of it, for
/// every op that runs meanwhile on any thread: watch a step, not a training.
pub fn watch_graphs() -> GraphWatch {
    let mut watches = watches();
    watches.count += 1;
    if watches.listening.is_none() {
        watches.listening = Some(probe::listen(Arc::new(Ears)));
    }
    GraphWatch(())
}

impl Drop for GraphWatch {
    fn drop(&mut self) {
        let mut watches = watches();
        watches.count -= 1;
        if watches.count == 0 {
            watches.listening = None;
            *heard() = Heard::default();
        }
    }
}

/// What tells a tensor's storage apart, and its size: on other devices than the CPU that of the tensor.
pub(super) fn storage_of(tensor: &Tensor) -> (usize, u64) {
    let (storage, _) = tensor.storage_and_layout();
    let address = std::ptr::from_ref(&*storage).addr();
    drop(storage);
    let of_tensor = tensor.elem_count() * tensor.dtype().size_in_bytes();
    let bytes = block_of(tensor).map_or(of_tensor, |(_, bytes)| bytes);
    (address, bytes as u64)
}
