// What `mxfp4_many.cu` asks of a Hopper GPU: barriers in shared memory, copies that complete them,
// and products of matrices by warpgroups, the first operand in registers.

#pragma once

#include "hopper.cuh"

typedef unsigned short bfloat16;
typedef unsigned long long descriptor;

__device__ __forceinline__ descriptor from_halves(unsigned low, unsigned high) {
    descriptor both;
    asm("mov.b64 %0, {%1, %2};" : "=l"(both) : "r"(low), "r"(high));
    return both;
}

// The same number; what depends on it is not worked out earlier than here.
__device__ __forceinline__ int known_here(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// A number that nobody writes meanwhile; asked for here and not earlier.
__device__ __forceinline__ int load_again(const int *address) {
    int x;
    asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(x) : "l"(address));
    return x;
}

// Arrives as soon as all copies are complete that this thread began.
__device__ __forceinline__ void barrier_arrive_behind_copies(unsigned long long *barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(address_of(barrier))
                 : "memory");
}

__device__ __forceinline__ void copy_16_bytes(unsigned target, const void *source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source)
                 : "memory");
}

// The same of a row whose next bytes will be asked for soon: they come to the second cache.
__device__ __forceinline__ void copy_16_bytes_of_row(unsigned target, const void *source) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(target), "l"(source)
                 : "memory");
}

__device__ __forceinline__ void copy_4_bytes(unsigned target, const void *source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(target), "l"(source) : "memory");
}

// Until all copies are complete that this thread began.
__device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

template <int NUM_THREADS>
__device__ __forceinline__ void meet() {
    asm volatile("bar.sync 1, %0;" ::"n"(NUM_THREADS) : "memory");
}

__device__ __forceinline__ void products_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void products_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Until at most so many groups of products are under way.
template <int COUNT>
__device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(COUNT) : "memory");
}

// Keeps operands in their registers up to here.
__device__ __forceinline__ void keep(const unsigned (&a)[4]) {
    asm volatile("" ::"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));
}

// c [64, N] += a [64, 16] b [16, N], by a warpgroup. Of warp w, a
// thread has, with g = lane / 4 and t = lane % 4, of a rows 16 w + g (first and third register) and
// 16 w + g + 8, each inputs 2 t + {0, 1} and then 2 t + {8, 9}; of c the same rows, and of every 8
// columns 2 t + {0, 1}.
template <int N>
__device__ __forceinline__ void multiply_add(float (&c)[N / 2], const unsigned (&a)[4],
                                             descriptor b);

#define MULTIPLY_ADD(N, REGISTERS, A0, A1, A2, A3, B, OPERANDS)                                   \
    template <>                                                                                   \
    __device__ __forceinline__ void multiply_add<N>(float (&c)[N / 2], const unsigned (&a)[4],    \
                                                    descriptor b) {                               \
        asm volatile(                                                                             \
            "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" REGISTERS "}, {%" #A0    \
            ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", 1, 1, 1, 0;"                               \
            : OPERANDS                                                                            \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                 \
    }

#define FOUR(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define EIGHT(i) FOUR(i), FOUR(i + 4)
#define SIXTEEN(i) EIGHT(i), EIGHT(i + 8)
#define NAMES_4 "%0, %1, %2, %3"
#define NAMES_8 NAMES_4 ", %4, %5, %6, %7"
#define NAMES_16 NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_24 NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define NAMES_32 NAMES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_48                                                                                  \
    NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_64                                                                                  \
    NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_80                                                                                  \
    NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define NAMES_96                                                                                  \
    NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES_112                                                                                 \
    NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, " \
             "%110, %111"
#define NAMES_128                                                                                 \
    NAMES_112 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, "  \
              "%125, %126, %127"

// A macro's argument list splits at commas, so lists come as one.
#define LIST(...) __VA_ARGS__

MULTIPLY_ADD(8, NAMES_4, 4, 5, 6, 7, 8, LIST(FOUR(0)))
MULTIPLY_ADD(16, NAMES_8, 8, 9, 10, 11, 12, LIST(EIGHT(0)))
MULTIPLY_ADD(32, NAMES_16, 16, 17, 18, 19, 20, LIST(SIXTEEN(0)))
MULTIPLY_ADD(48, NAMES_24, 24, 25, 26, 27, 28, LIST(SIXTEEN(0), EIGHT(16)))
MULTIPLY_ADD(64, NAMES_32, 32, 33, 34, 35, 36, LIST(SIXTEEN(0), SIXTEEN(16)))
MULTIPLY_ADD(96, NAMES_48, 48, 49, 50, 51, 52, LIST(SIXTEEN(0), SIXTEEN(16), SIXTEEN(32)))
MULTIPLY_ADD(128, NAMES_64, 64, 65, 66, 67, 68,
             LIST(SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48)))
MULTIPLY_ADD(160, NAMES_80, 80, 81, 82, 83, 84,
             LIST(SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48), SIXTEEN(64)))
MULTIPLY_ADD(256, NAMES_128, 128, 129, 130, 131, 132,
             LIST(SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48), SIXTEEN(64), SIXTEEN(80),
                  SIXTEEN(96), SIXTEEN(112)))

// Of both halves.
__device__ __forceinline__ unsigned multiply(unsigned a, unsigned b) {
    unsigned product;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
    return product;
}

// Two numbers rounded to bfloat16, the first in the low half.
__device__ __forceinline__ unsigned round_to_bfloat16(float low, float high) {
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// By a warp, of 8 x 8 values: from columns 2 t + {0, 1} of row g to those of the transposed one.
__device__ __forceinline__ unsigned transpose(unsigned pair) {
    unsigned transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
    return transposed;
}

__device__ __forceinline__ float power_of_e(float x) { return __expf(x); }

// Off by a few units in the last place.
__device__ __forceinline__ float divide(float x, float y) { return __fdividef(x, y); }
