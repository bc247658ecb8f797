// Tiles of f32 in shared memory. Behind common.cuh, with ELEMENT=f32.

// Floats from row to row of a tile of Q, K, V or dO: an odd number of chunks, so that eight neighbouring rows have the
// same chunk in eight different groups of banks.
constexpr int PITCH = HEAD_DIM + CHUNK;
static_assert(sizeof(E) == 4 && HEAD_DIM % 16 == 0, "rows of f32, of an even number of chunks");

// Where such a tile has its chunks, for copy_tile.
struct Padded {
    static __device__ __forceinline__ u32 at(int row, int chunk) { return (row * PITCH + chunk * CHUNK) * 4; }
};

__device__ __forceinline__ float4 read4(const float* x) { return *reinterpret_cast<const float4*>(x); }
__device__ __forceinline__ float part(const float4& x, int i) {
    return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}
__device__ __forceinline__ u32 shared_address(const void* x) { return (u32)__cvta_generic_to_shared(x); }
