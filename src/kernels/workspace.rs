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

/// Returns the scratch of flash attention's forward, in words: the counter from which blocks draw their tiles.
pub(crate) fn flash_forward() -> usize {
    2 * ALIGNMENT_WORDS
}

/// Returns the scratch of flash attention's backward, in words: three statistics per query, the sums of dq, and the
/// turns in which blocks add to them.
pub(crate) fn flash_backward(sizes: &Sizes) -> usize {
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
    let parts = [
        rows.saturating_mul(3),
        rows.saturating_mul(most_columns),
        tiles.saturating_mul(2).saturating_add(1),
    ];
    // One alignment unit is added to each part, because the workspace may begin at any word.
    parts.iter().fold(0, |sum: usize, words| {
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

/// Returns the size, in bytes, of the tables of one update: an entry per parameter and a word per chunk. `parameters`
/// are element counts.
pub(crate) fn update_tables_bytes(parameters: impl Iterator<Item = usize>) -> usize {
    let words = parameters.map(|elements| UPDATE_WORDS + chunks(elements));
    words.sum::<usize>() * size_of::<u64>()
}

fn aligned(words: usize) -> usize {
    words
        .div_ceil(ALIGNMENT_WORDS)
        .saturating_mul(ALIGNMENT_WORDS)
}
