//! The driver's memory allocations and frees, call by call.

use super::{Library, SUCCESS, Use};
use crate::Result;
use std::ffi::{c_char, c_void};

/// An allocation or free of the driver.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Call {
    /// A block was allocated.
    Allocated { address: usize, bytes: usize },
    /// A block is about to be freed.
    Freed { address: usize },
}

/// Called with the context of a call and the call, on the thread that makes the call.
pub(crate) type CallHandler = fn(context: usize, call: Call);

/// The process's only subscription to CUPTI's callbacks, until it is dropped.
pub(crate) struct Subscription {
    subscriber: *mut c_void,
    unsubscribe: Unsubscribe,
}

// SAFETY: CUPTI accepts a subscriber on any thread.
unsafe impl Send for Subscription {}

impl Drop for Subscription {
    fn drop(&mut self) {
        // SAFETY: subscribed in `subscribe`, and unsubscribed nowhere else.
        unsafe { (self.unsubscribe)(self.subscriber) };
    }
}

// From cupti_callbacks.h and generated_cuda_meta.h of CUDA 13; 12's are the same.
type Callback = unsafe extern "C" fn(*mut c_void, u32, u32, *const CallbackData);
type Subscribe = unsafe extern "C" fn(*mut *mut c_void, Callback, *mut c_void) -> u32;
type EnableCallback = unsafe extern "C" fn(u32, *mut c_void, u32, u32) -> u32;
type Unsubscribe = unsafe extern "C" fn(*mut c_void) -> u32;

const USE: Use = Use {
    op: "memory::record_on",
    reported: "a GPU's allocations",
    alternative: "memory::Meter has the pool's peaks without it",
};

const DRIVER_API: u32 = 1;
const ENTER: u32 = 0;
/// cuMemAllocAsync, and its version for the per-thread default stream.
const ALLOCATIONS: [u32; 2] = [598, 599];
/// cuMemFreeAsync, likewise.
const FREES: [u32; 2] = [600, 601];

/// The fields that are read of `CUpti_CallbackData`.
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

/// CUPTI's callback, before and after each call of an enabled driver function.
unsafe extern "C" fn called(
    handler: *mut c_void,
    _domain: u32,
    id: u32,
    data: *const CallbackData,
) {
    // SAFETY: CUPTI's data is valid for this call; its parameters are those of the function with this id; `handler` is
    // the function that `subscribe` passed.
    unsafe {
        let handler = std::mem::transmute::<*mut c_void, CallHandler>(handler);
        let (data, is_enter) = (&*data, (*data).site == ENTER);
        let call = if FREES.contains(&id) && is_enter {
            let address = (*data.parameters.cast::<FreeParameters>()).address as usize;
            Call::Freed { address }
        } else if ALLOCATIONS.contains(&id) && !is_enter && *data.return_value == SUCCESS {
            let parameters = &*data.parameters.cast::<AllocationParameters>();
            let (address, bytes) = (*parameters.address as usize, parameters.bytes);
            Call::Allocated { address, bytes }
        } else {
            return;
        };
        handler(data.context.addr(), call);
    }
}

/// Calls `handler` for every allocation and free on any GPU, until the subscription is dropped.
///
/// # Errors
/// CUPTI is missing, or another tool uses it.
pub(crate) fn subscribe(handler: CallHandler) -> Result<Subscription> {
    let library = Library::load(&USE)?;
    let subscribe: Subscribe = library.function(c"cuptiSubscribe")?;
    let enable: EnableCallback = library.function(c"cuptiEnableCallback")?;
    let unsubscribe: Unsubscribe = library.function(c"cuptiUnsubscribe")?;
    let mut subscriber = std::ptr::null_mut();
    // SAFETY: as CUPTI declares it; `called` expects the pointer that is passed here.
    let code = unsafe { subscribe(&mut subscriber, called, handler as *mut c_void) };
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
