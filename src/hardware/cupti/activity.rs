//! CUPTI's activity records: the work that ran on GPUs, and the range that launched it.
//!
//! Records arrive in buffers, on a thread of CUPTI, long after the work. A kernel's record has the correlation number
//! of the call that launched it. An external correlation record has the same number, and the id that the calling thread
//! had pushed last.

use super::{Library, SUCCESS, Use};
use crate::Result;
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

// The parts that are read of cupti_activity.h of CUDA 13.0 (`CUpti_ActivityKernel10`, `CUpti_ActivityMemcpy6`,
// `CUpti_ActivityMemset4`, `CUpti_ActivityExternalCorrelation`). Kernel9 of CUDA 12 begins with the same fields, and so
// do those of 13.1 and later.
const MEMCPY: u32 = 1;
const MEMSET: u32 = 2;
const DRIVER: u32 = 4;
const RUNTIME: u32 = 5;
const CONCURRENT_KERNEL: u32 = 10;
const EXTERNAL_CORRELATION: u32 = 39;
/// Driver and runtime calls (cuBLAS uses the runtime) are enabled for their correlations, which come only with the
/// records of all calls (`cuptiActivityEnableDriverApi` for launches alone yields none).
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

/// Record of a memory copy; that of a memory set begins with the same fields.
#[repr(C)]
struct MemoryRecord {
    kind: u32,
    /// The kinds of copy and of memories; or the value that is set.
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
    reported: "a GPU's kernels",
    alternative: "Profiler::start_waiting_for times ops without it",
};

/// A piece of work of a GPU. Times are in ns of CUPTI's clock.
pub(crate) struct Activity {
    /// A kernel's demangled name; a description for memory work.
    pub name: Arc<str>,
    /// A kernel's grid and block.
    pub extents: Option<[[u32; 3]; 2]>,
    pub start: u64,
    pub end: u64,
    pub stream: u32,
    /// The id that the launching thread had pushed last.
    pub launcher: Option<u64>,
}

/// Records received so far. CUPTI's callbacks have no other state.
struct Collected {
    next_record: NextRecord,
    /// Activities, each with its correlation.
    activities: Vec<(u32, Activity)>,
    /// Ids by correlation.
    launchers: HashMap<u32, u64>,
    names: HashMap<usize, Arc<str>>,
}

static COLLECTED: Mutex<Option<Collected>> = Mutex::new(None);

fn collected() -> MutexGuard<'static, Option<Collected>> {
    COLLECTED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Length of a buffer, in elements aligned as records are: 4 MiB.
const BUFFER_LEN: usize = 512 * 1024;

unsafe extern "C" fn buffer_requested(buffer: *mut *mut u8, size: *mut usize, most: *mut usize) {
    let memory = Box::leak(vec![0u64; BUFFER_LEN].into_boxed_slice());
    // SAFETY: CUPTI passes valid pointers for these three; the buffer comes back in `buffer_completed`.
    unsafe {
        *buffer = memory.as_mut_ptr().cast();
        *size = size_of_val(memory);
        *most = 0; // no limit on the number of records
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
        // SAFETY: the buffer has `valid` bytes of records; the function moves from one record to the next.
        while unsafe { (collected.next_record)(buffer, valid, &mut record) } == SUCCESS {
            // SAFETY: a record of the kind in its first field.
            unsafe { collected.add(record) };
        }
    }
    let memory = std::ptr::slice_from_raw_parts_mut(buffer.cast::<u64>(), BUFFER_LEN);
    // SAFETY: leaked in `buffer_requested`, with this length.
    drop(unsafe { Box::from_raw(memory) });
}

impl Collected {
    /// # Safety
    /// `record` points to a record of CUPTI.
    unsafe fn add(&mut self, record: *const u32) {
        // SAFETY: every record begins with its kind, which determines its type.
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
                // Values of `CUpti_ActivityMemcpyKind`.
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
            // SAFETY: guaranteed by the caller.
            let mangled = unsafe { CStr::from_ptr(name) }.to_string_lossy();
            demangled(&mangled).into()
        });
        known.clone()
    }
}

/// Demangles a C++ name; other names are returned unchanged.
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

/// Guard: while it is alive, the work of all GPUs is recorded.
pub(crate) struct Collecting {
    library: Library,
    push: Push,
    pop: Pop,
}

impl Collecting {
    /// # Errors
    /// CUPTI is missing, or another tool uses it.
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

    /// Returns the time of CUPTI's clock, in ns.
    ///
    /// # Errors
    /// Those of CUPTI.
    pub fn now(&self) -> Result<u64> {
        let timestamp: Timestamp = self.library.function(c"cuptiGetTimestamp")?;
        let mut now = 0;
        // SAFETY: as CUPTI declares it.
        self.library.check(unsafe { timestamp(&mut now) })?;
        Ok(now)
    }

    /// Assigns what the calling thread launches from now on to `id`, until [`leave`](Self::leave).
    pub fn enter(&self, id: u64) {
        // SAFETY: as CUPTI declares it. It refuses only an unknown kind.
        unsafe { (self.push)(RANGES, id) };
    }

    /// Ends the last `enter` of the calling thread.
    pub fn leave(&self) {
        let mut last = 0;
        // SAFETY: as CUPTI declares it.
        unsafe { (self.pop)(RANGES, &mut last) };
    }

    /// Returns all activities. All GPUs must have been synchronised.
    ///
    /// # Errors
    /// Those of CUPTI; lost records.
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
            return Err(USE.refusal(format!("CUPTI dropped {lost} records")));
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
            // SAFETY: as CUPTI declares it; it refuses a kind that was not enabled.
            unsafe { disable(kind) };
        }
    }
}
