//! SIGINT and SIGTERM while ranks run: theirs to answer, not the launcher's to die of.

use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicI32, Ordering};

/// The signal to hand on; 0 for none.
static CAUGHT: AtomicI32 = AtomicI32::new(0);

/// Catches both until it is dropped.
pub(super) struct Signals(Vec<(libc::c_int, libc::sigaction)>);

impl Signals {
    pub(super) fn listen() -> Self {
        Self(
            [libc::SIGINT, libc::SIGTERM]
                .into_iter()
                .filter_map(catch)
                .collect(),
        )
    }

    /// What came since the last call, if the ranks do not have it already.
    pub(super) fn caught(&self) -> Option<libc::c_int> {
        Some(CAUGHT.swap(0, Ordering::Relaxed)).filter(|signal| *signal != 0)
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        for (signal, before) in &self.0 {
            // SAFETY: the action that the system gave.
            unsafe { libc::sigaction(*signal, before, ptr::null_mut()) };
        }
    }
}

/// Handles `signal`, unless it is ignored (under nohup, say). Returns how it was handled before.
fn catch(signal: libc::c_int) -> Option<(libc::c_int, libc::sigaction)> {
    let mut before = MaybeUninit::uninit();
    // SAFETY: a valid signal, and memory that the system writes on success.
    let before = unsafe {
        if libc::sigaction(signal, ptr::null(), before.as_mut_ptr()) != 0 {
            return None;
        }
        before.assume_init()
    };
    if before.sa_sigaction == libc::SIG_IGN {
        return None;
    }
    let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = note;
    // SAFETY: all zeros is a sigaction; the handler has the type that SA_SIGINFO asks for, and only stores an atomic.
    unsafe {
        let mut action: libc::sigaction = MaybeUninit::zeroed().assume_init();
        action.sa_sigaction = handler as libc::sighandler_t;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
        libc::sigaction(signal, &action, ptr::null_mut());
    }
    Some((signal, before))
}

extern "C" fn note(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // A terminal's Ctrl-C goes to the whole process group: the ranks have it. Linux says so by a positive code.
    // SAFETY: the system hands over a valid siginfo.
    let is_from_terminal = cfg!(target_os = "linux") && unsafe { (*info).si_code } > 0;
    if !is_from_terminal {
        CAUGHT.store(signal, Ordering::Relaxed);
    }
}
