// KDA windows of 128 keys and 128 values a head; `reference.py` says what is computed.
//
// One thread block runs one head of one segment and keeps the whole state of it in registers, 64
// values a thread, from the first replayed row to the last token that moves it: one read, one
// write. Up to 8 tokens are a tile. With D[t] the decay from the tile's start to token t and
// E[t, s] that from token s to token t, products of factors in [0, 1] that are never divided:
//
//     u[t] = beta[t] (v[t] - S (D[t] k[t]) - sum_{s < t} A[t, s] u[s]),  A[t, s] = k[t] . E[t, s] k[s]
//     o[t] = S (D[t] q[t]) + sum_{s <= t} P[t, s] u[s],                  P[t, s] = q[t] . E[t, s] k[s]
//
// The products with S run on the tensor cores, each float32 cut into two tf32 parts. Thread
// 4 r + c of a warp holds keys 16 j + 4 c + {0 .. 3} of value rows r and r + 8, which is what a
// B fragment holds once the keys are counted in that order.
//
// The short convolution before it (`short_conv/reference.py`), of 4 taps, is part of the kernel: its
// channels are the head's too, and so are the rows that it reads and leaves in the slots.
//
// ACTIVATION_IS_BF16 is 1 for bfloat16 activations, 0 for float32; SHARED_BYTES what the host takes
// `Shared` to be without the replayed rows.

#include "window_state.cuh"
#include "window_tokens.cuh"

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 2)
kda_windows(const __grid_constant__ Arguments a) {
    extern __shared__ float4 dynamic_memory[];
    Shared &shared = *reinterpret_cast<Shared *>(dynamic_memory);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = lane >> 2, quad = lane & 3;
    Segment b;
    b.head = blockIdx.x;
    b.number = blockIdx.y;
    b.first = a.offsets[b.number];
    b.length = a.offsets[b.number + 1] - b.first;
    b.read_slot = a.read_slots[b.number];
    b.write_slot = a.write_slots[b.number];
    b.replay = a.replay[b.number];
    if (b.length == 0) return;
    const unsigned number_of_all = blockIdx.y * gridDim.x + blockIdx.x;

    load_raw(shared, a, b, 0);
    for (int index = threadIdx.x; index < 3 * DIM; index += NUM_THREADS) {
        const int channel = index / DIM * a.num_heads * DIM + b.head * DIM + index % DIM;
        copy_async(&shared.taps[index].x, a.conv + 4 * (long long)channel);
    }
    if (warp == 6) copy_async(&shared.bias[4 * lane], a.dt_bias + b.head * DIM + 4 * lane);
    if (warp == 7) copy_async(&shared.norm[4 * lane], a.norm + 4 * lane);
    const float rate = __expf(a.a_log[b.head]);
    activation beta{};
    if (warp < b.length) beta = a.beta[(b.first + warp) * a.beta_stride + b.head];
    const int record_row = a.num_heads * ROW_WIDTH;
    const float *recorded = a.records + b.read_slot * a.records_stride + b.head * ROW_WIDTH;
    for (int index = threadIdx.x; index < b.replay * (ROW_WIDTH / 4); index += NUM_THREADS) {
        const int number = index / (ROW_WIDTH / 4), channel = 4 * (index % (ROW_WIDTH / 4));
        copy_async(&shared.replayed[number][channel], recorded + number * record_row + channel);
    }

    State state;
    const int part = (b.head * DIM + 16 * warp + row) * DIM + 4 * quad;
    const float *source = a.states + b.read_slot * a.states_stride + part;
    load_state(state, source);

    if (threadIdx.x == NUM_THREADS - 32) {
        const unsigned next = number_of_all + a.num_ahead;
        const unsigned segment = next / gridDim.x;
        if (segment < gridDim.y && a.offsets[segment + 1] > a.offsets[segment])
            fetch_ahead(a.states + a.read_slots[segment] * a.states_stride +
                            next % gridDim.x * (DIM * DIM),
                        DIM * DIM * 4);
    }

    for (int begin = 0; begin < b.length; begin += TILE) {
        const int count = min(TILE, b.length - begin), token = begin + warp;
        if (begin > 0) {
            load_raw(shared, a, b, begin);
            if (token < b.length) beta = a.beta[(b.first + token) * a.beta_stride + b.head];
        }
        if (begin == 0) save_conv_rows(a, b, threadIdx.x);
        wait_for_copies();
        __syncthreads();
        prepare_token(shared, a, b, token, rate, beta);
        store_conv_rows(shared.raw, a, b, token, threadIdx.x);
        __syncthreads();
        if (count > 1) {
            pair_tokens(shared);
            decay_vectors(shared);
            __syncthreads();
        }
        if (begin == 0) {
            for (int number = 0; number < b.replay; ++number) {
                float *values = shared.replayed[number];
                fold(state, values, values + DIM, values + 2 * DIM + 16 * warp + row, quad);
                save(state, a, b.number, number + 1 - b.replay, part);
            }
        }
        if (count > 1) {
            multiply_state(shared, state);
            __syncthreads();
            solve(shared);
        } else {
            run_token(shared, state);
        }
        __syncthreads();
        // Of the last tile only the anchor is wanted in the state.
        const int end = begin + TILE < b.length ? TILE : begin == 0;
        for (int place = 0; place < end; ++place) {
            if (count > 1)
                fold(state, shared.decay[place], shared.k[place],
                     &shared.u[place][16 * warp + row], quad);
            if (begin + place == 0) {
                if (b.write_slot != 0)
                    store_state(state, a.states + b.write_slot * a.states_stride + part);
                save(state, a, b.number, 1, part);
            }
        }
        if (warp < count) {
            store_output(shared, a, b.head, b.first + token);
            if (token > 0 && b.write_slot != 0)
                store_record(shared, a.records + b.write_slot * a.records_stride +
                                         (token - 1) * record_row + b.head * ROW_WIDTH);
        }
        __syncthreads();
    }
}
