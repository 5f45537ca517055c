// What `mxfp4.cu` asks of a GPU: products of matrices by a warp, of pairs of bfloat16, and wide
// loads.

#pragma once

typedef unsigned short bfloat16;

// The stream: what is launched behind may start; what was launched before has ended. Before Hopper
// nothing overlaps.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_earlier() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Of both halves.
__device__ __forceinline__ unsigned multiply(unsigned a, unsigned b) {
    unsigned product;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
    return product;
}

// c [16, 8] += a [16, 16] b [16, 8], by a warp. A thread has, with g = lane / 4 and t = lane % 4,
// of a rows g and g + 8 (first a0, a2, then a1, a3), of b column g, each inputs 2 t + {0, 1} and
// then 2 t + {8, 9}; of c rows g and g + 8, columns 2 t + {0, 1}.
__device__ __forceinline__ void multiply_add(float (&c)[4], unsigned a0, unsigned a1, unsigned a2,
                                             unsigned a3, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ bfloat16 round_to_bfloat16(float x) {
    bfloat16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

// 16 bytes that no other block of threads will read.
__device__ __forceinline__ uint4 load_once(const unsigned char *address) {
    uint4 x;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(address));
    return x;
}

// Past the first level of caches, which earlier kernels may have filled.
__device__ __forceinline__ int load_index(const int *address) {
    int x;
    asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(x) : "l"(address));
    return x;
}

__device__ __forceinline__ unsigned load_byte(const unsigned char *address) {
    return __ldg(address);
}

// Two halves of `a` and `b`: the low ones, or the high ones.
__device__ __forceinline__ unsigned low_halves(unsigned a, unsigned b) {
    return __byte_perm(a, b, 0x5410);
}

__device__ __forceinline__ unsigned high_halves(unsigned a, unsigned b) {
    return __byte_perm(a, b, 0x7632);
}

__device__ __forceinline__ float power_of_e(float x) { return __expf(x); }

// Off by a few units in the last place.
__device__ __forceinline__ float divide(float x, float y) { return __fdividef(x, y); }
