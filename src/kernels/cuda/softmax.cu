// Softmax of scaled, masked scores: p = softmax(scale x) over the visible keys.
//
// x, p, dp, dx (batch, queries, keys), rows = batch * queries. Query q attends to the keys under clamp(q + 1 + shift,
// 0, keys): shift is 0 for Causal, keys - queries for CausalEnd, keys for Full. Masked elements and rows without keys
// become 0. Masked inputs have no effect.
//
// With FIRST_KEYS=1, query q attends to no key before the q-th first key of its sequence either, if `first_keys`
// (sequences, queries) u32 is not null. `heads` consecutive matrices belong to one sequence; the matrix of row 0 is the
// `first_head`-th, counted from the first sequence. If `window` is not 0, a query attends to at most `window` keys up
// to its own. Packs before the first key are neither read nor computed.
//
// With MASKED=1, x is (B, H, queries, keys), `heads` is H, and `shown` (u8, 0 hides a key; null if it hides none) has
// the given strides, 0 along dimensions that it repeats. Rows whose visible scores are all minus infinity, as a bias
// makes them, become 0 instead of NaN. Backward reads p, in f32.
//
// Backward: dx = scale p (dp - sum(dp p)). f32 reads p; half precision recomputes p from x, without rounding. p may be
// x's buffer, dx that of dp or of p: a thread reads only elements that it writes, and reads them first.
//
// `from_f32`: x and dp are f32, p and dx half precision, and backward reads p. Matmul results are thus rounded once,
// before the next matmul. p and dx are other buffers than x and dp. A row of rounded p does not sum to 1, so its mean
// of dp is sum(dp p) / sum(p). Otherwise dp - mean would be off by |dp| times the missing sum where one key has nearly
// all of p.
//
// Block (x, max(1, 128 / x)) with x = min(X, 32 ceil(packs N / 32 E)), X 1024 for f32, else 512; packs = ceil(keys /
// N), one more if rows do not begin at 16 bytes, N = 16 / size of p's T; E, a thread's elements in registers, 32
// forward and 16 backward. Grid ceil(rows / blockDim.y). Forward from half precision has no more blocks than run
// concurrently; each loads its next row before it computes the current one. (In f32 there are too few registers for
// that, and enough bytes in flight.) Any number of keys: what does not fit into the registers of a row's threads is
// read twice, the second time from the level-2 cache if it holds the current rows. x and p (dp and dx) have the same
// address modulo 16. Bytes: forward visible x in, p out; backward visible dp and p (or x) in, dx out.

#ifndef FIRST_KEYS
#define FIRST_KEYS 0
#endif
#ifndef MASKED
#define MASKED 0
#endif

// The keys that a row attends to: those from `begin` on and under `end` that a key mask shows.
struct Visible {
    int begin, end, stride;
    const unsigned char* shown; // the key mask of the row; may be null

    __device__ __forceinline__ bool has(int key) const {
        return begin <= key && key < end && (!MASKED || !shown || shown[(long long)key * stride]);
    }

    // Whether keys first.. first + n are all visible, as far as that is known without reading a key mask.
    __device__ __forceinline__ bool has_all(int first, int n) const {
        return !(MASKED && shown) && begin <= first && first + n <= end;
    }
};

struct Masks {
    long long shift;
    const unsigned* first_keys; // may be null
    int heads, first_head, window;
    const unsigned char* shown; // may be null
    long long of_batch, of_head, of_query;
    int of_key;

    __device__ __forceinline__ Visible of(long long row, int queries, int keys) const {
        bool is_short = row < 0x100000000; // 64-bit division is slow
        unsigned query = is_short ? (unsigned)row % (unsigned)queries : (unsigned)(row % queries);
        long long end = query + 1 + shift;
        Visible visible = {0, end < 0 ? 0 : end > keys ? keys : (int)end, of_key, nullptr};
        if (!FIRST_KEYS && !MASKED) return visible;
        unsigned matrix = is_short ? (unsigned)row / (unsigned)queries : (unsigned)(row / queries);
        if (FIRST_KEYS) {
            unsigned first = window && query >= (unsigned)window ? query + 1 - (unsigned)window : 0;
            if (first_keys) {
                long long sequence = (matrix + (unsigned)first_head) / (unsigned)heads;
                first = max(first, __ldg(first_keys + sequence * queries + query));
            }
            visible.begin = (int)min(first, (unsigned)keys);
        }
        if (MASKED && shown) {
            long long batch = matrix / (unsigned)heads, head = matrix % (unsigned)heads;
            visible.shown = shown + batch * of_batch + head * of_head + query * of_query;
        }
        return visible;
    }
};

