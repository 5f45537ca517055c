// The mixture of attention residuals with its addition and norm, in bfloat16; `reference.py` says
// what is computed.
//
// A cluster of thread blocks runs one token, each block an even part of its columns, 8 a thread.
// A thread keeps its columns of all rows in registers, so that every row is read once. Two sums
// cross the cluster, over shared memory of its blocks: of each row <row, key> and <row, row>, and
// of the mixture <mixed, mixed>.
//
// NUM_BLOCKS rows of the bank, WIDTH columns, CLUSTER blocks of NUM_THREADS threads.

constexpr int NUM_ROWS = NUM_BLOCKS + 1;  // the open block's sum is the last
constexpr int NUM_SUMS = 2 * NUM_ROWS;
constexpr int NUM_WARPS = NUM_THREADS / 32;
constexpr int USED_THREADS = WIDTH / CLUSTER / 8;
constexpr unsigned ALL = 0xffffffffu;

static_assert(USED_THREADS * CLUSTER * 8 == WIDTH && USED_THREADS <= NUM_THREADS, "even parts");
static_assert(NUM_THREADS % 32 == 0 && NUM_SUMS <= 32, "one warp has a lane for each sum");

// What the host fills in; its twin is `MixArguments` in `cluster_cuda.py`. bfloat16 where no type is.
struct Arguments {
    const unsigned short *bank, *partial, *addend;  // addend may be null
    const float *key_weight;
    const unsigned short *norm_weight;
    unsigned short *sum, *mixed, *normed;  // mixed and normed may be null, sum without addend
    long long bank_token_stride, bank_block_stride, partial_stride, addend_stride;
    float eps;
};

struct Shared {
    float of_warps[NUM_WARPS][NUM_SUMS];
    float of_blocks[CLUSTER][NUM_SUMS];
    float squares_of_warps[NUM_WARPS];
    float squares_of_blocks[CLUSTER];
    float shares[NUM_ROWS];
};

