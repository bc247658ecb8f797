// Key masks and biases in tensors (B, H, Tq, Tk), where each dimension may be 1. Included after common.cuh.
//
//   KEY_MASK  1 if the call has a key mask, else 0. mask.cu has packed it: bits of pairs, and flags of tiles
//   BIAS      1 if the call has a bias, else 0: added to the scaled and capped scores; -inf hides a pair
//   TERM      the type of its elements: f32, or ELEMENT
//
// Bits and flags have rows: queries in forward, keys in backward. The other dimension is along the bits of a word.

#ifndef KEY_MASK
#define KEY_MASK 0
#endif
#ifndef BIAS
#define BIAS 0
#endif
#ifndef TERM
#define TERM f32
#endif
typedef TERM Term;

struct MaskArguments {
    const u32* bits;   // 1 for visible pairs: (matrices, rows, bits_words), or null without KEY_MASK
    const u32* shown;  // 1 for tiles with a visible pair: (matrices, row tiles, ceil(column tiles / 32))
    const u32* partly; // 1 for tiles with a hidden pair, likewise
    const u32* across; // `shown` with queries as rows, for backward
    const Term* bias;  // or null without BIAS
    // Strides in elements, 0 where a dimension is repeated.
    long long bits_batch, bits_head, bits_row;
    long long shown_batch, shown_head, across_batch, across_head;
    long long bias_batch, bias_head, bias_row;
    int bits_word, shown_row, across_row;
    int bias_column;
    int bias_vectors; // whether rows of keys are multiples of a vector, and aligned to it: 8 bytes of f32, else 16
    u32 unused;
};

// ---- sets of tiles, in words of 32

// The first tile of a set from `tile` on; `end` if there is none.
__device__ __forceinline__ int next_tile_of(const u32* set, int tile, int end) {
    if (tile >= end) return end;
    int word = tile / 32;
    u32 x = __ldg(set + word) & ~0u << tile % 32;
    while (!x && (word + 1) * 32 < end) x = __ldg(set + ++word);
    return x ? min(end, word * 32 + __ffs(x) - 1) : end;
}

// The last tile of a set up to `tile`; first - 1 if there is none from `first` on.
__device__ __forceinline__ int last_tile_of(const u32* set, int tile, int first) {
    if (tile < first) return first - 1;
    int word = tile / 32;
    u32 x = __ldg(set + word) & ~0u >> (31 - tile % 32);
    while (!x && word * 32 > first) x = __ldg(set + --word);
    return x ? max(first - 1, word * 32 + 31 - __clz(x)) : first - 1;
}

// The number of tiles of a set in first .. end.
__device__ __forceinline__ int count_tiles_of(const u32* set, int first, int end) {
    int count = 0;
    for (int word = first / 32; word * 32 < end; word++) {
        u32 x = __ldg(set + word);
        if (word == first / 32) x &= ~0u << first % 32;
        if (end - word * 32 < 32) x &= (1u << (end - word * 32)) - 1;
        count += __popc(x);
    }
    return count;
}

// ---- the mask of one head

struct HeadMask {
    const u32 *bits, *shown, *partly;
    long long bits_row;
    int bits_word, shown_row, rows;
    HeadMask() = default;
    // `rows` is the number of queries (in backward of keys).
    __device__ __forceinline__ HeadMask(const MaskArguments& masks, int rows, int batch, int head) : rows(rows) {
        if (!KEY_MASK) return;
        bits = masks.bits + batch * masks.bits_batch + head * masks.bits_head;
        const long long tiles = batch * masks.shown_batch + head * masks.shown_head;
        shown = masks.shown + tiles, partly = masks.partly + tiles;
        bits_row = masks.bits_row, bits_word = masks.bits_word, shown_row = masks.shown_row;
    }
    // The tiles with a visible pair, in a row of tiles.
    __device__ __forceinline__ const u32* tiles(int row_tile) const { return shown + (long long)row_tile * shown_row; }
    // Whether a tile has a hidden pair.
    __device__ __forceinline__ bool is_partial(int row_tile, int tile) const {
        return __ldg(partly + (long long)row_tile * shown_row + tile / 32) >> tile % 32 & 1;
    }
    // The bits of a row from `column` on, a multiple of 16: up to the next multiple of 32.
    __device__ __forceinline__ u32 word(int row, int column) const {
        return __ldg(bits + min(row, rows - 1) * bits_row + column / 32 * bits_word) >> column % 32;
    }
};

// Hides pairs of N blocks of 16 x 8 results: `at(n, i)` is a lane's element i of block n. `row` is that of its first
// two elements, `column` the first of the blocks.
template <int N, typename AT>
__device__ __forceinline__ void hide_pairs(AT at, const HeadMask& mask, int row, int column, int lane) {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int word = 0; word < CEIL_DIV(N, 4); word++) {
            const u32 bits = mask.word(row + half * 8, column + word * 32) >> lane % 4 * 2;
#pragma unroll
            for (int n = word * 4; n < min(N, word * 4 + 4); n++)
#pragma unroll
                for (int odd = 0; odd < 2; odd++)
                    if (!(bits >> (n % 4 * 8 + odd) & 1)) at(n, half * 2 + odd) = -INFINITE;
        }
}

// ---- the bias of one head

