// Log-softmax of rows: y = (x - top) - ln(total), where top is the row's largest element and total the sum of exp(x -
// top). The gradient is dx = dy - softmax(x) sum(dy), from x: y in half precision has too few digits. Computed in f32,
// rounded once.
//
// All buffers (rows, width). Grid ceil(rows / y), block (x, y) = (min(512, 32 ceil(packs / 128)), max(1, 128 / x)),
// with packs = ceil(width / N), N = 16 / size of T. 16-byte alignment only for speed. Bytes: x and y once; backward dy,
// x and dx once. A second read of each input comes from the caches.

struct Statistics {
    float top, total;
};

template <class T> __device__ __forceinline__ Statistics statistics_of(const T* x, int width) {
    const int N = InVector<T>::COUNT;
    float top = LOWEST, total = 0.f;
    for (int first = threadIdx.x * N - skew_of(x); first < width; first += blockDim.x * N) {
        float values[N], before = top;
        load_wide(x, first, width, MINUS_INFINITY, values);
#pragma unroll
        for (int i = 0; i < N; i++) top = fmaxf(top, values[i]);
        total *= exp_fast(before - top);
#pragma unroll
        for (int i = 0; i < N; i++) total += exp_fast(values[i] - top);
    }
    float of_row = reduce_row<Largest>(top, 0);
    return {of_row, reduce_row<Sum>(total * exp_fast(top - of_row), 1)};
}

template <class T> __device__ __forceinline__ void forward(const T* x, T* y, long long rows, int width) {
    const int N = InVector<T>::COUNT;
    long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    x += row * width, y += row * width;
    Statistics seen = statistics_of(x, width);
    float log_total = logf(seen.total);
    for (int first = threadIdx.x * N - skew_of(y); first < width; first += blockDim.x * N) {
        float values[N];
        load_wide(x, first, width, 0.f, values);
#pragma unroll
        for (int i = 0; i < N; i++) values[i] = (values[i] - seen.top) - log_total;
        store(y, first, width, values);
    }
}

template <class T> __device__ __forceinline__ void backward(const T* dy, const T* x, T* dx, long long rows, int width) {
    const int N = InVector<T>::COUNT;
    long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    dy += row * width, x += row * width, dx += row * width;
    Statistics seen = statistics_of(x, width);
    float sum = 0.f;
    for (int first = threadIdx.x * N - skew_of(dy); first < width; first += blockDim.x * N) {
        float values[N];
        load_wide(dy, first, width, 0.f, values);
#pragma unroll
        for (int i = 0; i < N; i++) sum += values[i];
    }
    float share = reduce_row<Sum>(sum, 2) / seen.total;
    for (int first = threadIdx.x * N - skew_of(dx); first < width; first += blockDim.x * N) {
        float of_x[N], values[N];
        load_wide(x, first, width, 0.f, of_x);
        load_wide(dy, first, width, 0.f, values);
#pragma unroll
        for (int i = 0; i < N; i++) values[i] -= exp_fast(of_x[i] - seen.top) * share;
        store(dx, first, width, values);
    }
}

#define LOG_SOFTMAX(NAME)                                                                                              \
    extern "C" __global__ void __launch_bounds__(512)                                                                  \
        log_softmax_##NAME(const NAME* x, NAME* y, long long rows, int width) {                                        \
        forward<NAME>(x, y, rows, width);                                                                              \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(512)                                                                  \
        log_softmax_backward_##NAME(const NAME* dy, const NAME* x, NAME* dx, long long rows, int width) {              \
        backward<NAME>(dy, x, dx, rows, width);                                                                        \
    }

LOG_SOFTMAX(f32)
LOG_SOFTMAX(f16)
LOG_SOFTMAX(bf16)
