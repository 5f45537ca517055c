// What `fp8_product.cu` asks of a Hopper GPU: barriers in shared memory, the copy engine, clusters of
// blocks, products of matrices by warpgroups, and starting before the kernel in front has ended.
//
// ROWS says which product is needed.

#pragma once

#include "hopper.cuh"

typedef unsigned short bfloat16;
typedef unsigned long long descriptor;

struct alignas(64) TensorMap {
    unsigned long long words[16];
};

__device__ __forceinline__ unsigned char *shared_memory() {
    extern __shared__ __align__(1024) unsigned char memory[];
    return memory;
}

__device__ __forceinline__ void fetch_map(const TensorMap *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// One box of `num_rows` rows of 128 bytes, from (column, row) on; the map knows how many.
__device__ __forceinline__ void copy_box(void *target, const TensorMap *map, int column, int row,
                                         int /*num_rows*/, unsigned long long *barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];" ::"r"(address_of(target)),
        "l"(map), "r"(column), "r"(row), "r"(address_of(barrier))
        : "memory");
}

// --- The stream: what is launched behind may start; what was launched before has ended.

__device__ __forceinline__ void let_next_start() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ void wait_for_earlier() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

// --- Threads that meet.

template <int NUM_THREADS>
__device__ __forceinline__ void meet() {
    asm volatile("bar.sync 1, %0;" ::"n"(NUM_THREADS) : "memory");
}

// All threads of all blocks of a cluster; what they wrote is seen.
__device__ __forceinline__ void meet_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ int cluster_size() {
    int x;
    asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(x));
    return x;
}

__device__ __forceinline__ int cluster_rank() {
    int x;
    asm("mov.u32 %0, %%cluster_ctaid.x;" : "=r"(x));
    return x;
}

// From the same place of shared memory in a block of the cluster.
__device__ __forceinline__ float4 load_from_block(unsigned address, int block) {
    float4 x;
    asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(block));
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(address)
                 : "memory");
    return x;
}

// --- Products.

__device__ __forceinline__ void products_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void products_end() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// c [64, ROWS] += a [64, 32] b [32, ROWS]. Unless `accumulates`, c = a b.
#define MULTIPLY_ADD(N, COUNT, REGISTERS, A, B, FLAG, OPERANDS)                                   \
    __device__ __forceinline__ void multiply_add(float (&c)[COUNT], descriptor a, descriptor b,   \
                                                 int accumulates) {                               \
        asm volatile(                                                                             \
            "{\n.reg .pred adds;\nsetp.ne.b32 adds, %" #FLAG ", 0;\n"                             \
            "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" REGISTERS "}, %" #A      \
            ", %" #B ", adds, 1, 1;\n}"                                                           \
            : OPERANDS                                                                            \
            : "l"(a), "l"(b), "r"(accumulates));                                                  \
    }

#define FOUR(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define SIXTEEN(i) FOUR(i), FOUR(i + 4), FOUR(i + 8), FOUR(i + 12)
#define REGISTERS_4 "%0, %1, %2, %3"
#define REGISTERS_16 REGISTERS_4 ", %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define REGISTERS_32                                                                              \
    REGISTERS_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"

// A macro's argument list splits at commas, so lists come as one.
#define LIST(...) __VA_ARGS__

#if ROWS == 8
MULTIPLY_ADD(8, 4, REGISTERS_4, 4, 5, 6, LIST(FOUR(0)))
#elif ROWS == 32
MULTIPLY_ADD(32, 16, REGISTERS_16, 16, 17, 18, LIST(SIXTEEN(0)))
#else
MULTIPLY_ADD(64, 32, REGISTERS_32, 32, 33, 34, LIST(SIXTEEN(0), SIXTEEN(16)))
#endif

__device__ __forceinline__ float4 add(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// Two floats side by side, the first in the lower half.
__device__ __forceinline__ unsigned round_to_bfloat16s(float first, float second) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

// --- Values of a row.

// The largest of four bfloat16 without their signs, as bits.
__device__ __forceinline__ unsigned largest_bits(unsigned first, unsigned second) {
    unsigned pair = __vmaxu2(first & 0x7fff7fffu, second & 0x7fff7fffu);
    return max(pair >> 16, pair & 0xffffu);
}

__device__ __forceinline__ unsigned largest_of_warp(unsigned x) {
    return __reduce_max_sync(~0u, x);
}

// Four bfloat16, divided by a factor, as E4M3. `inverse` is 1 / factor, to nearest: so the third
// line gives the quotient to nearest.
__device__ __forceinline__ unsigned narrow(unsigned first, unsigned second, float factor,
                                           float inverse) {
    float x[4] = {__int_as_float(first << 16), __int_as_float(first & 0xffff0000u),
                  __int_as_float(second << 16), __int_as_float(second & 0xffff0000u)};
    unsigned codes;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float quotient = __fmul_rn(x[i], inverse);
        float rest = __fmaf_rn(-quotient, factor, x[i]);
        x[i] = __fmaf_rn(rest, inverse, quotient);
    }
    asm("{\n"
        ".reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n"
        "}"
        : "=r"(codes)
        : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]));
    return codes;
}
