//! What the driver is asked for on a GPU, call by call: CUDA's tool interface, CUPTI, tells of each.
//!
//! CUPTI is a library of the CUDA toolkit. It is loaded when a recording on a GPU begins, not before: nothing else
//! needs it.

use crate::{Error, Result};
use std::ffi::{CStr, c_char, c_void};

/// What was asked of the driver.
#[derive(Clone, Copy, Debug)]
pub(super) enum Call {
    /// A block was given out.
    Taken { address: usize, bytes: usize },
    /// A block is about to be given back.
    GivenBack { address: usize },
}

/// Who is told: of the context that a call was made in, and of the call. On the thread that makes it.
pub(super) type Heard = fn(context: usize, call: Call);

/// The only one in the process that CUPTI tells, until this is dropped.
pub(super) struct Subscription {
    subscriber: *mut c_void,
    unsubscribe: Unsubscribe,
}

// SAFETY: CUPTI takes a subscriber on any thread.
unsafe impl Send for Subscription {}

impl Drop for Subscription {
    fn drop(&mut self) {
        // SAFETY: subscribed in `subscribe`, and unsubscribed nowhere else.
        unsafe { (self.unsubscribe)(self.subscriber) };
    }
}

// From cupti_callbacks.h, cupti_result.h and generated_cuda_meta.h of CUDA 13; 12's are the same.
type Callback = unsafe extern "C" fn(*mut c_void, u32, u32, *const CallbackData);
type Subscribe = unsafe extern "C" fn(*mut *mut c_void, Callback, *mut c_void) -> u32;
type EnableCallback = unsafe extern "C" fn(u32, *mut c_void, u32, u32) -> u32;
type Unsubscribe = unsafe extern "C" fn(*mut c_void) -> u32;
type ResultString = unsafe extern "C" fn(u32, *mut *const c_char) -> u32;

const DRIVER_API: u32 = 1;
const ENTER: u32 = 0;
const SUCCESS: u32 = 0;
/// cuMemAllocAsync, and its form for the per-thread default stream.
const ALLOCATIONS: [u32; 2] = [598, 599];
/// cuMemFreeAsync, likewise.
const FREES: [u32; 2] = [600, 601];

/// `CUpti_CallbackData`, as far as it is read.
#[repr(C)]
struct CallbackData {
    site: u32,
    function_name: *const c_char,
    parameters: *const c_void,
    return_value: *const u32,
    symbol_name: *const c_char,
    context: *const c_void,
}

/// `cuMemAllocAsync_params`.
#[repr(C)]
struct AllocationParameters {
    address: *const u64,
    bytes: usize,
    stream: *const c_void,
}

/// `cuMemFreeAsync_params`.
#[repr(C)]
struct FreeParameters {
    address: u64,
    stream: *const c_void,
}

/// What CUPTI calls: before and after each of the driver's functions that were asked for.
unsafe extern "C" fn called(heard: *mut c_void, _domain: u32, id: u32, data: *const CallbackData) {
    // SAFETY: CUPTI's data, valid for this call; its parameters are those of the function with this id; `heard` is the
    // function that `subscribe` has handed over.
    unsafe {
        let heard = std::mem::transmute::<*mut c_void, Heard>(heard);
        let (data, is_enter) = (&*data, (*data).site == ENTER);
        let call = if FREES.contains(&id) && is_enter {
            let address = (*data.parameters.cast::<FreeParameters>()).address as usize;
            Call::GivenBack { address }
        } else if ALLOCATIONS.contains(&id) && !is_enter && *data.return_value == SUCCESS {
            let parameters = &*data.parameters.cast::<AllocationParameters>();
            let (address, bytes) = (*parameters.address as usize, parameters.bytes);
            Call::Taken { address, bytes }
        } else {
            return;
        };
        heard(data.context.addr(), call);
    }
}

/// Has `heard` told of every allocation on any GPU, until what comes back is dropped.
///
/// # Errors
/// No CUPTI; another tool that has it already.
pub(super) fn subscribe(heard: Heard) -> Result<Subscription> {
    let library = Library::load()?;
    let subscribe: Subscribe = library.function(c"cuptiSubscribe")?;
    let enable: EnableCallback = library.function(c"cuptiEnableCallback")?;
    let unsubscribe: Unsubscribe = library.function(c"cuptiUnsubscribe")?;
    let mut subscriber = std::ptr::null_mut();
    // SAFETY: as CUPTI declares it; `called` knows what is handed over here.
    let code = unsafe { subscribe(&mut subscriber, called, heard as *mut c_void) };
    library.check(code)?;
    let subscription = Subscription {
        subscriber,
        unsubscribe,
    };
    for id in ALLOCATIONS.into_iter().chain(FREES) {
        // SAFETY: as CUPTI declares it.
        library.check(unsafe { enable(1, subscriber, DRIVER_API, id) })?;
    }
    Ok(subscription)
}

/// CUPTI, which stays loaded.
struct Library(*mut c_void);

impl Library {
    #[cfg(unix)]
    fn load() -> Result<Self> {
        const NAMES: [&CStr; 3] = [c"libcupti.so", c"libcupti.so.13", c"libcupti.so.12"];
        // SAFETY: a library that is made to be loaded so.
        let open = |name: &&CStr| unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
        let mut libraries = NAMES.iter().map(open);
        let found = libraries.find(|library| !library.is_null());
        found
            .map(Self)
            .ok_or_else(|| refusal("libcupti.so is not found".into()))
    }

    #[cfg(not(unix))]
    fn load() -> Result<Self> {
        Err(refusal("it is not loaded on this system".into()))
    }

    /// The function called `name`, as the type `F` has it.
    #[cfg(unix)]
    fn function<F: Copy>(&self, name: &CStr) -> Result<F> {
        // SAFETY: the library is loaded.
        let function = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        if function.is_null() {
            return Err(refusal(format!("its library has no {name:?}")));
        }
        // SAFETY: a function's address, of the type that CUPTI declares.
        Ok(unsafe { std::mem::transmute_copy::<*mut c_void, F>(&function) })
    }

    #[cfg(not(unix))]
    fn function<F: Copy>(&self, name: &CStr) -> Result<F> {
        Err(refusal(format!("its library has no {name:?}")))
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
        Err(refusal(format!("it answers {text}")))
    }
}

fn refusal(problem: String) -> Error {
    Error::Order {
        op: "memory::record_on",
        problem: format!("CUPTI tells of a GPU's allocations, and {problem}"),
        hint: "put the CUDA toolkit's extras/CUPTI/lib64 on LD_LIBRARY_PATH, and run under no other profiler; \
               memory::Meter has the pool's peaks without it"
            .into(),
    }
}