// Whether all of elements first.. first + N precede the first visible key.
#define ALL_BEFORE(first) (FIRST_KEYS && (first) + N <= visible.begin)

// Scores of elements first.. first + N in units of ln 2; minus infinity for elements that are not visible.
template <class T, int N> __device__ __forceinline__ void scores(const Pack<T, N>& pack, int first,
                                                                 const Visible& visible, float scale2, float (&t)[N]) {
    unpack(pack, t);
#pragma unroll
    for (int i = 0; i < N; i++) t[i] *= scale2; // before the maximum, so that a negative scale works too
    if (visible.has_all(first, N)) return;
#pragma unroll
    for (int i = 0; i < N; i++) t[i] = visible.has(first + i) ? t[i] : MINUS_INFINITY;
}

// Of the elements that a thread has read: the largest score, and the sums of e = 2^(score - top) and of e dp.
struct Statistics {
    float top, total, inner;
};

// Raises `top` to the largest of these scores and rescales the sums.
template <int N> __device__ __forceinline__ void raise(Statistics* seen, const float (&t)[N]) {
    float top = t[0];
#pragma unroll
    for (int i = 1; i < N; i++) top = fmaxf(top, t[i]);
    if (top > seen->top) {
        float factor = exp2_fast(seen->top - top);
        seen->total *= factor, seen->inner *= factor;
        seen->top = top;
    }
}

template <int N> __device__ __forceinline__ void take(Statistics* seen, const float (&t)[N]) {
    raise(seen, t);
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < N; i++) total += exp2_fast(t[i] - seen->top);
    seen->total += total;
}

template <int N> __device__ __forceinline__ void take(Statistics* seen, const float (&t)[N], const float (&dp)[N]) {
    raise(seen, t);
    float total = 0.f, inner = 0.f;
#pragma unroll
    for (int i = 0; i < N; i++) {
        float e = exp2_fast(t[i] - seen->top);
        total += e, inner += e * dp[i];
    }
    seen->total += total, seen->inner += inner;
}

template <bool WHOLE, class T> __device__ __forceinline__ void hide(T* row, int first, int width) {
    const int N = InVector<T>::COUNT;
    float zeros[N];
#pragma unroll
    for (int i = 0; i < N; i++) zeros[i] = 0.f;
    store<WHOLE>(row, first, width, zeros);
}

// ---- Forward

// p from e and `share`, 1 / sum of the row.
template <bool WHOLE, class T, int N>
__device__ __forceinline__ void finish(float (&e)[N], T* p, int first, const Visible& visible, int keys, float share) {
#pragma unroll
    for (int i = 0; i < N; i++) e[i] *= share;
    if (!visible.has_all(first, N)) {
#pragma unroll
        for (int i = 0; i < N; i++) e[i] = visible.has(first + i) ? e[i] : 0.f; // 0 even if the rest of the row is NaN
    }
    store<WHOLE>(p, first, keys, e);
}

// Loads the packs of row `row` that the thread keeps in registers. The row of p begins `skew` elements after a 16-byte
// boundary.
template <bool WHOLE, class S, int N, int PACKS>
__device__ __forceinline__ void load_kept(const S* rows, long long row, int skew, int queries, int keys,
                                          const Masks& masks, Pack<S, N> (&kept)[PACKS]) {
    const S* x = rows + row * keys;
    Visible visible = masks.of(row, queries, keys);
    int mine = threadIdx.x * N - skew;
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        int first = mine + k * blockDim.x * N;
        if (first < visible.end && !ALL_BEFORE(first)) kept[k] = load<S, N, WHOLE>(x, first, visible.end, 0.f);
    }
}

