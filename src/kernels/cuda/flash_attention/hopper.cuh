// Hopper's instructions (sm_90a): warpgroup matmuls that read shared memory, copies of tiles, and their barriers.
// Included between common.cuh and the kernels.
#define HOPPER

// ---- wgmma: a warpgroup computes 64 rows; the layout of accumulators is that of mma.sync

// The descriptor of an operand in shared memory. Tiles have rows of 128 bytes (64 elements), permuted by row % 8 like
// the copy engine's. Wider operands are several such tiles, one after another; all begin at multiples of 1024 bytes.
// `leading` is the distance of two tiles, which matters only for a transposed operand wider than 64. Eight rows are
// 1024 bytes.
struct Descriptor {
    u32 low;
    // The rank of a block in its cluster, in the upper bits of addresses, is left out.
    __device__ __forceinline__ Descriptor(u32 address, u32 leading = 16)
        : low((address & 0x3ffff) >> 4 | leading >> 4 << 16) {}
    // The same descriptor, opaque to the compiler, which would otherwise keep everything derived from it in registers.
    __device__ __forceinline__ Descriptor opaque_copy() const {
        Descriptor same = *this;
        asm volatile("" : "+r"(same.low));
        return same;
    }
    // The descriptor `bytes` further on, for offsets that depend on the loop, so that `at` has only constants.
    __device__ __forceinline__ Descriptor offset_by(u32 bytes) const {
        Descriptor further = *this;
        further.low += bytes >> 4;
        return further;
    }
    // The 64-bit operand of wgmma, `bytes` further on.
    __device__ __forceinline__ u64 at(u32 bytes) const {
        return (u64)(1u << 30 | 1024 >> 4) << 32 | (low + (bytes >> 4));
    }
};
#define NAME_bf16 "bf16.bf16"
#define NAME_f16 "f16.f16"
#define NAME JOIN(NAME_, ELEMENT)
#define FOUR(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SIXTEEN(d, i) FOUR(d, i), FOUR(d, i + 4), FOUR(d, i + 8), FOUR(d, i + 12)
#define LIST_32                                                                                                        \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                           \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define LIST_64                                                                                                        \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                           \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                                 \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                                 \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// d (64, 64) = a b, or d + a b, both in shared memory: a (64, 16) or its transpose, b (16, 64) as (n, k) or transposed.
template <int A_TRANSPOSED, int B_TRANSPOSED>
__device__ __forceinline__ void multiply_tiles(float (&d)[32], u64 a, u64 b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." NAME " {" LIST_32
                 "}, %32, %33, p, 1, 1, %35, %36;}"
                 : SIXTEEN(d, 0), SIXTEEN(d, 16)
                 : "l"(a), "l"(b), "r"((int)add), "n"(A_TRANSPOSED), "n"(B_TRANSPOSED));
}
// The same with a (64, 16) in registers.
template <int B_TRANSPOSED>
__device__ __forceinline__ void multiply_registers(float (&d)[32], const u32 (&a)[4], u64 b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." NAME " {" LIST_32
                 "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;}"
                 : SIXTEEN(d, 0), SIXTEEN(d, 16)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add), "n"(B_TRANSPOSED));
}

// d (64, 128) = a b, or d + a b, both in shared memory: a (64, 16) or its transpose, b (16, 128) as (n, k) or
// transposed.
template <int A_TRANSPOSED, int B_TRANSPOSED>
__device__ __forceinline__ void multiply_tiles(float (&d)[64], u64 a, u64 b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." NAME " {" LIST_64
                 "}, %64, %65, p, 1, 1, %67, %68;}"
                 : SIXTEEN(d, 0), SIXTEEN(d, 16), SIXTEEN(d, 32), SIXTEEN(d, 48)
                 : "l"(a), "l"(b), "r"((int)add), "n"(A_TRANSPOSED), "n"(B_TRANSPOSED));
}
// The same with a (64, 16) in registers.
template <int B_TRANSPOSED>
__device__ __forceinline__ void multiply_registers(float (&d)[64], const u32 (&a)[4], u64 b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." NAME " {" LIST_64
                 "}, {%64, %65, %66, %67}, %68, p, 1, 1, %70;}"
                 : SIXTEEN(d, 0), SIXTEEN(d, 16), SIXTEEN(d, 32), SIXTEEN(d, 48)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add), "n"(B_TRANSPOSED));
}

// Required before matmuls whose registers were written by other instructions.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
template <int REGISTERS> __device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS> __device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// ---- barriers in shared memory, and the copies that complete on them

