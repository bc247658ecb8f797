//! Gradient tracking, and thread-local values that are set while a function runs.

use std::cell::Cell;

thread_local! {
    static ENABLED: Cell<bool> = const { Cell::new(true) };
}

/// Runs `f` without gradient tracking: this crate's ops and layers build no graph and save nothing for backward.
///
/// candle has no such switch: its own ops on a [`Var`](candle_core::Var) inside `f` are still tracked. Calls may be
/// nested and apply to the calling thread only.
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

/// Runs `f` with gradient tracking enabled or disabled, and restores the previous setting.
pub(crate) fn with_grad<R>(enabled: bool, f: impl FnOnce() -> R) -> R {
    with_value(|enabled| ENABLED.replace(enabled), enabled, f)
}

/// Returns whether gradients are tracked on this thread.
///
/// ```
/// use tallow::{is_grad_enabled, no_grad};
///
/// assert!(is_grad_enabled());
/// assert!(!no_grad(is_grad_enabled));
/// ```
pub fn is_grad_enabled() -> bool {
    ENABLED.get()
}

/// Runs `f` while a thread-local cell has `value`; `replace` swaps the cell. The previous value is restored, also on
/// panics.
pub(crate) fn with_value<T, R>(replace: impl Fn(T) -> T, value: T, f: impl FnOnce() -> R) -> R {
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
