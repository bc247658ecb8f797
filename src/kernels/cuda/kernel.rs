//! Loaded kernels: each is looked up once per GPU and launched on the GPU's stream.

use super::source::{Definition, Source, lock, multiprocessors};
use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::sys::CUfunction_attribute as FunctionAttribute;
use candle_core::cuda_backend::cudarc::driver::{
    CudaFunction, CudaStream, LaunchArgs, LaunchConfig,
};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};

/// A loaded kernel and the stream of its GPU.
pub(crate) struct Kernel {
    loaded: Arc<Loaded>,
    stream: Arc<CudaStream>,
}

/// A kernel on one GPU, with cached answers of the driver.
struct Loaded {
    function: CudaFunction,
    /// The dynamic shared memory that a block may use, in bytes.
    allowed_bytes: Mutex<usize>,
    /// The number of concurrent blocks, by threads and shared bytes per block.
    concurrent_blocks: Mutex<Vec<((u32, u32), usize)>>,
}

impl Kernel {
    /// Returns a launch, to which arguments are added.
    pub(crate) fn builder(&self) -> LaunchArgs<'_> {
        self.stream.launch_builder(&self.loaded.function)
    }

    /// Raises the dynamic shared memory that a block may use. Up to 48 KiB need no call.
    pub(crate) fn allow_shared_bytes(&self, bytes: usize) -> Result<()> {
        let mut allowed = lock(&self.loaded.allowed_bytes);
        if bytes > *allowed {
            let attribute = FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let function = &self.loaded.function;
            function.set_attribute(attribute, bytes as i32).w()?;
            *allowed = bytes;
        }
        Ok(())
    }

    /// Returns how many blocks the GPU runs concurrently. The driver is asked once per block size.
    pub(crate) fn concurrent_blocks(
        &self,
        gpu: &CudaDevice,
        config: &LaunchConfig,
    ) -> Result<usize> {
        let (x, y, z) = config.block_dim;
        let block = (x * y * z, config.shared_mem_bytes);
        let mut known = lock(&self.loaded.concurrent_blocks);
        if let Some((_, blocks)) = known.iter().find(|(of, _)| *of == block) {
            return Ok(*blocks);
        }
        let function = &self.loaded.function;
        let of_multiprocessor = function
            .occupancy_max_active_blocks_per_multiprocessor(block.0, block.1 as usize, None)
            .w()?;
        let blocks = multiprocessors(gpu)? * of_multiprocessor.max(1) as usize;
        known.push((block, blocks));
        Ok(blocks)
    }
}

/// The names and macros that distinguish the kernels of a source on a GPU.
#[derive(PartialEq)]
struct Name {
    stem: &'static str,
    types: &'static str,
    definitions: Vec<Definition>,
}

impl Source {
    /// Returns the kernel `stem_types`, or `stem` if `types` is empty. Compiles and loads it on first use.
    ///
    /// # Errors
    /// Compiler errors, with NVRTC's log; driver errors.
    pub(crate) fn kernel(
        &self,
        gpu: &CudaDevice,
        stem: &'static str,
        types: &'static str,
    ) -> Result<Kernel> {
        self.kernel_with(gpu, &[], stem, types)
    }

    /// Like [`kernel`](Self::kernel), with macro definitions for the compiler.
    pub(crate) fn kernel_with(
        &self,
        gpu: &CudaDevice,
        definitions: &[Definition],
        stem: &'static str,
        types: &'static str,
    ) -> Result<Kernel> {
        // Keyed by the GPU's ordinal: all handles of a GPU share its primary context, into which kernels are loaded.
        // Every launch comes here. The linear search over a source's few kernels does not allocate.
        type Found = HashMap<(usize, &'static str), Vec<(Name, Arc<Loaded>)>>;
        static FOUND: OnceLock<Mutex<Found>> = OnceLock::new();

        let stream = gpu.cuda_stream();
        // Some driver calls do not bind the context themselves, unlike cudarc's allocations.
        stream.context().bind_to_thread().w()?;
        let mut found = lock(FOUND.get_or_init(Mutex::default));
        let of_source = found
            .entry((stream.context().ordinal(), self.name))
            .or_default();
        let known = of_source.iter().find(|(name, _)| {
            (name.stem, name.types) == (stem, types) && name.definitions == definitions
        });
        if let Some((_, loaded)) = known {
            let loaded = loaded.clone();
            return Ok(Kernel { loaded, stream });
        }
        let separator = if types.is_empty() { "" } else { "_" };
        let full_name = format!("{stem}{separator}{types}");
        let module = self.module(gpu, definitions)?;
        let loaded = Arc::new(Loaded {
            function: module.load_function(&full_name).w()?,
            allowed_bytes: Mutex::new(48 << 10),
            concurrent_blocks: Mutex::default(),
        });
        let name = Name {
            stem,
            types,
            definitions: definitions.to_vec(),
        };
        of_source.push((name, loaded.clone()));
        Ok(Kernel { loaded, stream })
    }
}
