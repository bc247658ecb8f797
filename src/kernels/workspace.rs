//! Scratch sizes of CUDA kernels: upper bounds that depend on shapes only, available without a GPU.

use super::attention::Sizes;
use super::norm::Norm;
use candle_core::DType;

/// The workspace of cuBLASLt, in bytes: NVIDIA's recommendation for Hopper. Older GPUs need less.
pub(crate) const CUBLASLT_WORKSPACE_BYTES: usize = 32 << 20;

/// The most blocks of a [norm's backward](norm_partials). Each block writes a row of each partial sum.
pub(crate) const NORM_BLOCKS: usize = 1024;

/// Positions per id in the buckets of the embedding's backward.
pub(crate) const EMBEDDING_CAPACITY: usize = 32;

/// The most positions of an id that one warp sums in the embedding's backward.
pub(crate) const EMBEDDING_FEW: usize = 8;

/// Elements per block of AdamW and of the sums of squares.
pub(crate) const CHUNK: usize = 8192;

/// The alignment of the parts of a workspace, in words.
const ALIGNMENT_WORDS: usize = 64;

/// Returns the number of partial sums, f32, of a norm's backward: gradients of the weight and, for LayerNorm, the bias.
pub(crate) fn norm_partials(norm: Norm, rows: usize, width: usize) -> usize {
    rows.min(NORM_BLOCKS) * norm.sums() * width
}

/// Returns the number of parts into which the rows are split for a bias's gradient. Each part is summed separately.
pub(crate) fn bias_parts(rows: usize) -> usize {
    rows.div_ceil(128).clamp(1, 256)
}

/// Returns the number of partial sums, f32, of a bias's gradient.
pub(crate) fn bias_backward(rows: usize, width: usize) -> usize {
    bias_parts(rows) * width
}

/// Returns the number of chunks into which sums along n of (outer, n, inner) are divided, so that few sums of many
/// elements occupy a device. Each chunk is summed separately, in f64.
pub(crate) fn sum_chunks([outer, n, inner]: [usize; 3]) -> usize {
    const BLOCKS: usize = 1024;
    let (blocks, fewest) = match inner {
        0 | 1 => (outer, 8192),
        _ => (outer.saturating_mul(inner.div_ceil(32)), 256), // a block sums 32 columns
    };
    (BLOCKS / blocks.max(1)).clamp(1, n.div_ceil(fewest).max(1))
}

/// Returns the lengths, in words, of the four buffers of the embedding's backward: the count of each id and two
/// counters, the buckets of positions by id, the ids with more than [`EMBEDDING_FEW`] positions, and the positions of
/// ids that exceed [`EMBEDDING_CAPACITY`].
pub(crate) fn embedding_backward(count: usize, vocab_size: usize) -> [usize; 4] {
    let buckets = vocab_size * EMBEDDING_CAPACITY;
    [
        vocab_size + 2,
        buckets,
        count.div_ceil(EMBEDDING_FEW),
        count,
    ]
    .map(aligned)
}

/// Returns the number of f32 values that flash attention saves per query for the log-sum-exp, on any device. In f32
/// there are two: the log-sum-exp and its rounding error. In half precision there is one, since the probabilities and
/// their gradients are rounded to half precision anyway.
pub(crate) fn flash_lse_parts(dtype: DType) -> usize {
    if dtype.size_in_bytes() < 4 { 1 } else { 2 }
}

/// The counters with which blocks of flash attention's forward draw their tiles.
pub(crate) const FORWARD_TICKETS: usize = 2;

/// Queries per tile of the gradient of a bias of flash attention.
pub(crate) const BIAS_GRADIENT_QUERIES: usize = 64;

/// The dimension of a key mask that is along the rows of its packed form; the other is along the bits of words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MaskRows {
    /// In forward, and for the gradient of a bias.
    Queries,
    /// In backward, which also has flags with queries as rows.
    Keys,
}

/// A packed key mask: a bit for each pair, and flags of tiles. A dimension of 1 stays 1 in the bits, but not in the
/// flags.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PackedMask {
    /// The product of the dimensions of batch and heads.
    pub matrices: usize,
    /// Rows of bits per matrix.
    rows: usize,
    /// Words per row of bits.
    pub bits_row: usize,
    /// Rows of tiles per matrix.
    pub row_tiles: usize,
    /// Words per row of tiles.
    pub shown_row: usize,
    /// Words per matrix of the flags with queries as rows, in backward.
    pub across: usize,
}