__device__ __forceinline__ void barrier_make(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Waits for the end of phase number `phase`, counted from 0. Earlier phases must have ended.
__device__ __forceinline__ void barrier_wait(u32 barrier, int phase) {
    asm volatile(
        "{.reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra done; bra again; done: }" ::
            "r"(barrier),
        "r"(phase & 1)
        : "memory");
}
// Synchronizes `threads` threads. Ids from 1 on are free.
__device__ __forceinline__ void named_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// A tensor map, written by cuTensorMapEncodeTiled: dimensions (Dh or Dv, T, heads, B) of 16-bit elements, boxes of 64 x
// (rows of a tile), 128-byte swizzle, zeros outside.
struct alignas(64) Map {
    u64 opaque[16];
};
// Copies a tile of LENGTH rows of one head, from row `row` on: BOXES boxes, from box `first` on.
template <int LENGTH, int BOXES = HEAD_DIM / 64>
__device__ __forceinline__ void copy_boxes(u32 tile, const Map& map, u32 barrier, int row, int head, int batch,
                                           int first = 0) {
#pragma unroll
    for (int box = 0; box < BOXES; box++)
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
            "[%2];" ::"r"(tile + box * LENGTH * 128),
            "l"(&map), "r"(barrier), "r"((first + box) * 64), "r"(row), "r"(head), "r"(batch)
            : "memory");
}

// Writes this thread's two rows of a result of N columns, times `factor`, to `x`, the address of the first; the other
// is 8 rows below. The four threads of a quad have two columns each in four blocks of eight. They exchange them, so
// that each has the eight columns of one block and writes 16 bytes. With `rounding_error`, writes the rounding error
// instead.
template <int N> __device__ __forceinline__ void write_rows(const float (&d)[N / 2], const float (&factor)[2], E* x,
                                                            long long stride, int rows, int first_column, int columns,
                                                            int lane, bool rounding_error = false) {
#pragma unroll
    for (int n = 0; n < N / 8; n += 4)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 pairs[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float first = d[(n + i) * 4 + half * 2] * factor[half],
                            second = d[(n + i) * 4 + half * 2 + 1] * factor[half];
                pairs[i] = E::pack(first, second);
                if (rounding_error) {
                    float rounded_first, rounded_second;
                    E::unpack(pairs[i], rounded_first, rounded_second);
                    pairs[i] = E::pack(first - rounded_first, second - rounded_second);
                }
            }
            exchange(pairs, lane);
            const int column = first_column + n * 8 + lane % 4 * CHUNK;
            if (half * 8 < rows && column < columns)
                *reinterpret_cast<uint4*>(x + half * 8 * stride + column) =
                    make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
}

// Copies `bytes` contiguous bytes, a multiple of 16.
__device__ __forceinline__ void copy_bytes(u32 target, const void* source, int bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
        "l"(source), "r"(bytes), "r"(barrier)
        : "memory");
}
// Stores four 8 x 8 matrices as ldmatrix reads them. Lanes 0-7, 8-15 and so on have the addresses of their rows.
__device__ __forceinline__ void store_matrices(u32 address, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
                 "r"(r[2]), "r"(r[3])
                 : "memory");
}
// Required before the tensor cores or the copy engine read what this thread has stored.
__device__ __forceinline__ void stores_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- copies from shared memory, by one thread, which can wait until its copies have read or have written

__device__ __forceinline__ void write_shared(u32 address, float a, float b, float c, float d) {
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(address), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
__device__ __forceinline__ void write_bytes(void* target, u32 source, int bytes) {
    asm volatile(
        "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2; cp.async.bulk.commit_group;" ::"l"(target),
        "r"(source), "r"(bytes)
        : "memory");
}
__device__ __forceinline__ void add_floats(float* target, u32 source, int bytes) {
    asm volatile(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2; cp.async.bulk.commit_group;" ::"l"(
            target),
        "r"(source), "r"(bytes)
        : "memory");
}
__device__ __forceinline__ void writes_have_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void writes_are_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// ---- clusters of blocks, which run at the same time and reach each other's shared memory

__device__ __forceinline__ int cluster_rank() {
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// Synchronizes all threads of the cluster.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
}
// The address in the shared memory of block `rank` that corresponds to `address` in this block's.
__device__ __forceinline__ u32 address_in(int rank, u32 address) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
// These take addresses of `address_in`.
__device__ __forceinline__ void store_there(u32 address, int value) {
    asm volatile("st.shared::cluster.s32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void arrive_there(u32 barrier) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Copies shared memory to another block, and completes on its barrier.
__device__ __forceinline__ void copy_there(u32 target, u32 source, int bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
        "r"(source), "r"(bytes), "r"(barrier)
        : "memory");
}
// barrier_wait for a barrier of this block at which other blocks arrive.
__device__ __forceinline__ void barrier_wait_for_cluster(u32 barrier, int phase) {
    asm volatile(
        "{.reg .pred p; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1; "
        "@p bra done; bra again; done: }" ::"r"(barrier),
        "r"(phase & 1)
        : "memory");
}
