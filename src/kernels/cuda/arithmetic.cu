// Elementwise sums: y = a + b in f32, rounded once. a and y (n); b (period) is repeated.
//
// a, b and y have one type; or a and b have two, one of which is f32, and y is f32. Any n and period. y may be the
// buffer of an operand of its type and length, since each thread reads only the elements that it writes.
//
// Grid ceil(n / 4096), block 256. Alignment, and a period of a multiple of 4, only for speed. Bytes: a, b in, y out.

const int N = 4, PACKS = 4, BLOCK = 256 * N * PACKS; // a thread has four packs, loaded before the first is written

// The index in b of element `index` of a block whose element 0 has index `begin` in b.
__device__ __forceinline__ long long wrapped(long long begin, int index, long long period) {
    // 32 bits are enough. A short period may need more than one subtraction.
    if (period < BLOCK) return ((unsigned)begin + (unsigned)index) % (unsigned)period;
    long long at = begin + index;
    return at < period ? at : at - period;
}

// Elements at.. at + 4 of b, repeated.
template <class B>
__device__ __forceinline__ void load_wrapped(const B* b, long long at, long long period, float (&values)[4]) {
    if (at + 4 <= period) {
        load_few(b + at, 0, 4, values);
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            values[i] = widen(b[at]);
            at = at + 1 < period ? at + 1 : 0;
        }
    }
}

template <class A, class B, class Y>
__device__ __forceinline__ void add(const A* a, const B* b, Y* y, long long n, long long period) {
    long long start = (long long)blockIdx.x * BLOCK, left = n - start;
    long long begin = start < period ? start : start % period;
    int count = left < BLOCK ? (int)left : BLOCK;
    a += start, y += start;
    float of_a[PACKS][N], of_b[PACKS][N];
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        int first = (k * 256 + threadIdx.x) * N;
        if (first >= count) continue;
        load_few(a, first, count, of_a[k]);
        load_wrapped(b, wrapped(begin, first, period), period, of_b[k]);
    }
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        int first = (k * 256 + threadIdx.x) * N;
        if (first >= count) continue;
#pragma unroll
        for (int i = 0; i < N; i++) of_a[k][i] += of_b[k][i];
        store_few(y, first, count, of_a[k]);
    }
}

#define ADD(NAME, A, B, Y)                                                                                             \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        add_##NAME(const A* a, const B* b, Y* y, long long n, long long period) {                                      \
        add<A, B, Y>(a, b, y, n, period);                                                                              \
    }

ADD(f32, f32, f32, f32)
ADD(f16, f16, f16, f16)
ADD(bf16, bf16, bf16, bf16)
ADD(f32_f16, f32, f16, f32)
ADD(f32_bf16, f32, bf16, f32)
ADD(f16_f32, f16, f32, f32)
ADD(bf16_f32, bf16, f32, f32)
