//! What ran on GPUs, and what had launched it: CUPTI's activity records.
//!
//! Records come in buffers, on a thread of CUPTI's, long after the work. A kernel's has the number of the call that
//! launched it; the record of an external correlation has the same number, and the id that the calling thread had
//! pushed last.

use super::{Library, SUCCESS, Use};
use crate::Result;
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

// From cupti_activity.h of CUDA 13.0 (`CUpti_ActivityKernel10`, `CUpti_ActivityMemcpy6`, `CUpti_ActivityMemset4`,
// `CUpti_ActivityExternalCorrelation`), as far as they are read. Kernel9 of CUDA 12 begins with the same fields, and
// so do those of 13.1 and later.
const MEMCPY: u32 = 1;
const MEMSET: u32 = 2;
const DRIVER: u32 = 4;
const RUNTIME: u32 = 5;
const CONCURRENT_KERNEL: u32 = 10;
const EXTERNAL_CORRELATION: u32 = 39;
/// Calls of the driver, and of the runtime, which cuBLAS uses, for their correlations: those come only with the records
/// of all calls (`cuptiActivityEnableDriverApi` for launches alone yields none).
const KINDS: [u32; 6] = [
    EXTERNAL_CORRELATION,
    DRIVER,
    RUNTIME,
    CONCURRENT_KERNEL,
    MEMCPY,
    MEMSET,
];
/// `CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0`.
const RANGES: u32 = 3;
const FLUSH_FORCED: u32 = 1;

#[repr(C)]
struct KernelRecord {
    kind: u32,
    configuration: [u32; 3],
    start: u64,
    end: u64,
    completed: u64,
    device: u32,
    context: u32,
    stream: u32,
    grid: [i32; 3],
    block: [i32; 3],
    shared_memory: [i32; 2],
    local_memory: [u32; 2],
    correlation: u32,
    grid_id: i64,
    name: *const c_char,
}

/// Of a copy; a record of memory that is set begins alike.
#[repr(C)]
struct MemoryRecord {
    kind: u32,
    /// The kind of copy, and of the memories; or the value.
    copy_kind: u8,
    other: [u8; 3],
    bytes: u64,
    start: u64,
    end: u64,
    device: u32,
    context: u32,
    stream: u32,
    correlation: u32,
}

#[repr(C)]
struct ExternalRecord {
    kind: u32,
    external_kind: u32,
    external: u64,
    correlation: u32,
}

const _: () = {
    use std::mem::offset_of;
    assert!(offset_of!(KernelRecord, start) == 16 && offset_of!(KernelRecord, stream) == 48);
    assert!(offset_of!(KernelRecord, grid) == 52 && offset_of!(KernelRecord, block) == 64);
    assert!(offset_of!(KernelRecord, correlation) == 92 && offset_of!(KernelRecord, name) == 104);
    assert!(offset_of!(MemoryRecord, bytes) == 8 && offset_of!(MemoryRecord, end) == 24);
    assert!(offset_of!(MemoryRecord, stream) == 40 && offset_of!(MemoryRecord, correlation) == 44);
    assert!(offset_of!(ExternalRecord, correlation) == 16);
};

type BufferRequested = unsafe extern "C" fn(*mut *mut u8, *mut usize, *mut usize);
type BufferCompleted = unsafe extern "C" fn(*const c_void, u32, *mut u8, usize, usize);
type Register = unsafe extern "C" fn(BufferRequested, BufferCompleted) -> u32;
type OfKind = unsafe extern "C" fn(u32) -> u32;
type NextRecord = unsafe extern "C" fn(*mut u8, usize, *mut *const u32) -> u32;
type DroppedRecords = unsafe extern "C" fn(*const c_void, u32, *mut usize) -> u32;
type Push = unsafe extern "C" fn(u32, u64) -> u32;
type Pop = unsafe extern "C" fn(u32, *mut u64) -> u32;
type Timestamp = unsafe extern "C" fn(*mut u64) -> u32;

const USE: Use = Use {
    op: "Profiler::start_on",
    told: "a GPU's kernels",
    without: "Profiler::start_waiting_for times ops without it",
};