template <bool WHOLE, class S, class T, int N, int PACKS, class F>
__device__ __forceinline__ void forward_row(const S* x, T* p, const Pack<S, N> (&of_x)[PACKS],
                                            const Visible& visible, int keys, float scale2, F prefetch) {
    const int BATCH = 2;
    int stride = blockDim.x * N, mine = threadIdx.x * N - (WHOLE ? 0 : skew_of(p)), rest = mine + PACKS * stride;
    float t[PACKS][N]; // scores, then their exponentials
    float top = LOWEST;
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        int first = mine + k * stride;
        if (first >= visible.end || ALL_BEFORE(first)) continue;
        scores(of_x[k], first, visible, scale2, t[k]);
#pragma unroll
        for (int i = 0; i < N; i++) top = fmaxf(top, t[k][i]);
    }
    prefetch();
    Statistics seen = {LOWEST, 0.f, 0.f}; // of the packs that are not in registers
    for (int start = rest; start < visible.end; start += BATCH * stride) {
        Pack<S, N> more[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            int first = start + k * stride;
            if (first < visible.end && !ALL_BEFORE(first)) more[k] = load<S, N, WHOLE>(x, first, visible.end, 0.f);
        }
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            int first = start + k * stride;
            if (first >= visible.end || ALL_BEFORE(first)) continue;
            float values[N];
            scores(more[k], first, visible, scale2, values);
            take(&seen, values);
        }
    }
    top = reduce_row<Largest>(fmaxf(top, seen.top), 0);
    float total = seen.total * exp2_fast(seen.top - top);
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        if (mine + k * stride >= visible.end || ALL_BEFORE(mine + k * stride)) continue;
#pragma unroll
        for (int i = 0; i < N; i++) {
            t[k][i] = exp2_fast(t[k][i] - top);
            total += t[k][i];
        }
    }
    total = reduce_row<Sum>(total, 1);
    float share = MASKED && total == 0.f ? 0.f : 1.f / total;
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        int first = mine + k * stride;
        if (first < visible.end && !ALL_BEFORE(first)) {
            finish<WHOLE>(t[k], p, first, visible, keys, share);
        } else if (first < keys) {
            hide<WHOLE>(p, first, keys);
        }
    }
    for (int start = rest; start < keys; start += BATCH * stride) {
        Pack<S, N> more[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            int first = start + k * stride;
            if (first < visible.end && !ALL_BEFORE(first)) more[k] = load<S, N, WHOLE>(x, first, visible.end, 0.f);
        }
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            int first = start + k * stride;
            if (first < visible.end && !ALL_BEFORE(first)) {
                float e[N];
                scores(more[k], first, visible, scale2, e);
#pragma unroll
                for (int i = 0; i < N; i++) e[i] = exp2_fast(e[i] - top);
                finish<WHOLE>(e, p, first, visible, keys, share);
            } else if (first < keys) {
                hide<WHOLE>(p, first, keys);
            }
        }
    }
}

template <class S, class T, bool WHOLE, bool PERSISTENT>
__device__ __forceinline__ void forward(const S* x, T* p, float scale, long long rows, int queries, int keys,
                                        const Masks& masks) {
    const int N = InVector<T>::COUNT, PACKS = 32 / N;
    long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y, stride = (long long)gridDim.x * blockDim.y;
    float scale2 = scale * LOG2_E;
    if (row >= rows) return;
    auto skew = [&](long long row) { return WHOLE ? 0 : skew_of(p + row * keys); };
    if (!PERSISTENT) {
        Pack<S, N> of_x[PACKS];
        load_kept<WHOLE>(x, row, skew(row), queries, keys, masks, of_x);
        Visible visible = masks.of(row, queries, keys);
        forward_row<WHOLE>(x + row * keys, p + row * keys, of_x, visible, keys, scale2, []() {});
        return;
    }
    Pack<S, N> next[PACKS];
    load_kept<WHOLE>(x, row, skew(row), queries, keys, masks, next);
    for (; row < rows; row += stride) {
        Pack<S, N> of_x[PACKS];
#pragma unroll
        for (int k = 0; k < PACKS; k++) of_x[k] = next[k];
        Visible visible = masks.of(row, queries, keys);
        forward_row<WHOLE>(x + row * keys, p + row * keys, of_x, visible, keys, scale2, [&]() {
            if (row + stride < rows)
                load_kept<WHOLE>(x, row + stride, skew(row + stride), queries, keys, masks, next);
        });
    }
}

