//! Ctrl-C, SIGTERM and SIGHUP (a terminal that is closed): the first asks for an end, the second is one.

use candle_core::Tensor;
#[cfg(unix)]
use signal_hook::consts::SIGHUP;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use tallow::distributed::{Communicator, Reduce};
use tallow::{Error, Result};

/// A signal that asks a program to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signal(i32);

impl Signal {
    /// What a shell calls the status of a program that ended by it: 130, 143 or 129.
    pub fn exit_status(self) -> u8 {
        128 + self.0 as u8
    }
}

impl fmt::Display for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            SIGINT => "Ctrl-C",
            #[cfg(unix)]
            SIGHUP => "SIGHUP",
            _ => "SIGTERM",
        })
    }
}

/// As long as it lives, the first signal is only noted; any other ends the process with its exit status, as does every
/// signal afterwards.
pub struct Signals {
    /// 0 is none.
    received: Arc<AtomicUsize>,
    ends_at_once: Arc<AtomicBool>,
}

impl Signals {
    /// # Errors
    /// [`Error::Io`] if the system refuses.
    pub fn listen() -> Result<Self> {
        let signals = Self {
            received: Arc::default(),
            ends_at_once: Arc::default(),
        };
        let mut listened = vec![SIGINT, SIGTERM];
        #[cfg(unix)]
        listened.extend(Some(SIGHUP).filter(|signal| !is_ignored(*signal)));
        for signal in listened {
            signals
                .register(signal)
                .map_err(|e| Error::io("listen to", format!("signal {signal}"), e))?;
        }
        Ok(signals)
    }

    /// A signal's actions run in this order: the first one finds that nothing was received yet.
    fn register(&self, signal: i32) -> std::io::Result<()> {
        let status = Signal(signal).exit_status().into();
        flag::register_conditional_shutdown(signal, status, Arc::clone(&self.ends_at_once))?;
        flag::register(signal, Arc::clone(&self.ends_at_once))?;
        flag::register_usize(signal, Arc::clone(&self.received), signal as usize)?;
        Ok(())
    }

    /// The signal that came, to any of the ranks: they all have to stop after the same step.
    pub fn received(&self, ranks: Option<&Communicator>) -> Result<Option<Signal>> {
        let mut received = self.received.load(Ordering::SeqCst);
        if let Some(ranks) = ranks {
            let largest = Tensor::new(&[received as f64], ranks.device())?;
            ranks.all_reduce(&largest, Reduce::Max)?;
            received = largest.to_vec1::<f64>()?[0] as usize;
            ranks.check()?;
        }
        Ok((received != 0).then_some(Signal(received as i32)))
    }
}

/// Whether whoever started this process had it ignore the signal, as `nohup` does: then it stays ignored.
#[cfg(unix)]
fn is_ignored(signal: i32) -> bool {
    // SAFETY: all zeros are a valid value, and sigaction fills it in.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: reads the action of a signal, and changes none.
    let read = unsafe { libc::sigaction(signal, std::ptr::null(), &mut action) };
    read == 0 && action.sa_sigaction == libc::SIG_IGN
}

impl Drop for Signals {
    fn drop(&mut self) {
        self.ends_at_once.store(true, Ordering::SeqCst);
    }
}
