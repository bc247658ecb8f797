// Flash attention, forward, with Hopper's instructions (sm_90a), for HEAD_DIM 64, 128 or 256. Included after common.cuh
// and hopper.cuh.
//
// Computes the same as forward.cu. Inputs are maps of q (boxes of ROWS rows), k and v (boxes of COLUMNS rows).
//
// One warpgroup copies tiles, by one of its threads; GROUPS_OF_ROWS others have 64 queries each. A group issues S = Q
// K^T of the next tile, then O += P V of the current one, and computes the next softmax while the latter runs. Groups
// issue in turn, so that one's softmax overlaps the matmuls of another. Blocks are persistent: each takes its next tile
// of queries by ticket, and issues its first S together with the last O += P V of the tile before.
//
// With KEY_MASK the thread that copies chooses the tiles of keys, those with a visible pair, and passes on their
// numbers.
//
// grid  min(multiprocessors, ceil(Tq / ROWS) * B * H)        block  128 * (GROUPS_OF_ROWS + 1)
// dynamic shared memory  (Q_STAGES * ROWS + 4 COLUMNS) * HEAD_DIM * 2 + 1024 + 128 bytes

#ifndef GROUPS_OF_ROWS
#define GROUPS_OF_ROWS (HEAD_DIM == 64 ? 3 : 2)
#endif
#ifndef COLUMNS
#define COLUMNS (HEAD_DIM == 256 ? 64 : 128)
#endif

constexpr int WARPGROUPS = GROUPS_OF_ROWS;
constexpr int ROWS = 64 * WARPGROUPS;
constexpr int Q_STAGES = HEAD_DIM == 256 ? 1 : 2;
constexpr int TILE_BYTES = COLUMNS * ROW_BYTES, Q_BYTES = ROWS * ROW_BYTES;
constexpr int K_STEPS = HEAD_DIM / 16;
constexpr int SPAN = HEAD_DIM == 64 ? 64 : 128, SPANS = HEAD_DIM / SPAN; // columns of O per matmul
constexpr int REGISTERS = WARPGROUPS == 3 ? 160 : 240, REGISTERS_TO_COPY = WARPGROUPS == 3 ? 32 : 24;
constexpr float SLACK = 8.0f; // as in forward.cu

struct ForwardHopperArguments {
    Map q_map, k_map, v_map;
    E *out, *rounding_error;
    float* lse;
    int* tickets; // two, zero before and after; concurrent launches need separate ones
    Strides out_strides;
    Sizes sizes;
    const u32* first_keys; // null without FIRST_KEYS
    DropoutArguments dropout;
    MaskArguments masks;
};

// A tile of queries with its tiles of keys.
struct Work {
    int head_in_all, batch, head, kv_head, first_row, rows, tiles;
    // The loop over the tiles of keys is first_tile .. tiles.
#if FIRST_KEYS || KEY_MASK
    int first_tile;
    __device__ __forceinline__ void begin_at(int tile) { first_tile = tile; }
#else
    static constexpr int first_tile = 0;
    __device__ __forceinline__ void begin_at(int) {}
#endif
    Work() = default;
    __device__ __forceinline__ Work(const Sizes& sizes, int number) {
        const int row_tiles = CEIL_DIV(sizes.queries, ROWS);
        int tile;
        locate_ticket(number, sizes.batch * sizes.heads, row_tiles, sizes.heads_at_once, head_in_all, tile);
        first_row = (row_tiles - 1 - tile) * ROWS;
        batch = head_in_all / sizes.heads, head = head_in_all % sizes.heads;
        kv_head = head / (sizes.heads / sizes.kv_heads);
        rows = min(ROWS, sizes.queries - first_row);
        tiles = CEIL_DIV(max(0, min(sizes.keys, first_row + rows + sizes.offset)), COLUMNS);
    }
};

