//! Where parameters, gradients and state lie, on the GPU.

use super::super::View;
use crate::kernels::workspace;
use candle_core::cuda_backend::CudaDevice;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr};
use candle_core::{DType, Result, bail};
use std::ops::Range;

/// A parameter with its gradient and its state, each (n).
#[derive(Clone, Copy)]
pub(crate) struct Entry<'a> {
    /// f32.
    pub value: View<'a>,
    /// f32, bf16 or f16.
    pub gradient: View<'a>,
    /// f32 or bf16.
    pub exp_avg: View<'a>,
    /// As exp_avg.
    pub exp_avg_sq: View<'a>,
    /// The value rounded to f16 or bf16, where it is wanted.
    pub copy: Option<View<'a>>,
    /// Which of the updates it takes.
    pub update: usize,
}

/// Entries as the kernels read them. The buffers that they name must be there for as long as the tables are launched
/// on.
pub(crate) struct Tables {
    /// What the pointers point to, held for them: Tensor, in [`UPDATE_WORDS`](workspace::UPDATE_WORDS) each; Chunk, in
    /// one.
    _held: [CudaSlice<u64>; 2],
    /// Where the tables lie.
    pointers: [u64; 2],
    /// The first chunk of each entry, and how many there are.
    first_chunks: Vec<usize>,
    /// What the kernel of the update calls the dtypes of each entry's gradient and of the copies.
    types: Vec<&'static str>,
    /// The dtype of each entry's gradient, as kernels call it.
    gradients: Vec<&'static str>,
}

impl Tables {
    /// The tables of entries in f32, with gradients in f32, or bf16 beside copies in it; copies are of one dtype. The
    /// kernels of moments in bf16 are called so.
    pub(crate) fn new(gpu: &CudaDevice, entries: &[Entry]) -> Result<Self> {
        let copies = dtype_of_copies(entries)?;
        let types = entries.iter().map(|entry| {
            Ok(match (entry.gradient.dtype, copies, entry.exp_avg.dtype) {
                (DType::F32, Some(DType::F16), DType::F32) => "f32_f16",
                (DType::F32, Some(DType::F16), DType::BF16) => "f32_f16_moments",
                (DType::F32, None | Some(DType::BF16), DType::F32) => "f32",
                (DType::F32, None | Some(DType::BF16), DType::BF16) => "f32_moments",
                (DType::BF16, Some(DType::BF16), DType::F32) => "f32_of_bf16",
                (DType::BF16, Some(DType::BF16), DType::BF16) => "f32_of_bf16_moments",
                other => bail!(
                    "AdamW's tables: no kernel for gradients, copies and moments in {other:?}"
                ),
            })
        });
        Self::with_types(gpu, entries, types.collect::<Result<_>>()?)
    }

    /// The tables of parameters in half precision, of which `copy` is the one that others see and may set, and `value`
    /// the exact value. Gradients are f32, or as the parameters are.
    pub(crate) fn of_halves(gpu: &CudaDevice, entries: &[Entry]) -> Result<Self> {
        if entries.iter().any(|entry| entry.copy.is_none()) {
            bail!("AdamW's tables: an exact value without its parameter in half precision");
        }
        let copies = dtype_of_copies(entries)?;
        let types = entries.iter().map(|entry| {
            Ok(match (entry.gradient.dtype, copies, entry.exp_avg.dtype) {
                (DType::BF16, Some(DType::BF16), DType::F32) => "bf16",
                (DType::BF16, Some(DType::BF16), DType::BF16) => "bf16_moments",
                (DType::F32, Some(DType::BF16), DType::F32) => "bf16_f32",
                (DType::F32, Some(DType::BF16), DType::BF16) => "bf16_f32_moments",
                (DType::F16, Some(DType::F16), DType::F32) => "f16",
                (DType::F16, Some(DType::F16), DType::BF16) => "f16_moments",
                (DType::F32, Some(DType::F16), DType::F32) => "f16_f32",
                (DType::F32, Some(DType::F16), DType::BF16) => "f16_f32_moments",
                other => bail!(
                    "AdamW's tables: no kernel for gradients, parameters and moments in {other:?}"
                ),
            })
        });
        Self::with_types(gpu, entries, types.collect::<Result<_>>()?)
    }

