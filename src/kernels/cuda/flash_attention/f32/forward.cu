// Flash attention, forward, in f32 on tensor cores: out = softmax(scale q k^T) v, lse = log(sum(exp(scale q k^T))), by
// mma.sync (sm_80 and up). Included after ../common.cuh and tf32.cuh, which explains TF32_MATMULS; ELEMENT=f32.
//
//   q (B, H, Tq, Dh), k (B, Hkv, Tk, Dh), v (B, Hkv, Tk, Dv), out (B, H, Tq, Dv): f32, any strides, rows contiguous,
//   16-byte aligned
//   lse (2, B, H, Tq): f32, contiguous: lse and its rounding error; -inf for a query without keys, whose out is zero
//   first_keys (B, Tq): u32, contiguous, only with FIRST_KEYS; see common.cuh
//   dropout: see dropped.cuh; lse covers all probabilities, also dropped ones
//   masks: see masks.cuh; tiles of keys that a key mask hides from all ROWS queries are skipped
//
// A block has ROWS queries of one head and loops over the keys, COLUMNS at a time: S = Q K^T, P = exp(S - max), O += P
// V. A warp has ROWS / WARPS rows, whose S, P and O stay in its registers. The next tile of keys and values is copied
// meanwhile. The loop begins at the first key of the block's first row.
//
//   grid  ceil(Tq / ROWS) * B * H        block  32 * WARPS
//   dynamic shared memory  FORWARD_SHARED bytes
// 2 B H Tq Tk (Dh + Dv) FLOPs (half of them where causal).

#ifndef ROWS // queries per block
#define ROWS 128
#endif
#ifndef COLUMNS
#define COLUMNS (HEAD_DIM == 256 ? 16 : 64)
#endif
#ifndef WARPS
#define WARPS (HEAD_DIM <= 64 ? 4 : 8)
#endif
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM (HEAD_DIM <= 64 ? 2 : 1)
#endif

constexpr int THREADS = 32 * WARPS;
constexpr int M = ROWS / WARPS / 16, N = COLUMNS / 8; // per warp: blocks of 16 rows; blocks of 8 keys
constexpr int TILE = COLUMNS * PITCH;                 // floats
constexpr int FORWARD_SHARED = (ROWS * PITCH + 4 * TILE) * 4;
// The maximum is only raised if a score exceeds it by more than this, as a power of two. P stays under 2^8.
constexpr float SLACK = 8.0f;
static_assert(ROWS % (16 * WARPS) == 0 && COLUMNS % 16 == 0, "tiles of whole blocks");

struct ForwardArguments {
    const E *q, *k, *v;
    E *out, *rounding_error; // rounding_error: null, since nothing is rounded
    float* lse;              // (2, B, H, Tq)
    Strides q_strides, k_strides, v_strides, out_strides;
    Sizes sizes;
    const u32* first_keys; // null without FIRST_KEYS
    DropoutArguments dropout;
    MaskArguments masks;
};

// Up to ROWS queries of one head, and the keys that they attend to.
struct RowBlock {
    int head_in_all, batch, head, first_row, rows;
    int seen; // the number of keys of the last row
    FirstKeys first_keys;
    const E *q, *k, *v;
    __device__ __forceinline__ explicit RowBlock(const ForwardArguments& arguments) {
        const Sizes& sizes = arguments.sizes;
        // The latest queries come first: with a causal mask they attend to the most keys.
        const int row_tiles = CEIL_DIV(sizes.queries, ROWS);
        int row_tile;
        locate_ticket(blockIdx.x, sizes.batch * sizes.heads, row_tiles, sizes.heads_at_once, head_in_all, row_tile);
        first_row = (row_tiles - 1 - row_tile) * ROWS;
        batch = head_in_all / sizes.heads, head = head_in_all % sizes.heads;
        rows = min(ROWS, sizes.queries - first_row);

        const int kv_head = head / (sizes.heads / sizes.kv_heads);
        const Strides &of_q = arguments.q_strides, &of_k = arguments.k_strides, &of_v = arguments.v_strides;
        q = arguments.q + batch * of_q.batch + head * of_q.head + first_row * of_q.row;
        k = arguments.k + batch * of_k.batch + kv_head * of_k.head;
        v = arguments.v + batch * of_v.batch + kv_head * of_v.head;
        seen = max(0, min(sizes.keys, first_row + rows + sizes.offset));
        first_keys = FirstKeys(arguments.first_keys, sizes, batch);
    }
    // The address of the first row of out.
    __device__ __forceinline__ E* out(const ForwardArguments& arguments) const {
        const Strides& of_out = arguments.out_strides;
        return arguments.out + batch * of_out.batch + head * of_out.head + first_row * of_out.row;
    }
};

