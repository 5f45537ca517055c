// Where the windows lie: what the host passes, and what a block keeps in shared memory.
#pragma once

#include "window_device.cuh"

constexpr int DIM = 128;
constexpr int TILE = 8;
constexpr int NUM_THREADS = 256;
constexpr int HISTORY = 3;                // rows before the current one that the taps reach
constexpr int ROW_WIDTH = 3 * DIM;        // of a record: exp(g), k, u
constexpr int NUM_PAIRS = DIM / 2;        // of neighbouring channels
constexpr int RESULT_STRIDE = DIM + 8;

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
};

struct Shared {
    float decay[TILE][DIM];
    float k[TILE][DIM];
    float q[TILE][DIM];
    float v[TILE][DIM];
    float u[TILE][DIM];
    float gate[TILE][DIM];
    // Decayed keys and queries, of each pair of channels {k, q, k, q}. A row is longer by one, so
    // that rows begin in different banks.
    float4 decayed[TILE][NUM_PAIRS + 1];
    float result[2 * TILE][RESULT_STRIDE];  // their products with S; later the outputs
    float pairs[2 * TILE][TILE];            // A, then P
    float beta[TILE];
    float pad[8];
    float4 taps[3 * DIM];
    float bias[DIM], norm[DIM];
    // Of q, k and v before the convolution: the rows before the tile, then those of its tokens.
    activation raw[HISTORY + TILE][3][DIM];
    float replayed[1][ROW_WIDTH];           // as many as the longest replay
};

static_assert(sizeof(Shared) == SHARED_BYTES + ROW_WIDTH * sizeof(float),
              "the host reserves another size");

// One head of it is the work of a block.
struct Segment {
    int head, number, first, length, replay;
    long long read_slot, write_slot;
};