extern "C" __global__ void __launch_bounds__(128 * (WARPGROUPS + 1), 1)
    JOIN(flash_forward_hopper_, ELEMENT)(const __grid_constant__ ForwardHopperArguments arguments) {
    extern __shared__ unsigned char shared[];
    const Sizes& sizes = arguments.sizes;
    const u32 start = (u32)__cvta_generic_to_shared(shared), q_tiles = (start + 1023) & ~1023u;
    const u32 k_tiles = q_tiles + Q_STAGES * Q_BYTES, v_tiles = k_tiles + 2 * TILE_BYTES;
    const u32 q_full = v_tiles + 2 * TILE_BYTES, q_empty = q_full + 16; // two of each
    const u32 k_full = q_empty + 16, k_empty = k_full + 16, v_full = k_empty + 16, v_empty = v_full + 16;
    int* const numbers = reinterpret_cast<int*>(shared + (v_empty + 16 - start)); // of the items whose Q is in a stage
    int* const first_tiles = numbers + 2;                                         // their first tiles
    // With KEY_MASK, the tiles of keys in both stages: 4 tile + 2 (some pairs are hidden) + (it is the item's last).
    volatile int* const visits = first_tiles + 2;
    const int works = CEIL_DIV(sizes.queries, ROWS) * sizes.batch * sizes.heads;

    if (threadIdx.x == 0) {
        for (int stage = 0; stage < 2; stage++) {
            barrier_make(q_full + stage * 8, 1), barrier_make(q_empty + stage * 8, 4 * WARPGROUPS);
            barrier_make(k_full + stage * 8, 1), barrier_make(k_empty + stage * 8, 4 * WARPGROUPS);
            barrier_make(v_full + stage * 8, 1), barrier_make(v_empty + stage * 8, 4 * WARPGROUPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1; // shows the compiler that warps do not diverge
    if (warpgroup < 0) {
        give_registers<REGISTERS_TO_COPY>();
        if (threadIdx.x != 0) return;
        int copied = 0; // tiles so far
        int number = blockIdx.x;
        for (int turn = 0;; turn++) {
            const int next = number < works ? gridDim.x + atomicAdd(arguments.tickets, 1) : works;
            const u32 full = q_full + turn % Q_STAGES * 8;
            barrier_wait(q_empty + turn % Q_STAGES * 8, turn / Q_STAGES - 1);
            numbers[turn % Q_STAGES] = number;
            if (number >= works) {
                barrier_arrive(full);
                break;
            }
            Work work(sizes, number);
            if (FIRST_KEYS) {
                const FirstKeys first_keys(arguments.first_keys, sizes, work.batch);
                work.begin_at(min(first_keys.of(work.first_row) / COLUMNS, work.tiles));
                first_tiles[turn % Q_STAGES] = work.first_tile;
            }
#if KEY_MASK
            const HeadMask mask(arguments.masks, sizes.queries, work.batch, work.head);
            const u32* shown = mask.tiles(work.first_row / ROWS);
            work.begin_at(next_tile_of(shown, FIRST_KEYS ? work.first_tile : 0, work.tiles));
            first_tiles[turn % Q_STAGES] = work.first_tile;
#endif
            if (work.tiles > work.first_tile) {
                barrier_expect(full, Q_BYTES);
                copy_boxes<ROWS>(q_tiles + turn % Q_STAGES * Q_BYTES, arguments.q_map, full, work.first_row, work.head,
                                 work.batch);
            } else {
                barrier_arrive(full);
            }
            int next_tile;
#pragma unroll 1
            for (int tile = work.first_tile; tile < work.tiles; tile = next_tile, copied++) {
                next_tile = tile + 1;
                const int stage = copied % 2, round = copied / 2;
                barrier_wait(k_empty + stage * 8, round - 1);
#if KEY_MASK
                next_tile = next_tile_of(shown, tile + 1, work.tiles);
                visits[stage] = 4 * tile + 2 * mask.is_partial(work.first_row / ROWS, tile) + (next_tile >= work.tiles);
#endif
                barrier_expect(k_full + stage * 8, TILE_BYTES);
                copy_boxes<COLUMNS>(k_tiles + stage * TILE_BYTES, arguments.k_map, k_full + stage * 8, tile * COLUMNS,
                                    work.kv_head, work.batch);
                barrier_wait(v_empty + stage * 8, round - 1);
                barrier_expect(v_full + stage * 8, TILE_BYTES);
                copy_boxes<COLUMNS>(v_tiles + stage * TILE_BYTES, arguments.v_map, v_full + stage * 8, tile * COLUMNS,
                                    work.kv_head, work.batch);
            }
            number = next;
        }
        // The last block without a ticket resets them.
        if (atomicAdd(arguments.tickets + 1, 1) == gridDim.x - 1) arguments.tickets[0] = arguments.tickets[1] = 0;
        return;
    }

    take_registers<REGISTERS>();
    const int lane = threadIdx.x % 32, warp_row = (threadIdx.x / 32 - 4) * 16;
    const int quad_row = lane / 4, quad_column = lane % 4 * 2;
    const float to_log2 = exponent_of_score(sizes), slack = SLACK / to_log2;
    const Dropped dropped(arguments.dropout, sizes);
    const u32 my_q = q_tiles + warpgroup * 64 * 128;
    // Named barriers for the order of issue: one per group, at which the group before arrives.
    const int my_turn = 1 + warpgroup, next_turn = 1 + (warpgroup + 1) % WARPGROUPS;
    if (warpgroup == WARPGROUPS - 1) named_arrive(next_turn, 256);

    auto free = [&](u32 barrier) {
        if (lane == 0) barrier_arrive(barrier);
    };
    int used = 0; // tiles that are finished, except the last of a pending work item
    bool pending = false;
    Work work = {};
    float o[SPANS][SPAN / 2], s[COLUMNS / 2];
    u32 p[COLUMNS / 16][4];
    float largest[2], sum[2];
    int row = 0;   // this thread's row of the pending work item; its other is row + 8
    int visit = 0; // the element of `visits` of this tile, with KEY_MASK
    for (int turn = 0;; turn++) {
        auto issue_scores = [&](int stage) {
            const Descriptor a(my_q + turn % Q_STAGES * Q_BYTES), b(k_tiles + stage * TILE_BYTES);
#pragma unroll
            for (int step = 0; step < K_STEPS; step++)
                multiply_tiles<0, 0>(s, a.at(step / 4 * ROWS * 128 + step % 4 * 32),
                                     b.at(step / 4 * COLUMNS * 128 + step % 4 * 32), step > 0);
        };
        auto issue_values = [&](int stage) {
            const Descriptor b(v_tiles + stage * TILE_BYTES, COLUMNS * 128);
#pragma unroll
            for (int step = 0; step < COLUMNS / 16; step++)
#pragma unroll
                for (int span = 0; span < SPANS; span++)
                    multiply_registers<1>(o[span], p[step], b.at(span * (SPAN / 64) * COLUMNS * 128 + step * 2048),
                                          true);
        };
        // Overwrites the scores of a tile with powers of two, 0 if dropped. `factor` is the factor of O.
        auto softmax = [&](int tile, bool masked, float (&factor)[2], bool& grown) {
            if (SOFT_CAP) cap_scores(s, sizes);
            const auto score_at = [&](int n, int i) -> float& { return s[n * 4 + i]; };
            if (BIAS) {
                const HeadBias bias(arguments.masks, sizes, work.batch, work.head);
                add_bias<COLUMNS / 8>(score_at, bias, row, tile * COLUMNS, lane);
            }
            if (KEY_MASK && visit & 2) {
                const HeadMask mask(arguments.masks, sizes.queries, work.batch, work.head);
                hide_pairs<COLUMNS / 8>(score_at, mask, row, tile * COLUMNS, lane);
            }
            if (masked) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int visible =
                        min(sizes.keys, row + i / 2 * 8 + 1 + sizes.offset) - tile * COLUMNS - quad_column - i % 2;
#pragma unroll
                    for (int n = 0; n < COLUMNS / 8; n++) s[n * 4 + i] = n * 8 < visible ? s[n * 4 + i] : -INFINITE;
                }
#if FIRST_KEYS
                const FirstKeys first_keys(arguments.first_keys, sizes, work.batch);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int hidden = first_keys.of(row + i / 2 * 8) - tile * COLUMNS - quad_column - i % 2;
#pragma unroll
                    for (int n = 0; n < COLUMNS / 8; n++) s[n * 4 + i] = n * 8 >= hidden ? s[n * 4 + i] : -INFINITE;
                }
#endif
            }
            float now[2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float most = fmaxf(largest[half], s[half * 2]), most_too = s[half * 2 + 1];
#pragma unroll
                for (int n = 1; n < COLUMNS / 8; n++)
                    most = fmaxf(most, s[n * 4 + half * 2]), most_too = fmaxf(most_too, s[n * 4 + half * 2 + 1]);
                most = fmaxf(most, most_too);
                most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
                now[half] = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
            }
            grown = __any_sync(~0u, now[0] > largest[0] + slack || now[1] > largest[1] + slack);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float most = grown ? now[half] : largest[half], less = most == -INFINITE ? 0 : most * to_log2;
                factor[half] = grown ? power_of_2(largest[half] * to_log2 - less) : 1;
                largest[half] = most;
                float total = 0;
#pragma unroll
                for (int n = 0; n < COLUMNS / 8; n++) {
                    s[n * 4 + half * 2] = power_of_2(fmaf(s[n * 4 + half * 2], to_log2, -less));
                    s[n * 4 + half * 2 + 1] = power_of_2(fmaf(s[n * 4 + half * 2 + 1], to_log2, -less));
                    total += s[n * 4 + half * 2] + s[n * 4 + half * 2 + 1];
                }
                sum[half] = sum[half] * factor[half] + total;
            }
            if (DROPOUT) {
#pragma unroll
                for (int step = 0; step < COLUMNS / 16; step++) {
                    const u32 stay =
                        dropped.by_queries(work.head_in_all, row - quad_row, tile * COLUMNS + step * 16, lane);
#pragma unroll
                    for (int i = 0; i < 8; i++)
                        if (!(stay >> (8 * (i / 2) + i % 2) & 1)) s[step * 8 + i] = 0;
                }
            }
        };
        auto round_scores = [&] {
#pragma unroll
            for (int step = 0; step < COLUMNS / 16; step++)
#pragma unroll
                for (int i = 0; i < 4; i++) p[step][i] = E::pack(s[step * 8 + i * 2], s[step * 8 + i * 2 + 1]);
        };

        // The first S of the next work item, and the last O += P V of the one before.
        barrier_wait(q_full + turn % Q_STAGES * 8, turn / Q_STAGES);
        const int number = __shfl_sync(~0u, reinterpret_cast<volatile int*>(numbers)[turn % Q_STAGES], 0);
        Work next(sizes, min(number, works - 1));
        if (FIRST_KEYS || KEY_MASK) next.begin_at(reinterpret_cast<volatile int*>(first_tiles)[turn % Q_STAGES]);
        const bool more = number < works && next.tiles > next.first_tile;
        const int next_used = used + pending;
        // Each branch issues and waits for its own matmuls: otherwise the compiler serializes them.
        if (more) {
            barrier_wait(k_full + next_used % 2 * 8, next_used / 2);
            if (KEY_MASK) visit = visits[next_used % 2];
        }
        if (pending) barrier_wait(v_full + used % 2 * 8, used / 2);
        if (more || pending) named_sync(my_turn, 256);
        if (more && pending) {
            wgmma_fence();
            issue_scores(next_used % 2);
            issue_values(used % 2);
            wgmma_commit();
            named_arrive(next_turn, 256);
            wgmma_wait<0>();
        } else if (more) {
            wgmma_fence();
            issue_scores(next_used % 2);
            wgmma_commit();
            named_arrive(next_turn, 256);
            wgmma_wait<0>();
        } else if (pending) {
            wgmma_fence();
            issue_values(used % 2);
            wgmma_commit();
            named_arrive(next_turn, 256);
            wgmma_wait<0>();
        }
        if (more) free(k_empty + next_used % 2 * 8);
        if (pending) free(v_empty + used % 2 * 8);
        used = next_used;

        if (turn > 0) {
            float inverse[2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float total = sum[half];
                total += __shfl_xor_sync(~0u, total, 1);
                total += __shfl_xor_sync(~0u, total, 2);
                inverse[half] = total == 0 ? 0 : (DROPOUT ? arguments.dropout.scale : 1) / total;
                if (row + half * 8 < sizes.queries && quad_column == 0)
                    arguments.lse[(long long)work.head_in_all * sizes.queries + row + half * 8] =
                        total == 0 ? -INFINITE : (largest[half] * to_log2 + logarithm_2(total)) * LN_2;
            }
            const Strides& of_out = arguments.out_strides;
            E* out = arguments.out + work.batch * of_out.batch + work.head * of_out.head + row * of_out.row;
            const int dim = sizes.value_dim;
            E* rest = arguments.rounding_error + ((long long)work.head_in_all * sizes.queries + row) * dim;
#pragma unroll
            for (int span = 0; span < SPANS; span++) {
                write_rows<SPAN>(o[span], inverse, out, of_out.row, sizes.queries - row, span * SPAN, dim, lane);
                if (arguments.rounding_error)
                    write_rows<SPAN>(o[span], inverse, rest, dim, sizes.queries - row, span * SPAN, dim, lane, true);
            }
        }
        if (number >= works) break;

        work = next, pending = work.tiles > work.first_tile;
        row = work.first_row + warp_row + quad_row;
        largest[0] = largest[1] = -INFINITE;
        sum[0] = sum[1] = 0;
#pragma unroll
        for (int span = 0; span < SPANS; span++)
#pragma unroll
            for (int i = 0; i < SPAN / 2; i++) o[span][i] = 0;
        if (pending) {
            // Tiles before `whole` need no mask: all rows of the group attend to their keys. With first keys this
            // begins at `clear`.
            const int whole =
                min(work.tiles, max(0, min(sizes.keys, work.first_row + warpgroup * 64 + 1 + sizes.offset)) / COLUMNS);
            int clear = 0;
            if (FIRST_KEYS) {
                const FirstKeys first_keys(arguments.first_keys, sizes, work.batch);
                clear = CEIL_DIV(min(first_keys.of(work.first_row + warpgroup * 64 + 63), sizes.keys), COLUMNS);
            }
            float factor[2];
            bool grown;
            const int first_tile = work.first_tile;
            softmax(first_tile, FIRST_KEYS || KEY_MASK ? first_tile < clear || first_tile >= whole : whole == 0, factor,
                    grown);
            round_scores();
            auto next_tile = [&](int tile, bool masked) {
                const int stage = used % 2, next_stage = stage ^ 1;
                barrier_wait(k_full + next_stage * 8, (used + 1) / 2);
                if (KEY_MASK) visit = visits[next_stage], tile = visit / 4, masked = tile < clear || tile >= whole;
                named_sync(my_turn, 256);
                wgmma_fence();
                issue_scores(next_stage);
                wgmma_commit();
                barrier_wait(v_full + stage * 8, used / 2);
                wgmma_fence();
                issue_values(stage);
                wgmma_commit();
                named_arrive(next_turn, 256);
                wgmma_wait<1>();
                free(k_empty + next_stage * 8);
                softmax(tile, masked, factor, grown);
                wgmma_wait<0>();
                free(v_empty + stage * 8);
                if (grown) {
#pragma unroll
                    for (int span = 0; span < SPANS; span++)
#pragma unroll
                        for (int i = 0; i < SPAN / 2; i++) o[span][i] *= factor[i / 2 % 2];
                }
                round_scores();
                used++;
            };
            int tile = first_tile + 1;
            if (KEY_MASK)
                while (!(visit & 1)) next_tile(0, false);
            else if (!FIRST_KEYS)
                for (; tile < whole; tile++) next_tile(tile, false);
            for (; !KEY_MASK && tile < work.tiles; tile++)
                next_tile(tile, !FIRST_KEYS || tile < clear || tile >= whole);
        }
        free(q_empty + turn % Q_STAGES * 8);
    }
}
