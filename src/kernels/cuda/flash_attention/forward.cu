// Flash attention, forward: out = softmax(scale q k^T) v, lse = log(sum(exp(scale q k^T))), by mma.sync (sm_80 and up).
//
//   q (B, H, Tq, Dh), k (B, Hkv, Tk, Dh), v (B, Hkv, Tk, Dv), out (B, H, Tq, Dv): ELEMENT, any strides, rows
//   contiguous, 16-byte aligned
//   lse (B, H, Tq): f32, contiguous; -inf for a query without keys, whose out is zero
//   rounding_error (B, H, Tq, Dv): ELEMENT, contiguous, may be null: the rounding error of out
//   first_keys (B, Tq): u32, contiguous, only with FIRST_KEYS; see common.cuh
//   dropout: see dropped.cuh; lse covers all probabilities, also dropped ones
//   masks: see masks.cuh; tiles of keys that a key mask hides from all ROWS queries are skipped
//
// A block has ROWS queries of one head and loops over the keys, COLUMNS at a time: S = Q K^T, P = exp(S - max), O += P
// V. A warp has ROWS / WARPS rows, whose S, P and O stay in its registers: the layout of a result's 16 x 8 blocks is
// that of the next left operand. The next tile of keys and values is copied meanwhile. The loop begins at the first key
// of the block's first row.
//
//   grid  ceil(Tq / ROWS) * B * H        block  32 * WARPS
//   dynamic shared memory  (ROWS + 4 COLUMNS) * HEAD_DIM * 2 bytes
// 2 B H Tq Tk (Dh + Dv) FLOPs (half of them where causal); reads q, k, v and writes out once, if K and V stay in L2.

#ifndef ROWS
#define ROWS 128
#endif
#ifndef COLUMNS
#define COLUMNS (HEAD_DIM == 256 ? 32 : 64)
#endif
#ifndef WARPS
#define WARPS (HEAD_DIM == 256 ? 8 : 4)
#endif
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM (HEAD_DIM == 256 ? 1 : 2)
#endif
#ifndef Q_IN_REGISTERS
#define Q_IN_REGISTERS (HEAD_DIM <= 64)
#endif

constexpr int THREADS = 32 * WARPS;
constexpr int M_BLOCKS = ROWS / WARPS / 16; // blocks of 16 rows per warp
constexpr int TILE_BYTES = COLUMNS * ROW_BYTES;
constexpr int K_STEPS = HEAD_DIM / 16;
// The maximum is only raised if a score exceeds it by more than this, as a power of two. P stays under 2^8.
constexpr float SLACK = 8.0f;
static_assert(ROWS % (16 * WARPS) == 0 && COLUMNS % 16 == 0 && HEAD_DIM % 16 == 0, "tiles of whole blocks");

