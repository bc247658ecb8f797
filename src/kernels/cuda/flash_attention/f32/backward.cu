// Flash attention, backward, in exact f32: dq, dk and dv from the log-sum-exps of forward, by FMA on CUDA cores. Behind
// ../common.cuh, ../backward.cuh, tiles.cuh, backward.cuh and fma.cuh, with ELEMENT=f32.
//
//   delta = sum(dO O), P = exp(scale Q K^T - lse), dS = P (dO V^T - delta)
//   dV = P^T dO, dK = scale dS^T Q, dQ = scale dS K
//
//   q, out, d_out, dq (B, H, Tq, Dh), k, v, dk, dv (B, Hkv, Tk, Dh): f32, any strides, Dh contiguous, 16-byte aligned
//   lse (2, B, H, Tq): f32, and what rounding took from it;  rounded_off: null
//   first_keys (B, Tq): u32, contiguous, only with FIRST_KEYS; see common.cuh
//   dropout: see dropped.cuh; what is dropped is 0 in P for dV, and in dP
// Scratch, all of it written before it is read:
//   statistics (B, H, ceil(Tq / QUERIES) * QUERIES, 3): f32, lse log2(e), delta, what rounding took from the first
//   turns (B, H, ceil(Tq / QUERIES)) and one more: int
//   dq_sums (B, H, ceil(Tq / QUERIES) * QUERIES, HEAD_DIM): f32
//
// Three kernels, one after the other:
//   flash_backward_prepare  statistics, turns        grid  max(ceil(rows of statistics / PREPARE_ROWS), ceil((number of
//   turns) / 256))
//                                                    block 256
//   flash_backward          dk, dv, dq_sums          grid  ceil(Tk / KEYS) * B * Hkv    block 32 * WARPS
//                           dynamic shared memory    BACKWARD_SHARED bytes
//   flash_backward_finish   dq                       grid  ceil(Tq / QUERIES) * B * H   block 256
//
// A block has KEYS keys and walks over the queries of all heads that share them. Its warps are on two sides, each laid
// over all the keys: the left side computes S^T, P^T and dV, the right side dP^T, dS^T and dK, from the same places of
// the same lanes, so that P^T goes over by a read of one's own places. dV and dK stay in registers. dQ, for which all
// dS^T of the block is needed, is computed by both sides; the next queries are copied meanwhile. Its sum over blocks is
// taken in the order of the keys: a block adds to a tile of dq_sums when it is its turn, so the bits are the same each
// time. Blocks take their work by ticket in the order of keys, so who is waited for runs already, a tile ahead.
//
// 10 B H Tq Tk Dh FLOPs (half of them where causal).

#ifndef WARPS
#define WARPS (HEAD_DIM >= 128 ? 8 : 4)
#endif
#ifndef DQ_ROW_WARPS // of the warps, laid over the rows of dQ; the others over its columns
#define DQ_ROW_WARPS (HEAD_DIM >= 128 || HEAD_DIM == 32 ? 2 : 4)
#endif
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM (HEAD_DIM >= 128 ? 1 : 2)
#endif
constexpr int THREADS = 32 * WARPS, SIDE = WARPS / 2; // SIDE: warps of one
constexpr int M = KEYS / SIDE / 4, N = QUERIES / 8;   // keys and queries of a lane
typedef Exchanged<N> Exchange;
// A lane's rows (places of an exchanged row) and columns of dQ.
constexpr int DQ_COLUMN_WARPS = WARPS / DQ_ROW_WARPS, DQ_WARP_DIMS = HEAD_DIM / DQ_COLUMN_WARPS;
constexpr int DQ_LANES = DQ_WARP_DIMS / 4 % 8 == 0 ? 8 : DQ_WARP_DIMS / 4 & -(DQ_WARP_DIMS / 4); // along a row
constexpr int DQ_ROWS = QUERIES / DQ_ROW_WARPS / (32 / DQ_LANES), DQ_DIMS = DQ_WARP_DIMS / DQ_LANES;
constexpr int BACKWARD_SHARED =
    (2 * (KEYS + QUERIES) * PITCH + 2 * KEYS * Exchange::PITCH + STATISTICS * QUERIES) * 4 + 16;
