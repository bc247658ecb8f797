// Embedding: rows of a table by id, and its backward, which is deterministic and does not sort.
//
// table, dtable (vocab, width); ids (count) u32, already checked; y, dy (count, width).
//
// Backward has four kernels:
//   buckets  puts each position into its id's bucket of `capacity` positions. Atomics on integers are enough: counts do
//            not depend on their order, and buckets are sorted before they are used.
//   few      has a warp per position. The one whose position is the first in its bucket, whichever that is, sums the
//            rows of the id in order if there are at most 8. Otherwise it adds the id to `many`.
//   order    sorts the positions of the ids in `many`. For ids with more than `capacity` positions, of which there are
//            at most count / capacity, it scans all ids.
//   many     sums their rows, a strip of columns at a time, in 16 shares.
// A sort would need more passes and launches; scanning the ids for every row of the table would need vocab * count
// reads. Rows whose id does not occur or is `padding` are not written: unless gradients are accumulated, dtable is set
// to 0 first, at the speed of memory.
//
// Bytes: forward count rows in and out; backward dy in once, the rows that occur out once (and in, if accumulated).

// Grid ceil(count / blockDim.y), block (32 ceil(min(packs, 256) / 32), max(1, 256 / blockDim.x)), packs ceil(width /
// N).
template <class T, class Y>
__device__ __forceinline__ void forward(const T* table, const unsigned* ids, Y* y, long long count, int width) {
    const int N = InVector<Y>::COUNT;
    long long position = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    if (position >= count) return;
    const T* from = table + (long long)ids[position] * width;
    Y* to = y + position * width;
    for (int first = threadIdx.x * N; first < width; first += blockDim.x * N) {
        float values[N];
        load_wide(from, first, width, 0.f, values);
        store(to, first, width, values);
    }
}

#define FORWARD(NAME, T, Y)                                                                                            \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        embedding_forward_##NAME(const T* table, const unsigned* ids, Y* y, long long count, int width) {              \
        forward<T, Y>(table, ids, y, count, width);                                                                    \
    }

FORWARD(f32, f32, f32)
FORWARD(f16, f16, f16)
FORWARD(bf16, bf16, bf16)

// ---- Backward. buckets (vocab, capacity) u32, capacity 32 to 256. found (vocab + 2) u32 must be 0 at first: the count
// of each id, the number of ids in `many` (count / 8) u32, and the number of positions in `ordered` (count) u32.

// Grid ceil(count / 256), block 256.
extern "C" __global__ void __launch_bounds__(256)
    embedding_buckets(const unsigned* ids, int count, unsigned* found, unsigned* buckets, int capacity) {
    int position = blockIdx.x * 256 + threadIdx.x;
    if (position >= count) return;
    unsigned id = ids[position];
    unsigned place = atomicAdd(found + id, 1u);
    if (place < capacity) buckets[(long long)id * capacity + place] = position;
}

const int FEW = 8, THREADS = 256;

// Writes `sum` to elements first.. of a row of dtable, or adds it.
template <class T, int N>
__device__ __forceinline__ void write(T* row, int first, int width, int accumulate, float (&sum)[N]) {
    if (accumulate) {
        float before[N];
        load_wide(row, first, width, 0.f, before);
#pragma unroll
        for (int i = 0; i < N; i++) sum[i] += before[i];
    }
    store(row, first, width, sum);
}

