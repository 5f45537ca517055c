// Experts' products from packed MXFP4 weights for many pairs an expert; `mxfp4.cu` is for few.
//
// Hopper only. A block multiplies rows of weights of one expert, 64 a warpgroup, with the inputs of
// a tile of up to PAIRS pairs, a chunk of 128 inputs at a time. One warpgroup copies chunks to
// shared memory, STAGES ahead and from one work to the next; the others decode weights in
// registers, where the matrix units take them from, while these multiply what was decoded before:
//
//     out^T [64, pairs] = weights [64, inputs] x^T [inputs, pairs]
//
// so that a weight is decoded once for all of a tile's pairs, and the pairs' number is rounded up
// little.
//
// In which order inputs come is free as long as both sides agree: a thread decodes the 32 inputs of
// one group from 16 bytes, which have one scale, as in `mxfp4.cu`. So inputs lie in operand order
// in memory: of each 128, input 32 t + 8 w + 4 p + 2 i + h at 32 w + 16 i + 8 h + 2 t + p. With
// IS_GATED a thread has the gate and the up projection of the same output, and outputs come in
// that order, too.
//
// Defined by the host: IS_GATED, PAIRS, how many pairs are multiplied where a tile is not full
// (FEW_PAIRS, MORE_PAIRS), STAGES, WARPGROUPS (of those that multiply), SHARED_BYTES.

#include "mxfp4_many_device.cuh"
#include "mxfp4_values.cuh"

constexpr int CHUNK = 128;  // inputs
constexpr int NUM_CONSUMERS = 128 * WARPGROUPS, NUM_PRODUCERS = 128;
constexpr int NUM_THREADS = NUM_CONSUMERS + NUM_PRODUCERS;
constexpr int ROWS = 64 * WARPGROUPS;  // of weights
constexpr bool IS_THREEFOLD = FEW_PAIRS < MORE_PAIRS && MORE_PAIRS < PAIRS;
constexpr int OUTPUTS = IS_GATED ? ROWS / 2 : ROWS;
// Of a thread; registers go from warpgroup to warpgroup.
constexpr int PRODUCER_REGISTERS = WARPGROUPS == 2 ? 56 : 64;
constexpr int CONSUMER_REGISTERS = WARPGROUPS == 2 ? 224 : 104;

// What the host fills in; its twin is `ManyArguments` in `mxfp4_many_cuda.py`.
struct Arguments {
    const bfloat16 *x;  // [rows, num_inputs]
    const unsigned char *packed, *scale;
    bfloat16 *out;  // [pairs, num_outputs]
    const int *pairs, *offsets, *tile_experts, *tile_rows, *num_tiles;
    unsigned x_row_bytes;
    int num_inputs, num_outputs, num_chosen, blocks_of_rows;
    Activation activation;
};

struct Shared {
    unsigned char x[STAGES][2][PAIRS * 128];  // 64 inputs of each pair; 128 bytes swizzled
    unsigned char codes[STAGES][ROWS * 64];
    unsigned char scale[STAGES][ROWS * 4];
    // Where rows of x begin, in bytes: that of the tile's pair 8 i + e at [e][i].
    unsigned rows[8][(PAIRS / 8 + 3) / 4 * 4];
    unsigned long long full[STAGES], empty[STAGES];
};

static_assert(sizeof(Shared) <= SHARED_BYTES, "the host reserves less");

// Some blocks of rows for one tile of pairs.
struct Work {
    int expert, first, count, first_block, end_block;
};