struct ForwardArguments {
    const E *q, *k, *v;
    E *out, *rounding_error;
    float* lse;
    Strides q_strides, k_strides, v_strides, out_strides;
    Sizes sizes;
    const u32* first_keys; // null without FIRST_KEYS
    DropoutArguments dropout;
    MaskArguments masks;
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    JOIN(flash_forward_, ELEMENT)(const __grid_constant__ ForwardArguments arguments) {
    extern __shared__ __align__(128) unsigned char shared[];
    const Sizes& sizes = arguments.sizes;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int quad_row = lane / 4, quad_column = lane % 4 * 2; // of this thread in a 16 x 8 block
    const int dim = sizes.head_dim, value_dim = sizes.value_dim;

    // The latest queries come first: with a causal mask they attend to the most keys.
    const int row_tiles = CEIL_DIV(sizes.queries, ROWS);
    int head_in_all, row_tile;
    locate_ticket(blockIdx.x, sizes.batch * sizes.heads, row_tiles, sizes.heads_at_once, head_in_all, row_tile);
    const int first_row = (row_tiles - 1 - row_tile) * ROWS;
    const int batch = head_in_all / sizes.heads, head = head_in_all % sizes.heads;
    const int kv_head = head / (sizes.heads / sizes.kv_heads);
    const int rows = min(ROWS, sizes.queries - first_row);

    const E* q = arguments.q + batch * arguments.q_strides.batch + head * arguments.q_strides.head +
                 first_row * arguments.q_strides.row;
    const E* k = arguments.k + batch * arguments.k_strides.batch + kv_head * arguments.k_strides.head;
    const E* v = arguments.v + batch * arguments.v_strides.batch + kv_head * arguments.v_strides.head;
    const long long k_stride = arguments.k_strides.row, v_stride = arguments.v_strides.row;

    // The number of keys of the block's last row, of the warp's last row, and of all rows of the warp.
    const int warp_row = warp * 16 * M_BLOCKS;
    const int seen = max(0, min(sizes.keys, first_row + rows + sizes.offset));
    const int warp_seen = min(sizes.keys, first_row + warp_row + 16 * M_BLOCKS + sizes.offset);
    const int unmasked = min(sizes.keys, first_row + warp_row + 1 + sizes.offset);
    const int tiles = CEIL_DIV(seen, COLUMNS);
    // The first tile of the block; the first key of the warp; the last first key of the warp's rows.
    const FirstKeys first_keys(arguments.first_keys, sizes, batch);
    const HeadMask mask(arguments.masks, sizes.queries, batch, head);
    const HeadBias bias(arguments.masks, sizes, batch, head);
    const int of_first_keys = FIRST_KEYS ? min(first_keys.of(first_row) / COLUMNS, tiles) : 0;
    const int first_tile =
        KEY_MASK ? next_tile_of(mask.tiles(first_row / ROWS), of_first_keys, tiles) : of_first_keys;
    const int warp_first = first_keys.of(first_row + warp_row);
    const int warp_last_first = first_keys.of(first_row + warp_row + 16 * M_BLOCKS - 1);

    const u32 q_tile = (u32)__cvta_generic_to_shared(shared);
    const u32 k_tiles = q_tile + ROWS * ROW_BYTES, v_tiles = k_tiles + 2 * TILE_BYTES;
    copy_tile<ROWS, THREADS>(q_tile, q, arguments.q_strides.row, rows, dim);
    if (first_tile < tiles) {
        const u32 stage = KEY_MASK ? 0 : first_tile % 2 * TILE_BYTES;
        const int first = first_tile * COLUMNS;
        copy_tile<COLUMNS, THREADS>(k_tiles + stage, k + first * k_stride, k_stride, sizes.keys - first, dim);
        copy_tile<COLUMNS, THREADS>(v_tiles + stage, v + first * v_stride, v_stride, sizes.keys - first, value_dim);
    }
    end_group();

    const Blocks<ROW_BYTES, BY_ROWS> q_blocks(q_tile, warp_row, lane);
    const Blocks<ROW_BYTES, BY_COLUMNS> k_blocks(k_tiles, 0, lane);
    const Blocks<ROW_BYTES, BY_ROWS> v_blocks(v_tiles, 0, lane);
    const float to_log2 = exponent_of_score(sizes), slack = SLACK / to_log2;
    const Dropped dropped(arguments.dropout, sizes);

    float o[M_BLOCKS][HEAD_DIM / 8][4] = {};
    float largest[M_BLOCKS][2], sum[M_BLOCKS][2]; // of rows quad_row and quad_row + 8
#pragma unroll
    for (int m = 0; m < M_BLOCKS; m++) {
        largest[m][0] = largest[m][1] = -INFINITE;
        sum[m][0] = sum[m][1] = 0;
    }
#if Q_IN_REGISTERS
    u32 q_fragments[K_STEPS][M_BLOCKS][4];
    wait_groups<0>();
    __syncthreads();
#pragma unroll
    for (int step = 0; step < K_STEPS; step++)
#pragma unroll
        for (int m = 0; m < M_BLOCKS; m++) load_matrices(q_fragments[step][m], q_blocks.at(m * 16, step * 16));
#endif

    int turn = 0, next_tile; // tiles before this one, with KEY_MASK
    for (int tile = first_tile; tile < tiles; tile = next_tile, turn++) {
        const u32 stage = (KEY_MASK ? turn : tile) % 2 * TILE_BYTES;
        next_tile = KEY_MASK ? next_tile_of(mask.tiles(first_row / ROWS), tile + 1, tiles) : tile + 1;
        wait_groups<0>();
        __syncthreads(); // every thread's part of this tile has arrived, and nobody reads the tile before
        if (next_tile < tiles) {
            const int next = next_tile * COLUMNS;
            copy_tile<COLUMNS, THREADS>(k_tiles + (stage ^ TILE_BYTES), k + next * k_stride, k_stride,
                                        sizes.keys - next, dim);
            copy_tile<COLUMNS, THREADS>(v_tiles + (stage ^ TILE_BYTES), v + next * v_stride, v_stride,
                                        sizes.keys - next, value_dim);
            end_group();
        }
        if (tile * COLUMNS >= warp_seen) continue;
        if (FIRST_KEYS && (tile + 1) * COLUMNS <= warp_first) continue;

        float s[M_BLOCKS][COLUMNS / 8][4] = {};
#pragma unroll
        for (int step = 0; step < K_STEPS; step++) {
#if Q_IN_REGISTERS
            const u32(&a)[M_BLOCKS][4] = q_fragments[step];
#else
            u32 a[M_BLOCKS][4];
#pragma unroll
            for (int m = 0; m < M_BLOCKS; m++) load_matrices(a[m], q_blocks.at(m * 16, step * 16));
#endif
#pragma unroll
            for (int n = 0; n < COLUMNS / 16; n++) {
                u32 b[4];
                load_matrices(b, k_blocks.at(n * 16, step * 16, stage));
#pragma unroll
                for (int m = 0; m < M_BLOCKS; m++) {
                    E::multiply(s[m][2 * n], a[m], b[0], b[1]);
                    E::multiply(s[m][2 * n + 1], a[m], b[2], b[3]);
                }
            }
        }

        if (SOFT_CAP) {
#pragma unroll
            for (int m = 0; m < M_BLOCKS; m++)
#pragma unroll
                for (int n = 0; n < COLUMNS / 8; n++) cap_scores(s[m][n], sizes);
        }
        if (BIAS) {
#pragma unroll
            for (int m = 0; m < M_BLOCKS; m++)
                add_bias<COLUMNS / 8>([&](int n, int i) -> float& { return s[m][n][i]; }, bias,
                                      first_row + warp_row + m * 16 + quad_row, tile * COLUMNS, lane);
        }
        if (KEY_MASK && mask.is_partial(first_row / ROWS, tile)) {
#pragma unroll
            for (int m = 0; m < M_BLOCKS; m++)
                hide_pairs<COLUMNS / 8>([&](int n, int i) -> float& { return s[m][n][i]; }, mask,
                                        first_row + warp_row + m * 16 + quad_row, tile * COLUMNS, lane);
        }
        if ((tile + 1) * COLUMNS > unmasked) {
#pragma unroll
            for (int m = 0; m < M_BLOCKS; m++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int row = first_row + warp_row + m * 16 + quad_row + i / 2 * 8;
                    const int visible = min(sizes.keys, row + 1 + sizes.offset) - tile * COLUMNS - quad_column - i % 2;
#pragma unroll
                    for (int n = 0; n < COLUMNS / 8; n++) s[m][n][i] = n * 8 < visible ? s[m][n][i] : -INFINITE;
                }
        }
        if (FIRST_KEYS && tile * COLUMNS < warp_last_first) {
#pragma unroll
            for (int m = 0; m < M_BLOCKS; m++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int row = first_row + warp_row + m * 16 + quad_row + i / 2 * 8;
                    const int hidden = first_keys.of(row) - tile * COLUMNS - quad_column - i % 2;
#pragma unroll
                    for (int n = 0; n < COLUMNS / 8; n++) s[m][n][i] = n * 8 >= hidden ? s[m][n][i] : -INFINITE;
                }
        }

        // The maxima of the rows. O and the sums are rescaled only if one has grown by more than the slack.
        float now[M_BLOCKS][2];
        bool grown = false;
#pragma unroll
        for (int m = 0; m < M_BLOCKS; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float most = largest[m][half];
#pragma unroll
                for (int n = 0; n < COLUMNS / 8; n++)
                    most = fmaxf(most, fmaxf(s[m][n][half * 2], s[m][n][half * 2 + 1]));
                most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
                most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
                now[m][half] = most;
                grown |= most > largest[m][half] + slack;
            }
        if (__any_sync(~0u, grown)) {
#pragma unroll
            for (int m = 0; m < M_BLOCKS; m++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const float most = now[m][half];
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

        // In a row of only -inf the maximum stays -inf; 0 in its place gives 2^(-inf - 0) = 0.
        float less[M_BLOCKS][2];
#pragma unroll
        for (int m = 0; m < M_BLOCKS; m++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                less[m][half] = largest[m][half] == -INFINITE ? 0 : -largest[m][half] * to_log2;
#pragma unroll
        for (int step = 0; step < COLUMNS / 16; step++) {
            u32 a[M_BLOCKS][4]; // P
#pragma unroll
            for (int m = 0; m < M_BLOCKS; m++) {
                u32 stay = 0;
                if (DROPOUT)
                    stay = dropped.by_queries(head_in_all, first_row + warp_row + m * 16, tile * COLUMNS + step * 16,
                                              lane);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int half = i % 2;
                    const float (&pair)[4] = s[m][2 * step + i / 2];
                    float p0 = power_of_2(fmaf(pair[half * 2], to_log2, less[m][half]));
                    float p1 = power_of_2(fmaf(pair[half * 2 + 1], to_log2, less[m][half]));
                    sum[m][half] += p0 + p1;
                    if (DROPOUT && !(stay >> 8 * i & 1)) p0 = 0;
                    if (DROPOUT && !(stay >> 8 * i & 2)) p1 = 0;
                    a[m][i] = E::pack(p0, p1);
                }
            }
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 16; n++) {
                u32 b[4];
                load_transposed(b, v_blocks.at(step * 16, n * 16, stage));
#pragma unroll
                for (int m = 0; m < M_BLOCKS; m++) {
                    E::multiply(o[m][2 * n], a[m], b[0], b[1]);
                    E::multiply(o[m][2 * n + 1], a[m], b[2], b[3]);
                }
            }
        }
    }

    // Writes out through the warp's rows of the tile of Q.
    float inverse[M_BLOCKS][2];
#pragma unroll
    for (int m = 0; m < M_BLOCKS; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float total = sum[m][half];
            total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            inverse[m][half] = total == 0 ? 0 : (DROPOUT ? arguments.dropout.scale : 1) / total;
            const int row = warp_row + m * 16 + quad_row + half * 8;
            if (row < rows && quad_column == 0) {
                const float log2 = total == 0 ? -INFINITE : largest[m][half] * to_log2 + logarithm_2(total);
                arguments.lse[(long long)head_in_all * sizes.queries + first_row + row] = log2 * LN_2;
            }
        }
    if (first_tile == tiles) wait_groups<0>(), __syncthreads();
    E* out = arguments.out + batch * arguments.out_strides.batch + head * arguments.out_strides.head +
             first_row * arguments.out_strides.row;
    E* rest = arguments.rounding_error + ((long long)head_in_all * sizes.queries + first_row) * value_dim;
#pragma unroll
    for (int m = 0; m < M_BLOCKS; m++)
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) o[m][n][i] *= inverse[m][i / 2];
    for (int pass = 0; pass < (arguments.rounding_error ? 2 : 1); pass++) {
        int my_row = warp_row + quad_row;
        asm volatile("" : "+r"(my_row)); // otherwise all addresses below would stay in registers between the passes
        __syncwarp();
#pragma unroll
        for (int m = 0; m < M_BLOCKS; m++)
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; n++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float& x = o[m][n][half * 2];
                    float& y = o[m][n][half * 2 + 1];
                    const u32 pair = E::pack(x, y);
                    store_shared(q_tile + Swizzle<ROW_BYTES>::at(my_row + m * 16 + half * 8, n) + quad_column * 2,
                                 pair);
                    float rounded_x, rounded_y;
                    E::unpack(pair, rounded_x, rounded_y);
                    x -= rounded_x, y -= rounded_y;
                }
        __syncwarp();
        E* const to = pass == 0 ? out : rest;
        write_tile<M_BLOCKS * 16, 32>(to, pass == 0 ? arguments.out_strides.row : value_dim, q_tile, warp_row, rows,
                                      value_dim, lane);
    }
}
