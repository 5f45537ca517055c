// What `window.cu` asks of a Hopper GPU: barriers in shared memory, the copy engine, products of
// matrices by warpgroups, and powers.
//
// ROWS says which products are needed.

#pragma once

#include "hopper.cuh"

typedef unsigned short bfloat16;
typedef unsigned long long descriptor;

struct alignas(64) TensorMap {
    unsigned long long words[16];
};

// One box of the cache's rows, from (column, row) on.
__device__ __forceinline__ void copy_box(void *target, const TensorMap *map, int column, int row,
                                         unsigned long long *barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];" ::"r"(address_of(target)),
        "l"(map), "r"(column), "r"(row), "r"(address_of(barrier))
        : "memory");
}

template <int NUM_THREADS>
__device__ __forceinline__ void meet() {
    asm volatile("bar.sync 1, %0;" ::"n"(NUM_THREADS) : "memory");
}

__device__ __forceinline__ void products_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void products_end() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

#if IS_FP8
#define TYPES "f16.f16"
#else
#define TYPES "bf16.bf16"
#endif

// c [64, N] += a [64, 16] b [16, N]. Unless `accumulates`, c = a b. With A_IS_COLUMNS `a` lies
// with its 64 rows side by side.
#define MULTIPLY_ADD(N, COUNT, REGISTERS, A, B, FLAG, TRANSPOSES, OPERANDS)                       \
    template <int A_IS_COLUMNS>                                                                   \
    __device__ __forceinline__ void multiply_add(float (&c)[COUNT], descriptor a, descriptor b,   \
                                                 int accumulates) {                               \
        asm volatile(                                                                             \
            "{\n.reg .pred adds;\nsetp.ne.b32 adds, %" #FLAG ", 0;\n"                             \
            "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPES " {" REGISTERS "}, %" #A      \
            ", %" #B ", adds, 1, 1, %" #TRANSPOSES ", 0;\n}"                                      \
            : OPERANDS                                                                            \
            : "l"(a), "l"(b), "r"(accumulates), "n"(A_IS_COLUMNS));                               \
    }

#define FOUR(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define EIGHT(i) FOUR(i), FOUR(i + 4)
#define REGISTERS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define REGISTERS_12 REGISTERS_8 ", %8, %9, %10, %11"
#define REGISTERS_16 REGISTERS_12 ", %12, %13, %14, %15"
#define REGISTERS_24 REGISTERS_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define REGISTERS_32 REGISTERS_24 ", %24, %25, %26, %27, %28, %29, %30, %31"

// A macro's argument list splits at commas, so lists come as one.
#define LIST(...) __VA_ARGS__

#if ROWS == 32
MULTIPLY_ADD(16, 8, REGISTERS_8, 8, 9, 10, 11, LIST(EIGHT(0)))
MULTIPLY_ADD(32, 16, REGISTERS_16, 16, 17, 18, 19, LIST(EIGHT(0), EIGHT(8)))
#elif ROWS == 48
MULTIPLY_ADD(24, 12, REGISTERS_12, 12, 13, 14, 15, LIST(EIGHT(0), FOUR(8)))
MULTIPLY_ADD(48, 24, REGISTERS_24, 24, 25, 26, 27, LIST(EIGHT(0), EIGHT(8), EIGHT(16)))
#else
MULTIPLY_ADD(32, 16, REGISTERS_16, 16, 17, 18, 19, LIST(EIGHT(0), EIGHT(8)))
MULTIPLY_ADD(64, 32, REGISTERS_32, 32, 33, 34, 35, LIST(EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24)))
#endif

__device__ __forceinline__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ bfloat16 round_to_bfloat16(float x) {
    bfloat16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

// 16 bytes that nobody reads again.
__device__ __forceinline__ uint4 load_once(const unsigned char *address) {
    uint4 x;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(address));
    return x;
}

// Four values of E4M3 as float16, exact.
__device__ __forceinline__ uint2 widen(unsigned four) {
    uint2 pairs;
    asm("{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n"
        "}"
        : "=r"(pairs.x), "=r"(pairs.y)
        : "r"(four));
    return pairs;
}

// A share as the matrix units take it.
__device__ __forceinline__ unsigned short round_share(float x) {
    if (!IS_FP8) return round_to_bfloat16(x);
    unsigned short y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

// Two bfloat16 times a power of two as float16.
__device__ __forceinline__ unsigned scaled_pair(unsigned pair, float power) {
    float low = __int_as_float(pair << 16) * power;
    float high = __int_as_float(pair & 0xffff0000u) * power;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// The largest of eight bfloat16 without their signs, as bits.
__device__ __forceinline__ unsigned largest_bits(uint4 x) {
    unsigned pair = __vmaxu2(__vmaxu2(x.x & 0x7fff7fffu, x.y & 0x7fff7fffu),
                             __vmaxu2(x.z & 0x7fff7fffu, x.w & 0x7fff7fffu));
    return max(pair >> 16, pair & 0xffffu);
}

__device__ __forceinline__ void raise_to(unsigned *shared, unsigned x) { atomicMax(shared, x); }
