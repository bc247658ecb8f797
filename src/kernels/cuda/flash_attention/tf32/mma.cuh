// Products of tiles of f32 by tensor cores, whose factors are TF32: f32's range, 11 significant bits. Behind tiles.cuh
// of f32.
//
// Each factor is rounded once: Q, K, V and dO by the threads that have copied them, P and dS where they are made.
// Tensor cores cut sums off rather than round them, so no more than a tile is summed on them; the sums of tiles are
// added to each other by the CUDA cores.

// The nearest TF32, of ties the one away from zero; a NaN stays one.
__device__ __forceinline__ float rounded(float x) {
    u32 r;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
    return __uint_as_float(r);
}

// Rounds what copy_tile<LENGTH, THREADS, Padded> has copied, by the threads that have copied it: after wait_groups,
// before the barrier.
template <int LENGTH, int THREADS> __device__ __forceinline__ void round_tile(float* tile) {
    constexpr int PASS = THREADS / LANES; // rows
    float* x = tile + threadIdx.x / LANES * PITCH + threadIdx.x % LANES * CHUNK;
#pragma unroll
    for (int i = 0; i < CEIL_DIV(LENGTH, PASS); i++) {
        if (LENGTH % PASS != 0 && threadIdx.x / LANES + i * PASS >= LENGTH) break;
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            float4* to = reinterpret_cast<float4*>(x + i * PASS * PITCH + group * LANES * CHUNK);
            const float4 y = *to;
            *to = make_float4(rounded(y.x), rounded(y.y), rounded(y.z), rounded(y.w));
        }
    }
}

// c (16, 8) += a (16, 8) b (8, 8)
__device__ __forceinline__ void multiply_tf32(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c[m][n] += a[m] b[n]
template <int M, int N>
__device__ __forceinline__ void multiply_blocks(float (&c)[M][N][4], const u32 (&a)[M][4], const u32 (&b)[N][2]) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int m = 0; m < M; m++) multiply_tf32(c[m][n], a[m], b[n][0], b[n][1]);
}

// Where a lane reads blocks of a tile by ldmatrix: 16 rows, 2 chunks. In order: rows 0-7 left, 8-15 left, 0-7 right,
// 8-15 right, as a left factor has them; or rows 0-7 left, 0-7 right, 8-15 left, 8-15 right, two right factors' blocks.
__device__ __forceinline__ u32 left_blocks(const float* tile, int lane) {
    return shared_address(tile) + Padded::at(lane & 15, lane >> 4);
}
__device__ __forceinline__ u32 right_blocks(const float* tile, int lane) {
    return shared_address(tile) + Padded::at((lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
}

// s[m][n] += a (16 rows from 16 m) b^T (8 rows from 8 n), over HEAD_DIM columns; a and b as left_blocks and
// right_blocks give them.
template <int M, int N> __device__ __forceinline__ void multiply_rows(float (&s)[M][N][4], u32 a, u32 b) {
#pragma unroll 4
    for (int d = 0; d < HEAD_DIM; d += 8) {
        u32 left[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) load_matrices(left[m], a + Padded::at(m * 16, 0) + d * 4);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            u32 right[4]; // two blocks
            load_matrices(right, b + Padded::at(n * 8, 0) + d * 4);
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int m = 0; m < M; m++) multiply_tf32(s[m][n + i], left[m], right[2 * i], right[2 * i + 1]);
        }
    }
}

// Columns of a right factor stored by rows are taken GROUP blocks at a time: block i of a group has columns i, GROUP +
// i, 2 GROUP + i and so on, so that a lane reads its GROUP numbers of a row at once, and has 2 GROUP neighbours of the
// result.
constexpr int GROUP = HEAD_DIM >= 32 ? 4 : 2, GROUP_DIMS = GROUP * 8;
static_assert(HEAD_DIM % GROUP_DIMS == 0, "whole groups");

// The blocks of a group, of 8 rows: `row` is the lane's first, 2 (lane % 4), at its first column, GROUP (lane / 4). The
// rows go in the order in which a lane has the columns of a result: 0, 2, 4, 6, 1, 3, 5, 7.
__device__ __forceinline__ void read_group(u32 (&b)[GROUP][2], const float* row) {
#pragma unroll
    for (int odd = 0; odd < 2; odd++) {
        if (GROUP == 4) {
            const float4 x = read4(row + odd * PITCH);
#pragma unroll
            for (int i = 0; i < GROUP; i++) b[i][odd] = __float_as_uint(part(x, i));
        } else {
            const float2 x = *reinterpret_cast<const float2*>(row + odd * PITCH);
            b[0][odd] = __float_as_uint(x.x), b[1][odd] = __float_as_uint(x.y);
        }
    }
}

// o[m][n] += p[m] v, where v has 8 STEPS rows and p is a result in registers, rounded; `v` as read_group's row, of the
// first group.
template <int M, int STEPS, int N>
__device__ __forceinline__ void multiply_result(float (&o)[M][N][4], const float (&p)[M][STEPS][4], const float* v) {
#pragma unroll
    for (int group = 0; group < N / GROUP; group++) {
        float sum[M][GROUP][4] = {};
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            u32 a[M][4], b[GROUP][2];
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int i = 0; i < 4; i++) a[m][i] = __float_as_uint(p[m][step][i % 2 * 2 + i / 2]); // 0, 2, 1, 3
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

// Hands `store(column, x)` what a lane has of one row of a group (`half` 1: of the row 8 below), in fours.
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
