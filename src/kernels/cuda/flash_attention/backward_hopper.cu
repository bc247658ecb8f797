// Flash attention, backward, with Hopper's instructions (sm_90a). Included after common.cuh, hopper.cuh, backward.cuh
// and backward_hopper.cuh. HEAD_DIM 64 (QUERIES 128) or 128 (QUERIES 64).
//
// Computes the same as backward.cu, with the same scratch, except for the order of statistics and of a tile of dq_sums.
// Additional inputs are maps of q and d_out (boxes of QUERIES rows), k and v (boxes of KEYS rows).
//
//   flash_backward_prepare, see backward.cuh
//   flash_backward_hopper   dq, dk, dv, dq_sums   grid  min(multiprocessors, ceil(Tk / KEYS) * B * Hkv)    block 384
//                           dynamic shared memory (3 KEYS + 6 QUERIES) * HEAD_DIM * 2 + KEYS * QUERIES * 4 +
//                                                 QUERIES * 16 + 1024 + 256 bytes
//
// A work item is a tile of keys, with a step for each tile of queries that attends to it, the last queries first. Later
// keys, to which fewer queries attend, therefore reach a tile no earlier than the keys that add to its dQ before them.
// (With first keys, their range also ends at later queries, so they need at least as many steps to reach it.) Blocks
// are persistent and take work items by ticket; the steps of the next item follow without a break. The last keys that
// meet a tile of queries write its dq. With KEY_MASK, whose visible tiles of keys may be any, all dq are added to
// dq_sums, and a last kernel writes dq:
//
//   flash_backward_finish   dq, dk and dv of hidden keys    block 256
//                           grid  ceil(Tq / QUERIES) * B * H + ceil(Tk / KEYS) * B * Hkv
//
// Two warpgroups have 64 keys each. As in backward.cu they compute S^T and dP^T, so P^T and dS^T are left operands in
// the registers where they were computed. dS is written to shared memory for dQ, of which a group computes one half:
// rows if there are 128 queries, columns if there are 128 columns. dQ is one step behind the rest, and dS has two
// tiles, so that the groups need not run in lockstep: one's exponentials overlap the other's matmuls. dQ leaves through
// shared memory: two warps let the copy engine add it to dq_sums when it is their turn. One warp copies tiles in.

// Writes a half of dq of a tile, of which each of 128 threads has 32 elements.
__device__ __forceinline__ void write_dq(const BackwardArguments& arguments, const float (&dq)[32], int index,
                                         int query_tiles, int half, int thread) {
    const Sizes& sizes = arguments.sizes;
    const float scaled[2] = {sizes.scale, sizes.scale};
    const Strides& of_dq = arguments.dq_strides;
    const int head = index / query_tiles, lane = thread % 32,
              query = index % query_tiles * QUERIES + (HEAD_DIM == 64 ? half * 64 : 0) + thread / 32 * 16 + lane / 4;
    write_rows<64>(
        dq, scaled,
        arguments.dq + head / sizes.heads * of_dq.batch + head % sizes.heads * of_dq.head + query * of_dq.row,
        of_dq.row, sizes.queries - query, HEAD_DIM == 128 ? half * 64 : 0, sizes.head_dim, lane);
}

