// Normal numbers truncated at 3 standard deviations: y = mean + std z, z the quantiles of random words. Included after
// philox.cuh. kernels/normal.rs has the formula and coefficients. The order of operations is the CPU's, and so are the
// bits.
//
// words: the key and the upper three words of the counter (philox.rs). y (n), any n. Grid ceil(n / N / 256), block 256,
// with N = 16 / size of T. Bytes: n elements. About 20 multiply-adds in f64 per element.

__constant__ double P[8] = {4.916153204249713e-8, 4.671128001711748e-5, 0.007041928464515937, 0.2642860993878242,
                            2.7991373176348473,   8.201792099468802,    5.484918260902054,    0.39618923030298564};
__constant__ double Q[8] = {1.2648572081170906e-8, 1.4411534808405508e-5, 0.00253038708530069, 0.11184715099701176,
                            1.4449544109938264,    5.531286725137423,     5.595809050136246,   1.0};

__device__ __forceinline__ double quantile(unsigned word) {
    double x = __dmul_rn((word + 0.5) * (1.0 / 2147483648.0) - 1.0, 0.9973002039367398);
    double t = fma(-x, x, 1.0), p = P[7], q = Q[7];
#pragma unroll
    for (int i = 6; i >= 0; i--) p = fma(p, t, P[i]), q = fma(q, t, Q[i]);
    return __ddiv_rn(__dmul_rn(x, p), q);
}

struct Words {
    unsigned key, key_high, counter[3];
};

template <class T> __device__ __forceinline__ void normal(T* y, long long n, Words words, double mean, double std) {
    const int N = InVector<T>::COUNT;
    long long start = ((long long)blockIdx.x * 256 + threadIdx.x) * N;
    if (start >= n) return;
    float values[N];
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        unsigned long long block = (unsigned long long)(start + i) / 4;
        unsigned second = words.counter[0] | (unsigned)(block >> 32);
        uint4 counter = make_uint4((unsigned)block, second, words.counter[1], words.counter[2]);
        uint4 random = philox(counter, words.key, words.key_high);
        values[i] = (float)fma(quantile(random.x), std, mean);
        values[i + 1] = (float)fma(quantile(random.y), std, mean);
        values[i + 2] = (float)fma(quantile(random.z), std, mean);
        values[i + 3] = (float)fma(quantile(random.w), std, mean);
    }
    long long left = n - start;
    store(y + start, 0, left < N ? (int)left : N, values);
}

#define NORMAL(NAME)                                                                                                   \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        normal_##NAME(NAME* y, long long n, Words words, double mean, double std) {                                    \
        normal(y, n, words, mean, std);                                                                                \
    }

NORMAL(f32)
NORMAL(f16)
NORMAL(bf16)
