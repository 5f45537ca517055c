// The tokens of a tile: before they meet the state, and after. All of it is half a block's work:
// `thread` counts within that half.
#pragma once

#include "walk_memory.cuh"
#include "window_rows.cuh"

// A channel of q, k or v of COUNT tokens from `first` on, behind the convolution.
template <int COUNT>
__device__ __forceinline__ void convolve(float (&x)[COUNT], const Shared &shared, int part,
                                         int channel, int first) {
    const float4 taps = shared.taps[part][channel];
    float x0 = to_float(shared.raw[first][part][channel]);
    float x1 = to_float(shared.raw[first + 1][part][channel]);
    float x2 = to_float(shared.raw[first + 2][part][channel]);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const float x3 = to_float(shared.raw[first + HISTORY + i][part][channel]);
        x[i] = silu(fmaf(taps.w, x3, fmaf(taps.z, x2, fmaf(taps.y, x1, taps.x * x0))));
        x0 = x1, x1 = x2, x2 = x3;
    }
}

// Of COUNT tokens: keys by one half of the threads, queries by the other, a channel each; values
// and decays of half of the tokens by each. Keys and queries are not normalised yet: the sums of
// their squares are in `shared` once all have met.
template <int COUNT>
__device__ __forceinline__ void convolve_tokens(float (&x)[TILE], Shared &shared, Tokens &tokens,
                                                const Arguments &a, float rate, int thread) {
    constexpr int PART = (COUNT + 1) / 2;
    const int channel = thread % DIM, half = thread / DIM;
    const int lane = thread & 31, warp = thread / 32 % 4, first = half * (COUNT / 2);
    float own[COUNT], v[PART], decay[PART];
    convolve(own, shared, 1 - half, channel, 0);
    convolve(v, shared, 2, channel, first);
    const float bias = shared.bias[channel];
#pragma unroll
    for (int i = 0; i < PART; ++i) decay[i] = to_float(shared.raw_decay[first + i][channel]) + bias;
    if (a.has_bound) {
#pragma unroll
        for (int i = 0; i < PART; ++i) decay[i] = bounded_decay(decay[i], rate, a.lower_bound);
    } else {
#pragma unroll
        for (int i = 0; i < PART; ++i) decay[i] = free_decay(decay[i], rate);
    }
#pragma unroll
    for (int i = 0; i < PART; ++i) {
        tokens.decay[first + i][channel] = decay[i];
        tokens.v[first + i][channel] = v[i];
    }
    float squares[COUNT];
#pragma unroll
    for (int t = 0; t < COUNT; ++t) x[t] = own[t], squares[t] = own[t] * own[t];
    if constexpr (COUNT == 1) {
        squares[0] = sum_of_warp(squares[0]);
        if (lane == 0) shared.squares[half][0][warp] = squares[0];
    } else {
        spread_sums<TILE / 2, 16>(squares, lane);
        squares[0] += __shfl_xor_sync(0xffffffffu, squares[0], 2);
        squares[0] += __shfl_xor_sync(0xffffffffu, squares[0], 1);
        if ((lane & 3) == 0) shared.squares[half][lane >> 2][warp] = squares[0];
    }
}

template <int COUNT>
__device__ __forceinline__ void normalize(float (&x)[TILE], Shared &shared, Tokens &tokens,
                                          int thread) {
    const int channel = thread % DIM, half = thread / DIM;
    const float scale = half ? 0.08838834764831845f : 1.0f;
#pragma unroll
    for (int t = 0; t < COUNT; ++t) {
        const float4 squares = at(shared.squares[half][t]);
        x[t] *= scale * rsqrtf(squares.x + squares.y + (squares.z + squares.w) + 1e-6f);
    }
    if (half == 0) {
#pragma unroll
        for (int t = 0; t < COUNT; ++t) tokens.k[t][channel] = x[t];
    } else {
#pragma unroll
        for (int t = 0; t < (COUNT + 1) / 2; ++t) shared.early_q[t][channel] = x[t];
    }
}

// D[t] k[t] and D[t] q[t].
template <int COUNT>
__device__ __forceinline__ void decay_vectors(float (&decay)[TILE], const float (&x)[TILE],
                                              Shared &shared, const Tokens &tokens, int thread) {
    const int channel = thread % DIM, half = thread / DIM;
    float from_start = 1.0f;
#pragma unroll
    for (int t = 0; t < COUNT; ++t) {
        decay[t] = tokens.decay[t][channel];
        from_start *= decay[t];
        const float vector = x[t] * from_start;
        shared.vectors[t][2 * channel + half] = vector;
        shared.rests[t][2 * channel + half] = vector - leading_bits(vector);
    }
}

// A by the keys' threads, P by the queries': sums over the channels of a warp. k[s] decays from
// token to token.
template <int COUNT>
__device__ __forceinline__ void pair_tokens(Shared &shared, const Tokens &tokens,
                                            const float (&x)[TILE], const float (&decay)[TILE],
                                            int thread) {
    const int channel = thread % DIM, half = thread / DIM;
    const int lane = thread & 31, warp = thread / 32 % 4;
    if constexpr (COUNT == 1) {
        if (half > 0) return;
        const float sum = sum_of_warp(x[0] * shared.early_q[0][channel]);
        if (lane == 28) shared.products[0][warp][lane] = sum;
    } else {
        float k[TILE], sums[4 * TILE];
#pragma unroll
        for (int t = 0; t < TILE; ++t) k[t] = half ? tokens.k[t][channel] : x[t];
#pragma unroll
        for (int t = 0; t < TILE / 2; ++t)
            sums[28 + t] =
                half ? x[TILE / 2 + t] * k[TILE / 2 + t] : x[t] * shared.early_q[t][channel];
#pragma unroll
        for (int s = 0; s < TILE - 1; ++s) {
            float key = k[s];
#pragma unroll
            for (int t = s + 1; t < TILE; ++t) {
                key *= decay[t];
                sums[t * (t - 1) / 2 + s] = key * x[t];
            }
        }
        spread_sums<16, 16>(sums, lane);
        shared.products[half][warp][lane] = sums[0];
    }
}

