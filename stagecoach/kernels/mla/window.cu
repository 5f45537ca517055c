// Windows over cached rows of 512 + 64 bfloat16 or E4M3; `reference.py` says what is computed.
//
// Hopper only. One thread block attends from ROWS query rows (tokens x heads) to one piece of a
// context, a tile of 64 positions at a time. The copy engine brings a tile as nine blocks of
// [64 positions, 64 columns], a position's 128 bytes swizzled; two tiles are on their way or in
// use. Positions are the matrix units' 64 rows, query rows their columns, so that few queries
// need no padding:
//
//     S^T [64, ROWS] = K Q^T      each of two warpgroups takes half of the columns, or with 64
//                                 query rows half of these, and then has its half of the rows
//     O^T [512, ROWS] = V^T P^T   each takes half of the value columns; V is K's first part
//
// How contexts are cut into pieces, and the scratch, are those of `split_kernel.py`. A segment
// of one piece gets its final output here.
//
// With IS_FP8 rows are E4M3: two other warpgroups read tiles into registers and write them as
// float16, exact and one conversion for two values, where the copy engine would. What multiplies is
// the same but for the type; each query row is multiplied by a power of two that its largest value
// fits float16.
//
// ROWS is 32, 48 or 64; SHARED_BYTES what the host reserves.

#include "window_device.cuh"

constexpr int TILE = 64;         // positions
constexpr int LATENT = 512;      // columns of a key that are its value, too
constexpr int PE = 64;
constexpr int BLOCK_BYTES = TILE * 128;
constexpr int NUM_BLOCKS = (LATENT + PE) / 64;
constexpr int TILE_BYTES = NUM_BLOCKS * BLOCK_BYTES;
constexpr int NUM_STAGES = 2;
constexpr int NUM_CONSUMERS = 256, NUM_PRODUCERS = IS_FP8 ? 256 : 128;
constexpr int NUM_THREADS = NUM_CONSUMERS + NUM_PRODUCERS;
// Of a thread; registers go from warpgroup to warpgroup.
constexpr int TILES_AHEAD = ROWS == 32 ? 2 : 1;  // of E4M3, in registers
constexpr int PRODUCER_REGISTERS = !IS_FP8 ? 40 : TILES_AHEAD == 2 ? 112 : 64;
constexpr int CONSUMER_REGISTERS = !IS_FP8 ? 232 : TILES_AHEAD == 2 ? 144 : 192;
constexpr int HALF = ROWS / 2;   // query rows of a warpgroup's scores
constexpr int VALUE_TILES = LATENT / 64 / 2;  // of a warpgroup's outputs
constexpr int MAX_SEGMENTS = TILE * ROWS / 2;
constexpr bool SPLITS_COLUMNS = ROWS < 64;  // of the scores
constexpr unsigned EXPONENT = IS_FP8 ? 0x7c00 : 0x7f80;  // of a value in a tile

// What the host fills in; its twin is `WindowArguments` in `window_cuda.py`.
struct Arguments {
    TensorMap rows;  // the cache in boxes of 64 rows and 64 columns
    const bfloat16 *q, *q_pe;
    bfloat16 *out;         // [T, H, 512]
    float *partial_o;      // [pieces, rows_per_piece, 512]
    float *partial_top;    // [pieces, rows_per_piece]
    int *pieces;           // [S, 2]: a segment's first piece, and how many it has
    const int *offsets, *starts, *first_pages, *page_ids;
    const unsigned char *fp8_rows;  // the cache, where `rows` is not
    long long fp8_row_bytes;
    long long q_token_stride, q_head_stride, q_pe_token_stride, q_pe_head_stride;
    float scale;  // with log2(e)
    int num_segments, num_heads, num_row_tiles, rows_per_piece, target_pieces, page_size;
};

struct Shared {
    unsigned char tiles[NUM_STAGES][TILE_BYTES];
    unsigned char q[NUM_BLOCKS][ROWS * 128];  // swizzled as the tiles are
    // [query row / 8][position / 8][8][8]; before the first tile, the segments' numbers of tiles.
    union {
        bfloat16 shares[ROWS / 8][TILE / 8][8][8];  // with IS_FP8 float16
        int segment_tiles[MAX_SEGMENTS];
    };
    // Scores of half of the columns, for the other warpgroup.
    float parts[SPLITS_COLUMNS ? 2 : 1][SPLITS_COLUMNS ? ROWS / 4 : 1][128];
    float warp_top[4][ROWS];  // also the warps' sums
    float decay[ROWS];        // at last 1 / sum
    union {
        unsigned q_top[ROWS];  // bits of the largest query value
        float scale[ROWS];     // of the scores, where it is not the same for all
    };
    unsigned long long full[NUM_STAGES], empty[NUM_STAGES];
    int segment, number, num_pieces, num_tiles;
};

