// Cross-entropy of logits: loss = mean over the counted targets of ln(sum(exp(row))) - row[target].
//
// logits, dlogits (rows, classes); targets (rows) u32, already checked; losses (rows), statistics (rows, 2) f32.
// `ignore` is the target that does not count, or -1: its rows have loss 0 and gradient 0, whatever their logits. All
// arithmetic is in f32.
//
// Let top be the largest logit of a row and total the sum of exp(x - top). The loss of the row is (top - row[target]) +
// ln(total), and its softmax is exp(x - top) / total. top + ln(total) is never formed: as one number it would lose the
// digits of ln(total) where logits are large.
//
// With Terms the loss of a row is (1 - smoothing) nll + smoothing (mean of top - x + ln(total)) + z_loss lse^2. The
// gradient is factor softmax - spread - share onehot(target). Smoothing reads a row once more.
//
// packs = ceil(classes / N), one more if rows do not begin at 16 bytes, N = 16 / size of T. Any number of classes. Rows
// are read in vectors wherever they begin, from their first full vector on.
//   Forward:  grid ceil(rows / y), block (x, y) = (min(512, 32 ceil(packs / 128)), max(1, 128 / x))
//   Backward: grid (ceil(rows / y), ceil(packs / 4x)), block (x, y) = (min(256, 32 ceil(packs / 128)), max(1, 128 / x))
//   In place: grid ceil(rows / y), block (x, y) = (min(X, 32 ceil(packs / 128)), max(1, 128 / x)), X = 512, or 1024 if
//             a row is over 128 KiB (fewer rows at a time, so that the level-2 cache holds them).
// Bytes: forward reads the logits once; backward reads and writes them once. In place they are read from memory once
// and written once; in rows of over 4 x packs, the rest is read again from the level-2 cache.

const int UNROLL = 4; // packs per thread, loaded before the first is used

const int KEPT = 4; // packs per thread that stay in registers, in place

// Subtracts `share` from element `at` if it is in this pack.
template <int N> __device__ __forceinline__ void take_target(float (&p)[N], int at, float share) {
    if ((unsigned)at >= (unsigned)N) return;
#pragma unroll
    for (int i = 0; i < N; i++) p[i] -= i == at ? share : 0.f;
}

// The largest logit and the sum of exp(logit - largest), of the elements that a thread has read or of a row.
struct Statistics {
    float top, total;
};

struct Terms {
    float smoothing, z_loss;
};

// The loss of a row; mean_above is the mean of top - x, for smoothing.
__device__ __forceinline__ float loss_of(Terms terms, Statistics seen, float wanted, float mean_above) {
    float log_total = logf(seen.total), loss = (seen.top - wanted) + log_total;
    if (terms.smoothing > 0.f) {
        loss = (1.f - terms.smoothing) * loss + terms.smoothing * (mean_above + log_total);
    }
    if (terms.z_loss > 0.f) {
        float lse = seen.top + log_total;
        loss += terms.z_loss * lse * lse;
    }
    return loss;
}

// The mean of top - x over a row, in every thread of the row; 0 without smoothing.
template <class T>
__device__ __forceinline__ float mean_above(Terms terms, const T* x, int classes, float top, int slot) {
    if (!(terms.smoothing > 0.f)) return 0.f; // the same in all threads
    float sum = 0.f;
    for (int i = threadIdx.x; i < classes; i += blockDim.x) sum += top - widen(x[i]);
    return reduce_row<Sum>(sum, slot) / (float)classes;
}

// The parts of a row's gradient; factor is that of exp(x - top).
struct Slopes {
    float factor, spread, share;
};
__device__ __forceinline__ Slopes slopes_of(Terms terms, Statistics seen, float weight, int classes) {
    float factor = weight;
    if (terms.z_loss > 0.f) factor *= 1.f + 2.f * terms.z_loss * (seen.top + logf(seen.total));
    Slopes slopes = {factor / seen.total, weight * terms.smoothing / (float)classes, weight * (1.f - terms.smoothing)};
    return slopes;
}

