// Products of E4M3 rows with an E4M3 matrix, Hopper only; `reference.py` of quantization says what
// is computed.
//
// One cluster makes a tile of OUTPUTS outputs of ROWS rows; each of its thread blocks takes a share
// of the inputs, 128 at a time. The copy engine brings 128 inputs of weights and of rows as bytes,
// a row's 128 swizzled. Outputs are the matrix units' 64 rows, rows of activations their columns,
// so that few rows need no padding. The units add up with few bits: after 128 inputs their sums go
// to float32 registers. At last the blocks' sums meet in shared memory, and each block adds up and
// writes a share of the outputs.
//
// Weights are on their way before what is in front in the stream has ended. The order of a sum
// depends on the matrix and the cluster, not on the number of rows.
//
// ROWS is 8, 32, 64 or 128; GROUPS, of four warps that multiply, 1 or 2; SHARED_BYTES what the host
// reserves.

#include "fp8_product_device.cuh"

constexpr int OUTPUTS = 64 * GROUPS;
constexpr int INPUTS = 128;  // of a tile, and its bytes
constexpr int WEIGHT_BYTES = OUTPUTS * INPUTS, ROW_BYTES = ROWS * INPUTS;
constexpr int NUM_CONSUMERS = 128 * GROUPS, NUM_THREADS = NUM_CONSUMERS + 32;
constexpr int SUM_STRIDE = OUTPUTS + 4;  // float32 of a row; stores of a warp find all banks
constexpr int CHUNK = 8;                 // outputs that a thread writes at a time
constexpr int GROUP_TILES = 8;           // tiles of rows that blocks of a wave share weights for

// What the host fills in; its twin is `Fp8Arguments` in `fp8_product_cuda.py`.
struct Arguments {
    TensorMap weights;  // [outputs, inputs] in boxes of OUTPUTS rows
    TensorMap rows;     // [rows, inputs] in boxes of ROWS rows
    const float *row_factors, *weight_factors;
    bfloat16 *out;  // [rows, outputs]
    int num_rows, num_outputs, num_inputs;
};

struct Shared {
    union {
        struct {
            unsigned char weights[NUM_STAGES][WEIGHT_BYTES];
            unsigned char rows[NUM_STAGES][ROW_BYTES];
        };
        float sums[ROWS][SUM_STRIDE];
    };
    unsigned long long full[NUM_STAGES], empty[NUM_STAGES];
};

static_assert(sizeof(Shared) <= SHARED_BYTES, "the host reserves less");
static_assert(WEIGHT_BYTES % 1024 == 0 && ROW_BYTES % 1024 == 0, "swizzled groups of rows");

// Operands of rows of 128 swizzled bytes: groups of 8 rows lie 1024 bytes apart.
__device__ __forceinline__ descriptor swizzled(unsigned address) {
    return (descriptor)((address & 0x3ffff) >> 4) | (descriptor)1 << 16 |
           (descriptor)(1024 >> 4) << 32 | (descriptor)1 << 62;
}

__device__ __forceinline__ int ceil_divide(int a, int b) { return (a + b - 1) / b; }

// By one thread: tiles of inputs [first, end).
__device__ void bring_tiles(Shared &shared, const Arguments &given, int output, int row, int first,
                            int end) {
    int num_ahead = min(NUM_STAGES, end - first);
    for (int stage = 0; stage < num_ahead; stage++) {
        barrier_expect(&shared.full[stage], WEIGHT_BYTES + ROW_BYTES);
        copy_box(shared.weights[stage], &given.weights, (first + stage) * INPUTS, output, OUTPUTS,
                 &shared.full[stage]);
    }
    wait_for_earlier();
    for (int stage = 0; stage < num_ahead; stage++)
        copy_box(shared.rows[stage], &given.rows, (first + stage) * INPUTS, row, ROWS,
                 &shared.full[stage]);
    for (int tile = first + num_ahead; tile < end; tile++) {
        int stage = (tile - first) % NUM_STAGES, round = (tile - first) / NUM_STAGES;
        barrier_wait(&shared.empty[stage], (round - 1) & 1);
        barrier_expect(&shared.full[stage], WEIGHT_BYTES + ROW_BYTES);
        copy_box(shared.weights[stage], &given.weights, tile * INPUTS, output, OUTPUTS,
                 &shared.full[stage]);
        copy_box(shared.rows[stage], &given.rows, tile * INPUTS, row, ROWS, &shared.full[stage]);
    }
}