// A stage of the ring, and how often it came round.
struct Place {
    int stage = 0, parity = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// Operands of rows of 128 swizzled bytes, whose groups of 8 lie 1024 bytes apart: so many bytes
// behind an address.
__device__ __forceinline__ descriptor swizzled(unsigned address, int num_bytes) {
    return from_halves((address >> 4 | 1 << 16) + num_bytes / 16, 1024 >> 4 | 1 << 30);
}

__device__ __forceinline__ bool find_work(const Arguments &given, int number, Work &work) {
    int num_blocks = given.num_outputs / OUTPUTS;
    int num_parts = (num_blocks + given.blocks_of_rows - 1) / given.blocks_of_rows;
    int tile = number / num_parts;
    if (tile >= *given.num_tiles) return false;
    work.expert = given.tile_experts[tile];
    work.first = given.tile_rows[tile];
    work.count = min(given.offsets[work.expert + 1] - work.first, PAIRS);
    work.first_block = number % num_parts * given.blocks_of_rows;
    work.end_block = min(work.first_block + given.blocks_of_rows, num_blocks);
    return true;
}

// Which row of an expert a block's row is. Rows 8 apart within 16 are of one thread: gate and up
// of an output, or two of four outputs side by side.
__device__ __forceinline__ int expert_row(const Arguments &given, int block, int row) {
    int eight = row % 8, far = row / 8 % 2;
    if (!IS_GATED) return block * OUTPUTS + row / 16 * 16 + eight / 2 * 4 + far * 2 + eight % 2;
    int place = block * OUTPUTS + row / 16 * 8 + eight;
    int within = place % CHUNK;
    int output = place - within + within / 2 % 4 * 32 + within / 32 * 8 + within % 2 * 4 +
                 within / 16 % 2 * 2 + within / 8 % 2;
    return output + far * given.num_outputs;
}

// How far behind a block's row the expert's row is that belongs 32 `times` rows on.
__device__ __forceinline__ constexpr int rows_on(int times) {
    return IS_GATED ? times / 2 * 8 + times % 2 * 2 : times * 32;
}

// --- The two roles.

__device__ __forceinline__ void bring_chunks(Shared &shared, const Arguments &given) {
    int thread = threadIdx.x - NUM_CONSUMERS;
    int num_chunks = given.num_inputs / CHUNK, num_groups = given.num_inputs / 32;
    int expert_rows = IS_GATED ? 2 * given.num_outputs : given.num_outputs;
    // Sixteen threads copy a pair's chunk: each the same place of every eighth pair.
    int piece = thread % 16, eighth = thread / 16;
    unsigned x_at = piece / 8 * (PAIRS * 128) + eighth * 128 + (piece % 8 ^ eighth) * 16;
    Place place;
    Work work;
    for (int number = blockIdx.x; find_work(given, number, work); number += gridDim.x) {
        meet<NUM_PRODUCERS>();  // nobody reads what the last work's rows were
        for (int i = thread; i < work.count; i += NUM_PRODUCERS) {
            int row = IS_GATED ? given.pairs[work.first + i] / given.num_chosen : work.first + i;
            shared.rows[i % 8][i / 8] = row * given.x_row_bytes;
        }
        meet<NUM_PRODUCERS>();
        long long expert_groups = (long long)work.expert * expert_rows * num_groups;
        const unsigned char *packed = given.packed + (expert_groups + thread % 4) * 16;
        const unsigned char *scale = given.scale + expert_groups;
        for (int block = work.first_block; block < work.end_block; block++) {
            const unsigned char *codes =
                packed + (long long)expert_row(given, block, thread / 4) * num_groups * 16;
            const unsigned char *factors =
                scale + (long long)expert_row(given, block, thread) * num_groups;
            const char *x = (const char *)given.x + piece * 16;
            for (int chunk = 0; chunk < num_chunks; chunk++) {
                barrier_wait(&shared.empty[place.stage], place.parity ^ 1);
                unsigned target = address_of(shared.codes[place.stage]) + thread * 16;
#pragma unroll
                for (int i = 0; i < ROWS / 32; i++)
                    copy_16_bytes_of_row(target + i * 2048, codes + rows_on(i) * num_groups * 16);
                target = address_of(shared.scale[place.stage]) + thread * 4;
#pragma unroll
                for (int i = 0; i < ROWS / 128; i++)
                    copy_4_bytes(target + i * 512, factors + rows_on(i * 4) * num_groups);
                target = address_of(shared.x[place.stage]) + x_at;
                for (int row = eighth; row < work.count; row += 32, target += 4096) {
                    uint4 starts = *(const uint4 *)&shared.rows[eighth][row / 8];
                    copy_16_bytes(target, x + starts.x);
                    if (row + 8 < work.count) copy_16_bytes(target + 1024, x + starts.y);
                    if (row + 16 < work.count) copy_16_bytes(target + 2048, x + starts.z);
                    if (row + 24 < work.count) copy_16_bytes(target + 3072, x + starts.w);
                }
                barrier_arrive_behind_copies(&shared.full[place.stage]);
                place.advance();
                codes += 64;
                factors += 4;
                x += CHUNK * 2;
            }
        }
    }
    copies_wait();
}

// Writes what a warpgroup made of a block: a warp 8 or 16 outputs side by side for each pair.
template <int N>
__device__ __forceinline__ void write(const Arguments &given, const Work &work, int block,
                                      float (&c)[N / 2]) {
    constexpr int BATCH = 8;
    int lane = known_here(threadIdx.x % 32), warp = threadIdx.x / 32;
    long long column = (long long)block * OUTPUTS + warp * (IS_GATED ? 8 : 16);
    int rows[N / 8];
#pragma unroll
    for (int group = 0; group < N / 8; group++) {
        // Some rows at a time are asked for before what is written might hold them up.
        if (group % BATCH == 0) {
#pragma unroll
            for (int i = group; i < min(group + BATCH, N / 8); i++) {
                int place = work.first + min(i * 8 + lane / 4, work.count - 1);
                rows[i] = IS_GATED ? place : load_again(given.pairs + place);
            }
        }
        float *sums = c + group * 4;
#pragma unroll
        for (int i = 0; i < 4; i++) sums[i] *= SUM_FACTOR;
        bool is_pair = group * 8 + lane / 4 < work.count;
        bfloat16 *target = given.out + (long long)rows[group] * given.num_outputs + column;
        if (IS_GATED) {
            float low = gated(given.activation, sums[0], sums[2]);
            float high = gated(given.activation, sums[1], sums[3]);
            unsigned outputs = transpose(round_to_bfloat16(low, high));
            if (is_pair) *(unsigned *)(target + lane % 4 * 2) = outputs;
        } else {
            uint2 outputs;
            outputs.x = transpose(round_to_bfloat16(sums[0], sums[1]));
            outputs.y = transpose(round_to_bfloat16(sums[2], sums[3]));
            if (is_pair) *(uint2 *)(target + lane % 4 * 4) = outputs;
        }
    }
}

template <int N>
__device__ __forceinline__ void multiply_work(Shared &shared, const Arguments &given,
                                              const Work &work, Place &place) {
    int lane = threadIdx.x % 32, quarter = lane % 4;
    int row = threadIdx.x / 32 * 16 + lane / 4;
    int num_chunks = given.num_inputs / CHUNK;
    for (int block = work.first_block; block < work.end_block; block++) {
        float c[N / 2];
#pragma unroll
        for (int i = 0; i < N / 2; i++) c[i] = 0.0f;
        unsigned a[2][4][4] = {};
        int last_stage = 0;
        for (int chunk = 0; chunk < num_chunks; chunk++) {
            int stage = place.stage;
            barrier_wait(&shared.full[stage], place.parity);
            const unsigned char *codes = shared.codes[stage] + row * 64 + quarter * 16;
            uint4 near = *(const uint4 *)codes, far = *(const uint4 *)(codes + 8 * 64);
            const unsigned char *scale = shared.scale[stage] + row * 4 + quarter;
            unsigned factor = power_of_two(scale[0]), far_factor = power_of_two(scale[8 * 4]);
            unsigned x_at = address_of(shared.x[stage]);
#pragma unroll
            for (int half = 0; half < 2; half++) {
#pragma unroll
                for (int word = 0; word < 2; word++) {
                    unsigned of_near[4], of_far[4];
                    decode(((const unsigned *)&near)[half * 2 + word], factor, of_near);
                    decode(((const unsigned *)&far)[half * 2 + word], far_factor, of_far);
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        unsigned(&operand)[4] = a[half][word * 2 + i];
                        operand[0] = of_near[i * 2];
                        operand[1] = of_far[i * 2];
                        operand[2] = of_near[i * 2 + 1];
                        operand[3] = of_far[i * 2 + 1];
                    }
                }
                if (half == 0) publish_shared();
                products_begin();
#pragma unroll
                for (int step = 0; step < 4; step++)
                    multiply_add<N>(c, a[half][step],
                                    swizzled(x_at, half * (PAIRS * 128) + step * 32));
                products_commit();
                // Registers of the half before, and behind a chunk its stage, are free.
                products_wait<1>();
                if (chunk + half > 0) {
#pragma unroll
                    for (int step = 0; step < 4; step++) keep(a[half ^ 1][step]);
                }
                if (half == 0 && chunk > 0) {
                    __syncwarp();
                    if (lane == 0) barrier_arrive(&shared.empty[last_stage]);
                }
            }
            last_stage = stage;
            place.advance();
        }
        products_wait<0>();
#pragma unroll
        for (int step = 0; step < 4; step++) keep(a[1][step]);
        __syncwarp();
        if (lane == 0) barrier_arrive(&shared.empty[last_stage]);
        write<N>(given, work, block, c);
    }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
    multiply_many(const __grid_constant__ Arguments given) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared &shared = *(Shared *)memory;
    if (threadIdx.x == 0) {
        // Swizzled rows begin at multiples of 1024 bytes.
        if (address_of(memory) % 1024 != 0) __trap();
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(&shared.full[stage], NUM_PRODUCERS);
            barrier_init(&shared.empty[stage], NUM_CONSUMERS / 32);
        }
        publish_barriers();
    }
    __syncthreads();
    if (threadIdx.x >= NUM_CONSUMERS) {
        shrink_to_registers<PRODUCER_REGISTERS>();
        bring_chunks(shared, given);
    } else {
        grow_to_registers<CONSUMER_REGISTERS>();
        Place place;
        Work work;
        for (int number = blockIdx.x; find_work(given, number, work); number += gridDim.x)
            if (work.count <= FEW_PAIRS)
                multiply_work<FEW_PAIRS>(shared, given, work, place);
            else if (IS_THREEFOLD && work.count <= MORE_PAIRS)
                multiply_work<MORE_PAIRS>(shared, given, work, place);
            else
                multiply_work<PAIRS>(shared, given, work, place);
    }
}