/// A stretch of work of a GPU. Times are in ns by CUPTI's clock.
pub(crate) struct Activity {
    /// A kernel's name, demangled; in words for memory.
    pub name: Arc<str>,
    /// A kernel's grid and block.
    pub extents: Option<[[u32; 3]; 2]>,
    pub start: u64,
    pub end: u64,
    pub stream: u32,
    /// The id that the thread which launched it had pushed last.
    pub launcher: Option<u64>,
}

/// What has come in so far. CUPTI's callbacks know of nothing else.
struct Collected {
    next_record: NextRecord,
    /// Each with its correlation.
    activities: Vec<(u32, Activity)>,
    /// Ids by correlation.
    launchers: HashMap<u32, u64>,
    names: HashMap<usize, Arc<str>>,
}

static COLLECTED: Mutex<Option<Collected>> = Mutex::new(None);

fn collected() -> MutexGuard<'static, Option<Collected>> {
    COLLECTED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A buffer, in elements that are aligned as records are: 4 MiB.
const BUFFER_LEN: usize = 512 * 1024;

unsafe extern "C" fn buffer_requested(buffer: *mut *mut u8, size: *mut usize, most: *mut usize) {
    let memory = Box::leak(vec![0u64; BUFFER_LEN].into_boxed_slice());
    // SAFETY: CUPTI asks for these three; the buffer comes back in `buffer_completed`.
    unsafe {
        *buffer = memory.as_mut_ptr().cast();
        *size = size_of_val(memory);
        *most = 0; // as many as it has room for
    }
}

unsafe extern "C" fn buffer_completed(
    _context: *const c_void,
    _stream: u32,
    buffer: *mut u8,
    _size: usize,
    valid: usize,
) {
    if buffer.is_null() {
        return;
    }
    if let Some(collected) = &mut *collected() {
        let mut record = std::ptr::null();
        // SAFETY: a buffer with so many bytes of records; the function goes from one to the next.
        while unsafe { (collected.next_record)(buffer, valid, &mut record) } == SUCCESS {
            // SAFETY: a record of the kind that it begins with.
            unsafe { collected.add(record) };
        }
    }
    let memory = std::ptr::slice_from_raw_parts_mut(buffer.cast::<u64>(), BUFFER_LEN);
    // SAFETY: leaked in `buffer_requested`, with this length.
    drop(unsafe { Box::from_raw(memory) });
}

impl Collected {
    /// # Safety
    /// `record` is one of CUPTI's.
    unsafe fn add(&mut self, record: *const u32) {
        // SAFETY: every record begins with its kind, which says what it is.
        match unsafe { *record } {
            CONCURRENT_KERNEL => {
                // SAFETY: as above.
                let kernel = unsafe { &*record.cast::<KernelRecord>() };
                // SAFETY: a string that lives as long as the kernel's module.
                let name = unsafe { self.name(kernel.name) };
                let extents = [kernel.grid, kernel.block].map(|of| of.map(i32::cast_unsigned));
                self.activities.push((
                    kernel.correlation,
                    Activity {
                        name,
                        extents: Some(extents),
                        start: kernel.start,
                        end: kernel.end,
                        stream: kernel.stream,
                        launcher: None,
                    },
                ));
            }
            kind @ (MEMCPY | MEMSET) => {
                // SAFETY: as above.
                let memory = unsafe { &*record.cast::<MemoryRecord>() };
                // By `CUpti_ActivityMemcpyKind`.
                let name = match (kind, memory.copy_kind) {
                    (MEMSET, _) => "set memory",
                    (_, 1) => "copy from host to GPU",
                    (_, 2) => "copy from GPU to host",
                    (_, 8) => "copy on the GPU",
                    _ => "copy",
                };
                self.activities.push((
                    memory.correlation,
                    Activity {
                        name: name.into(),
                        extents: None,
                        start: memory.start,
                        end: memory.end,
                        stream: memory.stream,
                        launcher: None,
                    },
                ));
            }
            EXTERNAL_CORRELATION => {
                // SAFETY: as above.
                let external = unsafe { &*record.cast::<ExternalRecord>() };
                if external.external_kind == RANGES {
                    self.launchers
                        .insert(external.correlation, external.external);
                }
            }
            _ => {}
        }
    }

    /// # Safety
    /// `name` is null or a string.
    unsafe fn name(&mut self, name: *const c_char) -> Arc<str> {
        if name.is_null() {
            return "unnamed".into();
        }
        let known = self.names.entry(name.addr());
        let known = known.or_insert_with(|| {
            // SAFETY: the caller's promise.
            let mangled = unsafe { CStr::from_ptr(name) }.to_string_lossy();
            demangled(&mangled).into()
        });
        known.clone()
    }
}

