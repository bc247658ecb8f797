// Gated activations: y = f(gate) up, f(g) = g s. All buffers (n); or packed, where gate and up are adjacent in the rows
// of one buffer (N, 2F), y (N, F). SiLU: s = 1 / (1 + exp(-g)). GELU: s = Phi(g), or 1 / (1 + exp(-2 u)) in the tanh
// approximation, with u = sqrt(2 / pi) (g + 0.044715 g^3).
//
// Backward: dgate = dy up f'(gate), dup = dy gate s. If y is not null, backward also recomputes y, so that forward need
// not save it. Any output may be the buffer of any input: a thread reads all its inputs before it writes.
//
// Grid ceil(packs / 512), block 256, with packs = ceil(n / N), or rows * ceil(F / N) if packed, N = 16 / size of T. Any
// n and F; 16-byte alignment, and F a multiple of N, only for speed. Bytes: 3 n elements forward, 5 n backward (6 n
// with y).

// f32 moves 12 bytes per element, which hides the time of the exact quotient. The error of the fast quotient is far
// below the rounding of half precision.
__device__ __forceinline__ float sigmoid(float g, f32) { return 1.f / (1.f + expf(-g)); }
__device__ __forceinline__ float sigmoid(float g, f16) { return __fdividef(1.f, 1.f + exp_fast(-g)); }
__device__ __forceinline__ float sigmoid(float g, bf16) { return __fdividef(1.f, 1.f + exp_fast(-g)); }

// value_over_gate is f(g) / g; gradient is d f'(g).
struct Silu {
    template <class T> static __device__ __forceinline__ float value_over_gate(float g) { return sigmoid(g, T()); }
    template <class T> static __device__ __forceinline__ float gradient(float d, float g, float s) {
        return d * s * (1.f + g * (1.f - s));
    }
};

struct Gelu {
    template <class T> static __device__ __forceinline__ float value_over_gate(float g) { return normcdff(g); }
    template <class T> static __device__ __forceinline__ float gradient(float d, float g, float s) {
        return d * (s + g * 0.3989422804014327f * expf(-0.5f * (g * g)));
    }
};

#define SLOPE 1.5957691216057308f // 2 sqrt(2 / pi)
#define CUBE 0.044715f

struct GeluTanh {
    static __device__ __forceinline__ float twice_u(float g) { return g * (SLOPE + SLOPE * CUBE * (g * g)); }
    template <class T> static __device__ __forceinline__ float value_over_gate(float g) { return sigmoid(twice_u(g), T()); }
    template <class T> static __device__ __forceinline__ float gradient(float d, float g, float s) {
        float square = fminf(g * g, 4096.f); // a larger square is multiplied by 0, so it must not be infinite
        float rest = g > 0.f ? sigmoid(-twice_u(g), T()) : 1.f - s; // without cancellation
        return d * (s + g * s * rest * (SLOPE + 3.f * SLOPE * CUBE * square));
    }
};

// Overwrites gate with y.
template <class T, class F, int N> __device__ __forceinline__ void gated(float (&gate)[N], const float (&up)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) gate[i] = gate[i] * F::template value_over_gate<T>(gate[i]) * up[i];
}

// Overwrites gate, up and dy with dgate, dup and y.
template <class T, class F, int N>
__device__ __forceinline__ void turned_back(float (&gate)[N], float (&up)[N], float (&dy)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        float g = gate[i], u = up[i], d = dy[i], s = F::template value_over_gate<T>(g);
        gate[i] = F::template gradient<T>(d * u, g, s);
        up[i] = d * g * s;
        dy[i] = g * s * u;
    }
}

template <class T, class F> __device__ __forceinline__ void forward(const T* gate, const T* up, T* y, long long n) {
    const int N = InVector<T>::COUNT;
    long long start;
    int count = of_block<N>(n, &start);
    gate += start, up += start, y += start;
    Pack<T, N> of_gate[THREAD_PACKS], of_up[THREAD_PACKS];
    load_packs(gate, count, of_gate);
    load_packs(up, count, of_up);
#pragma unroll
    for (int k = 0; k < THREAD_PACKS; k++) {
        int first = (k * 256 + threadIdx.x) * N;
        if (first >= count) continue;
        float g[N], u[N];
        unpack(of_gate[k], g);
        unpack(of_up[k], u);
        gated<T, F>(g, u);
        store(y, first, count, g);
    }
}

