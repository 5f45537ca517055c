// The tokens of a tile: before they meet the state, and after.
#pragma once

#include "window_memory.cuh"
#include "window_rows.cuh"

__device__ __forceinline__ float decay_of(float raw, float rate, const Arguments &a) {
    if (a.has_bound) return bounded_decay(raw, rate, a.lower_bound);
    return free_decay(raw, rate);
}

// Asks for what a tile needs of its tokens, each warp for one of them: the rows that their taps
// reach, and the logits of decays and gate, which wait where the values will be.
__device__ __forceinline__ void load_raw(Shared &shared, const Arguments &a, const Segment &b,
                                         int begin) {
    const int place = threadIdx.x >> 5, token = begin + place, channel = 4 * (threadIdx.x & 31);
    const int in_head = b.head * DIM + channel, width = a.num_heads * DIM;
    if (token < b.length) {
        const long long row = b.first + token;
        const activation *x = a.channels + row * a.channels_stride + in_head;
#pragma unroll
        for (int part = 0; part < 3; ++part)
            copy_quad_async(&shared.raw[HISTORY + place][part][channel], x + part * width);
        copy_quad_async(raw_of(shared.decay[place]) + channel,
                        a.decay + row * a.decay_stride + in_head);
        copy_quad_async(raw_of(shared.gate[place]) + channel,
                        a.gate + row * a.gate_stride + in_head);
    }
    if (place < HISTORY) {
        const activation *x = raw_channels(a, b, in_head, token - HISTORY);
#pragma unroll
        for (int part = 0; part < 3; ++part)
            copy_quad_async(&shared.raw[place][part][channel], x + part * width);
    }
}

__device__ __forceinline__ float4 convolve(const Shared &shared, int place, int part,
                                           int channel) {
    float4 x[HISTORY + 1];
#pragma unroll
    for (int tap = 0; tap <= HISTORY; ++tap)
        x[tap] = load_channels(&shared.raw[place + tap][part][channel]);
    const float4 *taps = shared.taps + part * DIM + channel;
    return make_float4(silu(dot(taps[0], make_float4(x[0].x, x[1].x, x[2].x, x[3].x), 0.0f)),
                       silu(dot(taps[1], make_float4(x[0].y, x[1].y, x[2].y, x[3].y), 0.0f)),
                       silu(dot(taps[2], make_float4(x[0].z, x[1].z, x[2].z, x[3].z), 0.0f)),
                       silu(dot(taps[3], make_float4(x[0].w, x[1].w, x[2].w, x[3].w), 0.0f)));
}

__device__ __forceinline__ float4 normalized(float4 x, float scale) {
    scale *= rsqrtf(sum_of_warp(dot(x, x, 0.0f)) + 1e-6f);
    return make_float4(x.x * scale, x.y * scale, x.z * scale, x.w * scale);
}

// Each warp makes one token ready, four channels a thread.
__device__ __forceinline__ void prepare_token(Shared &shared, const Arguments &a,
                                              const Segment &b, int token, float rate,
                                              activation raw_beta) {
    const int lane = threadIdx.x & 31, place = threadIdx.x >> 5, channel = 4 * lane;
    float4 decay = make_float4(1.0f, 1.0f, 1.0f, 1.0f), k = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float4 q = k, v = k, gate = k;
    float beta = 0.0f;
    if (token < b.length) {
        q = normalized(convolve(shared, place, 0, channel), 0.08838834764831845f);
        k = normalized(convolve(shared, place, 1, channel), 1.0f);
        v = convolve(shared, place, 2, channel);
        const float4 bias = at(&shared.bias[channel]);
        decay = load_channels(raw_of(shared.decay[place]) + channel);
        decay.x = decay_of(decay.x + bias.x, rate, a);
        decay.y = decay_of(decay.y + bias.y, rate, a);
        decay.z = decay_of(decay.z + bias.z, rate, a);
        decay.w = decay_of(decay.w + bias.w, rate, a);
        gate = load_channels(raw_of(shared.gate[place]) + channel);
        gate = make_float4(sigmoid(gate.x), sigmoid(gate.y), sigmoid(gate.z), sigmoid(gate.w));
        beta = sigmoid(to_float(raw_beta));
    }
    __syncwarp();  // logits that other lanes have read lie where these values go
    at(&shared.decay[place][channel]) = decay;
    at(&shared.k[place][channel]) = k;
    at(&shared.q[place][channel]) = q;
    at(&shared.v[place][channel]) = v;
    at(&shared.gate[place][channel]) = gate;
    if (lane == 0) shared.beta[place] = beta;
}

