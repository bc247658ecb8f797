// Elementwise activations: y = f(x), and dx = dy f'(x) from x alone. All buffers (n). An output may be the buffer of an
// input.
//
// tanh; sigmoid; log_sigmoid; silu: x sigmoid(x); gelu: x Phi(x) with Phi the standard normal distribution function; gelu_tanh: x
// sigmoid(2 u) with u = sqrt(2 / pi) (x + 0.044715 x^3); soft_cap: cap tanh(scale x / cap).
//
// Grid ceil(packs / 512), block 256, with packs = ceil(n / N), N = 16 / size of T. Any n; 16-byte alignment only for
// speed. Bytes: 2 n elements forward, 3 n backward.

// sigmoid(x) and sigmoid(-x), without cancellation or overflow.
struct Sigmoids {
    float above, below;
};
__device__ __forceinline__ Sigmoids sigmoids(float x) {
    float e = expf(-fabsf(x)), large = 1.f / (1.f + e), small = e * large;
    Sigmoids result;
    result.above = x < 0.f ? small : large;
    result.below = x < 0.f ? large : small;
    return result;
}

struct Tanh {
    static __device__ __forceinline__ float value(float x) { return tanhf(x); }
    static __device__ __forceinline__ float slope(float x) {
        Sigmoids s = sigmoids(2.f * x); // 1 - tanh^2 without cancellation
        return 4.f * s.above * s.below;
    }
};

struct Sigmoid {
    static __device__ __forceinline__ float value(float x) { return sigmoids(x).above; }
    static __device__ __forceinline__ float slope(float x) {
        Sigmoids s = sigmoids(x);
        return s.above * s.below;
    }
};

struct LogSigmoid {
    static __device__ __forceinline__ float value(float x) { return (x > 0.f ? 0.f : x) - log1pf(expf(-fabsf(x))); }
    static __device__ __forceinline__ float slope(float x) { return sigmoids(x).below; }
};

struct Silu {
    static __device__ __forceinline__ float value(float x) { return x * sigmoids(x).above; }
    static __device__ __forceinline__ float slope(float x) {
        Sigmoids s = sigmoids(x);
        return s.above + x * s.above * s.below;
    }
};

struct Gelu {
    static __device__ __forceinline__ float value(float x) { return x * normcdff(x); }
    static __device__ __forceinline__ float slope(float x) {
        return normcdff(x) + x * 0.3989422804014327f * expf(-0.5f * (x * x));
    }
};

#define SLOPE 1.5957691216057308f // 2 sqrt(2 / pi)
#define CUBE 0.044715f

struct GeluTanh {
    static __device__ __forceinline__ float twice_u(float x) { return x * (SLOPE + SLOPE * CUBE * (x * x)); }
    static __device__ __forceinline__ float value(float x) { return x * sigmoids(twice_u(x)).above; }
    static __device__ __forceinline__ float slope(float x) {
        Sigmoids s = sigmoids(twice_u(x));
        float square = x * x;
        square = square > 4096.f ? 4096.f : square; // a larger square is multiplied by 0, so it must not be infinite
        return s.above + x * s.above * s.below * (SLOPE + 3.f * SLOPE * CUBE * square);
    }
};

struct SoftCap {
    float scale, cap;
    __device__ __forceinline__ float value(float x) const { return cap * tanhf(x * (scale / cap)); }
    __device__ __forceinline__ float slope(float x) const { return scale * Tanh::slope(x * (scale / cap)); }
};

template <class Op, class T> __device__ __forceinline__ void forward(Op op, const T* x, T* y, long long n) {
    const int N = InVector<T>::COUNT;
    long long start;
    int count = of_block<N>(n, &start);
    x += start, y += start;
    Pack<T, N> of_x[THREAD_PACKS];
    load_packs(x, count, of_x);
#pragma unroll
    for (int k = 0; k < THREAD_PACKS; k++) {
        int first = (k * 256 + threadIdx.x) * N;
        if (first >= count) continue;
        float values[N];
        unpack(of_x[k], values);
#pragma unroll
        for (int i = 0; i < N; i++) values[i] = op.value(values[i]);
        store(y, first, count, values);
    }
}

template <class Op, class T>
__device__ __forceinline__ void backward(Op op, const T* dy, const T* x, T* dx, long long n) {
    const int N = InVector<T>::COUNT;
    long long start;
    int count = of_block<N>(n, &start);
    dy += start, x += start, dx += start;
    Pack<T, N> of_dy[THREAD_PACKS], of_x[THREAD_PACKS];
    load_packs(dy, count, of_dy);
    load_packs(x, count, of_x);
#pragma unroll
    for (int k = 0; k < THREAD_PACKS; k++) {
        int first = (k * 256 + threadIdx.x) * N;
        if (first >= count) continue;
        float slopes[N], values[N];
        unpack(of_dy[k], values);
        unpack(of_x[k], slopes);
#pragma unroll
        for (int i = 0; i < N; i++) values[i] *= op.slope(slopes[i]);
        store(dx, first, count, values);
    }
}

#define ACTIVATION(STEM, OP, NAME)                                                                                     \
    extern "C" __global__ void __launch_bounds__(256) STEM##_forward_##NAME(const NAME* x, NAME* y, long long n) {     \
        forward(OP(), x, y, n);                                                                                        \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        STEM##_backward_##NAME(const NAME* dy, const NAME* x, NAME* dx, long long n) {                                 \
        backward(OP(), dy, x, dx, n);                                                                                  \
    }

#define ACTIVATIONS(NAME)                                                                                              \
    ACTIVATION(tanh, Tanh, NAME)                                                                                       \
    ACTIVATION(sigmoid, Sigmoid, NAME)                                                                                 \
    ACTIVATION(log_sigmoid, LogSigmoid, NAME)                                                                          \
    ACTIVATION(silu, Silu, NAME)                                                                                       \
    ACTIVATION(gelu, Gelu, NAME)                                                                                       \
    ACTIVATION(gelu_tanh, GeluTanh, NAME)                                                                              \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        soft_cap_forward_##NAME(const NAME* x, NAME* y, long long n, float scale, float cap) {                         \
        forward(SoftCap{scale, cap}, x, y, n);                                                                         \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        soft_cap_backward_##NAME(const NAME* dy, const NAME* x, NAME* dx, long long n, float scale, float cap) {       \
        backward(SoftCap{scale, cap}, dy, x, dx, n);                                                                   \
    }

ACTIVATIONS(f32)
ACTIVATIONS(f16)
ACTIVATIONS(bf16)
