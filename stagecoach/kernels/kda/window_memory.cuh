// What a block of `window.cu` keeps in shared memory, and what its work is.
#pragma once

#include "window_arguments.cuh"

constexpr int NUM_THREADS = 256;
constexpr int NUM_PAIRS = DIM / 2;        // of neighbouring channels
constexpr int RESULT_STRIDE = DIM + 8;

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