/// A name of C++ as it was written; any other as it is.
fn demangled(name: &str) -> String {
    let symbol = cpp_demangle::Symbol::new(name);
    let options = cpp_demangle::DemangleOptions::default()
        .no_params()
        .no_return_type();
    let written = symbol
        .ok()
        .and_then(|symbol| symbol.demangle_with_options(&options).ok());
    written.unwrap_or_else(|| name.into())
}

/// While it lasts, what runs on any GPU is collected.
pub(crate) struct Collecting {
    library: Library,
    push: Push,
    pop: Pop,
}

impl Collecting {
    /// # Errors
    /// No CUPTI; another tool that has it already.
    pub fn start() -> Result<Self> {
        let library = Library::load(&USE)?;
        let register: Register = library.function(c"cuptiActivityRegisterCallbacks")?;
        let enable: OfKind = library.function(c"cuptiActivityEnable")?;
        let started = Self {
            push: library.function(c"cuptiActivityPushExternalCorrelationId")?,
            pop: library.function(c"cuptiActivityPopExternalCorrelationId")?,
            library,
        };
        *collected() = Some(Collected {
            next_record: started.library.function(c"cuptiActivityGetNextRecord")?,
            activities: Vec::new(),
            launchers: HashMap::new(),
            names: HashMap::new(),
        });
        // SAFETY: as CUPTI declares it; both functions live as long as the process.
        started
            .library
            .check(unsafe { register(buffer_requested, buffer_completed) })?;
        for kind in KINDS {
            // SAFETY: as CUPTI declares it.
            started.library.check(unsafe { enable(kind) })?;
        }
        Ok(started)
    }

    /// CUPTI's clock, in ns.
    ///
    /// # Errors
    /// CUPTI's.
    pub fn now(&self) -> Result<u64> {
        let timestamp: Timestamp = self.library.function(c"cuptiGetTimestamp")?;
        let mut now = 0;
        // SAFETY: as CUPTI declares it.
        self.library.check(unsafe { timestamp(&mut now) })?;
        Ok(now)
    }

    /// What the calling thread launches from now on is of `id`, until it is [left](Self::leave).
    pub fn enter(&self, id: u64) {
        // SAFETY: as CUPTI declares it. It refuses only a kind that it does not know.
        unsafe { (self.push)(RANGES, id) };
    }

    /// Ends what was entered last on the calling thread.
    pub fn leave(&self) {
        let mut last = 0;
        // SAFETY: as CUPTI declares it.
        unsafe { (self.pop)(RANGES, &mut last) };
    }

    /// Everything that has run. All GPUs must have been waited for.
    ///
    /// # Errors
    /// CUPTI's; records that found no room.
    pub fn finish(self) -> Result<Vec<Activity>> {
        let flush: OfKind = self.library.function(c"cuptiActivityFlushAll")?;
        // SAFETY: as CUPTI declares it; buffers come back through `buffer_completed` meanwhile.
        self.library.check(unsafe { flush(FLUSH_FORCED) })?;
        let dropped: DroppedRecords = self
            .library
            .function(c"cuptiActivityGetNumDroppedRecords")?;
        let mut lost = 0;
        // SAFETY: as CUPTI declares it.
        self.library
            .check(unsafe { dropped(std::ptr::null(), 0, &mut lost) })?;
        if lost > 0 {
            return Err(USE.refusal(format!("{lost} of its records found no room")));
        }
        let Some(collected) = collected().take() else {
            return Ok(Vec::new());
        };
        let launchers = collected.launchers;
        let activities = collected.activities.into_iter();
        let activities = activities.map(|(correlation, activity)| Activity {
            launcher: launchers.get(&correlation).copied(),
            ..activity
        });
        Ok(activities.collect())
    }
}

impl Drop for Collecting {
    fn drop(&mut self) {
        *collected() = None;
        let Ok(disable) = self.library.function::<OfKind>(c"cuptiActivityDisable") else {
            return;
        };
        for kind in KINDS {
            // SAFETY: as CUPTI declares it; a kind that was not enabled is refused.
            unsafe { disable(kind) };
        }
    }
}
