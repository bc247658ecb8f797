//! Joining of ranks on GPUs, with NCCL.

use super::device_of;
use crate::distributed::communicator::Backend;
use crate::distributed::gpu_queue::GpuQueue;
use crate::distributed::membership::{Membership, OWN_OUTPUT};
use crate::distributed::nccl::{self, NcclBackend};
use crate::distributed::{Communicator, DistConfig, Ranks};
use crate::{Error, Result};
use std::sync::Arc;

/// Joins ranks, each with the GPU of its local rank.
pub(super) fn join_on_gpu(ranks: Ranks, config: &DistConfig) -> Result<Communicator> {
    let place = ranks.shard();
    let Some(master) = ranks.master.clone() else {
        let unset = Error::config("environment", "MASTER_ADDR", "nothing");
        return Err(unset.must_be(
            "set to rank 0's host, for ranks on GPUs, and MASTER_PORT to a port that is free there",
            "in a batch script of Slurm: export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1) \
             MASTER_PORT=29500",
        ));
    };
    let device = device_of(&ranks, config)?;
    let gpu = device.as_cuda_device()?;
    // A rank without NCCL joins too, so that the others learn why it ends.
    let (own_id, problem) = match nccl::unique_id(ranks.rank) {
        Ok(id) => (id, None),
        Err(error) => (String::new(), Some(error)),
    };
    let (membership, id) = Membership::join(&ranks, master, config.timeout, own_id)?;
    const BEGINNING: &str = "the beginning of NCCL";
    if let Some(error) = problem {
        membership.fail(place.rank, BEGINNING, &error.to_string(), OWN_OUTPUT);
        return Err(error);
    }
    if id.is_empty() {
        membership.await_failure(); // that of rank 0, which has no NCCL
    }
    membership.check()?;
    let context = gpu.cuda_stream().context().clone();
    let bind = move || Ok(context.bind_to_thread().map_err(candle_core::Error::wrap)?);
    let nccl = {
        let _timeout = membership.enter(BEGINNING);
        let check = || membership.check();
        NcclBackend::new(place, &id, config.nccl_max_ctas, bind, &check)?
    };
    let nccl = Arc::new(nccl);
    // A weak reference: NCCL must end when the communicator is dropped, not with the heartbeat thread.
    let aborted = Arc::downgrade(&nccl);
    membership.on_failure(move || {
        if let Some(nccl) = aborted.upgrade() {
            nccl.abort();
        }
    });
    let backend = Backend::Gpu(GpuQueue::new(nccl, gpu)?);
    Ok(Communicator::new(place, device, backend, membership))
}