// One warp a token: RMS norm over the head, times the gate.
__device__ __forceinline__ void store_output(const Arguments &a, const Unit &unit, int place,
                                             float4 o, float4 norm, float4 gate, int lane) {
    const long long token = unit.first + unit.begin + place;
    const float squares = sum_of_warp(o.x * o.x + o.y * o.y + (o.z * o.z + o.w * o.w));
    const float scale = rsqrtf(squares * (1.0f / DIM) + a.eps);
    o = make_float4(o.x * scale * norm.x * sigmoid(gate.x), o.y * scale * norm.y * sigmoid(gate.y),
                    o.z * scale * norm.z * sigmoid(gate.z), o.w * scale * norm.w * sigmoid(gate.w));
    store_channels(a.out + token * a.out_stride + unit.head * DIM + 4 * lane, o);
}

// One warp a draft: what folds it in later.
__device__ __forceinline__ void store_record(const Tokens &tokens, float *row, int thread) {
    const int place = thread >> 5, channel = 4 * (thread & 31);
    store_once(row + channel, at(&tokens.decay[place][channel]));
    store_once(row + DIM + channel, at(&tokens.k[place][channel]));
    store_once(row + 2 * DIM + channel, at(&tokens.u[place][channel]));
}

// Half of the block: all but the states and the copies. While the state meets the present unit, the
// next is made ready, and last come the present unit's outputs. The first round has no present unit,
// the last no next.
__device__ __forceinline__ void run_tokens(Shared &shared, const Arguments &a, int thread) {
    const int lane = thread & 31, place = thread >> 5;
    Quad present_gate{}, next_gate{};
    const float4 norm = at(a.norm + 4 * lane);

    for (int number = -1;; ++number) {
        barrier_wait(&shared.rows_arrived, (number + 1) & 1);
        const Unit present = shared.units[number & (NUM_UNITS - 1)];
        const Unit next = shared.units[(number + 1) & (NUM_UNITS - 1)];
        const bool has_present = number >= 0, has_next = next.length > 0;
        const int count = next.count();
        const Tokens &tokens = shared.tokens[number & 1];
        Tokens &next_tokens = shared.tokens[(number + 1) & 1];
        float x[TILE];

        if (has_next) {
            // Nobody writes the next tokens while somebody reads those of the unit before last.
            meet<NUM_ROLE_THREADS>(TOKENS);
            if (a.first_save != nullptr && next.begin == 0) {
                // Before the unit's own rows are stored where these may lie.
                save_conv_rows(a, next, thread);
                meet<NUM_ROLE_THREADS>(TOKENS);
            }
            const float rate = __expf(shared.log_rate);
            if (count == 1)
                convolve_tokens<1>(x, shared, next_tokens, a, rate, thread);
            else
                convolve_tokens<TILE>(x, shared, next_tokens, a, rate, thread);
            if (lane == 0) next_tokens.beta[place] = sigmoid(shared.raw_beta[place]);
            next_gate = quad_at(&shared.raw_gate[place][4 * lane]);
            store_conv_rows(shared.raw, a, next, next.begin + place, thread);
            pass<NUM_WITH_COPIER>(ROWS_READ);
            meet<NUM_ROLE_THREADS>(TOKENS);
            if (count == 1)
                normalize<1>(x, shared, next_tokens, thread);
            else
                normalize<TILE>(x, shared, next_tokens, thread);
        }
        if (has_present) meet<NUM_MEETING>(VECTORS_READ);
        if (has_next) {
            float decay[TILE];
            if (count == 1)
                decay_vectors<1>(decay, x, shared, next_tokens, thread);
            else
                decay_vectors<TILE>(decay, x, shared, next_tokens, thread);
            meet<NUM_ROLE_THREADS>(TOKENS);
            if (count == 1)
                pair_tokens<1>(shared, next_tokens, x, decay, thread);
            else
                pair_tokens<TILE>(shared, next_tokens, x, decay, thread);
            meet<NUM_ROLE_THREADS>(TOKENS);
            if (thread < 64) {
                const float(&sums)[4][4 * TILE] = shared.products[place];
                next_tokens.pairs[place][lane] = sums[0][lane] + sums[1][lane] +
                                                 (sums[2][lane] + sums[3][lane]);
            }
        }
        pass<NUM_MEETING>(TOKENS_READY);
        if (has_present) {
            meet<NUM_MEETING>(RESULTS_READY + (number & 1));
            const int token = present.begin + place;
            if (token < present.length) {
                store_output(a, present, place, at(&tokens.v[place][4 * lane]), norm,
                             channels_of(present_gate), lane);
                if (token > 0 && present.write_slot != 0)
                    store_record(
                        tokens,
                        a.records + record_offset(a, present, present.write_slot, token - 1),
                        thread);
            }
        }
        if (!has_next) return;
        present_gate = next_gate;
    }
}