// By GROUPS of four warps, each with its 64 outputs: sums over tiles [first, end) of inputs. A
// thread holds outputs 16 warp + lane / 4 + {0, 8} and of every 8 rows 2 (lane % 4) + {0, 1}.
__device__ void multiply(Shared &shared, int num_tiles) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    // The same in all lanes, and known to be.
    int group = __shfl_sync(~0u, (int)threadIdx.x / 128, 0);
    float sum[ROWS / 2], part[ROWS / 2];
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) sum[i] = 0.0f;
    for (int tile = 0; tile < num_tiles; tile++) {
        int stage = tile % NUM_STAGES;
        barrier_wait(&shared.full[stage], tile / NUM_STAGES & 1);
        unsigned weights_at = address_of(shared.weights[stage]) + group * 64 * INPUTS;
        unsigned rows_at = address_of(shared.rows[stage]);
        products_begin();
#pragma unroll
        for (int step = 0; step < INPUTS / 32; step++)
            multiply_add(part, swizzled(weights_at + step * 32), swizzled(rows_at + step * 32),
                         step > 0);
        products_end();
        if (lane == 0) barrier_arrive(&shared.empty[stage]);
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) sum[i] += part[i];
    }
    // Sums take the place of the tiles.
    meet<NUM_CONSUMERS>();
    int output = group * 64 + warp * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++)
        shared.sums[i / 4 * 8 + lane % 4 * 2 + i % 2][output + i / 2 % 2 * 8] = sum[i];
}

// Grid: clusters, a tile each. Tiles of rows come in groups, within which they change first.
extern "C" __global__ void __launch_bounds__(NUM_THREADS)
    multiply_fp8(const __grid_constant__ Arguments given) {
    Shared &shared = *(Shared *)shared_memory();
    let_next_start();
    int num_shares = cluster_size(), share = cluster_rank();
    int cluster = blockIdx.x / num_shares;
    int num_row_tiles = ceil_divide(given.num_rows, ROWS);
    int num_output_tiles = ceil_divide(given.num_outputs, OUTPUTS);
    int first_row_tile = cluster / (GROUP_TILES * num_output_tiles) * GROUP_TILES;
    int group_tiles = min(GROUP_TILES, num_row_tiles - first_row_tile);
    int place = cluster - first_row_tile * num_output_tiles;
    int row = (first_row_tile + place % group_tiles) * ROWS;
    int output = place / group_tiles * OUTPUTS;
    int num_tiles = ceil_divide(given.num_inputs, INPUTS);
    int first = num_tiles * share / num_shares, end = num_tiles * (share + 1) / num_shares;

    if (threadIdx.x == 0) {
        // Swizzled groups begin at multiples of 1024 bytes.
        if (address_of(&shared) % 1024 != 0) __trap();
        for (int stage = 0; stage < NUM_STAGES; stage++) {
            barrier_init(&shared.full[stage], 1);
            barrier_init(&shared.empty[stage], NUM_CONSUMERS / 32);
        }
        publish_barriers();
    }
    __syncthreads();
    if (threadIdx.x >= NUM_CONSUMERS) {
        if (threadIdx.x == NUM_CONSUMERS)
            bring_tiles(shared, given, output, row, first, end);
        __syncwarp();
    } else {
        multiply(shared, end - first);
    }
    meet_cluster();
    // Factors are those of the kernel in front, and `out` may be what it read.
    wait_for_earlier();
    int own_chunks = OUTPUTS / CHUNK / num_shares;
    for (int index = threadIdx.x; index < ROWS * own_chunks; index += NUM_THREADS) {
        int own_row = index / own_chunks;
        int own_output = (share * own_chunks + index % own_chunks) * CHUNK;
        if (row + own_row >= given.num_rows || output + own_output >= given.num_outputs) continue;
        float total[CHUNK];
#pragma unroll
        for (int i = 0; i < CHUNK; i++) total[i] = 0.0f;
        for (int other = 0; other < num_shares; other++) {
            unsigned at = address_of(&shared.sums[own_row][own_output]);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float4 sums = load_from_block(at + half * 16, other);
                total[half * 4] += sums.x;
                total[half * 4 + 1] += sums.y;
                total[half * 4 + 2] += sums.z;
                total[half * 4 + 3] += sums.w;
            }
        }
        float row_factor = given.row_factors[row + own_row];
        const float *weight_factors = given.weight_factors + output + own_output;
        unsigned pairs[CHUNK / 2];
#pragma unroll
        for (int i = 0; i < CHUNK; i += 2)
            pairs[i / 2] = round_to_bfloat16s(total[i] * row_factor * weight_factors[i],
                                              total[i + 1] * row_factor * weight_factors[i + 1]);
        bfloat16 *target = given.out + (long long)(row + own_row) * given.num_outputs + output;
        *(uint4 *)(target + own_output) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
    // Nobody leaves while others read its sums.
    if (num_shares > 1) meet_cluster();
}
