// What the forward kernels of f32 share, exact and in TF32: their arguments, and what a block has. Behind
// ../common.cuh.
//
//   ROWS   queries of a block

#ifndef ROWS
#define ROWS 128
#endif

struct ForwardArguments {
    const E *q, *k, *v;
    E *out, *rounding_error; // rounded_off: null, since nothing is rounded
    float* lse;              // (2, B, H, Tq)
    Strides q_strides, k_strides, v_strides, out_strides;
    Sizes sizes;
    const u32* first_keys; // null without FIRST_KEYS
    DropoutArguments dropout;
};

// ROWS queries of one head, or those that are left, and the keys that they see.
struct RowBlock {
    int head_in_all, batch, head, first_row, rows;
    int seen; // keys that the last of them sees
    FirstKeys first_keys;
    const E *q, *k, *v;
    __device__ __forceinline__ explicit RowBlock(const ForwardArguments& arguments) {
        const Sizes& sizes = arguments.sizes;
        // The latest queries first: with a causal mask they see most keys.
        const int row_tiles = CEIL_DIV(sizes.queries, ROWS);
        int row_tile;
        place(blockIdx.x, sizes.batch * sizes.heads, row_tiles, sizes.heads_at_once, head_in_all, row_tile);
        first_row = (row_tiles - 1 - row_tile) * ROWS;
        batch = head_in_all / sizes.heads, head = head_in_all % sizes.heads;
        rows = min(ROWS, sizes.queries - first_row);

        const int kv_head = head / (sizes.heads / sizes.kv_heads);
        const Strides &of_q = arguments.q_strides, &of_k = arguments.k_strides, &of_v = arguments.v_strides;
        q = arguments.q + batch * of_q.batch + head * of_q.head + first_row * of_q.row;
        k = arguments.k + batch * of_k.batch + kv_head * of_k.head;
        v = arguments.v + batch * of_v.batch + kv_head * of_v.head;
        seen = max(0, min(sizes.keys, first_row + rows + sizes.offset));
        first_keys = FirstKeys(arguments.first_keys, sizes, batch);
    }
    // Where the first of them goes.
    __device__ __forceinline__ E* out(const ForwardArguments& arguments) const {
        const Strides& of_out = arguments.out_strides;
        return arguments.out + batch * of_out.batch + head * of_out.head + first_row * of_out.row;
    }
};

// Writes the log-sum-exp of a row whose exponentials are relative to the `largest` score (already times scale log2(e))
// and add up to `total`; and, a tensor further on, what rounding took from it: an error of lse is one of the whole row
// in backward.
__device__ __forceinline__ void write_lse(const ForwardArguments& arguments, const RowBlock& block, int row,
                                          float largest, float total) {
    const Sizes& sizes = arguments.sizes;
    const float logarithm = log2f(total), sum = __fadd_rn(largest, logarithm); // in units of ln 2
    const float of_logarithm = __fsub_rn(sum, largest);
    const float rest = __fadd_rn(__fsub_rn(largest, __fsub_rn(sum, of_logarithm)), __fsub_rn(logarithm, of_logarithm));
    const float lse = __fmul_rn(sum, LN_2);
    const bool sees = total != 0;
    float* to = arguments.lse + (long long)block.head_in_all * sizes.queries + block.first_row + row;
    to[0] = sees ? lse : -INFINITE;
    to[(long long)sizes.batch * sizes.heads * sizes.queries] =
        sees ? fmaf(sum, LN_2, -lse) + fmaf(sum, LN_2_REST, rest * LN_2) : 0;
}
