// `kernels/moe/mxfp4_device.cuh` for a host's compiler: a thread of the CPU for each of a block's,
// shared memory as plain memory.

#pragma once

#include "host.cuh"

struct Place {
    int x, y;
};
thread_local Place threadIdx;
Place blockIdx;

constexpr int HOST_WARPS = NUM_WARPS;
alignas(16) unsigned char memory[227 * 1024];
std::unique_ptr<std::barrier<>> block_barrier, warp_barriers[HOST_WARPS];
unsigned operands_of[HOST_WARPS][LANES][6];

inline void __syncthreads() { block_barrier->arrive_and_wait(); }
inline void meet_in_warp() { warp_barriers[threadIdx.x / LANES]->arrive_and_wait(); }

inline float widened(unsigned half) {
    unsigned bits = half << 16;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

inline bfloat16 round_to_bfloat16(float x) {
    unsigned bits;
    std::memcpy(&bits, &x, sizeof bits);
    return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline unsigned multiply(unsigned a, unsigned b) {
    unsigned low = round_to_bfloat16(widened(a & 0xffff) * widened(b & 0xffff));
    return low | (unsigned)round_to_bfloat16(widened(a >> 16) * widened(b >> 16)) << 16;
}

inline void multiply_add(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                         unsigned b0, unsigned b1) {
    int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    unsigned mine[6] = {a0, a1, a2, a3, b0, b1};
    std::memcpy(operands_of[warp][lane], mine, sizeof mine);
    meet_in_warp();
    for (int i = 0; i < 4; i++) {
        int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (int input = 0; input < 16; input++) {
            int holder = input % 8 / 2, shift = input % 2 * 16;
            unsigned a = operands_of[warp][row % 8 * 4 + holder][row / 8 + input / 8 * 2];
            unsigned b = operands_of[warp][column * 4 + holder][4 + input / 8];
            c[i] += widened(a >> shift & 0xffff) * widened(b >> shift & 0xffff);
        }
    }
    meet_in_warp();
}

inline void let_next_start() {}
inline void wait_for_earlier() {}

inline uint4 load_once(const unsigned char *address) {
    uint4 x;
    std::memcpy(&x, address, sizeof x);
    return x;
}

inline int load_index(const int *address) { return *address; }
inline unsigned load_byte(const unsigned char *address) { return *address; }
inline unsigned low_halves(unsigned a, unsigned b) { return (a & 0xffff) | b << 16; }
inline unsigned high_halves(unsigned a, unsigned b) { return a >> 16 | (b & 0xffff0000u); }
inline float power_of_e(float x) { return std::exp(x); }
inline float divide(float x, float y) { return x / y; }

// A launch, block after block; shared memory begins as NaN.
template <typename Arguments>
void launch(void (*kernel)(Arguments), const Arguments &given, int num_x, int num_y) {
    for (int block = 0; block < num_x * num_y; block++) {
        std::memset(memory, 0xff, sizeof memory);
        blockIdx = {block % num_x, block / num_x};
        block_barrier = std::make_unique<std::barrier<>>(HOST_WARPS * LANES);
        for (auto &barrier : warp_barriers) barrier = std::make_unique<std::barrier<>>(LANES);
        std::vector<std::thread> threads;
        for (int thread = 0; thread < HOST_WARPS * LANES; thread++)
            threads.emplace_back([&, thread] {
                threadIdx.x = thread;
                kernel(given);
                // Who returns early is waited for by nobody.
                block_barrier->arrive_and_drop();
                warp_barriers[thread / LANES]->arrive_and_drop();
            });
        for (std::thread &thread : threads) thread.join();
    }
}
