// Parts of backward_hopper.cu without matmuls: the shared memory of a block, the warp that copies tiles in,
// and the warps that add dQ to dq_sums. Included between backward_works.cuh and backward_hopper.cu.

constexpr int KEY_TILE_BYTES = KEYS * ROW_BYTES;
static_assert(KEYS == 128 && QUERIES * HEAD_DIM == 64 * 128 && (HEAD_DIM == 64 || HEAD_DIM == 128),
              "one dQ of 64 x 64 for each group");

// One per group, except ORDER.
enum Named { TURN_HAS_COME = 1, TURN_IS_TAKEN = 3, ORDER = 5 };

// Shared memory: tiles at multiples of 1024 bytes, then barriers. There are two of each barrier (per stage or group),
// except for V.
struct Shared {
    u32 k_tiles, v_tile, q_tiles, d_out_tiles, ds_tiles, dq_tile, statistics_tiles;
    u32 keys_full, keys_empty, queries_full, queries_empty, ds_full, ds_empty, dq_full, dq_empty, v_full, v_empty;
    int* numbers; // of the work items whose keys have arrived
    int* ends;    // the ends of their tiles of queries
    int* steps;   // with KEY_MASK, the numbers of their steps
    __device__ __forceinline__ Shared(unsigned char* shared) {
        const u32 start = (u32)__cvta_generic_to_shared(shared);
        k_tiles = (start + 1023) & ~1023u, v_tile = k_tiles + 2 * KEY_TILE_BYTES;
        q_tiles = v_tile + KEY_TILE_BYTES, d_out_tiles = q_tiles + 2 * QUERY_TILE_BYTES;
        ds_tiles = d_out_tiles + 2 * QUERY_TILE_BYTES, dq_tile = ds_tiles + 2 * DS_TILE_BYTES;
        statistics_tiles = dq_tile + DQ_TILE * 4;
        keys_full = statistics_tiles + 2 * STATISTICS_BYTES, keys_empty = keys_full + 16;
        queries_full = keys_empty + 16, queries_empty = queries_full + 16;
        ds_full = queries_empty + 16, ds_empty = ds_full + 16;
        dq_full = ds_empty + 16, dq_empty = dq_full + 16;
        v_full = dq_empty + 16, v_empty = v_full + 8;
        numbers = reinterpret_cast<int*>(shared + (v_empty + 8 - start)), ends = numbers + 2, steps = ends + 2;
    }
    // Called by one thread. The counts are the arrivals per phase: the copy engine, or warps: 8 that multiply, 4 of a
    // group, 2 that add.
    __device__ __forceinline__ void make_barriers() const {
        for (int stage = 0; stage < 2; stage++) {
            barrier_make(keys_full + stage * 8, 1), barrier_make(keys_empty + stage * 8, 8 + 2);
            barrier_make(queries_full + stage * 8, 1), barrier_make(queries_empty + stage * 8, 8);
            barrier_make(ds_full + stage * 8, 8), barrier_make(ds_empty + stage * 8, 8);
            barrier_make(dq_full + stage * 8, 4), barrier_make(dq_empty + stage * 8, 1);
        }
        barrier_make(v_full, 1), barrier_make(v_empty, 8);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
};

// Run by one thread: takes work items by ticket and copies their inputs: keys one item ahead, queries one step ahead.
__device__ __forceinline__ void copy_tiles(const Shared& at, const Maps& maps, const BackwardArguments& arguments,
                                           int query_tiles, int key_tiles) {
    const Sizes& sizes = arguments.sizes;
    const int works = key_tiles * sizes.batch * sizes.kv_heads, group = sizes.heads / sizes.kv_heads;
    int step = 0;
    for (int turn = 0;; turn++) {
        const u32 full = at.keys_full + turn % 2 * 8;
        barrier_wait(at.keys_empty + turn % 2 * 8, turn / 2 - 1);
        int number = atomicAdd(arguments.turns + 2 * sizes.batch * sizes.heads * query_tiles, 1);
#if KEY_MASK
        // Keys that are hidden from all queries have no steps; flash_backward_finish writes their gradients.
        while (number < works) {
            at.steps[turn % 2] = located(arguments, number, query_tiles, key_tiles).steps;
            if (at.steps[turn % 2] > 0) break;
            number = atomicAdd(arguments.turns + 2 * sizes.batch * sizes.heads * query_tiles, 1);
        }
#endif
        at.numbers[turn % 2] = number;
        if (number >= works) {
            barrier_arrive(full);
            break;
        }
        Work work(sizes, number, query_tiles, key_tiles);
        const int batch = work.first_head / sizes.heads, first_head = work.first_head - batch * sizes.heads;
        if (FIRST_KEYS) {
            const FirstKeys first_keys(arguments.first_keys, sizes, batch);
            at.ends[turn % 2] = end_of_queries(first_keys, work.key_tile, work.first_tile, query_tiles);
            work.end_at(at.ends[turn % 2], group);
        }
        barrier_expect(full, KEY_TILE_BYTES);
        copy_boxes<KEYS>(at.k_tiles + turn % 2 * KEY_TILE_BYTES, maps.k, full, work.key_tile * KEYS, first_head / group,
                         batch);
        auto copy_step = [&](int head, int tile, bool is_first) {
            const int stage = step % 2;
            const u32 queries = at.queries_full + stage * 8;
            barrier_wait(at.queries_empty + stage * 8, step / 2 - 1);
            barrier_expect(queries, 2 * QUERY_TILE_BYTES + STATISTICS_BYTES);
            copy_boxes<QUERIES>(at.q_tiles + stage * QUERY_TILE_BYTES, maps.q, queries, tile * QUERIES, head, batch);
            copy_boxes<QUERIES>(at.d_out_tiles + stage * QUERY_TILE_BYTES, maps.d_out, queries, tile * QUERIES, head,
                                batch);
            copy_bytes(at.statistics_tiles + stage * STATISTICS_BYTES,
                       arguments.statistics + 2ll * QUERIES * ((batch * sizes.heads + head) * query_tiles + tile),
                       STATISTICS_BYTES, queries);
            if (is_first) {
                barrier_wait(at.v_empty, turn - 1);
                barrier_expect(at.v_full, KEY_TILE_BYTES);
                copy_boxes<KEYS>(at.v_tile, maps.v, at.v_full, work.key_tile * KEYS, first_head / group, batch);
            }
        };
#if KEY_MASK
        const MaskArguments& masks = arguments.masks;
        const Visits visits = work.visits(sizes, query_tiles);
        Place place = work.first_place(masks, sizes, query_tiles);
        const int steps = at.steps[turn % 2];
#pragma unroll 1
        for (int i = 0; i < steps; i++, step++) {
            copy_step(place.head - batch * sizes.heads, place.tile, i == 0);
            if (i + 1 < steps) place.seek_back(place.tile - 1, visits, masks, sizes);
        }
#else
        for (int head = first_head; head < first_head + group; head++)
#pragma unroll 1
            for (int tile = END_TILE(work) - 1; tile >= work.first_tile; tile--, step++)
                copy_step(head, tile, head == first_head && tile == END_TILE(work) - 1);
#endif
    }
}

// Run by one warp per group: adds the group's half of dQ, step by step, to dq_sums when it is this item's turn. For the
// last keys of a tile it lets the group add instead.
__device__ __forceinline__ void add_in_turn(const Shared& at, const BackwardArguments& arguments, int half, int lane,
                                            int query_tiles, int key_tiles) {
    const Sizes& sizes = arguments.sizes;
    const int works = key_tiles * sizes.batch * sizes.kv_heads, group = sizes.heads / sizes.kv_heads;
    const u32 tile_to_add = at.dq_tile + half * DQ_TILE * 2;
    int added = 0; // tiles that were added to dq_sums
    for (int turn = 0;; turn++) {
        barrier_wait(at.keys_full + turn % 2 * 8, turn / 2);
        const int number = at.numbers[turn % 2], end = FIRST_KEYS ? at.ends[turn % 2] : query_tiles;
        const int steps = KEY_MASK ? at.steps[turn % 2] : 0;
        __syncwarp();
        if (lane == 0) barrier_arrive(at.keys_empty + turn % 2 * 8);
        if (number >= works) break;
        Work work(sizes, number, query_tiles, key_tiles);
        work.end_at(end, group);
        const FirstKeys first_keys(arguments.first_keys, sizes, work.first_head / sizes.heads);
        if (KEY_MASK) {
            if (lane == 0) {
                const MaskArguments& masks = arguments.masks;
                const Visits visits = work.visits(sizes, query_tiles);
                Place place = work.first_place(masks, sizes, query_tiles);
#pragma unroll 1
                for (int i = 0; i < steps; i++, added++) {
                    const int before = predecessor(first_keys, masks, sizes, place.head, place.tile, work.key_tile);
                    const int number = place.head * query_tiles + place.tile;
                    int* turns = arguments.turns + 2 * number + half;
                    float* sums = arguments.dq_sums + (long long)number * DQ_TILE + half * (DQ_TILE / 2);
                    await_turn(turns, before + 1);
                    barrier_wait(at.dq_full + half * 8, added);
                    if (before < 0) write_bytes(sums, tile_to_add, DQ_TILE * 2);
                    else add_floats(sums, tile_to_add, DQ_TILE * 2);
                    if (i + 1 < steps) place.seek_back(place.tile - 1, visits, masks, sizes);
                    writes_have_read();
                    barrier_arrive(at.dq_empty + half * 8);
                    writes_are_done();
                    fence();
                    write_turn(turns, work.key_tile + 1);
                }
            }
            __syncwarp();
            continue;
        }
        for (int head = work.first_head; head < work.first_head + group; head++) {
            const int last = head * query_tiles + END_TILE(work) - 1;
            if (lane == 0) {
                int* turns = arguments.turns + 2 * last + half;
                float* sums = arguments.dq_sums + (long long)last * DQ_TILE + half * (DQ_TILE / 2);
                int there = -1; // the turn of this tile of queries, if it was read before
#pragma unroll 1
                for (int tile = END_TILE(work) - 1; tile >= work.own_tiles;
                     tile--, turns -= 2, sums -= DQ_TILE, added++) {
                    const bool is_first = work.key_tile == first_to_meet(first_keys, sizes, tile);
                    if (there < work.key_tile) await_turn(turns, work.key_tile);
                    else asm volatile("fence.proxy.async.global;" ::: "memory");
                    barrier_wait(at.dq_full + half * 8, added);
                    if (is_first) write_bytes(sums, tile_to_add, DQ_TILE * 2);
                    else add_floats(sums, tile_to_add, DQ_TILE * 2);
                    // Reads the next tile's turn early: it is known when this sum has arrived. The fence below orders
                    // it before the next sum.
                    there = tile > work.own_tiles ? read_turn(turns - 2) : -1;
                    writes_have_read();
                    barrier_arrive(at.dq_empty + half * 8);
                    writes_are_done();
                    fence();
                    write_turn(turns, work.key_tile + 1);
                }
            }
            __syncwarp();
#pragma unroll 1
            for (int tile = work.own_tiles - 1; tile >= work.first_tile; tile--) {
                if (lane == 0) await_turn(arguments.turns + 2 * (head * query_tiles + tile) + half, work.key_tile);
                __syncwarp();
                named_arrive(TURN_HAS_COME + half, 160);
                named_sync(TURN_IS_TAKEN + half, 160);
            }
        }
    }
}
