// Flash attention, backward, by Hopper's own instructions (sm_90a); behind common.cuh, hopper.cuh and backward.cuh. HEAD_DIM
// 64 (QUERIES 128) or 128 (QUERIES 64).
//
// Computes what backward.cu does, with the same scratch (but the order of numbers in a tile of dq_sums), and takes
// besides maps of q and d_out (boxes of QUERIES rows), k and v (boxes of KEYS rows).
//
//   flash_backward_prepare, see backward.cuh
//   flash_backward_hopper          dk, dv, dq_sums   grid  ceil(Tk / KEYS) * B * Hkv    block 384
//                                  dynamic shared memory   (2 KEYS + 4 QUERIES) * HEAD_DIM * 2 + KEYS * QUERIES * 4 +
//                                                          QUERIES * 16 + 1024 + 128 bytes
//   flash_backward_hopper_finish   dq                grid  ceil(Tq / QUERIES) * B * H   block 256
//
// Two warpgroups have 64 keys each. As in backward.cu they compute S^T and dP^T, so that P^T and dS^T are left factors
// in the registers where they were made; dS goes through shared memory for dQ, of which a group computes one half: rows
// where there are 128 queries, columns where there are 128. One warp copies tiles, one keeps the turns.

constexpr int KEYS = 128;
constexpr int HALVES = QUERIES / 64;  // of a tile of queries: S and dP of one are in registers at a time
constexpr int K_STEPS = HEAD_DIM / 16;
constexpr int KEY_TILE_BYTES = KEYS * ROW_BYTES, QUERY_TILE_BYTES = QUERIES * ROW_BYTES;
constexpr int DS_TILE_BYTES = KEYS * QUERIES * 2, STATISTICS_BYTES = QUERIES * 8;
constexpr int DQ_TILE = QUERIES * HEAD_DIM;
static_assert(QUERIES * HEAD_DIM == 64 * 128 && (HEAD_DIM == 64 || HEAD_DIM == 128), "one dQ of 64 x 64 for each group");

struct Maps {
    Map q, k, v, d_out;
};
enum Named { ALL_OF_DS = 1, TURN_HAS_COME, TURN_IS_OVER };

