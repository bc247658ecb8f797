//! What made a tensor, for a backward of our own: candle does not show the op behind a tensor.

use candle_core::{Result, Tensor, TensorId};
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

/// A node of candle's graph that is this crate's.
pub(crate) trait Node: Send + Sync {
    fn inputs(&self) -> Vec<Tensor>;

    /// A gradient for each input, from the output and its gradient: of a storage of its own, or `dy` itself.
    fn backward(&self, y: &Tensor, dy: &Tensor) -> Result<Vec<Option<Tensor>>>;
}

/// The nodes of outputs that are alive, by the outputs' ids.
static NODES: LazyLock<Mutex<HashMap<TensorId, Weak<dyn Node>>>> = LazyLock::new(Mutex::default);

fn nodes() -> MutexGuard<'static, HashMap<TensorId, Weak<dyn Node>>> {
    NODES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A node's place on the tape. The node has it, so that both go together.
#[derive(Default)]
pub(crate) struct Entry(OnceLock<TensorId>);

impl Entry {
    /// Says that `node`, whose entry this is, made `y`.
    pub fn write(&self, y: &Tensor, node: &Arc<impl Node + 'static>) {
        if y.track_op() && self.0.set(y.id()).is_ok() {
            let node: Weak<dyn Node> = Arc::downgrade(node) as Weak<dyn Node>;
            nodes().insert(y.id(), node);
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if let Some(id) = self.0.get() {
            nodes().remove(id);
        }
    }
}

/// The node behind `y`, if it is one of this crate's.
pub(crate) fn node_of(y: &Tensor) -> Option<Arc<dyn Node>> {
    nodes().get(&y.id())?.upgrade()
}