extern "C" __global__ void __launch_bounds__(384, 1)
    JOIN(flash_backward_hopper_, ELEMENT)(const __grid_constant__ Maps maps,
                                          const __grid_constant__ BackwardArguments arguments) {
    extern __shared__ unsigned char shared[];
    const Sizes& sizes = arguments.sizes;
    const int lane = threadIdx.x % 32;
    const int query_tiles = CEIL_DIV(sizes.queries, QUERIES), key_tiles = CEIL_DIV(sizes.keys, KEYS);
    const int works = key_tiles * sizes.batch * sizes.kv_heads;
    const Shared at(shared);
    if (threadIdx.x == 0) at.make_barriers();
    __syncthreads();

    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1; // shows the compiler that warps do not diverge
    if (warpgroup < 0) {
        give_registers<24>();
        const int warp = threadIdx.x / 32;
        if (warp == 0 && lane == 0) copy_tiles(at, maps, arguments, query_tiles, key_tiles);
        if (warp == 1 || warp == 2) add_in_turn(at, arguments, warp - 1, lane, query_tiles, key_tiles);
        return;
    }

    take_registers<240>();
    const int thread = threadIdx.x % 128, warp_row = thread / 32 * 16, quad_row = lane / 4, quad_column = lane % 4 * 2;
    const float to_log2 = exponent_of_score(sizes);
    const Dropped dropped(arguments.dropout, sizes);
    const Descriptor known_k(at.k_tiles + warpgroup * 64 * 128), known_v(at.v_tile + warpgroup * 64 * 128);
    const Blocks<128, BY_ROWS> ds_blocks(at.ds_tiles, warpgroup * 64 + warp_row, lane);
    // This group's rows of dS and columns of K, for dQ.
    const Descriptor known_left(at.ds_tiles + (HEAD_DIM == 64 ? warpgroup * KEYS * 128 : 0));
    const Descriptor known_right(at.k_tiles + (HEAD_DIM == 128 ? warpgroup * KEYS * 128 : 0));
    float dk[HEAD_DIM / 2], dv[HEAD_DIM / 2];
    float s[QUERIES / 2], dp[QUERIES / 2]; // S^T, dP^T: 64 keys, QUERIES queries
    float dq[32];                          // 64 queries, 64 columns
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; i++) dk[i] = dv[i] = 0;

    auto free = [&](u32 barrier) {
        if (lane == 0) barrier_arrive(barrier);
    };
    auto issue_scores = [&](int stage, int keys_stage) {
        const Descriptor a = known_k.offset_by(keys_stage * KEY_TILE_BYTES).opaque_copy(),
                         b(at.q_tiles + stage * QUERY_TILE_BYTES);
#pragma unroll
        for (int i = 0; i < K_STEPS; i++)
            multiply_tiles<0, 0>(s, a.at(i / 4 * KEYS * 128 + i % 4 * 32), b.at(i / 4 * QUERIES * 128 + i % 4 * 32),
                                 i > 0);
    };
    auto issue_dp = [&](int stage) {
        const Descriptor a = known_v.opaque_copy(), b(at.d_out_tiles + stage * QUERY_TILE_BYTES);
#pragma unroll
        for (int i = 0; i < K_STEPS; i++)
            multiply_tiles<0, 0>(dp, a.at(i / 4 * KEYS * 128 + i % 4 * 32), b.at(i / 4 * QUERIES * 128 + i % 4 * 32),
                                 i > 0);
    };
    auto issue_dq = [&](int stage, int keys_stage) {
        const Descriptor a = known_left.offset_by(stage * DS_TILE_BYTES).opaque_copy(),
                         b = known_right.offset_by(keys_stage * KEY_TILE_BYTES).opaque_copy();
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++) multiply_tiles<1, 1>(dq, a.at(i * 2048), b.at(i * 2048), i > 0);
    };
    // Writes dq of a tile to which all earlier keys have added and that has no later keys.
    auto finish_dq = [&](int index, bool is_alone) {
        named_sync(TURN_HAS_COME + warpgroup, 160);
        named_arrive(TURN_IS_TAKEN + warpgroup, 160);
        if (!is_alone) {
            const float* sums = arguments.dq_sums + (long long)index * DQ_TILE + warpgroup * (DQ_TILE / 2) + thread * 4;
#pragma unroll
            for (int n = 0; n < 8; n++) {
                const float4 x = __ldcg(reinterpret_cast<const float4*>(sums + n * 512));
                dq[n * 4] += x.x, dq[n * 4 + 1] += x.y, dq[n * 4 + 2] += x.z, dq[n * 4 + 3] += x.w;
            }
        }
        write_dq(arguments, dq, index, query_tiles, warpgroup, thread);
    };
    // dQ of any other tile is written to shared memory.
    int added = 0;
    auto store_dq = [&] {
        barrier_wait(at.dq_empty + warpgroup * 8, added - 1);
        const u32 tile = at.dq_tile + warpgroup * DQ_TILE * 2 + thread * 16;
#pragma unroll
        for (int n = 0; n < 8; n++)
            write_shared(tile + n * 2048, dq[n * 4], dq[n * 4 + 1], dq[n * 4 + 2], dq[n * 4 + 3]);
        added++;
    };
    auto send_dq = [&] {
        stores_fence();
        __syncwarp();
        free(at.dq_full + warpgroup * 8);
    };
    // Reads lse or delta of this thread's queries among 64: two of the columns 8 n .. 8 n + 7, for each n.
    auto read_statistics = [&](float (&of_queries)[16], int stage, int first) {
#pragma unroll
        for (int n = 0; n < 16; n += 4) {
            const float4 x = read_shared_floats(at.statistics_tiles + stage * STATISTICS_BYTES +
                                                (first + quad_column * 2) * 4 + n * 16);
            of_queries[n] = x.x, of_queries[n + 1] = x.y, of_queries[n + 2] = x.z, of_queries[n + 3] = x.w;
        }
    };

    barrier_wait(at.keys_full, 0);
    if (at.numbers[0] >= works) return;
    Work work(sizes, at.numbers[0], query_tiles, key_tiles);
