// Shared parts of the backward kernels: arguments, which tiles of keys and queries meet, the kernel that prepares
// statistics, and turns. Included after common.cuh.
//
//   KEYS         keys per tile
//   QUERIES      queries per tile
//   STATISTICS   statistics per query. A tile has lse log2(e) and delta of each query; with three per query, the
//                rounding errors of the former follow for all queries of the tile

#ifndef STATISTICS
#define STATISTICS 2
#endif
#ifndef KEYS
#define KEYS (sizeof(E) == 4 || HEAD_DIM == 256 ? 64 : 128)
#endif
#ifndef QUERIES
#define QUERIES (HEAD_DIM * sizeof(E) > 256 ? 32 : 64)
#endif

// Lanes per row in flash_backward_prepare: a power of two.
constexpr int LANES_A_ROW = CHUNKS > 16 ? 32 : CHUNKS == 12 ? 16 : CHUNKS;
constexpr int PREPARE_ROWS = 256 / LANES_A_ROW;

struct BackwardArguments {
    const E *q, *k, *v, *out, *rounding_error, *d_out;
    const float* lse;
    E *dq, *dk, *dv;
    float *statistics, *dq_sums;
    int* turns;
    Strides q_strides, k_strides, v_strides, out_strides, d_out_strides, dq_strides, dk_strides, dv_strides;
    Sizes sizes;
    const u32* first_keys; // (B, Tq), null without FIRST_KEYS
    DropoutArguments dropout;
    MaskArguments masks;
};

// ---- which tiles of keys and queries meet

// Tile c of keys meets a range of tiles of queries. It begins at the first tile with a query to which the mask shows c,
// and ends with the last tile whose first query has its first key in c or before; it has at least one tile. (A tile of
// keys without queries, because of first keys, visits that one in vain.) Seen from a tile of queries, this is a range
// of tiles of keys without gaps: each adds to dQ after its predecessor.

// The end of the range of tiles of queries, at most `tiles`, that tile `key_tile` of keys meets from tile `first` on.
__device__ __forceinline__ int end_of_queries(const FirstKeys& first_keys, int key_tile, int first, int tiles) {
    if (!FIRST_KEYS) return tiles;
    const int end = first_keys.first_beyond(key_tile * KEYS + KEYS - 1, first * QUERIES);
    return min(tiles, max(first + 1, CEIL_DIV(end, QUERIES)));
}

// The first tile of keys that the mask hides from all queries before tile `tile` of queries.
__device__ __forceinline__ int first_unseen_before(const Sizes& sizes, int tile) {
    return tile == 0 ? 0 : max(0, CEIL_DIV(tile * QUERIES + sizes.offset, KEYS));
}

// The first tile of keys that meets tile `tile` of queries, if any does.
__device__ __forceinline__ int first_to_meet(const FirstKeys& first_keys, const Sizes& sizes, int tile) {
    if (!FIRST_KEYS) return 0;
    return min(first_keys.of(tile * QUERIES) / KEYS, first_unseen_before(sizes, tile));
}

// With KEY_MASK a tile of keys visits only those tiles of its range that have a visible pair.

// Returns the row of `masks.shown` of a tile of keys, for a head counted over the batch.
__device__ __forceinline__ const u32* tiles_of_keys(const MaskArguments& masks, const Sizes& sizes, int head_in_all,
                                                    int key_tile) {
    return masks.shown + head_in_all / sizes.heads * masks.shown_batch + head_in_all % sizes.heads * masks.shown_head +
           (long long)key_tile * masks.shown_row;
}

// The tiles of queries that a tile of keys visits: some in first_tile .. end_tile of each of `group` heads.
struct Visits {
    int key_tile, first_head, group, first_tile, end_tile;
    __device__ __forceinline__ int count(const MaskArguments& masks, const Sizes& sizes) const {
        if (!KEY_MASK) return max(0, end_tile - first_tile) * group;
        int steps = 0;
        for (int head = first_head; head < first_head + group; head++)
            steps += count_tiles_of(tiles_of_keys(masks, sizes, head, key_tile), first_tile, end_tile);
        return steps;
    }
};

