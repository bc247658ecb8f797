// Flash attention, forward, in exact f32: out = softmax(scale q k^T) v, lse = log(sum(exp(scale q k^T))), by FMA on
// CUDA cores. Behind ../common.cuh, forward.cuh, tiles.cuh and fma.cuh, with ELEMENT=f32.
//
//   q (B, H, Tq, Dh), k and v (B, Hkv, Tk, Dh), out (B, H, Tq, Dh): f32, any strides, Dh contiguous, 16-byte aligned
//   lse (2, B, H, Tq): f32, contiguous, and what rounding took from it; -inf for a query that sees no key, whose out
//   is zero
//   first_keys (B, Tq): u32, contiguous, only with FIRST_KEYS; see common.cuh
//   dropout: see dropped.cuh; lse is that of all probabilities
//
// A block has ROWS queries of one head and walks over the keys, COLUMNS at a time: S = Q K^T, P = exp(S - max), O += P
// V. A warp has ROWS / WARPS rows; S and O stay in its registers, P goes from lane to lane through rows of shared
// memory that are the warp's own. Values are copied while S is computed, the next keys while P V is. The walk begins at
// the first key of the block's first row.
//
// grid  ceil(Tq / ROWS) * B * H        block  32 * WARPS
// dynamic shared memory  FORWARD_SHARED bytes
// 4 B H Tq Tk Dh FLOPs (half of them where causal).

#ifndef COLUMNS
#define COLUMNS (HEAD_DIM == 96 || HEAD_DIM == 256 ? 32 : 64)
#endif
#ifndef WARPS
#define WARPS (HEAD_DIM >= 128 ? 8 : 4)
#endif
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM (HEAD_DIM >= 128 ? 1 : 2)
#endif

