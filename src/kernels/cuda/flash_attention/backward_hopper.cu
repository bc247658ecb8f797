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
    const int thread = threadIdx.x % 128, warp_row = thread / 32 * 16;
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
        if (!is_alone) add_sums(dq, arguments.dq_sums + (long long)index * DQ_TILE + warpgroup * DQ_PART, thread);
        write_dq(arguments, dq, index, query_tiles, warpgroup, thread);
    };
    // dQ of any other tile is written to shared memory.
    int added = 0;
    auto store_dq = [&] {
        barrier_wait(at.dq_empty + warpgroup * 8, added - 1);
        store_part(at.dq_tile + warpgroup * DQ_PART * 4 + thread / 32 * DQ_WARP * 4, dq, lane);
        added++;
    };
    auto send_dq = [&] {
        stores_fence();
        __syncwarp();
        free(at.dq_full + warpgroup * 8);
    };

    barrier_wait(at.keys_full, 0);
    if (at.numbers[0] >= works) return;
    Work work(sizes, at.numbers[0], query_tiles, key_tiles);
    work.end_at(at.ends[0], sizes.heads / sizes.kv_heads);
    if (KEY_MASK) work.steps = at.steps[0];
    FirstKeys first_keys(arguments.first_keys, sizes, work.first_head / sizes.heads);
    Place place = work.first_place(arguments.masks, sizes, query_tiles);
    auto exponentiate_step = [&](int stage) {
        exponentiate(s, at.statistics_tiles + stage * STATISTICS_BYTES, arguments, dropped, first_keys, place,
                     work.key_tile, work.key_tile * KEYS + warpgroup * 64, warp_row, lane, [] { wgmma_wait<1>(); });
    };
    // Writes dK or dV of the work item.
    auto write_keys = [&](const float (&sum)[HEAD_DIM / 2], E* x, const Strides& of_x, int width, float factor) {
        const float factors[2] = {factor, factor};
        const int key = work.key_tile * KEYS + warpgroup * 64 + warp_row + lane / 4;
        const int batch = work.first_head / sizes.heads,
                  head = work.first_head % sizes.heads / (sizes.heads / sizes.kv_heads);
        write_rows<HEAD_DIM>(sum, factors, x + batch * of_x.batch + head * of_x.head + key * of_x.row, of_x.row,
                             sizes.keys - key, 0, width, lane);
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
    exponentiate_step(0);
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
            const u32 statistics = at.statistics_tiles + stage * STATISTICS_BYTES;
            const Descriptor q(at.q_tiles + stage * QUERY_TILE_BYTES, QUERIES * 128),
                d_out(at.d_out_tiles + stage * QUERY_TILE_BYTES, QUERIES * 128);
#pragma unroll
            for (int half = 0; half < HALVES; half++) {
                u32 p[4][4], ds[4][4];
                float delta[16], lse[16];
                read_statistics(delta, statistics, QUERIES + half * 64, lane);
                if (SOFT_CAP) read_statistics(lse, statistics, half * 64, lane);
                round_probabilities(p, s + half * 32);
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
                        ds[n / 2][n % 2 * 2 + k / 2] =
                            differentiate(s[at], s[at + 1], dp[at], dp[at + 1], delta + n * 2, lse + n * 2, arguments);
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
            due = !KEY_MASK && place.tile < work.own_tiles ? place.head * query_tiles + place.tile : -1,
            due_alone = work.key_tile == first_to_meet(first_keys, sizes, place.tile);

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
                write_keys(dk, arguments.dk, arguments.dk_strides, sizes.head_dim, sizes.scale);
                write_keys(dv, arguments.dv, arguments.dv_strides, sizes.value_dim,
                           DROPOUT ? arguments.dropout.scale : 1);
                if (more) barrier_wait(at.v_full, turn + 1);
            }
            wgmma_fence();
            issue_dp(next_stage);
            wgmma_commit();
            if (sends) send_dq();
            if (last && more) {
                work = Work(sizes, number, query_tiles, key_tiles);
                work.end_at(at.ends[keys_stage ^ 1], sizes.heads / sizes.kv_heads);
                if (KEY_MASK) work.steps = at.steps[keys_stage ^ 1];
                first_keys = FirstKeys(arguments.first_keys, sizes, work.first_head / sizes.heads);
                place = work.first_place(arguments.masks, sizes, query_tiles);
            } else if (!last) {
                work.step(place, arguments.masks, sizes, query_tiles);
            }
            exponentiate_step(next_stage);
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