template <class T, class F>
__device__ __forceinline__ void backward(const T* dy, const T* gate, const T* up, T* dgate, T* dup, T* y, long long n) {
    const int N = InVector<T>::COUNT;
    long long start;
    int count = of_block<N>(n, &start);
    dy += start, gate += start, up += start, dgate += start, dup += start;
    Pack<T, N> of_dy[THREAD_PACKS], of_gate[THREAD_PACKS], of_up[THREAD_PACKS];
    load_packs(dy, count, of_dy);
    load_packs(gate, count, of_gate);
    load_packs(up, count, of_up);
#pragma unroll
    for (int k = 0; k < THREAD_PACKS; k++) {
        int first = (k * 256 + threadIdx.x) * N;
        if (first >= count) continue;
        float d[N], g[N], u[N];
        unpack(of_dy[k], d);
        unpack(of_gate[k], g);
        unpack(of_up[k], u);
        turned_back<T, F>(g, u, d);
        store(dgate, first, count, g);
        store(dup, first, count, u);
        if (y) store(y + start, first, count, d);
    }
}

// ---- Packed: y (rows, width), gate_up (rows, 2 width)

// The row and the first column of the thread's k-th pack of y. Packs are counted row by row, `packs` in each.
template <int N> __device__ __forceinline__ long long place_of(int k, int packs, int* first) {
    long long pack = ((long long)blockIdx.x * THREAD_PACKS + k) * 256 + threadIdx.x;
    long long row = pack < 0x100000000 ? (unsigned)pack / (unsigned)packs : pack / packs; // 64-bit division is slow
    *first = (int)(pack - row * packs) * N;
    return row;
}

// BACKWARD: y holds dy and is overwritten with y; gate_up is overwritten with its gradient.
template <class T, class F, bool BACKWARD, bool WHOLE, class GateUp>
__device__ __forceinline__ void packed(GateUp* gate_up, T* y, long long rows, int width) {
    const int N = InVector<T>::COUNT;
    int packs = (width + N - 1) / N, first[THREAD_PACKS];
    long long row[THREAD_PACKS];
    Pack<T, N> of_gate[THREAD_PACKS], of_up[THREAD_PACKS], of_dy[THREAD_PACKS];
#pragma unroll
    for (int k = 0; k < THREAD_PACKS; k++) {
        row[k] = place_of<N>(k, packs, &first[k]);
        if (row[k] >= rows) continue;
        const T* gate = gate_up + row[k] * 2 * width;
        of_gate[k] = load<T, N, WHOLE>(gate, first[k], width, 0.f);
        of_up[k] = load<T, N, WHOLE>(gate + width, first[k], width, 0.f);
        if (BACKWARD) of_dy[k] = load<T, N, WHOLE>(y + row[k] * width, first[k], width, 0.f);
    }
#pragma unroll
    for (int k = 0; k < THREAD_PACKS; k++) {
        if (row[k] >= rows) continue;
        float g[N], u[N], d[N];
        unpack(of_gate[k], g);
        unpack(of_up[k], u);
        if constexpr (BACKWARD) {
            unpack(of_dy[k], d);
            turned_back<T, F>(g, u, d);
            T* gate = gate_up + row[k] * 2 * width;
            store<WHOLE>(gate, first[k], width, g);
            store<WHOLE>(gate + width, first[k], width, u);
            store<WHOLE>(y + row[k] * width, first[k], width, d);
        } else {
            gated<T, F>(g, u);
            store<WHOLE>(y + row[k] * width, first[k], width, g);
        }
    }
}

template <class T, class F, bool BACKWARD, class GateUp>
__device__ __forceinline__ void packed(GateUp* gate_up, T* y, long long rows, int width) {
    if (whole_packs<InVector<T>::COUNT>(width, gate_up, y, nullptr)) {
        packed<T, F, BACKWARD, true>(gate_up, y, rows, width);
    } else {
        packed<T, F, BACKWARD, false>(gate_up, y, rows, width);
    }
}

#define GATED(STEM, F, NAME)                                                                                           \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        STEM##_forward_##NAME(const NAME* gate, const NAME* up, NAME* y, long long n) {                                \
        forward<NAME, F>(gate, up, y, n);                                                                              \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256) STEM##_backward_##NAME(                                          \
        const NAME* dy, const NAME* gate, const NAME* up, NAME* dgate, NAME* dup, NAME* y, long long n) {              \
        backward<NAME, F>(dy, gate, up, dgate, dup, y, n);                                                             \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        STEM##_packed_forward_##NAME(const NAME* gate_up, NAME* y, long long rows, int width) {                        \
        packed<NAME, F, false>(gate_up, y, rows, width);                                                               \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        STEM##_packed_backward_##NAME(NAME* gate_up, NAME* dy, long long rows, int width) {                            \
        packed<NAME, F, true>(gate_up, dy, rows, width);                                                               \
    }

#define GATES(NAME)                                                                                                    \
    GATED(swiglu, Silu, NAME)                                                                                          \
    GATED(geglu, Gelu, NAME)                                                                                           \
    GATED(geglu_tanh, GeluTanh, NAME)

GATES(f32)
GATES(f16)
GATES(bf16)
