// The warps that have the copy engine bring rows of tokens, and states with what is replayed on
// them.
#pragma once

#include "walk_memory.cuh"
#include "window_rows.cuh"

// Asks for a quarter of a state: the rows that two warps hold. Behind the last item nothing comes.
// In pieces, a lane each: one large copy would keep those behind it waiting.
__device__ __forceinline__ void fetch_quarter(Shared &shared, const Arguments &a, const Unit &unit,
                                              int pair, int lane) {
    constexpr int PIECE = 256;  // values
    unsigned long long *barrier = &shared.state_arrived[pair];
    if (unit.length == 0) {
        if (lane == 0) barrier_arrive(barrier);
        return;
    }
    if (lane == 0) barrier_expect(barrier, 4 * QUARTER);
    __syncwarp();
    const int place = pair * QUARTER + lane * PIECE;
    if (lane < QUARTER / PIECE)
        stream_bulk(coming_of(shared) + place,
                    a.states + state_offset(a, unit, unit.read_slot) + place, 4 * PIECE, barrier,
                    policy_of_streams());
}

// Asks for the rows that are replayed on the state of a block's item of this index.
__device__ __forceinline__ void fetch_replayed(Shared &shared, const Arguments &a, const Unit &unit,
                                               int index, int lane) {
    if (unit.length == 0) return;
    float *target = replayed_of(shared, a, index);
    unsigned long long *barrier = &shared.replay_arrived[index & 1];
    if (lane == 0) barrier_expect(barrier, 4 * unit.replay * ROW_WIDTH);
    __syncwarp();
#pragma unroll 1
    for (int row = lane; row < unit.replay; row += 32)
        copy_bulk(target + row * ROW_WIDTH,
                  a.records + record_offset(a, unit, unit.read_slot, row), 4 * ROW_WIDTH, barrier);
}

// Asks for all that a unit is made ready from. A unit without tokens only says that it is the last.
__device__ __forceinline__ void fetch_rows(Shared &shared, const Arguments &a, const Unit &unit,
                                          int lane) {
    constexpr int NUM_CHANNEL_ROWS = 3 * (HISTORY + TILE), NUM_ROWS = NUM_CHANNEL_ROWS + 2 * TILE;
    constexpr int ROW_BYTES = DIM * sizeof(activation);
    unsigned long long *barrier = &shared.rows_arrived;
    if (unit.length == 0) {
        barrier_arrive(barrier);
        if (lane == 0) barrier_arrive(barrier);
        return;
    }
    const int count = unit.count(), in_head = unit.head * DIM, width = a.num_heads * DIM;
    if (lane == 0)
        barrier_expect(barrier, (3 * HISTORY + 5 * count) * ROW_BYTES + (int)sizeof(shared.taps) +
                                    (int)sizeof(shared.bias));
    __syncwarp();
#pragma unroll 1
    for (int row = lane; row < NUM_ROWS; row += 32) {
        const activation *source;
        if (row < NUM_CHANNEL_ROWS) {
            const int place = row / 3 - HISTORY;
            if (place >= count) continue;
            source = raw_channels(a, unit, row % 3 * width + in_head, unit.begin + place);
        } else {
            const int place = (row - NUM_CHANNEL_ROWS) % TILE;
            if (place >= count) continue;
            const long long token = unit.first + unit.begin + place;
            source = in_head + (row < NUM_CHANNEL_ROWS + TILE ? a.decay + token * a.decay_stride
                                                              : a.gate + token * a.gate_stride);
        }
        copy_bulk(&shared.raw[0][0][0] + row * DIM, source, ROW_BYTES, barrier);
    }
    if (lane < 3)
        copy_bulk(shared.taps[lane], a.conv + 4 * (long long)(lane * width + in_head), 16 * DIM,
                  barrier);
    if (lane == 3) copy_bulk(shared.bias, a.dt_bias + in_head, 4 * DIM, barrier);
    if (lane < count) {
        const long long token = unit.first + unit.begin + lane;
        shared.raw_beta[lane] = to_float(a.beta[token * a.beta_stride + unit.head]);
    }
    if (lane == TILE) shared.log_rate = a.a_log[unit.head];
    // What the lanes have stored themselves is there once all have arrived.
    barrier_arrive(barrier);
}

// A unit's rows are asked for once those of the one before have been read.
__device__ __forceinline__ void run_row_copies(Shared &shared, const Arguments &a, int lane) {
    Unit unit = unit_of(a, blockIdx.x);
    if (lane == 0) shared.units[0] = unit;
    __syncwarp();
    fetch_rows(shared, a, unit, lane);
    for (int number = 1; unit.length > 0; ++number) {
        unit = unit_behind(a, unit, gridDim.x);
        meet<NUM_WITH_COPIER>(ROWS_READ);
        if (lane == 0) shared.units[number & (NUM_UNITS - 1)] = unit;
        __syncwarp();
        fetch_rows(shared, a, unit, lane);
    }
}

// Quarters of an item's state are asked for once those of the one before have been read. Who read
// them have also folded in what was replayed on the state before that.
__device__ __forceinline__ void run_state_copies(Shared &shared, const Arguments &a, int lane) {
    Unit unit = unit_of(a, blockIdx.x);
    if (lane == 0) shared.items[0] = unit;
    __syncwarp();
    for (int pair = 0; pair < NUM_PAIRS; ++pair) fetch_quarter(shared, a, unit, pair, lane);
    fetch_replayed(shared, a, unit, 0, lane);
    for (int index = 1; unit.length > 0; ++index) {
        unit = unit_of(a, unit.item + gridDim.x);
        if (lane == 0) shared.items[index & 1] = unit;
        __syncwarp();
#pragma unroll 1
        for (int pair = 0; pair < NUM_PAIRS; ++pair) {
            meet<64 + 32>(STATE_READ + pair);
            fetch_quarter(shared, a, unit, pair, lane);
        }
        fetch_replayed(shared, a, unit, index, lane);
    }
}
