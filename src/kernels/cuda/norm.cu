// RMSNorm and LayerNorm, row by row, optionally with the residual sum before:
//   RMSNorm    y = w s rstd,               rstd = 1 / sqrt(mean(s^2) + eps)
//   LayerNorm  y = w (s - mean) rstd + b,  rstd = 1 / sqrt(mean((s - mean)^2) + eps)
// s = x, or x + branch rounded to X. The constant CENTERED selects LayerNorm. With OFFSET, w is replaced by 1 + w.
//
// x, branch, sum, y (rows, width); w, b (width) f32, b only for LayerNorm; statistics (rows, STATISTICS) f32: the mean
// for LayerNorm, then rstd. X is the type of the residual stream, Y that of matmul inputs and outputs. X and Y are
// equal, or X is f32 and Y half precision.
//
// Backward, with h = (s - mean) rstd and g = dy w: dx = rstd (g - mean(g) - h mean(g h)), without mean(g) for RMSNorm.
// dw is the sum over rows of dy h, db the sum over rows of dy, both in two stages.
//
// Blocks and columns are described in `norm_rows.cuh`; width at most 8192. Forward has as many blocks as the rows need.
// Backward has as many as run concurrently, each over several rows, so that column sums and weights stay in registers.
// A thread loads the next row before it computes the current one: otherwise loads, reduction and stores wait for each
// other (55% of the copy rate).
//
// Bytes: forward x in, y out (+ branch in, sum out); backward dy, x in, dx out (+ dx in if added to, + copy out, + y
// out, + branch in), and the partial sums, 4 grid SUMS width bytes, written once and read once by `sum_partials`.
// Fraction of the copy rate (RMSNorm, H200, widths 512 to 8192, at least half a gigabyte): forward 93 to 100%; backward
// 81 to 97%, at width 8192 76%.

const int STATISTICS = CENTERED ? 2 : 1; // per row
const int SUMS = CENTERED ? 2 : 1;       // per column: dw, db

// Loads the factors of the normalized elements: w, or 1 + w.
template <bool WHOLE, int N>
__device__ __forceinline__ void load_factors(const float* weight, int first, int width, float (&w)[N]) {
    load_wide<WHOLE>(weight, first, width, 0.f, w);
#pragma unroll
    for (int i = 0; i < N; i++)
        if (OFFSET) w[i] += 1.f;
}

// Overwrites h, the values of x, and x itself with x + branch, rounded to X.
template <class X, class Y, int N>
__device__ __forceinline__ void add_branch(Pack<X, N>& x, float (&h)[N], const Pack<Y, N>& branch) {
    float b[N];
    unpack(branch, b);
#pragma unroll
    for (int i = 0; i < N; i++) h[i] += b[i];
    x = pack<X, N>(h);
    unpack(x, h);
}

// Overwrites h, which is s - mean or s, with y. The pack begins at column `first`.
template <bool WHOLE, int N>
__device__ __forceinline__ void scale_pack(float (&h)[N], float rstd, const float (&w)[N], const float* bias, int first,
                                           int width) {
    float b[N];
    if (CENTERED) load_wide<WHOLE>(bias, first, width, 0.f, b);
    // Forward and backward must round alike, so the compiler may not choose which sums are fused.
#pragma unroll
    for (int i = 0; i < N; i++) h[i] = CENTERED ? fmaf(mul(h[i], rstd), w[i], b[i]) : mul(mul(h[i], rstd), w[i]);
}

// ---- Forward. sum may be x's buffer, and so may y if they have one type: a thread reads only elements that it writes.
// sum may be null.

