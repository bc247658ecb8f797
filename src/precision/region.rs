//! Autocast regions.

use super::Autocast;
use crate::grad::with_value;
use crate::probe::Operand;
use crate::{Result, graph};
use candle_core::DType;
use std::borrow::Borrow;
use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::rc::Rc;

/// A region of this thread: its id, and its policy (`None`: no casts).
struct Region {
    id: u64,
    policy: Option<Rc<Autocast>>,
}

thread_local! {
    /// The open regions, outermost first.
    static REGIONS: RefCell<Vec<Region>> = const { RefCell::new(Vec::new()) };
    static NEXT_ID: Cell<u64> = const { Cell::new(0) };
    /// The listener that is called when the outermost region ends.
    static ON_OUTERMOST_END: Cell<Option<fn()>> = const { Cell::new(None) };
}

/// Runs `f` under an autocast policy, on this thread.
///
/// Run forward and loss inside, backward and optimizer outside. The previous policy is restored afterwards, also on
/// errors and panics. For a function with another error type use the guard of [`Autocast::enter`]. The rules of a
/// region are in [`precision`](crate::precision).
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use tallow::precision::Autocast;
/// use tallow::{autocast, ops};
///
/// let x = Tensor::ones((3, 3), DType::F32, &Device::Cpu)?;
/// let (inside, switched_off) = autocast(Autocast::cuda(DType::F16), || {
///     let switched_off = autocast(Autocast::disabled(), || ops::matmul(&x, &x))?;
///     Ok((ops::matmul(&x, &x)?, switched_off))
/// })?;
/// assert_eq!(inside.dtype(), DType::F16);
/// assert_eq!(switched_off.dtype(), DType::F32);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Those of [`Autocast::enter`] and of `f`. [`Error::DType`](crate::Error::DType) replaces candle's error for operands
/// of different dtypes, and names the op or layer to use: a `candle_nn::Linear` has a weight in f32 and gets x in bf16.
/// (With the guard of [`Autocast::enter`] the error is candle's.)
pub fn autocast<T>(policy: impl Borrow<Autocast>, f: impl FnOnce() -> Result<T>) -> Result<T> {
    let _guard = policy.borrow().enter()?;
    f().map_err(|error| match is_enabled() {
        true => graph::explain_mixed_dtypes(error),
        false => error,
    })
}

/// Returns the current policy of this thread; `None` outside of regions and if casts are disabled.
///
/// ```
/// use candle_core::DType;
/// use tallow::precision::{self, Autocast};
///
/// let region = Autocast::cuda(DType::BF16).enter()?;
/// let policy = precision::current().unwrap();
/// assert_eq!(policy.compute_dtype(), Some(DType::BF16));
/// drop(region);
/// assert!(precision::current().is_none());
/// # Ok::<(), tallow::Error>(())
/// ```
pub fn current() -> Option<Autocast> {
    with_policy(Autocast::clone)
}

/// The guard of a region, which ends when it is dropped.
#[derive(Debug)]
#[must_use = "the region ends when the guard is dropped"]
pub struct AutocastGuard {
    id: u64,
    /// A region belongs to its thread, and so does the guard.
    not_send: PhantomData<*const ()>,
}

impl Autocast {
    /// Begins a region that ends when the guard is dropped, for code that does not fit in a closure ([`autocast`]).
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use tallow::{ops, precision::Autocast};
    ///
    /// let x = Tensor::ones((3, 3), DType::F32, &Device::Cpu)?;
    /// let region = Autocast::cpu(DType::BF16).enter()?;
    /// assert_eq!(ops::matmul(&x, &x)?.dtype(), DType::BF16);
    /// drop(region);
    /// assert_eq!(ops::matmul(&x, &x)?.dtype(), DType::F32);
    /// # Ok::<(), tallow::Error>(())
    /// ```
    ///
    /// # Errors
    /// A lower dtype that is neither f16 nor bf16.
    pub fn enter(&self) -> Result<AutocastGuard> {
        self.check()?;
        let on = self.compute_dtype().is_some();
        Ok(push(on.then(|| Rc::new(self.clone()))))
    }
}

fn push(policy: Option<Rc<Autocast>>) -> AutocastGuard {
    let id = NEXT_ID.get();
    NEXT_ID.set(id + 1);
    REGIONS.with_borrow_mut(|regions| regions.push(Region { id, policy }));
    AutocastGuard {
        id,
        not_send: PhantomData,
    }
}

impl Drop for AutocastGuard {
    fn drop(&mut self) {
        // By id: guards may be dropped in any order. A thread that is being destroyed has no regions.
        let none_left = REGIONS.try_with(|regions| {
            let mut regions = regions.borrow_mut();
            regions.retain(|region| region.id != self.id);
            regions.is_empty()
        });
        if none_left == Ok(true) {
            graph::autocast_ended();
            if let Ok(Some(listener)) = ON_OUTERMOST_END.try_with(Cell::get) {
                listener();
            }
        }
    }
}

/// Sets the listener that is called when this thread's outermost region ends; it replaces the previous one.
pub(crate) fn on_outermost_end(listener: fn()) {
    ON_OUTERMOST_END.set(Some(listener));
}

/// Runs `f` with casts disabled: for the parts of an op whose inputs are already cast.
pub(crate) fn without_autocast<T>(f: impl FnOnce() -> T) -> T {
    let _guard = push(None);
    f()
}

/// Runs `f` outside of all regions. They are restored afterwards, also on panics.
pub(crate) fn outside<T>(f: impl FnOnce() -> T) -> T {
    with_value(|regions| REGIONS.replace(regions), Vec::new(), f)
}

/// Returns the dtype to which the inputs of `op` in f16, bf16 and f32 are cast here; `None` outside of regions, and if
/// none needs a cast.
pub(crate) fn decide(op: &str, inputs: &[Operand<'_>]) -> Option<DType> {
    with_policy(|policy| policy.decide(op, inputs)).flatten()
}

pub(crate) fn is_enabled() -> bool {
    with_policy(|_| ()).is_some()
}

pub(crate) fn caches_weights() -> bool {
    with_policy(Autocast::caches_weights).unwrap_or(false)
}

fn with_policy<T>(f: impl FnOnce(&Autocast) -> T) -> Option<T> {
    REGIONS.with_borrow(|regions| regions.last()?.policy.as_deref().map(f))
}
