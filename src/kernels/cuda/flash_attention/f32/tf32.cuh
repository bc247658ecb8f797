// Tiles of f32 in shared memory, and their matmuls on tensor cores in TF32, which has the range of f32 and 11
// significant bits. Included after common.cuh, with ELEMENT=f32.
//
//   TF32_MATMULS  1: each operand is rounded to TF32 once. The threads that copied Q, K, V and dO round them; P and dS are
//                rounded where they are computed
//             3: each operand is the sum of two TF32, high and low, and a matmul is three: low high + high low + high
//                high. Its error is 2^-24 of the product as a rule, 2^-21 at most. (PyTorch's memory-efficient
//                attention multiplies f32 the same way.) An infinite operand, or one within 2^-12 of f32's largest,
//                gives NaN
//
// Tensor cores truncate sums instead of rounding them. Therefore they sum at most one tile, and with three matmuls at
// most eight columns. CUDA cores add these sums.

#ifndef TF32_MATMULS
#define TF32_MATMULS 1
#endif
static_assert(TF32_MATMULS == 1 || TF32_MATMULS == 3, "TF32, or f32");

// Floats from row to row of a tile of Q, K, V or dO: an odd number of chunks, so that eight adjacent rows have the same
// chunk in eight different groups of banks.
constexpr int PITCH = HEAD_DIM + CHUNK;
static_assert(sizeof(E) == 4 && HEAD_DIM % 16 == 0, "rows of f32, of an even number of chunks");

// The layout of such a tile, for copy_tile.
#define PADDED_TILES
struct Padded {
    static __device__ __forceinline__ u32 at(int row, int chunk) { return (row * PITCH + chunk * CHUNK) * 4; }
};

__device__ __forceinline__ float4 read4(const float* x) { return *reinterpret_cast<const float4*>(x); }
__device__ __forceinline__ float part(const float4& x, int i) {
    return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}
__device__ __forceinline__ u32 shared_address(const void* x) { return (u32)__cvta_generic_to_shared(x); }

// The nearest TF32, ties away from zero. NaN stays NaN.
__device__ __forceinline__ float to_tf32(float x) {
    u32 r;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
    return __uint_as_float(r);
}

// The operand that replaces a result x.
__device__ __forceinline__ float rounded(float x) { return TF32_MATMULS == 1 ? to_tf32(x) : x; }

// Rounds the elements that this thread copied by copy_tile<LENGTH, THREADS, Padded>, between wait_groups and the
// barrier.
template <int LENGTH, int THREADS> __device__ __forceinline__ void round_tile(float* tile) {
    if (TF32_MATMULS == 3) return;
    constexpr int PASS = THREADS / LANES; // rows per pass
    float* x = tile + threadIdx.x / LANES * PITCH + threadIdx.x % LANES * CHUNK;
#pragma unroll
    for (int i = 0; i < CEIL_DIV(LENGTH, PASS); i++) {
        if (LENGTH % PASS != 0 && threadIdx.x / LANES + i * PASS >= LENGTH) break;
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            float4* to = reinterpret_cast<float4*>(x + i * PASS * PITCH + group * LANES * CHUNK);
            const float4 y = *to;
            *to = make_float4(to_tf32(y.x), to_tf32(y.y), to_tf32(y.z), to_tf32(y.w));
        }
    }
}

// N elements of an operand: high, or high + low with three matmuls.
template <int N> struct Factor {
    u32 high[N], low[N];
    __device__ __forceinline__ void set(int i, u32 bits) {
        high[i] = bits;
        if (TF32_MATMULS == 3) {
            constexpr u32 KEPT = 0xffffe000u;
            high[i] = (bits + 0x1000) & KEPT; // the nearest, as to_tf32, but in fewer cycles
            // low has 12 bits, of which the last is truncated. It is NaN if x is NaN or infinite.
            low[i] = __float_as_uint(__uint_as_float(bits) - __uint_as_float(high[i])) & KEPT;
        }
    }
    __device__ __forceinline__ void set(int i, float x) { set(i, __float_as_uint(x)); }
};

__device__ __forceinline__ void multiply_tf32(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// c (16, 8) += a (16, 8) b (8, 8)
__device__ __forceinline__ void multiply_block(float (&c)[4], const Factor<4>& a, const Factor<2>& b) {
    if (TF32_MATMULS == 1) return multiply_tf32(c, a.high, b.high);
    float sum[4] = {}; // the small products first
    multiply_tf32(sum, a.low, b.high);
    multiply_tf32(sum, a.high, b.low);
    multiply_tf32(sum, a.high, b.high);
#pragma unroll
    for (int i = 0; i < 4; i++) c[i] += sum[i];
}

// c[m][n] += a[m] b[n]
template <int M, int N>
__device__ __forceinline__ void multiply_blocks(float (&c)[M][N][4], const Factor<4> (&a)[M], const Factor<2> (&b)[N]) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int m = 0; m < M; m++) multiply_block(c[m][n], a[m], b[n]);
}

