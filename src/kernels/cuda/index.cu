// Elements by index along n of x (outer, n, inner), the largest elements of rows, and one-hot rows.
//
// gather: y[o, j, i] = x[o, ids[o, j, i], i], 0 for an id that is `ignore`; ids, y (outer, k, inner).
// scatter_add: y[o, c, i] (outer, n, inner) f32 = base[o, c, i] + sum over j of values[o, j, i] where ids[o, j, i] is
//   c, in the order of j; base f32, or null for 0; values (outer, k, inner) of T. One thread sums an element.
// one_hot: y[i, c] (count, classes) = 1 where ids[i] is c, else 0.
//   These have a thread for each of `count` elements of y: grid ceil(count / 256), block 256.
// topk: indices (rows, k) of the k largest elements of x (rows, n), the largest first. NaN is larger than any number,
//   of equal elements the first comes first. A warp for each row reads it k times: grid ceil(rows / 8), block 256.
//
// `ignore` is an id, or -1 for none.

#define INDEXED(NAME)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        gather_##NAME(const NAME* x, const unsigned* ids, NAME* y, long long count, long long n, long long k,          \
                      long long inner, long long ignore) {                                                             \
        long long at = (long long)blockIdx.x * 256 + threadIdx.x;                                                      \
        if (at >= count) return;                                                                                       \
        long long id = ids[at], outer = at / (k * inner);                                                              \
        y[at] = id == ignore ? narrow<NAME>(0.f) : x[(outer * n + id) * inner + at % inner];                           \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        scatter_add_##NAME(const float* base, const NAME* values, const unsigned* ids, float* y, long long count,      \
                           long long n, long long k, long long inner, long long ignore) {                              \
        long long at = (long long)blockIdx.x * 256 + threadIdx.x;                                                      \
        if (at >= count) return;                                                                                       \
        long long outer = at / (n * inner), column = at % inner, id = at / inner - outer * n;                          \
        float sum = base ? base[at] : 0.f;                                                                             \
        long long from = outer * k * inner + column;                                                                   \
        if (id != ignore) {                                                                                            \
            for (long long j = 0; j < k; j++, from += inner) {                                                         \
                if ((long long)ids[from] == id) sum = add(sum, widen(values[from]));                                   \
            }                                                                                                          \
        }                                                                                                              \
        y[at] = sum;                                                                                                   \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        one_hot_##NAME(const unsigned* ids, NAME* y, long long count, long long classes) {                             \
        long long at = (long long)blockIdx.x * 256 + threadIdx.x;                                                      \
        if (at >= count) return;                                                                                       \
        long long row = at / classes;                                                                                  \
        y[at] = narrow<NAME>((long long)ids[row] == at - row * classes ? 1.f : 0.f);                                   \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        topk_##NAME(const NAME* x, unsigned* indices, long long rows, int n, int k) {                                  \
        topk(x, indices, rows, n, k);                                                                                  \
    }

// Whether element i, which is a, comes before element j, which is b.
__device__ __forceinline__ bool comes_before(float a, int i, float b, int j) {
    bool a_is_nan = a != a, b_is_nan = b != b;
    if (a_is_nan != b_is_nan) return a_is_nan;
    if (!a_is_nan && a != b) return a > b;
    return i < j;
}

template <class T>
__device__ __forceinline__ void topk(const T* x, unsigned* indices, long long rows, int n, int k) {
    int lane = threadIdx.x % 32;
    long long row = (long long)blockIdx.x * 8 + threadIdx.x / 32;
    if (row >= rows) return;
    x += row * n, indices += row * k;
    float last = 0.f; // the element that was found before, and its index
    int last_at = -1;
    for (int t = 0; t < k; t++) {
        float best = 0.f;
        int best_at = n; // none
        for (int i = lane; i < n; i += 32) {
            float value = widen(x[i]);
            bool is_left = last_at < 0 || comes_before(last, last_at, value, i);
            if (is_left && (best_at == n || comes_before(value, i, best, best_at))) best = value, best_at = i;
        }
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) {
            float other = __shfl_xor_sync(0xffffffffu, best, distance);
            int other_at = __shfl_xor_sync(0xffffffffu, best_at, distance);
            if (other_at < n && (best_at == n || comes_before(other, other_at, best, best_at))) {
                best = other, best_at = other_at;
            }
        }
        if (lane == 0) indices[t] = (unsigned)best_at;
        last = best, last_at = best_at;
    }
}

INDEXED(f32)
INDEXED(f16)
INDEXED(bf16)
