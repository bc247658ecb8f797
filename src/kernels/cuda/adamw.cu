// AdamW on many tensors in one launch, the norm of many gradients, and whether they are finite.
//
//   g *= factor;  m += (1 - beta1) (g - m);  v = beta2 v + (1 - beta2) g^2
//   p = p decay - step_size m / (sqrt(v) / second_correction + eps)
//
// with decay = 1 - lr weight_decay, step_size = lr / (1 - beta1^t), second_correction = sqrt(1 - beta2^t). Every operation
// is rounded on its own, in PyTorch's order: the CPU's bits.
//
// The host lays out two tables on the device once: a Tensor for each parameter, and a Chunk for each CHUNK elements of each,
// in order. What changes from step to step (Update, Clip) is read from device memory too, so that a captured graph can be
// replayed, and nothing waits for the host.
//
// Bytes an element, f32: 16 in, 12 out (+ 2 out for a half-precision copy). Pointers are best at 16 bytes.

const int CHUNK = 8192; // elements of a block

struct Tensor {
    float* parameter;     // (n); of a parameter in half precision its exact value
    const void* gradient; // (n), G
    float* first;         // (n), exp_avg
    float* second;        // (n), exp_avg_sq
    void* copy;           // (n), the parameter rounded to half precision, or null
    long long n;
    int group; // which Update
    int unused;
};

struct Chunk {
    int tensor;
    int index; // elements CHUNK * index .. of it
};

struct Update {
    float decay, first_share, beta2, second_share, step_size, second_correction, eps, unused;
};

struct Clip {
    double norm;    // of all gradients, unscaled
    double factor;  // what they are multiplied by
    int skip;       // 1: the norm is not finite, and AdamW leaves everything as it is
    int non_finite; // the first tensor with an infinite or NaN gradient, or -1
};

__device__ __forceinline__ void step(float* p, float g, float* m, float* v, const Update& u) {
    *m = add(*m, mul(u.first_share, sub(g, *m)));
    *v = add(mul(*v, u.beta2), mul(mul(u.second_share, g), g));
    float denominator = add(__fdiv_rn(__fsqrt_rn(*v), u.second_correction), u.eps);
    *p = sub(mul(*p, u.decay), __fdiv_rn(mul(u.step_size, *m), denominator));
}

// C: the type of `copy`. MASTER: the copy is what others see and may set: where it is not the exact value's rounding,
// somebody set it since, and the step starts from it. clip may be null. Grid: the chunks; block 256.
template <class G, class C, bool MASTER>
__device__ __forceinline__ void adamw(const Tensor* tensors, const Chunk* chunks, const Update* updates,
                                      const Clip* clip) {
    const int N = 4;
    Chunk chunk = chunks[blockIdx.x];
    const Tensor& tensor = tensors[chunk.tensor];
    const Update u = updates[tensor.group];
    float factor = 1.f;
    if (clip) {
        if (clip->skip) return;
        factor = (float)clip->factor;
    }
    long long start = (long long)chunk.index * CHUNK, left = tensor.n - start;
    int count = left < CHUNK ? (int)left : CHUNK;
    float* parameter = tensor.parameter + start;
    const G* gradient = (const G*)tensor.gradient + start;
    float* first_moment = tensor.first + start;
    float* second_moment = tensor.second + start;
    C* copy = tensor.copy ? (C*)tensor.copy + start : nullptr;

    for (int first = threadIdx.x * N; first < count; first += 256 * N) {
        float p[N], g[N], m[N], v[N];
        load_few(parameter, first, count, p);
        load_few(gradient, first, count, g);
        load_few(first_moment, first, count, m);
        load_few(second_moment, first, count, v);
        if (MASTER) {
            float seen[N];
            load_few(copy, first, count, seen);
#pragma unroll
            for (int i = 0; i < N; i++) p[i] = widen(narrow<C>(p[i])) == seen[i] ? p[i] : seen[i];
        }
#pragma unroll
        for (int i = 0; i < N; i++) step(&p[i], mul(g[i], factor), &m[i], &v[i], u);
        store_few(parameter, first, count, p);
        store_few(first_moment, first, count, m);
        store_few(second_moment, first, count, v);
        if (copy) store_few(copy, first, count, p);
    }
}

