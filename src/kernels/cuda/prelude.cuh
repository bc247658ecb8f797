// Helpers for every kernel of this folder: element types, packs of elements that move as 16 bytes, reductions.
//
// Included before the sources. No #include, no global state, no atomics on floats. Needs sm_80, for the conversions to
// bf16. Type names are those of the Rust side.

typedef float f32;
struct f16 {
    unsigned short bits;
};
struct bf16 {
    unsigned short bits;
};

#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f
#define LOWEST (-3.402823466e38f) // the most negative finite f32
#define MINUS_INFINITY __int_as_float(0xff800000)

// ---- Single elements: widening is exact; narrowing rounds to nearest even.

__device__ __forceinline__ float widen(f32 value) { return value; }
__device__ __forceinline__ float widen(bf16 value) { return __uint_as_float((unsigned)value.bits << 16); }
__device__ __forceinline__ float widen(f16 value) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
    return wide;
}

template <class T> __device__ __forceinline__ T narrow(float value);
template <> __device__ __forceinline__ f32 narrow<f32>(float value) { return value; }
template <> __device__ __forceinline__ bf16 narrow<bf16>(float value) {
    bf16 result;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    return result;
}
template <> __device__ __forceinline__ f16 narrow<f16>(float value) {
    f16 result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    return result;
}

// ---- Packs: N consecutive elements of T; N * sizeof(T) is a multiple of 16.

// The number of elements in 16 bytes.
template <class T> struct InVector {
    static const int COUNT = 16 / sizeof(T);
};

template <class T, int N> struct Pack {
    static const int VECTORS = N * sizeof(T) / 16;
    uint4 vector[VECTORS];
};

__device__ __forceinline__ void widen_word(unsigned word, float* to, bf16) {
    to[0] = __uint_as_float(word << 16);
    to[1] = __uint_as_float(word & 0xffff0000u);
}
__device__ __forceinline__ void widen_word(unsigned word, float* to, f16) {
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
        : "=f"(to[0]), "=f"(to[1])
        : "r"(word));
}
__device__ __forceinline__ void widen_word(unsigned word, float* to, f32) { to[0] = __uint_as_float(word); }

__device__ __forceinline__ unsigned narrow_word(const float* from, bf16) {
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(from[1]), "f"(from[0]));
    return word;
}
__device__ __forceinline__ unsigned narrow_word(const float* from, f16) {
    unsigned word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(from[1]), "f"(from[0]));
    return word;
}
__device__ __forceinline__ unsigned narrow_word(const float* from, f32) { return __float_as_uint(from[0]); }

template <class T, int N> __device__ __forceinline__ void unpack(const Pack<T, N>& pack, float (&values)[N]) {
    const int A_WORD = 4 / sizeof(T);
#pragma unroll
    for (int i = 0; i < Pack<T, N>::VECTORS; i++) {
        float* to = values + 4 * A_WORD * i;
        widen_word(pack.vector[i].x, to, T());
        widen_word(pack.vector[i].y, to + A_WORD, T());
        widen_word(pack.vector[i].z, to + 2 * A_WORD, T());
        widen_word(pack.vector[i].w, to + 3 * A_WORD, T());
    }
}

template <class T, int N> __device__ __forceinline__ Pack<T, N> pack(const float (&values)[N]) {
    const int A_WORD = 4 / sizeof(T);
    Pack<T, N> result;
#pragma unroll
    for (int i = 0; i < Pack<T, N>::VECTORS; i++) {
        const float* from = values + 4 * A_WORD * i;
        result.vector[i].x = narrow_word(from, T());
        result.vector[i].y = narrow_word(from + A_WORD, T());
        result.vector[i].z = narrow_word(from + 2 * A_WORD, T());
        result.vector[i].w = narrow_word(from + 3 * A_WORD, T());
    }
    return result;
}

// The maximum of two words, element by element.
__device__ __forceinline__ unsigned larger_words(unsigned a, unsigned b, bf16) {
    unsigned result;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}
