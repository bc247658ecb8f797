// The beginning of Muon's iteration: matrices are divided by their Frobenius norms. They are stored one after another,
// n elements each, in chunks of CHUNK. Sums are f64, in a fixed order.

const int CHUNK = 8192; // elements per block

// The number of elements of this block's chunk of a matrix of n; `start` receives its first in all matrices.
__device__ __forceinline__ int of_chunk(long long n, int chunks, long long* start) {
    long long matrix = blockIdx.x / chunks, first = (long long)(blockIdx.x % chunks) * CHUNK, left = n - first;
    *start = matrix * n + first;
    return left < CHUNK ? (int)left : CHUNK;
}

// sums (matrices, chunks) f64: the sum of squares of each chunk of x (matrices, n). Grid: all chunks; block 256. Bytes:
// x in.
extern "C" __global__ void __launch_bounds__(256) squares(const float* x, long long n, int chunks, double* sums) {
    long long start;
    int count = of_chunk(n, chunks, &start);
    double sum = 0.0;
#pragma unroll 4
    for (int first = threadIdx.x * 4; first < count; first += 256 * 4) {
        float values[4];
        load_few(x + start, first, count, values);
#pragma unroll
        for (int i = 0; i < 4; i++) sum = fma((double)values[i], (double)values[i], sum);
    }
    sum = sum_of_block(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// y = x / (norm + eps), both (matrices, n), with norm the root of a matrix's sums; x and y may be one buffer. Grid: all
// chunks; block 256. Bytes: x in, y out.
template <class T>
__device__ __forceinline__ void normalize(const float* x, T* y, long long n, int chunks, const double* sums,
                                          double eps) {
    long long start;
    int count = of_chunk(n, chunks, &start);
    const double* own = sums + (long long)(blockIdx.x / chunks) * chunks;
    double sum = 0.0;
    for (int k = threadIdx.x; k < chunks; k += 256) sum += own[k];
    float norm = (float)(sqrt(sum_of_block(sum)) + eps);
    for (int first = threadIdx.x * 4; first < count; first += 256 * 4) {
        float values[4];
        load_few(x + start, first, count, values);
#pragma unroll
        for (int i = 0; i < 4; i++) values[i] = __fdiv_rn(values[i], norm);
        store_few(y + start, first, count, values);
    }
}

extern "C" __global__ void __launch_bounds__(256)
    normalize_f32(const float* x, f32* y, long long n, int chunks, const double* sums, double eps) {
    normalize(x, y, n, chunks, sums, eps);
}
extern "C" __global__ void __launch_bounds__(256)
    normalize_bf16(const float* x, bf16* y, long long n, int chunks, const double* sums, double eps) {
    normalize(x, y, n, chunks, sums, eps);
}
