//! NCCL's library, loaded at the first use: its functions and result codes.

use crate::distributed::collective::Reduce;
use crate::distributed::host::not_exchanged;
use crate::{Error, Result};
use candle_core::DType;
#[cfg(unix)]
use std::ffi::CString;
use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::sync::OnceLock;

/// `ncclComm_t`.
pub(super) type Comm = *mut c_void;

/// `ncclResult_t`.
pub(super) type Code = c_int;

/// Address of GPU memory.
pub(super) type Pointer = u64;

/// `ncclUniqueId`, which is passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct UniqueId(pub(super) [u8; 128]);

const SUCCESS: Code = 0;

pub(super) const IN_PROGRESS: Code = 7;

/// The oldest supported version, 2.19. Older ones could not abort a communicator while another thread used it.
const OLDEST: c_int = 21900;

/// `ncclConfig_t` of NCCL 2.19. Later versions begin with the same fields, and read its size and version.
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

impl Config {
    /// Creates a configuration with blocking calls (work on a stream stays asynchronous), and at most `max_ctas` thread
    /// blocks; `None` leaves the number to NCCL.
    pub(super) fn new(max_ctas: Option<c_int>) -> Self {
        const UNDEFINED: c_int = c_int::MIN;
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: OLDEST as u32,
            blocking: 1,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: max_ctas.unwrap_or(UNDEFINED),
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
        }
    }
}

/// `ncclRedOp_t`.
pub(super) fn operation(reduce: Reduce) -> c_int {
    match reduce {
        Reduce::Sum => 0,
        Reduce::Max => 2,
        Reduce::Mean => 4,
    }
}

/// `ncclDataType_t`.
pub(super) fn data_type(dtype: DType) -> Result<c_int> {
    match dtype {
        DType::U8 => Ok(1),
        DType::U32 => Ok(3),
        DType::I64 => Ok(4),
        DType::F16 => Ok(6),
        DType::F32 => Ok(7),
        DType::F64 => Ok(8),
        DType::BF16 => Ok(9),
        other => Err(not_exchanged(other)),
    }
}

macro_rules! functions {
    ($($field:ident = $name:literal: fn($($argument:ty),*) -> $answer:ty;)*) => {
        /// The functions of NCCL that are called.
        pub(super) struct Nccl {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> $answer,)*
        }

        impl Nccl {
            fn of(library: &Library) -> Result<Self> {
                Ok(Self { $($field: library.function($name)?,)* })
            }
        }
    };
}

functions! {
    get_version = c"ncclGetVersion": fn(*mut c_int) -> Code;
    get_error_string = c"ncclGetErrorString": fn(Code) -> *const c_char;
    get_last_error = c"ncclGetLastError": fn(Comm) -> *const c_char;
    get_unique_id = c"ncclGetUniqueId": fn(*mut UniqueId) -> Code;
    comm_init_rank_config = c"ncclCommInitRankConfig":
        fn(*mut Comm, c_int, UniqueId, c_int, *mut Config) -> Code;
    comm_get_async_error = c"ncclCommGetAsyncError": fn(Comm, *mut Code) -> Code;
    comm_abort = c"ncclCommAbort": fn(Comm) -> Code;
    comm_destroy = c"ncclCommDestroy": fn(Comm) -> Code;
    group_start = c"ncclGroupStart": fn() -> Code;
    group_end = c"ncclGroupEnd": fn() -> Code;
    all_reduce = c"ncclAllReduce":
        fn(Pointer, Pointer, usize, c_int, c_int, Comm, *mut c_void) -> Code;
    reduce = c"ncclReduce":
        fn(Pointer, Pointer, usize, c_int, c_int, c_int, Comm, *mut c_void) -> Code;
    reduce_scatter = c"ncclReduceScatter":
        fn(Pointer, Pointer, usize, c_int, c_int, Comm, *mut c_void) -> Code;
    all_gather = c"ncclAllGather": fn(Pointer, Pointer, usize, c_int, Comm, *mut c_void) -> Code;
    broadcast = c"ncclBroadcast":
        fn(Pointer, Pointer, usize, c_int, c_int, Comm, *mut c_void) -> Code;
}