#if FIRST_KEYS
    work.end_at(at.ends[0], sizes.heads / sizes.kv_heads);
    FirstKeys first_keys(arguments.first_keys, sizes, work.first_head / sizes.heads);
#endif
    int tile = END_TILE(work) - 1, head = work.first_head;
#if KEY_MASK
    const MaskArguments& masks = arguments.masks;
    auto begin_work = [&](int keys_stage) {
        work.steps = at.steps[keys_stage];
        const Place place = work.first_place(masks, sizes, query_tiles);
        head = place.head, tile = place.tile;
    };
    begin_work(0);
#endif
    // Overwrites S with P while dP is computed. Dropped elements are negated.
    auto exponentiate = [&](int stage) {
        float lse[16];
        read_statistics(lse, stage, 0);
#if FIRST_KEYS
        const int latest_first = first_keys.of(tile * QUERIES + QUERIES - 1);
#endif
        const int first_key = work.key_tile * KEYS + warpgroup * 64, my_key = first_key + warp_row + quad_row;
#if KEY_MASK
        const HeadMask mask(masks, sizes.keys, head / sizes.heads, head % sizes.heads);
        const bool partial = mask.is_partial(work.key_tile, tile);
#endif
        wgmma_wait<1>();
        if (SOFT_CAP) cap_scores(s, sizes);
        if (BIAS) {
            static_assert(!BIAS || !SOFT_CAP, "the cap's slope is taken from P, which has no bias");
            const HeadBias bias(arguments.masks, sizes, head / sizes.heads, head % sizes.heads);
            // Some elements at a time, all of whose loads are in flight together.
            constexpr int SOME = 4; // blocks of 8 queries
#pragma unroll
            for (int n = 0; n < QUERIES / 8; n += SOME) {
                float terms[SOME * 4];
#pragma unroll
                for (int i = 0; i < SOME * 4; i++)
                    terms[i] = bias.at(tile * QUERIES + (n + i / 4) * 8 + quad_column + i % 2, my_key + i / 2 % 2 * 8);
#pragma unroll
                for (int i = 0; i < SOME * 4; i++) s[n * 4 + i] = bias.add(s[n * 4 + i], terms[i]);
                asm volatile("" ::: "memory");
            }
        }
#if KEY_MASK
        if (partial)
            hide_pairs<QUERIES / 8>([&](int n, int i) -> float& { return s[n * 4 + i]; }, mask, my_key, tile* QUERIES,
                                    lane);
#endif
        if (tile * QUERIES + sizes.offset < first_key + 63 || first_key + 64 > sizes.keys) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int key = first_key + warp_row + quad_row + i / 2 * 8;
                // The first query, counted from this thread's first, that attends to the key.
                const int visible = (key < sizes.keys ? key - sizes.offset : sizes.queries + QUERIES) - tile * QUERIES -
                                    quad_column - i % 2;
#pragma unroll
                for (int n = 0; n < QUERIES / 8; n++) s[n * 4 + i] = n * 8 >= visible ? s[n * 4 + i] : -INFINITE;
            }
        }