// Grid ceil(count / 8), block 256.
template <class G, class T>
__device__ __forceinline__ void backward_few(const G* dy, const unsigned* ids, int count, unsigned padding,
                                             unsigned* found, int vocab, const unsigned* buckets, int capacity,
                                             unsigned* many, T* dtable, int width, int accumulate) {
    const int N = InVector<G>::COUNT, COLUMNS = 16 / N; // packs per lane at a time
    __shared__ unsigned of_warps[THREADS / 32][FEW];
    int lane = threadIdx.x % 32, position = blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    unsigned* positions = of_warps[threadIdx.x / 32];
    if (position >= count) return;
    unsigned id = ids[position];
    if (id == padding) return; // neither summed here nor added to `many`
    unsigned mine = buckets[(long long)id * capacity + lane];
    int n = (int)found[id];
    if (__shfl_sync(0xffffffffu, mine, 0) != position) return; // another warp sums this id
    if (n > FEW) {
        if (lane == 0) many[atomicAdd(found + vocab, 1u)] = id;
        return;
    }
    int rank = 0;
    for (int k = 0; k < n; k++) rank += __shfl_sync(0xffffffffu, mine, k) < mine;
    if (lane < n) positions[rank] = mine;
    __syncwarp();
    T* row = dtable + (long long)id * width;
    for (int begin = lane * N; begin < width; begin += COLUMNS * 32 * N) {
        float sum[COLUMNS][N];
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
#pragma unroll
            for (int i = 0; i < N; i++) sum[c][i] = 0.f;
        }
#pragma unroll 4
        for (int k = 0; k < n; k++) {
            const G* from = dy + (long long)positions[k] * width;
            Pack<G, N> of_dy[COLUMNS];
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
                int first = begin + c * 32 * N;
                if (first < width) of_dy[c] = load<G, N>(from, first, width, 0.f);
            }
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
                if (begin + c * 32 * N >= width) continue;
                float values[N];
                unpack(of_dy[c], values);
#pragma unroll
                for (int i = 0; i < N; i++) sum[c][i] += values[i];
            }
        }
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            int first = begin + c * 32 * N;
            if (first < width) write(row, first, width, accumulate, sum[c]);
        }
    }
}

// Grid 1 per multiprocessor, block 1024. Sorts the positions of the ids in `many`: in their buckets, or, if there are
// more than `capacity`, in `ordered`. The first word of the bucket is then the offset in `ordered`.
extern "C" __global__ void __launch_bounds__(1024)
    embedding_order(const unsigned* ids, int count, unsigned* found, int vocab, unsigned* buckets, int capacity,
                    const unsigned* many, unsigned* ordered) {
    const int EACH = 8, TILE = EACH * 1024; // ids that are compared together
    __shared__ unsigned unordered[256], begin;
    __shared__ int of_warps[32];
    int thread = threadIdx.x, lane = thread % 32;
    int items = (int)found[vocab];
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        unsigned id = many[item];
        int n = (int)found[id];
        unsigned* bucket = buckets + (long long)id * capacity;
        if (n <= capacity) {
            if (thread < n) unordered[thread] = bucket[thread];
            __syncthreads();
            if (thread < n) { // its index in order
                int rank = 0;
                for (int k = 0; k < n; k++) rank += unordered[k] < unordered[thread];
                bucket[rank] = unordered[thread];
            }
        } else {
            if (thread == 0) {
                begin = atomicAdd(found + vocab + 1, (unsigned)n); // decides the place of the list, not its content
                bucket[0] = begin;
            }
            __syncthreads();
            unsigned* list = ordered + begin;
            for (int start = 0; start < count; start += TILE) {
                unsigned mine = 0; // bit k: the thread's k-th id of the tile equals `id`
#pragma unroll
                for (int k = 0; k < EACH; k++) {
                    int position = start + thread * EACH + k;
                    if (position < count && ids[position] == id) mine |= 1u << k;
                }
                int before = __popc(mine), here = 0; // a prefix sum over the threads
#pragma unroll
                for (int distance = 1; distance < 32; distance *= 2) {
                    int other = __shfl_up_sync(0xffffffffu, before, distance);
                    if (lane >= distance) before += other;
                }
                if (lane == 31) of_warps[thread / 32] = before;
                before -= __popc(mine);
                __syncthreads();
                for (int warp = 0; warp < 32; warp++) {
                    if (warp < thread / 32) before += of_warps[warp];
                    here += of_warps[warp];
                }
#pragma unroll
                for (int k = 0; k < EACH; k++) {
                    if (mine >> k & 1) list[before++] = start + thread * EACH + k;
                }
                list += here;
                __syncthreads(); // before of_warps is written again
            }
        }
        __syncthreads(); // before the next item
    }
}

