// The dropout mask of the probabilities, with DROPOUT: that of kernels/dropout.rs for a tensor (B H, Tq, Tk). Included
// after ../dropout.cuh and common.cuh.

struct Dropped {
    DropoutKey key;
    long long queries;
    u32 row_blocks; // counters per query
    Dropped() = default;
    __device__ __forceinline__ Dropped(const DropoutArguments& arguments, const Sizes& sizes)
        : queries(sizes.queries), row_blocks(CEIL_DIV(sizes.keys, 8)) {
        if (DROPOUT) key = DropoutKey(arguments.key, arguments.site, arguments.threshold);
    }
    // The mask of eight keys from `first_key` on, a multiple of 8, for a query of matrix `head` of B H: bit i is 1 if
    // key i is kept.
    __device__ __forceinline__ u32 eight_keys(int head, int query, int first_key) const {
        return key.stay((head * queries + query) * row_blocks + first_key / 8);
    }
    // The mask of a 16 x 16 block (queries, keys), for the two mma.sync results of a lane. Bit 8 (2 right + lower) +
    // odd belongs to the element in the right eight columns, the lower eight rows, and the odd one of two columns. Four
    // lanes need the same four counters of eight keys: each computes one.
    __device__ __forceinline__ u32 by_queries(int head, int first_query, int first_key, int lane) const {
        const int part = lane % 4;
        u32 stay = eight_keys(head, first_query + lane / 4 + part % 2 * 8, first_key + part / 2 * 8) << part * 8;
        stay |= __shfl_xor_sync(~0u, stay, 1);
        stay |= __shfl_xor_sync(~0u, stay, 2);
        return stay >> part * 2;
    }
    // The mask of a 16 x 16 block (keys, queries): stay[right], bit 8 (2 odd + lower). Eight lanes need the same eight
    // counters.
    __device__ __forceinline__ void by_keys(u32 (&stay)[2], int head, int first_key, int first_query, int lane) const {
        const int row = lane / 4, query = first_query + row / 4 * 8 + lane % 4 * 2 + row / 2 % 2;
        u32 mine = eight_keys(head, query, first_key + row % 2 * 8) << row % 4 * 8;
        mine |= __shfl_xor_sync(~0u, mine, 4);
        mine |= __shfl_xor_sync(~0u, mine, 8);
        const u32 others = __shfl_xor_sync(~0u, mine, 16);
        stay[0] = (row < 4 ? mine : others) >> row, stay[1] = (row < 4 ? others : mine) >> row;
    }
};
