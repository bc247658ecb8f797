// Flash attention, backward, with Hopper's instructions (sm_90a) for HEAD_DIM 256, by clusters of two blocks. Included
// after common.cuh, hopper.cuh, backward.cuh, backward_works.cuh and backward_cluster.cuh.
//
// Computes the same as backward_hopper.cu, with the same scratch, work items and order of sums. KEYS 128, QUERIES 64;
// the maps of all inputs have boxes of 64 rows.
//
//   flash_backward_prepare, see backward.cuh
//   flash_backward_hopper   dq, dk, dv, dq_sums   block 384
//                           grid  2 min(multiprocessors / 2, ceil(Tk / KEYS) * B * Hkv)
//                           dynamic shared memory (5 KEYS / 4 + 3 QUERIES) * HEAD_DIM * 2 + KEYS * QUERIES * 6 +
//                                                 QUERIES * 16 + 1024 + 256 bytes
//   flash_backward_finish, see backward_works.cuh
//
// A cluster has one work item at a time, of which each block has 64 keys: dK and dV of more would not fit in its
// registers. The first warpgroup computes S^T, P^T and dV, the second dP^T, dS^T and dK. P reaches the second through
// shared memory, in f32. Each computes while the other multiplies. dS is written to the shared memory of both blocks,
// so each block computes the sum of dQ over all 128 keys for its half of the columns, of which each warpgroup has 64.
// So dq_sums is read and written once per 128 keys, not 64. dQ is one step behind the rest, and goes from registers to
// dq_sums when it is the item's turn. (H200, T 16k: 463 TFLOP/s causal, 476 full, instead of 211 and 225 by mma.sync.
// Without the additions to dq_sums, 530 and 550; without waiting for turns, no faster.)

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
    JOIN(flash_backward_hopper_, ELEMENT)(const __grid_constant__ Maps maps,
                                          const __grid_constant__ BackwardArguments arguments) {
    extern __shared__ unsigned char shared[];
    const Sizes& sizes = arguments.sizes;
    const int lane = threadIdx.x % 32, rank = cluster_rank();
    const int query_tiles = CEIL_DIV(sizes.queries, QUERIES), key_tiles = CEIL_DIV(sizes.keys, KEYS);
    const int works = key_tiles * sizes.batch * sizes.kv_heads;
    const Shared at(shared, rank);
    if (threadIdx.x == 0) at.make_barriers();
    cluster_sync();

    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1; // shows the compiler that warps do not diverge
    if (warpgroup < 0) {
        give_registers<24>();
        if (threadIdx.x == 0) copy_tiles(at, maps, arguments, rank, query_tiles, key_tiles);
        if (threadIdx.x == 32) await_turns(at, arguments, rank, query_tiles, key_tiles);
        if (threadIdx.x == 64) pass_turns(at, arguments, rank);
    } else {
        take_registers<240>();
        const int thread = threadIdx.x % 128, warp = thread / 32, warp_row = warp * 16;
        const int part = 2 * rank + warpgroup; // 64 columns of dQ
        const Dropped dropped(arguments.dropout, sizes);
        const Descriptor known_left(warpgroup == 0 ? at.k_tile : at.v_tile);
        const Blocks<128, BY_ROWS> ds_blocks(at.ds_tiles, rank * BLOCK_KEYS + warp_row, lane);
        const u32 p_address = at.p_tile + warp * (P_BYTES / 4) + lane * 16;
        float sum[2][64]; // dV or dK: 64 keys, two times 128 columns
        float s[32];      // S^T or dP^T: 64 keys, 64 queries
        float dq[32];     // 64 queries, 64 columns
        for (int i = 0; i < 64; i++) sum[0][i] = sum[1][i] = 0;

        auto free = [&](u32 barrier) {
            if (lane == 0) barrier_arrive(barrier);
        };
        // S^T or dP^T
        auto multiply_keys = [&](u32 right) {
            const Descriptor a = known_left.opaque_copy(), b(right);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < K_STEPS; i++)
                multiply_tiles<0, 0>(s, a.at(i / 4 * BLOCK_KEYS * 128 + i % 4 * 32),
                                     b.at(i / 4 * QUERIES * 128 + i % 4 * 32), i > 0);
            wgmma_commit();
        };
        // Adds to dV or dK.
        auto multiply_queries = [&](const u32(&left)[4][4], u32 right, bool is_first) {
            const Descriptor b(right, QUERIES * 128);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 4; k++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    multiply_registers<1>(sum[half], left[k], b.at(half * 2 * QUERIES * 128 + k * 2048),
                                          k > 0 || !is_first);
            wgmma_commit();
        };
        // dQ
        auto multiply_ds = [&](int stage) {
            const Descriptor a(at.ds_tiles + stage * DS_TILE_BYTES), mine(at.k_tile + part * BLOCK_KEYS * 128),
                others(at.other_keys + warpgroup * BLOCK_KEYS * 128);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; i++)
                multiply_tiles<1, 1>(dq, a.offset_by(rank * 8192).at(i * 2048), mine.at(i * 2048), i > 0);
#pragma unroll
            for (int i = 0; i < 4; i++)
                multiply_tiles<1, 1>(dq, a.offset_by((rank ^ 1) * 8192).at(i * 2048), others.at(i * 2048), true);
            wgmma_commit();
        };
        auto free_ds = [&](int stage) {
            if (lane == 0) barrier_arrive(at.ds_empty + stage * 8), arrive_there(at.ds_empty + stage * 8 + at.to_other);
        };
        // Adds dQ of the step before to dq_sums when it is its turn, or writes dq, if there are no later keys. For the
        // copy engine, dQ would have to be in shared memory, where only tiles have room for it that others wait for:
        // that was slower. (H200, causal, T 16k: 366 to 418 TFLOP/s instead of 463.)
        int delivered = 0;
        auto deliver_dq = [&] {
            const int stage = delivered % 2;
            barrier_wait(at.turn_has_come + stage * 8, delivered++ / 2);
            const int index = at.turns[stage].index, deed = at.turns[stage].deed;
            float* sums = arguments.dq_sums + (long long)index * DQ_TILE + part * DQ_PART;
            float* my_sums = sums + warp * DQ_WARP + lane * 4;
            if (deed == WRITE) {
#pragma unroll
                for (int n = 0; n < 8; n++)
                    __stcg(reinterpret_cast<float4*>(my_sums + n * 128),
                           make_float4(dq[n * 4], dq[n * 4 + 1], dq[n * 4 + 2], dq[n * 4 + 3]));
            } else if (deed == ADD) {
#pragma unroll
                for (int n = 0; n < 8; n++) {
                    const float x[4] = {dq[n * 4], dq[n * 4 + 1], dq[n * 4 + 2], dq[n * 4 + 3]};
                    add_to(my_sums + n * 128, x);
                }
            } else {
                if (deed == FINISH) add_sums(dq, sums, thread);
                write_dq(arguments, dq, index, query_tiles, part, thread);
            }
            __syncwarp();
            free(at.turn_is_over + stage * 8);
        };

        int step = 0; // over all work items
        for (int turn = 0;; turn++) {
            barrier_wait(at.keys_full, turn);
            const int number = *at.number;
            if (number >= works) break;
            Work work(sizes, number, query_tiles, key_tiles);
            work.end_at(*at.end, sizes.heads / sizes.kv_heads);
            if (KEY_MASK) work.steps = *at.steps;
            const int steps = work.steps;
            // In each step, no matmul is in flight at its begin and end. Those of the last step's next one, and of the
            // first step's previous one, are of anything, and unused.
            if (warpgroup == 0) {
                const FirstKeys first_keys(arguments.first_keys, sizes, work.first_head / sizes.heads);
                Place place = work.first_place(arguments.masks, sizes, query_tiles);
                auto exponentiate_step = [&](int stage) {
                    exponentiate(s, at.statistics_tiles + stage * STATISTICS_BYTES, arguments, dropped, first_keys,
                                 place, work.key_tile, work.key_tile * KEYS + rank * BLOCK_KEYS, warp_row, lane, [] {});
                    __syncwarp();
                    free(at.queries_empty + stage * 8);
                };
                barrier_wait(at.queries_full + step % 2 * 8, step / 2);
                multiply_keys(at.q_tiles + step % 2 * QUERY_TILE_BYTES);
                wgmma_wait<0>();
                exponentiate_step(step % 2);
#pragma unroll 1
                for (int i = 0; i < steps; i++, step++) {
                    const int next_stage = (step + 1) % 2, last = i == steps - 1;
                    u32 p[4][4];
                    barrier_wait(at.p_empty + warp * 8, step - 1);
#pragma unroll
                    for (int n = 0; n < 8; n++)
                        write_shared(p_address + n * 512, s[n * 4], s[n * 4 + 1], s[n * 4 + 2], s[n * 4 + 3]);
                    __syncwarp();
                    free(at.p_full + warp * 8);
                    round_probabilities(p, s);
                    barrier_wait(at.d_out_full, step);
                    multiply_queries(p, at.d_out_tile, i == 0);
                    if (i > 0) barrier_wait(at.ds_full + next_stage * 8, (step - 1) / 2);
                    multiply_ds(next_stage);
                    if (!last) barrier_wait(at.queries_full + next_stage * 8, (step + 1) / 2);
                    multiply_keys(at.q_tiles + next_stage * QUERY_TILE_BYTES);
                    wgmma_wait<2>();
                    free(at.d_out_empty);
                    wgmma_wait<1>();
                    if (i > 0) free_ds(next_stage), deliver_dq();
                    wgmma_wait<0>();
                    if (!last) {
                        work.step(place, arguments.masks, sizes, query_tiles);
                        exponentiate_step(next_stage);
                    }
                }
            } else {
                barrier_wait(at.d_out_full, step);
                multiply_keys(at.d_out_tile);
                wgmma_wait<0>();
                free(at.d_out_empty);
#pragma unroll 1
                for (int i = 0; i < steps; i++, step++) {
                    const int stage = step % 2, last = i == steps - 1;
                    const u32 statistics = at.statistics_tiles + stage * STATISTICS_BYTES;
                    u32 ds[4][4];
                    float delta[16], lse[16];
                    barrier_wait(at.queries_full + stage * 8, step / 2);
                    read_statistics(delta, statistics, QUERIES, lane);
                    if (SOFT_CAP) read_statistics(lse, statistics, 0, lane);
                    barrier_wait(at.p_full + warp * 8, step);
#pragma unroll
                    for (int n = 0; n < 8; n++) {
                        const float4 p = read_shared_floats(p_address + n * 512);
                        ds[n / 2][n % 2 * 2] =
                            differentiate(p.x, p.y, s[n * 4], s[n * 4 + 1], delta + n * 2, lse + n * 2, arguments);
                        ds[n / 2][n % 2 * 2 + 1] =
                            differentiate(p.z, p.w, s[n * 4 + 2], s[n * 4 + 3], delta + n * 2, lse + n * 2, arguments);
                    }
                    __syncwarp();
                    free(at.p_empty + warp * 8);
                    barrier_wait_for_cluster(at.ds_empty + stage * 8, step / 2 - 1);
#pragma unroll
                    for (int k = 0; k < 4; k++) store_matrices(ds_blocks.at(0, k * 16, stage * DS_TILE_BYTES), ds[k]);
                    stores_fence();
                    __syncwarp();
                    if (lane == 0) {
                        const u32 mine = at.ds_tiles + stage * DS_TILE_BYTES + (rank * BLOCK_KEYS + warp_row) * 128,
                                  full = at.ds_full + stage * 8;
                        copy_there(mine + at.to_other, mine, 2048, full + at.to_other);
                        barrier_expect(full, 2048);
                    }
                    __syncwarp();
                    multiply_queries(ds, at.q_tiles + stage * QUERY_TILE_BYTES, i == 0);
                    if (i > 0) barrier_wait(at.ds_full + (stage ^ 1) * 8, (step - 1) / 2);
                    multiply_ds(stage ^ 1);
                    wgmma_wait<1>();
                    free(at.queries_empty + stage * 8);
                    if (!last) barrier_wait(at.d_out_full, step + 1);
                    multiply_keys(at.d_out_tile);
                    wgmma_wait<1>();
                    if (i > 0) free_ds(stage ^ 1), deliver_dq();
                    wgmma_wait<0>();
                    if (!last) free(at.d_out_empty);
                }
            }
            barrier_wait(at.ds_full + (step - 1) % 2 * 8, (step - 1) / 2);
            multiply_ds((step - 1) % 2);
            wgmma_wait<0>();
            free_ds((step - 1) % 2);
            free(at.keys_empty);
            deliver_dq();

            const int width = warpgroup == 1 ? sizes.head_dim : sizes.value_dim;
            const float factor = warpgroup == 1 ? sizes.scale : DROPOUT ? arguments.dropout.scale : 1;
            const float factors[2] = {factor, factor};
            const Strides& strides = warpgroup == 1 ? arguments.dk_strides : arguments.dv_strides;
            const int key = work.key_tile * KEYS + rank * BLOCK_KEYS + warp_row + lane / 4;
            const int batch = work.first_head / sizes.heads,
                      head = work.first_head % sizes.heads / (sizes.heads / sizes.kv_heads);
            E* x = (warpgroup == 1 ? arguments.dk : arguments.dv) + batch * strides.batch + head * strides.head +
                   key * strides.row;
#pragma unroll
            for (int half = 0; half < 2; half++)
                write_rows<128>(sum[half], factors, x, strides.row, sizes.keys - key, half * 128, width, lane);
        }
    }
    cluster_sync(); // the other block may still arrive at this one's barriers
}