__device__ __forceinline__ unsigned larger_words(unsigned a, unsigned b, f16) {
    unsigned result;
    asm("max.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}
__device__ __forceinline__ unsigned larger_words(unsigned a, unsigned b, f32) {
    return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
}

// The largest element of a 16-byte pack.
template <class T, int N> __device__ __forceinline__ float largest(const Pack<T, N>& pack) {
    const uint4& v = pack.vector[0];
    unsigned word = larger_words(larger_words(v.x, v.y, T()), larger_words(v.z, v.w, T()), T());
    float halves[2];
    widen_word(word, halves, T());
    return sizeof(T) == 4 ? halves[0] : fmaxf(halves[0], halves[1]);
}

__device__ __forceinline__ bool at_vector(const void* pointer) { return ((unsigned long long)pointer & 15) == 0; }

// The number of elements between the last 16-byte boundary and `row`. Pack k of a row has its elements k N - skew.. (k
// + 1) N - skew, so it begins at a boundary. Only the first and the last pack are partial, for any width.
template <class T> __device__ __forceinline__ int skew_of(const T* row) {
    return (int)((unsigned long long)row & 15) / (int)sizeof(T);
}

// Whether rows of `width` consist of full packs of N at 16-byte boundaries in every buffer. Kernels have a path for
// this case that skips the checks, which are a good part of a row's instructions.
template <int N>
__device__ __forceinline__ bool whole_packs(long long width, const void* a, const void* b, const void* c) {
    unsigned long long bits = (unsigned long long)a | (unsigned long long)b | (unsigned long long)c;
    return width % N == 0 && (bits & 15) == 0;
}

// Elements first.. first + N of a row of `width`; those outside of the row are `outside`. `first` may be negative.
// WHOLE: all are inside, and the pack begins at a 16-byte boundary.
template <class T, int N, bool WHOLE = false>
__device__ __forceinline__ Pack<T, N> load(const T* row, int first, int width, float outside) {
    const T* from = row + first;
    Pack<T, N> result;
    if (WHOLE || (first >= 0 && first + N <= width && at_vector(from))) {
#pragma unroll
        for (int i = 0; i < Pack<T, N>::VECTORS; i++) result.vector[i] = ((const uint4*)from)[i];
    } else {
        float values[N];
#pragma unroll
        for (int i = 0; i < N; i++) {
            bool inside = 0 <= first + i && first + i < width;
            values[i] = inside ? widen(from[i]) : outside;
        }
        result = pack<T, N>(values); // exact: every value is a T
    }
    return result;
}

// `load`, widened to f32.
template <bool WHOLE = false, class T, int N>
__device__ __forceinline__ void load_wide(const T* row, int first, int width, float outside, float (&values)[N]) {
    unpack(load<T, N, WHOLE>(row, first, width, outside), values);
}

// Prefetches the cache line of `address` into level 2, without waiting.
__device__ __forceinline__ void to_level2(const void* address) { asm volatile("prefetch.L2 [%0];" ::"l"(address)); }

// Writes elements first.. first + N as far as they are in a row of `width`, each rounded once.
template <bool WHOLE = false, class T, int N>
__device__ __forceinline__ void store(T* row, int first, int width, const float (&values)[N]) {
    T* to = row + first;
    if (WHOLE || (first >= 0 && first + N <= width && at_vector(to))) {
        Pack<T, N> rounded = pack<T, N>(values);
#pragma unroll
        for (int i = 0; i < Pack<T, N>::VECTORS; i++) ((uint4*)to)[i] = rounded.vector[i];
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) {
            if (0 <= first + i && first + i < width) to[i] = narrow<T>(values[i]);
        }
    }
}

// Four elements, in 16 bytes of f32 or 8 of half precision, for kernels that mix both.
template <class T> __device__ __forceinline__ void load_few(const T* row, int first, int width, float (&values)[4]) {
    const T* from = row + first;
    if (first + 4 <= width && ((unsigned long long)from & (4 * sizeof(T) - 1)) == 0) {
        if (sizeof(T) == 4) {
            uint4 words = *(const uint4*)from;
            widen_word(words.x, values, T()), widen_word(words.y, values + 1, T());
            widen_word(words.z, values + 2, T()), widen_word(words.w, values + 3, T());
        } else {
            uint2 words = *(const uint2*)from;
            widen_word(words.x, values, T()), widen_word(words.y, values + 2, T());
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) values[i] = first + i < width ? widen(from[i]) : 0.f;
    }
}

template <class T> __device__ __forceinline__ void store_few(T* row, int first, int width, const float (&values)[4]) {
    T* to = row + first;
    if (first + 4 <= width && ((unsigned long long)to & (4 * sizeof(T) - 1)) == 0) {
        if (sizeof(T) == 4) {
            *(float4*)to = make_float4(values[0], values[1], values[2], values[3]);
        } else {
            *(uint2*)to = make_uint2(narrow_word(values, T()), narrow_word(values + 2, T()));
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (first + i < width) to[i] = narrow<T>(values[i]);
        }
    }
}

// ---- Flat buffers of n elements: grid ceil(packs / 512), block 256.

const int THREAD_PACKS = 2; // packs per thread, loaded before the first is used

// The number of elements of this block of a flat buffer of n elements. They begin at `start`.
template <int N> __device__ __forceinline__ int of_block(long long n, long long* start) {
    const int ELEMENTS = 256 * THREAD_PACKS * N;
    *start = (long long)blockIdx.x * ELEMENTS;
    long long left = n - *start;
    return left < ELEMENTS ? (int)left : ELEMENTS;
}

// Loads the thread's packs of the block's elements: every 256th pack.
template <class T, int N>
__device__ __forceinline__ void load_packs(const T* x, int count, Pack<T, N> (&packs)[THREAD_PACKS]) {
#pragma unroll
    for (int k = 0; k < THREAD_PACKS; k++) {
        int first = (k * 256 + threadIdx.x) * N;
        if (first < count) packs[k] = load<T, N>(x, first, count, 0.f);
    }
}

// ---- Arithmetic.

// 2^x within 2 ulp. Results under 2^-126 become 0.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// e^x. Rounding x * LOG2_E costs |x| 2^-24 of the value, which is negligible where x <= 0 and the values are summed.
__device__ __forceinline__ float exp_fast(float x) { return exp2_fast(x * LOG2_E); }

// Never fused into multiply-adds, so that the bits are the CPU's.
__device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float sub(float a, float b) { return __fsub_rn(a, b); }

// ---- Reductions over the threads of a row: blockDim is (threads per row, rows), the first a multiple of 32.

// All rows of a block reduce equally often, except rows whose threads have exited. Rows have no named barriers: with a
// barrier number known only at run time a block reserves all 16 of the 64 of a multiprocessor, which then holds 4
// blocks.
__device__ __forceinline__ void row_barrier() { __syncthreads(); }

struct Sum {
    static __device__ __forceinline__ float of(float a, float b) { return a + b; }
    static __device__ __forceinline__ float nothing() { return 0.f; }
};
struct Largest {
    static __device__ __forceinline__ float of(float a, float b) { return fmaxf(a, b); }
    static __device__ __forceinline__ float nothing() { return LOWEST; }
};

template <class Op> __device__ __forceinline__ float reduce_warp(float value) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        value = Op::of(value, __shfl_xor_sync(0xffffffffu, value, distance));
    }
    return value;
}

