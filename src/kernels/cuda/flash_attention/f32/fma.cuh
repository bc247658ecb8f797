// Products of tiles of f32 by FMA on CUDA cores: exact f32. Behind tiles.cuh.
//
// A warp is laid over a product as 4 x 8 lanes. The rows of a left factor that a lane has lie 4 apart, those of a right
// factor 8 apart: lanes that read together read neighbouring rows. A lane's block of 8 x 8 results takes 16 floats from
// shared memory for 64 FMAs.

// The lane's place. In either half of a warp a row is had by lanes that differ in bits 0 and 2, a column by lanes that
// differ in bits 1 and 3: so what two lanes read of the same place is fetched once.
__device__ __forceinline__ int row_of(int lane) { return (lane >> 1 & 1) | (lane >> 2 & 2); }
__device__ __forceinline__ int column_of(int lane) { return (lane & 1) | (lane >> 1 & 2) | (lane >> 2 & 4); }
__device__ __forceinline__ int lane_of(int row, int column) {
    return (column & 1) | (row & 1) << 1 | (column & 2) << 1 | (row & 2) << 2 | (column & 4) << 2;
}
// The lanes of one row.
__device__ __forceinline__ float sum_over_columns(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    x += __shfl_xor_sync(~0u, x, 4);
    return x + __shfl_xor_sync(~0u, x, 16);
}
__device__ __forceinline__ float most_over_columns(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 4));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 16));
}

// s[m][n] += a's row 4 m . b's row 8 n, over HEAD_DIM columns. The left factor is read a chunk ahead; after the last,
// padding.
template <int M, int N>
__device__ __forceinline__ void multiply_rows(float (&s)[M][N], const float* a, const float* b) {
    float4 next[M];
#pragma unroll
    for (int m = 0; m < M; m++) next[m] = read4(a + m * 4 * PITCH);
#pragma unroll 2
    for (int d = 0; d < HEAD_DIM; d += CHUNK) {
        float4 x[M];
#pragma unroll
        for (int m = 0; m < M; m++) x[m] = next[m];
#pragma unroll
        for (int n = 0; n < N; n++) {
            const float4 y = read4(b + n * 8 * PITCH + d);
#pragma unroll
            for (int m = 0; m < M; m++)
                if (m * N / M == n) next[m] = read4(a + m * 4 * PITCH + d + CHUNK);
#pragma unroll
            for (int i = 0; i < CHUNK; i++)
#pragma unroll
                for (int m = 0; m < M; m++) s[m][n] = fmaf(part(x[m], i), part(y, i), s[m][n]);
        }
    }
}

// What the lanes of a row hold of a product goes through shared memory to be the left factor of the next: a row of
// 8 N floats, lane by lane, so that place column * N + n has what belongs to the right factor's row column + 8 n.
template <int N> struct Exchanged {
    static constexpr int PITCH = 8 * N + CHUNK; // floats from row to row
    // The right factor's row for a place.
    static __device__ __forceinline__ int row(int place) { return place / N + place % N * 8; }
    static __device__ __forceinline__ void write(float* row, int column, const float (&x)[N]) {
#pragma unroll
        for (int n = 0; n < N; n += 4)
            *reinterpret_cast<float4*>(row + column * N + n) = make_float4(x[n], x[n + 1], x[n + 2], x[n + 3]);
    }
    static __device__ __forceinline__ void read(float (&x)[N], const float* row, int column) {
#pragma unroll
        for (int n = 0; n < N; n += 4) {
            const float4 y = read4(row + column * N + n);
            x[n] = y.x, x[n + 1] = y.y, x[n + 2] = y.z, x[n + 3] = y.w;
        }
    }
};

// The columns that a lane has of a row of HEAD_DIM: chunks 8 apart, or a pair where there are no 8 chunks.
constexpr int DIMS = HEAD_DIM / 8, WIDTH = DIMS % 4 == 0 ? 4 : 2;
static_assert(DIMS % WIDTH == 0, "whole chunks");
__device__ __forceinline__ int dim_of(int column, int i) { return i / WIDTH * 8 * WIDTH + column * WIDTH + i % WIDTH; }

// The lane's PART columns of a row of a right factor.
template <int PART> __device__ __forceinline__ void read_columns(float (&y)[PART], const float* row) {
#pragma unroll
    for (int j = 0; j < PART; j += WIDTH) {
        if (WIDTH == 4) {
            const float4 z = read4(row + j * 8);
#pragma unroll
            for (int k = 0; k < WIDTH; k++) y[j + k] = part(z, k);
        } else {
            const float2 z = *reinterpret_cast<const float2*>(row + j * 8);
            y[j] = z.x, y[j + 1] = z.y;
        }
    }
}

// o[m] += sum over n and the lanes' columns c of p's row 4 m, place (c, n), by v's row c + 8 n; `v` at the lane's first
// column. The tile is summed by itself: one sum over all tiles would lose several times as much. With DROPS a p below 0
// counts as 0.
template <int M, int N, bool DROPS = false>
__device__ __forceinline__ void multiply_columns(float (&o)[M][DIMS], const float* p, const float* v) {
    // So many columns at a time: their sums are in registers beside those over all tiles.
    constexpr int PART = M * DIMS <= 96 || DIMS % (2 * WIDTH) != 0 ? DIMS : DIMS / 2;
    constexpr bool AHEAD = M * (DIMS + PART + 8) < 192; // registers left to read the left factor a chunk ahead
#pragma unroll
    for (int first = 0; first < DIMS; first += PART) {
        float sum[M][PART] = {};
        float4 next[M];
#pragma unroll
        for (int m = 0; m < M; m++) next[m] = read4(p + m * 4 * Exchanged<N>::PITCH);
#pragma unroll 1
        for (int c = 0; c < 8; c++) {
#pragma unroll
            for (int n = 0; n < N; n += CHUNK) {
                float4 x[M];
#pragma unroll
                for (int m = 0; m < M; m++) x[m] = AHEAD ? next[m] : read4(p + m * 4 * Exchanged<N>::PITCH + c * N + n);
#pragma unroll
                for (int i = 0; i < CHUNK; i++) {
                    float y[PART];
                    read_columns(y, v + (c + (n + i) * 8) * PITCH + first * 8);
#pragma unroll
                    for (int m = 0; m < M; m++)
                        if (AHEAD && m * CHUNK / M == i)
                            next[m] =
                                read4(p + m * 4 * Exchanged<N>::PITCH + c * N + n + CHUNK); // after the last, padding
#pragma unroll
                    for (int j = 0; j < PART; j++)
#pragma unroll
                        for (int m = 0; m < M; m++) {
                            const float p = part(x[m], i);
                            sum[m][j] = fmaf(DROPS && p < 0 ? 0 : p, y[j], sum[m][j]);
                        }
                }
            }
        }
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int j = 0; j < PART; j++) o[m][first + j] += sum[m][j];
    }
}

// Writes the lane's columns of a row, times `factor`.
__device__ __forceinline__ void write_row(E* row, const float (&x)[DIMS], int column, int columns, float factor) {
#pragma unroll
    for (int i = 0; i < DIMS; i += WIDTH) {
        const int dim = dim_of(column, i);
        if (dim >= columns) continue;
        if (WIDTH == 4)
            *reinterpret_cast<float4*>(row + dim) =
                make_float4(x[i] * factor, x[i + 1] * factor, x[i + 2] * factor, x[i + 3] * factor);
        else *reinterpret_cast<float2*>(row + dim) = make_float2(x[i] * factor, x[i + 1] * factor);
    }
}
