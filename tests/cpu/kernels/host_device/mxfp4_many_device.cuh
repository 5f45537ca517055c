// `kernels/moe/mxfp4_many_device.cuh` for a host's compiler: a thread of the CPU for each of a
// block's, shared memory as plain memory, and operands of products read as their descriptors say.

#pragma once

#include "host.cuh"

struct Index {
    int x;
};
thread_local Index threadIdx;
Index blockIdx, gridDim;

inline descriptor from_halves(unsigned low, unsigned high) { return low | (descriptor)high << 32; }
inline int known_here(int x) { return x; }
inline int load_again(const int *address) { return *address; }

constexpr int WARPS = 20;
alignas(1024) unsigned char memory[227 * 1024];

std::unique_ptr<std::barrier<>> block_barrier, named_barrier, warp_barriers[WARPS];
unsigned exchanged[WARPS][LANES][4];

inline void __syncthreads() { block_barrier->arrive_and_wait(); }
inline void __syncwarp() { warp_barriers[threadIdx.x / LANES]->arrive_and_wait(); }
inline void __trap() { std::abort(); }

template <int NUM_THREADS>
void meet() {
    named_barrier->arrive_and_wait();
}

template <int COUNT>
void shrink_to_registers() {}

template <int COUNT>
void grow_to_registers() {}

// --- Barriers.

struct Phases {
    int count = 0;
    std::atomic<int> completed{0}, num_arrived{0};
};
std::map<const void *, Phases> phases;

inline void barrier_init(unsigned long long *barrier, int count) {
    Phases &state = phases[barrier];
    state.count = count;
    state.completed = state.num_arrived = 0;
}

inline void barrier_arrive(unsigned long long *barrier) {
    Phases &state = phases.at(barrier);
    if (++state.num_arrived == state.count) {
        state.num_arrived = 0;
        state.completed++;
    }
}

inline void barrier_arrive_behind_copies(unsigned long long *barrier) { barrier_arrive(barrier); }

inline void barrier_wait(unsigned long long *barrier, int parity) {
    Phases &state = phases.at(barrier);
    while ((state.completed & 1) == parity) std::this_thread::yield();
}

inline void publish_barriers() {}
inline void publish_shared() {}

// --- Shared memory as copies and the matrix units see it.

constexpr unsigned FIRST_ADDRESS = 1024;

inline unsigned address_of(const void *shared) {
    return (unsigned)((const unsigned char *)shared - memory) + FIRST_ADDRESS;
}

inline unsigned char *at_address(unsigned address) { return memory + (address - FIRST_ADDRESS); }

inline void copy_16_bytes(unsigned target, const void *source) {
    if (target % 16 || (size_t)source % 16) std::abort();
    std::memcpy(at_address(target), source, 16);
}

inline void copy_16_bytes_of_row(unsigned target, const void *source) {
    copy_16_bytes(target, source);
}

inline void copy_4_bytes(unsigned target, const void *source) {
    if (target % 4 || (size_t)source % 4) std::abort();
    std::memcpy(at_address(target), source, 4);
}

inline void copies_wait() {}

// --- Products.

inline float widened(unsigned half) {
    unsigned bits = half << 16;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

inline unsigned round_one(float x) {
    unsigned bits;
    std::memcpy(&bits, &x, sizeof bits);
    return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline unsigned round_to_bfloat16(float low, float high) {
    return round_one(low) | round_one(high) << 16;
}

inline unsigned multiply(unsigned a, unsigned b) {
    return round_to_bfloat16(widened(a & 0xffff) * widened(b & 0xffff),
                             widened(a >> 16) * widened(b >> 16));
}

// The value of column `row` at `place` of the sum; rows have 128 swizzled bytes.
inline float operand(descriptor described, int row, int place) {
    if (described >> 62 != 1) std::abort();
    unsigned address = (described & 0x3fff) << 4, stride = (described >> 32 & 0x3fff) << 4;
    address += row / 8 * stride + row % 8 * 128 + place * 2;
    address ^= (address >> 7 & 7) << 4;
    bfloat16 bits;
    std::memcpy(&bits, at_address(address), sizeof bits);
    return widened(bits);
}

inline void products_begin() {}
inline void products_commit() {}
template <int COUNT>
void products_wait() {}
inline void keep(const unsigned (&)[4]) {}

template <int N>
void multiply_add(float (&c)[N / 2], const unsigned (&a)[4], descriptor b) {
    int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    std::memcpy(exchanged[warp][lane], a, sizeof a);
    __syncwarp();
    for (int i = 0; i < N / 2; i++) {
        int row = lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        for (int place = 0; place < 16; place++) {
            int holder = row % 8 * 4 + place % 8 / 2;
            unsigned pair = exchanged[warp][holder][row / 8 + place / 8 * 2];
            c[i] += widened(pair >> place % 2 * 16 & 0xffff) * operand(b, column, place);
        }
    }
    __syncwarp();
}

inline unsigned transpose(unsigned pair) {
    int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    exchanged[warp][lane][0] = pair;
    __syncwarp();
    unsigned transposed = 0;
    for (int i = 0; i < 2; i++) {
        int row = lane % 4 * 2 + i, column = lane / 4;
        unsigned holder = exchanged[warp][row * 4 + column / 2][0];
        transposed |= (holder >> column % 2 * 16 & 0xffff) << i * 16;
    }
    __syncwarp();
    return transposed;
}

inline float power_of_e(float x) { return std::exp(x); }
inline float divide(float x, float y) { return x / y; }

// A launch, block after block; shared memory begins as NaN.
template <typename Arguments>
void launch(void (*kernel)(Arguments), const Arguments &given, int num_blocks, int num_threads,
            int num_named) {
    gridDim.x = num_blocks;
    for (int block = 0; block < num_blocks; block++) {
        std::memset(memory, 0xff, sizeof memory);
        blockIdx.x = block;
        block_barrier = std::make_unique<std::barrier<>>(num_threads);
        named_barrier = std::make_unique<std::barrier<>>(num_named);
        for (auto &barrier : warp_barriers) barrier = std::make_unique<std::barrier<>>(LANES);
        std::vector<std::thread> threads;
        for (int thread = 0; thread < num_threads; thread++)
            threads.emplace_back([&, thread] {
                threadIdx.x = thread;
                kernel(given);
            });
        for (std::thread &thread : threads) thread.join();
    }
}
