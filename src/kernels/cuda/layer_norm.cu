// LayerNorm: y = w (x - mean) rstd + b, rstd = 1 / sqrt(mean((x - mean)^2) + eps), row by row.
//
// x, y (rows, width); w (width) f32; b (width) f32, or null; statistics (rows, 2) f32, mean and rstd of each row. X is
// the type of the residual stream, Y of what goes into products: equal, or f32 beside half precision.
// Backward, with h = (x - mean) rstd and g = dy w: dx = rstd (g - mean(g) - h mean(g h)); dw = sum over rows of dy h
// and db = sum over rows of dy, both in two stages.
//
// Blocks and columns as in `norm_rows.cuh`; width at most 8192. Grid: forward as many blocks as rows take; backward as
// many as fit on the GPU at once, each with one row after the other, as the columns' sums stay in registers. There a
// thread loads the next row before it works on this one.
// Bytes: forward x in, y out; backward dy, x in, dx out (+ dx in where it is added to), and the partial sums, 2 grid
// width 4, written once and read once by `sum_partials`.

// ---- Forward. y may be x's buffer where they have one type: a thread writes what it alone has read.

template <class X, class Y, bool WHOLE>
__device__ __forceinline__ void forward(const X* x, const float* weight, const float* bias, float eps, Y* y,
                                        float* statistics, long long rows, int width) {
    const int N = InVector<Y>::COUNT, PACKS = 16 / N; // Y is never the wider one
    int skew = WHOLE ? 0 : common_skew(y, width);
    long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= rows) return;

    Pack<X, N> of_x[PACKS];
    EACH_PACK(k, first, width) { of_x[k] = load<X, N, WHOLE>(x + row * width, first, width, 0.f); }
    float h[PACKS][N], sum = 0.f;
    EACH_PACK(k, first, width) {
        unpack(of_x[k], h[k]);
#pragma unroll
        for (int i = 0; i < N; i++) sum += h[k][i];
    }
    float mean = reduce_row<Sum>(sum, 0) / width;
    // A second pass: the mean of squares minus the square of the mean would cancel.
    float squares = 0.f;
    EACH_PACK(k, first, width) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            bool inside = WHOLE || (0 <= first + i && first + i < width);
            h[k][i] = inside ? h[k][i] - mean : 0.f;
            squares += h[k][i] * h[k][i];
        }
    }
    float rstd = __frsqrt_rn(reduce_row<Sum>(squares, 1) / width + eps);
    if (threadIdx.x == 0) {
        statistics[2 * row] = mean;
        statistics[2 * row + 1] = rstd;
    }
    EACH_PACK(k, first, width) {
        float w[N], b[N];
        load_wide<WHOLE>(weight, first, width, 0.f, w);
        if (bias) load_wide<WHOLE>(bias, first, width, 0.f, b);
#pragma unroll
        for (int i = 0; i < N; i++) h[k][i] = h[k][i] * rstd * w[i] + (bias ? b[i] : 0.f);
        store<WHOLE>(y + row * width, first, width, h[k]);
    }
}

template <class X, class Y> __device__ __forceinline__ void forward(const X* x, const float* weight, const float* bias,
                                                                    float eps, Y* y, float* statistics, long long rows,
                                                                    int width) {
    if (whole_packs<InVector<Y>::COUNT>(width, x, y, weight) && at_vector(bias)) {
        forward<X, Y, true>(x, weight, bias, eps, y, statistics, rows, width);
    } else {
        forward<X, Y, false>(x, weight, bias, eps, y, statistics, rows, width);
    }
}

#define FORWARD(NAME, X, Y)                                                                                            \
    extern "C" __global__ void __launch_bounds__(512)                                                                  \
        layer_norm_forward_##NAME(const X* x, const float* weight, const float* bias, float eps, Y* y,                 \
                                  float* statistics, long long rows, int width) {                                      \
        forward<X, Y>(x, weight, bias, eps, y, statistics, rows, width);                                               \
    }

