// The warp that copies: rows of tokens and states into shared memory, states back.
#pragma once

#include "walk_memory.cuh"
#include "window_rows.cuh"

// Asks for the state of a block's item of this index, and for the rows that are replayed on it.
__device__ __forceinline__ void fetch_state(Shared &shared, const Arguments &a, const Unit &unit,
                                            int index, int lane) {
    if (unit.length == 0) return;
    float *target = replayed_of(shared, a, index);
    unsigned long long *barrier = &shared.state_arrived;
    if (lane == 0) {
        barrier_expect(barrier, 4 * (STATE_SIZE + unit.replay * ROW_WIDTH));
        copy_bulk(coming_of(shared), a.states + state_offset(a, unit, unit.read_slot),
                  4 * STATE_SIZE, barrier);
    }
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

// An item's state and rows are asked for once the one before has been read, and its state is stored
// before the one behind is written where it lay.
__device__ __forceinline__ void run_copies(Shared &shared, const Arguments &a, int lane) {
    Unit unit = unit_of(a, blockIdx.x);
    int num_states = 0;
    if (lane == 0) shared.units[0] = unit;
    __syncwarp();
    fetch_rows(shared, a, unit, lane);
    fetch_state(shared, a, unit, 0, lane);

    for (int number = 0; unit.length > 0; ++number) {
        const Unit behind = unit_behind(a, unit, gridDim.x);
        meet<NUM_WITH_COPIER>(ROWS_READ);
        if (lane == 0) shared.units[(number + 1) & (NUM_UNITS - 1)] = behind;
        __syncwarp();
        fetch_rows(shared, a, behind, lane);
        if (unit.begin == 0) {
            const Unit ahead = unit_of(a, unit.item + gridDim.x);
            ++num_states;
            meet<NUM_WITH_COPIER>(STATE_READ);
            fetch_state(shared, a, ahead, num_states, lane);
            if (lane == 0) wait_for_reads();
            __syncwarp();
            pass<NUM_WITH_COPIER>(STORE_READ);
            meet<NUM_WITH_COPIER>(STATE_WRITTEN);
            if (lane == 0 && unit.write_slot != 0)
                store_bulk(a.states + state_offset(a, unit, unit.write_slot), going_of(shared),
                           4 * STATE_SIZE);
        }
        unit = behind;
    }
    wait_for_reads();
}
