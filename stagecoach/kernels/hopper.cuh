// What kernels of several folders ask of a Hopper GPU: barriers in shared memory that copies complete,
// order between ordinary stores and the copy engine, registers that go from warpgroup to warpgroup.
//
// Knows no kernel. What one alone asks for is in the header beside it.
#pragma once

// A wait for a barrier gives up after so many tries of so many nanoseconds.
constexpr int WAIT_NS = 1000, MOST_WAITS = 4000000;

__device__ __forceinline__ unsigned address_of(const void *shared) {
    return (unsigned)__cvta_generic_to_shared(shared);
}

__device__ __forceinline__ void barrier_init(unsigned long long *barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address_of(barrier)), "r"(count)
                 : "memory");
}

// Makes initialised barriers known to the copy engine and to other blocks of a cluster.
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_expect(unsigned long long *barrier, int num_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                     address_of(barrier)),
                 "r"(num_bytes)
                 : "memory");
}

__device__ __forceinline__ void barrier_arrive(unsigned long long *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address_of(barrier)) : "memory");
}

__device__ __forceinline__ void barrier_wait(unsigned long long *barrier, int parity) {
    // A copy that never comes is an error, not a wait without end.
    asm volatile(
        "{\n"
        ".reg .pred passed, goes_on;\n"
        ".reg .u32 tries;\n"
        "mov.u32 tries, 0;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 passed, [%0], %1, %2;\n"
        "@passed bra done;\n"
        "add.u32 tries, tries, 1;\n"
        "setp.lt.u32 goes_on, tries, %3;\n"
        "@goes_on bra again;\n"
        "trap;\n"
        "done:\n"
        "}" ::"r"(address_of(barrier)),
        "r"(parity), "n"(WAIT_NS), "n"(MOST_WAITS)
        : "memory");
}

// Shared memory written by ordinary stores and copies of threads is seen by the copy engine and by
// the matrix units.
__device__ __forceinline__ void publish_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Registers of a thread from here on, for all of a warpgroup.
template <int COUNT>
__device__ __forceinline__ void shrink_to_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
__device__ __forceinline__ void grow_to_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
