// Strided copies, and sums of the elements that have the same destination.
//
// copy: y[to(i)] = x[from(i)] for each index i of `dims`, in words of 1, 2, 4, 8 or 16 bytes. Grid ceil(n / 256) with n
// words, block 256. Pointers are multiples of the word.
//
// sums: dx[to(i)] = the sum over all r of dy[from(i) + from(r)], in f32. i is an index of `dims` (n), r one of
// `repeats` (count), whose `to` is not read. One thread writes each element, from a sum in fixed order.
// columns: neighbours in dy have different destinations, one for each of a block's threads in x; threads in y share a
// sum. Grid ceil(n / x), block (x, y), x y <= 1024.
// rows: neighbours in dy have the same destination. A block's threads in x, a multiple of 32, share a sum. Grid ceil(n
// / y).

const int RANK = 6; // as in strided.rs

// A shape with the strides of source and destination, in elements.
struct Dims {
    long long from[RANK], to[RANK];
    unsigned size[RANK];
    int rank;
};

__device__ __forceinline__ void places(const Dims& dims, unsigned number, long long* from, long long* to) {
    *from = 0, *to = 0;
#pragma unroll
    for (int d = RANK - 1; d >= 0; d--) {
        if (d >= dims.rank) continue;
        unsigned rest = number / dims.size[d], index = number - rest * dims.size[d];
        *from += index * dims.from[d], *to += index * dims.to[d];
        number = rest;
    }
}

template <class W> __device__ __forceinline__ void copy(const W* x, W* y, unsigned n, const Dims& dims) {
    unsigned i = blockIdx.x * 256 + threadIdx.x;
    if (i >= n) return;
    long long from, to;
    places(dims, i, &from, &to);
    y[to] = x[from];
}

// The sum over every `step`th repeat, from `first` on.
template <class T> __device__ __forceinline__ float sum_of(const T* dy, const Dims& repeats, unsigned count,
                                                           unsigned first, unsigned step) {
    float sum = 0.f;
#pragma unroll 4
    for (unsigned r = first; r < count; r += step) {
        long long from, to;
        places(repeats, r, &from, &to);
        sum += widen(dy[from]);
    }
    return sum;
}

template <class T> __device__ __forceinline__ void sums_of_columns(const T* dy, float* dx, unsigned n, const Dims& dims,
                                                                   unsigned count, const Dims& repeats) {
    __shared__ float of_rows[1024];
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    long long from, to;
    places(dims, i < n ? i : 0, &from, &to);
    float sum = i < n ? sum_of(dy + from, repeats, count, threadIdx.y, blockDim.y) : 0.f;
    of_rows[threadIdx.y * blockDim.x + threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || i >= n) return;
    for (int k = 1; k < blockDim.y; k++) sum += of_rows[k * blockDim.x + threadIdx.x];
    dx[to] = sum;
}

template <class T> __device__ __forceinline__ void sums_of_rows(const T* dy, float* dx, unsigned n, const Dims& dims,
                                                                unsigned count, const Dims& repeats) {
    unsigned i = blockIdx.x * blockDim.y + threadIdx.y;
    if (i >= n) return;
    long long from, to;
    places(dims, i, &from, &to);
    float sum = reduce_row<Sum>(sum_of(dy + from, repeats, count, threadIdx.x, blockDim.x), 0);
    if (threadIdx.x == 0) dx[to] = sum;
}

#define COPY(BYTES, W)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(256) copy_##BYTES(const W* x, W* y, unsigned n, Dims dims) {          \
        copy(x, y, n, dims);                                                                                           \
    }

#define SUMS(STEM, NAME)                                                                                               \
    extern "C" __global__ void __launch_bounds__(1024)                                                                 \
        STEM##_##NAME(const NAME* dy, float* dx, unsigned n, Dims dims, unsigned count, Dims repeats) {                \
        STEM(dy, dx, n, dims, count, repeats);                                                                         \
    }

COPY(1, unsigned char)
COPY(2, unsigned short)
COPY(4, unsigned)
COPY(8, uint2)
COPY(16, uint4)
SUMS(sums_of_columns, f32)
SUMS(sums_of_columns, f16)
SUMS(sums_of_columns, bf16)
SUMS(sums_of_rows, f32)
SUMS(sums_of_rows, f16)
SUMS(sums_of_rows, bf16)
