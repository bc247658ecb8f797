// Rotary position embedding of adjacent pairs: y[2i] = x[2i] cos - x[2i+1] sin, y[2i+1] = x[2i] sin + x[2i+1] cos. By
// halves, with h = width / 2: y[i] = x[i] cos - x[i+h] sin, y[i+h] = x[i] sin + x[i+h] cos.
//
// x, y (outer, length, heads, width). Positions are `x_stride` and `y_stride` elements apart, heads * width if
// contiguous: (B, H, T, D) is outer B H, heads 1; (B, T, H D) is outer B, heads H; a slice of a fused q, k, v matmul
// has a larger stride. y may be x. cos, sin (rows, width / 2) f32. Position t uses row t, or row positions[t] (length,
// u32) if positions is not null. sign is 1, or -1 for the inverse rotation of backward. Products and sums are rounded
// separately, as on the CPU.
//
// Grid ceil(length * lanes / 256) * ceil(outer * heads / 4), block 256, with lanes = ceil(width / N), N = 16 / size of
// T; by halves lanes = ceil(width / 2N). width is even. Vectors are used if width and strides are multiples of N and
// pointers of 16 bytes; otherwise single elements. A thread has one pack of a head and reads its angles once for 4
// heads. Bytes: x in, y out.

const int ITEMS = 4; // heads per thread

template <class T> __device__ __forceinline__ void rotate(const T* x, T* y, const float* cos, const float* sin,
                                                          const unsigned* positions, float sign, int outer, int length,
                                                          int heads, int width, long long x_stride,
                                                          long long y_stride) {
    const int N = InVector<T>::COUNT;
    int lanes = (width + N - 1) / N;
    unsigned blocks = ((unsigned)length * lanes + 255) / 256, items_before = blockIdx.x / blocks; // of all packs
    int place = (blockIdx.x - items_before * blocks) * 256 + threadIdx.x;
    int t = place / lanes, first = (place - t * lanes) * N;
    if (t >= length) return;
    int item = items_before * ITEMS, items = min(ITEMS, outer * heads - item);

    Pack<T, N> of_x[ITEMS];
#pragma unroll
    for (int k = 0; k < ITEMS; k++) {
        if (k >= items) continue;
        int batch = (item + k) / heads, head = item + k - batch * heads;
        const T* row = x + ((long long)batch * length + t) * x_stride + (long long)head * width;
        of_x[k] = load<T, N>(row, first, width, 0.f);
    }
    float c[N / 2], s[N / 2];
    long long angle = (long long)(positions ? positions[t] : t) * (width / 2) + first / 2;
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        bool inside = first / 2 + i < width / 2;
        c[i] = inside ? cos[angle + i] : 0.f;
        s[i] = inside ? sin[angle + i] * sign : 0.f;
    }
#pragma unroll
    for (int k = 0; k < ITEMS; k++) {
        if (k >= items) continue;
        int batch = (item + k) / heads, head = item + k - batch * heads;
        T* row = y + ((long long)batch * length + t) * y_stride + (long long)head * width;
        float v[N];
        unpack(of_x[k], v);
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            float even = v[2 * i], odd = v[2 * i + 1];
            v[2 * i] = sub(mul(even, c[i]), mul(odd, s[i]));
            v[2 * i + 1] = add(mul(even, s[i]), mul(odd, c[i]));
        }
        store(row, first, width, v);
    }
}

// A thread has one pack of each half of a head.
template <class T> __device__ __forceinline__ void rotate_halves(const T* x, T* y, const float* cos, const float* sin,
                                                                 const unsigned* positions, float sign, int outer,
                                                                 int length, int heads, int width, long long x_stride,
                                                                 long long y_stride) {
    const int N = InVector<T>::COUNT;
    int half = width / 2, lanes = (half + N - 1) / N;
    unsigned blocks = ((unsigned)length * lanes + 255) / 256, items_before = blockIdx.x / blocks; // of all packs
    int place = (blockIdx.x - items_before * blocks) * 256 + threadIdx.x;
    int t = place / lanes, first = (place - t * lanes) * N;
    if (t >= length) return;
    int item = items_before * ITEMS, items = min(ITEMS, outer * heads - item);

    Pack<T, N> of_x[ITEMS][2];
#pragma unroll
    for (int k = 0; k < ITEMS; k++) {
        if (k >= items) continue;
        int batch = (item + k) / heads, head = item + k - batch * heads;
        const T* row = x + ((long long)batch * length + t) * x_stride + (long long)head * width;
        of_x[k][0] = load<T, N>(row, first, half, 0.f);
        of_x[k][1] = load<T, N>(row + half, first, half, 0.f);
    }
    float c[N], s[N];
    long long angle = (long long)(positions ? positions[t] : t) * half + first;
#pragma unroll
    for (int i = 0; i < N; i++) {
        bool inside = first + i < half;
        c[i] = inside ? cos[angle + i] : 0.f;
        s[i] = inside ? sin[angle + i] * sign : 0.f;
    }
#pragma unroll
    for (int k = 0; k < ITEMS; k++) {
        if (k >= items) continue;
        int batch = (item + k) / heads, head = item + k - batch * heads;
        T* row = y + ((long long)batch * length + t) * y_stride + (long long)head * width;
        float low[N], high[N];
        unpack(of_x[k][0], low);
        unpack(of_x[k][1], high);
#pragma unroll
        for (int i = 0; i < N; i++) {
            float x1 = low[i], x2 = high[i];
            low[i] = sub(mul(x1, c[i]), mul(x2, s[i]));
            high[i] = add(mul(x1, s[i]), mul(x2, c[i]));
        }
        store(row, first, half, low);
        store(row + half, first, half, high);
    }
}

#define ROPE(NAME)                                                                                                     \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        rope_##NAME(const NAME* x, NAME* y, const float* cos, const float* sin, const unsigned* positions, float sign, \
                    int outer, int length, int heads, int width, long long x_stride, long long y_stride) {             \
        rotate<NAME>(x, y, cos, sin, positions, sign, outer, length, heads, width, x_stride, y_stride);                \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256) rope_halves_##NAME(                                              \
        const NAME* x, NAME* y, const float* cos, const float* sin, const unsigned* positions, float sign, int outer,  \
        int length, int heads, int width, long long x_stride, long long y_stride) {                                    \
        rotate_halves<NAME>(x, y, cos, sin, positions, sign, outer, length, heads, width, x_stride, y_stride);         \
    }

ROPE(f32)
ROPE(f16)
ROPE(bf16)
