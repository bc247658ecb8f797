// Parts of backward_hopper.cu and backward_cluster.cu: work items, the probabilities of a tile, dq. Included after
// backward.cuh.

constexpr int HALVES = QUERIES / 64; // of a tile of queries: P and dS are computed for one half at a time
constexpr int K_STEPS = HEAD_DIM / 16;
constexpr int QUERY_TILE_BYTES = QUERIES * ROW_BYTES;
constexpr int DS_TILE_BYTES = KEYS * QUERIES * 2, STATISTICS_BYTES = QUERIES * 8;
constexpr int DQ_TILE = QUERIES * HEAD_DIM;
constexpr int DQ_PART = 64 * 64, DQ_PARTS = DQ_TILE / DQ_PART; // dQ of one group, in the order of its registers
constexpr int DQ_WARP = DQ_PART / 4;

struct Maps {
    Map q, k, v, d_out;
};
// A tile of keys of one head, with the tiles of queries that it meets: from its end down to first_tile, for each of the
// heads first_head .. first_head + group.
struct Work {
    int key_tile, first_tile, first_head, steps;
    int own_tiles; // the first of these tiles, which have no later keys: this item finishes their dq
    __device__ __forceinline__ Work(const Sizes& sizes, int number, int tiles, int key_tiles) {
        // The first keys come first: with a causal mask most queries attend to them.
        int kv_head;
        locate_ticket(number, sizes.batch * sizes.kv_heads, key_tiles, sizes.heads_at_once, kv_head, key_tile);
        const int group = sizes.heads / sizes.kv_heads;
        first_head = kv_head * group;
        // Keys that no query attends to visit the last tile in vain.
        first_tile = min(max(0, key_tile * KEYS - sizes.offset) / QUERIES, tiles - 1);
        steps = (tiles - first_tile) * group;
        own_tiles =
            key_tile == key_tiles - 1 ? tiles : min(max(0, (key_tile + 1) * KEYS - sizes.offset) / QUERIES, tiles - 1);
#if KEY_MASK
        // Only visible tiles, in all of which flash_backward_finish finishes dq.
        first_tile = max(0, key_tile * KEYS - sizes.offset) / QUERIES, own_tiles = 0;
#endif
    }
    // Sets the end of the tiles of queries, from end_of_queries. Without first keys it is fixed. (KEYS >= QUERIES, so a
    // shortened item still finishes the dq of its remaining own tiles.)
#if FIRST_KEYS
    int end_tile;
    __device__ __forceinline__ void end_at(int tile, int group) {
        end_tile = tile, own_tiles = min(own_tiles, tile);
        steps = (tile - first_tile) * group;
    }
#define END_TILE(work) work.end_tile
#else
    __device__ __forceinline__ void end_at(int, int) {}
#define END_TILE(work) query_tiles
#endif
    __device__ __forceinline__ Visits visits(const Sizes& sizes, int query_tiles) const {
        return {key_tile, first_head, sizes.heads / sizes.kv_heads, first_tile, END_TILE((*this))};
    }
    // The first place.
    __device__ __forceinline__ Place first_place(const MaskArguments& masks, const Sizes& sizes,
                                                 int query_tiles) const {
        Place place = {first_head, END_TILE((*this)) - 1};
        if (KEY_MASK) place.seek_back(place.tile, visits(sizes, query_tiles), masks, sizes);
        return place;
    }
    // Moves to the next place, if there is one.
    __device__ __forceinline__ void step(Place& place, const MaskArguments& masks, const Sizes& sizes,
                                         int query_tiles) const {
        if (KEY_MASK) place.seek_back(place.tile - 1, visits(sizes, query_tiles), masks, sizes);
        else if (--place.tile < first_tile) place.tile = END_TILE((*this)) - 1, place.head++;
    }
};
// Waits until all tiles of keys before `mine` have added their sums.
__device__ __forceinline__ void await_turn(const int* turn, int mine) {
    int value;
    do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(turn) : "memory");
    while (value < mine);
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

#if KEY_MASK
// A work item with its end and its number of steps.
__device__ __forceinline__ Work located(const BackwardArguments& arguments, int number, int query_tiles,
                                        int key_tiles) {
    const Sizes& sizes = arguments.sizes;
    Work work(sizes, number, query_tiles, key_tiles);
    if (FIRST_KEYS) {
        const FirstKeys first_keys(arguments.first_keys, sizes, work.first_head / sizes.heads);
        work.end_at(end_of_queries(first_keys, work.key_tile, work.first_tile, query_tiles),
                    sizes.heads / sizes.kv_heads);
    }
    work.steps = work.visits(sizes, query_tiles).count(arguments.masks, sizes);
    return work;
}
#endif

// ---- elements of S^T and dP^T: 64 keys and QUERIES queries per warpgroup, of which a thread has two keys, and two
// queries in each eight

// Reads lse or delta of this thread's queries among 64: two of the columns 8 n .. 8 n + 7, for each n.
__device__ __forceinline__ void read_statistics(float (&of_queries)[16], u32 statistics, int first, int lane) {
#pragma unroll
    for (int n = 0; n < 16; n += 4) {
        const float4 x = read_shared_floats(statistics + (first + lane % 4 * 4) * 4 + n * 16);
        of_queries[n] = x.x, of_queries[n + 1] = x.y, of_queries[n + 2] = x.z, of_queries[n + 3] = x.w;
    }
}

