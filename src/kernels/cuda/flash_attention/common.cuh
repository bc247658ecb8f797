// Helpers of all flash attention kernels: element types, tiles in shared memory, matrix instructions, copies. No
// #include: NVRTC compiles this text together with a kernel's.
//
// Compile-time settings, passed as -D options:
//   ELEMENT     bf16, f16 or f32: the type of q, k, v, out and their gradients; sums are f32
//   HEAD_DIM    16, 32, 64, 96, 128 or 256: the smallest that holds the call's head dimensions, Dh and Dv. The columns
//               beyond them are zeros in shared memory, so they add nothing
//   FIRST_KEYS  1 if the call has first keys in addition to the mask (packed documents) or a window, else 0
//   DROPOUT     1 if probabilities are dropped, else 0
//   SOFT_CAP    1 if scores are capped, else 0
// and the tile sizes of the kernels; each has a default by HEAD_DIM.

typedef unsigned int u32;
typedef unsigned long long u64;

#ifndef ELEMENT
#define ELEMENT bf16
#endif
#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
#ifndef FIRST_KEYS
#define FIRST_KEYS 0
#endif
#ifndef DROPOUT
#define DROPOUT 0
#endif
#ifndef SOFT_CAP
#define SOFT_CAP 0
#endif
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define CEIL_DIV(a, b) (((a) + (b) - 1) / (b))

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;
// The rounding errors of these constants.
constexpr float LOG2_E_REST = 1.9259629911e-8f, LN_2_REST = -1.9046542999e-9f;
#define INFINITE __int_as_float(0x7f800000)

// ---- element types; two of 16 bits share a register, the first in the lower half

struct bf16 {
    unsigned short bits;
    static __device__ __forceinline__ u32 pack(float first, float second) {
        u32 pair;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
        return pair;
    }
    static __device__ __forceinline__ void unpack(u32 pair, float& first, float& second) {
        first = __uint_as_float(pair << 16);
        second = __uint_as_float(pair & 0xffff0000u);
    }
    // c (16, 8) += a (16, 16) b (16, 8)
    static __device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

struct f16 {
    unsigned short bits;
    static __device__ __forceinline__ u32 pack(float first, float second) {
        u32 pair;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
        return pair;
    }
    static __device__ __forceinline__ void unpack(u32 pair, float& first, float& second) {
        asm("{.reg .b16 lo, hi; mov.b32 {lo, hi}, %2; cvt.f32.f16 %0, lo; cvt.f32.f16 %1, hi;}"
            : "=f"(first), "=f"(second)
            : "r"(pair));
    }
    static __device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

struct f32 {
    float value;
    static __device__ __forceinline__ void unpack(u32 word, float& value, float& none) {
        value = __uint_as_float(word);
        none = 0;
    }
};
typedef ELEMENT E;

constexpr int CHUNK = 16 / sizeof(E);    // elements in 16 bytes, which one copy instruction moves
constexpr int CHUNKS = HEAD_DIM / CHUNK; // per row
constexpr int ROW_BYTES = HEAD_DIM * sizeof(E);

__device__ __forceinline__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float logarithm_2(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ---- tiles in shared memory: rows of 16-byte chunks; the order of a row's chunks depends on its number

// A warp reads eight rows of one chunk column at a time. The permutation puts them into eight different groups of
// banks. Rows are a multiple of 128 bytes (xor with row % 8), of 64 (row / 2 % 4) or 32 bytes (row / 4 % 2).
template <int BYTES> struct Swizzle {
    static constexpr int MASK = BYTES % 128 == 0 ? 7 : BYTES % 64 == 0 ? 3 : 1;
    static constexpr int SHIFT = BYTES % 128 == 0 ? 0 : BYTES % 64 == 0 ? 1 : 2;
    // The permutation of a row's chunks.
    static __device__ __forceinline__ int of(int row) { return (row >> SHIFT) & MASK; }
    // The offset of a chunk in the tile, in bytes.
    static __device__ __forceinline__ u32 at(int row, int chunk) { return row * BYTES + ((chunk ^ of(row)) << 4); }
};

// The addresses from which a lane reads 16 x 16 blocks of a tile by ldmatrix. `row` and `column` of a block are
// multiples of 16 known at compile time, so that only one xor remains at run time.
//   BY_ROWS      matrices at (rows 0-7, left), (8-15, left), (0-7, right), (8-15, right): an A operand; transposed, a B
//   BY_COLUMNS   matrices at (rows 0-7, left), (0-7, right), (8-15, left), (8-15, right): a B operand stored (n, k);
//                transposed, an A operand stored (k, m)
enum Order { BY_ROWS, BY_COLUMNS };
template <int BYTES, Order ORDER> struct Blocks {
    u32 base, permuted;
    __device__ __forceinline__ Blocks(u32 tile, int first_row, int lane) {
        int row = ORDER == BY_ROWS ? lane & 15 : (lane & 7) + (lane >> 4) * 8;
        int right = ORDER == BY_ROWS ? lane >> 4 : (lane >> 3) & 1;
        base = tile + (first_row + row) * BYTES;
        permuted = (right ^ Swizzle<BYTES>::of(row)) << 4;
    }
    // The same blocks with columns counted from `column`, a run-time multiple of 16. It must be below the next power of
    // two of every column that is passed to `at`.
    __device__ __forceinline__ Blocks from_column(int column) const {
        constexpr int LOW = Swizzle<BYTES>::MASK << 4;
        Blocks moved = *this;
        moved.permuted ^= column * 2 & LOW;
        moved.base += column * 2 & ~LOW;
        return moved;
    }
    __device__ __forceinline__ u32 at(int row, int column, u32 stage = 0) const {
        constexpr int LOW = Swizzle<BYTES>::MASK << 4;
        int byte = column * 2;
        return base + stage + (permuted ^ (byte & LOW)) + row * BYTES + (byte & ~LOW);
    }
};

__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}
__device__ __forceinline__ void load_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}
__device__ __forceinline__ void store_shared(u32 address, u32 value) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
__device__ __forceinline__ uint4 read_shared(u32 address) {
    uint4 r;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "r"(address)
                 : "memory");
    return r;
}
__device__ __forceinline__ float4 read_shared_floats(u32 address) {
    float4 r;
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w)
                 : "r"(address)
                 : "memory");
    return r;
}