// Adds the packs of a row, from pack `begin` on, to `seen`.
template <class T, bool WHOLE>
__device__ __forceinline__ void take_row(Statistics* seen, const T* x, int classes, int begin) {
    const int N = InVector<T>::COUNT;
    int skew = WHOLE ? 0 : skew_of(x), packs = (classes + skew + N - 1) / N;
    for (int start = begin + threadIdx.x; start < packs; start += UNROLL * blockDim.x) {
        Pack<T, N> of_x[UNROLL];
        float v[N];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            int k = start + u * blockDim.x;
            if (k < packs) of_x[u] = load<T, N, WHOLE>(x, k * N - skew, classes, MINUS_INFINITY);
        }
        float top = seen->top;
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            if (start + u * blockDim.x >= packs) continue;
            top = fmaxf(top, largest(of_x[u]));
        }
        seen->total *= exp_fast(seen->top - top);
        seen->top = top;
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            if (start + u * blockDim.x >= packs) continue;
            unpack(of_x[u], v);
            float sum = 0.f;
#pragma unroll
            for (int i = 0; i < N; i++) sum += exp_fast(v[i] - top);
            seen->total += sum;
        }
    }
}

template <class T> __device__ __forceinline__ void fill_zero(T* row, int width) {
    for (int i = threadIdx.x; i < width; i += blockDim.x) row[i] = narrow<T>(0.f);
}

template <class T, bool WHOLE>
__device__ __forceinline__ void forward(const T* logits, const unsigned* targets, long long ignore, Terms terms,
                                        float* losses, Statistics* statistics, long long rows, int classes) {
    long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    const T* x = logits + row * classes;
    unsigned target = targets[row];
    bool counts = (long long)target != ignore;
    float wanted = counts ? widen(x[target]) : 0.f; // loaded here: at the end the whole block would wait for it
    Statistics seen = {LOWEST, 0.f};
    take_row<T, WHOLE>(&seen, x, classes, 0);
    float top = reduce_row<Largest>(seen.top, 0);
    float total = reduce_row<Sum>(seen.total * exp_fast(seen.top - top), 1);
    float above = mean_above(terms, x, classes, top, 2);
    if (threadIdx.x > 0) return;
    seen = {top, total};
    statistics[row] = seen;
    losses[row] = counts ? loss_of(terms, seen, wanted, above) : 0.f;
}

// dloss is the gradient of the mean over `counted` targets: (1) and of_row 0, or (rows) and of_row 1.
template <class T, bool WHOLE>
__device__ __forceinline__ void backward(const T* logits, const unsigned* targets, long long ignore, Terms terms,
                                         const Statistics* statistics, const float* dloss, int of_row,
                                         long long counted, T* dlogits, long long rows, int classes) {
    const int N = InVector<T>::COUNT;
    long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    const T* x = logits + row * classes;
    T* dx = dlogits + row * classes;
    int skew = WHOLE ? 0 : skew_of(x), stride = blockDim.x * N;
    int begin = (blockIdx.y * UNROLL * blockDim.x + threadIdx.x) * N - skew;
    Pack<T, N> of_x[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        int first = begin + u * stride;
        if (first < classes) of_x[u] = load<T, N, WHOLE>(x, first, classes, 0.f);
    }
    unsigned target = targets[row];
    bool counts = (long long)target != ignore;
    Statistics seen = statistics[row];
    float weight = (float)((double)dloss[row * of_row] / (double)counted);
    Slopes slopes = slopes_of(terms, seen, weight, classes);
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        int first = begin + u * stride;
        if (first >= classes) continue;
        float p[N];
        unpack(of_x[u], p);
#pragma unroll
        for (int i = 0; i < N; i++) {
            p[i] = exp_fast(p[i] - seen.top) * slopes.factor - slopes.spread;
            if (!counts) p[i] = 0.f; // whatever the logits are
        }
        if (counts) take_target(p, (int)target - first, slopes.share);
        store<WHOLE>(dx, first, classes, p);
    }
}

