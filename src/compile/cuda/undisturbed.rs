//! When an executor may be dropped.

use super::super::plan::Plan;
use super::Executor;
use crate::{Result, hardware};
use candle_core::cuda_backend::CudaDevice;
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};

/// An executor that is dropped while no other thread makes, records or drops a stream. cuBLAS's handle waits for the
/// whole context as it goes: the driver then walks all streams, and crashes where another thread frees one.
pub(in crate::compile) struct Undisturbed(ManuallyDrop<Executor>);

impl Undisturbed {
    /// As [`Executor::new`].
    pub fn new(plan: &Plan, gpu: &CudaDevice) -> Result<Self> {
        Ok(Self(ManuallyDrop::new(Executor::new(plan, gpu)?)))
    }
}

impl Deref for Undisturbed {
    type Target = Executor;

    fn deref(&self) -> &Executor {
        &self.0
    }
}

impl DerefMut for Undisturbed {
    fn deref_mut(&mut self) -> &mut Executor {
        &mut self.0
    }
}

impl Drop for Undisturbed {
    fn drop(&mut self) {
        let _undisturbed = hardware::cuda::undisturbed();
        // SAFETY: nothing uses it after.
        unsafe { ManuallyDrop::drop(&mut self.0) };
    }
}

impl fmt::Debug for Undisturbed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&*self.0, f)
    }
}