struct HeadBias {
    const Term* of_head;
    long long row;
    int column, queries, keys;
    bool vectors;
    float factor; // from terms to scores
    HeadBias() = default;
    __device__ __forceinline__ HeadBias(const MaskArguments& masks, const Sizes& sizes, int batch, int head) {
        if (!BIAS) return;
        of_head = masks.bias + batch * masks.bias_batch + head * masks.bias_head;
        row = masks.bias_row, column = masks.bias_column, vectors = masks.bias_vectors;
        queries = sizes.queries, keys = sizes.keys;
        factor = 1 / (SOFT_CAP ? sizes.cap : sizes.scale);
    }
    __device__ __forceinline__ float at(int query, int key) const {
        const Term* term = of_head + min(query, queries - 1) * row + min(key, keys - 1) * column;
        if (sizeof(Term) == 4) return __ldg(reinterpret_cast<const float*>(term));
        float first, second;
        Term::unpack(__ldg(reinterpret_cast<const unsigned short*>(term)), first, second);
        return first;
    }
    // Eight terms of 16 bits of one query, from a multiple of 8 keys on. Beyond the last query or key they are others.
    __device__ __forceinline__ uint4 eight(int query, int key) const {
        return __ldg(reinterpret_cast<const uint4*>(of_head + min(query, queries - 1) * row + min(key, keys - 8)));
    }
    // A score with its term; -inf for a hidden pair, even if the score is NaN.
    __device__ __forceinline__ float add(float score, float term) const {
        return fminf(score, term) == -INFINITE ? -INFINITE : fmaf(term, factor, score);
    }
};

// Adds terms to N blocks of scores (queries, keys), as in hide_pairs.
//
// Of terms of 16 bits, the four lanes of a row read eight keys of four blocks each and exchange them.
template <int N, typename AT>
__device__ __forceinline__ void add_bias(AT at, const HeadBias& bias, int query, int key, int lane) {
    const int my_key = key + lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (sizeof(Term) == 2 && N % 4 == 0 && bias.vectors) {
#pragma unroll
            for (int n = 0; n < N; n += 4) {
                const uint4 terms = bias.eight(query + half * 8, key + (n + lane % 4) * 8);
                u32 pairs[4] = {terms.x, terms.y, terms.z, terms.w};
                exchange(pairs, lane);
#pragma unroll
                for (int i = 0; i < 4 && n + i < N; i++) {
                    float first, second;
                    Term::unpack(pairs[i], first, second);
                    at(n + i, half * 2) = bias.add(at(n + i, half * 2), first);
                    at(n + i, half * 2 + 1) = bias.add(at(n + i, half * 2 + 1), second);
                }
            }
        } else if (sizeof(Term) == 4 && bias.vectors && key + N * 8 <= bias.keys) {
            const float* row = reinterpret_cast<const float*>(bias.of_head) +
                               min(query + half * 8, bias.queries - 1) * bias.row + my_key;
#pragma unroll
            for (int n = 0; n < N; n++) {
                const float2 terms = __ldg(reinterpret_cast<const float2*>(row + n * 8));
                at(n, half * 2) = bias.add(at(n, half * 2), terms.x);
                at(n, half * 2 + 1) = bias.add(at(n, half * 2 + 1), terms.y);
            }
        } else {
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int odd = 0; odd < 2; odd++) {
                    float& score = at(n, half * 2 + odd);
                    score = bias.add(score, bias.at(query + half * 8, my_key + n * 8 + odd));
                }
        }
    }
}

// Adds terms to N blocks of scores (keys, queries), 16 keys of each: `at(n, i)` is a lane's element i of block n, whose
// queries are the eight from 8 n on. `query` and `key` are the first of all.
//
// Of terms of 16 bits, a lane reads eight keys of one query: lane 4 r + j those of query r, or r + 8 if j > 1, from
// key j % 2 * 8 on. The exchange gives each lane pairs of keys, the transpose pairs of queries.
template <int N, typename AT>
__device__ __forceinline__ void add_bias_by_keys(AT at, const HeadBias& bias, int query, int key, int lane) {
    if (sizeof(Term) == 2 && N % 2 == 0 && bias.vectors) {
        constexpr int SOME = N % 8 == 0 ? 8 : 2; // blocks whose loads are in flight together
#pragma unroll
        for (int first = 0; first < N; first += SOME) {
            uint4 terms[SOME / 2];
#pragma unroll
            for (int i = 0; i < SOME / 2; i++)
                terms[i] = bias.eight(query + (first + i * 2 + lane % 4 / 2) * 8 + lane / 4, key + lane % 2 * 8);
#pragma unroll
            for (int i = 0; i < SOME / 2; i++) {
                u32 pairs[4] = {terms[i].x, terms[i].y, terms[i].z, terms[i].w};
                exchange(pairs, lane);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const int n = first + i * 2 + j / 2, half = j % 2;
                    float even, odd;
                    Term::unpack(transposed(pairs[j]), even, odd);
                    at(n, half * 2) = bias.add(at(n, half * 2), even);
                    at(n, half * 2 + 1) = bias.add(at(n, half * 2 + 1), odd);
                }
            }
            asm volatile("" ::: "memory"); // otherwise all loads would be in flight together
        }
    } else {
        constexpr int SOME = N % 4 == 0 ? 4 : 1;
#pragma unroll
        for (int first = 0; first < N; first += SOME) {
            float terms[SOME * 4];
#pragma unroll
            for (int i = 0; i < SOME * 4; i++)
                terms[i] = bias.at(query + (first + i / 4) * 8 + lane % 4 * 2 + i % 2, key + lane / 4 + i / 2 % 2 * 8);
#pragma unroll
            for (int i = 0; i < SOME * 4; i++) at(first + i / 4, i % 4) = bias.add(at(first + i / 4, i % 4), terms[i]);
            asm volatile("" ::: "memory");
        }
    }
}