// Overwrites logits with their gradient. Rows are `row_stride` elements apart.
template <class T, bool WHOLE>
__device__ __forceinline__ void in_place(T* logits, const unsigned* targets, long long ignore, Terms terms,
                                         const float* dloss, long long counted, float* losses, long long rows,
                                         int classes, int row_stride) {
    const int N = InVector<T>::COUNT;
    long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    T* x = logits + row * row_stride;
    int begin = threadIdx.x * N - (WHOLE ? 0 : skew_of(x)), stride = blockDim.x * N;
    Pack<T, N> of_x[KEPT];
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        int first = begin + k * stride;
        if (first < classes) of_x[k] = load<T, N, WHOLE>(x, first, classes, MINUS_INFINITY);
    }
    unsigned target = targets[row];
    if ((long long)target == ignore) {
        if (threadIdx.x == 0) losses[row] = 0.f;
        return fill_zero(x, classes);
    }
    float wanted = widen(x[target]); // before any thread writes: the reductions wait for all threads
    Statistics seen = {LOWEST, 0.f}; // of the packs that are not in registers
    take_row<T, WHOLE>(&seen, x, classes, KEPT * blockDim.x);
    float top = seen.top;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        if (begin + k * stride < classes) top = fmaxf(top, largest(of_x[k]));
    }
    top = reduce_row<Largest>(top, 0);
    float total = seen.total * exp_fast(seen.top - top);
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        if (begin + k * stride >= classes) continue;
        float e[N];
        unpack(of_x[k], e);
#pragma unroll
        for (int i = 0; i < N; i++) total += exp_fast(e[i] - top);
    }
    total = reduce_row<Sum>(total, 1);
    float above = mean_above(terms, x, classes, top, 2);
    __syncwarp(); // a row of one warp has no other barrier between reading x[target] and writing it
    seen = {top, total};
    if (threadIdx.x == 0) losses[row] = loss_of(terms, seen, wanted, above);
    Slopes slopes = slopes_of(terms, seen, (float)((double)*dloss / (double)counted), classes);
    for (int start = begin; start < classes; start += KEPT * stride) {
        if (start != begin) { // these packs are not in registers
#pragma unroll
            for (int k = 0; k < KEPT; k++) {
                int first = start + k * stride;
                if (first < classes) of_x[k] = load<T, N, WHOLE>(x, first, classes, 0.f);
            }
        }
#pragma unroll
        for (int k = 0; k < KEPT; k++) {
            int first = start + k * stride;
            if (first >= classes) continue;
            float p[N];
            unpack(of_x[k], p);
#pragma unroll
            for (int i = 0; i < N; i++) p[i] = exp_fast(p[i] - top) * slopes.factor - slopes.spread;
            take_target(p, (int)target - first, slopes.share);
            store<WHOLE>(x, first, classes, p);
        }
    }
}