static_assert(sizeof(Shared) <= SHARED_BYTES, "the host reserves less");

// Operands of rows of 128 swizzled bytes: groups of 8 rows lie 1024 bytes apart.
__device__ __forceinline__ descriptor swizzled(unsigned address) {
    return (descriptor)((address & 0x3ffff) >> 4) | (descriptor)1 << 16 |
           (descriptor)(1024 >> 4) << 32 | (descriptor)1 << 62;
}

// Operands of 8 x 8 values in one piece, 128 bytes apart along the sum, 1024 along the rows.
__device__ __forceinline__ descriptor in_cores(unsigned address) {
    return (descriptor)((address & 0x3ffff) >> 4) | (descriptor)(128 >> 4) << 16 |
           (descriptor)(1024 >> 4) << 32;
}

#define NOTHING __int_as_float(0xff800000)  // minus infinity

// The largest, or the sum, over the lanes that hold the same query rows.
__device__ __forceinline__ float largest_of_rows(float x) {
    for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
}

__device__ __forceinline__ float sum_of_rows(float x) {
    for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

__device__ __forceinline__ unsigned finite_pair(unsigned x) {
    if ((x & EXPONENT) == EXPONENT) x &= 0xffff0000u;
    if ((x & EXPONENT << 16) == EXPONENT << 16) x &= 0xffffu;
    return x;
}

__device__ __forceinline__ int ceil_divide(int a, int b) { return (a + b - 1) / b; }

// --- Which piece is ours: `attend_pieces_kernel` in `split_kernel.py` decides in the same way.

__device__ int count_tiles(const Arguments &given, int segment) {
    int length = given.offsets[segment + 1] - given.offsets[segment];
    return length > 0 ? ceil_divide(given.starts[segment] + length, TILE) : 0;
}

__device__ int count_pieces(const Shared &shared, int num_segments, int piece_tiles) {
    int sum = 0;
    for (int segment = threadIdx.x % 32; segment < num_segments; segment += 32)
        sum += ceil_divide(shared.segment_tiles[segment], piece_tiles);
    return __reduce_add_sync(~0u, sum);
}

// By one warp.
__device__ void find_piece(Shared &shared, const Arguments &given, int piece) {
    int lane = threadIdx.x % 32;
    int num_segments = given.num_segments;
    int num_tiles = count_pieces(shared, num_segments, 1);
    int piece_tiles = max(ceil_divide(num_tiles, given.target_pieces), 1);
    if (num_segments * 2 <= given.target_pieces) {
        // A few pieces too many would run alone, after all others: rather longer ones.
        for (int trial = 0; trial < 4; trial++)
            if (count_pieces(shared, num_segments, piece_tiles) > given.target_pieces)
                piece_tiles += ceil_divide(piece_tiles, 4);
    }
    int first = 0;  // piece of the 32 segments at hand
    if (lane == 0) shared.segment = -1;
    __syncwarp();
    for (int base = 0; base < num_segments; base += 32) {
        int segment = base + lane;
        int tiles = segment < num_segments ? shared.segment_tiles[segment] : 0;
        int count = ceil_divide(tiles, piece_tiles);
        int end = count;
        for (int step = 1; step < 32; step *= 2) {
            int before = __shfl_up_sync(~0u, end, step);
            if (lane >= step) end += before;
        }
        end += first;
        if (end - count <= piece && piece < end) {
            shared.segment = segment;
            shared.number = piece - (end - count);
            shared.num_pieces = count;
            shared.num_tiles = tiles;
        }
        first = __shfl_sync(~0u, end, 31);
        if (piece < first) break;
    }
}

// --- The two roles.

#include "window_tiles.cuh"

// The exponent, as its bits, of a power of two that brings a bfloat16 of such bits below 2^15. It and
// that of its inverse are finite.
__device__ __forceinline__ int power_bits(unsigned top) {
    return min(254 + 14 - (int)(top >> 7), 253);
}

// Sixteen bytes of queries, zeros behind the last row.
__device__ __forceinline__ uint4 query_chunk(const Arguments &given, int first_token, int row,
                                             int num_rows, int chunk) {
    if (row >= num_rows) return make_uint4(0, 0, 0, 0);
    long long token = first_token + row / given.num_heads;
    int head = row % given.num_heads;
    const bfloat16 *source =
        chunk < LATENT / 8
            ? given.q + token * given.q_token_stride + head * given.q_head_stride + chunk * 8
            : given.q_pe + token * given.q_pe_token_stride + head * given.q_pe_head_stride +
                  (chunk * 8 - LATENT);
    return *(const uint4 *)source;
}

__device__ __forceinline__ void load_queries(Shared &shared, const Arguments &given,
                                             int first_token, int first_row, int num_rows) {
    constexpr int CHUNKS = NUM_BLOCKS * 8;  // of 16 bytes
    if (IS_FP8) {
        for (int row = threadIdx.x; row < ROWS; row += NUM_CONSUMERS) shared.q_top[row] = 0;
        meet<NUM_CONSUMERS>();
        for (int index = threadIdx.x; index < ROWS * CHUNKS; index += NUM_CONSUMERS) {
            int row = index / CHUNKS;
            uint4 x = query_chunk(given, first_token, first_row + row, num_rows, index % CHUNKS);
            raise_to(&shared.q_top[row], largest_bits(x));
        }
        meet<NUM_CONSUMERS>();
    }
    for (int index = threadIdx.x; index < ROWS * CHUNKS; index += NUM_CONSUMERS) {
        int row = index / CHUNKS, chunk = index % CHUNKS;
        uint4 values = query_chunk(given, first_token, first_row + row, num_rows, chunk);
        if (IS_FP8) {
            float power = __int_as_float(power_bits(shared.q_top[row]) << 23);
            values = make_uint4(scaled_pair(values.x, power), scaled_pair(values.y, power),
                                scaled_pair(values.z, power), scaled_pair(values.w, power));
        }
        int place = row * 128 + ((chunk % 8) ^ (row % 8)) * 16;
        *(uint4 *)(shared.q[chunk / 8] + place) = values;
    }
    if (IS_FP8) {
        meet<NUM_CONSUMERS>();
        for (int row = threadIdx.x; row < ROWS; row += NUM_CONSUMERS)
            shared.scale[row] =
                given.scale * __int_as_float(254 - power_bits(shared.q_top[row]) << 23);
    }
}

// S^T of a tile, of its half of the query rows.
__device__ __forceinline__ void multiply_queries(Shared &shared, float (&s)[HALF / 2],
                                                 int warpgroup, unsigned tile_at) {
    unsigned q_at = address_of(shared.q);
    if constexpr (SPLITS_COLUMNS) {
        // Of every 64 columns half.
        unsigned from = warpgroup * 64;
        float part[ROWS / 2];
        products_begin();
#pragma unroll
        for (int step = 0; step < NUM_BLOCKS * 2; step++)
            multiply_add<0>(part,
                            swizzled(tile_at + from + step / 2 * BLOCK_BYTES + step % 2 * 32),
                            swizzled(q_at + from + step / 2 * ROWS * 128 + step % 2 * 32),
                            step > 0);
        products_end();
        int thread = threadIdx.x % 128;
#pragma unroll
        for (int i = 0; i < HALF / 2; i++) {
            shared.parts[warpgroup][i][thread] = warpgroup ? part[i] : part[HALF / 2 + i];
            s[i] = warpgroup ? part[HALF / 2 + i] : part[i];
        }
        meet<NUM_CONSUMERS>();
#pragma unroll
        for (int i = 0; i < HALF / 2; i++) s[i] += shared.parts[1 - warpgroup][i][thread];
    } else {
        q_at += warpgroup * HALF * 128;
        products_begin();
#pragma unroll
        for (int step = 0; step < NUM_BLOCKS * 4; step++)
            multiply_add<0>(s, swizzled(tile_at + step / 4 * BLOCK_BYTES + step % 4 * 32),
                            swizzled(q_at + step / 4 * ROWS * 128 + step % 4 * 32), step > 0);
        products_end();
    }
}

// By two warpgroups. A thread holds, of S^T and O^T, rows 16 warp + lane / 4 + {0, 8} and of
// every 8 columns 2 (lane % 4) + {0, 1}.
__device__ void attend(Shared &shared, const Arguments &given, int piece, int row_tile, int first,
                       int end) {
    int segment = shared.segment;
    int first_token = given.offsets[segment];
    int length = given.offsets[segment + 1] - first_token;
    int start = given.starts[segment];
    int num_rows = length * given.num_heads;
    int first_row = row_tile * ROWS;
    int num_full_tiles = (start + 1) / TILE;  // of positions that every token sees
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    // The same in all lanes, and known to be.
    int warpgroup = __shfl_sync(~0u, (int)threadIdx.x / 128, 0);
    int place = lane / 4, pair = lane % 4 * 2;

    load_queries(shared, given, first_token, first_row, num_rows);
    publish_shared();

    float o[VALUE_TILES][ROWS / 2];
    float top[HALF / 4], sum[HALF / 4];
#pragma unroll
    for (int tile = 0; tile < VALUE_TILES; tile++)
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) o[tile][i] = 0.0f;
#pragma unroll
    for (int i = 0; i < HALF / 4; i++) {
        top[i] = NOTHING;
        sum[i] = 0.0f;
    }
    meet<NUM_CONSUMERS>();

    unsigned shares_at = address_of(shared.shares);
    for (int tile = first; tile < end; tile++) {
        int stage = (tile - first) % NUM_STAGES;
        barrier_wait(&shared.full[stage], (tile - first) / NUM_STAGES & 1);
        if (IS_FP8) publish_shared();
        unsigned tile_at = address_of(shared.tiles[stage]);
        bool is_masked = tile >= num_full_tiles;

        float s[HALF / 2];
        multiply_queries(shared, s, warpgroup, tile_at);
#pragma unroll
        for (int i = 0; i < HALF / 2; i += 2) {
            const float *scale = &shared.scale[warpgroup * HALF + i / 4 * 8 + pair];
            s[i] *= IS_FP8 ? scale[0] : given.scale;
            s[i + 1] *= IS_FP8 ? scale[1] : given.scale;
        }
        if (is_masked) {
            int context = start + length;
#pragma unroll
            for (int i = 0; i < HALF / 2; i++) {
                int position = tile * TILE + warp * 16 + place + i / 2 % 2 * 8;
                int row = first_row + warpgroup * HALF + i / 4 * 8 + pair + i % 2;
                if (position >= context || position > start + row / given.num_heads)
                    s[i] = NOTHING;
            }
        }
#pragma unroll
        for (int i = 0; i < HALF / 4; i++) {
            int at = i / 2 * 4 + i % 2;
            float mine = largest_of_rows(fmaxf(s[at], s[at + 2]));
            if (place == 0) shared.warp_top[warp][warpgroup * HALF + i / 2 * 8 + pair + i % 2] = mine;
        }
        // From here on nobody multiplies: shares and decay may be written, the tile made finite.
        meet<NUM_CONSUMERS>();
        if (is_masked) {
            // A share of 0 times NaN is NaN: a draft must not reach the tokens before it.
            uint4 *values = (uint4 *)shared.tiles[stage];
            for (int i = threadIdx.x; i < LATENT / 64 * BLOCK_BYTES / 16; i += NUM_CONSUMERS) {
                uint4 x = values[i];
                values[i] = make_uint4(finite_pair(x.x), finite_pair(x.y), finite_pair(x.z),
                                       finite_pair(x.w));
            }
        }
#pragma unroll
        for (int i = 0; i < HALF / 4; i++) {
            int row = warpgroup * HALF + i / 2 * 8 + pair + i % 2;
            float new_top = top[i];
#pragma unroll
            for (int other = 0; other < 4; other++)
                new_top = fmaxf(new_top, shared.warp_top[other][row]);
            // All hidden so far: any finite value will do.
            float base = new_top == NOTHING ? 0.0f : new_top;
            float decay = power_of_2(top[i] - base);
            top[i] = new_top;
            if (warp == 0 && place == 0) shared.decay[row] = decay;
            int at = i / 2 * 4 + i % 2;
            float share = power_of_2(s[at] - base), far_share = power_of_2(s[at + 2] - base);
            sum[i] = sum[i] * decay + share + far_share;
            shared.shares[row / 8][warp * 2][row % 8][place] = round_share(share);
            shared.shares[row / 8][warp * 2 + 1][row % 8][place] = round_share(far_share);
        }
        publish_shared();
        meet<NUM_CONSUMERS>();

#pragma unroll
        for (int group = 0; group < ROWS / 8; group++) {
            float2 decay = *(const float2 *)&shared.decay[group * 8 + pair];
#pragma unroll
            for (int value = 0; value < VALUE_TILES; value++) {
                o[value][group * 4] *= decay.x;
                o[value][group * 4 + 1] *= decay.y;
                o[value][group * 4 + 2] *= decay.x;
                o[value][group * 4 + 3] *= decay.y;
            }
        }
        products_begin();
#pragma unroll
        for (int step = 0; step < TILE / 16; step++)
#pragma unroll
            for (int value = 0; value < VALUE_TILES; value++)
                multiply_add<1>(
                    o[value],
                    swizzled(tile_at + (warpgroup * VALUE_TILES + value) * BLOCK_BYTES +
                             step * 2048),
                    in_cores(shares_at + step * 256), 1);
        products_end();
        if (lane == 0) barrier_arrive(&shared.empty[stage]);
    }

#pragma unroll
    for (int i = 0; i < HALF / 4; i++) {
        float mine = sum_of_rows(sum[i]);
        if (place == 0) shared.warp_top[warp][warpgroup * HALF + i / 2 * 8 + pair + i % 2] = mine;
    }
    meet<NUM_CONSUMERS>();
    bool is_whole = shared.num_pieces == 1;
    long long first_place = (long long)piece * given.rows_per_piece + first_row;
#pragma unroll
    for (int i = 0; i < HALF / 4; i++) {
        int row = warpgroup * HALF + i / 2 * 8 + pair + i % 2;
        float total = 0.0f;
#pragma unroll
        for (int other = 0; other < 4; other++) total += shared.warp_top[other][row];
        if (warp == 0 && place == 0) {
            // A piece of which a row sees nothing weighs nothing.
            shared.decay[row] = total == 0.0f ? 1.0f : 1.0f / total;
            if (!is_whole && first_row + row < num_rows)
                given.partial_top[first_place + row] =
                    total == 0.0f ? NOTHING : top[i] + log2f(total);
        }
    }
    meet<NUM_CONSUMERS>();
    long long first_out = (long long)first_token * given.num_heads + first_row;
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) {
        int row = i / 4 * 8 + pair + i % 2;
        if (first_row + row >= num_rows) continue;
        float factor = shared.decay[row];
#pragma unroll
        for (int value = 0; value < VALUE_TILES; value++) {
            int column = (warpgroup * VALUE_TILES + value) * 64 + warp * 16 + place + i / 2 % 2 * 8;
            float x = o[value][i] * factor;
            if (is_whole)
                given.out[(first_out + row) * LATENT + column] = round_to_bfloat16(x);
            else
                given.partial_o[(first_place + row) * LATENT + column] = x;
        }
    }
}