template <class X, class Y, bool ADD, bool WHOLE>
__device__ __forceinline__ void forward(const X* x, const Y* branch, const float* weight, const float* bias, float eps,
                                        X* sum, Y* y, float* statistics, long long rows, int width) {
    const int N = InVector<Y>::COUNT, PACKS = 16 / N; // Y is never the wider type
    int skew = WHOLE ? 0 : common_skew(y, width);
    long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= rows) return;

    Pack<X, N> of_x[PACKS];
    Pack<Y, N> of_branch[PACKS];
    EACH_PACK(k, first, width) {
        of_x[k] = load<X, N, WHOLE>(x + row * width, first, width, 0.f);
        if (ADD) of_branch[k] = load<Y, N, WHOLE>(branch + row * width, first, width, 0.f);
    }
    float h[PACKS][N], total = 0.f, squares = 0.f, mean = 0.f;
    EACH_PACK(k, first, width) {
        unpack(of_x[k], h[k]);
        if (ADD) {
            add_branch(of_x[k], h[k], of_branch[k]);
            if (sum) store<WHOLE>(sum + row * width, first, width, h[k]);
        }
#pragma unroll
        for (int i = 0; i < N; i++) CENTERED ? total += h[k][i] : squares += h[k][i] * h[k][i];
    }
    if (CENTERED) {
        mean = reduce_row<Sum>(total, 0) / width;
        // A second pass, since the mean of squares minus the squared mean would cancel.
        EACH_PACK(k, first, width) {
#pragma unroll
            for (int i = 0; i < N; i++) {
                bool inside = WHOLE || (0 <= first + i && first + i < width);
                h[k][i] = inside ? h[k][i] - mean : 0.f;
                squares += h[k][i] * h[k][i];
            }
        }
    }
    float rstd = __frsqrt_rn(reduce_row<Sum>(squares, CENTERED) * (1.f / width) + eps);
    if (threadIdx.x == 0) {
        if (CENTERED) statistics[STATISTICS * row] = mean;
        statistics[STATISTICS * row + STATISTICS - 1] = rstd;
    }
    EACH_PACK(k, first, width) {
        float w[N];
        load_factors<WHOLE>(weight, first, width, w);
        scale_pack<WHOLE>(h[k], rstd, w, bias, first, width);
        store<WHOLE>(y + row * width, first, width, h[k]);
    }
}

template <class X, class Y, bool ADD>
__device__ __forceinline__ void forward(const X* x, const Y* branch, const float* weight, const float* bias, float eps,
                                        X* sum, Y* y, float* statistics, long long rows, int width) {
    if (whole_packs<InVector<Y>::COUNT>(width, x, y, weight) && whole_packs<1>(width, branch, sum, nullptr) &&
        at_vector(bias)) {
        forward<X, Y, ADD, true>(x, branch, weight, bias, eps, sum, y, statistics, rows, width);
    } else {
        forward<X, Y, ADD, false>(x, branch, weight, bias, eps, sum, y, statistics, rows, width);
    }
}

#define FORWARD(NAME, X, Y)                                                                                            \
    extern "C" __global__ void __launch_bounds__(512)                                                                  \
        norm_forward_##NAME(const X* x, const float* weight, const float* bias, float eps, Y* y, float* statistics,    \
                            long long rows, int width) {                                                               \
        forward<X, Y, false>(x, nullptr, weight, bias, eps, nullptr, y, statistics, rows, width);                      \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(512)                                                                  \
        add_norm_forward_##NAME(const X* x, const Y* branch, const float* weight, const float* bias, float eps,        \
                                X* sum, Y* y, float* statistics, long long rows, int width) {                          \
        forward<X, Y, true>(x, branch, weight, bias, eps, sum, y, statistics, rows, width);                            \
    }

FORWARD(f32, f32, f32)
FORWARD(f16, f16, f16)
FORWARD(bf16, bf16, bf16)
FORWARD(f32_f16, f32, f16)
FORWARD(f32_bf16, f32, bf16)

// ---- Backward

// add_dx: dx (rows, width) already holds a gradient, to which this one is added. copy (rows, width) or null: dx as Y. y
// (rows, width) or null: the output of forward, recomputed so that it need not be saved. ADD: the input of the norm is
// x + branch (rows, width), summed again: a branch in half precision needs less memory than a sum in f32. partials
// (gridDim.x, SUMS, width): the sums of dw and db.
//
// dx may be x's buffer, y dy's, and dx dy's if they have one type and y is null: a thread reads only elements that it
// writes. total: shared memory for the sums, if a block computes several rows at a time.
const int TOTAL = 16 * (CENTERED ? 64 : 128); // columns of the threads of such a row

