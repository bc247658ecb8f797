// Elementwise maps of one or two buffers: y = f(a, b), all (n), in f32, rounded once. y may be the buffer of a or b.
//
// `p` and `q` are numbers of some maps: a scale, an exponent, two bounds. Maps of one buffer do not read b. Products
// and sums are never fused, so that the bits are the CPU's except for exp, log and powers.
//
// Grid ceil(packs / 512), block 256, with packs = ceil(n / N), N = 16 / size of T. Any n; 16-byte alignment only for
// speed. Bytes: a and b in, y out.

#define OF_ONE(OP, VALUE)                                                                                              \
    struct OP {                                                                                                        \
        static const bool READS_B = false;                                                                             \
        static __device__ __forceinline__ float of(float a, float, float p, float q) { return VALUE; }                 \
    };
#define OF_TWO(OP, VALUE)                                                                                              \
    struct OP {                                                                                                        \
        static const bool READS_B = true;                                                                              \
        static __device__ __forceinline__ float of(float a, float b, float p, float q) { return VALUE; }               \
    };

OF_TWO(Sub, sub(a, b))
OF_TWO(Mul, mul(a, b))
OF_TWO(Div, __fdiv_rn(a, b))
OF_TWO(NegatedDiv, __fdiv_rn(-a, b))
OF_TWO(AddScaled, add(a, mul(p, b)))
OF_ONE(Neg, -a)
OF_ONE(Scale, mul(p, a))
OF_ONE(Exp, expf(a))
OF_ONE(Log, logf(a))
OF_ONE(Relu, a < 0.f ? 0.f : a)          // keeps NaN
OF_TWO(ReluBackward, b <= 0.f ? 0.f : a) // dy, y
OF_ONE(Pow, powf(a, p))
OF_TWO(PowBackward, mul(mul(a, powf(b, p - 1.f)), p)) // dy, x
OF_ONE(Rsqrt, __fdiv_rn(1.f, __fsqrt_rn(a)))
OF_ONE(Sqrt, __fsqrt_rn(a))
OF_TWO(SqrtBackward, __fdiv_rn(mul(0.5f, a), __fsqrt_rn(b))) // dy, x
OF_ONE(Abs, fabsf(a))
OF_TWO(AbsBackward, sub(b > 0.f ? a : 0.f, b < 0.f ? a : 0.f)) // dy, x
OF_ONE(Clamp, p > a ? p : q < a ? q : a)                       // keeps NaN
OF_TWO(ClampBackward, b > p && b < q ? a : 0.f)                // dy, x
OF_ONE(Affine, add(mul(p, a), q))

struct RsqrtBackward { // dy, x
    static const bool READS_B = true;
    static __device__ __forceinline__ float of(float a, float b, float, float) {
        float y = Rsqrt::of(b, 0.f, 0.f, 0.f);
        return mul(mul(mul(mul(-0.5f, a), y), y), y);
    }
};

template <class Op, class T>
__device__ __forceinline__ void map(const T* a, const T* b, T* y, long long n, float p, float q) {
    const int N = InVector<T>::COUNT;
    long long start;
    int count = of_block<N>(n, &start);
    a += start, b += start, y += start;
    Pack<T, N> of_a[THREAD_PACKS], of_b[THREAD_PACKS];
    load_packs(a, count, of_a);
    if (Op::READS_B) load_packs(b, count, of_b);
#pragma unroll
    for (int k = 0; k < THREAD_PACKS; k++) {
        int first = (k * 256 + threadIdx.x) * N;
        if (first >= count) continue;
        float values[N], others[N];
        unpack(of_a[k], values);
        if (Op::READS_B) unpack(of_b[k], others);
#pragma unroll
        for (int i = 0; i < N; i++) values[i] = Op::of(values[i], Op::READS_B ? others[i] : 0.f, p, q);
        store(y, first, count, values);
    }
}

#define MAP(STEM, OP, NAME)                                                                                            \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        STEM##_##NAME(const NAME* a, const NAME* b, NAME* y, long long n, float p, float q) {                          \
        map<OP, NAME>(a, b, y, n, p, q);                                                                               \
    }

#define MAPS(NAME)                                                                                                     \
    MAP(sub, Sub, NAME)                                                                                                \
    MAP(mul, Mul, NAME)                                                                                                \
    MAP(div, Div, NAME)                                                                                                \
    MAP(negated_div, NegatedDiv, NAME)                                                                                 \
    MAP(add_scaled, AddScaled, NAME)                                                                                   \
    MAP(neg, Neg, NAME)                                                                                                \
    MAP(scale, Scale, NAME)                                                                                            \
    MAP(exp, Exp, NAME)                                                                                                \
    MAP(log, Log, NAME)                                                                                                \
    MAP(relu, Relu, NAME)                                                                                              \
    MAP(relu_backward, ReluBackward, NAME)                                                                             \
    MAP(pow, Pow, NAME)                                                                                                \
    MAP(pow_backward, PowBackward, NAME)                                                                               \
    MAP(rsqrt, Rsqrt, NAME)                                                                                            \
    MAP(rsqrt_backward, RsqrtBackward, NAME)                                                                           \
    MAP(sqrt, Sqrt, NAME)                                                                                              \
    MAP(sqrt_backward, SqrtBackward, NAME)                                                                             \
    MAP(abs, Abs, NAME)                                                                                                \
    MAP(abs_backward, AbsBackward, NAME)                                                                               \
    MAP(clamp, Clamp, NAME)                                                                                            \
    MAP(clamp_backward, ClampBackward, NAME)                                                                           \
    MAP(affine, Affine, NAME)

MAPS(f32)
MAPS(f16)
MAPS(bf16)
