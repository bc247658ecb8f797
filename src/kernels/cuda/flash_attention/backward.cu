// Flash attention, backward: dq, dk and dv from the log-sum-exps of forward, by mma.sync (sm_80 and up).
//
//   delta = sum(dO O), P = exp(scale Q K^T - lse), dS = P (dO V^T - delta)
//   dV = P^T dO, dK = scale dS^T Q, dQ = scale dS K
//
//   q, dq (B, H, Tq, Dh), k, dk (B, Hkv, Tk, Dh), v, dv (B, Hkv, Tk, Dv), out, d_out (B, H, Tq, Dv): ELEMENT, any
//   strides, rows contiguous, 16-byte aligned
//   lse (B, H, Tq): f32
//   rounding_error (B, H, Tq, Dv): ELEMENT, contiguous, may be null: added to out
//   first_keys (B, Tq): u32, contiguous, only with FIRST_KEYS; see common.cuh
//   dropout: see dropped.cuh; dropped elements are 0 in P for dV, and in dP
//   masks: see masks.cuh; tiles of which a key mask hides all pairs are skipped
// Scratch, which needs no initial values:
//   statistics (B, H, ceil(Tq / QUERIES) * QUERIES, 2): f32, lse log2(e) and delta
//   turns (B, H, ceil(Tq / QUERIES)), and the ticket: int
//   dq_sums (B, H, ceil(Tq / QUERIES), QUERIES * HEAD_DIM): f32, each tile in the order of the fragments that make it
//
// Three kernels run in this order:
//   flash_backward_prepare  statistics, turns      grid  max(ceil(rows / PREPARE_ROWS), ceil(turns / 256))
//                                                  block 256, rows B * H * ceil(Tq / QUERIES) * QUERIES
//   flash_backward          dk, dv, dq_sums        grid  ceil(Tk / KEYS) * B * Hkv    block 32 * WARPS
//                           dynamic shared memory  BACKWARD_SHARED bytes
//   flash_backward_finish   dq                     grid  ceil(Tq / QUERIES) * B * H   block 32 * WARPS
//                           dynamic shared memory  QUERIES * HEAD_DIM * 2 bytes
//
// A block has KEYS keys, whose dK and dV stay in its warps' registers, and loops over the queries of all heads that
// share them. A warp has KEYS * WARPS_PER_KEY_GROUP / WARPS keys. It computes their S^T and dP^T, so P^T and dS^T are the left
// operands of dV and dK in the registers where they were computed. dS is written to shared memory for dQ, whose sum
// over the keys spans warps and blocks. That sum has the order of the keys: a block adds to a tile of dq_sums when it
// is its turn, so every run has the same bits. Blocks take their keys in order, by ticket, so a block only waits for
// blocks that already run, a tile of queries ahead. dQ of a tile is computed during the next tile, with one barrier per
// tile.
//
// Wide heads (WARPS_PER_KEY_GROUP 2): two warps have the same keys. Each has half of a tile's queries and half of the columns of dV
// and dK, and they exchange P^T and dS^T. A warp thus has twice the keys, and uses what it reads of queries twice as
// often: shared memory bounds this kernel. (H200, causal, T 16k: Dh 128 from 281 to 316 TFLOP/s, Dh 256 from 173 to
// 210.)
//
// B H Tq Tk (6 Dh + 4 Dv) FLOPs (half of them where causal).