template <class X, class Y, bool ADD, bool WHOLE>
__device__ __forceinline__ void backward(const Y* dy, const X* x, const Y* branch, const float* weight,
                                         const float* bias, const float* statistics, X* dx, Y* copy, Y* y,
                                         float* partials, long long rows, int width, int add_dx, float* total) {
    const int N = InVector<Y>::COUNT, PACKS = 16 / N;
    // Whether weights stay in registers. They do not fit next to rows in f32, nor, with two sums, next to x in f32.
    const bool HELD = CENTERED ? sizeof(X) < 4 : sizeof(Y) < 4;
    int skew = WHOLE ? 0 : common_skew(dy, width);
    long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y, stride = (long long)gridDim.x * blockDim.y;

    float w[PACKS][N], sums[SUMS][PACKS][N];
#pragma unroll
    for (int s = 0; s < SUMS; s++) {
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
#pragma unroll
            for (int i = 0; i < N; i++) sums[s][k][i] = 0.f;
        }
    }
    Pack<Y, N> next_dy[PACKS], next_branch[PACKS];
    Pack<X, N> next_x[PACKS];
    float next_mean = 0.f, next_rstd = 0.f;
    if (row < rows) {
        EACH_PACK(k, first, width) {
            next_dy[k] = load<Y, N, WHOLE>(dy + row * width, first, width, 0.f);
            next_x[k] = load<X, N, WHOLE>(x + row * width, first, width, 0.f);
            if (ADD) next_branch[k] = load<Y, N, WHOLE>(branch + row * width, first, width, 0.f);
        }
        if (CENTERED) next_mean = statistics[STATISTICS * row];
        next_rstd = statistics[STATISTICS * row + STATISTICS - 1];
    }
    if (HELD) {
        EACH_PACK(k, first, width) { load_factors<WHOLE>(weight, first, width, w[k]); }
    }

    float share = 1.f / width;
    // Threads without a row continue for the barriers, with no columns. -N, because a pack may begin N - 1 before
    // column 0.
    for (int slot = 0; row - threadIdx.y < rows; row += stride, slot ^= SUMS) {
        int columns = row < rows ? width : -N;
        Pack<Y, N> of_dy[PACKS];
        Pack<X, N> of_x[PACKS];
        float mean = next_mean, rstd = next_rstd, of_g = 0.f, of_gh = 0.f;
        EACH_PACK(k, first, columns) {
            float g[N], h[N];
            of_dy[k] = next_dy[k], of_x[k] = next_x[k];
            unpack(of_dy[k], g); // elements outside of the row are 0, and so are their sums
            unpack(of_x[k], h);
            if (ADD) add_branch(of_x[k], h, next_branch[k]);
            if (!HELD) load_factors<WHOLE>(weight, first, width, w[k]);
#pragma unroll
            for (int i = 0; i < N; i++) {
                if (CENTERED) {
                    sums[SUMS - 1][k][i] += g[i];
                    h[i] -= mean;
                    sums[0][k][i] += g[i] * (h[i] * rstd);
                    g[i] = mul(g[i], w[k][i]);
                    of_g += g[i];
                    of_gh += g[i] * h[i];
                } else {
                    float gh = g[i] * h[i];
                    of_gh += gh * w[k][i];
                    sums[0][k][i] += gh * rstd;
                }
            }
            if (add_dx) to_level2(dx + row * width + max(first, 0)); // used after the reduction; needs no register
        }
        long long next = row + stride;
        if (next < rows) {
            EACH_PACK(k, first, width) {
                next_dy[k] = load<Y, N, WHOLE>(dy + next * width, first, width, 0.f);
                next_x[k] = load<X, N, WHOLE>(x + next * width, first, width, 0.f);
                if (ADD) next_branch[k] = load<Y, N, WHOLE>(branch + next * width, first, width, 0.f);
            }
            if (CENTERED) next_mean = statistics[STATISTICS * next];
            next_rstd = statistics[STATISTICS * next + STATISTICS - 1];
        }
        if (CENTERED) {
            reduce_row_pair(&of_g, &of_gh, slot);
        } else {
            of_gh = reduce_row<Sum>(of_gh, slot);
        }
        float g_mean = of_g * share, pull = of_gh * share * rstd * rstd;
        EACH_PACK(k, first, columns) {
            float g[N], h[N];
            unpack(of_dy[k], g);
            unpack(of_x[k], h);
            if (!HELD) load_factors<WHOLE>(weight, first, width, w[k]);
#pragma unroll
            for (int i = 0; i < N; i++) {
                if (CENTERED) {
                    h[i] -= mean;
                    // Products are rounded as in the sums, so that terms that should cancel, as in a row of one
                    // element, give 0.
                    g[i] = (mul(g[i], w[k][i]) - g_mean - h[i] * pull) * rstd;
                } else {
                    g[i] = (g[i] * w[k][i] - h[i] * pull) * rstd;
                }
            }
            if (y) {
                scale_pack<WHOLE>(h, rstd, w[k], bias, first, width);
                store<WHOLE>(y + row * width, first, width, h);
            }
            if (add_dx) {
                load_wide<WHOLE>(dx + row * width, first, width, 0.f, h);
#pragma unroll
                for (int i = 0; i < N; i++) g[i] += h[i];
            }
            store<WHOLE>(dx + row * width, first, width, g);
            if (copy) store<WHOLE>(copy + row * width, first, width, g);
        }
    }

    if (blockDim.y > 1) { // one row of threads after another, so that the order is fixed
        for (int turn = 0; turn < blockDim.y; turn++) {
            if (threadIdx.y == turn) {
#pragma unroll
                for (int s = 0; s < SUMS; s++) {
#pragma unroll
                    for (int k = 0; k < PACKS; k++) {
#pragma unroll
                        for (int i = 0; i < N; i++) {
                            // Each thread has its own elements, so there are no conflicts.
                            int at = s * TOTAL + (k * N + i) * blockDim.x + threadIdx.x;
                            if (turn > 0) sums[s][k][i] += total[at];
                            total[at] = sums[s][k][i];
                        }
                    }
                }
            }
            __syncthreads();
        }
    }
    if (threadIdx.y == blockDim.y - 1) {
        float* of_block = partials + (long long)SUMS * blockIdx.x * width;
        EACH_PACK(k, first, width) {
#pragma unroll
            for (int s = 0; s < SUMS; s++) store<WHOLE>(of_block + s * width, first, width, sums[s][k]);
        }
    }
}