constexpr int THREADS = 32 * WARPS;
constexpr int M = ROWS / WARPS / 4, N = COLUMNS / 8; // rows and keys of a lane
typedef Exchanged<N> Exchange;
constexpr int FORWARD_SHARED = ((ROWS + 2 * COLUMNS) * PITCH + ROWS * Exchange::PITCH) * 4;
// The maximum is let stand until a score exceeds it by so much (as a power of two): P stays under 2^8.
constexpr float SLACK = 8.0f;
static_assert(ROWS % (4 * WARPS) == 0 && COLUMNS % 32 == 0, "tiles of whole blocks");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    JOIN(flash_forward_, ELEMENT)(const __grid_constant__ ForwardArguments arguments) {
    extern __shared__ __align__(128) unsigned char shared[];
    const Sizes& sizes = arguments.sizes;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int lane_row = row_of(lane), lane_column = column_of(lane);
    const int dim = sizes.head_dim;

    const RowBlock block(arguments);
    const int first_row = block.first_row, rows = block.rows;
    const long long k_stride = arguments.k_strides.row, v_stride = arguments.v_strides.row;

    // Keys that the warp's last row sees, and keys that all of its rows see.
    const int warp_row = warp * 4 * M;
    const int warp_seen = min(sizes.keys, first_row + warp_row + 4 * M + sizes.offset);
    const int unmasked = min(sizes.keys, first_row + warp_row + 1 + sizes.offset);
    const int tiles = CEIL_DIV(block.seen, COLUMNS);
    // The first tile that the block sees; keys before the first that the warp sees, and such as some of its rows do not
    // see for their first keys.
    const FirstKeys& first_keys = block.first_keys;
    const int first_tile = FIRST_KEYS ? min(first_keys.of(first_row) / COLUMNS, tiles) : 0;
    const int warp_first = first_keys.of(first_row + warp_row);
    const int warp_last_first = first_keys.of(first_row + warp_row + 4 * M - 1);

    float* const q_tile = reinterpret_cast<float*>(shared); // (ROWS, PITCH)
    float* const k_tile = q_tile + ROWS * PITCH;            // (COLUMNS, PITCH)
    float* const v_tile = k_tile + COLUMNS * PITCH;         // (COLUMNS, PITCH)
    float* const p_tile = v_tile + COLUMNS * PITCH;         // (ROWS, Exchange::PITCH)
    const u32 q_target = shared_address(q_tile), k_target = shared_address(k_tile), v_target = shared_address(v_tile);

    copy_tile<ROWS, THREADS, Padded>(q_target, block.q, arguments.q_strides.row, rows, dim);
    if (first_tile < tiles) {
        const int first = first_tile * COLUMNS;
        copy_tile<COLUMNS, THREADS, Padded>(k_target, block.k + first * k_stride, k_stride, sizes.keys - first, dim);
    }
    end_group();

    const float* const my_q = q_tile + (warp_row + lane_row) * PITCH;
    const float* const my_k = k_tile + lane_column * PITCH;
    const float* const my_v = v_tile + lane_column * WIDTH;
    float* const my_p = p_tile + (warp_row + lane_row) * Exchange::PITCH;
    const float to_log2 = exponent_of_score(sizes), slack = SLACK / to_log2;
    const Dropped dropped(arguments.dropout, sizes);

    float o[M][DIMS] = {}, largest[M], sum[M]; // of rows 4 m; the sum of this lane's columns
#pragma unroll
    for (int m = 0; m < M; m++) largest[m] = -INFINITE, sum[m] = 0;

    for (int tile = first_tile; tile < tiles; tile++) {
        const int first_key = tile * COLUMNS;
        const bool working = first_key < warp_seen && (!FIRST_KEYS || first_key + COLUMNS > warp_first);
        wait_groups<0>();
        __syncthreads(); // the keys have arrived for all, and all are done with the values before
        copy_tile<COLUMNS, THREADS, Padded>(v_target, block.v + first_key * v_stride, v_stride, sizes.keys - first_key,
                                            dim);
        end_group();

        if (working) {
            float s[M][N] = {};
            multiply_rows(s, my_q, my_k);
            if (SOFT_CAP) {
#pragma unroll
                for (int m = 0; m < M; m++) cap_scores(s[m], sizes);
            }

            if (first_key + COLUMNS > unmasked) {
#pragma unroll
                for (int m = 0; m < M; m++) {
                    const int row = first_row + warp_row + lane_row + 4 * m;
                    const int visible = min(sizes.keys, row + 1 + sizes.offset) - first_key - lane_column;
#pragma unroll
                    for (int n = 0; n < N; n++) s[m][n] = n * 8 < visible ? s[m][n] : -INFINITE;
                }
            }
            if (FIRST_KEYS && first_key < warp_last_first) {
#pragma unroll
                for (int m = 0; m < M; m++) {
                    const int row = first_row + warp_row + lane_row + 4 * m;
                    const int hidden = first_keys.of(row) - first_key - lane_column;
#pragma unroll
                    for (int n = 0; n < N; n++) s[m][n] = n * 8 >= hidden ? s[m][n] : -INFINITE;
                }
            }

            // The rows' maxima; O and the sums are brought to new ones only where they have grown by more than the
            // slack.
            bool grown = false;
            float now[M];
#pragma unroll
            for (int m = 0; m < M; m++) {
                now[m] = s[m][0];
#pragma unroll
                for (int n = 1; n < N; n++) now[m] = fmaxf(now[m], s[m][n]);
                grown |= now[m] > largest[m] + slack;
            }
            if (__any_sync(~0u, grown)) {
#pragma unroll
                for (int m = 0; m < M; m++) {
                    const float most = fmaxf(largest[m], most_over_columns(now[m]));
                    const float factor = power_of_2((largest[m] - (most == -INFINITE ? 0 : most)) * to_log2);
                    largest[m] = most;
                    sum[m] *= factor;
#pragma unroll
                    for (int i = 0; i < DIMS; i++) o[m][i] *= factor;
                }
            }

#pragma unroll
            for (int m = 0; m < M; m++) {
                // A row of -inf alone keeps its maximum at -inf: 2^(-inf - 0) = 0.
                const float less = largest[m] == -INFINITE ? 0 : -largest[m] * to_log2;
#pragma unroll
                for (int n = 0; n < N; n++) s[m][n] = power_of_2(fmaf(s[m][n], to_log2, less));
                float tile_sum = s[m][0];
#pragma unroll
                for (int n = 1; n < N; n++) tile_sum += s[m][n];
                sum[m] += tile_sum;
                if (DROPOUT) {
                    // Each lane of a row draws the n-th eight keys for one n.
                    u32 mine = 0;
                    if (lane_column < N)
                        mine = dropped.eight_keys(block.head_in_all, first_row + warp_row + lane_row + 4 * m,
                                                  first_key + lane_column * 8);
#pragma unroll
                    for (int n = 0; n < N; n++) {
                        const u32 stay = __shfl_sync(~0u, mine, lane_of(lane_row, n));
                        if (!(stay >> lane_column & 1)) s[m][n] = 0;
                    }
                }
                Exchange::write(my_p + m * 4 * Exchange::PITCH, lane_column, s[m]);
            }
        }

        wait_groups<0>();
        __syncthreads(); // the values have arrived for all, and all are done with the keys; P is written
        if (tile + 1 < tiles) {
            const int next = first_key + COLUMNS;
            copy_tile<COLUMNS, THREADS, Padded>(k_target, block.k + next * k_stride, k_stride, sizes.keys - next, dim);
            end_group();
        }
        if (working) multiply_columns<M, N>(o, my_p, my_v);
    }
    wait_groups<0>();

    E* out = block.out(arguments);
#pragma unroll
    for (int m = 0; m < M; m++) {
        const int row = warp_row + lane_row + 4 * m;
        const float total = sum_over_columns(sum[m]);
        if (row >= rows) continue;
        if (lane_column == 0) write_lse(arguments, block, row, __fmul_rn(largest[m], to_log2), total);
        write_row(out + row * arguments.out_strides.row, o[m], lane_column, dim,
                  total == 0 ? 0 : (DROPOUT ? arguments.dropout.scale : 1) / total);
    }
}