#if FIRST_KEYS
        // Some queries have first keys after the group's first key.
        if (latest_first > first_key) {
#pragma unroll
            for (int n = 0; n < QUERIES / 8; n++)
#pragma unroll
                for (int odd = 0; odd < 2; odd++) {
                    // Counted from this thread's first key.
                    const int query = tile * QUERIES + n * 8 + quad_column + odd;
                    const int first = first_keys.of(query) - first_key - warp_row - quad_row;
                    if (0 < first) s[n * 4 + odd] = -INFINITE;
                    if (8 < first) s[n * 4 + odd + 2] = -INFINITE;
                }
        }
#endif
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            if (half > 0) read_statistics(lse, stage, half * 64);
#pragma unroll
            for (int n = 0; n < 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float& x = s[half * 32 + n * 4 + i];
                    x = power_of_2(fmaf(x, to_log2, -lse[n * 2 + i % 2]));
                }
        }
        if (DROPOUT) {
#pragma unroll
            for (int pair = 0; pair < QUERIES / 16; pair++) {
                u32 stay[2];
                dropped.by_keys(stay, head, first_key + warp_row, tile * QUERIES + pair * 16, lane);
#pragma unroll
                for (int i = 0; i < 8; i++)
                    if (!(stay[i / 4] >> 8 * (i % 2 * 2 + i / 2 % 2) & 1)) s[pair * 8 + i] = -s[pair * 8 + i];
            }
        }
    };
    barrier_wait(at.queries_full, 0);
    // One group begins later, so that its exponentials overlap the other's matmuls.
    if (warpgroup == 1) named_sync(ORDER, 256);
    wgmma_fence();
    issue_scores(0, 0);
    wgmma_commit();
    barrier_wait(at.v_full, 0);
    wgmma_fence();
    issue_dp(0);
    wgmma_commit();
    if (warpgroup == 0) named_arrive(ORDER, 256);
    exponentiate(0);
    wgmma_wait<0>();
    if (work.steps == 1) free(at.v_empty);

    int step = 0; // over all work items
    int due = -1; // the tile of the step before whose dq is to be finished, or -1
    bool due_alone = false;
    bool more = true;
    int turn = 0;
    for (; more; turn++) {
        const int steps = work.steps, keys_stage = turn % 2;
        // No matmul is in flight when a step begins: the compiler does not track them across steps.
#pragma unroll 1
        for (int i = 0; i < steps; i++, step++) {
            const int stage = step % 2, next_stage = stage ^ 1, next_round = (step + 1) / 2;
            const Descriptor q(at.q_tiles + stage * QUERY_TILE_BYTES, QUERIES * 128),
                d_out(at.d_out_tiles + stage * QUERY_TILE_BYTES, QUERIES * 128);
#pragma unroll
            for (int half = 0; half < HALVES; half++) {
                u32 p[4][4], ds[4][4];
                float delta[16];
                read_statistics(delta, stage, QUERIES + half * 64);
#if SOFT_CAP
                float lse[16];
                read_statistics(lse, stage, half * 64);
#endif
#pragma unroll
                for (int k = 0; k < 16; k++) {
                    const float p0 = s[half * 32 + k * 2], p1 = s[half * 32 + k * 2 + 1];
                    p[k / 4][k % 4] = E::pack(DROPOUT && p0 < 0 ? 0 : p0, DROPOUT && p1 < 0 ? 0 : p1);
                }
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < 4; k++)
                    multiply_registers<1>(dv, p[k], d_out.at(half * 64 * 128 + k * 2048), half > 0 || k > 0 || i > 0);
                wgmma_commit();

#pragma unroll
                for (int n = 0; n < 8; n++)
#pragma unroll
                    for (int k = 0; k < 4; k += 2) {
                        const int at = half * 32 + n * 4 + k;
                        float dp0 = dp[at], dp1 = dp[at + 1], p0 = s[at], p1 = s[at + 1];
                        if (DROPOUT) {
                            dp0 = p0 < 0 ? 0 : dp0 * arguments.dropout.scale;
                            dp1 = p1 < 0 ? 0 : dp1 * arguments.dropout.scale;
                            p0 = fabsf(p0), p1 = fabsf(p1);
                        }
                        float ds0 = p0 * (dp0 - delta[n * 2]), ds1 = p1 * (dp1 - delta[n * 2 + 1]);
#if SOFT_CAP
                        ds0 *= cap_slope(score_of(p0, lse[n * 2], sizes));
                        ds1 *= cap_slope(score_of(p1, lse[n * 2 + 1], sizes));
#endif
                        ds[n / 2][n % 2 * 2 + k / 2] = E::pack(ds0, ds1);
                    }
#pragma unroll
                for (int k = 0; k < 4; k++)
                    store_matrices(ds_blocks.at(half * KEYS, k * 16, stage * DS_TILE_BYTES), ds[k]);
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < 4; k++)
                    multiply_registers<1>(dk, ds[k], q.at(half * 64 * 128 + k * 2048), half > 0 || k > 0 || i > 0);
                wgmma_commit();
            }
            stores_fence();
            __syncwarp();
            free(at.ds_full + stage * 8);

            // dQ of the step before (in the first step of nothing). It is written to shared memory before the matmuls
            // of S and dP begin, which use the full bandwidth of shared memory.
            if (step > 0) barrier_wait(at.ds_full + next_stage * 8, next_round - 1);
            wgmma_fence();
            issue_dq(next_stage, keys_stage ^ (i == 0));
            wgmma_commit();
            wgmma_wait<1>();
            __syncwarp(); // all lanes have read the statistics
            free(at.queries_empty + stage * 8);
            wgmma_wait<0>();
            if (step > 0) free(at.ds_empty + next_stage * 8);
            if (i == 0 && turn > 0) free(at.keys_empty + (keys_stage ^ 1) * 8);
            const bool sends = step > 0 && due < 0;
            if (sends) store_dq();
            else if (step > 0) finish_dq(due, due_alone);