impl PackedMask {
    /// Returns the layout of a mask of these dimensions, for tiles of queries and keys.
    pub(crate) fn new(
        sizes: &Sizes,
        [batches, heads, queries, keys]: [usize; 4],
        [tile_queries, tile_keys]: [usize; 2],
        rows: MaskRows,
    ) -> Self {
        const WIDEST: usize = 128; // the most columns of a tile, which are read together
        let [query_tiles, key_tiles] = [
            sizes.queries.div_ceil(tile_queries),
            sizes.keys.div_ceil(tile_keys),
        ];
        let across = query_tiles * key_tiles.div_ceil(32);
        let (rows, columns, [row_tiles, column_tiles], across) = match rows {
            MaskRows::Queries => (queries, keys, [query_tiles, key_tiles], 0),
            MaskRows::Keys => (keys, queries, [key_tiles, query_tiles], across),
        };
        Self {
            matrices: batches * heads,
            rows,
            bits_row: match columns {
                1 => 1,
                _ => columns.next_multiple_of(WIDEST) / 32,
            },
            row_tiles,
            shown_row: column_tiles.div_ceil(32),
            across,
        }
    }

    /// Returns the words of the bits.
    pub(crate) fn bits(&self) -> usize {
        self.matrices * self.rows * self.bits_row
    }

    /// Returns the words of one set of flags.
    pub(crate) fn shown(&self) -> usize {
        self.matrices * self.row_tiles * self.shown_row
    }

    /// Returns the words of all flags: of tiles with a visible pair, of tiles with a hidden pair, and the former with
    /// queries as rows.
    pub(crate) fn flags(&self) -> usize {
        2 * self.shown() + self.matrices * self.across
    }

    /// Returns an upper bound of the words of bits and flags, for tiles of any kernel.
    fn bound(sizes: &Sizes, dims: Option<[usize; 4]>, rows: MaskRows) -> [usize; 2] {
        const SMALLEST: usize = 32;
        dims.map_or([0, 0], |dims| {
            let packed = Self::new(sizes, dims, [SMALLEST; 2], rows);
            [packed.bits(), packed.flags()]
        })
    }
}

/// Returns the scratch of flash attention's forward, in words: the counters from which blocks draw their tiles, and the
/// packed key mask, whose dimensions are `visible`.
pub(crate) fn flash_forward(sizes: &Sizes, visible: Option<[usize; 4]>) -> usize {
    let [bits, flags] = PackedMask::bound(sizes, visible, MaskRows::Queries);
    with_alignment(&[FORWARD_TICKETS, bits, flags])
}

/// Returns the words of the statistics and turns of the gradient of a bias.
pub(crate) fn bias_gradient_statistics(sizes: &Sizes) -> [usize; 2] {
    let tiles = sizes.queries.div_ceil(BIAS_GRADIENT_QUERIES);
    let tiles = sizes.matrices().saturating_mul(tiles);
    let statistics = tiles.saturating_mul(3 * BIAS_GRADIENT_QUERIES);
    [statistics, tiles.saturating_mul(2).saturating_add(1)]
}

/// Returns the scratch of the gradient of a bias of flash attention, in words: three statistics per query, turns that
/// nobody takes, and the packed key mask.
pub(crate) fn flash_bias_gradient(sizes: &Sizes, visible: Option<[usize; 4]>) -> usize {
    let [statistics, turns] = bias_gradient_statistics(sizes);
    let [bits, flags] = PackedMask::bound(sizes, visible, MaskRows::Queries);
    with_alignment(&[statistics, turns, bits, flags])
}

/// Returns the scratch of flash attention's backward, in words: three statistics per query, the sums of dq, the turns
/// in which blocks add to them, and the packed key mask.
pub(crate) fn flash_backward(sizes: &Sizes, visible: Option<[usize; 4]>) -> usize {
    const MOST_QUERIES: usize = 128; // queries per tile
    const FEWEST_QUERIES: usize = 32;
    let heads = sizes.batch.saturating_mul(sizes.heads);
    let whole_tiles = sizes.queries.div_ceil(MOST_QUERIES);
    let rows = heads
        .saturating_mul(whole_tiles)
        .saturating_mul(MOST_QUERIES);
    let tiles = heads.saturating_mul(sizes.queries.div_ceil(FEWEST_QUERIES));
    let most_columns = match sizes.head_dim {
        0..=128 => sizes.head_dim.next_multiple_of(32),
        _ => 256,
    };
    let [bits, flags] = PackedMask::bound(sizes, visible, MaskRows::Keys);
    with_alignment(&[
        rows.saturating_mul(3),
        rows.saturating_mul(most_columns),
        tiles.saturating_mul(2).saturating_add(1),
        bits,
        flags,
    ])
}