#define CROSS_ENTROPY(NAME)                                                                                            \
    extern "C" __global__ void __launch_bounds__(512, 3) cross_entropy_forward_##NAME(                                 \
        const NAME* logits, const unsigned* targets, long long ignore, float smoothing, float z_loss, float* losses,   \
        Statistics* statistics, long long rows, int classes) {                                                         \
        Terms terms = {smoothing, z_loss};                                                                             \
        if (whole_packs<InVector<NAME>::COUNT>(classes, logits, nullptr, nullptr)) {                                   \
            forward<NAME, true>(logits, targets, ignore, terms, losses, statistics, rows, classes);                    \
        } else {                                                                                                       \
            forward<NAME, false>(logits, targets, ignore, terms, losses, statistics, rows, classes);                   \
        }                                                                                                              \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256) cross_entropy_backward_##NAME(                                   \
        const NAME* logits, const unsigned* targets, long long ignore, float smoothing, float z_loss,                  \
        const Statistics* statistics, const float* dloss, int of_row, long long counted, NAME* dlogits,                \
        long long rows, int classes) {                                                                                 \
        Terms terms = {smoothing, z_loss};                                                                             \
        if (whole_packs<InVector<NAME>::COUNT>(classes, logits, dlogits, nullptr)) {                                   \
            backward<NAME, true>(logits, targets, ignore, terms, statistics, dloss, of_row, counted, dlogits, rows,    \
                                 classes);                                                                             \
        } else {                                                                                                       \
            backward<NAME, false>(logits, targets, ignore, terms, statistics, dloss, of_row, counted, dlogits, rows,   \
                                  classes);                                                                            \
        }                                                                                                              \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(1024) cross_entropy_in_place_##NAME(                                  \
        NAME* logits, const unsigned* targets, long long ignore, float smoothing, float z_loss, const float* dloss,    \
        long long counted, float* losses, long long rows, int classes, int row_stride) {                               \
        Terms terms = {smoothing, z_loss};                                                                             \
        if (whole_packs<InVector<NAME>::COUNT>(classes | row_stride, logits, nullptr, nullptr)) {                      \
            in_place<NAME, true>(logits, targets, ignore, terms, dloss, counted, losses, rows, classes, row_stride);   \
        } else {                                                                                                       \
            in_place<NAME, false>(logits, targets, ignore, terms, dloss, counted, losses, rows, classes, row_stride);  \
        }                                                                                                              \
    }

CROSS_ENTROPY(f32)
CROSS_ENTROPY(f16)
CROSS_ENTROPY(bf16)

// The number of targets that count, in thread 0 of 1024.
__device__ __forceinline__ long long counting(const unsigned* targets, long long rows, long long ignore) {
    __shared__ int counts[32];
    int count = 0; // per thread: fewer than 2^31
    for (long long row = threadIdx.x; row < rows; row += 1024) count += (long long)targets[row] != ignore;
    count = __reduce_add_sync(0xffffffffu, count);
    if (threadIdx.x % 32 == 0) counts[threadIdx.x / 32] = count;
    __syncthreads();
    long long counted = 0;
    for (int warp = 0; threadIdx.x == 0 && warp < 32; warp++) counted += counts[warp];
    return counted;
}

// The sum of the losses, in f64 in a fixed order, divided by `counted`; if `targets` is not null, `counted` is first
// multiplied by the number of targets that count. mean (1) f32 or null; mean64 (1) f64 or null, added to if
// `accumulate`. One block of 1024 threads.
extern "C" __global__ void __launch_bounds__(1024)
    cross_entropy_mean(const float* losses, const unsigned* targets, long long ignore, long long rows,
                       long long counted, float* mean, double* mean64, int accumulate) {
    __shared__ double sums[1024];
    double sum = 0.0;
    for (long long row = threadIdx.x; row < rows; row += 1024) sum += (double)losses[row];
    sums[threadIdx.x] = sum;
    for (int half = 512; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    if (targets) counted *= counting(targets, rows, ignore);
    if (threadIdx.x > 0) return;
    double result = sums[0] / (double)counted;
    if (mean) *mean = (float)result;
    if (mean64) *mean64 = result + (accumulate ? *mean64 : 0.0);
}

// y = x / (number of targets that count), in f64, rounded to f32. One block of 1024 threads.
template <class X>
__device__ __forceinline__ void divide_by_counted(const unsigned* targets, long long rows, long long ignore, const X* x, float* y) {
    long long counted = counting(targets, rows, ignore);
    if (threadIdx.x == 0) *y = (float)((double)*x / (double)counted);
}

#define DIVIDE_BY_COUNTED(NAME, X)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(1024)                                                                 \
        cross_entropy_divide_by_counted_##NAME(const unsigned* targets, long long rows, long long ignore, const X* x, float* y) {  \
        divide_by_counted<X>(targets, rows, ignore, x, y);                                                                         \
    }

DIVIDE_BY_COUNTED(f32, float)
DIVIDE_BY_COUNTED(f64, double)