impl Nccl {
    /// Returns NCCL, which stays loaded.
    pub(super) fn get() -> Result<&'static Self> {
        static LOADED: OnceLock<Nccl> = OnceLock::new();
        if let Some(loaded) = LOADED.get() {
            return Ok(loaded);
        }
        let path = std::env::var_os("TALLOW_NCCL_LIBRARY");
        let nccl = Self::load(path.as_deref())?;
        Ok(LOADED.get_or_init(|| nccl))
    }

    fn load(path: Option<&OsStr>) -> Result<Self> {
        let nccl = Self::of(&Library::open(path)?)?;
        let mut version = 0;
        // SAFETY: as NCCL declares it.
        nccl.check(unsafe { (nccl.get_version)(&mut version) })
            .map_err(|answer| refusal(&answer))?;
        match version >= OLDEST {
            true => Ok(nccl),
            false => Err(refusal(&format!("it is version {version}, 2.19 is needed"))),
        }
    }

    /// Converts NCCL's result code to a text, unless it is success.
    pub(super) fn check(&self, code: Code) -> std::result::Result<(), String> {
        if code == SUCCESS {
            return Ok(());
        }
        // SAFETY: as NCCL declares them; the last error does not depend on the communicator.
        let (answer, last) = unsafe {
            let last = (self.get_last_error)(std::ptr::null_mut());
            (text((self.get_error_string)(code)), text(last))
        };
        Err(format!("NCCL answers {answer} ({last})"))
    }
}

struct Library(*mut c_void);

impl Library {
    /// Opens the library at `path`, or where the system finds one.
    #[cfg(unix)]
    fn open(path: Option<&OsStr>) -> Result<Self> {
        let names = match path.filter(|path| !path.is_empty()) {
            None => vec![c"libnccl.so.2".into(), c"libnccl.so".into()],
            Some(path) => vec![CString::new(path.as_encoded_bytes()).unwrap_or_default()],
        };
        // SAFETY: NCCL supports being loaded with dlopen.
        let open = |name: &CString| unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
        match names.iter().map(open).find(|library| !library.is_null()) {
            Some(library) => Ok(Self(library)),
            // SAFETY: this thread has just failed to load one; the text is valid until the next call of dlerror.
            None => Err(refusal(&format!(
                "it is not loaded: {}",
                text(unsafe { libc::dlerror() })
            ))),
        }
    }

    /// Looks up the function called `name`; `F` must be its type.
    #[cfg(unix)]
    fn function<F: Copy>(&self, name: &CStr) -> Result<F> {
        // SAFETY: the library is loaded.
        let function = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        if function.is_null() {
            return Err(refusal(&format!("its library has no {name:?}")));
        }
        // SAFETY: a function's address, of the type that NCCL declares.
        Ok(unsafe { std::mem::transmute_copy::<*mut c_void, F>(&function) })
    }

    #[cfg(not(unix))]
    fn open(_path: Option<&OsStr>) -> Result<Self> {
        Err(refusal("it is not loaded on this system"))
    }

    #[cfg(not(unix))]
    fn function<F: Copy>(&self, name: &CStr) -> Result<F> {
        Err(refusal(&format!("its library has no {name:?}")))
    }
}

/// Converts a C string of the library.
fn text(text: *const c_char) -> String {
    match text.is_null() {
        true => "nothing".into(),
        // SAFETY: it is valid until the library is called again.
        false => unsafe { CStr::from_ptr(text) }
            .to_string_lossy()
            .trim()
            .to_string(),
    }
}

pub(super) fn refusal(problem: &str) -> Error {
    Error::order(
        "distributed::init",
        format!("ranks on GPUs exchange by NCCL, and {problem}"),
        "put the folder of libnccl.so.2 on LD_LIBRARY_PATH, or its path in TALLOW_NCCL_LIBRARY (pip's \
               nvidia-nccl-cu12 and -cu13 have it in nvidia/nccl/lib)",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn the_layout_is_that_of_nccl_h() {
        assert_eq!(size_of::<UniqueId>(), 128);
        assert_eq!((size_of::<Config>(), align_of::<Config>()), (48, 8));
        assert_eq!(offset_of!(Config, blocking), 16);
        assert_eq!(offset_of!(Config, max_ctas), 28);
        assert_eq!(offset_of!(Config, net_name), 32);
        assert_eq!(offset_of!(Config, split_share), 40);
    }

    #[test]
    fn a_library_that_is_not_there_is_asked_for() {
        let path = OsStr::new("/nowhere/libnccl.so.2");
        let text = Nccl::load(Some(path)).err().unwrap().to_string();
        for words in ["/nowhere/libnccl.so.2: cannot open", "TALLOW_NCCL_LIBRARY"] {
            assert!(text.contains(words), "{text}");
        }
        let path = OsStr::new("libc.so.6");
        let text = Nccl::load(Some(path)).err().unwrap().to_string();
        assert!(
            text.contains("its library has no \"ncclGetVersion\""),
            "{text}"
        );
    }

    /// Loading the library needs no GPU.
    #[test]
    #[ignore = "needs NCCL"]
    fn the_library_has_what_is_called() {
        Nccl::get().unwrap();
    }
}
