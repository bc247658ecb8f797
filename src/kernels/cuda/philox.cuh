// Philox4x32-10: four random words from a counter and a key, as in kernels/philox.rs. Included after prelude.cuh.

__device__ __forceinline__ uint4 philox(uint4 c, unsigned key, unsigned key_high) {
#pragma unroll
    for (int round = 0; round < 10; round++) {
        unsigned a = c.x * 0xd2511f53u, a_high = __umulhi(c.x, 0xd2511f53u);
        unsigned b = c.z * 0xcd9e8d57u, b_high = __umulhi(c.z, 0xcd9e8d57u);
        c = make_uint4(b_high ^ c.y ^ key, b, a_high ^ c.w ^ key_high, a);
        key += 0x9e3779b9u, key_high += 0xbb67ae85u;
    }
    return c;
}
