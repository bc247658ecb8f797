//! Where a policy holds.

use super::Autocast;
use crate::grad::holding;
use crate::probe::Operand;
use crate::{Result, graph};
use candle_core::DType;
use std::borrow::Borrow;
use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::rc::Rc;

/// A region of this thread: whose, and what holds in it (`None`: nothing is cast).
struct Region {
    id: u64,
    policy: Option<Rc<Autocast>>,
}

thread_local! {
    /// Outermost first.
    static REGIONS: RefCell<Vec<Region>> = const { RefCell::new(Vec::new()) };
    static NEXT_ID: Cell<u64> = const { Cell::new(0) };
    /// What is told when no region is left.
    static ON_OUTERMOST_END: Cell<Option<fn()>> = const { Cell::new(None) };
}

/// Runs `f` under `policy`, on this thread, and restores what held before, on error and panic too.
///
/// Put forward and loss inside, backward and the optimizer outside. A function with errors of another type holds the
/// guard of [`Autocast::enter`] instead. See [`precision`](crate::precision) for what a
/// region does.
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
/// As [`Autocast::enter`], and those of `f`.
pub fn autocast<T>(policy: impl Borrow<Autocast>, f: impl FnOnce() -> Result<T>) -> Result<T> {
    let _guard = policy.borrow().enter()?;
    f()
}

/// The policy that holds on this thread: to go on under it elsewhere, say. `None` outside of regions and where casting
/// is switched off.
pub fn current() -> Option<Autocast> {
    with_policy(Autocast::clone)
}

/// A region, until it is dropped.
#[derive(Debug)]
#[must_use = "the region ends when the guard is dropped"]
pub struct AutocastGuard {
    id: u64,
    /// A region is its thread's: a guard stays there.
    not_send: PhantomData<*const ()>,
}

impl Autocast {
    /// Begins a region that ends when the guard is dropped, for where a closure ([`autocast`]) is in the way.
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
        // By id: guards that are dropped in another order still end their own regions. A thread that is ending has
        // none.
        let none_left = REGIONS.try_with(|regions| {
            let mut regions = regions.borrow_mut();
            regions.retain(|region| region.id != self.id);
            regions.is_empty()
        });
        if none_left == Ok(true) {
            graph::autocast_ended();
            if let Ok(Some(tell)) = ON_OUTERMOST_END.try_with(Cell::get) {
                tell();
            }
        }
    }
}

/// Has `tell` called whenever this thread's outermost region ends. There is one listener, the last to ask.
pub(crate) fn on_outermost_end(tell: fn()) {
    ON_OUTERMOST_END.set(Some(tell));
}

/// Runs `f` with nothing cast: the parts of an op whose inputs have been.
pub(crate) fn without_autocast<T>(f: impl FnOnce() -> T) -> T {
    let _guard = push(None);
    f()
}

/// Runs `f` as if no region were open on this thread. They are open again afterwards, on panic too.
pub(crate) fn outside<T>(f: impl FnOnce() -> T) -> T {
    holding(|regions| REGIONS.replace(regions), Vec::new(), f)
}

/// The dtype that `op` should compute in here, for inputs of these: for those of them that are f16, bf16 or f32 and not
/// of it yet. `None` outside of regions, and where nothing changes.
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
