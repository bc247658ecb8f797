//! Gradients that are known, tied to candle's graph.
//!
//! An op of candle's has at most three arguments, and what is known may be of any number of tensors. So they are
//! threaded onto a token, a scalar without meaning: each [`Attach`] takes the token so far and one more tensor and
//! gives the next token. In backward each gives its tensor the gradient that was left for it: before, or by a node that
//! the last token is the argument of, whose turn comes first.

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{
    CpuStorage, CudaStorage, CustomOp2, DType, Layout, MetalStorage, Result, Shape, Tensor, bail,
};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, ThreadId};

/// A gradient on its way to an attachment.
///
/// Backward may run through one graph on several threads, and on one thread inside of itself: through a captured
/// tensor, say, whose attachment is then met before an earlier gradient was picked up. What is inside is done first, so
/// the last one in is the first one out.
#[derive(Default)]
pub(crate) struct Slot(Mutex<HashMap<ThreadId, Vec<Option<Tensor>>>>);

impl Slot {
    pub fn put(&self, gradient: Option<Tensor>) {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mine = waiting.entry(thread::current().id()).or_default();
        mine.push(gradient);
    }

    /// `None` if nothing was put there.
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

/// The token to start from.
pub(crate) fn token(like: &Tensor) -> Result<Tensor> {
    Tensor::zeros((), DType::F32, like.device())
}

/// (token, tensor) to token; backward passes the tensor's gradient through.
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

/// A scalar of the dtype and device of another tensor.
fn zero<S: BackendStorage>(like: &S) -> Result<(S, Shape)>
where
    S::Device: BackendDevice<Storage = S>,
{
    let scalar = Shape::from(());
    let storage = like.device().zeros_impl(&scalar, like.dtype())?;
    Ok((storage, scalar))
}
