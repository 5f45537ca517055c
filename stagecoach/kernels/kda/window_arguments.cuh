// What the host passes to the kernels of windows, and their sizes.
#pragma once

#include "window_device.cuh"

constexpr int DIM = 128;
constexpr int TILE = 8;
constexpr int HISTORY = 3;                // rows before the current one that the taps reach
constexpr int ROW_WIDTH = 3 * DIM;        // of a record: exp(g), k, u

// What the host fills in; its twin is `WindowArguments` in `window_cuda.py`.
struct Arguments {
    const activation *channels, *decay, *beta, *gate;
    activation *out, *conv_rows;
    const float *conv, *a_log, *dt_bias, *norm;
    float *states, *records;
    const int *offsets, *read_slots, *write_slots, *replay;
    const int *first_save, *save_tokens, *save_slots;  // first_save is null where none saves
    long long channels_stride, decay_stride, beta_stride, gate_stride, out_stride;  // of a token
    long long states_stride, records_stride, conv_rows_stride;                      // of a slot
    int num_heads;
    int num_ahead;  // a block has the L2 cache fetch the state of the block so far behind it
    int has_bound;
    float lower_bound, eps;
    // Only of `walk.cu`.
    int num_segments, max_replay;
};
