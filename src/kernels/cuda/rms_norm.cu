// RMSNorm: y = w x rstd, rstd = 1 / sqrt(mean(x^2) + eps), row by row; with the residual sum in front of it, or
// without.
//
// x, branch, sum, y (rows, width); w (width) f32; rstd (rows) f32. X is the type of the residual stream, Y of what goes
// into and comes out of products: equal, or f32 beside half precision. The sum is rounded to X before it is normed.
// Backward: dx = rstd (g - h mean(g h)), g = dy w, h = x rstd; dw = sum over rows of dy h, in two stages.
//
// Blocks and columns as in `norm_rows.cuh`; width at most 8192. Grid: forward as many blocks as rows take; backward as
// many as fit on the GPU at once, each with one row after the other, as the columns' sums and the weights stay in
// registers. There a thread loads the next row before it works on this one: else loads, reduction and stores wait for
// each other (55% of the copy rate). Bytes: forward x in, y out (+ branch in, sum out); backward dy, x in, dx out (+ dx
// in where it is added to, + copy out, + y out, + branch in), and the partial sums, grid * width * 4, written once and
// read once by `sum_partials`. Of the copy rate (H200, widths 512 to 8192, at least half a gigabyte): forward 93 to
// 100%; backward 81 to 97%, at width 8192 76%.

// h, the values of x, becomes x + branch rounded to X, as x does.
template <class X, class Y, int N>
__device__ __forceinline__ void add_branch(Pack<X, N>& x, float (&h)[N], const Pack<Y, N>& branch) {
    float b[N];
    unpack(branch, b);
#pragma unroll
    for (int i = 0; i < N; i++) h[i] += b[i];
    x = pack<X, N>(h);
    unpack(x, h);
}

// ---- Forward. sum may be x's buffer, as a thread writes what it alone has read; or null, where it is not wanted.

template <class X, class Y, bool ADD, bool WHOLE>
__device__ __forceinline__ void forward(const X* x, const Y* branch, const float* weight, float eps, X* sum, Y* y,
                                        float* rstd, long long rows, int width) {
    const int N = InVector<Y>::COUNT, PACKS = 16 / N; // Y is never the wider one
    int skew = WHOLE ? 0 : common_skew(y, width);
    long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= rows) return;

    Pack<X, N> of_x[PACKS];
    Pack<Y, N> of_branch[PACKS];
    EACH_PACK(k, first, width) {
        of_x[k] = load<X, N, WHOLE>(x + row * width, first, width, 0.f);
        if (ADD) of_branch[k] = load<Y, N, WHOLE>(branch + row * width, first, width, 0.f);
    }
    float squares = 0.f;
    EACH_PACK(k, first, width) {
        float h[N];
        unpack(of_x[k], h);
        if (ADD) {
            add_branch(of_x[k], h, of_branch[k]);
            if (sum) store<WHOLE>(sum + row * width, first, width, h);
        }
#pragma unroll
        for (int i = 0; i < N; i++) squares += h[i] * h[i];
    }
    float scale = __frsqrt_rn(reduce_row<Sum>(squares, 0) * (1.f / width) + eps);
    if (threadIdx.x == 0) rstd[row] = scale;
    EACH_PACK(k, first, width) {
        float h[N], w[N];
        unpack(of_x[k], h);
        load_wide<WHOLE>(weight, first, width, 0.f, w);
#pragma unroll
        for (int i = 0; i < N; i++) h[i] = h[i] * scale * w[i];
        store<WHOLE>(y + row * width, first, width, h);
    }
}

template <class X, class Y, bool ADD>
__device__ __forceinline__ void forward(const X* x, const Y* branch, const float* weight, float eps, X* sum, Y* y,
                                        float* rstd, long long rows, int width) {
    if (whole_packs<InVector<Y>::COUNT>(width, x, y, weight) && whole_packs<1>(width, branch, sum, nullptr)) {
        forward<X, Y, ADD, true>(x, branch, weight, eps, sum, y, rstd, rows, width);
    } else {
        forward<X, Y, ADD, false>(x, branch, weight, eps, sum, y, rstd, rows, width);
    }
}

