// The sum of a buffer, in f64 in a fixed order, and its gradient.
//
// sum_parts: parts (count) f64 = partial sums of x (n); part p begins at element p `per_part`. Grid count, block 256.
// sum_whole: y (1) = `factor` times the sum of parts (count). One block of 1024.
// spread: y (n) = dy (1) times `factor`. Grid ceil(n / 2048), block 256.
//
// The product with `factor` is f64. It is rounded to f32, then to y's type.

// The sum of `value` over the block in a fixed order. Thread 0 has the result.
template <int THREADS> __device__ __forceinline__ double sum_of_block(double value) {
    __shared__ double sums[THREADS];
    sums[threadIdx.x] = value;
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    return sums[0];
}

template <class T>
__device__ __forceinline__ void sum_parts(const T* x, double* parts, long long n, long long per_part) {
    long long start = blockIdx.x * per_part, left = n - start;
    int count = (int)(left < 0 ? 0 : left < per_part ? left : per_part);
    x += start;
    double sum = 0.0;
#pragma unroll 4
    for (int first = threadIdx.x * 4; first < count; first += 256 * 4) {
        float values[4];
        load_few(x, first, count, values);
        sum += ((double)values[0] + (double)values[1]) + ((double)values[2] + (double)values[3]);
    }
    sum = sum_of_block<256>(sum);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

template <class T> __device__ __forceinline__ void sum_whole(const double* parts, T* y, int count, double factor) {
    double sum = 0.0;
    for (int part = threadIdx.x; part < count; part += 1024) sum += parts[part];
    sum = sum_of_block<1024>(sum);
    if (threadIdx.x == 0) *y = narrow<T>((float)(sum * factor));
}

template <class T> __device__ __forceinline__ void spread(const T* dy, T* y, long long n, double factor) {
    long long start = (long long)blockIdx.x * 2048, left = n - start;
    int count = left < 2048 ? (int)left : 2048;
    float value = (float)((double)widen(*dy) * factor), values[4] = {value, value, value, value};
#pragma unroll
    for (int k = 0; k < 2; k++) store_few(y + start, (k * 256 + threadIdx.x) * 4, count, values);
}

#define REDUCE(NAME)                                                                                                   \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        sum_parts_##NAME(const NAME* x, double* parts, long long n, long long per_part) {                              \
        sum_parts<NAME>(x, parts, n, per_part);                                                                        \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(1024)                                                                 \
        sum_whole_##NAME(const double* parts, NAME* y, int count, double factor) {                                     \
        sum_whole<NAME>(parts, y, count, factor);                                                                      \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        spread_##NAME(const NAME* dy, NAME* y, long long n, double factor) {                                           \
        spread<NAME>(dy, y, n, factor);                                                                                \
    }

REDUCE(f32)
REDUCE(f16)
REDUCE(bf16)
