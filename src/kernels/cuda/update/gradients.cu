// Passes over all gradients before AdamW: unscaling, finiteness, norms, clipping. Included after tables.cuh. Sums are
// f64, in a fixed order.

// gradient (f32) *= inverse (1, f64, rounded to f32), rounded once. flags (tensors) u32 must be 0 at first; a tensor's
// flag becomes 1 if a result is not finite. Grid: the chunks; block 256. Bytes: gradients in and out.
extern "C" __global__ void __launch_bounds__(256)
    unscale(const Tensor* tensors, const Chunk* chunks, const double* inverse, unsigned* flags) {
    const int N = 4, PACKS = 4; // four packs per thread, loaded before the first is written
    Chunk chunk = chunks[blockIdx.x];
    const Tensor& tensor = tensors[chunk.tensor];
    int count;
    long long start = begin_of(chunk, tensor, &count);
    float* gradient = (float*)tensor.gradient + start;
    float factor = (float)*inverse, check = 0.f;
    for (int begin = threadIdx.x * N; begin < count; begin += PACKS * 256 * N) {
        float g[PACKS][N];
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
            int first = begin + k * 256 * N;
            if (first < count) load_few(gradient, first, count, g[k]);
        }
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
            int first = begin + k * 256 * N;
            if (first >= count) continue;
#pragma unroll
            for (int i = 0; i < N; i++) {
                g[k][i] = mul(g[k][i], factor);
                check += first + i < count ? g[k][i] * 0.f : 0.f; // NaN after the first result that is not finite
            }
            store_few(gradient, first, count, g[k]);
        }
    }
    if (!(check == 0.f)) flags[chunk.tensor] = 1; // all threads write the same
}

// sums (chunks) f64: the sum of squares of each chunk. Grid: the chunks; block 256. Bytes: gradients in.
template <class G>
__device__ __forceinline__ void chunk_squares(const Tensor* tensors, const Chunk* chunks, double* sums) {
    const int N = 4;
    __shared__ double of_warps[8];
    Chunk chunk = chunks[blockIdx.x];
    const Tensor& tensor = tensors[chunk.tensor];
    int count;
    const G* gradient = (const G*)tensor.gradient + begin_of(chunk, tensor, &count);

    double even = 0.0, odd = 0.0;
#pragma unroll 4
    for (int first = threadIdx.x * N; first < count; first += 256 * N) {
        float g[N];
        load_few(gradient, first, count, g);
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            even = fma((double)g[i], (double)g[i], even);
            odd = fma((double)g[i + 1], (double)g[i + 1], odd);
        }
    }
    double sum = even + odd;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    sum = 0.0;
    for (int warp = 0; warp < 8; warp++) sum += of_warps[warp];
    sums[blockIdx.x] = sum;
}

extern "C" __global__ void __launch_bounds__(256)
    chunk_squares_f32(const Tensor* tensors, const Chunk* chunks, double* sums) {
    chunk_squares<f32>(tensors, chunks, sums);
}
extern "C" __global__ void __launch_bounds__(256)
    chunk_squares_bf16(const Tensor* tensors, const Chunk* chunks, double* sums) {
    chunk_squares<bf16>(tensors, chunks, sums);
}
extern "C" __global__ void __launch_bounds__(256)
    chunk_squares_f16(const Tensor* tensors, const Chunk* chunks, double* sums) {
    chunk_squares<f16>(tensors, chunks, sums);
}

// squares (tensors) f64: the sum over each tensor's chunks. `tensors` and `sums` begin with the same tensor. Grid:
// these tensors; block 256.
extern "C" __global__ void __launch_bounds__(256)
    tensor_squares(const Tensor* tensors, const double* sums, double* squares) {
    const Tensor& tensor = tensors[blockIdx.x];
    sums += tensor.first_chunk - tensors[0].first_chunk;
    int count = (int)((tensor.n + CHUNK - 1) / CHUNK);
    double sum = 0.0;
#pragma unroll 4
    for (int k = threadIdx.x; k < count; k += 256) sum += sums[k];
    sum = sum_of_block(sum);
    if (threadIdx.x == 0) squares[blockIdx.x] = sum;
}

// The smallest of the block's 256 values, in the first thread.
__device__ __forceinline__ int least_of_block(int value) {
    __shared__ int values[256];
    values[threadIdx.x] = value;
    for (int half = 128; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) values[threadIdx.x] = min(values[threadIdx.x], values[threadIdx.x + half]);
    }
    return values[threadIdx.x];
}

// Computes clip from the squares (count) of all tensors: norm = sqrt(sum), factor = min(1, max_norm / (norm + 1e-6)),
// max_norm (1) f64. If the norm is not finite, factor is 1 and skip is set. One block of 256 threads.
extern "C" __global__ void __launch_bounds__(256)
    clip_factor(const double* squares, int count, const double* max_norm, Clip* clip) {
    double sum = 0.0;
    int culprit = count;
    for (int k = threadIdx.x; k < count; k += 256) {
        double square = squares[k];
        sum += square;
        if (!(square * 0.0 == 0.0)) culprit = min(culprit, k);
    }
    sum = sum_of_block(sum);
    culprit = least_of_block(culprit);
    if (threadIdx.x > 0) return;
    double norm = sqrt(sum), factor = *max_norm / (norm + 1e-6);
    bool finite = norm * 0.0 == 0.0;
    clip->norm = norm;
    clip->factor = finite && factor < 1.0 ? factor : 1.0;
    clip->skip = finite ? 0 : 1;
    clip->non_finite = culprit == count ? -1 : culprit;
}

// first (1) u32: the index of the first of flags (count) u32 that is set, or count. clip: no clipping, and skip if a
// flag is set. One block of 256 threads.
extern "C" __global__ void __launch_bounds__(256)
    check_overflow(const unsigned* flags, int count, unsigned* first, Clip* clip) {
    int culprit = count;
    for (int k = threadIdx.x; k < count; k += 256) {
        if (flags[k]) culprit = min(culprit, k);
    }
    culprit = least_of_block(culprit);
    if (threadIdx.x > 0) return;
    *first = culprit;
    clip->norm = 0.0;
    clip->factor = 1.0;
    clip->skip = culprit == count ? 0 : 1;
    clip->non_finite = culprit == count ? -1 : culprit;
}
