// `kernels/mla/window_device.cuh` for a host's compiler: a thread of the CPU for each of a block's,
// shared memory as plain memory, and operands of products read as their descriptors say.

#pragma once

#include "host.cuh"

struct Place {
    int x;
};
thread_local Place threadIdx;
Place blockIdx;

struct alignas(8) float2 {
    float x, y;
};

// Here the first two words are the matrix' address and the bytes of a row.
struct alignas(64) TensorMap {
    unsigned long long words[16];
};

constexpr int MEMORY_BYTES = 227 * 1024;
constexpr int WARPS = 16;
alignas(1024) unsigned char memory[MEMORY_BYTES];

std::unique_ptr<std::barrier<>> block_barrier, named_barrier, warp_barriers[WARPS];
float exchanged[WARPS][LANES];

inline void __syncthreads() { block_barrier->arrive_and_wait(); }
inline void __syncwarp() { warp_barriers[threadIdx.x / LANES]->arrive_and_wait(); }
inline void __trap() { std::abort(); }

inline float __int_as_float(unsigned bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

template <typename T>
T value_of_lane(T x, int lane) {
    static_assert(sizeof(T) == sizeof(float));
    float *values = exchanged[threadIdx.x / LANES];
    std::memcpy(values + threadIdx.x % LANES, &x, sizeof x);
    __syncwarp();
    std::memcpy(&x, values + lane, sizeof x);
    __syncwarp();
    return x;
}

template <typename T>
T __shfl_sync(unsigned, T x, int lane) {
    return value_of_lane(x, lane);
}

template <typename T>
T __shfl_xor_sync(unsigned, T x, int step) {
    return value_of_lane(x, threadIdx.x % LANES ^ step);
}

template <typename T>
T __shfl_up_sync(unsigned, T x, int step) {
    int lane = threadIdx.x % LANES;
    return value_of_lane(x, lane < step ? lane : lane - step);
}

inline int __reduce_add_sync(unsigned, int x) {
    int sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += value_of_lane(x, lane);
    return sum;
}

// --- Barriers that copies complete, too.

struct Phases {
    int count = 0;
    std::atomic<int> completed{0}, num_arrived{0}, num_bytes{0};
};
std::map<const void *, Phases> phases;

inline void barrier_init(unsigned long long *barrier, int count) {
    Phases &state = phases[barrier];
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

template <int NUM_THREADS>
void meet() {
    named_barrier->arrive_and_wait();
}

template <int COUNT>
void shrink_to_registers() {}

template <int COUNT>
void grow_to_registers() {}

// --- Shared memory as the copy engine and the matrix units see it.

constexpr unsigned FIRST_ADDRESS = 1024;

inline unsigned address_of(const void *shared) {
    return (unsigned)((const unsigned char *)shared - memory) + FIRST_ADDRESS;
}

inline unsigned char *at_address(unsigned address) { return memory + (address - FIRST_ADDRESS); }

// 16-byte pieces change places within each 128 bytes, by the number of the 128 bytes.
inline unsigned swizzle(unsigned address) { return address ^ (address >> 7 & 7) << 4; }

inline void fetch_map(const TensorMap *) {}

inline void copy_box(void *target, const TensorMap *map, int column, int row,
                     unsigned long long *barrier) {
    const char *source = (const char *)map->words[0] + column * sizeof(bfloat16);
    for (int i = 0; i < 64; i++)
        for (int piece = 0; piece < 8; piece++)
            std::memcpy(at_address(swizzle(address_of(target) + i * 128 + piece * 16)),
                        source + (long long)(row + i) * map->words[1] + piece * 16, 16);
    Phases &state = phases.at(barrier);
    if ((state.num_bytes -= 64 * 128) == 0) state.completed++;
}

inline float value_of_float16(unsigned short bits) {
    _Float16 x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

inline unsigned short float16_of(float value) {
    _Float16 x = value;
    unsigned short bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

// The value in `row` at `place` of the sum.
inline float operand(descriptor described, bool is_columns, int row, int place) {
    unsigned address = (described & 0x3fff) << 4;
    unsigned leading = (described >> 16 & 0x3fff) << 4, stride = (described >> 32 & 0x3fff) << 4;
    bool is_swizzled = described >> 62 == 1;
    if (!is_swizzled)
        address += row / 8 * stride + place / 8 * leading + row % 8 * 16 + place % 8 * 2;
    else if (is_columns)
        address += place / 8 * stride + place % 8 * 128 + row / 64 * leading + row % 64 * 2;
    else
        address += row / 8 * stride + row % 8 * 128 + place * 2;
    bfloat16 bits;
    std::memcpy(&bits, at_address(is_swizzled ? swizzle(address) : address), sizeof bits);
    return IS_FP8 ? value_of_float16(bits) : __int_as_float((unsigned)bits << 16);
}

inline void products_begin() { __syncwarp(); }
inline void products_end() { __syncwarp(); }

template <int A_IS_COLUMNS, int COUNT>
void multiply_add(float (&c)[COUNT], descriptor a, descriptor b, int accumulates) {
    int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES % 4;
    for (int i = 0; i < COUNT; i++) {
        int row = warp * 16 + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        float sum = accumulates ? c[i] : 0.0f;
        for (int place = 0; place < 16; place++)
            sum += operand(a, A_IS_COLUMNS, row, place) * operand(b, false, column, place);
        c[i] = sum;
    }
}

inline float power_of_2(float x) { return std::exp2(x); }

inline bfloat16 round_to_bfloat16(float x) {
    unsigned bits;
    std::memcpy(&bits, &x, sizeof bits);
    return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline uint4 load_once(const unsigned char *address) {
    uint4 x;
    std::memcpy(&x, address, sizeof x);
    return x;
}

inline unsigned widen_one(unsigned code) {
    int exponent = code >> 3 & 15, digits = code & 7;
    float size = exponent ? std::ldexp(8 + digits, exponent - 10) : std::ldexp(digits, -9);
    unsigned bits = (code & 127) == 127 ? 0x7fff : float16_of(size);
    return bits | (code & 128) << 8;
}

inline uint2 widen(unsigned four) {
    return {widen_one(four & 255) | widen_one(four >> 8 & 255) << 16,
            widen_one(four >> 16 & 255) | widen_one(four >> 24) << 16};
}

inline unsigned short round_share(float x) { return IS_FP8 ? float16_of(x) : round_to_bfloat16(x); }

inline unsigned scaled_pair(unsigned pair, float power) {
    return float16_of(__int_as_float(pair << 16) * power) |
           float16_of(__int_as_float(pair & 0xffff0000u) * power) << 16;
}

inline unsigned largest_bits(uint4 x) {
    unsigned top = 0;
    for (unsigned pair : {x.x, x.y, x.z, x.w}) top = max({top, pair >> 16 & 0x7fff, pair & 0x7fff});
    return top;
}

inline void raise_to(unsigned *shared, unsigned x) {
    std::atomic_ref<unsigned> top(*shared);
    for (unsigned old = top; old < x && !top.compare_exchange_weak(old, x);) continue;
}

// --- A launch, block after block; shared memory begins as NaN.

template <typename Arguments>
void launch(void (*kernel)(Arguments), const Arguments &given, int num_blocks, int num_threads,
            int num_named) {
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
