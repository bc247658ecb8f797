// Flash attention, backward, in f32 on tensor cores: dq, dk and dv from the log-sum-exps of forward, by mma.sync (sm_80
// and up). Included after ../common.cuh, ../backward.cuh and tf32.cuh, which explains TF32_MATMULS; ELEMENT=f32.
//
//   delta = sum(dO O), P = exp(scale Q K^T - lse), dS = P (dO V^T - delta)
//   dV = P^T dO, dK = scale dS^T Q, dQ = scale dS K
//
//   q, dq (B, H, Tq, Dh), k, dk (B, Hkv, Tk, Dh), v, dv (B, Hkv, Tk, Dv), out, d_out (B, H, Tq, Dv): f32, any strides,
//   rows contiguous, 16-byte aligned
//   lse (2, B, H, Tq): f32: lse and its rounding error, which is negligible next to TF32's;  rounding_error: null
//   first_keys (B, Tq): u32, contiguous, only with FIRST_KEYS; see common.cuh
//   dropout: see dropped.cuh; dropped elements are 0 in P for dV, and in dP
//   masks: see masks.cuh; tiles of which a key mask hides all pairs are skipped
// Scratch, which needs no initial values:
//   statistics (B, H, ceil(Tq / QUERIES), STATISTICS * QUERIES): f32, see ../backward.cuh
//   turns (B, H, ceil(Tq / QUERIES)), and the ticket: int
//   dq_sums (B, H, ceil(Tq / QUERIES) * QUERIES, HEAD_DIM): f32
//
// Three kernels run in this order:
//   flash_backward_prepare  statistics, turns      grid  max(ceil(rows / PREPARE_ROWS), ceil(turns / 256))
//                                                  block 256, rows B * H * ceil(Tq / QUERIES) * QUERIES
//   flash_backward          dk, dv, dq_sums        grid  ceil(Tk / KEYS) * B * Hkv    block 32 * WARPS
//                           dynamic shared memory  BACKWARD_SHARED bytes
//   flash_backward_finish   dq                     grid  ceil(Tq / QUERIES) * B * H   block 256
//
// A block has KEYS keys, whose dK and dV stay in its warps' registers, and loops over the queries of all heads that
// share them. A warp has 16 keys. It computes their S^T and dP^T, so P^T and dS^T are the left operands of dV and dK in
// the registers where they were computed. Only dS is written to shared memory, for dQ, whose sum over the keys spans
// warps and blocks; the next queries are copied meanwhile. That sum has the order of the keys: a block adds to a tile
// of dq_sums when it is its turn, so every run has the same bits. Blocks take their keys in order, by ticket, so a
// block only waits for blocks that already run, a tile ahead.
//
// B H Tq Tk (6 Dh + 4 Dv) FLOPs (half of them where causal).

#ifndef WARPS_PER_KEY_GROUP // warps that have the same keys and share the columns of dK and dV
#define WARPS_PER_KEY_GROUP (HEAD_DIM == 256 ? 2 : 1)
#endif
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM (HEAD_DIM == 256 ? 1 : 2)
#endif
constexpr int WARPS = KEYS / 16 * WARPS_PER_KEY_GROUP, THREADS = 32 * WARPS;
constexpr int N = QUERIES / 8;                            // blocks of 8 queries
constexpr int WARP_DIMS = HEAD_DIM / WARPS_PER_KEY_GROUP; // columns of dK and dV per warp
constexpr int DS_PITCH = QUERIES + 4;                     // floats from row to row of dS^T
constexpr int DQ_COLUMN_TILES = HEAD_DIM / GROUP_DIMS, DQ_TILES = QUERIES / 32 * DQ_COLUMN_TILES; // of 32 x GROUP_DIMS
constexpr int BACKWARD_SHARED = (2 * (KEYS + QUERIES) * PITCH + KEYS * DS_PITCH + STATISTICS * QUERIES) * 4 + 16;
static_assert(STATISTICS == (TF32_MATMULS == 3 ? 3 : 2),
              "lse, delta, and what rounding took from lse where that counts");