static_assert(STATISTICS == 3, "lse, delta, and what rounding took from lse");
static_assert(KEYS % (4 * SIDE) == 0 && QUERIES % 32 == 0, "tiles of whole blocks");
static_assert(DQ_DIMS % 4 == 0 && (DQ_ROWS == 2 || DQ_ROWS % 4 == 0) && N % 4 == 0, "dQ in whole vectors");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    JOIN(flash_backward_, ELEMENT)(const __grid_constant__ BackwardArguments arguments) {
    extern __shared__ __align__(128) unsigned char shared[];
    const Sizes& sizes = arguments.sizes;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int lane_row = row_of(lane), lane_column = column_of(lane);
    const int dim = sizes.head_dim;
    const int query_tiles = CEIL_DIV(sizes.queries, QUERIES), key_tiles = CEIL_DIV(sizes.keys, KEYS);
    const int group = sizes.heads / sizes.kv_heads;

    float* const k_tile = reinterpret_cast<float*>(shared);     // (KEYS, PITCH)
    float* const v_tile = k_tile + KEYS * PITCH;                // (KEYS, PITCH)
    float* const q_tile = v_tile + KEYS * PITCH;                // (QUERIES, PITCH)
    float* const d_out_tile = q_tile + QUERIES * PITCH;         // (QUERIES, PITCH)
    float* const p_tile = d_out_tile + QUERIES * PITCH;         // P^T (KEYS, Exchange::PITCH)
    float* const ds_tile = p_tile + KEYS * Exchange::PITCH;     // dS^T (KEYS, Exchange::PITCH)
    float* const statistics = ds_tile + KEYS * Exchange::PITCH; // (QUERIES, STATISTICS)
    int* const ticket = reinterpret_cast<int*>(statistics + STATISTICS * QUERIES);

    if (threadIdx.x == 0) *ticket = atomicAdd(arguments.turns + sizes.batch * sizes.heads * query_tiles, 1);
    __syncthreads();
    // The first keys first: with a causal mask most queries see them.
    int kv_head_in_all, key_tile;
    place(*ticket, sizes.batch * sizes.kv_heads, key_tiles, sizes.heads_at_once, kv_head_in_all, key_tile);
    const int batch = kv_head_in_all / sizes.kv_heads, kv_head = kv_head_in_all % sizes.kv_heads;
    const int first_key = key_tile * KEYS, keys = min(KEYS, sizes.keys - first_key);

    // Tiles of queries that see a key of this block, head after head of the group.
    const FirstKeys first_keys(arguments.first_keys, sizes, batch);
    const int first_tile = max(0, first_key - sizes.offset) / QUERIES;
    const int end_tile = end_of_queries(first_keys, key_tile, first_tile, query_tiles);
    const int tiles = max(0, end_tile - first_tile), steps = tiles * group;
    const int first_head = batch * sizes.heads + kv_head * group;
    Place next = {first_head, first_tile};

    const Strides &of_k = arguments.k_strides, &of_v = arguments.v_strides;
    const E* k = arguments.k + batch * of_k.batch + kv_head * of_k.head + first_key * of_k.row;
    const E* v = arguments.v + batch * of_v.batch + kv_head * of_v.head + first_key * of_v.row;
    copy_tile<KEYS, THREADS, Padded>(shared_address(k_tile), k, of_k.row, keys, dim);
    copy_tile<KEYS, THREADS, Padded>(shared_address(v_tile), v, of_v.row, keys, dim);
    end_group();
    if (steps > 0) copy_queries<THREADS>(arguments, next, query_tiles, q_tile, d_out_tile, statistics);

    // This lane's rows and columns of the products of its side.
    const bool right = warp >= SIDE;
    const int warp_key = warp % SIDE * 4 * M, lane_key = warp_key + lane_row;
    const float* const my_keys = (right ? v_tile : k_tile) + lane_key * PITCH;
    const float* const my_queries = (right ? d_out_tile : q_tile) + lane_column * PITCH;
    const float* const factor = (right ? q_tile : d_out_tile) + lane_column * WIDTH;
    float* const my_p = p_tile + lane_key * Exchange::PITCH;
    float* const my_ds = ds_tile + lane_key * Exchange::PITCH;
    const float* const my_statistics = statistics + STATISTICS * lane_column;
    const float to_log2 = exponent_of_score(sizes);
    const Dropped dropped(arguments.dropout, sizes);
    // And of dQ.
    const int dq_place =
        warp / DQ_COLUMN_WARPS * (QUERIES / DQ_ROW_WARPS) + (lane_row | lane_column / DQ_LANES * 4) * DQ_ROWS;
    const int dq_dim = warp % DQ_COLUMN_WARPS * DQ_WARP_DIMS + lane_column % DQ_LANES * 4;

    float gradient[M][DIMS] = {}; // of V on the left, of K on the right

    // dQ from dS, added to dq_sums.
    auto multiply_dq = [&](int number) {
        const bool is_first = key_tile == first_to_meet(first_keys, sizes, number % query_tiles);
        float dq[DQ_ROWS][DQ_DIMS] = {};
#pragma unroll 8
        for (int key = 0; key < KEYS; key++) {
            float x[DQ_ROWS], y[DQ_DIMS];
            const float* row = ds_tile + key * Exchange::PITCH + dq_place;
            if (DQ_ROWS == 2) {
                const float2 z = *reinterpret_cast<const float2*>(row);
                x[0] = z.x, x[1] = z.y;
            }
#pragma unroll
            for (int m = 0; m + 4 <= DQ_ROWS; m += 4) {
                const float4 z = read4(row + m);
#pragma unroll
                for (int i = 0; i < 4; i++) x[m + i] = part(z, i);
            }
#pragma unroll
            for (int n = 0; n < DQ_DIMS; n += 4) {
                const float4 z = read4(k_tile + key * PITCH + dq_dim + n * DQ_LANES);
#pragma unroll
                for (int i = 0; i < 4; i++) y[n + i] = part(z, i);
            }
#pragma unroll
            for (int n = 0; n < DQ_DIMS; n++)
#pragma unroll
                for (int m = 0; m < DQ_ROWS; m++) dq[m][n] = fmaf(x[m], y[n], dq[m][n]);
        }
        float* sums = arguments.dq_sums + (long long)number * (QUERIES * HEAD_DIM) + dq_dim;
#pragma unroll
        for (int m = 0; m < DQ_ROWS; m++)
#pragma unroll
            for (int n = 0; n < DQ_DIMS; n += 4) {
                float* to = sums + Exchange::row(dq_place + m) * HEAD_DIM + n * DQ_LANES;
                const float x[4] = {dq[m][n], dq[m][n + 1], dq[m][n + 2], dq[m][n + 3]};
                if (is_first) *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
                else add_to(to, x);
            }
    };

    int* const turns = arguments.turns;
    int sums_now = 0, sums_before = 0; // the numbers of this step's tile of dq_sums and of the one before
    for (int step = 0; step < steps; step++) {
        const int first_query = next.tile * QUERIES, head_in_all = next.head;
        sums_before = sums_now, sums_now = next.head * query_tiles + next.tile;
        next.advance(first_tile, end_tile);
        wait_groups<0>();
        __syncthreads(); // Q and dO of this step have arrived, dQ of the one before is added
        int turn = 0;
        if (threadIdx.x == 0) {
            turn = read_turn(turns + sums_now);
            fence(); // for what is read above as for what is written below
            if (step > 0) write_turn(turns + sums_before, key_tile + 1);
        }

        float s[M][N] = {}; // S^T or dP^T
        multiply_rows(s, my_keys, my_queries);
        if (!right) {
            if (SOFT_CAP) {
#pragma unroll
                for (int m = 0; m < M; m++) cap_scores(s[m], sizes);
            }
            // Do all queries of the tile see all keys of the warp?
            if (first_query + sizes.offset < first_key + warp_key + 4 * M - 1 || keys < KEYS) {
#pragma unroll
                for (int m = 0; m < M; m++) {
                    const int key = lane_key + m * 4;
                    // The first query, counted from this lane's first, that sees the key.
                    const int visible = (key < keys ? first_key + key - sizes.offset : sizes.queries + QUERIES) -
                                        first_query - lane_column;
#pragma unroll
                    for (int n = 0; n < N; n++) s[m][n] = n * 8 >= visible ? s[m][n] : -INFINITE;
                }
            }
            // Do some begin after keys of the warp?
            if (FIRST_KEYS && first_keys.of(first_query + QUERIES - 1) > first_key + warp_key) {
#pragma unroll
                for (int n = 0; n < N; n++) {
                    const int first = first_keys.of(first_query + lane_column + n * 8) - first_key - lane_key;
#pragma unroll
                    for (int m = 0; m < M; m++) s[m][n] = m * 4 >= first ? s[m][n] : -INFINITE;
                }
            }
            if (SOFT_CAP) {
                // The slopes lie where dS is to be.
#pragma unroll
                for (int m = 0; m < M; m++) {
                    float slopes[N];
#pragma unroll
                    for (int n = 0; n < N; n++) slopes[n] = cap_slope(s[m][n]);
                    Exchange::write(my_ds + m * 4 * Exchange::PITCH, lane_column, slopes);
                }
            }
#pragma unroll
            for (int n = 0; n < N; n++) {
                const float lse = my_statistics[n * 8 * STATISTICS], rest = my_statistics[n * 8 * STATISTICS + 2];
#pragma unroll
                for (int m = 0; m < M; m++) s[m][n] = power_of_2(fmaf(s[m][n], to_log2, -lse) - rest);
                if (DROPOUT) {
                    // What is dropped is written with a minus. Each lane of a column draws eight of the warp's keys.
                    u32 mine = 0;
                    if (lane_row < M / 2)
                        mine = dropped.eight_keys(head_in_all, first_query + lane_column + n * 8,
                                                  first_key + warp_key + lane_row * 8);
#pragma unroll
                    for (int m = 0; m < M; m++) {
                        const u32 stay = __shfl_sync(~0u, mine, lane_of(m / 2, lane_column));
                        if (!(stay >> (m % 2 * 4 + lane_row) & 1)) s[m][n] = -s[m][n];
                    }
                }
            }
#pragma unroll
            for (int m = 0; m < M; m++) Exchange::write(my_p + m * 4 * Exchange::PITCH, lane_column, s[m]);
        }
        __syncthreads(); // P is written
        if (right) {
            float delta[N];
#pragma unroll
            for (int n = 0; n < N; n++) delta[n] = my_statistics[n * 8 * STATISTICS + 1];
#pragma unroll
            for (int m = 0; m < M; m++) {
                float p[N], slopes[N];
                Exchange::read(p, my_p + m * 4 * Exchange::PITCH, lane_column);
                if (SOFT_CAP) Exchange::read(slopes, my_ds + m * 4 * Exchange::PITCH, lane_column);
#pragma unroll
                for (int n = 0; n < N; n++) {
                    if (DROPOUT) s[m][n] = p[n] < 0 ? 0 : s[m][n] * arguments.dropout.scale;
                    s[m][n] = (DROPOUT ? fabsf(p[n]) : p[n]) * (s[m][n] - delta[n]);
                    if (SOFT_CAP) s[m][n] *= slopes[n];
                }
                Exchange::write(my_ds + m * 4 * Exchange::PITCH, lane_column, s[m]);
            }
            __syncwarp();
        }
        if (DROPOUT && !right) multiply_columns<M, N, true>(gradient, my_p, factor);
        else multiply_columns<M, N>(gradient, right ? my_ds : my_p, factor);

        if (threadIdx.x == 0 && turn < key_tile) {
            do turn = read_turn(turns + sums_now);
            while (turn < key_tile);
            fence();
        }
        __syncthreads(); // dS is written, Q and dO are not read any more, and it is this block's turn
        if (step + 1 < steps) copy_queries<THREADS>(arguments, next, query_tiles, q_tile, d_out_tile, statistics);
        multiply_dq(sums_now);
    }
    wait_groups<0>();
    __syncthreads();
    if (threadIdx.x == 0 && steps > 0) fence(), write_turn(turns + sums_now, key_tile + 1);

    const Strides& of_gradient = right ? arguments.dk_strides : arguments.dv_strides;
    E* rows = (right ? arguments.dk : arguments.dv) + batch * of_gradient.batch + kv_head * of_gradient.head +
              (first_key + lane_key) * of_gradient.row;
#pragma unroll
    for (int m = 0; m < M; m++)
        if (lane_key + 4 * m < keys)
            write_row(rows + 4 * m * of_gradient.row, gradient[m], lane_column, dim,
                      right     ? sizes.scale
                      : DROPOUT ? arguments.dropout.scale
                                : 1);
}
