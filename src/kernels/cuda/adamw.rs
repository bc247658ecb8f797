//! AdamW on many parameters in one launch; see `adamw.cu`.

use super::source::{PRELUDE, Source};
use super::{View, launch_config};
use crate::kernels::cpu::adamw::Update;
use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::{DevicePtr, PushKernelArg};
use candle_core::cuda_backend::{CudaDevice, WrapErr};

const SOURCE: Source = Source {
    name: "adamw",
    parts: &[PRELUDE, include_str!("adamw.cu")],
};

/// Elements of a block, as in the source.
const CHUNK: usize = 8192;

/// A parameter with its gradient and its state, each (n) f32.
pub(crate) struct Parameter<'a> {
    pub value: View<'a>,
    pub gradient: View<'a>,
    pub exp_avg: View<'a>,
    pub exp_avg_sq: View<'a>,
    /// Which of the updates it takes.
    pub update: usize,
}

/// Compiles and loads the kernel.
pub(crate) fn prepare(card: &CudaDevice) -> Result<()> {
    SOURCE.kernel(card, "adamw_f32").map(drop)
}

/// Updates all parameters in place.
pub(crate) fn step(card: &CudaDevice, parameters: &[Parameter], updates: &[Update]) -> Result<()> {
    // The source's structures, as they lie in memory: Tensor in seven words, Chunk in one, Update in eight f32.
    let (mut tensors, mut chunks) = (Vec::new(), Vec::new());
    for (i, parameter) in parameters.iter().enumerate() {
        let no_copy = 0u64;
        let n = parameter.value.len;
        tensors.extend([
            parameter.value.pointer,
            parameter.gradient.pointer,
            parameter.exp_avg.pointer,
            parameter.exp_avg_sq.pointer,
            no_copy,
            n as u64,
            parameter.update as u64,
        ]);
        chunks.extend((0..n.div_ceil(CHUNK)).map(|index| i as u64 | (index as u64) << 32));
    }
    if chunks.is_empty() {
        return Ok(());
    }
    let updates: Vec<f32> = updates.iter().flat_map(words).collect();
    let (tensors, blocks) = (card.clone_htod(&tensors)?, chunks.len());
    let (chunks, updates) = (card.clone_htod(&chunks)?, card.clone_htod(&updates)?);

    let kernel = SOURCE.kernel(card, "adamw_f32")?;
    let stream = card.cuda_stream();
    let tables = [
        tensors.device_ptr(&stream).0,
        chunks.device_ptr(&stream).0,
        updates.device_ptr(&stream).0,
    ];
    let no_clip = 0u64;
    let mut launch = kernel.builder();
    for table in &tables {
        launch.arg(table);
    }
    launch.arg(&no_clip);
    // SAFETY: the tables are laid out as the kernel reads them, over buffers of the sizes that they say.
    unsafe { launch.launch(launch_config((blocks, 1), (256, 1))) }.w()?;
    Ok(())
}

fn words(update: &Update) -> [f32; 8] {
    let unused = 0.0;
    [
        update.decay,
        update.first_share,
        update.beta2,
        update.second_share,
        update.step_size,
        update.second_correction,
        update.eps,
        unused,
    ]
    .map(|word| word as f32)
}
