//! Where rank 0 listens.

use crate::{Error, Result};
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};

/// The socket on which rank 0 serves the store.
///
/// A `master` that says loopback by itself is listened to there only, so that nobody outside reaches a job of one
/// host. Any other listens on all interfaces: the name by which others reach rank 0 is not always an address that it
/// has (in a container), and on some hosts it leads to loopback there.
///
/// # Errors
/// [`Error::Order`] with the system's answer.
pub(crate) fn listen(master: &(String, u16)) -> Result<TcpListener> {
    let (host, port) = (master.0.as_str(), master.1);
    let bind = || {
        let mut addresses = (host, port).to_socket_addrs()?;
        match (
            is_loopback(host),
            addresses
                .clone()
                .find(SocketAddr::is_ipv4)
                .or(addresses.next()),
        ) {
            (_, None) => Err(ErrorKind::AddrNotAvailable.into()),
            (true, Some(address)) if address.ip().is_loopback() => TcpListener::bind(address),
            (true, Some(_)) => Err(ErrorKind::AddrNotAvailable.into()), // a strange /etc/hosts
            (false, Some(SocketAddr::V4(_))) => TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)),
            (false, Some(SocketAddr::V6(_))) => TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)),
        }
    };
    bind().map_err(|error| Error::Order {
        op: "rendezvous",
        problem: format!("rank 0 cannot listen at {host}:{port}: {error}"),
        hint: "MASTER_ADDR must be rank 0's host, and MASTER_PORT a port that is free there".into(),
    })
}

/// Whether a host is this one by its very name, so that nobody outside reaches what listens there.
pub(crate) fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse().is_ok_and(|ip: IpAddr| ip.is_loopback())
}