static_assert(KEYS % 16 == 0 && QUERIES % 32 == 0 && WARP_DIMS % GROUP_DIMS == 0, "tiles of whole blocks");

// Starts to copy a tile of Q and dO (QUERIES, PITCH) with its statistics. A head has `query_tiles` tiles.
__device__ __forceinline__ void copy_queries(const BackwardArguments& arguments, Place from, int query_tiles,
                                             float* q_tile, float* d_out_tile, float* statistics) {
    const Sizes& sizes = arguments.sizes;
    const int batch = from.head / sizes.heads, head = from.head % sizes.heads, first = from.tile * QUERIES;
    const Strides &of_q = arguments.q_strides, &of_d_out = arguments.d_out_strides;
    const E* q = arguments.q + batch * of_q.batch + head * of_q.head + first * of_q.row;
    const E* d_out = arguments.d_out + batch * of_d_out.batch + head * of_d_out.head + first * of_d_out.row;
    const int rows = sizes.queries - first;
    copy_tile<QUERIES, THREADS, Padded>(shared_address(q_tile), q, of_q.row, rows, sizes.head_dim);
    copy_tile<QUERIES, THREADS, Padded>(shared_address(d_out_tile), d_out, of_d_out.row, rows, sizes.value_dim);
    const float* source =
        arguments.statistics + (long long)STATISTICS * QUERIES * (from.head * query_tiles + from.tile);
    for (int i = threadIdx.x; i < STATISTICS * QUERIES / 4; i += THREADS)
        copy_chunk(shared_address(statistics) + i * 16, source + 4 * i, true);
    end_group();
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    JOIN(flash_backward_, ELEMENT)(const __grid_constant__ BackwardArguments arguments) {
    extern __shared__ __align__(128) unsigned char shared[];
    const Sizes& sizes = arguments.sizes;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int quad_row = lane / 4, quad_column = lane % 4 * 2; // of this thread in a 16 x 8 block
    const int dim = sizes.head_dim;
    const int query_tiles = CEIL_DIV(sizes.queries, QUERIES), key_tiles = CEIL_DIV(sizes.keys, KEYS);
    const int group = sizes.heads / sizes.kv_heads;

    float* const k_tile = reinterpret_cast<float*>(shared); // (KEYS, PITCH)
    float* const v_tile = k_tile + KEYS * PITCH;            // (KEYS, PITCH)
    float* const q_tile = v_tile + KEYS * PITCH;            // (QUERIES, PITCH)
    float* const d_out_tile = q_tile + QUERIES * PITCH;     // (QUERIES, PITCH)
    float* const ds_tile = d_out_tile + QUERIES * PITCH;    // dS^T (KEYS, DS_PITCH)
    float* const statistics = ds_tile + KEYS * DS_PITCH;    // (STATISTICS * QUERIES)
    int* const ticket = reinterpret_cast<int*>(statistics + STATISTICS * QUERIES);

    if (threadIdx.x == 0) *ticket = atomicAdd(arguments.turns + sizes.batch * sizes.heads * query_tiles, 1);
    __syncthreads();
    // The first keys come first: with a causal mask most queries attend to them.
    int kv_head_in_all, key_tile;
    locate_ticket(*ticket, sizes.batch * sizes.kv_heads, key_tiles, sizes.heads_at_once, kv_head_in_all, key_tile);
    const int batch = kv_head_in_all / sizes.kv_heads, kv_head = kv_head_in_all % sizes.kv_heads;
    const int first_key = key_tile * KEYS, keys = min(KEYS, sizes.keys - first_key);

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
    auto precedes = [&](int number) {
        return predecessor(first_keys, masks, sizes, number / query_tiles, number % query_tiles, key_tile);
    };

    const Strides &of_k = arguments.k_strides, &of_v = arguments.v_strides;
    const E* k = arguments.k + batch * of_k.batch + kv_head * of_k.head + first_key * of_k.row;
    const E* v = arguments.v + batch * of_v.batch + kv_head * of_v.head + first_key * of_v.row;
    copy_tile<KEYS, THREADS, Padded>(shared_address(k_tile), k, of_k.row, keys, dim);
    copy_tile<KEYS, THREADS, Padded>(shared_address(v_tile), v, of_v.row, keys, sizes.value_dim);
    end_group();
    if (steps > 0) copy_queries(arguments, next, query_tiles, q_tile, d_out_tile, statistics);

    // This warp's keys, and its columns of dK and dV.
    const int warp_key = warp / WARPS_PER_KEY_GROUP * 16, warp_dim = warp % WARPS_PER_KEY_GROUP * WARP_DIMS;
    const u32 k_left = left_blocks(k_tile + warp_key * PITCH, lane),
              v_left = left_blocks(v_tile + warp_key * PITCH, lane);
    const u32 q_right = right_blocks(q_tile, lane), d_out_right = right_blocks(d_out_tile, lane);
    const int in_group = quad_column * PITCH + quad_row * GROUP; // the lane's offset for read_group
    const float *const my_q = q_tile + in_group + warp_dim, *const my_d_out = d_out_tile + in_group + warp_dim;
    float* const my_ds = ds_tile + (warp_key + quad_row) * DS_PITCH + quad_column;
    const float to_log2 = exponent_of_score(sizes);
    const Dropped dropped(arguments.dropout, sizes);

    float dk[1][WARP_DIMS / 8][4] = {}, dv[1][WARP_DIMS / 8][4] = {};

    // Adds dQ, from dS, to dq_sums. A lane reads four adjacent of 32 rows together: in the first of two blocks of 16,
    // row i is 4 i and row 8 + i is 4 i + 1; in the second they are 4 i + 2 and 4 i + 3.
    auto multiply_dq = [&](int number) {
        const bool is_first = precedes(number) < 0;
        for (int tile = warp; tile < DQ_TILES; tile += WARPS) {
            const int first = tile / DQ_COLUMN_TILES * 32 + quad_row * 4, column = tile % DQ_COLUMN_TILES * GROUP_DIMS;
            const float* left = ds_tile + quad_column * DS_PITCH + first;
            const float* right = k_tile + in_group + column;
            float dq[2][GROUP][4] = {};
#pragma unroll 4
            for (int key = 0; key < KEYS; key += 8) {
                Factor<4> a[2];
                Factor<2> b[GROUP];
#pragma unroll
                for (int odd = 0; odd < 2; odd++) {
                    const float4 x = read4(left + (key + odd) * DS_PITCH);
#pragma unroll
                    for (int i = 0; i < 4; i++) a[i / 2].set(odd * 2 + i % 2, part(x, i));
                }
                read_group(b, right + key * PITCH);
                multiply_blocks(dq, a, b);
            }
            float* sums = arguments.dq_sums + ((long long)number * QUERIES + first) * HEAD_DIM + column;
#pragma unroll
            for (int i = 0; i < 4; i++)
                each_four(dq[i / 2], i % 2, lane, [&](int at, const float (&x)[4]) {
                    float* to = sums + i * HEAD_DIM + at;
                    if (is_first) *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
                    else add_to(to, x);
                });
        }
    };

    int* const turns = arguments.turns;
    int sums_now = 0, sums_before = 0; // the numbers of the tiles of dq_sums of this step and of the one before
    for (int step = 0; step < steps; step++) {
        const int first_query = next.tile * QUERIES, head_in_all = next.head;
        sums_before = sums_now, sums_now = next.head * query_tiles + next.tile;
        next.advance(visits, masks, sizes);
        wait_groups<0>();
        if (step == 0) {
            round_tile<KEYS, THREADS>(k_tile);
            round_tile<KEYS, THREADS>(v_tile);
        }
        round_tile<QUERIES, THREADS>(q_tile);
        round_tile<QUERIES, THREADS>(d_out_tile);
        __syncthreads(); // Q and dO of this step have arrived, dQ of the step before is added
        int turn = 0;
        if (threadIdx.x == 0) {
            turn = read_turn(turns + sums_now);
            fence(); // for the read above and the write below
            if (step > 0) write_turn(turns + sums_before, key_tile + 1);
        }

        float s[1][N][4] = {}, dp[1][N][4] = {}; // S^T, dP^T: keys, queries
        multiply_rows(s, k_left, q_right);
        multiply_rows(dp, v_left, d_out_right);
        if (SOFT_CAP) {
#pragma unroll
            for (int n = 0; n < N; n++) cap_scores(s[0][n], sizes);
        }

        // Whether some query of the tile does not attend to all keys of the warp.
        if (first_query + sizes.offset < first_key + warp_key + 15 || keys < KEYS) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int key = warp_key + quad_row + i / 2 * 8;
                // The first query, counted from this thread's first, that attends to the key.
                const int visible = (key < keys ? first_key + key - sizes.offset : sizes.queries + QUERIES) -
                                    first_query - quad_column - i % 2;
#pragma unroll
                for (int n = 0; n < N; n++) s[0][n][i] = n * 8 >= visible ? s[0][n][i] : -INFINITE;
            }
        }
        // Whether some queries have first keys after the warp's first key.
        if (FIRST_KEYS && first_keys.of(first_query + QUERIES - 1) > first_key + warp_key) {
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int odd = 0; odd < 2; odd++) {
                    // Counted from this thread's first key.
                    const int query = first_query + n * 8 + quad_column + odd;
                    const int first = first_keys.of(query) - first_key - warp_key - quad_row;
                    if (0 < first) s[0][n][odd] = -INFINITE;
                    if (8 < first) s[0][n][odd + 2] = -INFINITE;
                }
        }
        const HeadMask mask(masks, sizes.keys, batch, head_in_all % sizes.heads);
        const HeadBias bias(masks, sizes, batch, head_in_all % sizes.heads);
        if (KEY_MASK && mask.is_partial(key_tile, first_query / QUERIES))
            hide_pairs<N>([&](int n, int i) -> float& { return s[0][n][i]; }, mask, first_key + warp_key + quad_row,
                          first_query, lane);
        u32 stay[2];
