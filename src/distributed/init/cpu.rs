//! Joining of ranks on CPUs, with MPI.

use crate::distributed::communicator::Backend;
use crate::distributed::host_queue::{Exchanged, HostQueue};
use crate::distributed::membership::Membership;
use crate::distributed::mpi::MpiBackend;
use crate::distributed::ranks::{Token, free_port, made_token};
use crate::distributed::{Collective, Communicator, DistConfig, Ranks};
use crate::{Error, Result};
use candle_core::{Device, Tensor};
use std::sync::Arc;
use std::time::Duration;

/// Joins ranks that mpirun, or srun with MPI, started.
pub(super) fn join_on_cpu(mut ranks: Ranks, config: &DistConfig) -> Result<Communicator> {
    let place = ranks.shard();
    let (queue, of_mpi) = HostQueue::new(MpiBackend::new)?;
    if of_mpi != place {
        return Err(Error::order(
            "distributed::init",
            format!(
                "the environment has rank {} of {}, and MPI has rank {} of {}",
                place.rank, place.world_size, of_mpi.rank, of_mpi.world_size
            ),
            "start ranks on CPUs with mpirun, or with srun --mpi=pmix, which MPI knows them by",
        ));
    }
    let master = rendezvous(&queue, &mut ranks, config.timeout)?;
    let (membership, _) = Membership::join(&ranks, master, config.timeout, String::new())?;
    let backend = Backend::Host(queue);
    Ok(Communicator::new(place, Device::Cpu, backend, membership))
}

/// Returns the address at which rank 0 will listen, and sets the job's secret. Rank 0 broadcasts both by MPI, from its
/// environment or newly chosen.
fn rendezvous(queue: &HostQueue, ranks: &mut Ranks, timeout: Duration) -> Result<(String, u16)> {
    /// More than the longest host, port and token together.
    const BYTES: usize = 1 << 10;
    let mut text = Vec::new();
    if ranks.rank == 0 {
        let (host, port) = match &ranks.master {
            Some(master) => master.clone(),
            None => (host(ranks)?, free_port("0.0.0.0")?),
        };
        let token = match &ranks.token {
            Token::Secret(token) if !token.is_empty() => token.clone(),
            _ => made_token(),
        };
        text.extend(format!("{host} {port} {token}").bytes());
    }
    text.resize(BYTES, 0);
    let text = Tensor::from_vec(text, BYTES, &Device::Cpu)?;
    let waiting = Arc::new(Membership::single_rank());
    let exchanged = Exchanged::Tensor(text.clone());
    let done = queue.start(
        waiting.clone(),
        Collective::Broadcast { root: 0 },
        exchanged,
    );
    done.recv_timeout(timeout).unwrap_or_else(|_| {
        let problem = format!("has not said where it listens within {timeout:?}");
        let hint = "are all processes started? see their own output";
        waiting.fail(0, "rendezvous", &problem, hint);
        HostQueue::wait(done)
    })?;
    let text = text.to_vec1()?;
    let text = String::from_utf8_lossy(&text);
    let mut words = text.trim_end_matches('\0').splitn(3, ' ');
    let (host, port, token) = (words.next(), words.next(), words.next());
    let port = port.and_then(|port| port.parse().ok());
    let (Some(host), Some(port), Some(token)) = (host, port, token) else {
        return Err(Error::Data {
            what: "rank 0's address".into(),
            expected: "a host, a port and a token".into(),
            got: format!("{} bytes that are none", text.len()),
            hint: "do all ranks run the same program?".into(),
        });
    };
    ranks.token = Token::Secret(token.into());
    Ok((host.into(), port))
}

/// Returns the name by which other ranks reach this host; loopback if all ranks are here.
fn host(ranks: &Ranks) -> Result<String> {
    if ranks.is_one_host {
        return Ok("127.0.0.1".into());
    }
    let mut name = [0u8; 256];
    // SAFETY: the length is the buffer's minus one, so the last byte stays 0.
    if unsafe { libc::gethostname(name.as_mut_ptr().cast(), name.len() - 1) } != 0 {
        return Err(Error::io(
            "read",
            "this host's name",
            std::io::Error::last_os_error(),
        ));
    }
    let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
    Ok(String::from_utf8_lossy(name).into_owned())
}