extern "C" __global__ void __launch_bounds__(384, 1)
JOIN(flash_backward_hopper_, ELEMENT)(const __grid_constant__ Maps maps, const __grid_constant__ BackwardArguments arguments) {
    extern __shared__ unsigned char shared[];
    const Sizes& sizes = arguments.sizes;
    const int lane = threadIdx.x % 32;
    const int query_tiles = CEIL_DIV(sizes.queries, QUERIES), key_tiles = CEIL_DIV(sizes.keys, KEYS);
    const int group = sizes.heads / sizes.kv_heads;
    int* const turns = arguments.turns;

    const u32 start = (u32)__cvta_generic_to_shared(shared), k_tile = (start + 1023) & ~1023u, v_tile = k_tile + KEY_TILE_BYTES;
    const u32 q_tiles = v_tile + KEY_TILE_BYTES, d_out_tiles = q_tiles + 2 * QUERY_TILE_BYTES;
    const u32 ds_tile = d_out_tiles + 2 * QUERY_TILE_BYTES, statistics_tiles = ds_tile + 2 * DS_TILE_BYTES;
    const u32 keys_full = statistics_tiles + 2 * STATISTICS_BYTES;
    const u32 q_full = keys_full + 8, q_empty = q_full + 16, d_out_full = q_empty + 16, d_out_empty = d_out_full + 16;  // two each
    int* ticket = reinterpret_cast<int*>(shared + (d_out_empty + 16 - start));

    if (threadIdx.x == 0) {
        barrier_make(keys_full, 1);
        for (int stage = 0; stage < 2; stage++) {
            barrier_make(q_full + stage * 8, 1), barrier_make(q_empty + stage * 8, 8);
            barrier_make(d_out_full + stage * 8, 1), barrier_make(d_out_empty + stage * 8, 8);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        *ticket = atomicAdd(turns + sizes.batch * sizes.heads * query_tiles, 1);
    }
    __syncthreads();
    // The first keys first: with a causal mask most queries see them.
    int kv_head_in_all, key_tile;
    place(*ticket, sizes.batch * sizes.kv_heads, key_tiles, sizes.heads_at_once, kv_head_in_all, key_tile);
    const int batch = kv_head_in_all / sizes.kv_heads, kv_head = kv_head_in_all % sizes.kv_heads;
    const int first_key = key_tile * KEYS;
    // Tiles of queries that see a key of this block, head after head of the group.
    const int first_tile = max(0, first_key - sizes.offset) / QUERIES;
    const int steps = max(0, query_tiles - first_tile) * group;
    Place now = {batch * sizes.heads + kv_head * group, first_tile};

    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;
    if (warpgroup < 0) {
        give_registers<24>();
        const int warp = threadIdx.x / 32;
        if (warp == 0 && lane == 0 && steps > 0) {
            barrier_expect(keys_full, 2 * KEY_TILE_BYTES);
            copy_boxes<KEYS>(k_tile, maps.k, keys_full, first_key, kv_head, batch);
            copy_boxes<KEYS>(v_tile, maps.v, keys_full, first_key, kv_head, batch);
#pragma unroll 1
            for (int step = 0; step < steps; step++, now.advance(first_tile, query_tiles)) {
                const int stage = step % 2, head = now.head - batch * sizes.heads;
                barrier_wait(q_empty + stage * 8, step / 2 - 1);
                barrier_expect(q_full + stage * 8, QUERY_TILE_BYTES + STATISTICS_BYTES);
                copy_boxes<QUERIES>(q_tiles + stage * QUERY_TILE_BYTES, maps.q, q_full + stage * 8, now.tile * QUERIES, head, batch);
                copy_bytes(statistics_tiles + stage * STATISTICS_BYTES,
                           arguments.statistics + 2ll * QUERIES * (now.head * query_tiles + now.tile), STATISTICS_BYTES, q_full + stage * 8);
                barrier_wait(d_out_empty + stage * 8, step / 2 - 1);
                barrier_expect(d_out_full + stage * 8, QUERY_TILE_BYTES);
                copy_boxes<QUERIES>(d_out_tiles + stage * QUERY_TILE_BYTES, maps.d_out, d_out_full + stage * 8, now.tile * QUERIES, head, batch);
            }
        }
        if (warp == 1) {
#pragma unroll 1
            for (int step = 0; step < steps; step++, now.advance(first_tile, query_tiles)) {
                int* turn = turns + now.head * query_tiles + now.tile;
                if (lane == 0) {
                    while (read_turn(turn) < key_tile) {}
                    fence();
                }
                __syncwarp();
                named_arrive(TURN_HAS_COME, 288);
                named_sync(TURN_IS_OVER, 288);
                if (lane == 0) fence(), write_turn(turn, key_tile + 1);
            }
        }
        return;
    }

    take_registers<240>();
    const int warp_row = threadIdx.x / 32 % 4 * 16, quad_row = lane / 4, quad_column = lane % 4 * 2;
    const int my_key = first_key + warpgroup * 64 + warp_row + quad_row;  // of this thread; the other is my_key + 8
    const float to_log2 = sizes.scale * LOG2_E;
    const Described known_k(k_tile + warpgroup * 64 * 128), known_v(v_tile + warpgroup * 64 * 128);
    const Blocks<128, BY_ROWS> ds_blocks(ds_tile, warpgroup * 64 + warp_row, lane);
    // This group's rows of dS and columns of K, for dQ.
    const Described known_left(ds_tile + (HEAD_DIM == 64 ? warpgroup * KEYS * 128 : 0));
    const Described known_right(k_tile + (HEAD_DIM == 128 ? warpgroup * KEYS * 128 : 0));
    float dk[HEAD_DIM / 2], dv[HEAD_DIM / 2];
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; i++) dk[i] = dv[i] = 0;

    if (steps > 0) barrier_wait(keys_full, 0);
    // dQ of the step before, whose sum is taken while the next S is computed.
    float dq[32];  // 64 queries, 64 columns
    float* sums = nullptr;
    auto add_dq = [&] {
        named_sync(TURN_HAS_COME, 288);
        if (key_tile == 0) {
#pragma unroll
            for (int n = 0; n < 8; n++)
                *reinterpret_cast<float4*>(sums + n * 512) = make_float4(dq[n * 4], dq[n * 4 + 1], dq[n * 4 + 2], dq[n * 4 + 3]);
        } else {
#pragma unroll
            for (int n = 0; n < 8; n++) {
                const float four[4] = {dq[n * 4], dq[n * 4 + 1], dq[n * 4 + 2], dq[n * 4 + 3]};
                add_to(sums + n * 512, four);
            }
        }
        named_arrive(TURN_IS_OVER, 288);
    };
    auto do_step = [&](int step, bool masked) {
        const int stage = step % 2;
        const Described q(q_tiles + stage * QUERY_TILE_BYTES, QUERIES * 128), d_out(d_out_tiles + stage * QUERY_TILE_BYTES, QUERIES * 128);
        const Described my_k = known_k.anew(), my_v = known_v.anew();
        barrier_wait(q_full + stage * 8, step / 2);
        float s[HALVES][32], dp[HALVES][32];  // S^T, dP^T: 64 keys, 64 queries
        // All products of a step are groups in a queue: the four of a half (S, dP, and from these dV and dK), where those of
        // all halves' S and dP come first. So what is waited for next is always the oldest of 2 HALVES.
        constexpr int LEFT = 2 * HALVES - 1;
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            products_fence();
#pragma unroll
            for (int i = 0; i < K_STEPS; i++)
                multiply_tiles<0, 0>(s[half], my_k.at(i / 4 * KEYS * 128 + i % 4 * 32), q.at(half * 64 * 128 + i / 4 * QUERIES * 128 + i % 4 * 32), i > 0);
            products_commit();
            if (half == 0 && step > 0) add_dq();
            if (half == 0) barrier_wait(d_out_full + stage * 8, step / 2);
            products_fence();
#pragma unroll
            for (int i = 0; i < K_STEPS; i++)
                multiply_tiles<0, 0>(dp[half], my_v.at(i / 4 * KEYS * 128 + i % 4 * 32), d_out.at(half * 64 * 128 + i / 4 * QUERIES * 128 + i % 4 * 32), i > 0);
            products_commit();
        }
        u32 p[HALVES][4][4], ds[HALVES][4][4];
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            products_wait<LEFT>();
            if (masked) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int key = my_key + i / 2 * 8;
                    // The first query, counted from this thread's first, that sees the key.
                    const int visible = (key < sizes.keys ? key - sizes.offset : sizes.queries + QUERIES) - now.tile * QUERIES -
                                        half * 64 - quad_column - i % 2;
#pragma unroll
                    for (int n = 0; n < 8; n++) s[half][n * 4 + i] = n * 8 >= visible ? s[half][n * 4 + i] : -INFINITE;
                }
            }
            // lse, delta, lse, delta of this thread's queries; read twice, for want of registers.
            const u32 statistics = statistics_tiles + stage * STATISTICS_BYTES + (half * 64 + quad_column) * 8;