#pragma unroll
        for (int n = 0; n < N; n++) {
            if (DROPOUT && n % 2 == 0)
                dropped.by_keys(stay, head_in_all, first_key + warp_key, first_query + n * 8, lane);
            const float4 row = read4(statistics + (n * 8 + quad_column) * 2); // lse, delta, lse, delta
            float2 rest = make_float2(0, 0);                                  // the rounding errors of both lse
            if (TF32_MATMULS == 3)
                rest = *reinterpret_cast<const float2*>(statistics + 2 * QUERIES + n * 8 + quad_column);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float score = s[0][n][i];
                if (BIAS)
                    score = bias.add(score, bias.at(first_query + n * 8 + quad_column + i % 2,
                                                    first_key + warp_key + quad_row + i / 2 * 8));
                float exponent = fmaf(score, to_log2, i % 2 ? -row.z : -row.x);
                if (TF32_MATMULS == 3) exponent -= i % 2 ? rest.y : rest.x;
                const float p = power_of_2(exponent);
                const bool stays = !DROPOUT || stay[n % 2] >> 8 * (i % 2 * 2 + i / 2) & 1;
                const float of_dp = DROPOUT ? stays ? dp[0][n][i] * arguments.dropout.scale : 0 : dp[0][n][i];
                const float slope = SOFT_CAP ? cap_slope(s[0][n][i]) : 1;
                s[0][n][i] = stays ? rounded(p) : 0;
                dp[0][n][i] = rounded(p * (of_dp - (i % 2 ? row.w : row.y)) * slope);
            }
            if (WARPS_PER_KEY_GROUP == 1 || warp_dim == 0) {
                *reinterpret_cast<float2*>(my_ds + n * 8) = make_float2(dp[0][n][0], dp[0][n][1]);
                *reinterpret_cast<float2*>(my_ds + n * 8 + 8 * DS_PITCH) = make_float2(dp[0][n][2], dp[0][n][3]);
            }
        }
        multiply_result(dv, s, my_d_out);
        multiply_result(dk, dp, my_q);

        if (threadIdx.x == 0) {
            const int mine = KEY_MASK ? precedes(sums_now) + 1 : key_tile;
            if (turn < mine) {
                do turn = read_turn(turns + sums_now);
                while (turn < mine);
                fence();
            }
        }
        __syncthreads(); // dS is written, Q and dO are no longer read, and it is this block's turn
        if (step + 1 < steps) copy_queries(arguments, next, query_tiles, q_tile, d_out_tile, statistics);
        multiply_dq(sums_now);
    }
    wait_groups<0>();
    __syncthreads();
    if (threadIdx.x == 0 && steps > 0) fence(), write_turn(turns + sums_now, key_tile + 1);

    const Strides &of_dk = arguments.dk_strides, &of_dv = arguments.dv_strides;
    E* dk_rows = arguments.dk + batch * of_dk.batch + kv_head * of_dk.head + first_key * of_dk.row + warp_dim;
    E* dv_rows = arguments.dv + batch * of_dv.batch + kv_head * of_dv.head + first_key * of_dv.row + warp_dim;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int key = warp_key + quad_row + half * 8;
        if (key >= keys) continue;
        write_row(dk_rows + key * of_dk.row, dk[0], half, lane, dim - warp_dim, sizes.scale);
        write_row(dv_rows + key * of_dv.row, dv[0], half, lane, sizes.value_dim - warp_dim,
                  DROPOUT ? arguments.dropout.scale : 1);
    }
}

