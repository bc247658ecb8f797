// Rows repeated, and the sum over repeats.
//
// repeat: y (rows times, width) = x (rows, width), each row `times` consecutive times, in words of 2, 4 or 16 bytes.
// fold: dx (rows, width) = the sum of each row's `times` repeats in dy (rows times, width), in f32, rounded once.
//
// Grid ceil(n / 256), block 256, where n is the words of y or the elements of dx. Pointers are multiples of the word.

template <class W> __device__ __forceinline__ void repeat(const W* x, W* y, long long n, long long width, int times) {
    long long i = (long long)blockIdx.x * 256 + threadIdx.x;
    if (i >= n) return;
    long long row = i / width;
    y[i] = x[row / times * width + (i - row * width)];
}

template <class T> __device__ __forceinline__ void fold(const T* dy, T* dx, long long n, long long width, int times) {
    long long i = (long long)blockIdx.x * 256 + threadIdx.x;
    if (i >= n) return;
    long long row = i / width;
    const T* from = dy + row * times * width + (i - row * width);
    float sum = 0.f;
    for (int k = 0; k < times; k++) sum += widen(from[k * width]);
    dx[i] = narrow<T>(sum);
}

#define REPEAT(BYTES, W)                                                                                               \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        repeat_##BYTES(const W* x, W* y, long long n, long long width, int times) {                                    \
        repeat(x, y, n, width, times);                                                                                 \
    }

#define FOLD(NAME)                                                                                                     \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        fold_##NAME(const NAME* dy, NAME* dx, long long n, long long width, int times) {                               \
        fold<NAME>(dy, dx, n, width, times);                                                                           \
    }

REPEAT(2, unsigned short)
REPEAT(4, unsigned)
REPEAT(16, uint4)
FOLD(f32)
FOLD(f16)
FOLD(bf16)
