// What a block of `walk.cu` keeps in shared memory, where parts of it meet, and the units of work that
// it walks.
#pragma once

#include "walk_device.cuh"
#include "window_arguments.cuh"

// Of a block: those who hold the state, as many who make tokens ready, and two warps that copy.
constexpr int NUM_ROLE_THREADS = 256;
constexpr int NUM_THREADS = 2 * NUM_ROLE_THREADS + 128;  // registers go from warpgroup to warpgroup
constexpr int NUM_MEETING = 2 * NUM_ROLE_THREADS, NUM_WITH_COPIER = NUM_ROLE_THREADS + 32;
constexpr int NUM_UNITS = 4;
constexpr int STATE_SIZE = DIM * DIM;  // of a head
constexpr int NUM_PAIRS = 4;  // of warps that hold the same rows of a state
constexpr int QUARTER = STATE_SIZE / NUM_PAIRS;
// Rows begin in different banks.
constexpr int VALUE_STRIDE = DIM + 8, VECTOR_STRIDE = 2 * DIM + 4;

// Barriers that part of a block meets at, or passes.
enum Meeting {
    TOKENS = 1,     // those who make tokens ready, among themselves
    TOKENS_READY,   // they pass, the state waits
    VECTORS_READ,   // the state passes, they wait
    RESULTS_READY,  // the state passes, they wait: one for even units, one for odd
    PAIR = RESULTS_READY + 2,  // one for each two warps that hold the same values
    ROWS_READ = PAIR + 4,  // those who make tokens ready pass, the copier waits
    STATE_READ,  // two warps pass, the copier waits: one for each quarter
};

// One tile of one head of one segment; of length 0 behind the last.
struct Unit {
    int item;  // head and segment in one number
    int head, number;  // the number is the segment's
    int first, length;  // of the segment's tokens
    int begin;          // of the tile
    int replay;
    int read_slot, write_slot;

    __device__ __forceinline__ int count() const { return min(TILE, length - begin); }
};

// Of a tile, from its preparation to its outputs.
struct Tokens {
    float decay[TILE][DIM];
    float k[TILE][DIM];
    float v[TILE][VALUE_STRIDE];  // later the outputs
    float u[TILE][VALUE_STRIDE];
    // A and P below their diagonals, row after row; behind them half of P's diagonal.
    float pairs[2][4 * TILE];
    float beta[TILE];
};

struct Shared {
    Tokens tokens[2];  // of the present unit and of the next
    // Keys and queries, decayed from the tile's start, in turn; and what tf32 leaves of them.
    float vectors[TILE][VECTOR_STRIDE];
    float rests[TILE][VECTOR_STRIDE];
    float early_q[TILE / 2][DIM];
    float squares[2][TILE][4];       // of keys and queries, sums of four warps
    float products[2][4][4 * TILE];  // pairs, sums of four warps
    // What a unit is made ready from. Rows of q, k and v before the convolution: those before the
    // tile, then its tokens'; then logits of decays, then of gates.
    float4 taps[3][DIM];
    float bias[DIM];
    activation raw[HISTORY + TILE][3][DIM];
    activation raw_decay[TILE][DIM], raw_gate[TILE][DIM];
    float log_rate, raw_beta[TILE], pad[3];
    Unit units[NUM_UNITS];  // a ring
    Unit items[2];          // the first units of items of even and of odd indices
    unsigned long long rows_arrived;
    unsigned long long replay_arrived[2];  // of states of even and of odd indices
    unsigned long long state_arrived[NUM_PAIRS], unused[8];  // a multiple of 64 bytes in all
};

static_assert(sizeof(Shared) == SHARED_BYTES, "the host reserves another size");
// The copy engine also takes odd multiples of 16: the walk was slower with them.
static_assert(sizeof(Shared) % 64 == 0, "states behind it lie at multiples of 64 bytes");

// Behind it: the state that comes, that which goes, and the rows that are replayed on states of even
// and of odd indices.
__device__ __forceinline__ float *coming_of(Shared &shared) {
    return reinterpret_cast<float *>(&shared + 1);
}

__device__ __forceinline__ float *going_of(Shared &shared) {
    return coming_of(shared) + STATE_SIZE;
}

__device__ __forceinline__ float *replayed_of(Shared &shared, const Arguments &a, int index) {
    return coming_of(shared) + 2 * STATE_SIZE + (index & 1) * a.max_replay * ROW_WIDTH;
}

// The unit of an item's first tile; an item behind the last has none. Segments without tokens are
// the last of a step.
__device__ __forceinline__ Unit unit_of(const Arguments &a, int item) {
    Unit unit = {};
    unit.item = item;
    unit.number = item / a.num_heads;
    if (unit.number >= a.num_segments) return unit;
    unit.head = item - unit.number * a.num_heads;
    unit.first = a.offsets[unit.number];
    unit.length = a.offsets[unit.number + 1] - unit.first;
    unit.replay = a.replay[unit.number];
    unit.read_slot = a.read_slots[unit.number];
    unit.write_slot = a.write_slots[unit.number];
    return unit;
}

// What a block does behind a unit: the segment's next tile, or an item further on.
__device__ __forceinline__ Unit unit_behind(const Arguments &a, const Unit &unit, int num_blocks) {
    if (unit.begin + TILE >= unit.length)
        return unit.length == 0 ? unit : unit_of(a, unit.item + num_blocks);
    Unit behind = unit;
    behind.begin += TILE;
    return behind;
}

__device__ __forceinline__ long long record_offset(const Arguments &a, const Unit &unit, int slot,
                                                   int row) {
    return slot * a.records_stride + (long long)(row * a.num_heads + unit.head) * ROW_WIDTH;
}

__device__ __forceinline__ long long state_offset(const Arguments &a, const Unit &unit, int slot) {
    return slot * a.states_stride + (long long)unit.head * STATE_SIZE;
}
