// AdamW on many tensors in one launch. Included after tables.cuh.
//
//   g = min(max(g factor, -clip_value), clip_value);  m += (1 - beta1) (g - m);  v = beta2 v + (1 - beta2) g^2
//   p = p decay - step_size m / (sqrt(v) / second_correction + eps)
//
// with decay = 1 - lr weight_decay, step_size = lr / (1 - beta1^t), second_correction = sqrt(1 - beta2^t). Every
// operation is rounded separately, in PyTorch's order, so the bits are the CPU's.
//
// Bytes per element, f32: 16 in, 12 out (+ 2 out for a half-precision copy). Pointers at 16 bytes are fastest.
//
// Moments in bf16 (12 in, 8 out) are rounded stochastically by the element's index and the key. These bits are the
// CPU's too (kernels/stochastic.rs).

__device__ __forceinline__ void step(float* p, float g, float* m, float* v, const Update& u) {
    g = g > u.clip_value ? u.clip_value : g < -u.clip_value ? -u.clip_value : g; // keeps NaN
    *m = add(*m, mul(u.one_minus_beta1, sub(g, *m)));
    *v = add(mul(*v, u.beta2), mul(mul(u.one_minus_beta2, g), g));
    float denominator = add(__fdiv_rn(__fsqrt_rn(*v), u.second_correction), u.eps);
    *p = sub(mul(*p, u.decay), __fdiv_rn(mul(u.step_size, *m), denominator));
}

__device__ __forceinline__ unsigned mixed(unsigned x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

__device__ __forceinline__ float round_to_bf16(float x, unsigned random) {
    unsigned bits = __float_as_uint(x), rounded = (bits + random) & 0xffff0000u;
    return __uint_as_float((bits & 0x7f800000u) == 0x7f800000u ? bits : rounded);
}

// Rounds moments to the values that are stored: unchanged in f32, rounded in bf16.
__device__ __forceinline__ void round_moments(float*, float*, unsigned, unsigned, float) {}
__device__ __forceinline__ void round_moments(float* m, float* v, unsigned key, unsigned element, bf16) {
    unsigned random = mixed(key ^ element * 0x9e3779b9u);
    *m = round_to_bf16(*m, random & 0xffffu);
    *v = round_to_bf16(*v, random >> 16);
}

// M: the type of the moments. C: the type of `copy`. MASTER: `copy` is the parameter, which others read and may set. If
// it is not the rounded master weight it has been set since, and the step starts from it. clip may be null. Grid: the
// chunks; block 256.
template <class G, class M, class C, bool MASTER>
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
    int count;
    long long start = begin_of(chunk, tensor, &count);
    float* parameter = tensor.parameter + start;
    const G* gradient = (const G*)tensor.gradient + start;
    M* first_moment = (M*)tensor.first + start;
    M* second_moment = (M*)tensor.second + start;
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
        for (int i = 0; i < N; i++) {
            step(&p[i], mul(g[i], factor), &m[i], &v[i], u);
            round_moments(&m[i], &v[i], u.rounding, (unsigned)(start + first + i), M());
        }
        store_few(parameter, first, count, p);
        store_few(first_moment, first, count, m);
        store_few(second_moment, first, count, v);
        if (copy) store_few(copy, first, count, p);
    }
}

#define ADAMW(NAME, G, C, MASTER)                                                                                      \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        adamw_##NAME(const Tensor* tensors, const Chunk* chunks, const Update* updates, const Clip* clip) {            \
        adamw<G, f32, C, MASTER>(tensors, chunks, updates, clip);                                                      \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        adamw_##NAME##_moments(const Tensor* tensors, const Chunk* chunks, const Update* updates, const Clip* clip) {  \
        adamw<G, bf16, C, MASTER>(tensors, chunks, updates, clip);                                                     \
    }

ADAMW(f32, f32, bf16, false) // gradients in f32; an optional copy in bf16
ADAMW(f32_f16, f32, f16, false)
ADAMW(f32_of_bf16, bf16, bf16, false) // gradients and copies in bf16
ADAMW(bf16, bf16, bf16, true)         // parameters and gradients in bf16
ADAMW(f16, f16, f16, true)
ADAMW(bf16_f32, f32, bf16, true) // parameters in bf16, gradients in f32
ADAMW(f16_f32, f32, f16, true)