// Writes the log-sum-exp of a row whose exponentials are relative to the `largest` score (already times scale log2(e))
// and sum to `total`. Its rounding error follows one tensor further on, because in backward an error of lse affects the
// whole row.
__device__ __forceinline__ void write_lse(const ForwardArguments& arguments, const RowBlock& block, int row,
                                          float largest, float total) {
    const Sizes& sizes = arguments.sizes;
    const float logarithm = log2f(total), sum = __fadd_rn(largest, logarithm); // in units of ln 2
    const float of_logarithm = __fsub_rn(sum, largest);
    const float rest = __fadd_rn(__fsub_rn(largest, __fsub_rn(sum, of_logarithm)), __fsub_rn(logarithm, of_logarithm));
    const float lse = __fmul_rn(sum, LN_2);
    const bool sees = total != 0;
    float* to = arguments.lse + (long long)block.head_in_all * sizes.queries + block.first_row + row;
    to[0] = sees ? lse : -INFINITE;
    to[(long long)sizes.batch * sizes.heads * sizes.queries] =
        sees ? fmaf(sum, LN_2, -lse) + fmaf(sum, LN_2_REST, rest * LN_2) : 0;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    JOIN(flash_forward_, ELEMENT)(const __grid_constant__ ForwardArguments arguments) {
    extern __shared__ __align__(128) unsigned char shared[];
    const Sizes& sizes = arguments.sizes;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int quad_row = lane / 4, quad_column = lane % 4 * 2; // of this thread in a 16 x 8 block
    const int dim = sizes.head_dim, value_dim = sizes.value_dim;

    const RowBlock block(arguments);
    const int first_row = block.first_row, rows = block.rows;
    const long long k_stride = arguments.k_strides.row, v_stride = arguments.v_strides.row;

    // The number of keys of the warp's last row, and of all its rows.
    const int warp_row = warp * 16 * M;
    const int warp_seen = min(sizes.keys, first_row + warp_row + 16 * M + sizes.offset);
    const int unmasked = min(sizes.keys, first_row + warp_row + 1 + sizes.offset);
    const int tiles = CEIL_DIV(block.seen, COLUMNS);
    // The first tile of the block; the first key of the warp; the last first key of the warp's rows.
    const FirstKeys& first_keys = block.first_keys;
    const HeadMask mask(arguments.masks, sizes.queries, block.batch, block.head);
    const HeadBias bias(arguments.masks, sizes, block.batch, block.head);
    const int of_first_keys = FIRST_KEYS ? min(first_keys.of(first_row) / COLUMNS, tiles) : 0;
    const int first_tile = KEY_MASK ? next_tile_of(mask.tiles(first_row / ROWS), of_first_keys, tiles) : of_first_keys;
    const int warp_first = first_keys.of(first_row + warp_row);
    const int warp_last_first = first_keys.of(first_row + warp_row + 16 * M - 1);

    float* const q_tile = reinterpret_cast<float*>(shared);                            // (ROWS, PITCH)
    float *const k_tiles = q_tile + ROWS * PITCH, *const v_tiles = k_tiles + 2 * TILE; // (2, COLUMNS, PITCH)
    const u32 k_target = shared_address(k_tiles), v_target = shared_address(v_tiles);

    copy_tile<ROWS, THREADS, Padded>(shared_address(q_tile), block.q, arguments.q_strides.row, rows, dim);
    if (first_tile < tiles) {
        const u32 to = KEY_MASK ? 0 : first_tile % 2 * TILE * 4;
        const int first = first_tile * COLUMNS;
        const int left = sizes.keys - first;
        copy_tile<COLUMNS, THREADS, Padded>(k_target + to, block.k + first * k_stride, k_stride, left, dim);
        copy_tile<COLUMNS, THREADS, Padded>(v_target + to, block.v + first * v_stride, v_stride, left, value_dim);
    }
    end_group();

    const u32 q_blocks = left_blocks(q_tile + warp_row * PITCH, lane), k_blocks = right_blocks(k_tiles, lane);
    const float* const my_v = v_tiles + quad_column * PITCH + quad_row * GROUP;
    const float to_log2 = exponent_of_score(sizes), slack = SLACK / to_log2;
    const Dropped dropped(arguments.dropout, sizes);

    float o[M][HEAD_DIM / 8][4] = {};
    float largest[M][2], sum[M][2]; // of rows quad_row and quad_row + 8; the sum of this thread's columns
#pragma unroll
    for (int m = 0; m < M; m++) {
        largest[m][0] = largest[m][1] = -INFINITE;
        sum[m][0] = sum[m][1] = 0;
    }

    int turn = 0, next_tile; // tiles before this one, with KEY_MASK
    for (int tile = first_tile; tile < tiles; tile = next_tile, turn++) {
        const int first_key = tile * COLUMNS, stage = (KEY_MASK ? turn : tile) % 2 * TILE;
        next_tile = KEY_MASK ? next_tile_of(mask.tiles(first_row / ROWS), tile + 1, tiles) : tile + 1;
        wait_groups<0>();
        if (tile == first_tile) round_tile<ROWS, THREADS>(q_tile);
        round_tile<COLUMNS, THREADS>(k_tiles + stage);
        round_tile<COLUMNS, THREADS>(v_tiles + stage);
        __syncthreads(); // every thread's part of this tile has arrived, and nobody reads the tile before
        if (next_tile < tiles) {
            const int next = next_tile * COLUMNS;
            const u32 to = (TILE - stage) * 4;
            copy_tile<COLUMNS, THREADS, Padded>(k_target + to, block.k + next * k_stride, k_stride, sizes.keys - next,
                                                dim);
            copy_tile<COLUMNS, THREADS, Padded>(v_target + to, block.v + next * v_stride, v_stride, sizes.keys - next,
                                                value_dim);
            end_group();
        }
        if (first_key >= warp_seen) continue;
        if (FIRST_KEYS && first_key + COLUMNS <= warp_first) continue;

        float s[M][N][4] = {};
        multiply_rows(s, q_blocks, k_blocks + stage * 4);

        if (SOFT_CAP) {
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int n = 0; n < N; n++) cap_scores(s[m][n], sizes);
        }
        if (BIAS) {
#pragma unroll
            for (int m = 0; m < M; m++)
                add_bias<N>([&](int n, int i) -> float& { return s[m][n][i]; }, bias,
                            first_row + warp_row + m * 16 + quad_row, first_key, lane);
        }
        if (KEY_MASK && mask.is_partial(first_row / ROWS, first_key / COLUMNS)) {
#pragma unroll
            for (int m = 0; m < M; m++)
                hide_pairs<N>([&](int n, int i) -> float& { return s[m][n][i]; }, mask,
                              first_row + warp_row + m * 16 + quad_row, first_key, lane);
        }
        if (first_key + COLUMNS > unmasked) {
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int row = first_row + warp_row + m * 16 + quad_row + i / 2 * 8;
                    const int visible = min(sizes.keys, row + 1 + sizes.offset) - first_key - quad_column - i % 2;
#pragma unroll
                    for (int n = 0; n < N; n++) s[m][n][i] = n * 8 < visible ? s[m][n][i] : -INFINITE;
                }
        }
        if (FIRST_KEYS && first_key < warp_last_first) {
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int row = first_row + warp_row + m * 16 + quad_row + i / 2 * 8;
                    const int hidden = first_keys.of(row) - first_key - quad_column - i % 2;
#pragma unroll
                    for (int n = 0; n < N; n++) s[m][n][i] = n * 8 >= hidden ? s[m][n][i] : -INFINITE;
                }
        }

        // The maxima of the rows. O and the sums are rescaled only if one has grown by more than the slack.
        float now[M][2];
        bool grown = false;
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float most = -INFINITE;
#pragma unroll
                for (int n = 0; n < N; n++) most = fmaxf(most, fmaxf(s[m][n][half * 2], s[m][n][half * 2 + 1]));
                now[m][half] = most;
                grown |= most > largest[m][half] + slack;
            }
        if (__any_sync(~0u, grown)) {
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float most = fmaxf(largest[m][half], now[m][half]);
                    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
                    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
                    const float factor = power_of_2((largest[m][half] - (most == -INFINITE ? 0 : most)) * to_log2);
                    largest[m][half] = most;
                    sum[m][half] *= factor;
#pragma unroll
                    for (int n = 0; n < HEAD_DIM / 8; n++) {
                        o[m][n][half * 2] *= factor;
                        o[m][n][half * 2 + 1] *= factor;
                    }
                }
        }