#if FIRST_KEYS
            const int alone = first_to_meet(first_keys, sizes, tile);
#else
            const int alone = 0;
#endif
            due = !KEY_MASK && tile < work.own_tiles ? head * query_tiles + tile : -1,
            due_alone = work.key_tile == alone;

            // S and dP of the next step, also in the last one.
            const bool last = i == steps - 1;
            int number = 0;
            if (last) {
                barrier_wait(at.keys_full + (keys_stage ^ 1) * 8, (turn + 1) / 2);
                number = at.numbers[keys_stage ^ 1];
                more = number < works;
            }
            if (more) barrier_wait(at.queries_full + next_stage * 8, next_round);
            wgmma_fence();
            issue_scores(next_stage, keys_stage ^ last);
            wgmma_commit();
            if (last) {
                const float stay_scale = DROPOUT ? arguments.dropout.scale : 1;
                const float stayed[2] = {stay_scale, stay_scale}, scaled[2] = {sizes.scale, sizes.scale};
                const Strides &of_dk = arguments.dk_strides, &of_dv = arguments.dv_strides;
                const int my_key = work.key_tile * KEYS + warpgroup * 64 + warp_row + quad_row;
                const int batch = head / sizes.heads, kv_head = head % sizes.heads / (sizes.heads / sizes.kv_heads);
                write_rows<HEAD_DIM>(dk, scaled,
                                     arguments.dk + batch * of_dk.batch + kv_head * of_dk.head + my_key * of_dk.row,
                                     of_dk.row, sizes.keys - my_key, 0, sizes.head_dim, lane);
                write_rows<HEAD_DIM>(dv, stayed,
                                     arguments.dv + batch * of_dv.batch + kv_head * of_dv.head + my_key * of_dv.row,
                                     of_dv.row, sizes.keys - my_key, 0, sizes.value_dim, lane);
                if (more) barrier_wait(at.v_full, turn + 1);
            }
            wgmma_fence();
            issue_dp(next_stage);
            wgmma_commit();
            if (sends) send_dq();
            if (last && more) {
                work = Work(sizes, number, query_tiles, key_tiles);
#if FIRST_KEYS
                work.end_at(at.ends[keys_stage ^ 1], sizes.heads / sizes.kv_heads);
                first_keys = FirstKeys(arguments.first_keys, sizes, work.first_head / sizes.heads);
#endif
                tile = END_TILE(work) - 1, head = work.first_head;
#if KEY_MASK
                begin_work(keys_stage ^ 1);
            } else if (!last) {
                Place place = {head, tile};
                place.seek_back(tile - 1, work.visits(sizes, query_tiles), masks, sizes);
                tile = place.tile, head = place.head;
            }