#pragma unroll
            for (int n = 0; n < 8; n++) {
                const float4 row = read_shared_floats(statistics + n * 64);
#pragma unroll
                for (int i = 0; i < 4; i++) s[half][n * 4 + i] = power_of_2(fmaf(s[half][n * 4 + i], to_log2, i % 2 ? -row.z : -row.x));
            }
#pragma unroll
            for (int i = 0; i < 16; i++) p[half][i / 4][i % 4] = E::pack(s[half][i * 2], s[half][i * 2 + 1]);
            products_fence();
#pragma unroll
            for (int i = 0; i < 4; i++) multiply_registers<1>(dv, p[half][i], d_out.at(half * 64 * 128 + i * 2048), true);
            products_commit();
            products_wait<LEFT>();

#pragma unroll
            for (int n = 0; n < 8; n++) {
                const float4 row = read_shared_floats(statistics + n * 64);
#pragma unroll
                for (int i = 0; i < 4; i += 2)
                    ds[half][n / 2][n % 2 * 2 + i / 2] = E::pack(s[half][n * 4 + i] * (dp[half][n * 4 + i] - row.y),
                                                                 s[half][n * 4 + i + 1] * (dp[half][n * 4 + i + 1] - row.w));
            }
#pragma unroll
            for (int i = 0; i < 4; i++) store_matrices(ds_blocks.at(half * KEYS, i * 16, stage * DS_TILE_BYTES), ds[half][i]);
            products_fence();
