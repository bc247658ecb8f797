// The largest or smallest elements along n of x (outer, n, inner), and their gradient.
//
// extreme: y (outer, inner) = the largest elements, or the smallest, NaN if one is NaN.
// extreme_backward: dx (outer, n, inner) = dy (outer, inner) at the first element along n that is y, else 0.
//
// `sign` is 1 for the largest and -1 for the smallest. rows: inner = 1, a warp for each of `count` rows, grid
// ceil(count / 8). columns: a thread for each of `count` outputs, grid ceil(count / 256). Block 256.

__device__ __forceinline__ float better(float best, float x, float sign) {
    return mul(sign, x) > mul(sign, best) || x != x ? x : best;
}

template <class T>
__device__ __forceinline__ void extreme_rows(const T* x, T* y, long long count, long long n, float sign) {
    int lane = threadIdx.x % 32;
    long long row = (long long)blockIdx.x * 8 + threadIdx.x / 32;
    if (row >= count) return;
    x += row * n;
    float best = widen(x[0]);
#pragma unroll 4
    for (long long i = lane; i < n; i += 32) best = better(best, widen(x[i]), sign);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        best = better(best, __shfl_xor_sync(0xffffffffu, best, distance), sign);
    }
    if (lane == 0) y[row] = narrow<T>(best);
}

template <class T> __device__ __forceinline__ void extreme_columns(const T* x, T* y, long long count, long long n,
                                                                   long long inner, float sign) {
    long long at = (long long)blockIdx.x * 256 + threadIdx.x;
    if (at >= count) return;
    long long outer = at / inner;
    x += outer * n * inner + (at - outer * inner);
    float best = widen(x[0]);
#pragma unroll 4
    for (long long i = 1; i < n; i++) best = better(best, widen(x[i * inner]), sign);
    y[at] = narrow<T>(best);
}

template <class T> __device__ __forceinline__ void backward_rows(const T* dy, const T* x, const T* y, T* dx,
                                                                 long long count, long long n) {
    int lane = threadIdx.x % 32;
    long long row = (long long)blockIdx.x * 8 + threadIdx.x / 32;
    if (row >= count) return;
    x += row * n, dx += row * n;
    float best = widen(y[row]);
    bool found = false;
    for (long long start = 0; start < n; start += 32) {
        long long i = start + lane;
        float value = i < n ? widen(x[i]) : 0.f;
        bool is_best = i < n && (value == best || value != value);
        unsigned lanes = __ballot_sync(0xffffffffu, is_best);
        bool is_first = !found && lane == __ffs(lanes) - 1;
        found = found || lanes != 0;
        if (i < n) dx[i] = is_first ? dy[row] : narrow<T>(0.f);
    }
}

template <class T> __device__ __forceinline__ void backward_columns(const T* dy, const T* x, const T* y, T* dx,
                                                                    long long count, long long n, long long inner) {
    long long at = (long long)blockIdx.x * 256 + threadIdx.x;
    if (at >= count) return;
    long long outer = at / inner, start = outer * n * inner + (at - outer * inner);
    x += start, dx += start;
    float best = widen(y[at]);
    bool found = false;
    for (long long i = 0; i < n; i++) {
        float value = widen(x[i * inner]);
        bool is_first = !found && (value == best || value != value);
        found = found || is_first;
        dx[i * inner] = is_first ? dy[at] : narrow<T>(0.f);
    }
}

#define EXTREMES(NAME)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        extreme_##NAME(const NAME* x, NAME* y, long long count, long long n, long long inner, float sign) {            \
        if (inner == 1) extreme_rows(x, y, count, n, sign);                                                            \
        else extreme_columns(x, y, count, n, inner, sign);                                                             \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256) extreme_backward_##NAME(                                         \
        const NAME* dy, const NAME* x, const NAME* y, NAME* dx, long long count, long long n, long long inner) {       \
        if (inner == 1) backward_rows(dy, x, y, dx, count, n);                                                         \
        else backward_columns(dy, x, y, dx, count, n, inner);                                                          \
    }

EXTREMES(f32)
EXTREMES(f16)
EXTREMES(bf16)