// Adds elements first.. of rows dy[positions[0..n]] to `sum`. `turns` threads share the rows; this is thread `turn`.
template <class G, int N> __device__ __forceinline__ void add_rows(const G* dy, const unsigned* positions, int n,
                                                                   int turn, int turns, int first, int width,
                                                                   float (&sum)[N]) {
    const int AHEAD = 8; // rows loaded before the first is added
    for (int k = turn; k < n; k += AHEAD * turns) {
        Pack<G, N> rows[AHEAD];
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            int at = k + a * turns;
            if (at < n) rows[a] = load<G, N>(dy + (long long)positions[at] * width, first, width, 0.f);
        }
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            if (k + a * turns >= n) continue;
            float values[N];
            unpack(rows[a], values);
#pragma unroll
            for (int i = 0; i < N; i++) sum[i] += values[i];
        }
    }
}

// Grid 4 per multiprocessor, block (32, 16): 32 lanes along a strip of columns, 16 shares of the positions.
template <class G, class T>
__device__ __forceinline__ void backward_many(const G* dy, int count, const unsigned* found, int vocab,
                                              const unsigned* buckets, int capacity, const unsigned* many,
                                              const unsigned* ordered, T* dtable, int width, int accumulate) {
    const int N = InVector<G>::COUNT, SHARES = 16, TILE = 2048;
    __shared__ unsigned positions[TILE];
    __shared__ float sums[SHARES][N][32];
    int lane = threadIdx.x, share = threadIdx.y, thread = share * 32 + lane;
    int strips = (width + 32 * N - 1) / (32 * N), items = (int)found[vocab] * strips;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        unsigned id = many[item / strips];
        int n = (int)found[id], first = (item % strips * 32 + lane) * N;
        const unsigned* list = buckets + (long long)id * capacity;
        if (n > capacity) list = ordered + list[0];
        float sum[N];
#pragma unroll
        for (int i = 0; i < N; i++) sum[i] = 0.f;
        for (int start = 0; start < n; start += TILE) {
            int here = min(TILE, n - start);
            for (int k = thread; k < here; k += 32 * SHARES) positions[k] = list[start + k];
            __syncthreads();
            if (first < width) add_rows(dy, positions, here, share, SHARES, first, width, sum);
            __syncthreads(); // before the next positions are written
        }
#pragma unroll
        for (int i = 0; i < N; i++) sums[share][i][lane] = sum[i];
        __syncthreads();
        if (share == 0) { // sums the shares in order
            for (int other = 1; other < SHARES; other++) {
#pragma unroll
                for (int i = 0; i < N; i++) sum[i] += sums[other][i][lane];
            }
            if (first < width) write(dtable + (long long)id * width, first, width, accumulate, sum);
        }
        __syncthreads(); // before the next item
    }
}

#define BACKWARD(NAME, G, T)                                                                                           \
    extern "C" __global__ void __launch_bounds__(256) embedding_backward_few_##NAME(                                   \
        const G* dy, const unsigned* ids, int count, unsigned padding, unsigned* found, int vocab,                     \
        const unsigned* buckets, int capacity, unsigned* many, T* dtable, int width, int accumulate) {                 \
        backward_few<G, T>(dy, ids, count, padding, found, vocab, buckets, capacity, many, dtable, width, accumulate); \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(512) embedding_backward_many_##NAME(                                  \
        const G* dy, int count, const unsigned* found, int vocab, const unsigned* buckets, int capacity,               \
        const unsigned* many, const unsigned* ordered, T* dtable, int width, int accumulate) {                         \
        backward_many<G, T>(dy, count, found, vocab, buckets, capacity, many, ordered, dtable, width, accumulate);     \
    }

BACKWARD(f32, f32, f32)
BACKWARD(f16, f16, f16)
BACKWARD(bf16, bf16, bf16)
BACKWARD(bf16_f32, bf16, f32) // dy in bf16, dtable in f32
BACKWARD(f16_f32, f16, f32)
