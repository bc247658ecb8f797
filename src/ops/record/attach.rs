//! Attaches precomputed gradients to candle's graph.
//!
//! An op of candle has at most three arguments, but the gradients may be of any number of tensors. So a token, a scalar
//! without meaning, is passed through a chain of ops: each [`Attach`] maps the token and one more tensor to the next
//! token. In backward each returns the gradient in its slot, which was stored before, or by the node that reads the
//! last token and whose backward runs first.

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{
    CpuStorage, CudaStorage, CustomOp2, DType, Layout, MetalStorage, Result, Shape, Tensor, bail,
};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, ThreadId};

/// The slot with the gradient of an attachment.
///
/// Backward may run through one graph on several threads, and recursively on one thread: through a captured tensor,
/// whose attachment may run before an earlier gradient is taken. The inner backward ends first, so the slot is a stack.
#[derive(Default)]
pub(crate) struct Slot(Mutex<HashMap<ThreadId, Vec<Option<Tensor>>>>);

impl Slot {
    pub fn put(&self, gradient: Option<Tensor>) {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mine = waiting.entry(thread::current().id()).or_default();
        mine.push(gradient);
    }

    /// Takes the gradient; `None` if none was stored.
    fn take(&self) -> Option<Option<Tensor>> {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let id = thread::current().id();
        let mine = waiting.get_mut(&id)?;
        let gradient = mine.pop();
        if mine.is_empty() {
            waiting.remove(&id);
        }
        gradient
    }
}

/// Creates the first token.
pub(crate) fn token(like: &Tensor) -> Result<Tensor> {
    Tensor::zeros((), DType::F32, like.device())
}

/// Maps (token, tensor) to a token; backward returns the gradient in the slot.
pub(crate) struct Attach(pub Arc<Slot>);

impl CustomOp2 for Attach {
    fn name(&self) -> &'static str {
        "attach"
    }

    fn cpu_fwd(
        &self,
        token: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        zero(token)
    }

    fn cuda_fwd(
        &self,
        token: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        zero(token)
    }

    fn metal_fwd(
        &self,
        token: &MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
    ) -> Result<(MetalStorage, Shape)> {
        zero(token)
    }

    fn bwd(
        &self,
        token: &Tensor,
        _tensor: &Tensor,
        _res: &Tensor,
        d_token: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let Some(gradient) = self.0.take() else {
            bail!("a gradient was asked for before there was one");
        };
        Ok((token.track_op().then(|| d_token.clone()), gradient))
    }
}

/// Creates a scalar with the dtype and device of another tensor.
fn zero<S: BackendStorage>(like: &S) -> Result<(S, Shape)>
where
    S::Device: BackendDevice<Storage = S>,
{
    let scalar = Shape::from(());
    let storage = like.device().zeros_impl(&scalar, like.dtype())?;
    Ok((storage, scalar))
}