// ---- Backward

// Sets masked elements to 0, because 0 times NaN is NaN.
template <int N> __device__ __forceinline__ void clear_hidden(float (&values)[N], int first, const Visible& visible) {
    if (visible.has_all(first, N)) return;
#pragma unroll
    for (int i = 0; i < N; i++) values[i] = visible.has(first + i) ? values[i] : 0.f;
}

// dx = e (dp - inner) factor, where e factor is scale p.
template <bool WHOLE, class S, class T, int N>
__device__ __forceinline__ void finish(float (&e)[N], const Pack<S, N>& dp, T* dx, int first, const Visible& visible,
                                       int keys, float inner, float factor) {
    float d[N];
    unpack(dp, d);
#pragma unroll
    for (int i = 0; i < N; i++) e[i] = e[i] * (d[i] - inner) * factor;
    clear_hidden(e, first, visible);
    store<WHOLE>(dx, first, keys, e);
}

// FROM_SCORES: `source` is x, else p.
template <class S, class T, bool FROM_SCORES, bool WHOLE>
__device__ __forceinline__ void backward(const S* dp, const T* source, T* dx, float scale, long long rows,
                                         int queries, int keys, const Masks& masks) {
    const int N = InVector<T>::COUNT, PACKS = 16 / N, BATCH = 2;
    const bool ROUNDED = !FROM_SCORES && sizeof(S) != sizeof(T);
    long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    dp += row * keys, source += row * keys, dx += row * keys;
    Visible visible = masks.of(row, queries, keys);
    float scale2 = scale * LOG2_E;
    int stride = blockDim.x * N, mine = threadIdx.x * N - (WHOLE ? 0 : skew_of(dx)), rest = mine + PACKS * stride;

    Pack<T, N> of_source[PACKS];
    Pack<S, N> of_dp[PACKS];
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        int first = mine + k * stride;
        if (first >= visible.end || ALL_BEFORE(first)) continue;
        of_source[k] = load<T, N, WHOLE>(source, first, visible.end, 0.f);
        of_dp[k] = load<S, N, WHOLE>(dp, first, visible.end, 0.f);
    }
    float e[PACKS][N]; // scores, then their exponentials; or p
    float top = LOWEST;
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        int first = mine + k * stride;
        if (first >= visible.end || ALL_BEFORE(first)) continue;
        if (FROM_SCORES) {
            scores(of_source[k], first, visible, scale2, e[k]);
#pragma unroll
            for (int i = 0; i < N; i++) top = fmaxf(top, e[k][i]);
        } else {
            unpack(of_source[k], e[k]);
        }
    }
    Statistics seen = {LOWEST, 0.f, 0.f}; // of the packs that are not in registers
    for (int start = rest; start < visible.end; start += BATCH * stride) {
        Pack<T, N> more_source[BATCH];
        Pack<S, N> more_dp[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            int first = start + k * stride;
            if (first >= visible.end || ALL_BEFORE(first)) continue;
            more_source[k] = load<T, N, WHOLE>(source, first, visible.end, 0.f);
            more_dp[k] = load<S, N, WHOLE>(dp, first, visible.end, 0.f);
        }
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            int first = start + k * stride;
            if (first >= visible.end || ALL_BEFORE(first)) continue;
            float values[N], d[N];
            unpack(more_dp[k], d);
            if (FIRST_KEYS || MASKED) clear_hidden(d, first, visible);
            if (FROM_SCORES) {
                scores(more_source[k], first, visible, scale2, values);
                take(&seen, values, d);
            } else {
                unpack(more_source[k], values);
#pragma unroll
                for (int i = 0; i < N; i++) {
                    if (ROUNDED) seen.total += values[i];
                    seen.inner += values[i] * d[i];
                }
            }
        }
    }
    float total = seen.total, inner = seen.inner, factor = scale;
    if (FROM_SCORES) {
        top = reduce_row<Largest>(fmaxf(top, seen.top), 0);
        float raised = exp2_fast(seen.top - top);
        total = seen.total * raised, inner = seen.inner * raised;
    }
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        if (mine + k * stride >= visible.end || ALL_BEFORE(mine + k * stride)) continue;
        float d[N];
        unpack(of_dp[k], d);
        if (FIRST_KEYS || MASKED) clear_hidden(d, mine + k * stride, visible);
