//! CUDA sources, compiled for the GPU at run time. The result is cached on disk, once per user.

use crate::kernels::ptx_cache::{PtxCache, hash};
use candle_core::cuda_backend::cudarc::driver::CudaModule;
use candle_core::cuda_backend::cudarc::driver::sys::CUdevice_attribute as Attribute;
use candle_core::cuda_backend::cudarc::nvrtc::{self, CompileOptions, Ptx, compile_ptx_with_opts};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{Result, bail};
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Helpers for all kernels: element types, 16-byte packs, reductions.
pub(crate) const PRELUDE: &str = include_str!("prelude.cuh");

/// A CUDA source: kernels that are compiled together.
pub(crate) struct Source {
    /// The file name, without extension.
    pub name: &'static str,
    /// The text, in parts that are concatenated.
    pub parts: &'static [&'static str],
}

/// Returns whether a GPU can run the kernels. They need compute capability 8.0, for conversions to bf16.
pub(crate) fn is_supported(gpu: &CudaDevice) -> bool {
    capability(gpu).is_ok_and(|(major, _)| major >= 8)
}

/// Returns the number of streaming multiprocessors.
pub(crate) fn multiprocessors(gpu: &CudaDevice) -> Result<usize> {
    let attribute = Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
    Ok(gpu.cuda_stream().context().attribute(attribute).w()? as usize)
}

/// Returns the most shared memory that a block may request, in bytes.
pub(crate) fn most_shared_bytes(gpu: &CudaDevice) -> Result<usize> {
    let attribute = Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
    Ok(gpu.cuda_stream().context().attribute(attribute).w()? as usize)
}

/// Returns whether a GPU has Hopper's wgmma and tensor copy engine.
pub(crate) fn is_hopper(gpu: &CudaDevice) -> bool {
    capability(gpu).is_ok_and(|capability| capability == (9, 0))
}

fn capability(gpu: &CudaDevice) -> Result<(i32, i32)> {
    gpu.cuda_stream().context().compute_capability().w()
}

/// A macro definition, `NAME=VALUE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Definition {
    /// A size.
    Size(&'static str, usize),
    /// A type.
    Type(&'static str, &'static str),
}

impl fmt::Display for Definition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Size(name, value) => write!(f, "{name}={value}"),
            Self::Type(name, value) => write!(f, "{name}={value}"),
        }
    }
}

static COMPILED: AtomicU64 = AtomicU64::new(0);
static MODULES_LOADED: AtomicU64 = AtomicU64::new(0);

/// Returns how many sources were compiled and how many modules were loaded since the process began.
pub(crate) fn counts() -> [u64; 2] {
    [&COMPILED, &MODULES_LOADED].map(|count| count.load(Ordering::Relaxed))
}

impl Source {
    /// Returns the loaded module of the source. Compiles and loads it on first use.
    pub(super) fn module(
        &self,
        gpu: &CudaDevice,
        definitions: &[Definition],
    ) -> Result<Arc<CudaModule>> {
        type Key = (usize, &'static str, Vec<Definition>);
        // Each key has a mutex, so that several sources can compile at the same time.
        type Loaded = HashMap<Key, Arc<Mutex<Option<Arc<CudaModule>>>>>;
        static LOADED: OnceLock<Mutex<Loaded>> = OnceLock::new();

        let ordinal = gpu.cuda_stream().context().ordinal();
        let key = (ordinal, self.name, definitions.to_vec());
        let place = lock(LOADED.get_or_init(Mutex::default))
            .entry(key)
            .or_default()
            .clone();
        let mut loaded = lock(&place);
        if let Some(module) = &*loaded {
            return Ok(module.clone());
        }
        let context = gpu.cuda_stream().context().clone();
        let ptx = self.ptx(capability(gpu)?, definitions, false)?;
        let module = match context.load_module(Ptx::from_src(ptx)) {
            Ok(module) => module,
            // The cached PTX may be damaged, or from a toolkit newer than this driver.
            Err(_) => {
                let ptx = self.ptx(capability(gpu)?, definitions, true)?;
                context.load_module(Ptx::from_src(ptx)).w()?
            }
        };
        *loaded = Some(module.clone());
        MODULES_LOADED.fetch_add(1, Ordering::Relaxed);
        Ok(module)
    }

    /// Returns the source as PTX, from the disk cache or else from the compiler. `anew` skips the cache.
    fn ptx(
        &self,
        (major, minor): (i32, i32),
        definitions: &[Definition],
        skip_cache: bool,
    ) -> Result<String> {
        // Hopper's specific instructions exist only in the variant `a` of the architecture.
        let variant = if major == 9 { "a" } else { "" };
        let architecture = format!("compute_{major}{minor}{variant}");
        let key = self.cache_key(&architecture, definitions);
        let cache = PtxCache::for_user();
        let kept = cache.as_ref().filter(|_| !skip_cache);
        if let Some(ptx) = kept.and_then(|cache| cache.read(&key)) {
            return Ok(ptx);
        }
        // An NVRTC older than the GPU does not know its architecture. The driver accepts PTX of an older one.
        let ptx = self.compile(&architecture, definitions).or_else(|error| {
            let older = ["compute_90", "compute_80"].iter();
            let mut older = older.filter(|_| major > 9 || (major == 8 && minor > 0));
            let compiled = older.find_map(|older| self.compile(older, definitions).ok());
            compiled.ok_or(error)
        })?;
        COMPILED.fetch_add(1, Ordering::Relaxed);
        if let Some(cache) = &cache {
            // A failed write is not an error: it costs the next process a second of compiling.
            let _ = cache.store(&key, &ptx);
        }
        Ok(ptx)
    }

    fn compile(&self, architecture: &str, definitions: &[Definition]) -> Result<String> {
        let mut options = vec![
            format!("--gpu-architecture={architecture}"),
            "--std=c++17".into(),
        ];
        options.extend(
            definitions
                .iter()
                .map(|definition| format!("-D{definition}")),
        );
        let options = CompileOptions {
            name: Some(format!("{}.cu", self.name)),
            options,
            ..Default::default()
        };
        match compile_ptx_with_opts(self.parts.concat(), options) {
            Ok(ptx) => Ok(ptx.to_src()),
            Err(error) => bail!("{}.cu, for {architecture}: {error}", self.name),
        }
    }

    /// Returns the cache key, which depends on the source, the definitions, the architecture and the compiler version.
    fn cache_key(&self, architecture: &str, definitions: &[Definition]) -> String {
        let (major, minor) = compiler_version();
        let compiler = format!("{major}.{minor}");
        let definitions: Vec<String> = definitions.iter().map(Definition::to_string).collect();
        let definitions = definitions.join("\n");
        let mut texts = vec![compiler.as_str(), &definitions];
        texts.extend(self.parts);
        format!("{}-{architecture}-{}", self.name, hash(&texts))
    }
}

/// Returns NVRTC's version, or 0.0 if it is unknown.
fn compiler_version() -> (i32, i32) {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: writes two integers. The status is ignored: after a failure they stay 0.
    let _ = unsafe { nvrtc::sys::nvrtcVersion(&mut major, &mut minor) };
    (major, minor)
}

/// Locks a mutex, ignoring poisoning: the data behind these locks is consistent between any two statements.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
