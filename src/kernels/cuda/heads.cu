// Swaps the two middle dimensions: y[b, j, i] = x[b, i, j], x (B, M, N, width), y (B, N, M, width), in words of 2, 4 or
// 16 bytes. It splits heads, (B, T, H, Dh) to (B, H, T, Dh), and merges them.
//
// Block (lanes, 256 / lanes), where lanes is width rounded up to a power of two, at most 32. Grid ceil(B M N lanes /
// 256). Pointers are multiples of the word. Bytes: x in, y out.

template <class W>
__device__ __forceinline__ void swap(const W* x, W* y, unsigned rows, unsigned m, unsigned n, int width) {
    unsigned row = blockIdx.x * blockDim.y + threadIdx.y; // of y: (b n + j) m + i
    if (row >= rows) return;
    unsigned of_n = row / m, i = row - of_n * m, b = of_n / n, j = of_n - b * n;
    const W* from = x + (((long long)b * m + i) * n + j) * width;
    W* to = y + (long long)row * width;
    for (int k = threadIdx.x; k < width; k += blockDim.x) to[k] = from[k];
}

#define SWAP(BYTES, W)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        swap_##BYTES(const W* x, W* y, unsigned rows, unsigned m, unsigned n, int width) {                             \
        swap(x, y, rows, m, n, width);                                                                                 \
    }

SWAP(2, unsigned short)
SWAP(4, unsigned)
SWAP(16, uint4)
