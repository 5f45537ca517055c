// The state of a head in the registers of its block, and all that is done with it there.
//
// Thread 4 r + c of warp w holds keys 16 j + 4 c + {0 .. 3} of the value rows 16 w + r and
// 16 w + r + 8: what a B fragment holds once the keys are counted in that order.
#pragma once

#include "window_memory.cuh"

// The part of one thread of the state: [value row r or r + 8][j].
typedef float4 State[2][8];

// S <- S diag(decay) + u k^T for one row of a record or one token.
__device__ __forceinline__ void fold(State &state, const float *decay, const float *k,
                                     const float *u, int quad) {
    const float u0 = u[0], u1 = u[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float4 decay4 = at(decay + 16 * j + 4 * quad), k4 = at(k + 16 * j + 4 * quad);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float rate = half ? u1 : u0;
            float4 &s = state[half][j];
            s.x = fmaf(rate, k4.x, __fmul_rn(s.x, decay4.x));
            s.y = fmaf(rate, k4.y, __fmul_rn(s.y, decay4.y));
            s.z = fmaf(rate, k4.z, __fmul_rn(s.z, decay4.z));
            s.w = fmaf(rate, k4.w, __fmul_rn(s.w, decay4.w));
        }
    }
}

__device__ __forceinline__ void load_state(State &state, const float *source) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int j = 0; j < 8; ++j)
            state[half][j] = load_once(source + half * 8 * DIM + j * 16);
}

__device__ __forceinline__ void store_state(const State &state, float *target) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int j = 0; j < 8; ++j)
            store_once(target + half * 8 * DIM + j * 16, state[half][j]);
}

// Copies the state to the slots of the saves that are due behind so many tokens of the segment.
__device__ __forceinline__ void save(const State &state, const Arguments &a, int segment,
                                     int num_tokens, int part) {
    if (a.first_save == nullptr) return;
    const int end = a.first_save[segment + 1];
#pragma unroll 1
    for (int index = a.first_save[segment]; index < end; ++index)
        if (a.save_tokens[index] == num_tokens)
            store_state(state, a.states + a.save_slots[index] * a.states_stride + part);
}

// The products of S with the 16 vectors: each warp those of its 16 value rows.
__device__ __forceinline__ void multiply_state(Shared &shared, const State &state) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = lane >> 2, quad = lane & 3;
    // Three sums, so that products need not wait for each other.
    float large[2][4] = {}, small[2][4] = {}, other[2][4] = {};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            const float4 vectors = shared.decayed[row][8 * j + 2 * quad + part];
            const float4 rest = rest_of(vectors);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float s0 = part ? state[half][j].z : state[half][j].x;
                const float s1 = part ? state[half][j].w : state[half][j].y;
                const float lead0 = leading_bits(s0), lead1 = leading_bits(s1);
                multiply_add(small[half], vectors, s0 - lead0, s1 - lead1);
                multiply_add(other[half], rest, lead0, lead1);
                multiply_add(large[half], vectors, lead0, lead1);
            }
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int value = 16 * warp + 8 * half + 2 * quad;
        float2 *of_k = reinterpret_cast<float2 *>(&shared.result[row][value]);
        float2 *of_q = reinterpret_cast<float2 *>(&shared.result[TILE + row][value]);
#pragma unroll
        for (int i = 0; i < 4; ++i) large[half][i] += small[half][i] + other[half][i];
        *of_k = make_float2(large[half][0], large[half][1]);
        *of_q = make_float2(large[half][2], large[half][3]);
    }
}

// The only token of a tile: on the registers, token 0 of the tile included.
__device__ __forceinline__ void run_token(Shared &shared, State &state) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = lane >> 2, quad = lane & 3;
    float sums[2] = {}, u[2], o[2] = {};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const int channel = 16 * j + 4 * quad;
        const float4 decay = at(&shared.decay[0][channel]), k = at(&shared.k[0][channel]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            state[half][j] = scaled(state[half][j], decay);
            sums[half] = dot(state[half][j], k, sums[half]);
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int value = 16 * warp + 8 * half + row;
        u[half] = shared.beta[0] * (shared.v[0][value] - sum_of_quad(sums[half]));
        if (quad == 0) shared.u[0][value] = u[half];
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const int channel = 16 * j + 4 * quad;
        const float4 k = at(&shared.k[0][channel]), q = at(&shared.q[0][channel]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float4 &s = state[half][j];
            s.x = fmaf(u[half], k.x, s.x);
            s.y = fmaf(u[half], k.y, s.y);
            s.z = fmaf(u[half], k.z, s.z);
            s.w = fmaf(u[half], k.w, s.w);
            o[half] = dot(s, q, o[half]);
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float sum = sum_of_quad(o[half]);
        if (quad == 0) shared.result[TILE][16 * warp + 8 * half + row] = sum;
    }
}