__device__ float low(unsigned pair) { return __uint_as_float(pair << 16); }
__device__ float high(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ unsigned rounded(float first, float second) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

__device__ uint4 load(const unsigned short *address) {
    return *reinterpret_cast<const uint4 *>(address);
}

__device__ void store(unsigned short *address, const unsigned (&pairs)[4]) {
    *reinterpret_cast<uint4 *>(address) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

__device__ void unpack(uint4 packed, unsigned (&pairs)[4]) {
    pairs[0] = packed.x;
    pairs[1] = packed.y;
    pairs[2] = packed.z;
    pairs[3] = packed.w;
}

__device__ float warp_sum(float value) {
#pragma unroll
    for (int distance = 16; distance; distance /= 2)
        value += __shfl_xor_sync(ALL, value, distance);
    return value;
}

__device__ void arrive() {
    __syncwarp();
    if (CLUSTER > 1) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ void wait() {
    if (CLUSTER > 1)
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    else
        __syncthreads();
}

// Writes to the same place in another block of the cluster.
__device__ void give(float *place, unsigned block, float value) {
    unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(place));
    asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(block));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(NUM_THREADS)
    mix(const __grid_constant__ Arguments arguments) {
    __shared__ Shared shared;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const unsigned block = blockIdx.x % CLUSTER;
    const long long token = blockIdx.x / CLUSTER;
    const bool is_used = thread < USED_THREADS;
    const int column = (block * USED_THREADS + (is_used ? thread : 0)) * 8;
    arrive();  // nobody writes into a block that has not begun

    unsigned rows[NUM_ROWS][4];
    const unsigned short *bank = arguments.bank + token * arguments.bank_token_stride + column;
#pragma unroll
    for (int row = 0; row < NUM_BLOCKS; ++row)
        unpack(load(bank + row * arguments.bank_block_stride), rows[row]);
    unpack(load(arguments.partial + token * arguments.partial_stride + column), rows[NUM_BLOCKS]);
    const float4 first_keys = *reinterpret_cast<const float4 *>(arguments.key_weight + column);
    const float4 last_keys = *reinterpret_cast<const float4 *>(arguments.key_weight + column + 4);
    const float keys[8] = {first_keys.x, first_keys.y, first_keys.z, first_keys.w,
                           last_keys.x,  last_keys.y,  last_keys.z,  last_keys.w};
    if (arguments.addend) {
        unsigned addend[4];
        unpack(load(arguments.addend + token * arguments.addend_stride + column), addend);
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            const unsigned open = rows[NUM_BLOCKS][pair];
            rows[NUM_BLOCKS][pair] =
                rounded(low(open) + low(addend[pair]), high(open) + high(addend[pair]));
        }
        if (is_used) store(arguments.sum + token * WIDTH + column, rows[NUM_BLOCKS]);
    }

#pragma unroll
    for (int row = 0; row < NUM_ROWS; ++row) {
        float score = 0.0f, square = 0.0f;
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            const float first = low(rows[row][pair]), second = high(rows[row][pair]);
            score += first * keys[2 * pair] + second * keys[2 * pair + 1];
            square += first * first + second * second;
        }
        score = warp_sum(is_used ? score : 0.0f);
        square = warp_sum(is_used ? square : 0.0f);
        if (lane == 0) {
            shared.of_warps[warp][row] = score;
            shared.of_warps[warp][NUM_ROWS + row] = square;
        }
    }
    __syncthreads();
    wait();  // all blocks have begun
    for (int item = thread; item < NUM_SUMS * CLUSTER; item += NUM_THREADS) {
        const int sum = item % NUM_SUMS, other = item / NUM_SUMS;
        float value = 0.0f;
#pragma unroll
        for (int from = 0; from < NUM_WARPS; ++from) value += shared.of_warps[from][sum];
        give(&shared.of_blocks[block][sum], other, value);
    }
    arrive();
    wait();
    if (warp == 0) {
        float value = 0.0f;
        if (lane < NUM_SUMS) {
#pragma unroll
            for (int from = 0; from < CLUSTER; ++from) value += shared.of_blocks[from][lane];
        }
        const float square = __shfl_sync(ALL, value, (lane + NUM_ROWS) % 32);
        float score = value * rsqrtf(square / WIDTH + arguments.eps);
        if (lane >= NUM_ROWS) score = __int_as_float(0xff800000);  // minus infinity
        float highest = score;
#pragma unroll
        for (int distance = 16; distance; distance /= 2)
            highest = fmaxf(highest, __shfl_xor_sync(ALL, highest, distance));
        const float share = expf(score - highest);
        const float total = warp_sum(share);
        if (lane < NUM_ROWS) shared.shares[lane] = share / total;
    }
    __syncthreads();

    float mixed[8] = {};
#pragma unroll
    for (int row = 0; row < NUM_ROWS; ++row) {
        const float share = shared.shares[row];
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            mixed[2 * pair] += share * low(rows[row][pair]);
            mixed[2 * pair + 1] += share * high(rows[row][pair]);
        }
    }
    unsigned pairs[4];
    float square = 0.0f;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
        pairs[pair] = rounded(mixed[2 * pair], mixed[2 * pair + 1]);
        const float first = low(pairs[pair]), second = high(pairs[pair]);
        square += first * first + second * second;
    }
    if (arguments.mixed && is_used) store(arguments.mixed + token * WIDTH + column, pairs);
    // The same for all blocks of all clusters: nobody waits in vain.
    if (!arguments.normed) return;

    unsigned weights[4];
    unpack(load(arguments.norm_weight + column), weights);
    square = warp_sum(is_used ? square : 0.0f);
    if (lane == 0) shared.squares_of_warps[warp] = square;
    __syncthreads();
    if (thread < CLUSTER) {
        float value = 0.0f;
#pragma unroll
        for (int from = 0; from < NUM_WARPS; ++from) value += shared.squares_of_warps[from];
        give(&shared.squares_of_blocks[block], thread, value);
    }
    arrive();
    wait();
    float total = 0.0f;
#pragma unroll
    for (int from = 0; from < CLUSTER; ++from) total += shared.squares_of_blocks[from];
    const float scale = rsqrtf(total / WIDTH + arguments.eps);
#pragma unroll
    for (int pair = 0; pair < 4; ++pair)
        pairs[pair] = rounded(low(pairs[pair]) * scale * low(weights[pair]),
                              high(pairs[pair]) * scale * high(weights[pair]));
    if (is_used) store(arguments.normed + token * WIDTH + column, pairs);
}
