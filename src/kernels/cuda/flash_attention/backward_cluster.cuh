// Parts of backward_cluster.cu without matmuls: the shared memory of a block, the thread that copies tiles in, and the
// threads that keep the turns of dq_sums. Included between backward_works.cuh and backward_cluster.cu.

constexpr int BLOCK_KEYS = KEYS / 2; // of each block of a cluster
constexpr int KEY_TILE_BYTES = BLOCK_KEYS * ROW_BYTES, OTHER_KEYS_BYTES = KEY_TILE_BYTES / 2;
constexpr int P_BYTES = BLOCK_KEYS * QUERIES * 4;
static_assert(KEYS == 128 && QUERIES == 64 && HEAD_DIM == 256, "S and dP of 64 x 64, dQ of 64 x 64 for each group");

// What a group does with its part of dQ.
enum Deed { WRITE, ADD, FINISH_ALONE, FINISH };
// The turn of a step.
struct Turn {
    int index, deed; // the tile of queries, what to do with its dQ
    int next;        // whose turn is next; 0 if the tile is finished, -1 after the last step
    int unused;
};

// Shared memory: tiles at multiples of 1024 bytes, then barriers. There are two of the barriers of queries, dS and
// turns (one per stage), four of those of P (one per warp), one of the others.
struct Shared {
    u32 k_tile, other_keys, v_tile, q_tiles, d_out_tile, ds_tiles, p_tile, statistics_tiles;
    u32 keys_full, keys_empty, queries_full, queries_empty, d_out_full, d_out_empty, p_full, p_empty, ds_full, ds_empty;
    u32 turn_has_come, turn_is_over, number_full, number_empty, sent_number;
    u32 to_other; // from an address to that of the cluster's other block
    int* number;  // of the work item
    int* end;     // of its tiles of queries
    int* steps;   // with KEY_MASK, the number of its steps
    Turn* turns;  // that have come, in two stages
    __device__ __forceinline__ Shared(unsigned char* shared, int rank) {
        const u32 start = (u32)__cvta_generic_to_shared(shared);
        to_other = address_in(rank ^ 1, start) - start;
        k_tile = (start + 1023) & ~1023u, other_keys = k_tile + KEY_TILE_BYTES;
        v_tile = other_keys + OTHER_KEYS_BYTES, q_tiles = v_tile + KEY_TILE_BYTES;
        d_out_tile = q_tiles + 2 * QUERY_TILE_BYTES, ds_tiles = d_out_tile + QUERY_TILE_BYTES;
        p_tile = ds_tiles + 2 * DS_TILE_BYTES, statistics_tiles = p_tile + P_BYTES;
        queries_full = statistics_tiles + 2 * STATISTICS_BYTES, queries_empty = queries_full + 16;
        ds_full = queries_empty + 16, ds_empty = ds_full + 16;
        p_full = ds_empty + 16, p_empty = p_full + 32;
        d_out_full = p_empty + 32, d_out_empty = d_out_full + 8;
        keys_full = d_out_empty + 8, keys_empty = keys_full + 8;
        turn_has_come = keys_empty + 8, turn_is_over = turn_has_come + 16;
        number_full = turn_is_over + 16, number_empty = number_full + 8;
        sent_number = number_empty + 8;
        number = reinterpret_cast<int*>(shared + (sent_number + 4 - start)), end = number + 1, steps = end + 1;
        turns = reinterpret_cast<Turn*>(steps + 1);
    }
    // Called by one thread. The counts are the arrivals per phase: the copy engine, threads that copy or keep turns, or
    // warps, 4 of each group.
    __device__ __forceinline__ void make_barriers() const {
        for (int stage = 0; stage < 2; stage++) {
            barrier_make(queries_full + stage * 8, 1), barrier_make(queries_empty + stage * 8, 8);
            barrier_make(ds_full + stage * 8, 4), barrier_make(ds_empty + stage * 8, 8 + 8);
            barrier_make(turn_has_come + stage * 8, 1), barrier_make(turn_is_over + stage * 8, 8 + 1);
        }
        for (int warp = 0; warp < 4; warp++) barrier_make(p_full + warp * 8, 1), barrier_make(p_empty + warp * 8, 1);
        barrier_make(d_out_full, 1), barrier_make(d_out_empty, 8);
        barrier_make(keys_full, 1), barrier_make(keys_empty, 8 + 1);
        barrier_make(number_full, 1), barrier_make(number_empty, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
};

// The number of the work item of turn `turn`, of which block 0 takes a ticket and tells the other block.
__device__ __forceinline__ int next_number(const Shared& at, const BackwardArguments& arguments, int rank, int turn,
                                           int query_tiles, int key_tiles) {
    int number;
    if (rank == 0) {
        const Sizes& sizes = arguments.sizes;
        int* ticket = arguments.turns + 2 * sizes.batch * sizes.heads * query_tiles;
        number = atomicAdd(ticket, 1);
#if KEY_MASK
        // Keys that are hidden from all queries have no steps; flash_backward_finish writes their gradients.
        while (number < key_tiles * sizes.batch * sizes.kv_heads &&
               located(arguments, number, query_tiles, key_tiles).steps == 0)
            number = atomicAdd(ticket, 1);
#endif
        barrier_wait_for_cluster(at.number_empty, turn - 1);
        store_there(at.sent_number + at.to_other, number);
        arrive_there(at.number_full + at.to_other);
    } else {
        barrier_wait_for_cluster(at.number_full, turn);
        asm volatile("ld.shared.s32 %0, [%1];" : "=r"(number) : "r"(at.sent_number) : "memory");
        arrive_there(at.number_empty + at.to_other);
    }
    return number;
}

// Run by one thread: copies the inputs of work items, queries up to one step ahead.
__device__ __forceinline__ void copy_tiles(const Shared& at, const Maps& maps, const BackwardArguments& arguments,
                                           int rank, int query_tiles, int key_tiles) {
    const Sizes& sizes = arguments.sizes;
    const int works = key_tiles * sizes.batch * sizes.kv_heads, group = sizes.heads / sizes.kv_heads;
    int step = 0;
    for (int turn = 0;; turn++) {
        const int number = next_number(at, arguments, rank, turn, query_tiles, key_tiles);
        barrier_wait(at.keys_empty, turn - 1);
        *at.number = number;
        if (number >= works) {
            barrier_arrive(at.keys_full);
            break;
        }
        Work work(sizes, number, query_tiles, key_tiles);
        const int batch = work.first_head / sizes.heads, first_head = work.first_head - batch * sizes.heads;
        if (FIRST_KEYS) {
            const FirstKeys first_keys(arguments.first_keys, sizes, batch);
            *at.end = end_of_queries(first_keys, work.key_tile, work.first_tile, query_tiles);
            work.end_at(*at.end, group);
        }
#if KEY_MASK
        work.steps = *at.steps = work.visits(sizes, query_tiles).count(arguments.masks, sizes);
#endif
        const int my_keys = work.key_tile * KEYS + rank * BLOCK_KEYS,
                  other_keys = work.key_tile * KEYS + (rank ^ 1) * BLOCK_KEYS;
        barrier_expect(at.keys_full, 2 * KEY_TILE_BYTES + OTHER_KEYS_BYTES);
        copy_boxes<BLOCK_KEYS>(at.k_tile, maps.k, at.keys_full, my_keys, first_head / group, batch);
        copy_boxes<BLOCK_KEYS>(at.v_tile, maps.v, at.keys_full, my_keys, first_head / group, batch);
        copy_boxes<BLOCK_KEYS, 2>(at.other_keys, maps.k, at.keys_full, other_keys, first_head / group, batch, 2 * rank);
        Place place = work.first_place(arguments.masks, sizes, query_tiles);
#pragma unroll 1
        for (int i = 0; i < work.steps; i++, step++) {
            const int stage = step % 2, head = place.head - batch * sizes.heads, first_query = place.tile * QUERIES;
            const u32 full = at.queries_full + stage * 8;
            barrier_wait(at.queries_empty + stage * 8, step / 2 - 1);
            barrier_expect(full, QUERY_TILE_BYTES + STATISTICS_BYTES);
            copy_boxes<QUERIES>(at.q_tiles + stage * QUERY_TILE_BYTES, maps.q, full, first_query, head, batch);
            copy_bytes(at.statistics_tiles + stage * STATISTICS_BYTES,
                       arguments.statistics + 2ll * QUERIES * (place.head * query_tiles + place.tile), STATISTICS_BYTES,
                       full);
            barrier_wait(at.d_out_empty, step - 1);
            barrier_expect(at.d_out_full, QUERY_TILE_BYTES);
            copy_boxes<QUERIES>(at.d_out_tile, maps.d_out, at.d_out_full, first_query, head, batch);
            if (i + 1 < work.steps) work.step(place, arguments.masks, sizes, query_tiles);
        }
    }
}

// Run by one thread: for each step waits until it is this item's turn to add to dQ of the step's tile, and tells the
// groups so.
__device__ __forceinline__ void await_turns(const Shared& at, const BackwardArguments& arguments, int rank,
                                            int query_tiles, int key_tiles) {
    const Sizes& sizes = arguments.sizes;
    const int works = key_tiles * sizes.batch * sizes.kv_heads, group = sizes.heads / sizes.kv_heads;
    int step = 0;
    auto tell = [&](int index, int deed, int next) {
        at.turns[step % 2] = {index, deed, next, 0};
        barrier_arrive(at.turn_has_come + step % 2 * 8);
    };
    for (int turn = 0;; turn++) {
        barrier_wait(at.keys_full, turn);
        const int number = *at.number;
        if (number >= works) break;
        Work work(sizes, number, query_tiles, key_tiles);
        work.end_at(*at.end, group);
        if (KEY_MASK) work.steps = *at.steps;
        barrier_arrive(at.keys_empty);
        const FirstKeys first_keys(arguments.first_keys, sizes, work.first_head / sizes.heads);
        Place place = work.first_place(arguments.masks, sizes, query_tiles);
#pragma unroll 1
        for (int i = 0; i < work.steps; i++, step++) {
            const int index = place.head * query_tiles + place.tile;
            const int before = predecessor(first_keys, arguments.masks, sizes, place.head, place.tile, work.key_tile);
            const bool finishes = !KEY_MASK && place.tile < work.own_tiles;
            await_turn(arguments.turns + 2 * index + rank, KEY_MASK ? before + 1 : work.key_tile);
            barrier_wait(at.turn_is_over + step % 2 * 8, step / 2 - 1);
            tell(index,
                 finishes     ? before < 0 ? FINISH_ALONE : FINISH
                 : before < 0 ? WRITE
                              : ADD,
                 finishes ? 0 : work.key_tile + 1);
            if (i + 1 < work.steps) work.step(place, arguments.masks, sizes, query_tiles);
        }
    }
    barrier_wait(at.turn_is_over + step % 2 * 8, step / 2 - 1);
    tell(0, WRITE, -1);
}

// Run by one thread: passes each turn on when both groups have added to dQ.
__device__ __forceinline__ void pass_turns(const Shared& at, const BackwardArguments& arguments, int rank) {
    for (int step = 0;; step++) {
        const int stage = step % 2;
        barrier_wait(at.turn_has_come + stage * 8, step / 2);
        const int index = at.turns[stage].index, next = at.turns[stage].next;
        if (next < 0) break;
        barrier_arrive(at.turn_is_over + stage * 8);
        barrier_wait(at.turn_is_over + stage * 8, step / 2);
        if (next == 0) continue;
        fence();
        write_turn(arguments.turns + 2 * index + rank, next);
    }
}