FORWARD(f32, f32, f32)
FORWARD(f16, f16, f16)
FORWARD(bf16, bf16, bf16)
FORWARD(f32_f16, f32, f16)
FORWARD(f32_bf16, f32, bf16)

// ---- Backward

// add_dx: dx (rows, width) holds a gradient already, which is added to. dx may be the buffer of x, or of dy where they
// have one type: a thread writes what it alone has read.
// partials (gridDim.x, 2, width): of dw and of db. total: room of the block for both, where it has several rows at a
// time.
const int TOTAL = 16 * 64; // columns of such a row's threads, which are 64 at most

template <class X, class Y, bool WHOLE>
__device__ __forceinline__ void backward(const Y* dy, const X* x, const float* weight, const float* statistics, X* dx,
                                         float* partials, long long rows, int width, int add_dx, float* total) {
    const int N = InVector<Y>::COUNT, PACKS = 16 / N;
    const bool HELD = sizeof(X) < 4; // the weights, in registers; beside rows in f32 there is no room
    int skew = WHOLE ? 0 : common_skew(dy, width);
    long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y, stride = (long long)gridDim.x * blockDim.y;

    float w[PACKS][N], dw[PACKS][N], db[PACKS][N];
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
#pragma unroll
        for (int i = 0; i < N; i++) dw[k][i] = db[k][i] = 0.f;
    }
    Pack<Y, N> next_dy[PACKS];
    Pack<X, N> next_x[PACKS];
    float next_mean = 0.f, next_rstd = 0.f;
    if (row < rows) {
        EACH_PACK(k, first, width) {
            next_dy[k] = load<Y, N, WHOLE>(dy + row * width, first, width, 0.f);
            next_x[k] = load<X, N, WHOLE>(x + row * width, first, width, 0.f);
        }
        next_mean = statistics[2 * row], next_rstd = statistics[2 * row + 1];
    }
    if (HELD) {
        EACH_PACK(k, first, width) { load_wide<WHOLE>(weight, first, width, 0.f, w[k]); }
    }

    float share = 1.f / width;
    // Threads whose rows are beyond the last stay for the barriers, with no columns: a pack may begin N - 1 before the
    // first.
    for (int slot = 0; row - threadIdx.y < rows; row += stride, slot ^= 2) {
        int columns = row < rows ? width : -N;
        Pack<Y, N> of_dy[PACKS];
        Pack<X, N> of_x[PACKS];
        float mean = next_mean, rstd = next_rstd, of_g = 0.f, of_gh = 0.f;
        EACH_PACK(k, first, columns) {
            float g[N], h[N];
            of_dy[k] = next_dy[k], of_x[k] = next_x[k];
            unpack(of_dy[k], g); // outside of the row 0, and so is all that is added up
            unpack(of_x[k], h);
            if (!HELD) load_wide<WHOLE>(weight, first, width, 0.f, w[k]);
#pragma unroll
            for (int i = 0; i < N; i++) {
                db[k][i] += g[i];
                h[i] -= mean;
                dw[k][i] += g[i] * (h[i] * rstd);
                g[i] = mul(g[i], w[k][i]);
                of_g += g[i];
                of_gh += g[i] * h[i];
            }
            if (add_dx) to_level2(dx + row * width + max(first, 0)); // for use after the reduction; costs no register
        }
        long long next = row + stride;
        if (next < rows) {
            EACH_PACK(k, first, width) {
                next_dy[k] = load<Y, N, WHOLE>(dy + next * width, first, width, 0.f);
                next_x[k] = load<X, N, WHOLE>(x + next * width, first, width, 0.f);
            }
            next_mean = statistics[2 * next], next_rstd = statistics[2 * next + 1];
        }
        reduce_row_pair(&of_g, &of_gh, slot);
        float g_mean = of_g * share, pull = of_gh * share * rstd * rstd;
        EACH_PACK(k, first, columns) {
            float g[N], h[N];
            unpack(of_dy[k], g);
            unpack(of_x[k], h);
            if (!HELD) load_wide<WHOLE>(weight, first, width, 0.f, w[k]);
#pragma unroll
            for (int i = 0; i < N; i++) {
                // Products rounded as they were added up: what cancels, as in a row of one element, cancels to 0.
                g[i] = (mul(g[i], w[k][i]) - g_mean - (h[i] - mean) * pull) * rstd;
            }
            if (add_dx) {
                load_wide<WHOLE>(dx + row * width, first, width, 0.f, h);
#pragma unroll
                for (int i = 0; i < N; i++) g[i] += h[i];
            }
            store<WHOLE>(dx + row * width, first, width, g);
        }
    }

    if (blockDim.y > 1) { // one row of threads after the other, so that the order is fixed
        for (int turn = 0; turn < blockDim.y; turn++) {
            if (threadIdx.y == turn) {
#pragma unroll
                for (int k = 0; k < PACKS; k++) {
#pragma unroll
                    for (int i = 0; i < N; i++) {
                        int at = (k * N + i) * blockDim.x + threadIdx.x; // a thread's own places: no conflicts
                        if (turn > 0) dw[k][i] += total[at], db[k][i] += total[TOTAL + at];
                        total[at] = dw[k][i], total[TOTAL + at] = db[k][i];
                    }
                }
            }
            __syncthreads();
        }
    }
    if (threadIdx.y == blockDim.y - 1) {
        float* of_block = partials + 2ll * blockIdx.x * width;
        EACH_PACK(k, first, width) {
            store<WHOLE>(of_block, first, width, dw[k]);
            store<WHOLE>(of_block + width, first, width, db[k]);
        }
    }
}