// Reduces `value` over all threads of the row in a fixed order; every thread has the result. A `slot` (under 3) may be
// reused after every thread of the row has passed another barrier, for example the reduction of another slot.
template <class Op> __device__ __forceinline__ float reduce_row(float value, int slot) {
    __shared__ float of_warps[3][32]; // one per warp of the block
    value = reduce_warp<Op>(value);
    if (blockDim.x == 32) return value;
    int warps = blockDim.x / 32, lane = threadIdx.x % 32;
    float* row = of_warps[slot] + threadIdx.y * warps;
    if (lane == 0) row[threadIdx.x / 32] = value;
    row_barrier();
    return reduce_warp<Op>(lane < warps ? row[lane] : Op::nothing());
}

// The sums of two values with one barrier. Uses slots `slot` and `slot + 1`.
__device__ __forceinline__ void reduce_row_pair(float* a, float* b, int slot) {
    __shared__ float of_warps[4][32];
    *a = reduce_warp<Sum>(*a), *b = reduce_warp<Sum>(*b);
    if (blockDim.x == 32) return;
    int warps = blockDim.x / 32, lane = threadIdx.x % 32, at = threadIdx.y * warps;
    if (lane == 0) of_warps[slot][at + threadIdx.x / 32] = *a, of_warps[slot + 1][at + threadIdx.x / 32] = *b;
    row_barrier();
    *a = reduce_warp<Sum>(lane < warps ? of_warps[slot][at + lane] : 0.f);
    *b = reduce_warp<Sum>(lane < warps ? of_warps[slot + 1][at + lane] : 0.f);
}

// The sum of the block's 256 values, in all threads.
__device__ __forceinline__ double sum_of_block(double value) {
    __shared__ double values[256];
    values[threadIdx.x] = value;
    for (int half = 128; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) values[threadIdx.x] += values[threadIdx.x + half];
    }
    __syncthreads();
    return values[0];
}
