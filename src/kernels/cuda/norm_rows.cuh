// The columns of a row that a thread computes, shared by the norms.
//
// Block (x, max(1, 128 / x)) with x = 32 ceil(packs N / 512), packs = ceil(width / N), one more if rows do not begin at
// 16 bytes, N = 16 / size of the narrower type. A thread has 16 columns, so 512 threads cover rows of 8192.

// Loops over the thread's packs among the first `columns` elements of a row; `first` is the first column of a pack.
#define EACH_PACK(k, first, columns)                                                                                   \
    _Pragma("unroll") for (int k = 0, first = threadIdx.x * N - skew; k < PACKS;                                       \
                           k++, first += blockDim.x * N) if (first < columns)

// Threads keep their columns from row to row only if all rows begin with the same skew; otherwise the skew is 0. It is
// also 0 if no thread is left for the extra pack of a skew. That is slower, since no pack is then at a vector.
template <class T> __device__ __forceinline__ int common_skew(const T* rows, int width) {
    int skew = (long long)width * sizeof(T) % 16 == 0 ? skew_of(rows) : 0;
    return width + skew > 16 * blockDim.x ? 0 : skew;
}
