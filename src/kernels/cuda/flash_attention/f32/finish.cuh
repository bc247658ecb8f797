// The kernel that goes after the backward kernels in f32: dq from its sums. Behind backward.cuh and tiles.cuh.
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
    const float4* sums = reinterpret_cast<const float4*>(arguments.dq_sums) + (long long)blockIdx.x * (QUERIES * CHUNKS);
    const bool seen = arguments.turns[blockIdx.x] > 0;  // no block has come to queries that see no key
    for (int i = threadIdx.x; i < QUERIES * CHUNKS; i += 256) {
        const int row = i / CHUNKS, column = i % CHUNKS * CHUNK;
        if (first + row >= sizes.queries || column >= sizes.head_dim) continue;
        float4 x = make_float4(0, 0, 0, 0);
        if (seen) x = sums[i];
        *reinterpret_cast<float4*>(dq + row * of_dq.row + column) =
            make_float4(x.x * sizes.scale, x.y * sizes.scale, x.z * sizes.scale, x.w * sizes.scale);
    }
}