// ---- exchanges between lanes

// Transposes a 4 x 4 matrix over four adjacent lanes. Each lane holds a column; lane i gets row i.
__device__ __forceinline__ void exchange(u32 (&x)[4], int lane) {
    const bool odd = lane & 1, upper = lane & 2;
    // Transposes within 2 x 2 blocks, then swaps the blocks.
    const u32 a = __shfl_xor_sync(~0u, odd ? x[0] : x[1], 1), b = __shfl_xor_sync(~0u, odd ? x[2] : x[3], 1);
    if (odd) x[0] = a, x[2] = b;
    else x[1] = a, x[3] = b;
    const u32 c = __shfl_xor_sync(~0u, upper ? x[0] : x[2], 2), d = __shfl_xor_sync(~0u, upper ? x[1] : x[3], 2);
    if (upper) x[0] = c, x[1] = d;
    else x[2] = c, x[3] = d;
}

// Transposes an 8 x 8 matrix of 16-bit elements, of which each lane has a pair: row lane / 4, columns 2 (lane % 4) and
// the next.
__device__ __forceinline__ u32 transposed(u32 pair) {
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(pair));
    return pair;
}

// ---- copies that run concurrently with arithmetic

// Copies 16 bytes, or writes 16 zero bytes without reading `source`.
__device__ __forceinline__ void copy_chunk(u32 target, const void* source, bool inside) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
                 "r"(inside ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void wait_groups() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// LANES threads copy a row, GROUPS chunks each: a power of two, so that the permutation keeps their chunks together.
constexpr int LANES = CHUNKS & -CHUNKS;
constexpr int GROUPS = CHUNKS / LANES;

// Starts to copy LENGTH rows of `x` (`stride` elements apart) into `tile`. Rows from `rows` on and columns from
// `columns` on (a multiple of CHUNK) become zeros. LAYOUT maps a chunk to its offset.
template <int LENGTH, int THREADS, typename LAYOUT = Swizzle<ROW_BYTES>>
__device__ __forceinline__ void copy_tile(u32 tile, const E* x, long long stride, int rows, int columns) {
    constexpr int PASS = THREADS / LANES; // rows per pass
    const int first = threadIdx.x / LANES, chunk = threadIdx.x % LANES;
    const char* source = reinterpret_cast<const char*>(x + first * stride + chunk * CHUNK);
    long long step = PASS * stride * sizeof(E);
    asm volatile("" : "+l"(step)); // otherwise multiples of it would stay in registers from tile to tile
#pragma unroll
    for (int i = 0; i < CEIL_DIV(LENGTH, PASS); i++) {
        const int row = first + i * PASS;
        if (LENGTH % PASS != 0 && row >= LENGTH) break;
#pragma unroll
        for (int group = 0; group < GROUPS; group++)
            copy_chunk(tile + LAYOUT::at(row, chunk) + group * LANES * 16, source + group * LANES * 16,
                       row < rows && (chunk + group * LANES) * CHUNK < columns);
        source += step;
    }
}

// Writes rows first..first + LENGTH of `tile` to `x` by THREADS threads. Row 0 of `x` is row 0 of the tile.
template <int LENGTH, int THREADS> __device__ __forceinline__ void write_tile(E* x, long long stride, u32 tile,
                                                                              int first, int rows, int columns,
                                                                              int thread) {
#pragma unroll
    for (int i = 0; i < CEIL_DIV(LENGTH * CHUNKS, THREADS); i++) {
        const int index = thread + i * THREADS;
        const int row = first + index / CHUNKS, chunk = index % CHUNKS;
        if (index < LENGTH * CHUNKS && row < rows && chunk * CHUNK < columns)
            *reinterpret_cast<uint4*>(x + row * stride + chunk * CHUNK) =
                read_shared(tile + Swizzle<ROW_BYTES>::at(row, chunk));
    }
}

// The strides of a tensor (B, heads, T, D). D is contiguous; all strides are multiples of CHUNK.
struct Strides {
    long long batch, head, row; // elements
};

// The sizes of a call.
struct Sizes {
    int batch, heads, kv_heads; // B, H, Hkv; Hkv divides H
    int queries, keys;          // Tq, Tk
    int head_dim, value_dim;    // Dh of q and k, Dv of v and out: multiples of CHUNK, at most HEAD_DIM
    // Query i attends to the keys j <= i + offset: 0 for causal, Tk - Tq for causal aligned at the end, Tk for full.
    int offset;
    // The heads of concurrent blocks: as many as fit in the level-2 cache with their keys and values.
    int heads_at_once;
    float scale; // > 0
    int window;  // the number of keys that a query attends to, up to its own; 0 means all
    float cap;   // > 0; the soft cap, with SOFT_CAP
};

// ---- scores: q k^T, or with SOFT_CAP tanh(scale q k^T / cap)

// The factor of a score in the exponent of its power of 2.
__device__ __forceinline__ float exponent_of_score(const Sizes& sizes) {
    return (SOFT_CAP ? sizes.cap : sizes.scale) * LOG2_E;
}

// tanh(x). In half precision 1 - 2 / (e^2x + 1), but for small x, where that cancels, its series, to 1e-7 of it.
__device__ __forceinline__ float cap_tanh(float x) {
    if (sizeof(E) != 2) return tanhf(x);
    const float square = x * x;
    const float series = x * (1 - square * (1 / 3.f - square * (2 / 15.f)));
    return square < 0.01f ? series : 1 - __fdividef(2, power_of_2(x * (2 * LOG2_E)) + 1);
}

// Overwrites q k^T with scores.
template <int N> __device__ __forceinline__ void cap_scores(float (&s)[N], const Sizes& sizes) {
    const float by = sizes.scale / sizes.cap;
#pragma unroll
    for (int i = 0; i < N; i++) s[i] = cap_tanh(s[i] * by);
}

// The derivative of the cap at a score; 0 for a masked key, whose score is -inf.
__device__ __forceinline__ float cap_slope(float score) {
    score = fmaxf(score, -1.f);
    return fmaf(-score, score, 1.f);
}

// A score from its probability p = 2^(score exponent_of_score - lse), with an error of about 1e-6 / cap.
__device__ __forceinline__ float score_of(float p, float lse, const Sizes& sizes) {
    return (logarithm_2(p) + lse) / (sizes.cap * LOG2_E);
}

// The dropout of the probabilities; `key` is null without DROPOUT. See dropped.cuh.
struct DropoutArguments {
    const u32* key; // (4): seed, seed >> 32, step, micro-batch
    u32 site, threshold;
    float scale; // 1 without DROPOUT
    u32 unused;
};

// The first keys (B, Tq) of one sequence, and those of a window: query i attends to no key before its first key. First
// keys never decrease. Without FIRST_KEYS each is 0.
struct FirstKeys {
    const u32* of_queries; // may be null if there is a window
    int queries, window;
    FirstKeys() = default;
    __device__ __forceinline__ FirstKeys(const u32* of_all, const Sizes& sizes, int batch)
        : of_queries(of_all ? of_all + (long long)batch * sizes.queries : nullptr),
          queries(sizes.queries),
          window(sizes.window) {}
    // The first key of a query; for queries after the last, that of the last.
    __device__ __forceinline__ int of(int query) const {
        if (!FIRST_KEYS) return 0;
        query = min(query, queries - 1);
        const int first = of_queries ? min(__ldg(of_queries + query), 0x7fffffffu) : 0;
        return window ? max(first, query + 1 - window) : first;
    }
    // The first query, from `query` on, with a first key after `key`; the number of queries if there is none.
    __device__ __forceinline__ int first_beyond(int key, int query) const {
        for (int end = queries; query < end;) {
            const int middle = query + (end - query) / 2;
            if (of(middle) <= key) query = middle + 1;
            else end = middle;
        }
        return query;
    }
};

// The head (of the batch) and the tile of ticket number `ticket`. Groups of `at_once` heads follow each other. Within a
// group, all heads of a tile come before the next tile.
__device__ __forceinline__ void locate_ticket(int ticket, int heads, int tiles, int at_once, int& head, int& tile) {
    int group = ticket / (at_once * tiles);
    int members = min(at_once, heads - group * at_once);
    int within = ticket - group * at_once * tiles;
    head = group * at_once + within % members;
    tile = within / members;
}
