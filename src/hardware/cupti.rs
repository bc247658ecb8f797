//! CUPTI, the interface of CUDA's toolkit for tools: what a program asks of a GPU, and what ran there.
//!
//! It is a library of its own, loaded at the first use and not before: nothing else needs it.

pub(crate) mod activity;
pub(crate) mod allocations;

use crate::{Error, Result};
use std::ffi::{CStr, c_char, c_void};

type ResultString = unsafe extern "C" fn(u32, *mut *const c_char) -> u32;

/// From cupti_result.h.
const SUCCESS: u32 = 0;

/// What CUPTI is used for: for errors.
struct Use {
    /// The function that was called.
    op: &'static str,
    /// What CUPTI tells of.
    told: &'static str,
    /// What there is without it.
    without: &'static str,
}

/// CUPTI, which stays loaded.
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
        // SAFETY: a library that is made to be loaded so.
        let open = |name: &&CStr| unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
        let mut libraries = NAMES.iter().map(open);
        match libraries.find(|library| !library.is_null()) {
            Some(handle) => Ok(Self { handle, of }),
            None => Err(of.refusal("libcupti.so is not found".into())),
        }
    }

    #[cfg(not(unix))]
    fn load(of: &'static Use) -> Result<Self> {
        Err(of.refusal("it is not loaded on this system".into()))
    }

    /// The function called `name`, as the type `F` has it.
    #[cfg(unix)]
    fn function<F: Copy>(&self, name: &CStr) -> Result<F> {
        // SAFETY: the library is loaded.
        let function = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        if function.is_null() {
            return Err(self.of.refusal(format!("its library has no {name:?}")));
        }
        // SAFETY: a function's address, of the type that CUPTI declares.
        Ok(unsafe { std::mem::transmute_copy::<*mut c_void, F>(&function) })
    }

    #[cfg(not(unix))]
    fn function<F: Copy>(&self, name: &CStr) -> Result<F> {
        Err(self.of.refusal(format!("its library has no {name:?}")))
    }

    /// CUPTI's answer as an error, unless it is success.
    fn check(&self, code: u32) -> Result<()> {
        if code == SUCCESS {
            return Ok(());
        }
        let mut text = std::ptr::null();
        let name: ResultString = self.function(c"cuptiGetResultString")?;
        // SAFETY: as CUPTI declares it; the text is a constant of the library's.
        let text = unsafe {
            match name(code, &mut text) {
                SUCCESS if !text.is_null() => CStr::from_ptr(text).to_string_lossy(),
                _ => format!("code {code}").into(),
            }
        };
        Err(self.of.refusal(format!("it answers {text}")))
    }
}

impl Use {
    fn refusal(&self, problem: String) -> Error {
        Error::Order {
            op: self.op,
            problem: format!("CUPTI tells of {}, and {problem}", self.told),
            hint: format!(
                "put the CUDA toolkit's extras/CUPTI/lib64 on LD_LIBRARY_PATH, and run under no other profiler; {}",
                self.without
            ),
        }
    }
}
