// Products of E4M3 rows with an E4M3 matrix, Hopper only; `reference.py` of quantization says what
// is computed.
//
// One cluster makes a tile of 64 outputs of ROWS rows; each of its thread blocks takes a share of
// the inputs, 128 at a time. The copy engine brings 128 inputs of weights and of rows as bytes,
// a row's 128 swizzled. Outputs are the matrix units' 64 rows, rows of activations their columns,
// so that few rows need no padding. The units add up with few bits: after 128 inputs their sums go
// to float32 registers. At last the blocks' sums meet in shared memory, and each block adds up and
// writes a share of the outputs.
//
// Weights are on their way before what is in front in the stream has ended. The order of a sum
// depends on the matrix and the cluster, not on the number of rows.
//
// With QUANTIZES there is one row, of bfloat16, and each block quantises its share for itself.
//
// ROWS is 8, 32 or 64; SHARED_BYTES what the host reserves, beside a share of a row.

#include "fp8_product_device.cuh"

constexpr int OUTPUTS = 64;
constexpr int INPUTS = 128;  // of a tile, and its bytes
constexpr int WEIGHT_BYTES = OUTPUTS * INPUTS, ROW_BYTES = QUANTIZES ? 0 : ROWS * INPUTS;
constexpr int NUM_CONSUMERS = 128, NUM_THREADS = NUM_CONSUMERS + 32;
constexpr int SUM_STRIDE = OUTPUTS + 4;  // float32 of a row; stores of a warp find all banks
constexpr int CHUNK = 8;                 // outputs that a thread writes at a time
constexpr int GROUP_TILES = 8;           // tiles of rows that blocks of a wave share weights for
// As in `quantization/reference.py`.
constexpr float LARGEST = 448.0f, LEAST_LARGEST = 1e-12f;

// What the host fills in; its twin is `Fp8Arguments` in `fp8_product_cuda.py`.
struct Arguments {
    TensorMap weights;  // [outputs, inputs] in boxes of OUTPUTS rows
    TensorMap rows;     // [rows, inputs] in boxes of ROWS rows
    const float *row_factors, *weight_factors;
    const bfloat16 *x;  // the one row that is not quantised
    bfloat16 *out;      // [rows, outputs]
    int num_rows, num_outputs, num_inputs;
};

struct Shared {
    union {
        struct {
            unsigned char weights[NUM_STAGES][WEIGHT_BYTES];
            unsigned char rows[QUANTIZES ? 1 : NUM_STAGES][QUANTIZES ? 16 : ROW_BYTES];
        };
        float sums[ROWS][SUM_STRIDE];
    };
    unsigned long long full[NUM_STAGES], empty[NUM_STAGES];
    float row_factors[ROWS];
    unsigned warp_top[4];
    float factor;
    alignas(16) unsigned char codes[1];  // a share of the one row, and 112 bytes of any content
};

static_assert(sizeof(Shared) <= SHARED_BYTES, "the host reserves less");
static_assert(WEIGHT_BYTES % 1024 == 0 && ROW_BYTES % 1024 == 0, "swizzled groups of rows");

// Operands of rows of 128 swizzled bytes: groups of 8 rows lie 1024 bytes apart.
__device__ __forceinline__ descriptor swizzled(unsigned address) {
    return (descriptor)((address & 0x3ffff) >> 4) | (descriptor)1 << 16 |
           (descriptor)(1024 >> 4) << 32 | (descriptor)1 << 62;
}