#define ADAMW(NAME, G, C, MASTER)                                                                                        \
    extern "C" __global__ void __launch_bounds__(256)                                                                    \
        adamw_##NAME(const Tensor* tensors, const Chunk* chunks, const Update* updates, const Clip* clip) {              \
        adamw<G, C, MASTER>(tensors, chunks, updates, clip);                                                             \
    }

ADAMW(f32, f32, bf16, false) // gradients f32; a copy in bf16 where there is one
ADAMW(f32_f16, f32, f16, false)
ADAMW(bf16, bf16, bf16, true) // parameters and gradients in bf16
ADAMW(f16, f16, f16, true)
ADAMW(bf16_f32, f32, bf16, true) // parameters in bf16, gradients in f32
ADAMW(f16_f32, f32, f16, true)

// ---- The norm of all gradients

// sums (chunks) f64: each chunk's sum of squares, in f64 in a fixed order. Grid: the chunks; block 256. Bytes: gradients in.
template <class G>
__device__ __forceinline__ void sum_of_squares(const Tensor* tensors, const Chunk* chunks, double* sums) {
    const int N = InVector<G>::COUNT;
    __shared__ double of_warps[8];
    Chunk chunk = chunks[blockIdx.x];
    const Tensor& tensor = tensors[chunk.tensor];
    long long start = (long long)chunk.index * CHUNK, left = tensor.n - start;
    int count = left < CHUNK ? (int)left : CHUNK;
    const G* gradient = (const G*)tensor.gradient + start;

    double even = 0.0, odd = 0.0;
#pragma unroll 4
    for (int first = threadIdx.x * N; first < count; first += 256 * N) {
        float g[N];
        load_wide(gradient, first, count, 0.f, g);
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

#define SUM_OF_SQUARES(NAME)                                                                                             \
    extern "C" __global__ void __launch_bounds__(256)                                                                    \
        sum_of_squares_##NAME(const Tensor* tensors, const Chunk* chunks, double* sums) {                                \
        sum_of_squares<NAME>(tensors, chunks, sums);                                                                     \
    }

SUM_OF_SQUARES(f32)
SUM_OF_SQUARES(f16)
SUM_OF_SQUARES(bf16)

// clip from the chunks' sums (count): norm = sqrt(sum) inverse, factor = inverse * min(1, max_norm / (norm + 1e-6)), where
// inverse (1) f64 undoes a loss scale, or is null for 1. max_norm infinite: no clipping. One block of 1024 threads.
extern "C" __global__ void __launch_bounds__(1024)
    clip_factor(const double* sums, const Chunk* chunks, long long count, double max_norm, const double* inverse,
                Clip* clip) {
    __shared__ double totals[1024];
    __shared__ int bad[1024];
    const int NONE = 0x7fffffff;
    double total = 0.0;
    int culprit = NONE;
    const int AHEAD = 8; // sums loaded before the first is added
    for (long long start = threadIdx.x; start < count; start += AHEAD * 1024) {
        double sum[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++) sum[k] = start + k * 1024 < count ? sums[start + k * 1024] : 0.0;
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            total += sum[k];
            if (!(sum[k] * 0.0 == 0.0)) culprit = min(culprit, chunks[start + k * 1024].tensor);
        }
    }
    totals[threadIdx.x] = total;
    bad[threadIdx.x] = culprit;
    for (int half = 512; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) {
            totals[threadIdx.x] += totals[threadIdx.x + half];
            bad[threadIdx.x] = min(bad[threadIdx.x], bad[threadIdx.x + half]);
        }
    }
    if (threadIdx.x > 0) return;
    double unscaled = inverse ? *inverse : 1.0;
    double norm = sqrt(totals[0]) * unscaled, factor = max_norm / (norm + 1e-6);
    bool finite = norm * 0.0 == 0.0;
    clip->norm = norm;
    clip->factor = finite && factor < 1.0 ? factor * unscaled : unscaled;
    clip->skip = finite ? 0 : 1;
    clip->non_finite = bad[0] == NONE ? -1 : bad[0];
}