#pragma unroll
            for (int i = 0; i < 4; i++) multiply_registers<1>(dk, ds[half][i], q.at(half * 64 * 128 + i * 2048), true);
            products_commit();
        }
        stores_fence();
        named_sync(ALL_OF_DS, 256);  // and both groups are done with dQ of the step before

        const Described dq_left = known_left.anew(), dq_right = known_right.anew();
        products_fence();
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++) multiply_tiles<1, 1>(dq, dq_left.at(stage * DS_TILE_BYTES + i * 2048), dq_right.at(i * 2048), i > 0);
        products_commit();
        products_wait<1>();
        if (lane == 0) barrier_arrive(q_empty + stage * 8), barrier_arrive(d_out_empty + stage * 8);
        products_wait<0>();
        sums = arguments.dq_sums + ((long long)now.head * query_tiles + now.tile) * DQ_TILE + (threadIdx.x - 128) * 4 +
               warpgroup * (8 - 1) * 128 * 4;
        now.advance(first_tile, query_tiles);
    };
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        const bool whole = now.tile * QUERIES + sizes.offset >= first_key + KEYS - 1 && first_key + KEYS <= sizes.keys;
        if (whole) do_step(step, false);
        else do_step(step, true);
    }
    if (steps > 0) add_dq();

    const float as_it_is[2] = {1, 1}, scaled[2] = {sizes.scale, sizes.scale};
    const Strides &of_dk = arguments.dk_strides, &of_dv = arguments.dv_strides;
    write_rows<HEAD_DIM>(dk, scaled, arguments.dk + batch * of_dk.batch + kv_head * of_dk.head + my_key * of_dk.row, of_dk.row,
                         sizes.keys - my_key, 0, sizes.head_dim, lane);
    write_rows<HEAD_DIM>(dv, as_it_is, arguments.dv + batch * of_dv.batch + kv_head * of_dv.head + my_key * of_dv.row, of_dv.row,
                         sizes.keys - my_key, 0, sizes.head_dim, lane);
}

extern "C" __global__ void __launch_bounds__(256)
JOIN(flash_backward_hopper_finish_, ELEMENT)(const __grid_constant__ BackwardArguments arguments) {
    const Sizes& sizes = arguments.sizes;
    const int lane = threadIdx.x % 32, warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128;
    const int query_tiles = CEIL_DIV(sizes.queries, QUERIES);
    const int head_in_all = blockIdx.x / query_tiles;
    const int batch = head_in_all / sizes.heads, head = head_in_all % sizes.heads;
    const int query = blockIdx.x % query_tiles * QUERIES + (HEAD_DIM == 64 ? warpgroup * 64 : 0) + thread / 32 * 16 + lane / 4;
    const float4* sums = reinterpret_cast<const float4*>(arguments.dq_sums) + (long long)blockIdx.x * (DQ_TILE / 4) +
                         warpgroup * 8 * 128 + thread;
    const bool seen = arguments.turns[blockIdx.x] > 0;  // no block has come to queries that see no key
    float dq[32];
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const float4 x = seen ? sums[n * 128] : make_float4(0, 0, 0, 0);
        dq[n * 4] = x.x, dq[n * 4 + 1] = x.y, dq[n * 4 + 2] = x.z, dq[n * 4 + 3] = x.w;
    }
    const float scaled[2] = {sizes.scale, sizes.scale};
    const Strides& of_dq = arguments.dq_strides;
    write_rows<64>(dq, scaled, arguments.dq + batch * of_dq.batch + head * of_dq.head + query * of_dq.row, of_dq.row,
                   sizes.queries - query, HEAD_DIM == 128 ? warpgroup * 64 : 0, sizes.head_dim, lane);
}