template <class X, class Y> __device__ __forceinline__ void backward(const Y* dy, const X* x, const float* weight,
                                                                     const float* statistics, X* dx, float* partials,
                                                                     long long rows, int width, int add_dx) {
    __shared__ float total[2 * TOTAL];
    if (whole_packs<InVector<Y>::COUNT>(width, x, dy, weight) && whole_packs<1>(width, dx, partials, nullptr)) {
        backward<X, Y, true>(dy, x, weight, statistics, dx, partials, rows, width, add_dx, total);
    } else {
        backward<X, Y, false>(dy, x, weight, statistics, dx, partials, rows, width, add_dx, total);
    }
}

#define BACKWARD(NAME, X, Y)                                                                                           \
    extern "C" __global__ void __launch_bounds__(512)                                                                  \
        layer_norm_backward_##NAME(const Y* dy, const X* x, const float* weight, const float* statistics, X* dx,       \
                                   float* partials, long long rows, int width, int add_dx) {                           \
        backward<X, Y>(dy, x, weight, statistics, dx, partials, rows, width, add_dx);                                  \
    }

BACKWARD(f32, f32, f32)
BACKWARD(f16, f16, f16)
BACKWARD(bf16, bf16, bf16)
BACKWARD(f32_f16, f32, f16)
BACKWARD(f32_bf16, f32, bf16)

// dw (width) = the sum over `count` blocks of partials (count, 2, width) of dw, and db likewise; added to what they
// hold where `accumulate`. Grid (ceil(width / 32), 2), or 1 without db; block (32, 32).
extern "C" __global__ void __launch_bounds__(1024)
    sum_partials(const float* partials, int count, int width, float* dw, float* db, int accumulate) {
    __shared__ float sums[32][33];
    float* out = blockIdx.y == 0 ? dw : db;
    int column = blockIdx.x * 32 + threadIdx.x;
    float sum = 0.f;
    if (column < width) {
        const float* from = partials + (long long)blockIdx.y * width + column;
#pragma unroll 4
        for (int block = threadIdx.y; block < count; block += 32) sum += from[2ll * block * width];
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    sum = reduce_warp<Sum>(sums[threadIdx.x][threadIdx.y]); // warp y has column y
    column = blockIdx.x * 32 + threadIdx.y;
    if (threadIdx.x == 0 && column < width) out[column] = sum + (accumulate ? out[column] : 0.f);
}