// Operands of one row in one piece. The seven behind it begin 16 bytes later each: nobody asks for
// what becomes of them.
__device__ __forceinline__ descriptor in_one_piece(unsigned address) {
    return (descriptor)((address & 0x3ffff) >> 4) | (descriptor)(16 >> 4) << 16 |
           (descriptor)(128 >> 4) << 32;
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
    for (int stage = 0; stage < num_ahead && !QUANTIZES; stage++)
        copy_box(shared.rows[stage], &given.rows, (first + stage) * INPUTS, row, ROWS,
                 &shared.full[stage]);
    for (int tile = first + num_ahead; tile < end; tile++) {
        int stage = (tile - first) % NUM_STAGES, round = (tile - first) / NUM_STAGES;
        barrier_wait(&shared.empty[stage], (round - 1) & 1);
        barrier_expect(&shared.full[stage], WEIGHT_BYTES + ROW_BYTES);
        copy_box(shared.weights[stage], &given.weights, tile * INPUTS, output, OUTPUTS,
                 &shared.full[stage]);
        if (!QUANTIZES)
            copy_box(shared.rows[stage], &given.rows, tile * INPUTS, row, ROWS,
                     &shared.full[stage]);
    }
}

// By four warps: the codes of inputs [first, end) of the one row, whose factor all of it decides.
// There are zeros behind the last input.
__device__ void quantize(Shared &shared, const Arguments &given, int first, int end) {
    static_assert(!QUANTIZES || ROWS == 8, "one row");
    int num_chunks = given.num_inputs / CHUNK;
    const uint4 *chunks = (const uint4 *)given.x;
    wait_for_earlier();
    // Without their signs bits are in order, those of NaN at last.
    unsigned top = 0;
#pragma unroll 8
    for (int i = threadIdx.x; i < num_chunks; i += NUM_CONSUMERS) {
        uint4 x = chunks[i];
        top = max(top, max(largest_bits(x.x, x.y), largest_bits(x.z, x.w)));
    }
    top = largest_of_warp(top);
    if (threadIdx.x % 32 == 0) shared.warp_top[threadIdx.x / 32] = top;
    meet<NUM_CONSUMERS>();
    for (int warp = 0; warp < 4; warp++) top = max(top, shared.warp_top[warp]);
    float largest = __int_as_float(top << 16);
    if (largest < LEAST_LARGEST) largest = LEAST_LARGEST;
    float factor = __fdiv_rn(largest, LARGEST);
    float inverse = __fdiv_rn(1.0f, factor);
    if (threadIdx.x == 0) shared.factor = factor;
    for (int i = first / CHUNK + threadIdx.x; i < end / CHUNK; i += NUM_CONSUMERS) {
        uint4 x = i < num_chunks ? chunks[i] : make_uint4(0, 0, 0, 0);
        *(uint2 *)(shared.codes + i * CHUNK - first) =
            make_uint2(narrow(x.x, x.y, factor, inverse), narrow(x.z, x.w, factor, inverse));
    }
    publish_shared();
    meet<NUM_CONSUMERS>();
}

// By four warps: sums over the tiles of inputs. A thread holds outputs 16 warp + lane / 4 + {0, 8}
// and of every 8 rows 2 (lane % 4) + {0, 1}.
__device__ void multiply(Shared &shared, int num_tiles) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float sum[ROWS / 2], part[ROWS / 2];
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) sum[i] = 0.0f;
    for (int tile = 0; tile < num_tiles; tile++) {
        int stage = tile % NUM_STAGES;
        barrier_wait(&shared.full[stage], tile / NUM_STAGES & 1);
        unsigned weights_at = address_of(shared.weights[stage]);
        unsigned rows_at = QUANTIZES ? address_of(shared.codes) + tile * INPUTS
                                     : address_of(shared.rows[QUANTIZES ? 0 : stage]);
        products_begin();
#pragma unroll
        for (int step = 0; step < INPUTS / 32; step++) {
            unsigned at = rows_at + step * 32;
            multiply_add(part, swizzled(weights_at + step * 32),
                         QUANTIZES ? in_one_piece(at) : swizzled(at), step > 0);
        }
        products_end();
        if (lane == 0) barrier_arrive(&shared.empty[stage]);
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) sum[i] += part[i];
    }
    // Sums take the place of the tiles.
    meet<NUM_CONSUMERS>();
    int output = warp * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++)
        shared.sums[i / 4 * 8 + lane % 4 * 2 + i % 2][output + i / 2 % 2 * 8] = sum[i];
}

