// What the backward kernels of f32 share, exact and in TF32: how queries are copied, and the kernel that goes last.
// Behind ../backward.cuh and tiles.cuh.

// Starts to copy a tile of Q and dO (QUERIES, PITCH), of the query_tiles that a head has, and their
// statistics (QUERIES, STATISTICS).
template <int THREADS> __device__ __forceinline__ void copy_queries(const BackwardArguments& arguments, Place from,
                                                                    int query_tiles, float* q_tile, float* d_out_tile,
                                                                    float* statistics) {
    const Sizes& sizes = arguments.sizes;
    const int batch = from.head / sizes.heads, head = from.head % sizes.heads, first = from.tile * QUERIES;
    const Strides &of_q = arguments.q_strides, &of_d_out = arguments.d_out_strides;
    const E* q = arguments.q + batch * of_q.batch + head * of_q.head + first * of_q.row;
    const E* d_out = arguments.d_out + batch * of_d_out.batch + head * of_d_out.head + first * of_d_out.row;
    const int rows = sizes.queries - first;
    copy_tile<QUERIES, THREADS, Padded>(shared_address(q_tile), q, of_q.row, rows, sizes.head_dim);
    copy_tile<QUERIES, THREADS, Padded>(shared_address(d_out_tile), d_out, of_d_out.row, rows, sizes.head_dim);
    const float* source =
        arguments.statistics + (long long)STATISTICS * QUERIES * (from.head * query_tiles + from.tile);
    for (int i = threadIdx.x; i < STATISTICS * QUERIES / 4; i += THREADS)
        copy_chunk(shared_address(statistics) + i * 16, source + 4 * i, true);
    end_group();
}

// dq from its sums.
//
//   dq_sums (B, H, ceil(Tq / QUERIES) * QUERIES, HEAD_DIM): f32
//   grid  ceil(Tq / QUERIES) * B * H        block  256

extern "C" __global__ void __launch_bounds__(256)
    JOIN(flash_backward_finish_, ELEMENT)(const __grid_constant__ BackwardArguments arguments) {
    const Sizes& sizes = arguments.sizes;
    const int query_tiles = CEIL_DIV(sizes.queries, QUERIES);
    const int head_in_all = blockIdx.x / query_tiles, first = blockIdx.x % query_tiles * QUERIES;
    const int batch = head_in_all / sizes.heads, head = head_in_all % sizes.heads;
    const Strides& of_dq = arguments.dq_strides;
    E* dq = arguments.dq + batch * of_dq.batch + head * of_dq.head + first * of_dq.row;
    const float4* sums =
        reinterpret_cast<const float4*>(arguments.dq_sums) + (long long)blockIdx.x * (QUERIES * CHUNKS);
    // No block has come to queries that see no key.
    const FirstKeys first_keys(arguments.first_keys, sizes, batch);
    const bool seen = arguments.turns[blockIdx.x] > first_to_meet(first_keys, sizes, first / QUERIES);
    for (int i = threadIdx.x; i < QUERIES * CHUNKS; i += 256) {
        const int row = i / CHUNKS, column = i % CHUNKS * CHUNK;
        if (first + row >= sizes.queries || column >= sizes.head_dim) continue;
        float4 x = make_float4(0, 0, 0, 0);
        if (seen) x = sums[i];
        *reinterpret_cast<float4*>(dq + row * of_dq.row + column) =
            make_float4(x.x * sizes.scale, x.y * sizes.scale, x.z * sizes.scale, x.w * sizes.scale);
    }
}
