//! MPI's library: its start, its errors, and waiting for requests.

use crate::distributed::Shard;
use crate::{Error, Result};
use ::mpi::ffi;
use std::ffi::{c_char, c_int};
use std::thread;
use std::time::Duration;

/// Number of tests of a request without a pause; small requests are done by then.
const SPINS: std::ops::Range<u32> = 0..200;

/// The pause between later tests: the model's own threads need the processor too.
const PAUSE: Duration = Duration::from_micros(50);

/// Starts MPI; returns this process's rank and the number of ranks.
pub(super) fn start() -> Result<Shard> {
    let (mut is_started, mut level, mut rank, mut world_size) = (0, 0, 0, 0);
    // SAFETY: the first may be called at any time, the others after the second.
    unsafe {
        answered(ffi::MPI_Initialized(&mut is_started))?;
        if is_started != 0 {
            return Err(refusal(
                "it was started before in this process",
                "MPI starts once: make one communicator, which may be cloned",
            ));
        }
        let (none, no_arguments) = (std::ptr::null_mut(), std::ptr::null_mut());
        let wanted = ffi::RSMPI_THREAD_SERIALIZED;
        answered(ffi::MPI_Init_thread(none, no_arguments, wanted, &mut level))?;
        // By default MPI ends the process on an error.
        let world = ffi::RSMPI_COMM_WORLD;
        answered(ffi::MPI_Comm_set_errhandler(
            world,
            ffi::RSMPI_ERRORS_RETURN,
        ))?;
        if level < wanted {
            return Err(refusal(
                "this build of it serves a process's main thread only",
                "use one with MPI_THREAD_SERIALIZED or MPI_THREAD_MULTIPLE",
            ));
        }
        answered(ffi::MPI_Comm_rank(world, &mut rank))?;
        answered(ffi::MPI_Comm_size(world, &mut world_size))?;
    }
    let (rank, world_size) = (rank as usize, world_size as usize);
    Ok(Shard { rank, world_size })
}

/// Converts MPI's result code to an error, unless it is success.
pub(super) fn answered(code: c_int) -> Result<()> {
    match is_success(code) {
        true => Ok(()),
        false => Err(refusal(&text(code), "see what mpirun prints")),
    }
}

/// Begins a request, and waits until it is done.
pub(super) fn run_to_its_end(
    rank: usize,
    during: &'static str,
    begin: impl FnOnce(*mut ffi::MPI_Request) -> c_int,
    check: &dyn Fn() -> Result<()>,
) -> Result<()> {
    let answered = |code| match is_success(code) {
        true => Ok(()),
        false => Err(Error::Rank {
            rank,
            during: during.into(),
            problem: format!("MPI answers {}", text(code)),
            hint: "all ranks have to make the same calls, on as many elements; mpirun may say more"
                .into(),
        }),
    };
    // SAFETY: a constant.
    let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
    answered(begin(&mut request))?;
    let mut spins = SPINS;
    loop {
        let mut is_done = 0;
        // SAFETY: a request that has begun.
        answered(unsafe { ffi::MPI_Test(&mut request, &mut is_done, ffi::RSMPI_STATUS_IGNORE) })?;
        if is_done != 0 {
            return Ok(());
        }
        check()?;
        match spins.next() {
            Some(_) => thread::yield_now(),
            None => thread::sleep(PAUSE),
        }
    }
}

fn is_success(code: c_int) -> bool {
    code == ffi::MPI_SUCCESS as c_int
}

fn text(code: c_int) -> String {
    let mut text = [0u8; ffi::MPI_MAX_ERROR_STRING as usize];
    let mut length = 0;
    // SAFETY: the text is large enough for the longest message.
    let answer =
        unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast::<c_char>(), &mut length) };
    match text.get(..length as usize) {
        Some(text) if is_success(answer) => String::from_utf8_lossy(text).into_owned(),
        _ => format!("code {code}"),
    }
}

fn refusal(problem: &str, hint: &str) -> Error {
    Error::order("distributed::init", format!("MPI: {problem}"), hint)
}
