// Updates of many tensors in one launch, by a rule. Included after tables.cuh and the rules.
//
// A rule is a struct of at most 7 coefficients, with the number of its tensors of state, STATES, and step(p, g, states),
// which updates an element's value p and states from its gradient g. If the rule CLIPS, gradients are clipped before:
// g = min(max(g factor, -clip_value), clip_value). Every operation is rounded separately, in the CPU's order, so the
// bits are the CPU's. Pointers at 16 bytes are fastest.
//
// States in bf16 are rounded stochastically by the element's index and the key. These bits are the CPU's too
// (kernels/stochastic.rs).

__device__ __forceinline__ unsigned mixed(unsigned x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

__device__ __forceinline__ float round_to_bf16(float x, unsigned random) {
    unsigned bits = __float_as_uint(x), rounded = (bits + random) & 0xffff0000u;
    return __uint_as_float((bits & 0x7f800000u) == 0x7f800000u ? bits : rounded);
}

// Rounds states to the values that are stored: unchanged in f32, rounded in bf16.
template <int STATES>
__device__ __forceinline__ void round_states(float*, unsigned, unsigned, float) {}
template <int STATES>
__device__ __forceinline__ void round_states(float* states, unsigned key, unsigned element, bf16) {
    unsigned random = mixed(key ^ element * 0x9e3779b9u);
#pragma unroll
    for (int k = 0; k < STATES; k++) states[k] = round_to_bf16(states[k], random >> 16 * k & 0xffffu);
}

// R: the rule. M: the type of the states. C: the type of `copy`. MASTER: `copy` is the parameter, which others read and may set. If
// it is not the rounded master weight it has been set since, and the step starts from it. clip may be null. Grid: the
// chunks; block 256.
template <class R, class G, class M, class C, bool MASTER>
__device__ __forceinline__ void update(const Tensor* tensors, const Chunk* chunks, const Update* updates,
                                       const Clip* clip) {
    const int N = 4, STATES = R::STATES;
    Chunk chunk = chunks[blockIdx.x];
    const Tensor& tensor = tensors[chunk.tensor];
    const Update u = updates[tensor.group];
    const R rule = *(const R*)updates[tensor.group].coefficients;
    float factor = 1.f;
    if (clip) {
        if (clip->skip) return;
        factor = (float)clip->factor;
    }
    int count;
    long long start = begin_of(chunk, tensor, &count);
    float* parameter = tensor.parameter + start;
    const G* gradient = (const G*)tensor.gradient + start;
    C* copy = tensor.copy ? (C*)tensor.copy + start : nullptr;

    for (int first = threadIdx.x * N; first < count; first += 256 * N) {
        float p[N], g[N], s[2][N];
        load_few(parameter, first, count, p);
        load_few(gradient, first, count, g);
#pragma unroll
        for (int k = 0; k < STATES; k++) load_few((const M*)tensor.states[k] + start, first, count, s[k]);
        if (MASTER) {
            float seen[N];
            load_few(copy, first, count, seen);
#pragma unroll
            for (int i = 0; i < N; i++) p[i] = widen(narrow<C>(p[i])) == seen[i] ? p[i] : seen[i];
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
            float one = g[i], states[2];
            if (R::CLIPS) {
                one = mul(one, factor);
                one = one > u.clip_value ? u.clip_value : one < -u.clip_value ? -u.clip_value : one; // keeps NaN
            }
#pragma unroll
            for (int k = 0; k < STATES; k++) states[k] = s[k][i];
            rule.step(&p[i], one, states);
            round_states<STATES>(states, u.rounding, (unsigned)(start + first + i), M());
#pragma unroll
            for (int k = 0; k < STATES; k++) s[k][i] = states[k];
        }
        store_few(parameter, first, count, p);
#pragma unroll
        for (int k = 0; k < STATES; k++) store_few((M*)tensor.states[k] + start, first, count, s[k]);
        if (copy) store_few(copy, first, count, p);
    }
}

#define UPDATE(NAME, R, G, M, C, MASTER)                                                                               \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        NAME(const Tensor* tensors, const Chunk* chunks, const Update* updates, const Clip* clip) {                    \
        update<R, G, M, C, MASTER>(tensors, chunks, updates, clip);                                                    \
    }

#define UPDATES(NAME, R, M, SUFFIX)                                                                                    \
    UPDATE(NAME##_f32##SUFFIX, R, f32, M, bf16, false) /* gradients in f32; an optional copy in bf16 */                \
    UPDATE(NAME##_f32_f16##SUFFIX, R, f32, M, f16, false)                                                              \
    UPDATE(NAME##_f32_of_bf16##SUFFIX, R, bf16, M, bf16, false) /* gradients and copies in bf16 */                     \
    UPDATE(NAME##_bf16##SUFFIX, R, bf16, M, bf16, true)         /* parameters and gradients in bf16 */                 \
    UPDATE(NAME##_f16##SUFFIX, R, f16, M, f16, true)                                                                   \
    UPDATE(NAME##_bf16_f32##SUFFIX, R, f32, M, bf16, true) /* parameters in bf16, gradients in f32 */                  \
    UPDATE(NAME##_f16_f32##SUFFIX, R, f32, M, f16, true)

UPDATES(adamw, AdamW, f32, )
UPDATES(adamw, AdamW, bf16, _moments)
UPDATES(lion, Lion, f32, )
UPDATES(sgd, Sgd, f32, )
UPDATES(sgd_momentum, SgdMomentum, f32, )
UPDATES(muon_direction, MuonDirection, f32, )
UPDATES(muon, Muon, f32, )