// The sum of the blocks' sums, times both factors, of this block's share of the outputs.
template <int NUM_SHARES>
__device__ void write_outputs(Shared &shared, const Arguments &given, int share, int row,
                              int output) {
    constexpr int OWN_CHUNKS = OUTPUTS / CHUNK / NUM_SHARES;
    // Always the same outputs for a thread.
    constexpr int NUM_WRITERS = NUM_THREADS / OWN_CHUNKS * OWN_CHUNKS;
    int own_output = (share * OWN_CHUNKS + threadIdx.x % OWN_CHUNKS) * CHUNK;
    if (threadIdx.x >= NUM_WRITERS || output + own_output >= given.num_outputs) return;
    float4 low_factors = *(const float4 *)(given.weight_factors + output + own_output);
    float4 high_factors = *(const float4 *)(given.weight_factors + output + own_output + 4);
    int num_rows = min(ROWS, given.num_rows - row);
    bfloat16 *target = given.out + (long long)row * given.num_outputs + output + own_output;
#pragma unroll 4
    for (int own_row = threadIdx.x / OWN_CHUNKS; own_row < num_rows;
         own_row += NUM_WRITERS / OWN_CHUNKS) {
        float factor = QUANTIZES ? shared.factor : shared.row_factors[own_row];
        const float *place = &shared.sums[own_row][own_output];
        float4 low[NUM_SHARES], high[NUM_SHARES];
#pragma unroll
        for (int other = 0; other < NUM_SHARES; other++) {
            low[other] = NUM_SHARES == 1 ? ((const float4 *)place)[0]
                                         : load_from_block(address_of(place), other);
            high[other] = NUM_SHARES == 1 ? ((const float4 *)place)[1]
                                          : load_from_block(address_of(place) + 16, other);
        }
#pragma unroll
        for (int other = 1; other < NUM_SHARES; other++) {
            low[0] = add(low[0], low[other]);
            high[0] = add(high[0], high[other]);
        }
        uint4 values;
        values.x = round_to_bfloat16s(low[0].x * factor * low_factors.x,
                                      low[0].y * factor * low_factors.y);
        values.y = round_to_bfloat16s(low[0].z * factor * low_factors.z,
                                      low[0].w * factor * low_factors.w);
        values.z = round_to_bfloat16s(high[0].x * factor * high_factors.x,
                                      high[0].y * factor * high_factors.y);
        values.w = round_to_bfloat16s(high[0].z * factor * high_factors.z,
                                      high[0].w * factor * high_factors.w);
        *(uint4 *)(target + (long long)own_row * given.num_outputs) = values;
    }
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

    if (threadIdx.x == NUM_CONSUMERS) {
        fetch_map(&given.weights);
        if (!QUANTIZES) fetch_map(&given.rows);
    }
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
        wait_for_earlier();
        // What is in front made them, too.
        for (int i = threadIdx.x - NUM_CONSUMERS; i < ROWS && !QUANTIZES; i += 32)
            if (row + i < given.num_rows) shared.row_factors[i] = given.row_factors[row + i];
    } else {
        if (QUANTIZES) quantize(shared, given, first * INPUTS, end * INPUTS);
        multiply(shared, end - first);
    }
    if (num_shares > 1)
        meet_cluster();
    else
        __syncthreads();
    if (num_shares == 1)
        write_outputs<1>(shared, given, share, row, output);
    else if (num_shares == 2)
        write_outputs<2>(shared, given, share, row, output);
    else if (num_shares == 4)
        write_outputs<4>(shared, given, share, row, output);
    else
        write_outputs<8>(shared, given, share, row, output);
    // Nobody leaves while others read its sums.
    __syncwarp();
    if (num_shares > 1) meet_cluster();
}
