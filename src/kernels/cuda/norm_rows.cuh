// What the norms share: which columns of a row a thread has.
//
// Block (x, max(1, 128 / x)) with x = 32 ceil(packs N / 512), packs = ceil(width / N), one more if rows do not begin
// at 16 bytes, N = 16 / size of the narrower type. A thread has 16 columns, so that 512 threads have rows of 8192.

// What rows of threads have of the first `columns` elements of a row, `first` being a pack's first column.
#define EACH_PACK(k, first, columns)                                                                                   \
    _Pragma("unroll") for (int k = 0, first = threadIdx.x * N - skew; k < PACKS;                                       \
                           k++, first += blockDim.x * N) if (first < columns)

// Columns stay with their threads only if every row begins alike; else they are counted from the row's begin. So they
// are where no thread is left for the pack more that a skew makes: slower, as no pack lies at a vector then.
template <class T> __device__ __forceinline__ int common_skew(const T* rows, int width) {
    int skew = (long long)width * sizeof(T) % 16 == 0 ? skew_of(rows) : 0;
    return width + skew > 16 * blockDim.x ? 0 : skew;
}