// The address from which a lane reads blocks of a tile, 16 rows by 2 chunks, by ldmatrix. left_blocks, for a left
// operand: rows 0-7 left, 8-15 left, 0-7 right, 8-15 right. right_blocks, two blocks of a right operand: rows 0-7 left,
// 0-7 right, 8-15 left, 8-15 right.
__device__ __forceinline__ u32 left_blocks(const float* tile, int lane) {
    return shared_address(tile) + Padded::at(lane & 15, lane >> 4);
}
__device__ __forceinline__ u32 right_blocks(const float* tile, int lane) {
    return shared_address(tile) + Padded::at((lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
}

// s[m][n] += a (16 rows from 16 m) b^T (8 rows from 8 n), over HEAD_DIM columns. a and b are results of left_blocks and
// right_blocks.
template <int M, int N> __device__ __forceinline__ void multiply_rows(float (&s)[M][N][4], u32 a, u32 b) {
#pragma unroll 4
    for (int d = 0; d < HEAD_DIM; d += 8) {
        Factor<4> left[M];
#pragma unroll
        for (int m = 0; m < M; m++) {
            u32 block[4];
            load_matrices(block, a + Padded::at(m * 16, 0) + d * 4);
#pragma unroll
            for (int i = 0; i < 4; i++) left[m].set(i, block[i]);
        }
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            u32 blocks[4]; // two blocks
            load_matrices(blocks, b + Padded::at(n * 8, 0) + d * 4);
            Factor<2> right[2];
#pragma unroll
            for (int i = 0; i < 4; i++) right[i / 2].set(i % 2, blocks[i]);
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int m = 0; m < M; m++) multiply_block(s[m][n + i], left[m], right[i]);
        }
    }
}

// A right operand stored by rows is read GROUP blocks at a time. Block i of a group has columns i, GROUP + i, 2 GROUP +
// i and so on, so a lane reads its GROUP elements of a row together, and has 2 GROUP adjacent columns of the result.
constexpr int GROUP = HEAD_DIM >= 32 ? 4 : 2, GROUP_DIMS = GROUP * 8;
static_assert(HEAD_DIM % GROUP_DIMS == 0, "whole groups");

// Reads the blocks of a group, of 8 rows. `row` points to the lane's first row, 2 (lane % 4), at its first column,
// GROUP (lane / 4). Rows have the order of a lane's columns of a result: 0, 2, 4, 6, 1, 3, 5, 7.
__device__ __forceinline__ void read_group(Factor<2> (&b)[GROUP], const float* row) {
#pragma unroll
    for (int odd = 0; odd < 2; odd++) {
        if (GROUP == 4) {
            const float4 x = read4(row + odd * PITCH);
#pragma unroll
            for (int i = 0; i < GROUP; i++) b[i].set(odd, part(x, i));
        } else {
            const float2 x = *reinterpret_cast<const float2*>(row + odd * PITCH);
            b[0].set(odd, x.x), b[1].set(odd, x.y);
        }
    }
}

// o[m][n] += p[m] v, where v has 8 STEPS rows and p is a rounded result in registers. `v` is the `row` of read_group
// for the first group.
template <int M, int STEPS, int N>
__device__ __forceinline__ void multiply_result(float (&o)[M][N][4], const float (&p)[M][STEPS][4], const float* v) {
#pragma unroll
    for (int group = 0; group < N / GROUP; group++) {
        float sum[M][GROUP][4] = {};
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            Factor<4> a[M];
            Factor<2> b[GROUP];
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int i = 0; i < 4; i++) a[m].set(i, p[m][step][i % 2 * 2 + i / 2]); // 0, 2, 1, 3
            read_group(b, v + step * 8 * PITCH + group * GROUP_DIMS);
            multiply_blocks(sum, a, b);
        }
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < GROUP; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) o[m][group * GROUP + n][i] += sum[m][n][i];
    }
}

// Calls `store(column, x)` for each four elements that a lane has of one row of a group, or of the row 8 below if
// `half` is 1.
template <typename STORE>
__device__ __forceinline__ void each_four(const float (&c)[GROUP][4], int half, int lane, STORE store) {
    const int column = lane % 4 * (2 * GROUP), i = half * 2;
    if (GROUP == 4) {
        const float x[4] = {c[0][i], c[1][i], c[GROUP - 2][i], c[GROUP - 1][i]};
        const float y[4] = {c[0][i + 1], c[1][i + 1], c[GROUP - 2][i + 1], c[GROUP - 1][i + 1]};
        store(column, x), store(column + 4, y);
    } else {
        const float x[4] = {c[0][i], c[1][i], c[0][i + 1], c[1][i + 1]};
        store(column, x);
    }
}

// Writes a row of a result of N blocks, times `factor`.
template <int N> __device__ __forceinline__ void write_row(E* row, const float (&o)[N][4], int half, int lane,
                                                           int columns, float factor) {
#pragma unroll
    for (int group = 0; group < N / GROUP; group++)
        each_four(reinterpret_cast<const float (&)[GROUP][4]>(o[group * GROUP]), half, lane,
                  [&](int column, const float (&x)[4]) {
                      const int dim = group * GROUP_DIMS + column;
                      if (dim < columns)
                          *reinterpret_cast<float4*>(row + dim) =
                              make_float4(x[0] * factor, x[1] * factor, x[2] * factor, x[3] * factor);
                  });
}
