//! Whether this thread records a graph; and what holds on a thread while a function runs.

use std::cell::Cell;

thread_local! {
    static ENABLED: Cell<bool> = const { Cell::new(true) };
}

/// Runs `f` without building a graph: whatever this crate's ops and layers compute in it keeps nothing for backward.
///
/// candle has no such switch of its own, so an ordinary candle op on a [`Var`](candle_core::Var) inside `f` still
/// records itself. Regions nest, hold for the calling thread only, and end on panic too.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use tallow::{no_grad, ops};
///
/// let w = Var::from_tensor(&Tensor::ones((3, 2), candle_core::DType::F32, &Device::Cpu)?)?;
/// let x = Tensor::ones((1, 2), candle_core::DType::F32, &Device::Cpu)?;
/// assert!(ops::linear(&x, &w)?.track_op());
/// assert!(!no_grad(|| ops::linear(&x, &w))?.track_op());
/// # Ok::<(), tallow::Error>(())
/// ```
pub fn no_grad<R>(f: impl FnOnce() -> R) -> R {
    with_grad(false, f)
}

/// Runs `f` with a graph or without, whatever held before, which holds again afterwards.
pub(crate) fn with_grad<R>(enabled: bool, f: impl FnOnce() -> R) -> R {
    holding(|enabled| ENABLED.replace(enabled), enabled, f)
}

/// Whether ops record themselves on this thread.
pub fn is_grad_enabled() -> bool {
    ENABLED.get()
}

/// Runs `f` while `value` is in a thread's cell, of which `replace` puts one in and returns the other. The former holds
/// again afterwards, on panic too.
pub(crate) fn holding<T, R>(replace: impl Fn(T) -> T, value: T, f: impl FnOnce() -> R) -> R {
    struct Restore<T, F: Fn(T) -> T> {
        former: Option<T>,
        replace: F,
    }
    impl<T, F: Fn(T) -> T> Drop for Restore<T, F> {
        fn drop(&mut self) {
            self.former.take().map(&self.replace);
        }
    }
    let former = Some(replace(value));
    let _restore = Restore { former, replace };
    f()
}
