// Comparisons of two buffers, and selection by their results; all (n).
//
// Comparisons: y = a OP b, 1 or 0, as C compares: only `ne` holds for NaN. a, b of T, y u8.
// select: y = c ? a : b, with `other` for a buffer that is null; c u8.
//
// Grid ceil(n / 1024), block 256: each thread has every 256th element of its block's 1024.

const int BLOCK = 1024;

__device__ __forceinline__ float number(f32 x) { return x; }
__device__ __forceinline__ float number(f16 x) { return widen(x); }
__device__ __forceinline__ float number(bf16 x) { return widen(x); }
__device__ __forceinline__ long long number(unsigned char x) { return x; }
__device__ __forceinline__ long long number(unsigned x) { return x; }
__device__ __forceinline__ long long number(long long x) { return x; }

#define COMPARE(STEM, OP, NAME, T)                                                                                     \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        STEM##_##NAME(const T* a, const T* b, unsigned char* y, long long n) {                                         \
        long long first = (long long)blockIdx.x * BLOCK + threadIdx.x, end = (blockIdx.x + 1LL) * BLOCK;               \
        for (long long i = first; i < n && i < end; i += 256) y[i] = number(a[i]) OP number(b[i]) ? 1 : 0;             \
    }

#define COMPARISONS(NAME, T)                                                                                           \
    COMPARE(eq, ==, NAME, T)                                                                                           \
    COMPARE(ne, !=, NAME, T)                                                                                           \
    COMPARE(lt, <, NAME, T)                                                                                            \
    COMPARE(le, <=, NAME, T)                                                                                           \
    COMPARE(gt, >, NAME, T)                                                                                            \
    COMPARE(ge, >=, NAME, T)

COMPARISONS(f32, f32)
COMPARISONS(f16, f16)
COMPARISONS(bf16, bf16)
COMPARISONS(u8, unsigned char)
COMPARISONS(u32, unsigned)
COMPARISONS(i64, long long)

#define SELECT(NAME)                                                                                                   \
    extern "C" __global__ void __launch_bounds__(256) select_##NAME(                                                   \
        const unsigned char* c, const NAME* a, const NAME* b, NAME* y, long long n, float other) {                     \
        long long first = (long long)blockIdx.x * BLOCK + threadIdx.x, end = (blockIdx.x + 1LL) * BLOCK;               \
        for (long long i = first; i < n && i < end; i += 256) {                                                        \
            const NAME* from = c[i] ? a : b;                                                                           \
            y[i] = from ? from[i] : narrow<NAME>(other);                                                               \
        }                                                                                                              \
    }

SELECT(f32)
SELECT(f16)
SELECT(bf16)
