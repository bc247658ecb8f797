//! Ranks on CPUs: by MPI.

use crate::distributed::communicator::Backend;
use crate::distributed::host::HostBackend;
use crate::distributed::host_queue::HostQueue;
use crate::distributed::membership::Membership;
use crate::distributed::mpi::MpiBackend;
use crate::distributed::ranks::{Token, made_token};
use crate::distributed::{Communicator, DistConfig, Ranks};
use crate::{Error, Result};
use candle_core::Device;
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// Ranks that mpirun, or srun with MPI, has started.
pub(super) fn join_on_cpu(mut ranks: Ranks, config: &DistConfig) -> Result<Communicator> {
    let place = (ranks.rank, ranks.world_size);
    let (tell, told) = channel();
    let (known, timeout) = (ranks.clone(), config.timeout);
    let (queue, of_mpi) = HostQueue::new(move || {
        let mut backend = MpiBackend::new()?;
        let is_whole = (backend.rank(), backend.world_size()) == place;
        let meeting = match is_whole {
            true => Some(meeting(&mut backend, &known, timeout)?),
            false => None,
        };
        drop(tell.send(meeting)); // it is waited for
        Ok(backend)
    })?;
    if of_mpi != place {
        return Err(Error::Order {
            op: "distributed::init",
            problem: format!(
                "the environment says rank {} of {}, and MPI rank {} of {}",
                place.0, place.1, of_mpi.0, of_mpi.1
            ),
            hint:
                "start ranks on CPUs with mpirun, or with srun --mpi=pmix, which MPI knows them by"
                    .into(),
        });
    }
    let Ok(Some((master, token))) = told.recv() else {
        return Err(Error::Order {
            op: "distributed::init",
            problem: "rank 0 has not told by MPI where it listens".into(),
            hint: "look for the first error, on any rank".into(),
        });
    };
    ranks.token = token;
    let membership = Arc::new(Membership::join(&ranks, master, config.timeout)?);
    let backend = Backend::Host(queue);
    Ok(Communicator::new(place, Device::Cpu, backend, membership))
}

/// Where rank 0's store will listen, and the job's secret: rank 0 tells all by MPI what its environment says, or what
/// it makes.
fn meeting(
    backend: &mut MpiBackend,
    ranks: &Ranks,
    timeout: Duration,
) -> Result<((String, u16), Token)> {
    let began = Instant::now();
    let check = || match began.elapsed() < timeout {
        true => Ok(()),
        false => Err(Error::Rank {
            rank: 0,
            during: "rendezvous".into(),
            problem: format!("has not said where it listens within {timeout:?}"),
            hint: "are all processes started? their own output says more".into(),
        }),
    };
    let own = match backend.rank() {
        0 => {
            let (host, port) = match &ranks.master {
                Some(master) => master.clone(),
                None => (host(ranks)?, free_port()?),
            };
            let token = match &ranks.token {
                Token::Secret(token) if !token.is_empty() => token.clone(),
                _ => made_token(),
            };
            format!("{host} {port} {token}")
        }
        _ => String::new(),
    };
    let told = backend.tell(0, own.as_bytes(), &check)?;
    let told = String::from_utf8_lossy(&told);
    let mut words = told.splitn(3, ' ');
    let (host, port, token) = (words.next(), words.next(), words.next());
    match (host, port.and_then(|port| port.parse().ok()), token) {
        (Some(host), Some(port), Some(token)) => {
            Ok(((host.into(), port), Token::Secret(token.into())))
        }
        _ => Err(Error::Data {
            what: "rank 0's address".into(),
            expected: "a host, a port and a token".into(),
            got: format!("{} bytes that are none", told.len()),
            hint: "do all ranks run the same program?".into(),
        }),
    }
}

/// A port that is free now, for the store.
fn free_port() -> Result<u16> {
    let listener = TcpListener::bind(("0.0.0.0", 0));
    let address = listener.and_then(|listener| listener.local_addr());
    let address = address.map_err(|error| Error::io("listen", "0.0.0.0", error))?;
    Ok(address.port())
}

/// How other ranks call this host: itself, where all are here.
fn host(ranks: &Ranks) -> Result<String> {
    if ranks.is_one_host {
        return Ok("127.0.0.1".into());
    }
    let mut name = [0u8; 256];
    // SAFETY: the buffer's own length, the last byte of which stays 0.
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
