//! Key masks and biases in tensors: their arguments, and the kernel that packs a mask.

use super::kernel_config::config_1d;
use super::workspace::Workspace;
use crate::kernels::attention::Sizes;
use crate::kernels::cuda::source::Source;
use crate::kernels::cuda::{View, set_to_zero};
use crate::kernels::workspace::{MaskRows, PackedMask};
use candle_core::cuda_backend::cudarc::driver::{DeviceRepr, PushKernelArg};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Result};

const SOURCE: Source = Source {
    name: "flash_mask",
    parts: &[
        include_str!("common.cuh"),
        include_str!("masks.cuh"),
        include_str!("mask.cu"),
    ],
};

/// A contiguous tensor that broadcasts to the scores (B, H, Tq, Tk): each of its dimensions is theirs, or 1.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PerScore<'a> {
    pub view: View<'a>,
    pub dims: [usize; 4],
}

impl PerScore<'_> {
    /// Returns the strides of batch, head, query and key in elements, 0 for dimensions of 1.
    pub fn strides(&self) -> [i64; 4] {
        let [_, heads, queries, keys] = self.dims;
        broadcast(self.dims, [heads * queries * keys, queries * keys, keys, 1])
    }
}

/// The key mask and the bias of a call, if it has them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Masks<'a> {
    /// u8: 0 hides a pair.
    pub visible: Option<PerScore<'a>>,
    /// f32, or the dtype of q: added to the scaled and capped scores; -inf hides a pair.
    pub bias: Option<PerScore<'a>>,
}

impl Masks<'_> {
    /// Returns whether the pairs of a query and a key have terms or a mask of their own, unlike padding.
    pub(super) fn are_of_pairs(&self) -> bool {
        let visible = &self.visible;
        self.bias.is_some() || visible.is_some_and(|visible| visible.dims[2] > 1)
    }
}

/// The tiles of a kernel, and which dimension is along the rows of its packed mask.
#[derive(Clone, Copy)]
pub(super) struct MaskTiles {
    pub queries: usize,
    pub keys: usize,
    pub rows: MaskRows,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct MaskArguments {
    bits: u64,
    shown: u64,
    partly: u64,
    across: u64,
    bias: u64,
    bits_strides: [i64; 3],
    shown_strides: [i64; 2],
    across_strides: [i64; 2],
    bias_strides: [i64; 3],
    bits_word: i32,
    shown_row: i32,
    across_row: i32,
    bias_column: i32,
    bias_vectors: i32,
    unused: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct PackArguments {
    visible: u64,
    bits: u64,
    shown: u64,
    partly: u64,
    across: u64,
    matrices: i32,
    queries: i32,
    keys: i32,
    query_tiles: i32,
    key_tiles: i32,
    tile_queries: i32,
    tile_keys: i32,
    bits_words: i32,
    rows_are_keys: i32,
    unused: u32,
}

// SAFETY: plain data with the layout that the sources declare.
unsafe impl DeviceRepr for PackArguments {}

impl MaskArguments {
    /// Returns the arguments of a call's masks. Packs the key mask, if there is one, into `scratch`.
    pub(super) fn new(
        gpu: &CudaDevice,
        sizes: &Sizes,
        masks: &Masks<'_>,
        tiles: MaskTiles,
        scratch: &mut Workspace,
    ) -> Result<Self> {
        let mut arguments = Self::default();
        if let Some(bias) = &masks.bias {
            arguments.set_bias(bias);
        }
        if let Some(visible) = &masks.visible {
            arguments.pack(gpu, sizes, visible, tiles, scratch)?;
        }
        Ok(arguments)
    }

    fn set_bias(&mut self, bias: &PerScore<'_>) {
        let keys = bias.dims[3];
        let [batch, head, row, column] = bias.strides();
        let vector = if bias.view.dtype == DType::F32 { 2 } else { 8 }; // elements, as masks.cuh reads them
        let bytes = vector * bias.view.dtype.size_in_bytes();
        let are_whole = column == 1 && keys.is_multiple_of(vector);
        self.bias = bias.view.pointer;
        self.bias_strides = [batch, head, row];
        self.bias_column = column as i32;
        let are_aligned = bias.view.pointer.is_multiple_of(bytes as u64);
        self.bias_vectors = i32::from(are_whole && are_aligned);
    }

    fn pack(
        &mut self,
        gpu: &CudaDevice,
        sizes: &Sizes,
        visible: &PerScore<'_>,
        tiles: MaskTiles,
        scratch: &mut Workspace,
    ) -> Result<()> {
        let [batches, heads, queries, keys] = visible.dims;
        let tile = [tiles.queries, tiles.keys];
        let packed = PackedMask::new(sizes, visible.dims, tile, tiles.rows);
        let bits = scratch.take(packed.bits());
        let flags = scratch.take(packed.flags());
        set_to_zero(gpu, flags)?;
        let [shown, partly, across] =
            [0, 1, 2].map(|i| flags.pointer + 4 * (i * packed.shown()) as u64);
        let key_tiles = sizes.keys.div_ceil(tiles.keys);
        let pack = PackArguments {
            visible: visible.view.pointer,
            bits: bits.pointer,
            shown,
            partly,
            across,
            matrices: packed.matrices as i32,
            queries: queries as i32,
            keys: keys as i32,
            query_tiles: sizes.queries.div_ceil(tiles.queries) as i32,
            key_tiles: key_tiles as i32,
            tile_queries: tiles.queries as i32,
            tile_keys: tiles.keys as i32,
            bits_words: packed.bits_row as i32,
            rows_are_keys: i32::from(tiles.rows == MaskRows::Keys),
            unused: 0,
        };
        let blocks = batches * heads * queries.div_ceil(32) * keys.div_ceil(32);
        let kernel = SOURCE.kernel(gpu, "flash_mask", "")?;
        let mut launch = kernel.builder();
        launch.arg(&pack);
        // SAFETY: the argument is the kernel's, over buffers of the sizes that it states.
        unsafe { launch.launch(config_1d(blocks.div_ceil(8), 256, 0)) }.w()?;

        let [rows, columns] = match tiles.rows {
            MaskRows::Queries => [queries, keys],
            MaskRows::Keys => [keys, queries],
        };
        let of_head = rows * packed.bits_row;
        let dims = [batches, heads, rows, columns];
        let strides = [heads * of_head, of_head, packed.bits_row, 1];
        let [batch, head, row, word] = broadcast(dims, strides);
        let matrices = |words: usize| {
            let [batch, head, _, _] = broadcast(dims, [heads * words, words, 0, 0]);
            [batch, head]
        };
        (self.bits, self.shown, self.partly, self.across) = (bits.pointer, shown, partly, across);
        self.bits_strides = [batch, head, row];
        self.bits_word = word as i32;
        self.shown_strides = matrices(packed.row_tiles * packed.shown_row);
        self.across_strides = matrices(packed.across);
        self.shown_row = packed.shown_row as i32;
        self.across_row = key_tiles.div_ceil(32) as i32;
        Ok(())
    }
}

/// Returns strides, 0 for dimensions of 1.
fn broadcast(dims: [usize; 4], strides: [usize; 4]) -> [i64; 4] {
    [0, 1, 2, 3].map(|i| if dims[i] == 1 { 0 } else { strides[i] as i64 })
}

// The sizes of the kernels' parameters.
const _: () = assert!(size_of::<MaskArguments>() == 144);
const _: () = assert!(size_of::<PackArguments>() == 80);
