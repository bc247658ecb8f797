// Elements dropped at random: y = scale x where an element's word is at least the threshold, else 0. dx from dy is the
// same. The words are those of the key and the element's number, as kernels/philox.rs has them. Behind philox.cuh.
//
// key: u32 (4): seed, seed >> 32, step, micro-batch. x and y (n); y may be the buffer of x.
//
// Grid ceil(packs / 512), block 256, with packs = ceil(n / N), N = 16 / size of T. n of any size; 16-byte alignment
// only for speed. Bytes: 2 n elements; 20 multiplications of 32 bits for 4 elements.

template <class T> __device__ __forceinline__ void dropout(const T* x, const unsigned* key, T* y, long long n,
                                                           unsigned site, unsigned threshold, float scale) {
    const int N = InVector<T>::COUNT;
    long long start;
    int count = of_block<N>(n, &start);
    x += start, y += start;
    unsigned seed = key[0], seed_high = key[1], step = key[2], micro_batch = key[3];
    Pack<T, N> of_x[THREAD_PACKS];
#pragma unroll
    for (int k = 0; k < THREAD_PACKS; k++) {
        int first = (k * 256 + threadIdx.x) * N;
        if (first < count) of_x[k] = load<T, N>(x, first, count, 0.f);
    }
#pragma unroll
    for (int k = 0; k < THREAD_PACKS; k++) {
        int first = (k * 256 + threadIdx.x) * N;
        if (first >= count) continue;
        float values[N];
        unpack(of_x[k], values);
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            unsigned long long block = (unsigned long long)(start + first + i) / 4;
            uint4 counter = make_uint4((unsigned)block, site << 8 | (unsigned)(block >> 32), step, micro_batch);
            uint4 words = philox(counter, seed, seed_high);
            values[i] = words.x >= threshold ? values[i] * scale : 0.f;
            values[i + 1] = words.y >= threshold ? values[i + 1] * scale : 0.f;
            values[i + 2] = words.z >= threshold ? values[i + 2] * scale : 0.f;
            values[i + 3] = words.w >= threshold ? values[i + 3] * scale : 0.f;
        }
        store(y, first, count, values);
    }
}

#define DROPOUT(NAME)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256) dropout_##NAME(                                                  \
        const NAME* x, const unsigned* key, NAME* y, long long n, unsigned site, unsigned threshold, float scale) {    \
        dropout(x, key, y, n, site, threshold, scale);                                                                 \
    }

DROPOUT(f32)
DROPOUT(f16)
DROPOUT(bf16)