#define FORWARD(NAME, X, Y)                                                                                            \
    extern "C" __global__ void __launch_bounds__(512) rms_norm_forward_##NAME(                                         \
        const X* x, const float* weight, float eps, Y* y, float* rstd, long long rows, int width) {                    \
        forward<X, Y, false>(x, nullptr, weight, eps, nullptr, y, rstd, rows, width);                                  \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(512)                                                                  \
        add_rms_norm_forward_##NAME(const X* x, const Y* branch, const float* weight, float eps, X* sum, Y* y,         \
                                    float* rstd, long long rows, int width) {                                          \
        forward<X, Y, true>(x, branch, weight, eps, sum, y, rstd, rows, width);                                        \
    }

FORWARD(f32, f32, f32)
FORWARD(f16, f16, f16)
FORWARD(bf16, bf16, bf16)
FORWARD(f32_f16, f32, f16)
FORWARD(f32_bf16, f32, bf16)

// ---- Backward

// add_dx: dx (rows, width) holds a gradient already, which is added to. copy (rows, width), or null: dx once more, in
// Y. y (rows, width), or null: what forward gave, computed as there, so that it need not be kept. ADD: what was normed
// is the sum of x and branch (rows, width), added up again as there: a branch in half precision is less to keep than a
// sum in f32. partials (gridDim.x, width). dx may be x's buffer, y dy's: a thread writes what it alone has read.
template <class X, class Y, bool ADD, bool WHOLE>
__device__ __forceinline__ void backward(const Y* dy, const X* x, const Y* branch, const float* weight,
                                         const float* rstd, X* dx, Y* copy, Y* y, float* partials, long long rows,
                                         int width, int add_dx, float* total) {
    const int N = InVector<Y>::COUNT, PACKS = 16 / N;
    const bool HELD = sizeof(Y) < 4; // the weights, in registers; beside rows in f32 there is no room
    int skew = WHOLE ? 0 : common_skew(dy, width);
    long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y, stride = (long long)gridDim.x * blockDim.y;

    float w[PACKS][N], dw[PACKS][N];
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
#pragma unroll
        for (int i = 0; i < N; i++) dw[k][i] = 0.f;
    }
    Pack<Y, N> next_dy[PACKS], next_branch[PACKS];
    Pack<X, N> next_x[PACKS];
    float next_scale = 0.f;
    if (row < rows) {
        EACH_PACK(k, first, width) {
            next_dy[k] = load<Y, N, WHOLE>(dy + row * width, first, width, 0.f);
            next_x[k] = load<X, N, WHOLE>(x + row * width, first, width, 0.f);
            if (ADD) next_branch[k] = load<Y, N, WHOLE>(branch + row * width, first, width, 0.f);
        }
        next_scale = rstd[row];
    }
    if (HELD) {
        EACH_PACK(k, first, width) { load_wide<WHOLE>(weight, first, width, 0.f, w[k]); }
    }

    float share = 1.f / width;
    // Threads whose rows are beyond the last stay for the barriers, with no columns: a pack may begin N - 1 before the
    // first.
    for (int slot = 0; row - threadIdx.y < rows; row += stride, slot ^= 1) {
        int columns = row < rows ? width : -N;
        Pack<Y, N> of_dy[PACKS];
        Pack<X, N> of_x[PACKS];
        float scale = next_scale, inner = 0.f;
        EACH_PACK(k, first, columns) {
            float g[N], h[N];
            of_dy[k] = next_dy[k], of_x[k] = next_x[k];
            unpack(of_dy[k], g);
            unpack(of_x[k], h);
            if (ADD) add_branch(of_x[k], h, next_branch[k]);
            if (!HELD) load_wide<WHOLE>(weight, first, width, 0.f, w[k]);
#pragma unroll
            for (int i = 0; i < N; i++) {
                float gh = g[i] * h[i];
                inner += gh * w[k][i];
                dw[k][i] += gh * scale;
            }
            if (add_dx) to_level2(dx + row * width + max(first, 0)); // for use after the reduction; costs no register
        }
        long long next = row + stride;
        if (next < rows) {
            EACH_PACK(k, first, width) {
                next_dy[k] = load<Y, N, WHOLE>(dy + next * width, first, width, 0.f);
                next_x[k] = load<X, N, WHOLE>(x + next * width, first, width, 0.f);
                if (ADD) next_branch[k] = load<Y, N, WHOLE>(branch + next * width, first, width, 0.f);
            }
            next_scale = rstd[next];
        }
        float pull = reduce_row<Sum>(inner, slot) * share * scale * scale;
        EACH_PACK(k, first, columns) {
            float g[N], h[N];
            unpack(of_dy[k], g);
            unpack(of_x[k], h);
            if (!HELD) load_wide<WHOLE>(weight, first, width, 0.f, w[k]);
#pragma unroll
            for (int i = 0; i < N; i++) {
                g[i] = (g[i] * w[k][i] - h[i] * pull) * scale;
                h[i] = h[i] * scale * w[k][i];
            }
            if (y) store<WHOLE>(y + row * width, first, width, h);
            if (add_dx) {
                load_wide<WHOLE>(dx + row * width, first, width, 0.f, h);
#pragma unroll
                for (int i = 0; i < N; i++) g[i] += h[i];
            }
            store<WHOLE>(dx + row * width, first, width, g);
            if (copy) store<WHOLE>(copy + row * width, first, width, g);
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
                        if (turn > 0) dw[k][i] += total[at];
                        total[at] = dw[k][i];
                    }
                }
            }
            __syncthreads();
        }
    }
    if (threadIdx.y == blockDim.y - 1) {
        EACH_PACK(k, first, width) { store<WHOLE>(partials + (long long)blockIdx.x * width, first, width, dw[k]); }
    }
}

