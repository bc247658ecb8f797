// Dropout: y = scale x for kept elements, else 0. The same computes dx from dy. Included after dropout.cuh.
//
// key (4) u32: seed, seed >> 32, step, micro-batch. x and y (n / width, width); y may be the buffer of x.
//
// Grid ceil(packs / 512), block 256, with packs = ceil(n / N), N = 16 / size of T. Any n; 16-byte alignment only for
// speed. Bytes: 2 n elements. 20 multiplications of 32 bits per 8 elements (per 4 in f32).

template <class T> __device__ __forceinline__ void dropout(const T* x, const unsigned* words, T* y, long long n,
                                                           long long width, unsigned site, unsigned threshold,
                                                           float scale) {
    const int N = InVector<T>::COUNT;
    long long start;
    int count = of_block<N>(n, &start);
    x += start, y += start;
    const DropoutKey key(words, site, threshold);
    const long long row_blocks = (width + 7) / 8;
    Pack<T, N> of_x[THREAD_PACKS];
    load_packs(x, count, of_x);
#pragma unroll
    for (int k = 0; k < THREAD_PACKS; k++) {
        int first = (k * 256 + threadIdx.x) * N;
        if (first >= count) continue;
        float values[N];
        unpack(of_x[k], values);
        long long row = width == n ? 0 : (start + first) / width, column = start + first - row * width;
        unsigned stay;
#pragma unroll
        for (int i = 0; i < N; i++) {
            if (i == 0 || column % 8 == 0) stay = key.stay(row * row_blocks + column / 8);
            values[i] = stay >> column % 8 & 1 ? values[i] * scale : 0.f;
            if (++column == width) row++, column = 0;
        }
        store(y, first, count, values);
    }
}

#define DROPOUT(NAME)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        dropout_##NAME(const NAME* x, const unsigned* key, NAME* y, long long n, long long width, unsigned site,       \
                       unsigned threshold, float scale) {                                                              \
        dropout(x, key, y, n, width, site, threshold, scale);                                                          \
    }

DROPOUT(f32)
DROPOUT(f16)
DROPOUT(bf16)
