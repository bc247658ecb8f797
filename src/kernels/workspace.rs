//! The room that a GPU's kernels work in, known before there is a GPU: upper bounds, by shape alone.

use super::attention::Sizes;
use super::norm::Norm;
use candle_core::DType;

/// What cuBLASLt may work in, in bytes: what NVIDIA advises for Hopper; GPUs before it take less.
pub(crate) const PRODUCTS_BYTES: usize = 32 << 20;

/// The most blocks that [a norm's backward](norm_partials) is spread over, each with a row of each partial sum.
pub(crate) const NORM_BLOCKS: usize = 1024;

/// Positions that the embedding's backward finds room for by id.
pub(crate) const EMBEDDING_CAPACITY: usize = 32;

/// Positions of an id that a warp adds up by itself in the embedding's backward.
pub(crate) const EMBEDDING_FEW: usize = 8;

/// Elements of a block of AdamW's, and of the sums of squares.
pub(crate) const CHUNK: usize = 8192;

/// What pieces of a workspace begin at a multiple of, in words.
const ALIGNMENT_WORDS: usize = 64;

/// Partial sums of the gradients of a norm's weight and, if it has one, bias, f32.
pub(crate) fn norm_partials(norm: Norm, rows: usize, width: usize) -> usize {
    rows.min(NORM_BLOCKS) * norm.sums() * width
}

/// Parts that the rows are cut into, each summed by itself, for a bias's gradient.
pub(crate) fn bias_parts(rows: usize) -> usize {
    rows.div_ceil(128).clamp(1, 256)
}

/// Partial sums of a bias's gradient, f32.
pub(crate) fn bias_backward(rows: usize, width: usize) -> usize {
    bias_parts(rows) * width
}

/// Parts of a buffer that are summed by themselves, f64: what a GPU's sum works in.
pub(crate) fn sum_parts(elements: usize) -> usize {
    elements.div_ceil(8192).clamp(1, 1024)
}

/// What the embedding's backward sorts positions in, in words: how often each id was found (and two counters), the
/// positions by id, the ids with many, the positions of those with more than there is room for.
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

/// How many numbers flash attention keeps of a query's log-sum-exp, on any device: itself, and what rounding took from
/// it. Of half precision the first alone: probabilities are rounded to it, or their gradients.
pub(crate) fn flash_lse_parts(dtype: DType) -> usize {
    if dtype.size_in_bytes() < 4 { 1 } else { 2 }
}

/// Where flash attention's blocks draw their numbers, in words.
pub(crate) fn flash_forward() -> usize {
    2 * ALIGNMENT_WORDS
}

/// What flash attention's backward keeps for all of its blocks, in words: three statistics a query, dq's sums, and
/// whose turn it is to add to them.
pub(crate) fn flash_backward(sizes: &Sizes) -> usize {
    const MOST_QUERIES: usize = 128; // of a tile
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
    // One piece more of each, for a workspace that begins anywhere.
    parts.iter().fold(0, |sum: usize, words| {
        sum.saturating_add(aligned(*words))
            .saturating_add(ALIGNMENT_WORDS)
    })
}

/// What the scores of naive attention may take in f32, in bytes: a head of T 16,384, or several that together fill a
/// GPU as well.
const SCORES_BYTES: usize = 1 << 30;

/// In half precision, where they are read once and then kept otherwise: what a level-2 cache may hold until then.
const WIDE_SCORES_BYTES: usize = 32 << 20;

/// The heads (of k and v) whose scores, or their gradients, naive attention has on a GPU at once beside the
/// probabilities: as many as there is room for, and one at least. `of_head` is how many elements one has, `dtype` that
/// of q, k and v.
pub(crate) fn naive_heads_at_once(heads: usize, of_head: usize, dtype: DType) -> usize {
    let bytes = match dtype {
        DType::F32 => SCORES_BYTES,
        _ => WIDE_SCORES_BYTES,
    };
    let most = bytes / of_head.saturating_mul(size_of::<f32>()).max(1);
    let turns = heads.div_ceil(most.max(1));
    heads.div_ceil(turns.max(1))
}

/// Sums of squares of pieces of a gradient, f64.
pub(crate) fn chunks(elements: usize) -> usize {
    elements.div_ceil(CHUNK)
}

/// What AdamW's kernel knows of a parameter, in words of 8 bytes.
pub(crate) const UPDATE_WORDS: usize = 7;

/// The tables by which one launch updates parameters of so many elements each, in bytes: what is known of each, and a
/// word for each chunk.
pub(crate) fn update_tables_bytes(parameters: impl Iterator<Item = usize>) -> usize {
    let words = parameters.map(|elements| UPDATE_WORDS + chunks(elements));
    words.sum::<usize>() * size_of::<u64>()
}

fn aligned(words: usize) -> usize {
    words
        .div_ceil(ALIGNMENT_WORDS)
        .saturating_mul(ALIGNMENT_WORDS)
}