#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                // In a row of only -inf the maximum stays -inf; 0 in its place gives 2^(-inf - 0) = 0.
                const float less = largest[m][half] == -INFINITE ? 0 : -largest[m][half] * to_log2;
#pragma unroll
                for (int n = 0; n < N; n++)
#pragma unroll
                    for (int i = half * 2; i < half * 2 + 2; i++) {
                        const float p = power_of_2(fmaf(s[m][n][i], to_log2, less));
                        sum[m][half] += p;
                        s[m][n][i] = rounded(p);
                    }
            }
        if (DROPOUT) {
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int n = 0; n < N; n += 2) {
                    const u32 stay =
                        dropped.by_queries(block.head_in_all, first_row + warp_row + m * 16, first_key + n * 8, lane);
#pragma unroll
                    for (int i = 0; i < 8; i++)
                        if (!(stay >> (8 * (i / 4 * 2 + i / 2 % 2) + i % 2) & 1)) s[m][n + i / 4][i % 4] = 0;
                }
        }
        multiply_result(o, s, my_v + stage);
    }
    wait_groups<0>();

    E* out = block.out(arguments);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float total = sum[m][half];
            total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            const int row = warp_row + m * 16 + quad_row + half * 8;
            if (row >= rows) continue;
            if (quad_column == 0) write_lse(arguments, block, row, __fmul_rn(largest[m][half], to_log2), total);
            write_row(out + row * arguments.out_strides.row, o[m], half, lane, value_dim,
                      total == 0 ? 0 : (DROPOUT ? arguments.dropout.scale : 1) / total);
        }
}