    /// The tables of gradients alone, f32, bf16 or f16: for [norms](Self::sums_of_squares), not for updates.
    pub(crate) fn of_gradients(gpu: &CudaDevice, gradients: &[View]) -> Result<Self> {
        let entries = gradients.iter().map(|gradient| Entry {
            value: *gradient,
            gradient: *gradient,
            exp_avg: *gradient,
            exp_avg_sq: *gradient,
            copy: None,
            update: 0,
        });
        let entries: Vec<Entry> = entries.collect();
        let no_kernel = vec!["none"; entries.len()];
        Self::with_types(gpu, &entries, no_kernel)
    }

    fn with_types(gpu: &CudaDevice, entries: &[Entry], types: Vec<&'static str>) -> Result<Self> {
        let (mut tensors, mut chunks) = (Vec::new(), Vec::new());
        let mut first_chunks = Vec::with_capacity(entries.len() + 1);
        for (i, entry) in entries.iter().enumerate() {
            let (n, first_chunk) = (entry.value.len, chunks.len());
            let known: [u64; workspace::UPDATE_WORDS] = [
                entry.value.pointer,
                entry.gradient.pointer,
                entry.exp_avg.pointer,
                entry.exp_avg_sq.pointer,
                entry.copy.map_or(0, |copy| copy.pointer),
                n as u64,
                entry.update as u64 | (first_chunk as u64) << 32,
            ];
            tensors.extend(known);
            first_chunks.push(first_chunk);
            chunks.extend((0..workspace::chunks(n)).map(|index| i as u64 | (index as u64) << 32));
        }
        first_chunks.push(chunks.len());
        for table in [&mut tensors, &mut chunks] {
            if table.is_empty() {
                table.push(0); // nothing cannot be allocated
            }
        }
        let (tensors, chunks) = (gpu.clone_htod(&tensors)?, gpu.clone_htod(&chunks)?);
        let stream = gpu.cuda_stream();
        let pointers = [tensors.device_ptr(&stream).0, chunks.device_ptr(&stream).0];
        let gradients = entries.iter().map(|entry| match entry.gradient.dtype {
            DType::BF16 => "bf16",
            DType::F16 => "f16",
            _ => "f32",
        });
        Ok(Self {
            _held: [tensors, chunks],
            pointers,
            first_chunks,
            types,
            gradients: gradients.collect(),
        })
    }

    /// How many entries there are.
    pub(super) fn len(&self) -> usize {
        self.first_chunks.len() - 1
    }

    /// The chunks of some of the entries.
    pub(super) fn chunks(&self, entries: &Range<usize>) -> Range<usize> {
        self.first_chunks[entries.start]..self.first_chunks[entries.end]
    }

    /// Some of the entries, in parts that one kernel updates, each with what the kernel calls their dtypes.
    pub(super) fn by_types(
        &self,
        entries: Range<usize>,
    ) -> impl Iterator<Item = (Range<usize>, &'static str)> {
        runs_of_one(&self.types, entries)
    }

    /// Some of the entries, in parts whose gradients have one dtype, each with its name.
    pub(super) fn by_gradients(
        &self,
        entries: Range<usize>,
    ) -> impl Iterator<Item = (Range<usize>, &'static str)> {
        runs_of_one(&self.gradients, entries)
    }

    /// Where the table of tensors lies, from an entry on.
    pub(super) fn tensors_from(&self, entry: usize) -> u64 {
        self.pointers[0] + (entry * workspace::UPDATE_WORDS * size_of::<u64>()) as u64
    }

    /// Where the table of chunks lies, from a chunk on.
    pub(super) fn chunks_from(&self, chunk: usize) -> u64 {
        self.pointers[1] + (chunk * size_of::<u64>()) as u64
    }
}

/// Some of the entries, in parts that have one name, with it.
fn runs_of_one(
    names: &[&'static str],
    entries: Range<usize>,
) -> impl Iterator<Item = (Range<usize>, &'static str)> {
    let mut end = entries.start;
    let parts = names[entries].chunk_by(|a, b| a == b);
    parts.map(move |part| {
        let start = end;
        end += part.len();
        (start..end, part[0])
    })
}

/// The dtype of all copies that there are.
fn dtype_of_copies(entries: &[Entry]) -> Result<Option<DType>> {
    let mut dtypes = entries
        .iter()
        .filter_map(|entry| entry.copy.map(|copy| copy.dtype));
    let first = dtypes.next();
    match dtypes.all(|dtype| Some(dtype) == first) {
        true => Ok(first),
        false => bail!("AdamW's tables: copies of more than one dtype"),
    }
}
