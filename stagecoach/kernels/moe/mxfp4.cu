// Experts' products from packed MXFP4 weights for few pairs an expert; `mxfp4_many.cu` and
// `mxfp4_kernel.py` have the same numbers for many.
//
// A block takes a tile of up to 8 pairs of one expert, and 16 rows of weights at a time (with
// IS_GATED 16 of the gate and the same 16 of the up projection, else 32). Weights go from memory
// to registers and nowhere else. The matrix units multiply 16 rows by 16 inputs, and in which
// order inputs come is free as long as both sides agree: so a thread reads 16 bytes of a row,
// which are the 32 inputs of one group and have one scale, and four neighbours read a chunk of
// 128.
//
//     word of 8 codes    n7 n6 n5 n4 n3 n2 n1 n0
//     operands           (n0, n4) (n1, n5) (n2, n6) (n3, n7)
//
// Inputs lie in shared memory in that order. K_WARPS warps share the chunks of the same rows, the
// others of a block take rows of their own.
//
// Defined by the host: IS_GATED, NUM_WARPS of a block, K_WARPS (1, 2 or 4), STAGES (chunks on their
// way to a warp) and NUM_BLOCKS (that share a processor).

#include "mxfp4_device.cuh"
#include "mxfp4_values.cuh"

constexpr int PAIRS = 8;
constexpr int NUM_THREADS = 32 * NUM_WARPS;
constexpr int ROW_WARPS = NUM_WARPS / K_WARPS;
constexpr int CHUNK = 128;        // inputs
constexpr int CHUNK_BYTES = 256;  // of a pair's inputs
constexpr int TILES = 2;          // of 16 rows that a warp multiplies
constexpr int ROWS = IS_GATED ? 16 : 32;  // of outputs that a warp makes at a time
constexpr int BLOCK_ROWS = ROWS * ROW_WARPS;

// What the host fills in; its twin is `FewArguments` in `mxfp4_cuda.py`.
struct Arguments {
    const bfloat16 *x;  // [rows, num_inputs]
    const unsigned char *packed, *scale;
    bfloat16 *out;  // [pairs, num_outputs]
    const int *pairs;  // in sorted order; none: a pair is a tile, in order of the choices
    const int *offsets, *tile_experts, *tile_rows, *num_tiles;
    const int *expert_ids;
    long long x_stride;
    int num_inputs, num_outputs, num_chosen, blocks_of_rows;
    Activation activation;
};

struct Tile {
    int expert, first, count;  // places of pairs
};

// Of rows g and g + 8 of each of a warp's tiles.
struct Weights {
    uint4 codes[TILES][2];
    unsigned scale[TILES][2];
};

// Inputs of the tile's pairs, in the operands' order; zeros past the last group.
__device__ void stage_inputs(unsigned char *inputs, const Arguments &given, const Tile &tile,
                             int num_chunks, int row_bytes) {
    int words = num_chunks * (CHUNK / 8);
    for (int place = 0; place < tile.count; place++) {
        long long row = tile.first + place;
        if (IS_GATED) row = (given.pairs ? given.pairs[row] : (int)row) / given.num_chosen;
        const bfloat16 *source = given.x + row * given.x_stride;
        for (int word = threadIdx.x; word < words; word += NUM_THREADS) {
            uint4 x = make_uint4(0, 0, 0, 0);
            if (word * 8 < given.num_inputs) x = *(const uint4 *)(source + word * 8);
            // Words of a group follow each other; those of four threads of a row lie together.
            int chunk = word / 16, group = word % 16 / 4, number = word % 4;
            int at = place * row_bytes + chunk * CHUNK_BYTES + number * 64 + group * 16;
            *(uint4 *)(inputs + at) = make_uint4(low_halves(x.x, x.z), high_halves(x.x, x.z),
                                                 low_halves(x.y, x.w), high_halves(x.y, x.w));
        }
    }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, NUM_BLOCKS)
    multiply_few(const __grid_constant__ Arguments given) {
    extern __shared__ __align__(16) unsigned char memory[];
    // The second product may start once all of the first one's blocks are here: then the choice of
    // experts and its order stand, and only the inputs are waited for.
    if (IS_GATED) wait_for_earlier();
    let_next_start();
    Tile tile;
    if (given.pairs) {
        if ((int)blockIdx.y >= load_index(given.num_tiles)) {
            if (!IS_GATED) wait_for_earlier();
            return;
        }
        tile.expert = load_index(given.tile_experts + blockIdx.y);
        tile.first = load_index(given.tile_rows + blockIdx.y);
        tile.count = min(load_index(given.offsets + tile.expert + 1) - tile.first, PAIRS);
    } else {
        tile = {load_index(given.expert_ids + blockIdx.y), (int)blockIdx.y, 1};
        if (tile.expert < 0) {
            if (!IS_GATED) wait_for_earlier();
            return;
        }
    }
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int k_warp = warp % K_WARPS, row_warp = warp / K_WARPS;
    int place = lane / 4, quarter = lane % 4;
    int num_outputs = given.num_outputs, num_groups = given.num_inputs / 32;
    int num_chunks = (num_groups + 3) / 4;
    int num_mine = (num_chunks - k_warp + K_WARPS - 1) / K_WARPS;  // chunks of this warp
    int num_slots = (num_mine + STAGES - 1) / STAGES * STAGES;
    int row_bytes = num_chunks * CHUNK_BYTES + 64;  // rows begin 64 bytes apart among banks
    int first_row = blockIdx.x * given.blocks_of_rows * BLOCK_ROWS;
    int rows_left = num_outputs - first_row;
    int num_rounds = min(given.blocks_of_rows, (rows_left + BLOCK_ROWS - 1) / BLOCK_ROWS);
    long long expert_groups =
        (long long)tile.expert * (IS_GATED ? 2 * num_outputs : num_outputs) * num_groups;
    const unsigned char *packed = given.packed + expert_groups * 16;
    const unsigned char *scale = given.scale + expert_groups;
    // Behind a tile's inputs: each warp's sums of a round.
    auto sums = (float (*)[TILES * 16][PAIRS + 1])(memory + (given.pairs ? PAIRS : 1) * row_bytes);

    // Of the round that is loaded next: this thread's rows, in groups of the expert.
    int at[TILES][2];
    int slot_ahead = 0, round_ahead = 0;
    auto begin_round_ahead = [&] {
        slot_ahead = 0;
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int row = first_row + round_ahead * BLOCK_ROWS + row_warp * ROWS +
                          (IS_GATED ? 0 : t * 16) + place + half * 8;
                row = min(row, num_outputs - 1) + (IS_GATED ? t * num_outputs : 0);
                at[t][half] = row * num_groups;
            }
    };
    auto load = [&](Weights &w) {
        if (round_ahead < num_rounds && slot_ahead < num_mine) {
            // Past the last group inputs are zeros: any weights will do.
            int group = min((slot_ahead * K_WARPS + k_warp) * 4 + quarter, num_groups - 1);
#pragma unroll
            for (int t = 0; t < TILES; t++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    long long from = at[t][half] + group;
                    w.codes[t][half] = load_once(packed + from * 16);
                    w.scale[t][half] = load_byte(scale + from);
                }
        }
        if (++slot_ahead == num_slots) {
            round_ahead++;
            begin_round_ahead();
        }
    };
    begin_round_ahead();
    Weights weights[STAGES];
