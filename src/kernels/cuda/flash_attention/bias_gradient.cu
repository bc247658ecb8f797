// Flash attention, backward: the gradient of a bias, dS = P (dO V^T - delta), summed over the pairs that share an
// element. By mma.sync (sm_80 and up), in half precision or, after f32/tf32.cuh, in f32. Included after backward.cuh
// and masks.cuh.
//
//   inputs and statistics: see backward.cu and f32/backward.cu; flash_backward_prepare computes the statistics
//   masks: the key mask with queries as rows, in tiles of QUERIES x KEYS
//   d_bias (B, H, Tq, Tk), where each dimension may be 1: TERM, contiguous; sums are f32 and rounded once
//
// A block has the elements of a tile, QUERIES x KEYS, of one matrix of d_bias, or all queries or keys that share
// elements. It recomputes P and dO V^T of each head that shares the matrix, and adds them in order: every run has the
// same bits.
//
//   grid  matrices of d_bias * ceil(queries of d_bias / QUERIES) * ceil(keys of d_bias / KEYS)        block  128
//   dynamic shared memory  max(2 (QUERIES + KEYS) rows, QUERIES * (KEYS + 1) * 4 bytes)
// 2 B H Tq Tk (Dh + Dv) FLOPs.

constexpr int WARPS = QUERIES / 16, THREADS = 32 * WARPS;
constexpr int N = KEYS / 8; // blocks of 8 keys
static_assert(QUERIES == 64 && KEYS % 16 == 0, "a warp has 16 queries");

struct BiasGradientArguments {
    Term* d_bias;
    int batches, heads, queries, keys; // of d_bias: 1 where a dimension is repeated
    long long unused;
};

#ifdef PADDED_TILES
typedef Padded Layout;
constexpr int TILE_ROW_BYTES = PITCH * 4;
#else
typedef Swizzle<ROW_BYTES> Layout;
constexpr int TILE_ROW_BYTES = ROW_BYTES;
#endif

// c (16 queries, KEYS) = left (QUERIES, HEAD_DIM) right (KEYS, HEAD_DIM)^T, for the queries of this warp.
__device__ __forceinline__ void multiply_by_dims(float (&c)[1][N][4], unsigned char* left, unsigned char* right,
                                                 int warp, int lane) {
#ifdef PADDED_TILES
    multiply_rows(c, left_blocks(reinterpret_cast<float*>(left) + warp * 16 * PITCH, lane),
                  right_blocks(reinterpret_cast<float*>(right), lane));
#else
    const Blocks<ROW_BYTES, BY_ROWS> of_left((u32)__cvta_generic_to_shared(left), warp * 16, lane);
    const Blocks<ROW_BYTES, BY_COLUMNS> of_right((u32)__cvta_generic_to_shared(right), 0, lane);
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; step++) {
        u32 a[4];
        load_matrices(a, of_left.at(0, step * 16));
#pragma unroll
        for (int n = 0; n < KEYS / 16; n++) {
            u32 b[4];
            load_matrices(b, of_right.at(n * 16, step * 16));
            E::multiply(c[0][2 * n], a, b[0], b[1]);
            E::multiply(c[0][2 * n + 1], a, b[2], b[3]);
        }
    }
#endif
}

