// The dropout mask, as in kernels/dropout.rs: each element uses one half word of the random stream, and each row begins
// at a new counter. Included after philox.cuh.

struct DropoutKey {
    unsigned seed, seed_high, step, micro_batch, site, threshold;
    DropoutKey() = default;
    // words (4) u32: seed, seed >> 32, step, micro-batch.
    __device__ __forceinline__ DropoutKey(const unsigned* words, unsigned site, unsigned threshold)
        : seed(__ldg(words)),
          seed_high(__ldg(words + 1)),
          step(__ldg(words + 2)),
          micro_batch(__ldg(words + 3)),
          site(site),
          threshold(threshold) {}
    // The mask of the eight elements of counter `block`: bit i is 1 if element i is kept.
    __device__ __forceinline__ unsigned stay(unsigned long long block) const {
        const uint4 counter = make_uint4((unsigned)block, site << 8 | (unsigned)(block >> 32), step, micro_batch);
        const uint4 random = philox(counter, seed, seed_high);
        const unsigned words[4] = {random.x, random.y, random.z, random.w};
        unsigned bits = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if ((words[i] & 0xffff) >= threshold) bits |= 1 << 2 * i;
            if (words[i] >> 16 >= threshold) bits |= 2 << 2 * i;
        }
        return bits;
    }
};