// The tile of keys that adds to dQ of a tile of queries before tile `key_tile` does; -1 if none does.
__device__ __forceinline__ int predecessor(const FirstKeys& first_keys, const MaskArguments& masks, const Sizes& sizes,
                                           int head_in_all, int tile, int key_tile) {
    const int first = first_to_meet(first_keys, sizes, tile);
    if (!KEY_MASK) return key_tile == first ? -1 : key_tile - 1;
    const u32* set = masks.across + head_in_all / sizes.heads * masks.across_batch +
                     head_in_all % sizes.heads * masks.across_head + (long long)tile * masks.across_row;
    const int last = last_tile_of(set, key_tile - 1, first);
    return last < first ? -1 : last;
}

extern "C" __global__ void __launch_bounds__(256)
    JOIN(flash_backward_prepare_, ELEMENT)(const __grid_constant__ BackwardArguments arguments) {
    const Sizes& sizes = arguments.sizes;
    const long long thread = blockIdx.x * 256ll + threadIdx.x;
    const int tiles = CEIL_DIV(sizes.queries, QUERIES);
    const long long heads = (long long)sizes.batch * sizes.heads, rows = heads * tiles * QUERIES;
#ifdef HOPPER
    const int turns_a_tile = 2;
#else
    const int turns_a_tile = 1;
#endif
    if (thread <= turns_a_tile * heads * tiles) {
        // The turn begins with the first tile of keys. The word after all turns is the ticket.
        int turn = 0;
        if (FIRST_KEYS && thread < turns_a_tile * heads * tiles) {
            const int number = thread / turns_a_tile;
            const FirstKeys first_keys(arguments.first_keys, sizes, number / tiles / sizes.heads);
            turn = first_to_meet(first_keys, sizes, number % tiles);
        }
        arguments.turns[thread] = turn;
    }

    const long long row = thread / LANES_A_ROW;
    const int chunk = threadIdx.x % LANES_A_ROW;
    float delta = 0;
    const int head_in_all = row / (tiles * QUERIES), query = row % (tiles * QUERIES);
    const bool inside = row < rows && query < sizes.queries;
    const long long row_in_all = (long long)head_in_all * sizes.queries + query;
#pragma unroll
    for (int part = 0; part < CEIL_DIV(CHUNKS, LANES_A_ROW); part++) {
        const int i = chunk + part * LANES_A_ROW;
        if (!inside || i * CHUNK >= max(sizes.head_dim, sizes.value_dim)) break;
        const int batch = head_in_all / sizes.heads, head = head_in_all % sizes.heads;
        if (i * CHUNK < sizes.value_dim) {
            const Strides &of_out = arguments.out_strides, &of_d_out = arguments.d_out_strides;
            const E* out = arguments.out + batch * of_out.batch + head * of_out.head + query * of_out.row;
            const E* d_out = arguments.d_out + batch * of_d_out.batch + head * of_d_out.head + query * of_d_out.row;
            const uint4 x = reinterpret_cast<const uint4*>(out)[i], y = reinterpret_cast<const uint4*>(d_out)[i];
            uint4 z = make_uint4(0, 0, 0, 0);
            if (arguments.rounding_error)
                z = reinterpret_cast<const uint4*>(arguments.rounding_error + row_in_all * sizes.value_dim)[i];
            const u32 xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w}, zs[4] = {z.x, z.y, z.z, z.w};
#pragma unroll
            for (int word = 0; word < 4; word++) {
                float x0, x1, y0, y1, z0, z1;
                E::unpack(xs[word], x0, x1), E::unpack(ys[word], y0, y1), E::unpack(zs[word], z0, z1);
                delta += (x0 + z0) * y0 + (x1 + z1) * y1;
            }
        }
#if defined(HOPPER) && !KEY_MASK
        // Queries that no block of keys visits get dq = 0. (Without first keys all blocks visit the last tile.)
        const int tile = query / QUERIES;
        bool met = tile >= tiles - 1 || (tile + 1) * QUERIES + sizes.offset > 0;
        if (FIRST_KEYS) {
            const int key_tiles = CEIL_DIV(sizes.keys, KEYS);
            const int end = tile == tiles - 1 ? key_tiles : min(key_tiles, first_unseen_before(sizes, tile + 1));
            met = first_to_meet(FirstKeys(arguments.first_keys, sizes, batch), sizes, tile) < end;
        }
        if (!met && i * CHUNK < sizes.head_dim) {
            const Strides& of_dq = arguments.dq_strides;
            reinterpret_cast<uint4*>(arguments.dq + batch * of_dq.batch + head * of_dq.head + query * of_dq.row)[i] =
                make_uint4(0, 0, 0, 0);
        }
#endif
    }