#else
            } else if (--tile < work.first_tile) {
                tile = END_TILE(work) - 1, head++;
            }
#endif
            exponentiate(next_stage);
            barrier_wait(at.ds_empty + next_stage * 8,
                         next_round - 1); // here, since the compiler moves no exponential across it
            wgmma_wait<0>();
            if (last ? more && work.steps == 1 : i + 2 == steps) free(at.v_empty);
        }
    }
    step--;
    barrier_wait(at.ds_full + step % 2 * 8, step / 2);
    wgmma_fence();
    issue_dq(step % 2, (turn - 1) % 2);
    wgmma_commit();
    wgmma_wait<0>();
    if (due < 0) store_dq(), send_dq();
    else finish_dq(due, due_alone);
}

#if KEY_MASK
extern "C" __global__ void __launch_bounds__(256)
    JOIN(flash_backward_finish_, ELEMENT)(const __grid_constant__ BackwardArguments arguments) {
    const Sizes& sizes = arguments.sizes;
    const int query_tiles = CEIL_DIV(sizes.queries, QUERIES), key_tiles = CEIL_DIV(sizes.keys, KEYS);
    const int dq_tiles = query_tiles * sizes.batch * sizes.heads, index = blockIdx.x;
    if (index < dq_tiles) {
        const int half = threadIdx.x / 128, thread = threadIdx.x % 128;
        const FirstKeys first_keys(arguments.first_keys, sizes, index / query_tiles / sizes.heads);
        float dq[32] = {};
        // No block has visited queries without keys.
        if (arguments.turns[2 * index + half] > first_to_meet(first_keys, sizes, index % query_tiles)) {
            const float* sums = arguments.dq_sums + (long long)index * DQ_TILE + half * (DQ_TILE / 2) + thread * 4;
#pragma unroll
            for (int n = 0; n < 8; n++) {
                const float4 x = *reinterpret_cast<const float4*>(sums + n * 512);
                dq[n * 4] = x.x, dq[n * 4 + 1] = x.y, dq[n * 4 + 2] = x.z, dq[n * 4 + 3] = x.w;
            }
        }
        write_dq(arguments, dq, index, query_tiles, half, thread);
        return;
    }
    const Work work = located(arguments, index - dq_tiles, query_tiles, key_tiles);
    if (work.steps > 0) return;
    const Strides &of_dk = arguments.dk_strides, &of_dv = arguments.dv_strides;
    const int batch = work.first_head / sizes.heads,
              kv_head = work.first_head % sizes.heads / (sizes.heads / sizes.kv_heads);
    E* dk = arguments.dk + batch * of_dk.batch + kv_head * of_dk.head;
    E* dv = arguments.dv + batch * of_dv.batch + kv_head * of_dv.head;
    for (int i = threadIdx.x; i < KEYS * CHUNKS; i += 256) {
        const int key = work.key_tile * KEYS + i / CHUNKS, column = i % CHUNKS * CHUNK;
        if (key >= sizes.keys) continue;
        const uint4 zeros = make_uint4(0, 0, 0, 0);
        if (column < sizes.head_dim) *reinterpret_cast<uint4*>(dk + key * of_dk.row + column) = zeros;
        if (column < sizes.value_dim) *reinterpret_cast<uint4*>(dv + key * of_dv.row + column) = zeros;
    }
}
#endif