template <class X, class Y, bool ADD> __device__ __forceinline__ void backward(const Y* dy, const X* x, const Y* branch,
                                                                               const float* weight, const float* rstd,
                                                                               X* dx, Y* copy, Y* y, float* partials,
                                                                               long long rows, int width, int add_dx) {
    __shared__ float total[16 * 128]; // dw of the block, where it has several rows at a time
    if (whole_packs<InVector<Y>::COUNT>(width, x, dy, weight) && whole_packs<1>(width, dx, copy, partials) &&
        whole_packs<1>(width, y, branch, nullptr)) {
        backward<X, Y, ADD, true>(dy, x, branch, weight, rstd, dx, copy, y, partials, rows, width, add_dx, total);
    } else {
        backward<X, Y, ADD, false>(dy, x, branch, weight, rstd, dx, copy, y, partials, rows, width, add_dx, total);
    }
}

#define BACKWARD(NAME, X, Y)                                                                                           \
    extern "C" __global__ void __launch_bounds__(512)                                                                  \
        rms_norm_backward_##NAME(const Y* dy, const X* x, const float* weight, const float* rstd, X* dx, Y* copy,      \
                                 Y* y, float* partials, long long rows, int width, int add_dx) {                       \
        backward<X, Y, false>(dy, x, nullptr, weight, rstd, dx, copy, y, partials, rows, width, add_dx);               \
    }

BACKWARD(f32, f32, f32)
BACKWARD(f16, f16, f16)
BACKWARD(bf16, bf16, bf16)
BACKWARD(f32_f16, f32, f16)
BACKWARD(f32_bf16, f32, bf16)

#define ADD_BACKWARD(NAME, X, Y)                                                                                       \
    extern "C" __global__ void __launch_bounds__(512)                                                                  \
        add_rms_norm_backward_##NAME(const Y* dy, const X* x, const Y* branch, const float* weight, const float* rstd, \
                                     X* dx, Y* copy, Y* y, float* partials, long long rows, int width, int add_dx) {   \
        backward<X, Y, true>(dy, x, branch, weight, rstd, dx, copy, y, partials, rows, width, add_dx);                 \
    }

ADD_BACKWARD(f32_f16, f32, f16)
ADD_BACKWARD(f32_bf16, f32, bf16)

// out (width) = sum over `count` rows of partials (count, width), added to what out holds where `accumulate`.
// grid ceil(width / 32), block (32, 32).
extern "C" __global__ void __launch_bounds__(1024)
    sum_partials(const float* partials, int count, int width, float* out, int accumulate) {
    __shared__ float sums[32][33];
    int column = blockIdx.x * 32 + threadIdx.x;
    float sum = 0.f;
    if (column < width) {
#pragma unroll 4
        for (int row = threadIdx.y; row < count; row += 32) sum += partials[(long long)row * width + column];
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    sum = reduce_warp<Sum>(sums[threadIdx.x][threadIdx.y]); // warp y has column y
    column = blockIdx.x * 32 + threadIdx.y;
    if (threadIdx.x == 0 && column < width) out[column] = sum + (accumulate ? out[column] : 0.f);
}