// Computes dq from its sums.
//
//   dq_sums (B, H, ceil(Tq / QUERIES) * QUERIES, HEAD_DIM): f32
//   grid  ceil(Tq / QUERIES) * B * H        block  256

extern "C" __global__ void __launch_bounds__(256)
    JOIN(flash_backward_finish_, ELEMENT)(const __grid_constant__ BackwardArguments arguments) {
    const Sizes& sizes = arguments.sizes;
    const int query_tiles = CEIL_DIV(sizes.queries, QUERIES);
    const int head_in_all = blockIdx.x / query_tiles, first = blockIdx.x % query_tiles * QUERIES;
    const int batch = head_in_all / sizes.heads, head = head_in_all % sizes.heads;
    const Strides& of_dq = arguments.dq_strides;
    E* dq = arguments.dq + batch * of_dq.batch + head * of_dq.head + first * of_dq.row;
    const float4* sums =
        reinterpret_cast<const float4*>(arguments.dq_sums) + (long long)blockIdx.x * (QUERIES * CHUNKS);
    // No block has visited queries without keys.
    const FirstKeys first_keys(arguments.first_keys, sizes, batch);
    const bool seen = arguments.turns[blockIdx.x] > first_to_meet(first_keys, sizes, first / QUERIES);
    for (int i = threadIdx.x; i < QUERIES * CHUNKS; i += 256) {
        const int row = i / CHUNKS, column = i % CHUNKS * CHUNK;
        if (first + row >= sizes.queries || column >= sizes.head_dim) continue;
        float4 x = make_float4(0, 0, 0, 0);
        if (seen) x = sums[i];
        *reinterpret_cast<float4*>(dq + row * of_dq.row + column) =
            make_float4(x.x * sizes.scale, x.y * sizes.scale, x.z * sizes.scale, x.w * sizes.scale);
    }
}