template <class X, class Y, bool ADD>
__device__ __forceinline__ void backward(const Y* dy, const X* x, const Y* branch, const float* weight,
                                         const float* bias, const float* statistics, X* dx, Y* copy, Y* y,
                                         float* partials, long long rows, int width, int add_dx) {
    __shared__ float total[SUMS * TOTAL];
    if (whole_packs<InVector<Y>::COUNT>(width, x, dy, weight) && whole_packs<1>(width, dx, copy, partials) &&
        whole_packs<1>(width, y, branch, nullptr) && at_vector(bias)) {
        backward<X, Y, ADD, true>(dy, x, branch, weight, bias, statistics, dx, copy, y, partials, rows, width, add_dx,
                                  total);
    } else {
        backward<X, Y, ADD, false>(dy, x, branch, weight, bias, statistics, dx, copy, y, partials, rows, width, add_dx,
                                   total);
    }
}

#define BACKWARD(NAME, X, Y)                                                                                           \
    extern "C" __global__ void __launch_bounds__(512)                                                                  \
        norm_backward_##NAME(const Y* dy, const X* x, const float* weight, const float* bias, const float* statistics, \
                             X* dx, Y* copy, Y* y, float* partials, long long rows, int width, int add_dx) {           \
        backward<X, Y, false>(dy, x, nullptr, weight, bias, statistics, dx, copy, y, partials, rows, width, add_dx);   \
    }

BACKWARD(f32, f32, f32)
BACKWARD(f16, f16, f16)
BACKWARD(bf16, bf16, bf16)
BACKWARD(f32_f16, f32, f16)
BACKWARD(f32_bf16, f32, bf16)

#define ADD_BACKWARD(NAME, X, Y)                                                                                       \
    extern "C" __global__ void __launch_bounds__(512)                                                                  \
        add_norm_backward_##NAME(const Y* dy, const X* x, const Y* branch, const float* weight, const float* bias,     \
                                 const float* statistics, X* dx, Y* copy, Y* y, float* partials, long long rows,       \
                                 int width, int add_dx) {                                                              \
        backward<X, Y, true>(dy, x, branch, weight, bias, statistics, dx, copy, y, partials, rows, width, add_dx);     \
    }

ADD_BACKWARD(f32_f16, f32, f16)
ADD_BACKWARD(f32_bf16, f32, bf16)

// dw (width) = the sum over `count` blocks of partials (count, SUMS, width), and db likewise. The sums are added to dw
// and db if add_dw and add_db are set. Grid (ceil(width / 32), SUMS), block (32, 32).
extern "C" __global__ void __launch_bounds__(1024)
    sum_partials(const float* partials, int count, int width, float* dw, float* db, int add_dw, int add_db) {
    __shared__ float sums[32][33];
    float* out = blockIdx.y == 0 ? dw : db;
    int accumulate = blockIdx.y == 0 ? add_dw : add_db;
    int column = blockIdx.x * 32 + threadIdx.x;
    float sum = 0.f;
    if (column < width) {
        const float* from = partials + (long long)blockIdx.y * width + column;
#pragma unroll 4
        for (int block = threadIdx.y; block < count; block += 32) sum += from[(long long)SUMS * block * width];
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    sum = reduce_warp<Sum>(sums[threadIdx.x][threadIdx.y]); // warp y has column y
    column = blockIdx.x * 32 + threadIdx.y;
    if (threadIdx.x == 0 && column < width) out[column] = sum + (accumulate ? out[column] : 0.f);
}