#pragma unroll
        for (int i = 0; i < N; i++) {
            if (FROM_SCORES) e[k][i] = exp2_fast(e[k][i] - top);
            if (FROM_SCORES || ROUNDED) total += e[k][i];
            inner += e[k][i] * d[i];
        }
    }
    if (FROM_SCORES) {
        reduce_row_pair(&inner, &total, 0);
        inner /= total, factor /= total;
    } else if (ROUNDED) {
        reduce_row_pair(&inner, &total, 0);
        inner = total > 0.f ? inner / total : 0.f;
    } else {
        inner = reduce_row<Sum>(inner, 1);
    }
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        int first = mine + k * stride;
        if (first < visible.end && !ALL_BEFORE(first)) {
            finish<WHOLE>(e[k], of_dp[k], dx, first, visible, keys, inner, factor);
        } else if (first < keys) {
            hide<WHOLE>(dx, first, keys);
        }
    }
    for (int start = rest; start < keys; start += BATCH * stride) {
        Pack<T, N> more_source[BATCH];
        Pack<S, N> more_dp[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            int first = start + k * stride;
            if (first >= visible.end || ALL_BEFORE(first)) continue;
            more_source[k] = load<T, N, WHOLE>(source, first, visible.end, 0.f);
            more_dp[k] = load<S, N, WHOLE>(dp, first, visible.end, 0.f);
        }
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            int first = start + k * stride;
            if (first < visible.end && !ALL_BEFORE(first)) {
                float values[N];
                if (FROM_SCORES) {
                    scores(more_source[k], first, visible, scale2, values);
#pragma unroll
                    for (int i = 0; i < N; i++) values[i] = exp2_fast(values[i] - top);
                } else {
                    unpack(more_source[k], values);
                }
                finish<WHOLE>(values, more_dp[k], dx, first, visible, keys, inner, factor);
            } else if (first < keys) {
                hide<WHOLE>(dx, first, keys);
            }
        }
    }
}

// Kernels: x and dp in S, p and dx in T.
#define FORWARD(NAME, S, T, PERSISTENT, THREADS)                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) softmax_forward_##NAME(                                   \
        const S* x, T* p, float scale, long long rows, int queries, int keys, const Masks masks) {                     \
        if (whole_packs<InVector<T>::COUNT>(keys, x, p, nullptr)) {                                                    \
            forward<S, T, true, PERSISTENT>(x, p, scale, rows, queries, keys, masks);                                  \
        } else {                                                                                                       \
            forward<S, T, false, PERSISTENT>(x, p, scale, rows, queries, keys, masks);                                 \
        }                                                                                                              \
    }

#define BACKWARD(NAME, S, T, FROM_SCORES, THREADS)                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS) softmax_backward_##NAME(                                     \
        const S* dp, const T* source, T* dx, float scale, long long rows, int queries, int keys, const Masks masks) {  \
        if (whole_packs<InVector<T>::COUNT>(keys, dp, source, dx)) {                                                   \
            backward<S, T, FROM_SCORES, true>(dp, source, dx, scale, rows, queries, keys, masks);                      \
        } else {                                                                                                       \
            backward<S, T, FROM_SCORES, false>(dp, source, dx, scale, rows, queries, keys, masks);                     \
        }                                                                                                              \
    }

FORWARD(f32, f32, f32, false, 1024)
FORWARD(f16, f16, f16, true, 512)
FORWARD(bf16, bf16, bf16, true, 512)
FORWARD(from_f32_f16, f32, f16, false, 512)
FORWARD(from_f32_bf16, f32, bf16, false, 512)
BACKWARD(f32, f32, f32, false, 1024)
BACKWARD(f16, f16, f16, true, 512)
BACKWARD(bf16, bf16, bf16, true, 512)
BACKWARD(from_f32_f16, f32, f16, false, 512)
BACKWARD(from_f32_bf16, f32, bf16, false, 512)
