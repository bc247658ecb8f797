//! Ctrl-C, SIGTERM and SIGHUP (a closed terminal): the first asks the program to end, the second ends it.

use candle_core::Tensor;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use tallow::distributed::{Communicator, Reduce};
use tallow::{Error, Result};

/// Returns the status that shells give a program that this signal ended: 130, 143 or 129.
pub fn exit_status(signal: i32) -> u8 {
    128 + signal as u8
}

/// While it is alive, the first signal is only noted. Any other ends the process with its exit status, and so does
/// every signal afterwards.
#[derive(Default)]
pub struct Signals {
    /// 0 is none.
    received: Arc<AtomicUsize>,
    ends_at_once: Arc<AtomicBool>,
}

impl Signals {
    /// # Errors
    /// [`Error::Io`] if the system refuses.
    pub fn listen() -> Result<Self> {
        let all = Self::default();
        let mut listened = vec![SIGINT, SIGTERM];
        #[cfg(unix)]
        listened.extend(Some(libc::SIGHUP).filter(|signal| !is_ignored(*signal)));
        for signal in listened {
            let status = exit_status(signal).into();
            // A signal's actions run in this order: for the first signal, the process does not end.
            flag::register_conditional_shutdown(signal, status, all.ends_at_once.clone())
                .and_then(|_| flag::register(signal, all.ends_at_once.clone()))
                .and_then(|_| flag::register_usize(signal, all.received.clone(), signal as usize))
                .map_err(|e| Error::io("listen to", format!("signal {signal}"), e))?;
        }
        Ok(all)
    }

    /// Returns the signal that any of the ranks received: they all have to stop after the same step.
    pub fn received(&self, ranks: Option<&Communicator>) -> Result<Option<i32>> {
        let mut received = self.received.load(Ordering::SeqCst);
        if let Some(ranks) = ranks {
            let largest = Tensor::new(&[received as f64], ranks.device())?;
            ranks.all_reduce(&largest, Reduce::Max)?;
            received = largest.to_vec1::<f64>()?[0] as usize;
            ranks.check()?;
        }
        Ok((received != 0).then_some(received as i32))
    }
}

/// Whether the process was started with the signal ignored, as by `nohup`. It then stays ignored.
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
