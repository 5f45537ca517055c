// `kernels/linear/fp8_product_device.cuh` for a host's compiler: a thread of the CPU for each of a
// cluster's, shared memory as plain memory, and operands of products read as their descriptors say.

#pragma once

#include "host.cuh"

struct Place {
    int x;
};
thread_local Place threadIdx, blockIdx;

struct alignas(16) float4 {
    float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float4 add(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

// Here the words are the matrix' address, its rows, its columns and the bytes of a row.
struct alignas(64) TensorMap {
    unsigned long long words[16];
};

constexpr int MEMORY_BYTES = 227 * 1024, MOST_BLOCKS = 8;
constexpr int WARPS = 16;

struct Block {
    alignas(1024) unsigned char memory[MEMORY_BYTES];
    std::unique_ptr<std::barrier<>> barrier, named_barrier, warp_barriers[WARPS];
    int exchanged[WARPS][LANES];
};
Block blocks[MOST_BLOCKS];
std::unique_ptr<std::barrier<>> cluster_barrier;
int num_blocks_of_cluster;
thread_local int own_block;

inline Block &block() { return blocks[own_block]; }
inline unsigned char *shared_memory() { return block().memory; }
inline int cluster_size() { return num_blocks_of_cluster; }
inline int cluster_rank() { return own_block; }
inline void meet_cluster() { cluster_barrier->arrive_and_wait(); }
inline void __syncthreads() { block().barrier->arrive_and_wait(); }
inline void __syncwarp() { block().warp_barriers[threadIdx.x / LANES]->arrive_and_wait(); }
inline void __trap() { std::abort(); }
inline void let_next_start() {}
inline void wait_for_earlier() {}

inline float __int_as_float(unsigned bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}
inline float __fdiv_rn(float x, float y) { return x / y; }

inline int __shfl_sync(unsigned, int x, int lane) {
    int *values = block().exchanged[threadIdx.x / LANES];
    values[threadIdx.x % LANES] = x;
    __syncwarp();
    x = values[lane];
    __syncwarp();
    return x;
}

template <int NUM_THREADS>
void meet() {
    block().named_barrier->arrive_and_wait();
}

// --- Barriers that copies complete, too.

struct Phases {
    int count = 0;
    std::atomic<int> completed{0}, num_arrived{0}, num_bytes{0};
};
std::map<const void *, Phases> phases;

inline void barrier_init(unsigned long long *barrier, int count) {
    Phases &state = phases.at(barrier);
    state.count = count;
    state.completed = state.num_arrived = state.num_bytes = 0;
}

inline void barrier_expect(unsigned long long *barrier, int num_bytes) {
    phases.at(barrier).num_bytes = num_bytes;
}

inline void barrier_arrive(unsigned long long *barrier) {
    Phases &state = phases.at(barrier);
    if (++state.num_arrived == state.count) {
        state.num_arrived = 0;
        state.completed++;
    }
}

inline void barrier_wait(unsigned long long *barrier, int parity) {
    Phases &state = phases.at(barrier);
    while ((state.completed & 1) == parity) std::this_thread::yield();
}

inline void publish_barriers() {}
inline void publish_shared() {}

// --- Shared memory as the copy engine and the matrix units see it.

constexpr unsigned FIRST_ADDRESS = 1024;

inline unsigned address_of(const void *shared) {
    return (unsigned)((const unsigned char *)shared - block().memory) + FIRST_ADDRESS;
}

inline unsigned char *at_address(unsigned address) {
    return block().memory + (address - FIRST_ADDRESS);
}

inline float4 load_from_block(unsigned address, int other) {
    float4 x;
    std::memcpy(&x, blocks[other].memory + (address - FIRST_ADDRESS), sizeof x);
    return x;
}

// 16-byte pieces change places within each 128 bytes, by the number of the 128 bytes.
inline unsigned swizzle(unsigned address) { return address ^ (address >> 7 & 7) << 4; }

inline void fetch_map(const TensorMap *) {}

inline void copy_box(void *target, const TensorMap *map, int column, int row, int num_rows,
                     unsigned long long *barrier) {
    auto [address, all_rows, all_columns, row_bytes] =
        std::tie(map->words[0], map->words[1], map->words[2], map->words[3]);
    for (int i = 0; i < num_rows; i++)
        for (int j = 0; j < 128; j++) {
            bool is_inside = row + i < (int)all_rows && column + j < (int)all_columns;
            *at_address(swizzle(address_of(target) + i * 128 + j)) =
                is_inside ? ((unsigned char *)address)[(row + i) * row_bytes + column + j] : 0;
        }
    Phases &state = phases.at(barrier);
    if ((state.num_bytes -= num_rows * 128) == 0) state.completed++;
}

inline float value_of(unsigned char code) {
    int exponent = code >> 3 & 15, digits = code & 7;
    float size = exponent ? std::ldexp(8 + digits, exponent - 10) : std::ldexp(digits, -9);
    if ((code & 127) == 127) size = NAN;
    return code & 128 ? -size : size;
}

// The value in `row` at `place` of the sum.
inline float operand(descriptor described, int row, int place) {
    unsigned address = (described & 0x3fff) << 4;
    unsigned leading = (described >> 16 & 0x3fff) << 4, stride = (described >> 32 & 0x3fff) << 4;
    if (described >> 62 == 1)
        address = swizzle(address + row / 8 * stride + row % 8 * 128 + place);
    else
        address += row / 8 * stride + place / 16 * leading + row % 8 * 16 + place % 16;
    return value_of(*at_address(address));
}

inline void products_begin() { __syncwarp(); }
inline void products_end() { __syncwarp(); }

template <int COUNT>
void multiply_add(float (&c)[COUNT], descriptor a, descriptor b, int accumulates) {
    int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES % 4;
    for (int i = 0; i < COUNT; i++) {
        int row = warp * 16 + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        float sum = accumulates ? c[i] : 0.0f;
        for (int place = 0; place < 32; place++)
            sum += operand(a, row, place) * operand(b, column, place);
        c[i] = sum;
    }
}

inline unsigned round_to_bfloat16(float x) {
    unsigned bits;
    std::memcpy(&bits, &x, sizeof bits);
    return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline unsigned round_to_bfloat16s(float first, float second) {
    return round_to_bfloat16(first) | round_to_bfloat16(second) << 16;
}

// --- Values of a row.

inline unsigned largest_bits(unsigned first, unsigned second) {
    return max(max(first >> 16 & 0x7fff, first & 0x7fff), max(second >> 16 & 0x7fff, second & 0x7fff));
}

inline unsigned largest_of_warp(unsigned x) {
    unsigned largest = 0;
    for (int lane = 0; lane < LANES; lane++) largest = max(largest, (unsigned)__shfl_sync(~0u, x, lane));
    return largest;
}

// The nearest code; of two as near the even one.
inline unsigned narrow_one(unsigned bits, float factor) {
    float x = __int_as_float(bits << 16) / factor;
    int nearest = std::isnan(x) ? 127 : 0;
    for (int code = 1; code < 127; code++) {
        float gain = std::fabs(std::fabs(x) - value_of(nearest)) - std::fabs(std::fabs(x) - value_of(code));
        if (gain > 0 || (gain == 0 && code % 2 == 0)) nearest = code;
    }
    return nearest | (bits >> 8 & 128);
}

inline unsigned narrow(unsigned first, unsigned second, float factor, float) {
    return narrow_one(first & 0xffff, factor) | narrow_one(first >> 16, factor) << 8 |
           narrow_one(second & 0xffff, factor) << 16 | narrow_one(second >> 16, factor) << 24;
}

// --- A launch, cluster after cluster; shared memory begins as NaN.

template <typename Arguments, typename Shared>
void launch(void (*kernel)(Arguments), const Arguments &given, int num_clusters, int cluster,
            int num_threads, int num_named) {
    num_blocks_of_cluster = cluster;
    for (int number = 0; number < cluster; number++) {
        Shared &shared = *(Shared *)blocks[number].memory;
        for (auto &barrier : shared.full) phases[&barrier];
        for (auto &barrier : shared.empty) phases[&barrier];
    }
    for (int first = 0; first < num_clusters * cluster; first += cluster) {
        cluster_barrier = std::make_unique<std::barrier<>>(num_threads * cluster);
        std::vector<std::thread> threads;
        for (int number = 0; number < cluster; number++) {
            Block &block = blocks[number];
            std::memset(block.memory, 0xff, sizeof block.memory);
            block.barrier = std::make_unique<std::barrier<>>(num_threads);
            block.named_barrier = std::make_unique<std::barrier<>>(num_named);
            for (auto &barrier : block.warp_barriers)
                barrier = std::make_unique<std::barrier<>>(LANES);
            for (int thread = 0; thread < num_threads; thread++)
                threads.emplace_back([&, number, thread] {
                    own_block = number;
                    threadIdx.x = thread;
                    blockIdx.x = first + number;
                    kernel(given);
                });
        }
        for (std::thread &thread : threads) thread.join();
    }
}
