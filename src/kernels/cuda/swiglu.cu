// The SwiGLU gate: y = silu(gate) up with silu(g) = g s, s = 1 / (1 + exp(-g)); elementwise, all buffers (n).
//
// Backward: dgate = dy up s (1 + gate (1 - s)), dup = dy gate s; and, where y is not null, y once more, so that forward
// need not keep it. Any output may be the buffer of any input: a thread reads all that it needs before it writes.
//
// Grid ceil(n / (256 * 2 N)), block 256, N = 16 / size of T; n of any size, 16-byte alignment only for speed.
// Bytes: 3 n elements forward, 5 n backward (6 n with y).

// f32 has 12 bytes an element to wait for, time enough for the exact quotient; half precision is rounded far above the
// error of the quick one.
__device__ __forceinline__ float sigmoid(float g, f32) { return 1.f / (1.f + expf(-g)); }
__device__ __forceinline__ float sigmoid(float g, f16) { return __fdividef(1.f, 1.f + exp_fast(-g)); }
__device__ __forceinline__ float sigmoid(float g, bf16) { return __fdividef(1.f, 1.f + exp_fast(-g)); }

const int UNROLL = 2; // packs of a thread, loaded before the first is used

// What this block has of a flat buffer of n: at most this many elements, from `start`.
template <int N> __device__ __forceinline__ int of_block(long long n, long long* start) {
    const int ELEMENTS = 256 * UNROLL * N;
    *start = (long long)blockIdx.x * ELEMENTS;
    long long left = n - *start;
    return left < ELEMENTS ? (int)left : ELEMENTS;
}

template <class T> __device__ __forceinline__ void forward(const T* gate, const T* up, T* y, long long n) {
    const int N = InVector<T>::COUNT;
    long long start;
    int count = of_block<N>(n, &start);
    gate += start, up += start, y += start;
    Pack<T, N> of_gate[UNROLL], of_up[UNROLL];
#pragma unroll
    for (int k = 0; k < UNROLL; k++) {
        int first = (k * 256 + threadIdx.x) * N;
        if (first >= count) continue;
        of_gate[k] = load<T, N>(gate, first, count, 0.f);
        of_up[k] = load<T, N>(up, first, count, 0.f);
    }
#pragma unroll
    for (int k = 0; k < UNROLL; k++) {
        int first = (k * 256 + threadIdx.x) * N;
        if (first >= count) continue;
        float g[N], u[N];
        unpack(of_gate[k], g);
        unpack(of_up[k], u);
#pragma unroll
        for (int i = 0; i < N; i++) g[i] = g[i] * sigmoid(g[i], T()) * u[i];
        store(y, first, count, g);
    }
}

template <class T>
__device__ __forceinline__ void backward(const T* dy, const T* gate, const T* up, T* dgate, T* dup, T* y, long long n) {
    const int N = InVector<T>::COUNT;
    long long start;
    int count = of_block<N>(n, &start);
    dy += start, gate += start, up += start, dgate += start, dup += start;
    Pack<T, N> of_dy[UNROLL], of_gate[UNROLL], of_up[UNROLL];
#pragma unroll
    for (int k = 0; k < UNROLL; k++) {
        int first = (k * 256 + threadIdx.x) * N;
        if (first >= count) continue;
        of_dy[k] = load<T, N>(dy, first, count, 0.f);
        of_gate[k] = load<T, N>(gate, first, count, 0.f);
        of_up[k] = load<T, N>(up, first, count, 0.f);
    }
#pragma unroll
    for (int k = 0; k < UNROLL; k++) {
        int first = (k * 256 + threadIdx.x) * N;
        if (first >= count) continue;
        float d[N], g[N], u[N], again[N];
        unpack(of_dy[k], d);
        unpack(of_gate[k], g);
        unpack(of_up[k], u);
#pragma unroll
        for (int i = 0; i < N; i++) {
            float s = sigmoid(g[i], T());
            again[i] = g[i] * s * u[i];
            u[i] = d[i] * u[i] * s * (1.f + g[i] * (1.f - s));
            d[i] = d[i] * g[i] * s;
        }
        store(dgate, first, count, u);
        store(dup, first, count, d);
        if (y) store(y + start, first, count, again);
    }
}

#define SWIGLU(NAME)                                                                                                     \
    extern "C" __global__ void __launch_bounds__(256)                                                                    \
        swiglu_forward_##NAME(const NAME* gate, const NAME* up, NAME* y, long long n) {                                  \
        forward<NAME>(gate, up, y, n);                                                                                   \
    }                                                                                                                    \
    extern "C" __global__ void __launch_bounds__(256)                                                                    \
        swiglu_backward_##NAME(const NAME* dy, const NAME* gate, const NAME* up, NAME* dgate, NAME* dup, NAME* y,        \
                               long long n) {                                                                            \
        backward<NAME>(dy, gate, up, dgate, dup, y, n);                                                                  \
    }

SWIGLU(f32)
SWIGLU(f16)
SWIGLU(bf16)
