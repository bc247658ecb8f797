//! CUPTI, the CUDA toolkit's profiling interface: driver calls, and the work that ran on a GPU.
//!
//! It is a separate library, loaded at the first use.

pub(crate) mod activity;
pub(crate) mod allocations;

use crate::{Error, Result};
use std::ffi::{CStr, c_char, c_void};

type ResultString = unsafe extern "C" fn(u32, *mut *const c_char) -> u32;

/// `CUPTI_SUCCESS` of cupti_result.h.
const SUCCESS: u32 = 0;

/// The purpose that CUPTI is used for, for error texts.
struct Use {
    /// The function that was called.
    op: &'static str,
    /// The events that CUPTI reports for it.
    reported: &'static str,
    /// The alternative without CUPTI.
    alternative: &'static str,
}

/// The CUPTI library, which stays loaded.
struct Library {
    handle: *mut c_void,
    of: &'static Use,
}

// SAFETY: a loaded library belongs to the process, not to a thread.
unsafe impl Send for Library {}
// SAFETY: as above; functions are looked up on any thread.
unsafe impl Sync for Library {}

impl Library {
    #[cfg(unix)]
    fn load(of: &'static Use) -> Result<Self> {
        const NAMES: [&CStr; 3] = [c"libcupti.so", c"libcupti.so.13", c"libcupti.so.12"];
        // SAFETY: CUPTI supports being loaded with dlopen.
        let open = |name: &&CStr| unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
        let mut libraries = NAMES.iter().map(open);
        match libraries.find(|library| !library.is_null()) {
            Some(handle) => Ok(Self { handle, of }),
            None => Err(of.refusal("libcupti.so is not found".into())),
        }
    }

    #[cfg(not(unix))]
    fn load(of: &'static Use) -> Result<Self> {
        Err(of.refusal("CUPTI is not loaded on this system".into()))
    }

    /// Looks up the function called `name`; `F` must be its type.
    #[cfg(unix)]
    fn function<F: Copy>(&self, name: &CStr) -> Result<F> {
        // SAFETY: the library is loaded.
        let function = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        if function.is_null() {
            return Err(self
                .of
                .refusal(format!("the CUPTI library has no {name:?}")));
        }
        // SAFETY: a function's address, of the type that CUPTI declares.
        Ok(unsafe { std::mem::transmute_copy::<*mut c_void, F>(&function) })
    }

    #[cfg(not(unix))]
    fn function<F: Copy>(&self, name: &CStr) -> Result<F> {
        Err(self
            .of
            .refusal(format!("the CUPTI library has no {name:?}")))
    }

    /// Converts CUPTI's result code to an error, unless it is success.
    fn check(&self, code: u32) -> Result<()> {
        if code == SUCCESS {
            return Ok(());
        }
        let mut text = std::ptr::null();
        let name: ResultString = self.function(c"cuptiGetResultString")?;
        // SAFETY: as CUPTI declares it; the text is a static string of the library.
        let text = unsafe {
            match name(code, &mut text) {
                SUCCESS if !text.is_null() => CStr::from_ptr(text).to_string_lossy(),
                _ => format!("code {code}").into(),
            }
        };
        Err(self.of.refusal(format!("CUPTI answered {text}")))
    }
}

impl Use {
    fn refusal(&self, problem: String) -> Error {
        Error::Order {
            op: self.op,
            problem: format!("cannot record {}: {problem}", self.reported),
            hint: format!(
                "put the CUDA toolkit's extras/CUPTI/lib64 on LD_LIBRARY_PATH, and run under no other profiler; {}",
                self.alternative
            ),
        }
    }
}
