// What `window.cu` asks of the chip, and small arithmetic on four channels at a time.
//
// Owns the type of the activations, loads, stores and copies, and the tensor cores' product. Knows
// nothing of heads and tokens.
#pragma once

#if ACTIVATION_IS_BF16
typedef unsigned short activation;
#else
typedef float activation;
#endif

// --- What only the device has.

__device__ __forceinline__ float4 load_once(const float *address) {
    float4 x;
    asm volatile("ld.global.L1::no_allocate.L2::128B.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "l"(address)
                 : "memory");
    return x;
}

__device__ __forceinline__ void store_once(float *address, float4 x) {
    asm volatile("st.global.cs.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(x.x), "f"(x.y),
                 "f"(x.z), "f"(x.w)
                 : "memory");
}

// Copies 16 bytes to shared memory; there once the thread has waited and all have met.
__device__ __forceinline__ void copy_async(float *target, const float *source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                     (unsigned)__cvta_generic_to_shared(target)),
                 "l"(source)
                 : "memory");
}

__device__ __forceinline__ void copy_quad_async(activation *target, const activation *source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(
                     (unsigned)__cvta_generic_to_shared(target)),
                 "l"(source), "n"(4 * sizeof(activation))
                 : "memory");
}

__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// Has the L2 cache fetch what a later block will load; nobody waits for it.
__device__ __forceinline__ void fetch_ahead(const float *address, int num_bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(num_bytes)
                 : "memory");
}

// c += a b, of 16 x 8 and 8 x 8 values in tf32: the low 13 bits of an operand count for nothing.
__device__ __forceinline__ void multiply_add(float (&c)[4], float4 a, float b0, float b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(__float_as_uint(a.x)), "r"(__float_as_uint(a.y)), "r"(__float_as_uint(a.z)),
          "r"(__float_as_uint(a.w)), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

#if ACTIVATION_IS_BF16
__device__ __forceinline__ float to_float(activation x) {
    return __uint_as_float((unsigned)x << 16);
}

// Four channels as they lie in memory.
typedef uint2 Quad;

__device__ __forceinline__ float4 channels_of(Quad x) {
    return make_float4(__uint_as_float(x.x << 16), __uint_as_float(x.x & 0xffff0000u),
                       __uint_as_float(x.y << 16), __uint_as_float(x.y & 0xffff0000u));
}

__device__ __forceinline__ void store_channels(activation *address, float4 x) {
    uint2 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed.x) : "f"(x.y), "f"(x.x));
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed.y) : "f"(x.w), "f"(x.z));
    *reinterpret_cast<uint2 *>(address) = packed;
}
#else
__device__ __forceinline__ float to_float(activation x) { return x; }

typedef float4 Quad;

__device__ __forceinline__ float4 channels_of(Quad x) { return x; }

__device__ __forceinline__ void store_channels(activation *address, float4 x) {
    *reinterpret_cast<float4 *>(address) = x;
}
#endif

__device__ __forceinline__ Quad &quad_at(activation *address) {
    return *reinterpret_cast<Quad *>(address);
}

__device__ __forceinline__ Quad quad_at(const activation *address) {
    return *reinterpret_cast<const Quad *>(address);
}

__device__ __forceinline__ float4 load_channels(const activation *address) {
    return channels_of(quad_at(address));
}

__device__ __forceinline__ activation *raw_of(float *row) {
    return reinterpret_cast<activation *>(row);
}

// --- Small arithmetic.

__device__ __forceinline__ float leading_bits(float x) {
    return __uint_as_float(__float_as_uint(x) & 0xffffe000u);
}

__device__ __forceinline__ float4 rest_of(float4 x) {
    return make_float4(x.x - leading_bits(x.x), x.y - leading_bits(x.y), x.z - leading_bits(x.z),
                       x.w - leading_bits(x.w));
}

__device__ __forceinline__ float sigmoid(float x) {
    return __fdividef(1.0f, 1.0f + __expf(-x));
}

__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }

__device__ __forceinline__ float4 &at(float *address) {
    return *reinterpret_cast<float4 *>(address);
}

__device__ __forceinline__ float4 at(const float *address) {
    return *reinterpret_cast<const float4 *>(address);
}

__device__ __forceinline__ float dot(float4 a, float4 b, float sum) {
    sum = fmaf(a.x, b.x, sum);
    sum = fmaf(a.y, b.y, sum);
    sum = fmaf(a.z, b.z, sum);
    return fmaf(a.w, b.w, sum);
}

__device__ __forceinline__ float4 scaled(float4 a, float4 b) {
    return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}

__device__ __forceinline__ float sum_of_quad(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
}

// Half of the sums go to the other half of the lanes at each step: lane l ends with sum l / 2 of 16.
template <int COUNT>
__device__ __forceinline__ void add_lanes(float *sums, int lane) {
    constexpr int distance = 2 * COUNT;
    const bool is_upper = lane & distance;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const float sent = is_upper ? sums[i] : sums[i + COUNT];
        const float kept = is_upper ? sums[i + COUNT] : sums[i];
        sums[i] = kept + __shfl_xor_sync(0xffffffffu, sent, distance);
    }
    if constexpr (COUNT > 1) add_lanes<COUNT / 2>(sums, lane);
}
