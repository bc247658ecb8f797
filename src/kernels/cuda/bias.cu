// The bias of a matmul: rows filled with it, to which the matmul is added, and its gradient, the sum of all rows.
//
// fill: y (rows, width) = bias (width), rounded once. A thread has four columns of several rows. Grid (ceil(width / 4 /
// block.x), any number), block 256 or fewer: threads along a row, rows.
// sums: out (parts, width) f32 = sums of x's rows (rows, width); part p begins at row p `rows_per_part`. Grid
// (ceil(width / 32), parts), block (32, 8). Called twice: for partial sums, then for their sum, which is added to out
// if `accumulate`. The order is fixed.

template <class B, class Y> __device__ __forceinline__ void fill(const B* bias, Y* y, long long rows, int width) {
    int first = (blockIdx.x * blockDim.x + threadIdx.x) * 4;
    if (first >= width) return;
    float values[4];
    load_few(bias, first, width, values);
    long long row = (long long)blockIdx.y * blockDim.y + threadIdx.y;
    for (; row < rows; row += (long long)gridDim.y * blockDim.y) store_few(y + row * width, first, width, values);
}

template <class T>
__device__ __forceinline__ void sums(const T* x, float* out, long long rows, int width, int rows_per_part,
                                     int accumulate) {
    __shared__ float of_rows[8][32];
    int column = blockIdx.x * 32 + threadIdx.x;
    long long first = (long long)blockIdx.y * rows_per_part, end = first + rows_per_part;
    if (end > rows) end = rows;
    float sum = 0.f;
    if (column < width) {
        for (long long row = first + threadIdx.y; row < end; row += 8) sum += widen(x[row * width + column]);
    }
    of_rows[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && column < width) {
        for (int i = 1; i < 8; i++) sum += of_rows[i][threadIdx.x];
        float* to = out + (long long)blockIdx.y * width + column;
        *to = accumulate ? *to + sum : sum;
    }
}

#define FILL(NAME, B, Y)                                                                                               \
    extern "C" __global__ void __launch_bounds__(256) fill_##NAME(const B* bias, Y* y, long long rows, int width) {    \
        fill<B, Y>(bias, y, rows, width);                                                                              \
    }

#define SUMS(NAME)                                                                                                     \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        sums_##NAME(const NAME* x, float* out, long long rows, int width, int rows_per_part, int accumulate) {         \
        sums<NAME>(x, out, rows, width, rows_per_part, accumulate);                                                    \
    }

FILL(f32, f32, f32)
FILL(f16, f16, f16)
FILL(bf16, bf16, bf16)
FILL(f32_f16, f32, f16)
FILL(f32_bf16, f32, bf16)
SUMS(f32)
SUMS(f16)
SUMS(bf16)