// Column s of A and P, by warp s: k[s] decays from token to token, and is nothing before its own.
__device__ __forceinline__ void pair_tokens(Shared &shared) {
    const int lane = threadIdx.x & 31, source = threadIdx.x >> 5, channel = 4 * lane;
    float sums[2 * TILE];
    const float4 own = at(&shared.k[source][channel]);
    float4 key = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int t = 0; t < TILE; ++t) {
        key = t == source ? own : scaled(key, at(&shared.decay[t][channel]));
        sums[t] = dot(key, at(&shared.k[t][channel]), 0.0f);
        sums[TILE + t] = dot(key, at(&shared.q[t][channel]), 0.0f);
    }
    add_lanes<TILE>(sums, lane);
    sums[0] += __shfl_xor_sync(0xffffffffu, sums[0], 1);
    if ((lane & 1) == 0) shared.pairs[lane >> 1][source] = sums[0];
}

// D[t] k[t] and D[t] q[t], one channel and half of the tokens a thread.
__device__ __forceinline__ void decay_vectors(Shared &shared) {
    const int channel = threadIdx.x % DIM, is_late = threadIdx.x / DIM;
    float decay = 1.0f;
    if (is_late)
#pragma unroll
        for (int t = 0; t < TILE / 2; ++t) decay *= shared.decay[t][channel];
#pragma unroll
    for (int i = 0; i < TILE / 2; ++i) {
        const int t = i + is_late * (TILE / 2);
        decay *= shared.decay[t][channel];
        const float k = shared.k[t][channel] * decay, q = shared.q[t][channel] * decay;
        reinterpret_cast<float2 *>(shared.decayed[t])[channel] = make_float2(k, q);
    }
}

// u of all tokens and half of the outputs, one value channel a thread.
__device__ __forceinline__ void solve(Shared &shared) {
    const int value = threadIdx.x % DIM, is_late = threadIdx.x / DIM;
    float u[TILE];
#pragma unroll
    for (int t = 0; t < TILE; ++t) {
        float rest = shared.v[t][value] - shared.result[t][value];
#pragma unroll
        for (int s = 0; s < t; ++s) rest = fmaf(-shared.pairs[t][s], u[s], rest);
        u[t] = shared.beta[t] * rest;
        if (!is_late) shared.u[t][value] = u[t];
    }
#pragma unroll
    for (int t = 0; t < TILE; ++t) {
        if (is_late != (t >= TILE / 2)) continue;
        float o = shared.result[TILE + t][value];
#pragma unroll
        for (int s = 0; s <= t; ++s) o = fmaf(shared.pairs[TILE + t][s], u[s], o);
        shared.result[TILE + t][value] = o;
    }
}

// One warp a token: RMS norm over the head, times the gate.
__device__ __forceinline__ void store_output(Shared &shared, const Arguments &a, int head,
                                             long long token) {
    const int lane = threadIdx.x & 31, place = threadIdx.x >> 5, channel = 4 * lane;
    float4 o = at(&shared.result[TILE + place][channel]);
    const float scale = rsqrtf(sum_of_warp(dot(o, o, 0.0f)) * (1.0f / DIM) + a.eps);
    const float4 norm = at(&shared.norm[channel]);
    const float4 gate = at(&shared.gate[place][channel]);
    o = make_float4(o.x * scale * norm.x * gate.x, o.y * scale * norm.y * gate.y,
                    o.z * scale * norm.z * gate.z, o.w * scale * norm.w * gate.w);
    store_channels(a.out + token * a.out_stride + head * DIM + channel, o);
}

// One warp a draft: what folds it in later.
__device__ __forceinline__ void store_record(Shared &shared, float *row) {
    const int lane = threadIdx.x & 31, place = threadIdx.x >> 5, channel = 4 * lane;
    store_once(row + channel, at(&shared.decay[place][channel]));
    store_once(row + DIM + channel, at(&shared.k[place][channel]));
    store_once(row + 2 * DIM + channel, at(&shared.u[place][channel]));
}