#ifndef QUERY_STEP // queries whose S and dP are in registers at a time
#define QUERY_STEP (HEAD_DIM == 256 ? 16 : 32)
#endif
#ifndef WARPS
#define WARPS (HEAD_DIM <= 64 ? 4 : 8)
#endif
#ifndef WARPS_PER_KEY_GROUP // warps that have the same keys and share the queries of a tile and the columns of dK and dV
#define WARPS_PER_KEY_GROUP (HEAD_DIM >= 128 ? 2 : 1)
#endif
#ifndef DQ_ROW_WARPS // warps along the rows of dQ; the others are along its columns
#define DQ_ROW_WARPS (HEAD_DIM == 16 || HEAD_DIM == 96 ? 4 : 2)
#endif
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM (HEAD_DIM <= 64 ? 2 : 1)
#endif
constexpr int THREADS = 32 * WARPS;                               // computing threads
constexpr int K_BLOCKS = KEYS * WARPS_PER_KEY_GROUP / WARPS / 16; // blocks of 16 keys per warp
constexpr int DIMS = HEAD_DIM / WARPS_PER_KEY_GROUP;              // columns of dK and dV per warp
constexpr int OWN_QUERIES = QUERIES / WARPS_PER_KEY_GROUP;        // queries of a tile whose S and dP a warp computes
constexpr int K_STEPS = HEAD_DIM / 16;
constexpr int DQ_ROW_BLOCKS = QUERIES / 16 / DQ_ROW_WARPS;
constexpr int DQ_COLUMN_WARPS = WARPS / DQ_ROW_WARPS;
constexpr int DQ_COLUMNS = HEAD_DIM / DQ_COLUMN_WARPS; // per warp
constexpr int DQ_TILE = QUERIES * HEAD_DIM;
constexpr int KEY_TILE_BYTES = KEYS * ROW_BYTES, QUERY_TILE_BYTES = QUERIES * ROW_BYTES;
constexpr int DS_ROW_BYTES = QUERIES * 2, DS_TILE_BYTES = KEYS * DS_ROW_BYTES; // dS^T (KEYS, QUERIES)
constexpr int STATISTICS_BYTES = QUERIES * 8;
constexpr int BACKWARD_SHARED =
    2 * KEY_TILE_BYTES + 4 * QUERY_TILE_BYTES + 2 * DS_TILE_BYTES + 2 * STATISTICS_BYTES + 16;
static_assert(KEYS * WARPS_PER_KEY_GROUP % (16 * WARPS) == 0 && OWN_QUERIES % QUERY_STEP == 0 && QUERY_STEP % 16 == 0,
              "tiles of whole blocks");
static_assert(WARPS_PER_KEY_GROUP == 1 || (WARPS_PER_KEY_GROUP == 2 && QUERY_STEP == OWN_QUERIES),
              "two warps exchange all that they made of a tile");