// Blocks: pieces x tiles of query rows.
extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
    attend_windows(const __grid_constant__ Arguments given) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared &shared = *(Shared *)memory;
    int piece = blockIdx.x / given.num_row_tiles, row_tile = blockIdx.x % given.num_row_tiles;
    if (threadIdx.x == 0) {
        // Swizzled blocks begin at multiples of 1024 bytes.
        if (address_of(memory) % 1024 != 0) __trap();
        for (int stage = 0; stage < NUM_STAGES; stage++) {
            barrier_init(&shared.full[stage], IS_FP8 ? NUM_PRODUCERS / 32 : 1);
            barrier_init(&shared.empty[stage], NUM_CONSUMERS / 32);
        }
        publish_barriers();
    }
    for (int segment = threadIdx.x; segment < given.num_segments; segment += NUM_THREADS)
        shared.segment_tiles[segment] = count_tiles(given, segment);
    __syncthreads();
    if (threadIdx.x < 32) find_piece(shared, given, piece);
    __syncthreads();
    int segment = shared.segment;
    if (segment < 0) return;
    int length = given.offsets[segment + 1] - given.offsets[segment];
    if (row_tile * ROWS >= length * given.num_heads) return;
    if (threadIdx.x == 0 && shared.number == 0 && row_tile == 0) {
        given.pieces[segment * 2] = piece;
        given.pieces[segment * 2 + 1] = shared.num_pieces;
    }
    int first = (int)((long long)shared.number * shared.num_tiles / shared.num_pieces);
    int end = (int)((long long)(shared.number + 1) * shared.num_tiles / shared.num_pieces);
    if (threadIdx.x >= NUM_CONSUMERS) {
        shrink_to_registers<PRODUCER_REGISTERS>();
        if (IS_FP8)
            bring_fp8_tiles(shared, given, first, end);
        else if (threadIdx.x < NUM_CONSUMERS + 32)
            bring_tiles(shared, given, first, end);
    } else {
        grow_to_registers<CONSUMER_REGISTERS>();
        attend(shared, given, piece, row_tile, first, end);
    }
}