#pragma unroll
    for (int lanes = LANES_A_ROW / 2; lanes > 0; lanes /= 2) delta += __shfl_xor_sync(~0u, delta, lanes);
    if (row < rows && chunk == 0) {
        // No key, or no query: exp(s - inf) = 0.
        const float lse = inside ? arguments.lse[row_in_all] : -INFINITE;
        const float lse_in_log2 = lse == -INFINITE ? INFINITE : __fmul_rn(lse, LOG2_E);
#ifdef HOPPER
        // In an order in which the queries of one thread, 8 n + 2 (lane % 4) + (0 or 1), are adjacent in fours.
        const int place = query / 64 * 64 + query / 16 % 4 * 16 + query / 2 % 4 * 4 + query / 8 % 2 * 2 + query % 2;
        float* statistics = arguments.statistics + row / QUERIES * 2 * QUERIES + place % QUERIES;
        statistics[0] = lse_in_log2, statistics[QUERIES] = delta;
#elif STATISTICS == 3
        // The rounding errors of the product, of LOG2_E, and of lse itself.
        const float rest = lse == -INFINITE ? 0 : arguments.lse[heads * sizes.queries + row_in_all] * LOG2_E;
        const int place = query % QUERIES;
        float* statistics = arguments.statistics + (row - place) * 3;
        statistics[2 * place] = lse_in_log2, statistics[2 * place + 1] = delta;
        statistics[2 * QUERIES + place] =
            lse == -INFINITE ? 0 : fmaf(lse, LOG2_E, -lse_in_log2) + fmaf(lse, LOG2_E_REST, rest);
#else
        reinterpret_cast<float2*>(arguments.statistics)[row] = make_float2(lse_in_log2, delta);
#endif
    }
}

// A tile of queries of one head, counted over the batch.
struct Place {
    int head, tile;
    // The next place in ascending order.
    __device__ __forceinline__ void advance(const Visits& visits, const MaskArguments& masks, const Sizes& sizes) {
        if (!KEY_MASK) {
            if (++tile == visits.end_tile) tile = visits.first_tile, head++;
            return;
        }
        seek(tile + 1, visits, masks, sizes);
    }
    // Moves to the last visited tile up to tile `from` of `head`, for descending order; likewise.
    __device__ __forceinline__ void seek_back(int from, const Visits& visits, const MaskArguments& masks,
                                              const Sizes& sizes) {
        while (true) {
            tile = last_tile_of(tiles_of_keys(masks, sizes, head, visits.key_tile), from, visits.first_tile);
            if (tile >= visits.first_tile || head + 1 >= visits.first_head + visits.group) return;
            head++, from = visits.end_tile - 1;
        }
    }
    // Moves to the first visited tile from tile `from` of `head` on. There must be one, or the place is not used.
    __device__ __forceinline__ void seek(int from, const Visits& visits, const MaskArguments& masks,
                                         const Sizes& sizes) {
        while (true) {
            tile = next_tile_of(tiles_of_keys(masks, sizes, head, visits.key_tile), from, visits.end_tile);
            if (tile < visits.end_tile || head + 1 >= visits.first_head + visits.group) return;
            head++, from = visits.first_tile;
        }
    }
};

// The turn of a tile of dq_sums: the number of the tile of keys that adds to it next.
__device__ __forceinline__ int read_turn(const int* turn) {
    int value;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(turn) : "memory");
    return value;
}
__device__ __forceinline__ void write_turn(int* turn, int value) {
    asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" ::"l"(turn), "r"(value) : "memory");
}
__device__ __forceinline__ void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

__device__ __forceinline__ void add_to(float* target, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(target), "f"(x[0]), "f"(x[1]),
                 "f"(x[2]), "f"(x[3])
                 : "memory");
#else
#pragma unroll
    for (int i = 0; i < 4; i++)
        asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(target + i), "f"(x[i]) : "memory");
#endif
}
