//! Ranks on CPUs: by MPI.

use crate::dist::communicator::Backend;
use crate::dist::host::HostBackend;
use crate::dist::host_queue::HostQueue;
use crate::dist::membership::Membership;
use crate::dist::mpi::MpiBackend;
use crate::dist::{Communicator, DistConfig, Ranks};
use crate::{Error, Result};
use candle_core::Device;
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// Ranks that mpirun has started.
pub(super) fn join_on_cpu(mut ranks: Ranks, config: &DistConfig) -> Result<Communicator> {
    let place = (ranks.rank, ranks.world_size);
    let (tell, told) = channel();
    let (known, timeout) = (ranks.master.clone(), config.timeout);
    let (queue, of_mpi) = HostQueue::new(move || {
        let mut backend = MpiBackend::new()?;
        let meeting = match known {
            None if backend.world_size() == place.1 => Some(meeting(&mut backend, timeout)?),
            _ => None,
        };
        drop(tell.send(meeting)); // it is waited for
        Ok(backend)
    })?;
    if of_mpi != place {
        return Err(Error::Order {
            op: "dist::init",
            problem: format!(
                "the environment says rank {} of {}, and MPI rank {} of {}",
                place.0, place.1, of_mpi.0, of_mpi.1
            ),
            hint: "start ranks on CPUs with mpirun, which MPI knows them by".into(),
        });
    }
    if let Ok(Some((master, token))) = told.recv() {
        (ranks.master, ranks.token) = (Some(master), token);
    }
    let Some(master) = ranks.master.clone() else {
        let unset = Error::config("environment", "MASTER_ADDR", "nothing");
        return Err(unset.must_be("set, for ranks on CPUs", "rank 0's host, and MASTER_PORT"));
    };
    let membership = Arc::new(Membership::join(&ranks, master, config.timeout)?);
    let backend = Backend::Host(queue);
    Ok(Communicator::new(place, Device::Cpu, backend, membership))
}

/// Where rank 0's store will listen, and the job's token: rank 0 says so to all by MPI.
fn meeting(backend: &mut MpiBackend, timeout: Duration) -> Result<((String, u16), String)> {
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
            let listener = TcpListener::bind(("0.0.0.0", 0));
            let address = listener.and_then(|listener| listener.local_addr());
            let address = address.map_err(|error| Error::io("listen", "0.0.0.0", error))?;
            let token = rand::random::<u128>();
            format!(
                "{} {} {token:032x}",
                host(backend.world_size())?,
                address.port()
            )
        }
        _ => String::new(),
    };
    let told = backend.tell(0, own.as_bytes(), &check)?;
    let told = String::from_utf8_lossy(&told);
    let mut words = told.split(' ');
    let (host, port, token) = (words.next(), words.next(), words.next());
    match (host, port.and_then(|port| port.parse().ok()), token) {
        (Some(host), Some(port), Some(token)) => Ok(((host.into(), port), token.into())),
        _ => Err(Error::Data {
            what: "rank 0's address".into(),
            expected: "a host, a port and a token".into(),
            got: told.to_string(),
            hint: "do all ranks run the same program?".into(),
        }),
    }
}

/// How other ranks call this host: itself, where all are here.
fn host(world_size: usize) -> Result<String> {
    let here = std::env::var("OMPI_COMM_WORLD_LOCAL_SIZE");
    if here.is_ok_and(|here| here.parse() == Ok(world_size)) {
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
