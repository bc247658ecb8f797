// Casts between f32, f16 and bf16, and from integers by way of f32: y = x rounded to nearest even; x, y (n), any n.
//
// Grid ceil(n / 4096), block 256. Alignment only for speed. Bytes: x in, y out. Packs have four elements: with eight, a
// widening thread would write 32 bytes at a time (63% of the copy rate instead of 96%).

const int N = 4, PACKS = 4, BLOCK = 256 * N * PACKS; // a thread has four packs, loaded before the first is written

template <class T, class Y> __device__ __forceinline__ void cast(const T* x, Y* y, long long n) {
    long long start = (long long)blockIdx.x * BLOCK, left = n - start;
    int count = left < BLOCK ? (int)left : BLOCK;
    x += start, y += start;
    float values[PACKS][N];
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        int first = (k * 256 + threadIdx.x) * N;
        if (first < count) load_few(x, first, count, values[k]);
    }
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        int first = (k * 256 + threadIdx.x) * N;
        if (first < count) store_few(y, first, count, values[k]);
    }
}

#define CAST(T, Y)                                                                                                     \
    extern "C" __global__ void __launch_bounds__(256) cast_##T##_##Y(const T* x, Y* y, long long n) {                  \
        cast<T, Y>(x, y, n);                                                                                           \
    }

CAST(f32, f16)
CAST(f32, bf16)
CAST(f16, f32)
CAST(bf16, f32)
CAST(f16, bf16)
CAST(bf16, f16)

template <class T, class Y> __device__ __forceinline__ void cast_integers(const T* x, Y* y, long long n) {
    long long i = (long long)blockIdx.x * BLOCK + threadIdx.x, end = (blockIdx.x + 1LL) * BLOCK;
    for (; i < n && i < end; i += 256) y[i] = narrow<Y>((float)x[i]);
}

#define CAST_INTEGERS(NAME, T, Y)                                                                                      \
    extern "C" __global__ void __launch_bounds__(256) cast_##NAME##_##Y(const T* x, Y* y, long long n) {               \
        cast_integers<T, Y>(x, y, n);                                                                                  \
    }
#define FROM_INTEGERS(Y)                                                                                               \
    CAST_INTEGERS(u8, unsigned char, Y)                                                                                \
    CAST_INTEGERS(u32, unsigned, Y)                                                                                    \
    CAST_INTEGERS(i64, long long, Y)

FROM_INTEGERS(f32)
FROM_INTEGERS(f16)
FROM_INTEGERS(bf16)
