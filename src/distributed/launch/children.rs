//! The processes of the ranks, from their start to their common end.

use super::FailedRank;
use std::io::{self, ErrorKind};
use std::mem::MaybeUninit;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStderr, ChildStdout, Command, ExitStatus};
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};
use std::{ptr, thread};

const POLL: Duration = Duration::from_millis(10);

/// Grace periods of the other ranks once one has failed.
#[derive(Clone, Copy)]
pub(super) struct Grace {
    /// Time to learn of the failure and report it, before SIGTERM.
    pub hear: Duration,
    /// Time to end, before SIGKILL.
    pub end: Duration,
}

pub(super) const GRACE: Grace = Grace {
    hear: Duration::from_secs(10),
    end: Duration::from_secs(5),
};

/// Processes by rank, with the status of those that have ended. Dropping it kills the others.
#[derive(Default)]
pub(super) struct Children(Vec<(Child, Option<ExitStatus>)>);

impl Children {
    /// Starts the next rank, with piped output.
    pub(super) fn start(
        &mut self,
        command: &mut Command,
    ) -> io::Result<(ChildStdout, ChildStderr)> {
        let mut child = command.spawn()?;
        let pipes = child.stdout.take().zip(child.stderr.take());
        self.0.push((child, None));
        pipes.ok_or_else(|| ErrorKind::BrokenPipe.into())
    }

    /// Waits until all ranks have ended; once one has failed, ends the others.
    pub(super) fn wait(
        &mut self,
        signals: &Signals,
        grace: Grace,
    ) -> io::Result<Option<FailedRank>> {
        let mut failed: Option<(FailedRank, Instant)> = None;
        let mut is_terminated = false;
        loop {
            let ended = self.ended()?;
            // If several ended, prefer one that a signal ended: the others may have failed because of it.
            let is_first = |ended: &&FailedRank| ended.status.signal().is_some();
            let first = ended.iter().find(is_first).or(ended.first());
            if let (None, Some(first)) = (&failed, first) {
                failed = Some((*first, Instant::now()));
            }
            if self.0.iter().all(|(_, status)| status.is_some()) {
                return Ok(failed.map(|(failed, _)| failed));
            }
            if let Some(signal) = signals.caught() {
                self.signal(signal);
            }
            let time = failed.map_or(Duration::ZERO, |(_, at)| at.elapsed());
            if time > grace.hear && !is_terminated {
                self.signal(libc::SIGTERM);
                self.signal(libc::SIGCONT); // a stopped rank would not receive SIGTERM
                is_terminated = true;
            }
            if time > grace.hear + grace.end {
                self.signal(libc::SIGKILL);
            }
            thread::sleep(POLL);
        }
    }

    /// Returns the ranks that failed since the last call.
    fn ended(&mut self) -> io::Result<Vec<FailedRank>> {
        let mut failed = Vec::new();
        for (rank, (child, ended)) in self.0.iter_mut().enumerate() {
            if ended.is_none() {
                *ended = child.try_wait()?;
                let status = ended.filter(|status| !status.success());
                failed.extend(status.map(|status| FailedRank { rank, status }));
            }
        }
        Ok(failed)
    }

    fn signal(&self, signal: libc::c_int) {
        for (child, _) in self.0.iter().filter(|(_, status)| status.is_none()) {
            // SAFETY: a signal to a child that has not been waited for, whose process id cannot be reused yet.
            unsafe { libc::kill(child.id().cast_signed(), signal) };
        }
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        self.signal(libc::SIGKILL);
        for (child, _) in self.0.iter_mut().filter(|(_, status)| status.is_none()) {
            let _ = child.wait();
        }
    }
}

/// Makes the system kill the command's process when this thread, which waits for it, ends for any reason.
pub(super) fn end_with_parent(command: &mut Command) {
    let parent = std::process::id();
    let ask = move || {
        #[cfg(target_os = "linux")]
        // SAFETY: both are plain system calls.
        unsafe {
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                return Err(io::Error::last_os_error());
            }
            // The parent may have ended meanwhile.
            if libc::getppid().cast_unsigned() != parent {
                return Err(ErrorKind::BrokenPipe.into());
            }
        }
        let _ = parent;
        Ok(())
    };
    // SAFETY: between fork and exec it makes only system calls, and does not allocate.
    unsafe { command.pre_exec(ask) };
}

/// The signal to forward; 0 if none.
static CAUGHT: AtomicI32 = AtomicI32::new(0);

/// Catches SIGINT and SIGTERM until it is dropped: the ranks handle them, and the launcher does not die of them.
pub(super) struct Signals(Vec<(libc::c_int, libc::sigaction)>);

impl Signals {
    pub(super) fn listen() -> Self {
        let signals = [libc::SIGINT, libc::SIGTERM].into_iter();
        Self(signals.filter_map(catch).collect())
    }

    /// Returns the signal that came since the last call, unless the ranks have received it already.
    fn caught(&self) -> Option<libc::c_int> {
        Some(CAUGHT.swap(0, Ordering::Relaxed)).filter(|signal| *signal != 0)
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        for (signal, before) in &self.0 {
            // SAFETY: the action that the system returned.
            unsafe { libc::sigaction(*signal, before, ptr::null_mut()) };
        }
    }
}

/// Handles `signal`, unless it is ignored (under nohup, for example). Returns the previous action.
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
    // SAFETY: all zeros is a valid sigaction; the handler has the type that SA_SIGINFO requires, and only stores an
    // atomic.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as libc::sighandler_t;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
        libc::sigaction(signal, &action, ptr::null_mut());
    }
    Some((signal, before))
}

extern "C" fn note(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // A terminal sends Ctrl-C to the whole process group, so the ranks have it. On Linux its code is positive.
    // SAFETY: the system passes a valid siginfo.
    let is_from_terminal = cfg!(target_os = "linux") && unsafe { (*info).si_code } > 0;
    if !is_from_terminal {
        CAUGHT.store(signal, Ordering::Relaxed);
    }
}
