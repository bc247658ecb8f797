//! Kernels of a source that is compiled: each looked up once a GPU, and launched on the GPU's stream.

use super::source::{Definition, Source, lock, multiprocessors};
use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::sys::CUfunction_attribute as FunctionAttribute;
use candle_core::cuda_backend::cudarc::driver::{
    CudaFunction, CudaStream, LaunchArgs, LaunchConfig,
};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};

/// A kernel that is loaded, on its GPU's stream.
pub(crate) struct Kernel {
    loaded: Arc<Loaded>,
    stream: Arc<CudaStream>,
}

/// A kernel on one GPU, and what the driver has said of it.
struct Loaded {
    function: CudaFunction,
    /// What a block may share.
    allowed_bytes: Mutex<usize>,
    /// Blocks at once, by threads of a block and the bytes that these share.
    at_once: Mutex<Vec<((u32, u32), usize)>>,
}

impl Kernel {
    /// A launch, for its arguments to be added.
    pub(crate) fn builder(&self) -> LaunchArgs<'_> {
        self.stream.launch_builder(&self.loaded.function)
    }

    /// Lets a block have so much shared memory; 48 KiB need no leave.
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

    /// How many blocks the GPU runs at once. The driver is asked once for blocks of a size.
    pub(crate) fn blocks_at_once(&self, gpu: &CudaDevice, config: &LaunchConfig) -> Result<usize> {
        let (x, y, z) = config.block_dim;
        let block = (x * y * z, config.shared_mem_bytes);
        let mut known = lock(&self.loaded.at_once);
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

/// What distinguishes the kernels of a source on a GPU.
#[derive(PartialEq)]
struct Name {
    stem: &'static str,
    types: &'static str,
    definitions: Vec<Definition>,
}

impl Source {
    /// The kernel called `stem_types`, or `stem` where `types` is empty: compiled and loaded if it is not yet.
    ///
    /// # Errors
    /// That of NVRTC, with its log, or of the driver.
    pub(crate) fn kernel(
        &self,
        gpu: &CudaDevice,
        stem: &'static str,
        types: &'static str,
    ) -> Result<Kernel> {
        self.kernel_with(gpu, &[], stem, types)
    }

    /// As [`kernel`](Self::kernel), of the source compiled with these definitions.
    pub(crate) fn kernel_with(
        &self,
        gpu: &CudaDevice,
        definitions: &[Definition],
        stem: &'static str,
        types: &'static str,
    ) -> Result<Kernel> {
        // By the GPU's number: every handle of a GPU has its one primary context, in which kernels are loaded.
        // A launch looks here: few kernels a source, so that they are compared one by one, and nothing is allocated.
        type Found = HashMap<(usize, &'static str), Vec<(Name, Arc<Loaded>)>>;
        static FOUND: OnceLock<Mutex<Found>> = OnceLock::new();

        let stream = gpu.cuda_stream();
        // Some of the driver's calls, unlike cudarc's allocations, do not see to it themselves.
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
            at_once: Mutex::default(),
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
