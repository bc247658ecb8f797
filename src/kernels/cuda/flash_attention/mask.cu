// Packs a key mask: bits of pairs, and flags of tiles. Included after masks.cuh.
//
//   visible (matrices, queries, keys): u8, 0 hides; queries and keys may be 1, for all
//   bits, shown, partly, across: see masks.cuh; the flags are zero before. They have all tiles, also where the mask
//   repeats
//
// A warp packs 32 queries and 32 keys.
//
//   grid  ceil(matrices * ceil(queries / 32) * ceil(keys / 32) / 8)        block  256

struct PackArguments {
    const unsigned char* visible;
    u32 *bits, *shown, *partly, *across; // across: null in forward
    int matrices, queries, keys;
    int query_tiles, key_tiles;  // of the call
    int tile_queries, tile_keys; // multiples of 32
    int bits_words;              // per row
    int rows_are_keys;
    u32 unused;
};

__device__ __forceinline__ void set_flag(u32* flags, long long row, int words, int column) {
    u32* word = flags + row * words + column / 32;
    const u32 flag = 1u << column % 32;
    if (!(*reinterpret_cast<volatile u32*>(word) & flag)) atomicOr(word, flag);
}

extern "C" __global__ void __launch_bounds__(256) flash_mask(const __grid_constant__ PackArguments arguments) {
    const int lane = threadIdx.x % 32, queries = arguments.queries, keys = arguments.keys;
    const int query_blocks = CEIL_DIV(queries, 32), key_blocks = CEIL_DIV(keys, 32);
    const long long block = blockIdx.x * 8ll + threadIdx.x / 32;
    const long long matrix = block / (query_blocks * (long long)key_blocks);
    if (matrix >= arguments.matrices) return;
    const int in_matrix = block % (query_blocks * (long long)key_blocks);
    const int query_block = in_matrix / key_blocks, key_block = in_matrix % key_blocks;
    const int key = key_block * 32 + lane;

    const unsigned char* of_key = arguments.visible + (matrix * queries + query_block * 32) * keys + key;
    const int rows = min(32, queries - query_block * 32);
    u32 of_query = 0, of_this_key = 0; // bit i: key i of this lane's query; query i of this lane's key
#pragma unroll 8
    for (int i = 0; i < 32; i++) {
        const bool visible = i < rows && key < keys && __ldg(of_key + (long long)i * keys) != 0;
        const u32 all = __ballot_sync(~0u, visible);
        if (lane == i) of_query = all;
        of_this_key |= (u32)visible << i;
    }
    const u32 inside = rows == 32 ? ~0u : (1u << rows) - 1;
    const bool shows = __any_sync(~0u, of_this_key != 0);
    const bool hides = __any_sync(~0u, key < keys && of_this_key != inside);

    // A repeated dimension has one word of equal bits.
    if (arguments.rows_are_keys) {
        if (queries == 1) of_this_key = of_this_key ? ~0u : 0;
        if (key < keys) arguments.bits[(matrix * keys + key) * arguments.bits_words + query_block] = of_this_key;
    } else {
        if (keys == 1) of_query = of_query ? ~0u : 0;
        const int query = query_block * 32 + lane;
        if (query < queries) arguments.bits[(matrix * queries + query) * arguments.bits_words + key_block] = of_query;
    }

    const int first_query_tile = queries == 1 ? 0 : query_block * 32 / arguments.tile_queries;
    const int first_key_tile = keys == 1 ? 0 : key_block * 32 / arguments.tile_keys;
    const int query_tiles = queries == 1 ? arguments.query_tiles : 1, key_tiles = keys == 1 ? arguments.key_tiles : 1;
    const int words_of_queries = CEIL_DIV(arguments.query_tiles, 32), words_of_keys = CEIL_DIV(arguments.key_tiles, 32);
    for (int i = lane; i < query_tiles * key_tiles; i += 32) {
        const int query_tile = first_query_tile + i / key_tiles, key_tile = first_key_tile + i % key_tiles;
        const long long by_queries = matrix * arguments.query_tiles + query_tile;
        const long long by_keys = matrix * arguments.key_tiles + key_tile;
        if (arguments.rows_are_keys) {
            if (shows) set_flag(arguments.shown, by_keys, words_of_queries, query_tile);
            if (shows) set_flag(arguments.across, by_queries, words_of_keys, key_tile);
            if (hides) set_flag(arguments.partly, by_keys, words_of_queries, query_tile);
        } else {
            if (shows) set_flag(arguments.shown, by_queries, words_of_keys, key_tile);
            if (hides) set_flag(arguments.partly, by_queries, words_of_keys, key_tile);
        }
    }
}
