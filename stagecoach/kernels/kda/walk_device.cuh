// What `walk.cu` asks of a Hopper GPU besides: barriers in shared memory, the copy engine, meetings of
// part of a block, and registers that go from warpgroup to warpgroup.
#pragma once

#include "hopper.cuh"
#include "window_device.cuh"

// By the copy engine, in one piece.
__device__ __forceinline__ void copy_bulk(void *target, const void *source, int num_bytes,
                                          unsigned long long *barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(address_of(target)),
        "l"(source), "r"(num_bytes), "r"(address_of(barrier))
        : "memory");
}

// What goes through the L2 cache once is the first to leave it.
__device__ __forceinline__ unsigned long long policy_of_streams() {
    unsigned long long policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ void stream_bulk(void *target, const void *source, int num_bytes,
                                            unsigned long long *barrier,
                                            unsigned long long policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1], %2, [%3], %4;" ::"r"(address_of(target)),
        "l"(source), "r"(num_bytes), "r"(address_of(barrier)), "l"(policy)
        : "memory");
}

__device__ __forceinline__ void store_bulk(float *target, const float *source, int num_bytes,
                                           unsigned long long policy) {
    asm volatile(
        "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;\n"
        "cp.async.bulk.commit_group;" ::"l"(target),
        "r"(address_of(source)), "r"(num_bytes), "l"(policy)
        : "memory");
}

// What the thread's bulk stores read may be written again.
__device__ __forceinline__ void wait_for_reads() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Waits until NUM_THREADS threads have come to, or passed, the meeting.
template <int NUM_THREADS>
__device__ __forceinline__ void meet(int meeting) {
    asm volatile("bar.sync %0, %1;" ::"r"(meeting), "n"(NUM_THREADS) : "memory");
}

template <int NUM_THREADS>
__device__ __forceinline__ void pass(int meeting) {
    asm volatile("bar.arrive %0, %1;" ::"r"(meeting), "n"(NUM_THREADS) : "memory");
}

__device__ __forceinline__ float2 &pair_at(float *address) {
    return *reinterpret_cast<float2 *>(address);
}

// Half of 2 COUNT sums go to the other half of the lanes at each step, until a lane has one: that
// of the number which the lane's bits from DISTANCE down are.
template <int COUNT, int DISTANCE>
__device__ __forceinline__ void spread_sums(float *sums, int lane) {
    const bool is_upper = lane & DISTANCE;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const float sent = is_upper ? sums[i] : sums[i + COUNT];
        const float kept = is_upper ? sums[i + COUNT] : sums[i];
        sums[i] = kept + __shfl_xor_sync(0xffffffffu, sent, DISTANCE);
    }
    if constexpr (COUNT > 1) spread_sums<COUNT / 2, DISTANCE / 2>(sums, lane);
}