/// Returns the words of a workspace of these parts. One alignment unit is added to each part that is not empty, because
/// the workspace may begin at any word.
fn with_alignment(parts: &[usize]) -> usize {
    let parts = parts.iter().filter(|words| **words > 0);
    parts.fold(0, |sum: usize, words| {
        sum.saturating_add(aligned(*words))
            .saturating_add(ALIGNMENT_WORDS)
    })
}

/// The bound of naive attention's scores in f32, in bytes: one head of T 16,384, or more heads that fill a GPU as well.
const SCORES_BYTES: usize = 1 << 30;

/// The bound of the f32 scores in half precision, in bytes. They are read once and then saved in half precision, so a
/// level-2 cache should hold them until then.
const WIDE_SCORES_BYTES: usize = 32 << 20;

/// Returns how many heads of k and v naive attention computes together on a GPU, at least one. It bounds the memory of
/// their scores, or of the scores' gradients, in addition to the probabilities. `scores_per_head` is the number of
/// scores of a head; `dtype` is that of q, k and v.
pub(crate) fn naive_heads_per_pass(heads: usize, scores_per_head: usize, dtype: DType) -> usize {
    let bytes = match dtype {
        DType::F32 => SCORES_BYTES,
        _ => WIDE_SCORES_BYTES,
    };
    let most = bytes / scores_per_head.saturating_mul(size_of::<f32>()).max(1);
    let turns = heads.div_ceil(most.max(1));
    heads.div_ceil(turns.max(1))
}

/// Returns the number of chunks of a gradient; each has a sum of squares in f64.
pub(crate) fn chunks(elements: usize) -> usize {
    elements.div_ceil(CHUNK)
}

/// The size of the AdamW kernel's entry for a parameter, in words of 8 bytes.
pub(crate) const UPDATE_WORDS: usize = 7;

/// Returns the size, in bytes, of the tables of one update, with an entry for each parameter that is updated, each
/// direction of Muon and each gradient that is checked, and a word per chunk. `entries` are element counts.
pub(crate) fn update_tables_bytes(entries: impl Iterator<Item = usize>) -> usize {
    let words = entries.map(|elements| UPDATE_WORDS + chunks(elements));
    words.sum::<usize>() * size_of::<u64>()
}

fn aligned(words: usize) -> usize {
    words
        .div_ceil(ALIGNMENT_WORDS)
        .saturating_mul(ALIGNMENT_WORDS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::Mask;

    /// The planned scratch holds the packed mask of every kernel, whatever its tiles.
    #[test]
    fn a_packed_mask_fits_for_all_tiles() {
        for (queries, keys) in [(1, 1), (31, 700), (33, 129), (257, 64), (2100, 5000)] {
            let sizes = Sizes {
                batch: 2,
                heads: 3,
                kv_heads: 3,
                queries,
                keys,
                head_dim: 64,
                value_dim: 64,
                mask: Mask::Full,
                scale: 1.0,
                soft_cap: None,
            };
            for which in 0..16 {
                let full = [2, 3, queries, keys];
                let dims = [0, 1, 2, 3].map(|i| if which >> i & 1 == 1 { full[i] } else { 1 });
                for rows in [MaskRows::Queries, MaskRows::Keys] {
                    let [bits, flags] = PackedMask::bound(&sizes, Some(dims), rows);
                    for tile in [[32, 64], [64, 32], [128, 128], [192, 128], [256, 64]] {
                        let packed = PackedMask::new(&sizes, dims, tile, rows);
                        assert!(packed.bits() <= bits, "{sizes:?} {dims:?} {tile:?}");
                        assert!(packed.flags() <= flags, "{sizes:?} {dims:?} {tile:?}");
                    }
                }
            }
        }
    }
}