#pragma unroll
    for (int stage = 0; stage < STAGES; stage++) load(weights[stage]);
    if (!IS_GATED) wait_for_earlier();
    stage_inputs(memory, given, tile, num_chunks, row_bytes);
    __syncthreads();

    // Columns of pairs that are not there are those of the last one, and nobody's.
    const unsigned char *inputs =
        memory + min(place, tile.count - 1) * row_bytes + k_warp * CHUNK_BYTES + quarter * 16;
    for (int round = 0; round < num_rounds; round++) {
        float c[TILES][4] = {};
        for (int slot = 0; slot < num_slots; slot += STAGES) {
#pragma unroll
            for (int stage = 0; stage < STAGES; stage++) {
                Weights &w = weights[stage];
                if (slot + stage < num_mine) {
                    const unsigned char *chunk =
                        inputs + (slot + stage) * K_WARPS * CHUNK_BYTES;
                    unsigned factors[TILES][2];
#pragma unroll
                    for (int t = 0; t < TILES; t++)
#pragma unroll
                        for (int half = 0; half < 2; half++)
                            factors[t][half] = power_of_two(w.scale[t][half]);
#pragma unroll
                    for (int word = 0; word < 4; word++) {
                        uint4 x = *(const uint4 *)(chunk + word * 64);
#pragma unroll
                        for (int t = 0; t < TILES; t++) {
                            unsigned a[4], far[4];
                            decode(((const unsigned *)&w.codes[t][0])[word], factors[t][0], a);
                            decode(((const unsigned *)&w.codes[t][1])[word], factors[t][1], far);
                            multiply_add(c[t], a[0], far[0], a[1], far[1], x.x, x.y);
                            multiply_add(c[t], a[2], far[2], a[3], far[3], x.z, x.w);
                        }
                    }
                }
                load(w);
            }
        }

        // The rows are done: add up the warps' shares and write what is real.
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                sums[warp][t * 16 + place + i / 2 * 8][quarter * 2 + i % 2] = c[t][i];
        __syncthreads();
        for (int index = threadIdx.x; index < tile.count * BLOCK_ROWS; index += NUM_THREADS) {
            int pair = index / BLOCK_ROWS, row = index % BLOCK_ROWS;
            int owner = row / ROWS * K_WARPS, local = row % ROWS;
            int output = first_row + round * BLOCK_ROWS + row;
            float sum = 0.0f, up = 0.0f;
#pragma unroll
            for (int other = 0; other < K_WARPS; other++) {
                sum += sums[owner + other][local][pair];
                if (IS_GATED) up += sums[owner + other][16 + local][pair];
            }
            sum *= SUM_FACTOR;
            if (IS_GATED) sum = gated(given.activation, sum, up * SUM_FACTOR);
            long long target = tile.first + pair;
            if (!IS_GATED && given.pairs) target = given.pairs[target];
            if (output < num_outputs)
                given.out[target * num_outputs + output] = round_to_bfloat16(sum);
        }
        if (round + 1 < num_rounds) __syncthreads();
    }
}