// Overwrites S with P, of the keys from `first_key` on. Dropped elements are negated. Calls `wait` before it reads S.
template <typename WAIT>
__device__ __forceinline__ void exponentiate(float (&s)[QUERIES / 2], u32 statistics,
                                             const BackwardArguments& arguments, const Dropped& dropped,
                                             const FirstKeys& first_keys, const Place& place, int key_tile,
                                             int first_key, int warp_row, int lane, WAIT wait) {
    const Sizes& sizes = arguments.sizes;
    const MaskArguments& masks = arguments.masks;
    const int head = place.head, tile = place.tile;
    const float to_log2 = exponent_of_score(sizes);
    const int quad_row = lane / 4, quad_column = lane % 4 * 2;
    float lse[16];
    read_statistics(lse, statistics, 0, lane);
#if FIRST_KEYS
    const int latest_first = first_keys.of(tile * QUERIES + QUERIES - 1);
#endif
    const int my_key = first_key + warp_row + quad_row;
#if KEY_MASK
    const HeadMask mask(masks, sizes.keys, head / sizes.heads, head % sizes.heads);
    const bool partial = mask.is_partial(key_tile, tile);
#endif
    wait();
    if (SOFT_CAP) cap_scores(s, sizes);
    if (BIAS) {
        static_assert(!BIAS || !SOFT_CAP, "the cap's slope is taken from P, which has no bias");
        const HeadBias bias(masks, sizes, head / sizes.heads, head % sizes.heads);
        add_bias_by_keys<QUERIES / 8>([&](int n, int i) -> float& { return s[n * 4 + i]; }, bias, tile* QUERIES,
                                      first_key + warp_row, lane);
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
        if (half > 0) read_statistics(lse, statistics, half * 64, lane);
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
}

// The elements of dS of two queries from those of P and dP.
__device__ __forceinline__ u32 differentiate(float p0, float p1, float dp0, float dp1, const float* delta,
                                             const float* lse, const BackwardArguments& arguments) {
    if (DROPOUT) {
        dp0 = p0 < 0 ? 0 : dp0 * arguments.dropout.scale;
        dp1 = p1 < 0 ? 0 : dp1 * arguments.dropout.scale;
        p0 = fabsf(p0), p1 = fabsf(p1);
    }
    float ds0 = p0 * (dp0 - delta[0]), ds1 = p1 * (dp1 - delta[1]);
    if (SOFT_CAP) {
        ds0 *= cap_slope(score_of(p0, lse[0], arguments.sizes));
        ds1 *= cap_slope(score_of(p1, lse[1], arguments.sizes));
    }
    return E::pack(ds0, ds1);
}

// Rounds P, without dropped elements, to left operands of 16 queries each.
__device__ __forceinline__ void round_probabilities(u32 (&p)[4][4], const float* s) {
#pragma unroll
    for (int k = 0; k < 16; k++) {
        const float p0 = s[k * 2], p1 = s[k * 2 + 1];
        p[k / 4][k % 4] = E::pack(DROPOUT && p0 < 0 ? 0 : p0, DROPOUT && p1 < 0 ? 0 : p1);
    }
}

// ---- dq: a part of a tile has 64 x 64 elements, of which each of 128 threads has 32

// Stores a warp's elements of a part, in the order of dq_sums.
__device__ __forceinline__ void store_part(u32 address, const float (&dq)[32], int lane) {
#pragma unroll
    for (int n = 0; n < 8; n++)
        write_shared(address + n * 512 + lane * 16, dq[n * 4], dq[n * 4 + 1], dq[n * 4 + 2], dq[n * 4 + 3]);
}

// Adds the sum of dq over other keys.
__device__ __forceinline__ void add_sums(float (&dq)[32], const float* sums, int thread) {
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const float4 x =
            __ldcg(reinterpret_cast<const float4*>(sums + thread / 32 * DQ_WARP + n * 128 + thread % 32 * 4));
        dq[n * 4] += x.x, dq[n * 4 + 1] += x.y, dq[n * 4 + 2] += x.z, dq[n * 4 + 3] += x.w;
    }
}

// Writes a part of dq of a tile.
__device__ __forceinline__ void write_dq(const BackwardArguments& arguments, const float (&dq)[32], int index,
                                         int query_tiles, int part, int thread) {
    const Sizes& sizes = arguments.sizes;
    const float scaled[2] = {sizes.scale, sizes.scale};
    const Strides& of_dq = arguments.dq_strides;
    const int head = index / query_tiles, lane = thread % 32,
              query = index % query_tiles * QUERIES + (HEAD_DIM == 64 ? part * 64 : 0) + thread / 32 * 16 + lane / 4;
    write_rows<64>(
        dq, scaled,
        arguments.dq + head / sizes.heads * of_dq.batch + head % sizes.heads * of_dq.head + query * of_dq.row,
        of_dq.row, sizes.queries - query, HEAD_DIM == 64 ? 0 : part * 64, sizes.head_dim, lane);
}

#if KEY_MASK
extern "C" __global__ void __launch_bounds__(256)
    JOIN(flash_backward_finish_, ELEMENT)(const __grid_constant__ BackwardArguments arguments) {
    const Sizes& sizes = arguments.sizes;
    const int query_tiles = CEIL_DIV(sizes.queries, QUERIES), key_tiles = CEIL_DIV(sizes.keys, KEYS);
    const int dq_tiles = query_tiles * sizes.batch * sizes.heads, index = blockIdx.x;
    if (index < dq_tiles) {
        const FirstKeys first_keys(arguments.first_keys, sizes, index / query_tiles / sizes.heads);
        for (int part = threadIdx.x / 128; part < DQ_PARTS; part += 2) {
            float dq[32] = {};
            // No block has visited queries without keys.
            if (arguments.turns[2 * index + part * 2 / DQ_PARTS] >
                first_to_meet(first_keys, sizes, index % query_tiles))
                add_sums(dq, arguments.dq_sums + (long long)index * DQ_TILE + part * DQ_PART, threadIdx.x % 128);
            write_dq(arguments, dq, index, query_tiles, part, threadIdx.x % 128);
        }
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