static_assert(QUERIES % (16 * DQ_ROW_WARPS) == 0 && HEAD_DIM % (16 * DQ_COLUMN_WARPS) == 0, "dQ in whole blocks");
static_assert(DIMS % 16 == 0 && (WARPS_PER_KEY_GROUP == 1 || DIMS % 64 == 0), "shares of whole blocks");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    JOIN(flash_backward_, ELEMENT)(const __grid_constant__ BackwardArguments arguments) {
    extern __shared__ __align__(128) unsigned char shared[];
    const Sizes& sizes = arguments.sizes;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int quad_row = lane / 4, quad_column = lane % 4 * 2; // of this thread in a 16 x 8 block
    const int dim = sizes.head_dim, value_dim = sizes.value_dim;
    const int query_tiles = CEIL_DIV(sizes.queries, QUERIES), key_tiles = CEIL_DIV(sizes.keys, KEYS);
    const int group = sizes.heads / sizes.kv_heads;

    const u32 k_tile = (u32)__cvta_generic_to_shared(shared), v_tile = k_tile + KEY_TILE_BYTES;
    const u32 q_tiles = v_tile + KEY_TILE_BYTES, d_out_tiles = q_tiles + 2 * QUERY_TILE_BYTES;
    const u32 ds_tiles = d_out_tiles + 2 * QUERY_TILE_BYTES, statistics_tiles = ds_tiles + 2 * DS_TILE_BYTES;
    int* ticket = reinterpret_cast<int*>(shared + BACKWARD_SHARED - 16);

    if (threadIdx.x == 0) *ticket = atomicAdd(arguments.turns + sizes.batch * sizes.heads * query_tiles, 1);
    __syncthreads();
    // The first keys come first: with a causal mask most queries attend to them.
    int kv_head_in_all, key_tile;
    locate_ticket(*ticket, sizes.batch * sizes.kv_heads, key_tiles, sizes.heads_at_once, kv_head_in_all, key_tile);
    const int batch = kv_head_in_all / sizes.kv_heads, kv_head = kv_head_in_all % sizes.kv_heads;
    const int first_key = key_tile * KEYS, keys = min(KEYS, sizes.keys - first_key);

    const E* k = arguments.k + batch * arguments.k_strides.batch + kv_head * arguments.k_strides.head +
                 first_key * arguments.k_strides.row;
    const E* v = arguments.v + batch * arguments.v_strides.batch + kv_head * arguments.v_strides.head +
                 first_key * arguments.v_strides.row;

    // The tiles of queries that attend to a key of this block, for each head of the group.
    const FirstKeys first_keys(arguments.first_keys, sizes, batch);
    const int first_tile = max(0, first_key - sizes.offset) / QUERIES;
    const int end_tile = end_of_queries(first_keys, key_tile, first_tile, query_tiles);
    const MaskArguments& masks = arguments.masks;
    const int first_head = batch * sizes.heads + kv_head * group;
    const Visits visits = {key_tile, first_head, group, first_tile, end_tile};
    const int steps = visits.count(masks, sizes);
    Place next = {first_head, first_tile};
    if (KEY_MASK && steps > 0) next.seek(first_tile, visits, masks, sizes);

    // Turns. dQ of a tile is added one step after its S, and the turn is passed after the barrier that follows.
    int* const turns = arguments.turns;
    int sums_now = 0, sums_1 = 0, sums_2 = 0; // the numbers of the tiles of this step and of the two before
    int turn = 0;                             // of sums_1, as read a step ago
    auto precedes = [&](int number) {
        return predecessor(first_keys, masks, sizes, number / query_tiles, number % query_tiles, key_tile);
    };
    auto await_turn = [&](int step) {
        if (step == 0) return;
        const int mine = KEY_MASK ? precedes(sums_1) + 1 : key_tile;
        if (turn >= mine) return;
        do turn = read_turn(turns + sums_1);
        while (turn < mine);
        fence();
    };
    auto pass_turn = [&](int step) {
        if (step < steps) turn = read_turn(turns + sums_now);
        fence(); // for the read above and the write below
        if (step > 1) write_turn(turns + sums_2, key_tile + 1);
    };

    auto copy_queries = [&](int stage) {
        const int batch = next.head / sizes.heads, head = next.head % sizes.heads, first = next.tile * QUERIES;
        const Strides &of_q = arguments.q_strides, &of_d_out = arguments.d_out_strides;
        const E* q = arguments.q + batch * of_q.batch + head * of_q.head + first * of_q.row;
        const E* d_out = arguments.d_out + batch * of_d_out.batch + head * of_d_out.head + first * of_d_out.row;
        const int rows = sizes.queries - first;
        copy_tile<QUERIES, THREADS>(q_tiles + stage * QUERY_TILE_BYTES, q, of_q.row, rows, dim);
        copy_tile<QUERIES, THREADS>(d_out_tiles + stage * QUERY_TILE_BYTES, d_out, of_d_out.row, rows, value_dim);
        const float* statistics = arguments.statistics + 2ll * QUERIES * (next.head * query_tiles + next.tile);
        for (int i = threadIdx.x; i < QUERIES / 2; i += THREADS)
            copy_chunk(statistics_tiles + stage * STATISTICS_BYTES + i * 16, statistics + 4 * i, true);
        end_group();
    };

    copy_tile<KEYS, THREADS>(k_tile, k, arguments.k_strides.row, keys, dim);
    copy_tile<KEYS, THREADS>(v_tile, v, arguments.v_strides.row, keys, value_dim);
    end_group();
    if (steps > 0) copy_queries(0);

    // This warp's keys, its columns of dK and dV, and the queries of a tile whose S and dP it computes.
    const int warp_key = warp / WARPS_PER_KEY_GROUP * 16 * K_BLOCKS, warp_dim = warp % WARPS_PER_KEY_GROUP * DIMS,
              warp_query = warp % WARPS_PER_KEY_GROUP * OWN_QUERIES;
    const Blocks<ROW_BYTES, BY_ROWS> k_left(k_tile, warp_key, lane), v_left(v_tile, warp_key, lane);
    const Blocks<ROW_BYTES, BY_COLUMNS> q_right(q_tiles, warp_query, lane), d_out_right(d_out_tiles, warp_query, lane);
    const Blocks<ROW_BYTES, BY_ROWS> q_rows(q_tiles + warp_dim * 2, 0, lane),
        d_out_rows(d_out_tiles + warp_dim * 2, 0, lane);
    // The queries of the warp with the same keys, and the blocks that it wrote for them.
    const int other_query = WARPS_PER_KEY_GROUP == 1 ? 0 : OWN_QUERIES - warp_query;
    const Blocks<DS_ROW_BYTES, BY_ROWS> of_other =
        Blocks<DS_ROW_BYTES, BY_ROWS>(ds_tiles, warp_key, lane).from_column(other_query);
    // This warp's blocks of dQ: rows dq_row, dq_row + 16 DQ_ROW_WARPS and so on, columns likewise.
    const Blocks<DS_ROW_BYTES, BY_COLUMNS> ds_left =
        Blocks<DS_ROW_BYTES, BY_COLUMNS>(ds_tiles, 0, lane).from_column(warp / DQ_COLUMN_WARPS * 16);
    const Blocks<ROW_BYTES, BY_ROWS> k_rows =
        Blocks<ROW_BYTES, BY_ROWS>(k_tile, 0, lane).from_column(warp % DQ_COLUMN_WARPS * 16);
    const float to_log2 = exponent_of_score(sizes);
    const Dropped dropped(arguments.dropout, sizes);

    float dk[K_BLOCKS][DIMS / 8][4] = {}, dv[K_BLOCKS][DIMS / 8][4] = {};

    // A left operand of dV or dK in registers: P^T or dS^T (keys, queries) of this warp's keys.
    typedef u32 Factor[QUERY_STEP / 16][K_BLOCKS][4];

    // c (keys, QUERY_STEP) += left (keys, HEAD_DIM) right (QUERY_STEP, HEAD_DIM)^T
    auto multiply_by_dims = [](float (&c)[K_BLOCKS][QUERY_STEP / 8][4], const Blocks<ROW_BYTES, BY_ROWS>& left,
                               const Blocks<ROW_BYTES, BY_COLUMNS>& right, int first_row, u32 stage) {
#pragma unroll
        for (int i = 0; i < K_STEPS; i++) {
            u32 a[K_BLOCKS][4];
#pragma unroll
            for (int m = 0; m < K_BLOCKS; m++) load_matrices(a[m], left.at(m * 16, i * 16));
#pragma unroll
            for (int n = 0; n < QUERY_STEP / 16; n++) {
                u32 b[4];
                load_matrices(b, right.at(first_row + n * 16, i * 16, stage));
#pragma unroll
                for (int m = 0; m < K_BLOCKS; m++) {
                    E::multiply(c[m][2 * n], a[m], b[0], b[1]);
                    E::multiply(c[m][2 * n + 1], a[m], b[2], b[3]);
                }
            }
        }
    };
    // c (keys, DIMS) += left (keys, QUERY_STEP) right (QUERY_STEP, DIMS)
    auto multiply_by_queries = [](float (&c)[K_BLOCKS][DIMS / 8][4], const Factor& left,
                                  const Blocks<ROW_BYTES, BY_ROWS>& right, int first_row, u32 stage) {
#pragma unroll
        for (int i = 0; i < QUERY_STEP / 16; i++)
#pragma unroll
            for (int n = 0; n < DIMS / 16; n++) {
                u32 b[4];
                load_transposed(b, right.at(first_row + i * 16, n * 16, stage));
#pragma unroll
                for (int m = 0; m < K_BLOCKS; m++) {
                    E::multiply(c[m][2 * n], left[i][m], b[0], b[1]);
                    E::multiply(c[m][2 * n + 1], left[i][m], b[2], b[3]);
                }
            }
    };
    // Writes an operand to the tile of dS, for other warps.
    auto write_factor = [&](const Factor& factor, int part, int stage) {
#pragma unroll
        for (int n = 0; n < QUERY_STEP / 8; n++)
#pragma unroll
            for (int m = 0; m < K_BLOCKS; m++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    store_shared(ds_tiles + stage * DS_TILE_BYTES + quad_column * 2 +
                                     Swizzle<DS_ROW_BYTES>::at(warp_key + m * 16 + quad_row + half * 8,
                                                               (warp_query + part) / 8 + n),
                                 factor[n / 2][m][n % 2 * 2 + half]);
    };
    auto read_others = [&](Factor& factor, int stage) {
#pragma unroll
        for (int i = 0; i < QUERY_STEP / 16; i++)
#pragma unroll
            for (int m = 0; m < K_BLOCKS; m++)
                load_matrices(factor[i][m], of_other.at(m * 16, i * 16, stage * DS_TILE_BYTES));
    };
    // Waits for the warp with the same keys.
    auto meet = [&] {
        asm volatile("bar.sync %0, %1;" ::"r"(1 + warp / WARPS_PER_KEY_GROUP), "n"(32 * WARPS_PER_KEY_GROUP)
                     : "memory");
    };

    // Adds dQ of a tile, whose dS is in shared memory, to dq_sums.
    auto multiply_dq = [&](int number, u32 stage) {
        const bool is_first = precedes(number) < 0;
        float dq[DQ_ROW_BLOCKS][DQ_COLUMNS / 8][4] = {};
#pragma unroll
        for (int key = 0; key < KEYS; key += 16) {
            u32 a[DQ_ROW_BLOCKS][4];
#pragma unroll
            for (int m = 0; m < DQ_ROW_BLOCKS; m++)
                load_transposed(a[m], ds_left.at(key, m * DQ_ROW_WARPS * 16, stage));
#pragma unroll
            for (int n = 0; n < DQ_COLUMNS / 16; n++) {
                u32 b[4];
                load_transposed(b, k_rows.at(key, n * DQ_COLUMN_WARPS * 16));
#pragma unroll
                for (int m = 0; m < DQ_ROW_BLOCKS; m++) {
                    E::multiply(dq[m][2 * n], a[m], b[0], b[1]);
                    E::multiply(dq[m][2 * n + 1], a[m], b[2], b[3]);
                }
            }
        }
        constexpr int VECTORS = DQ_ROW_BLOCKS * DQ_COLUMNS / 8;
        float* sums = arguments.dq_sums + (long long)number * DQ_TILE + (warp * VECTORS * 32 + lane) * 4;
#pragma unroll
        for (int m = 0; m < DQ_ROW_BLOCKS; m++)
#pragma unroll
            for (int n = 0; n < DQ_COLUMNS / 8; n++) {
                float* target = sums + (m * (DQ_COLUMNS / 8) + n) * 128;
                if (is_first) *reinterpret_cast<float4*>(target) = *reinterpret_cast<float4*>(dq[m][n]);
                else add_to(target, dq[m][n]);
            }
    };

    for (int step = 0; step < steps; step++) {
        const int stage = step % 2;
        const int first_query = next.tile * QUERIES, head_in_all = next.head;
        sums_2 = sums_1, sums_1 = sums_now, sums_now = next.head * query_tiles + next.tile;
        next.advance(visits, masks, sizes);
        wait_groups<0>();
        if (threadIdx.x == 0) await_turn(step);
        __syncthreads(); // Q, dO of this step arrived; dS of the last is written, dQ of the one before is added
        if (threadIdx.x == 0) pass_turn(step);
        if (step + 1 < steps) copy_queries(stage ^ 1);
        if (step > 0) multiply_dq(sums_1, (stage ^ 1) * DS_TILE_BYTES);

        // Whether some query of the tile does not attend to all keys of the warp.
        const bool masked = first_query + sizes.offset < first_key + warp_key + 16 * K_BLOCKS - 1 || keys < KEYS;
        const HeadMask mask(masks, sizes.keys, batch, head_in_all % sizes.heads);
        const HeadBias bias(masks, sizes, batch, head_in_all % sizes.heads);
        const bool partial = KEY_MASK && mask.is_partial(key_tile, first_query / QUERIES);
        // Whether some queries have first keys after the warp's first key.
        const bool begins_later = FIRST_KEYS && first_keys.of(first_query + QUERIES - 1) > first_key + warp_key;
#pragma unroll
        for (int part = 0; part < OWN_QUERIES; part += QUERY_STEP) {
            const u32 q_stage = stage * QUERY_TILE_BYTES;
            float s[K_BLOCKS][QUERY_STEP / 8][4] = {}, dp[K_BLOCKS][QUERY_STEP / 8][4] = {}; // S^T, dP^T: keys, queries
            multiply_by_dims(s, k_left, q_right, part, q_stage);
            multiply_by_dims(dp, v_left, d_out_right, part, q_stage);

            if (SOFT_CAP) {
#pragma unroll
                for (int m = 0; m < K_BLOCKS; m++)
#pragma unroll
                    for (int n = 0; n < QUERY_STEP / 8; n++) cap_scores(s[m][n], sizes);
            }
            if (masked) {
#pragma unroll
                for (int m = 0; m < K_BLOCKS; m++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int key = warp_key + m * 16 + quad_row + i / 2 * 8;
                        // The first query, counted from this thread's first, that attends to the key.
                        const int visible = (key < keys ? first_key + key - sizes.offset : sizes.queries + QUERIES) -
                                            first_query - warp_query - part - quad_column - i % 2;
#pragma unroll
                        for (int n = 0; n < QUERY_STEP / 8; n++) s[m][n][i] = n * 8 >= visible ? s[m][n][i] : -INFINITE;
                    }
            }
            if (begins_later) {
#pragma unroll
                for (int n = 0; n < QUERY_STEP / 8; n++)
#pragma unroll
                    for (int odd = 0; odd < 2; odd++) {
                        // Counted from this thread's first key.
                        const int first = first_keys.of(first_query + warp_query + part + n * 8 + quad_column + odd) -
                                          first_key - warp_key - quad_row;
#pragma unroll
                        for (int m = 0; m < K_BLOCKS; m++) {
                            if (m * 16 < first) s[m][n][odd] = -INFINITE;
                            if (m * 16 + 8 < first) s[m][n][odd + 2] = -INFINITE;
                        }
                    }
            }

            if (partial) {
#pragma unroll
                for (int m = 0; m < K_BLOCKS; m++)
                    hide_pairs<QUERY_STEP / 8>([&](int n, int i) -> float& { return s[m][n][i]; }, mask,
                                               first_key + warp_key + m * 16 + quad_row,
                                               first_query + warp_query + part, lane);
            }

            // With a soft cap, terms are added below: the cap's slope is that of the score without them.
            if (BIAS && !SOFT_CAP) {
#pragma unroll
                for (int m = 0; m < K_BLOCKS; m++)
                    add_bias_by_keys<QUERY_STEP / 8>([&](int n, int i) -> float& { return s[m][n][i]; }, bias,
                                                     first_query + warp_query + part, first_key + warp_key + m * 16,
                                                     lane);
            }

            Factor p, ds;
            u32 stay[K_BLOCKS][2];
#pragma unroll
            for (int n = 0; n < QUERY_STEP / 8; n++) {
                if (DROPOUT && n % 2 == 0) {
#pragma unroll
                    for (int m = 0; m < K_BLOCKS; m++)
                        dropped.by_keys(stay[m], head_in_all, first_key + warp_key + m * 16,
                                        first_query + warp_query + part + n * 8, lane);
                }
                const float4 row =
                    read_shared_floats(statistics_tiles + stage * STATISTICS_BYTES +
                                       (warp_query + part + n * 8 + quad_column) * 8); // lse, delta, lse, delta
#pragma unroll
                for (int m = 0; m < K_BLOCKS; m++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        float s0 = s[m][n][half * 2], s1 = s[m][n][half * 2 + 1];
                        if (BIAS && SOFT_CAP) {
                            const int query = first_query + warp_query + part + n * 8 + quad_column,
                                      key = first_key + warp_key + m * 16 + quad_row + half * 8;
                            s0 = bias.add(s0, bias.at(query, key)), s1 = bias.add(s1, bias.at(query + 1, key));
                        }
                        const float p0 = power_of_2(fmaf(s0, to_log2, -row.x));
                        const float p1 = power_of_2(fmaf(s1, to_log2, -row.z));
                        float dp0 = dp[m][n][half * 2], dp1 = dp[m][n][half * 2 + 1];
                        const int word = n % 2 * 2 + half;
                        if (DROPOUT) {
                            const bool stays0 = stay[m][n % 2] >> 8 * half & 1,
                                       stays1 = stay[m][n % 2] >> 8 * (2 + half) & 1;
                            dp0 = stays0 ? dp0 * arguments.dropout.scale : 0;
                            dp1 = stays1 ? dp1 * arguments.dropout.scale : 0;
                            p[n / 2][m][word] = E::pack(stays0 ? p0 : 0, stays1 ? p1 : 0);
                        } else {
                            p[n / 2][m][word] = E::pack(p0, p1);
                        }
                        float ds0 = p0 * (dp0 - row.y), ds1 = p1 * (dp1 - row.w);
                        if (SOFT_CAP) ds0 *= cap_slope(s[m][n][half * 2]), ds1 *= cap_slope(s[m][n][half * 2 + 1]);
                        ds[n / 2][m][word] = E::pack(ds0, ds1);
                    }
            }

            const u32 own_rows = q_stage + warp_query * ROW_BYTES;
            if (WARPS_PER_KEY_GROUP == 1) {
                write_factor(ds, part, stage);
                multiply_by_queries(dv, p, d_out_rows, part, own_rows);
                multiply_by_queries(dk, ds, q_rows, part, own_rows);
            } else {
                // P is exchanged through the tile of dS before dS is written there, so it needs no extra memory.
                const u32 other_rows = q_stage + other_query * ROW_BYTES;
                Factor other;
                write_factor(p, part, stage);
                multiply_by_queries(dv, p, d_out_rows, part, own_rows);
                meet();
                read_others(other, stage);
                meet();
                write_factor(ds, part, stage);
                multiply_by_queries(dv, other, d_out_rows, part, other_rows);
                multiply_by_queries(dk, ds, q_rows, part, own_rows);
                meet();
                read_others(other, stage);
                multiply_by_queries(dk, other, q_rows, part, other_rows);
            }
        }
    }

    wait_groups<0>();
    sums_2 = sums_1, sums_1 = sums_now;
    if (threadIdx.x == 0) await_turn(steps);
    __syncthreads();
    if (threadIdx.x == 0 && steps > 0) pass_turn(steps);
    if (steps > 0) multiply_dq(sums_1, (steps - 1) % 2 * DS_TILE_BYTES);
    __syncthreads(); // K and V are no longer read
    if (steps > 0 && threadIdx.x == 0) fence(), write_turn(turns + sums_1, key_tile + 1);

    // Writes dK and dV through the tiles of K and V.
    const float stay_scale = DROPOUT ? arguments.dropout.scale : 1;
#pragma unroll
    for (int m = 0; m < K_BLOCKS; m++)
#pragma unroll
        for (int n = 0; n < DIMS / 8; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const u32 at =
                    Swizzle<ROW_BYTES>::at(warp_key + m * 16 + quad_row + half * 8, warp_dim / 8 + n) + quad_column * 2;
                store_shared(k_tile + at,
                             E::pack(dk[m][n][half * 2] * sizes.scale, dk[m][n][half * 2 + 1] * sizes.scale));
                store_shared(v_tile + at,
                             E::pack(dv[m][n][half * 2] * stay_scale, dv[m][n][half * 2 + 1] * stay_scale));
            }
    __syncthreads();
    E* dk_out = arguments.dk + batch * arguments.dk_strides.batch + kv_head * arguments.dk_strides.head +
                first_key * arguments.dk_strides.row;
    E* dv_out = arguments.dv + batch * arguments.dv_strides.batch + kv_head * arguments.dv_strides.head +
                first_key * arguments.dv_strides.row;
    write_tile<KEYS, THREADS>(dk_out, arguments.dk_strides.row, k_tile, 0, keys, dim, threadIdx.x);
    write_tile<KEYS, THREADS>(dv_out, arguments.dv_strides.row, v_tile, 0, keys, value_dim, threadIdx.x);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    JOIN(flash_backward_finish_, ELEMENT)(const __grid_constant__ BackwardArguments arguments) {
    extern __shared__ __align__(128) unsigned char shared[];
    const Sizes& sizes = arguments.sizes;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int quad_row = lane / 4, quad_column = lane % 4 * 2;
    const int query_tiles = CEIL_DIV(sizes.queries, QUERIES);
    const int head_in_all = blockIdx.x / query_tiles, first = blockIdx.x % query_tiles * QUERIES;
    const u32 tile = (u32)__cvta_generic_to_shared(shared);
    constexpr int VECTORS = DQ_ROW_BLOCKS * DQ_COLUMNS / 8;
    const float4* sums = reinterpret_cast<const float4*>(arguments.dq_sums) + (long long)blockIdx.x * DQ_TILE / 4 +
                         warp * VECTORS * 32 + lane;
    const FirstKeys first_keys(arguments.first_keys, sizes, head_in_all / sizes.heads);
    // No block has visited queries without keys.
    const bool seen = arguments.turns[blockIdx.x] > first_to_meet(first_keys, sizes, first / QUERIES);
#pragma unroll
    for (int m = 0; m < DQ_ROW_BLOCKS; m++)
#pragma unroll
        for (int n = 0; n < DQ_COLUMNS / 8; n++) {
            float4 x = make_float4(0, 0, 0, 0);
            if (seen) x = sums[(m * (DQ_COLUMNS / 8) + n) * 32];
            const int row = (m * DQ_ROW_WARPS + warp / DQ_COLUMN_WARPS) * 16 + quad_row;
            const int chunk = (n / 2 * DQ_COLUMN_WARPS + warp % DQ_COLUMN_WARPS) * 2 + n % 2;
            store_shared(tile + Swizzle<ROW_BYTES>::at(row, chunk) + quad_column * 2,
                         E::pack(x.x * sizes.scale, x.y * sizes.scale));
            store_shared(tile + Swizzle<ROW_BYTES>::at(row + 8, chunk) + quad_column * 2,
                         E::pack(x.z * sizes.scale, x.w * sizes.scale));
        }
    __syncthreads();
    const int batch = head_in_all / sizes.heads, head = head_in_all % sizes.heads;
    E* dq = arguments.dq + batch * arguments.dq_strides.batch + head * arguments.dq_strides.head +
            first * arguments.dq_strides.row;
    write_tile<QUERIES, THREADS>(dq, arguments.dq_strides.row, tile, 0, min(QUERIES, sizes.queries - first),
                                 sizes.head_dim, threadIdx.x);
}
