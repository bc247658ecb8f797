//! Tables of the addresses of parameters, gradients and state, in device memory.

use super::super::View;
use crate::kernels::workspace;
use candle_core::cuda_backend::CudaDevice;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr};
use candle_core::{DType, Result, bail};
use std::ops::Range;

/// A parameter with its gradient and its state, each (n).
#[derive(Clone, Copy)]
pub(crate) struct Entry<'a> {
    /// The value in f32: of a parameter in half precision, its master weight.
    pub value: View<'a>,
    /// f32, bf16 or f16.
    pub gradient: View<'a>,
    /// The rule's tensors of state, f32 or bf16, of one dtype.
    pub states: [Option<View<'a>>; 2],
    /// The value rounded to f16 or bf16, if there is a copy in half precision.
    pub copy: Option<View<'a>>,
    /// The name of the rule's kernel.
    pub rule: &'static str,
    /// The index of the entry's update.
    pub update: usize,
}

impl Entry<'_> {
    fn state_dtype(&self) -> DType {
        self.states[0].map_or(DType::F32, |state| state.dtype)
    }
}

/// The tables of entries, as the kernels read them. Every buffer of an entry must exist as long as the tables are used.
pub(crate) struct Tables {
    /// The tables' memory: Tensor, in [`UPDATE_WORDS`](workspace::UPDATE_WORDS) each, and Chunk, in one word.
    _held: [CudaSlice<u64>; 2],
    /// The addresses of the two tables.
    pointers: [u64; 2],
    /// The first chunk of each entry, then the number of chunks.
    first_chunks: Vec<usize>,
    /// The update kernel of each entry: its name, and its suffix for the dtypes of gradient, copy and state.
    kernels: Vec<[&'static str; 2]>,
    /// The dtype of each entry's gradient, as a kernel suffix.
    gradients: Vec<&'static str>,
}

impl Tables {
    /// Builds the tables of entries in f32. Gradients are f32, or bf16 if there are copies in bf16; all copies have one
    /// dtype. Kernels for moments in bf16 have the suffix `_moments`.
    pub(crate) fn new(gpu: &CudaDevice, entries: &[Entry]) -> Result<Self> {
        let copies = dtype_of_copies(entries)?;
        let types = entries.iter().map(|entry| {
            Ok(match (entry.gradient.dtype, copies, entry.state_dtype()) {
                (DType::F32, Some(DType::F16), DType::F32) => "f32_f16",
                (DType::F32, Some(DType::F16), DType::BF16) => "f32_f16_moments",
                (DType::F32, None | Some(DType::BF16), DType::F32) => "f32",
                (DType::F32, None | Some(DType::BF16), DType::BF16) => "f32_moments",
                (DType::BF16, Some(DType::BF16), DType::F32) => "f32_of_bf16",
                (DType::BF16, Some(DType::BF16), DType::BF16) => "f32_of_bf16_moments",
                other => bail!(
                    "tables of updates: no kernel for gradients, copies and state in {other:?}"
                ),
            })
        });
        Self::with_types(gpu, entries, types.collect::<Result<_>>()?)
    }

    /// Builds the tables of parameters in half precision: `copy` is the parameter, which others read and may set, and
    /// `value` its master weight in f32. Gradients are f32 or in the parameters' dtype.
    pub(crate) fn with_master_weights(gpu: &CudaDevice, entries: &[Entry]) -> Result<Self> {
        if entries.iter().any(|entry| entry.copy.is_none()) {
            bail!("tables of updates: an exact value without its parameter in half precision");
        }
        let copies = dtype_of_copies(entries)?;
        let types = entries.iter().map(|entry| {
            Ok(match (entry.gradient.dtype, copies, entry.state_dtype()) {
                (DType::BF16, Some(DType::BF16), DType::F32) => "bf16",
                (DType::BF16, Some(DType::BF16), DType::BF16) => "bf16_moments",
                (DType::F32, Some(DType::BF16), DType::F32) => "bf16_f32",
                (DType::F32, Some(DType::BF16), DType::BF16) => "bf16_f32_moments",
                (DType::F16, Some(DType::F16), DType::F32) => "f16",
                (DType::F16, Some(DType::F16), DType::BF16) => "f16_moments",
                (DType::F32, Some(DType::F16), DType::F32) => "f16_f32",
                (DType::F32, Some(DType::F16), DType::BF16) => "f16_f32_moments",
                other => bail!(
                    "tables of updates: no kernel for gradients, parameters and state in {other:?}"
                ),
            })
        });
        Self::with_types(gpu, entries, types.collect::<Result<_>>()?)
    }

    /// Builds tables of gradients only, f32, bf16 or f16, for [norms](Self::sums_of_squares) but not for updates.
    pub(crate) fn of_gradients(gpu: &CudaDevice, gradients: &[View]) -> Result<Self> {
        let entries = gradients.iter().map(|gradient| Entry {
            value: *gradient,
            gradient: *gradient,
            states: [None; 2],
            copy: None,
            rule: "none",
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
                entry.states[0].map_or(0, |state| state.pointer),
                entry.states[1].map_or(0, |state| state.pointer),
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
                table.push(0); // an empty table cannot be allocated
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
            kernels: entries
                .iter()
                .map(|entry| entry.rule)
                .zip(types)
                .map(<[_; 2]>::from)
                .collect(),
            gradients: gradients.collect(),
        })
    }

    /// Returns the number of entries.
    pub(super) fn len(&self) -> usize {
        self.first_chunks.len() - 1
    }

    /// Returns the chunks of a range of entries.
    pub(super) fn chunks(&self, entries: &Range<usize>) -> Range<usize> {
        self.first_chunks[entries.start]..self.first_chunks[entries.end]
    }

    /// Splits a range of entries into runs that one kernel updates, each with the kernel's name and suffix.
    pub(super) fn by_kernel(
        &self,
        entries: Range<usize>,
    ) -> impl Iterator<Item = (Range<usize>, [&'static str; 2])> {
        runs_of_one(&self.kernels, entries)
    }

    /// Splits a range of entries into runs whose gradients have one dtype, each with its suffix.
    pub(super) fn by_gradients(
        &self,
        entries: Range<usize>,
    ) -> impl Iterator<Item = (Range<usize>, &'static str)> {
        runs_of_one(&self.gradients, entries)
    }

    /// Returns the address of an entry in the table of tensors.
    pub(super) fn tensors_from(&self, entry: usize) -> u64 {
        self.pointers[0] + (entry * workspace::UPDATE_WORDS * size_of::<u64>()) as u64
    }

    /// Returns the address of a chunk in the table of chunks.
    pub(super) fn chunks_from(&self, chunk: usize) -> u64 {
        self.pointers[1] + (chunk * size_of::<u64>()) as u64
    }
}

/// Splits a range of entries into runs of one name, each with the name.
fn runs_of_one<T: Copy + PartialEq>(
    names: &[T],
    entries: Range<usize>,
) -> impl Iterator<Item = (Range<usize>, T)> {
    let mut end = entries.start;
    let parts = names[entries].chunk_by(|a, b| a == b);
    parts.map(move |part| {
        let start = end;
        end += part.len();
        (start..end, part[0])
    })
}

/// Returns the dtype of the copies, if there are any. They must have one dtype.
fn dtype_of_copies(entries: &[Entry]) -> Result<Option<DType>> {
    let mut dtypes = entries
        .iter()
        .filter_map(|entry| entry.copy.map(|copy| copy.dtype));
    let first = dtypes.next();
    match dtypes.all(|dtype| Some(dtype) == first) {
        true => Ok(first),
        false => bail!("tables of updates: copies of more than one dtype"),
    }
}
