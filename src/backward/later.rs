//! Gradients of variables whose elements come later than the op's backward that returns them: while they are exchanged
//! between ranks, backward goes on.

use crate::Result;
use std::cell::RefCell;
use std::sync::Arc;

/// What has begun and is to be finished.
pub(crate) trait Unfinished {
    /// Finishes all of it, and does nothing where nothing is left.
    fn finish(&self) -> Result<()>;
}

thread_local! {
    /// While [`backward`](crate::backward()) runs an op's backward: what that leaves unfinished.
    static OPEN: RefCell<Option<Works>> = const { RefCell::new(None) };
}

type Works = Vec<Arc<dyn Unfinished>>;

/// Has [`backward`](crate::backward()) finish this before anybody reads a variable's gradient. `false` where an op's
/// backward is called by candle, which may add gradients to each other at any time: it is to be finished at once.
pub(crate) fn finish_later<T: Unfinished + 'static>(work: &Arc<T>) -> bool {
    OPEN.with_borrow_mut(|open| {
        let Some(works) = open else {
            return false;
        };
        let work: Arc<dyn Unfinished> = Arc::<T>::clone(work);
        if !works.iter().any(|known| Arc::ptr_eq(known, &work)) {
            works.push(work);
        }
        true
    })
}

/// What the ops of one backward have left unfinished.
pub(super) struct Later {
    works: Works,
    /// That of the op, if any, in whose backward this one runs.
    around: Option<Works>,
}

impl Later {
    pub fn new() -> Self {
        Self {
            works: Vec::new(),
            around: OPEN.take(),
        }
    }

    /// Runs an op's backward, which may leave something.
    pub fn leaving<R>(&mut self, backward: impl FnOnce() -> R) -> R {
        OPEN.set(Some(std::mem::take(&mut self.works)));
        let result = backward();
        self.works = OPEN.take().unwrap_or_default();
        result
    }

    pub fn finish(&mut self) -> Result<()> {
        self.works.drain(..).try_for_each(|work| work.finish())
    }
}

impl Drop for Later {
    /// After an error too, so that nothing is left for the next.
    fn drop(&mut self) {
        let _lost = self.finish();
        OPEN.set(self.around.take());
    }
}
