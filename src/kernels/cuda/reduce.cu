// Sums along n of x (outer, n, inner), in f64 in a fixed order, and their gradient.
//
// sum_rows, sum_short_rows, sum_columns: y (outer, chunks, inner) = `factor` times the sums of x's chunks, of
// `per_chunk` elements along n. Rows are those of inner = 1, `count` sums in all: a block of 256 sums a row, or a warp
// of it a short one. Columns are those of any inner: a block sums 32 of them, of one chunk. Grid ceil(count / rows of
// a block), or outer chunks ceil(inner / 32). A sum of many elements is two launches: chunks in f64, then their sums.
//
// spread: y (outer, n, inner) = dy (outer, inner) times `factor`, `count` elements. Grid ceil(count / 2048), block 256.
//
// The product with `factor` is f64. It is rounded to f32, then to y's type.

typedef double f64;

__device__ __forceinline__ double to_double(f64 value) { return value; }
template <class T> __device__ __forceinline__ double to_double(T value) { return (double)widen(value); }

template <class T> __device__ __forceinline__ T rounded(double value) { return narrow<T>((float)value); }
template <> __device__ __forceinline__ f64 rounded<f64>(double value) { return value; }

// The sum of four elements from `first` on, as far as they are in a row of `width`.
template <class T> __device__ __forceinline__ double sum_of_few(const T* row, int first, int width) {
    float values[4];
    load_few(row, first, width, values);
    return ((double)values[0] + (double)values[1]) + ((double)values[2] + (double)values[3]);
}
__device__ __forceinline__ double sum_of_few(const f64* row, int first, int width) {
    double sum = 0.0;
#pragma unroll
    for (int i = 0; i < 4; i++) sum += first + i < width ? row[first + i] : 0.0;
    return sum;
}

template <class T, class Y, int THREADS> __device__ __forceinline__ void sum_rows(const T* x, Y* y, long long count,
                                                                                  int chunks, long long n,
                                                                                  long long per_chunk, double factor) {
    __shared__ double sums[256];
    int lane = threadIdx.x % THREADS;
    long long at = (long long)blockIdx.x * (256 / THREADS) + threadIdx.x / THREADS;
    double sum = 0.0;
    if (at < count) {
        long long row = at / chunks, start = (at - row * chunks) * per_chunk, left = n - start;
        int width = (int)(left < 0 ? 0 : left < per_chunk ? left : per_chunk);
        x += row * n + start;
#pragma unroll 4
        for (int first = lane * 4; first < width; first += THREADS * 4) sum += sum_of_few(x, first, width);
    }
    sums[threadIdx.x] = sum;
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (lane < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    if (lane == 0 && at < count) y[at] = rounded<Y>(sums[threadIdx.x] * factor);
}

template <class T, class Y> __device__ __forceinline__ void sum_columns(const T* x, Y* y, long long inner, int chunks,
                                                                        long long n, long long per_chunk,
                                                                        double factor) {
    __shared__ double sums[256];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    long long blocks = (inner + 31) / 32, chunk = blockIdx.x / blocks;
    long long column = (blockIdx.x - chunk * blocks) * 32 + lane, outer = chunk / chunks;
    long long start = (chunk - outer * chunks) * per_chunk, end = start + per_chunk < n ? start + per_chunk : n;
    double sum = 0.0;
    if (column < inner) {
        x += outer * n * inner + column;
#pragma unroll 4
        for (long long row = start + warp; row < end; row += 8) sum += to_double(x[row * inner]);
    }
    sums[threadIdx.x] = sum;
    for (int half = 4; half > 0; half /= 2) {
        __syncthreads();
        if (warp < half) sums[threadIdx.x] += sums[threadIdx.x + half * 32];
    }
    if (warp == 0 && column < inner) y[chunk * inner + column] = rounded<Y>(sums[lane] * factor);
}

template <class T> __device__ __forceinline__ void spread(const T* dy, T* y, long long count, long long n,
                                                          long long inner, double factor) {
    long long start = (long long)blockIdx.x * 2048, left = count - start;
    int width = left < 2048 ? (int)left : 2048;
#pragma unroll
    for (int k = 0; k < 2; k++) {
        int first = (k * 256 + threadIdx.x) * 4;
        if (first >= width) return;
        long long row = (start + first) / inner, column = start + first - row * inner;
        long long outer = row / n, repeat = row - outer * n;
        float values[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (first + i < width) values[i] = (float)((double)widen(dy[outer * inner + column]) * factor);
            if (++column == inner) {
                column = 0;
                if (++repeat == n) repeat = 0, outer++;
            }
        }
        store_few(y + start, first, width, values);
    }
}

#define SUM(STEM, BODY, NAME, T, Y)                                                                                    \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        STEM##_##NAME(const T* x, Y* y, long long size, int chunks, long long n, long long per_chunk, double factor) { \
        BODY(x, y, size, chunks, n, per_chunk, factor);                                                                \
    }

#define REDUCE(NAME)                                                                                                   \
    SUM(sum_rows, (sum_rows<NAME, NAME, 256>), NAME, NAME, NAME)                                                       \
    SUM(sum_rows, (sum_rows<NAME, f64, 256>), NAME##_f64, NAME, f64)                                                   \
    SUM(sum_rows, (sum_rows<f64, NAME, 256>), f64_##NAME, f64, NAME)                                                   \
    SUM(sum_short_rows, (sum_rows<NAME, NAME, 32>), NAME, NAME, NAME)                                                  \
    SUM(sum_columns, (sum_columns<NAME, NAME>), NAME, NAME, NAME)                                                      \
    SUM(sum_columns, (sum_columns<NAME, f64>), NAME##_f64, NAME, f64)                                                  \
    SUM(sum_columns, (sum_columns<f64, NAME>), f64_##NAME, f64, NAME)                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        spread_##NAME(const NAME* dy, NAME* y, long long count, long long n, long long inner, double factor) {         \
        spread<NAME>(dy, y, count, n, inner, factor);                                                                  \
    }

REDUCE(f32)
REDUCE(f16)
REDUCE(bf16)