__device__ __forceinline__ void store_term(f32* to, float term) { to->value = term; }
template <typename T> __device__ __forceinline__ void store_term(T* to, float term) {
    to->bits = (unsigned short)T::pack(term, 0);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    JOIN(flash_bias_gradient_, ELEMENT)(const __grid_constant__ BackwardArguments arguments,
                                        const __grid_constant__ BiasGradientArguments of_bias) {
    extern __shared__ __align__(128) unsigned char shared[];
    const Sizes& sizes = arguments.sizes;
    const MaskArguments& masks = arguments.masks;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int quad_row = lane / 4, quad_column = lane % 4 * 2, warp_row = warp * 16;
    const int group = sizes.heads / sizes.kv_heads;
    const int query_tiles = CEIL_DIV(sizes.queries, QUERIES), key_tiles = CEIL_DIV(sizes.keys, KEYS);
    unsigned char *const q_tile = shared, *const d_out_tile = q_tile + QUERIES * TILE_ROW_BYTES;
    unsigned char *const k_tile = d_out_tile + QUERIES * TILE_ROW_BYTES, *const v_tile = k_tile + KEYS * TILE_ROW_BYTES;
    const auto address = [](const unsigned char* tile) { return (u32)__cvta_generic_to_shared(tile); };
    const float to_log2 = exponent_of_score(sizes);
    const Dropped dropped(arguments.dropout, sizes);

    // This block's part of d_bias, and the batches, heads and tiles that share it.
    const int block_columns = CEIL_DIV(of_bias.keys, KEYS), block_rows = CEIL_DIV(of_bias.queries, QUERIES);
    const int column = blockIdx.x % block_columns, row = blockIdx.x / block_columns % block_rows;
    const int matrix = blockIdx.x / block_columns / block_rows;
    const int matrix_batch = matrix / of_bias.heads, matrix_head = matrix % of_bias.heads;
    const bool all_batches = of_bias.batches == 1, all_heads = of_bias.heads == 1;
    const bool all_queries = of_bias.queries == 1, all_keys = of_bias.keys == 1;

    float sums[N][4] = {};
    for (int batch = all_batches ? 0 : matrix_batch; batch < (all_batches ? sizes.batch : matrix_batch + 1); batch++)
        for (int head = all_heads ? 0 : matrix_head; head < (all_heads ? sizes.heads : matrix_head + 1); head++) {
            const FirstKeys first_keys(arguments.first_keys, sizes, batch);
            const HeadMask mask(masks, sizes.queries, batch, head);
            const HeadBias bias(masks, sizes, batch, head);
            const int head_in_all = batch * sizes.heads + head, kv_head = head / group;
            const Strides &of_q = arguments.q_strides, &of_k = arguments.k_strides, &of_v = arguments.v_strides,
                          &of_d_out = arguments.d_out_strides;
            const E* const q = arguments.q + batch * of_q.batch + head * of_q.head;
            const E* const d_out = arguments.d_out + batch * of_d_out.batch + head * of_d_out.head;
            const E* const k = arguments.k + batch * of_k.batch + kv_head * of_k.head;
            const E* const v = arguments.v + batch * of_v.batch + kv_head * of_v.head;
            for (int query_tile = all_queries ? 0 : row; query_tile < (all_queries ? query_tiles : row + 1);
                 query_tile++) {
                const int first_query = query_tile * QUERIES;
                const int seen = CEIL_DIV(max(0, min(sizes.keys, first_query + QUERIES + sizes.offset)), KEYS);
                const int first_seen = first_keys.of(first_query) / KEYS;
                for (int key_tile = all_keys ? first_seen : max(column, first_seen);
                     key_tile < min(seen, all_keys ? key_tiles : column + 1); key_tile++) {
                    if (KEY_MASK && !(__ldg(mask.tiles(query_tile) + key_tile / 32) >> key_tile % 32 & 1)) continue;
                    const int first_key = key_tile * KEYS;
                    __syncthreads(); // the tiles before are no longer read
                    copy_tile<QUERIES, THREADS, Layout>(address(q_tile), q + first_query * of_q.row, of_q.row,
                                                        sizes.queries - first_query, sizes.head_dim);
                    copy_tile<QUERIES, THREADS, Layout>(address(d_out_tile), d_out + first_query * of_d_out.row,
                                                        of_d_out.row, sizes.queries - first_query, sizes.value_dim);
                    copy_tile<KEYS, THREADS, Layout>(address(k_tile), k + first_key * of_k.row, of_k.row,
                                                     sizes.keys - first_key, sizes.head_dim);
                    copy_tile<KEYS, THREADS, Layout>(address(v_tile), v + first_key * of_v.row, of_v.row,
                                                     sizes.keys - first_key, sizes.value_dim);
                    end_group();
                    wait_groups<0>();
#ifdef PADDED_TILES
                    round_tile<QUERIES, THREADS>(reinterpret_cast<float*>(q_tile));
                    round_tile<QUERIES, THREADS>(reinterpret_cast<float*>(d_out_tile));
                    round_tile<KEYS, THREADS>(reinterpret_cast<float*>(k_tile));
                    round_tile<KEYS, THREADS>(reinterpret_cast<float*>(v_tile));
#endif
                    __syncthreads();
                    float s[1][N][4] = {}, dp[1][N][4] = {};
                    multiply_by_dims(s, q_tile, k_tile, warp, lane);
                    multiply_by_dims(dp, d_out_tile, v_tile, warp, lane);

                    const int my_query = first_query + warp_row + quad_row;
                    const auto score_at = [&](int n, int i) -> float& { return s[0][n][i]; };
                    if (SOFT_CAP) {
#pragma unroll
                        for (int n = 0; n < N; n++) cap_scores(s[0][n], sizes);
                    }
                    add_bias<N>(score_at, bias, my_query, first_key, lane);
                    if (KEY_MASK && mask.is_partial(query_tile, key_tile))
                        hide_pairs<N>(score_at, mask, my_query, first_key, lane);
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const int query = min(my_query + half * 8, sizes.queries - 1);
                        const bool inside = my_query + half * 8 < sizes.queries;
                        const int first = first_keys.of(query) - first_key - quad_column,
                                  end = min(sizes.keys, query + 1 + sizes.offset) - first_key - quad_column;
#if STATISTICS == 3
                        const float* statistics =
                            arguments.statistics + 3ll * QUERIES * (head_in_all * query_tiles + query_tile);
                        const int place = query - first_query;
                        const float lse = statistics[2 * place], delta = statistics[2 * place + 1],
                                    rest = statistics[2 * QUERIES + place];
#else
                        const float* statistics =
                            arguments.statistics + 2ll * QUERIES * (head_in_all * query_tiles + query_tile);
                        const float lse = statistics[2 * (query - first_query)],
                                    delta = statistics[2 * (query - first_query) + 1], rest = 0;
#endif
#pragma unroll
                        for (int n = 0; n < N; n += 2) {
                            u32 stay = ~0u;
                            if (DROPOUT)
                                stay = dropped.by_queries(head_in_all, first_query + warp_row, first_key + n * 8, lane);
#pragma unroll
                            for (int i = 0; i < 4; i++) {
                                const int block = n + i / 2, element = half * 2 + i % 2, at = block * 8 + i % 2;
                                const bool sees = inside && at >= first && at < end;
                                const float score = sees ? s[0][block][element] : -INFINITE;
                                const float p = power_of_2(fmaf(score, to_log2, -lse) - rest);
                                float of_dp = dp[0][block][element];
                                if (DROPOUT)
                                    of_dp = stay >> (8 * (2 * (i / 2) + half) + i % 2) & 1
                                                ? of_dp * arguments.dropout.scale
                                                : 0;
                                sums[block][element] += p * (of_dp - delta);
                            }
                        }
                    }
                }
            }
        }

    // Writes the sums, or adds those of all queries or keys first.
    Term* const d_bias = of_bias.d_bias + (long long)matrix * of_bias.queries * of_bias.keys;
    float* const tile = reinterpret_cast<float*>(shared); // (QUERIES, KEYS + 1)
    __syncthreads();
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            tile[(warp_row + quad_row + i / 2 * 8) * (KEYS + 1) + n * 8 + quad_column + i % 2] = sums[n][i];
    __syncthreads();
    if (all_queries)
        for (int key = threadIdx.x; key < KEYS; key += THREADS) {
            float sum = 0;
            for (int query = 0; query < QUERIES; query++) sum += tile[query * (KEYS + 1) + key];
            tile[key] = sum;
        }
    __syncthreads();
    const int rows = all_queries ? 1 : min(QUERIES, of_bias.queries - row * QUERIES);
    if (all_keys)
        for (int query = threadIdx.x; query < rows; query += THREADS) {
            float sum = 0;
            for (int key = 0; key < KEYS; key++) sum += tile[query * (KEYS + 1) + key];
            tile[query * (KEYS + 1)] = sum;
        }
    __syncthreads();
    const int columns = all_keys ? 1 : min(KEYS, of_bias.keys - column * KEYS);
    for (int i = threadIdx.x; i < rows * columns; i += THREADS) {
        const int query = i / columns, key = i % columns;
        store_term(d_bias + (row * QUERIES + query) * (long long)of_bias.keys + column * KEYS + key,
                   tile[query * (KEYS + 1) + key]);
    }
}
