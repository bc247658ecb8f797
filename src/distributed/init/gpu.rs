//! Ranks on GPUs: by NCCL.

use super::device_of;
use crate::distributed::communicator::Backend;
use crate::distributed::gpu_queue::GpuQueue;
use crate::distributed::membership::Membership;
use crate::distributed::nccl::{self, NcclBackend};
use crate::distributed::{Communicator, DistConfig, Ranks};
use crate::{Error, Result};
use std::sync::Arc;

/// Each rank with the GPU of its local rank.
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
    let id = nccl::unique_id(ranks.rank)?;
    let (membership, id) = Membership::join(&ranks, master, config.timeout, id)?;
    let context = gpu.cuda_stream().context().clone();
    let bind = move || Ok(context.bind_to_thread().map_err(candle_core::Error::wrap)?);
    let nccl = {
        let _watch = membership.enter("the beginning of NCCL");
        let check = || membership.check();
        NcclBackend::new(place, &id, config.nccl_max_ctas, bind, &check)?
    };
    let nccl = Arc::new(nccl);
    // Not an owner: NCCL is to end where the communicator is dropped, not with the thread of heartbeats.
    let aborted = Arc::downgrade(&nccl);
    membership.on_failure(move || {
        if let Some(nccl) = aborted.upgrade() {
            nccl.abort();
        }
    });
    let backend = Backend::Gpu(GpuQueue::new(nccl, gpu)?);
    Ok(Communicator::new(place, device, backend, membership))
}
