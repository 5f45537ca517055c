// The state of a head in the registers of half a block, and all that is done with it there.
//
// Two warps hold 32 value rows, each half of their keys. Thread 4 r + c holds, of each 16 keys, the
// four from 4 c on, of the rows r, r + 8, r + 16 and r + 24: what B fragments hold once the keys are
// counted in that order.
#pragma once

#include "walk_memory.cuh"

constexpr int ROWS = 4;   // of a thread
constexpr int QUADS = 4;  // of its keys

// The part of one thread of the state.
typedef float4 State[ROWS][QUADS];

struct Holder {
    int row, quad;  // of a warp's lanes
    int value;      // the first row of the thread
    int key;        // its first key
    int half;       // of the keys, of the warp
    int pair;       // the warps that hold the same values

    __device__ __forceinline__ Holder(int thread) {
        const int lane = thread & 31, warp = thread >> 5;
        row = lane >> 2, quad = lane & 3;
        pair = warp & 3, half = warp >> 2;
        value = 32 * pair + row;
        key = half * (DIM / 2) + 4 * quad;
    }
};

// S <- S diag(decay) + u k^T for one row of a record or one token.
__device__ __forceinline__ void fold(State &state, const Holder &holder, const float *decay,
                                     const float *k, const float *u) {
    float rate[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) rate[i] = u[holder.value + 8 * i];
#pragma unroll
    for (int j = 0; j < QUADS; ++j) {
        const float4 decay4 = at(decay + holder.key + 16 * j), k4 = at(k + holder.key + 16 * j);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            float4 &s = state[i][j];
            s.x = fmaf(rate[i], k4.x, __fmul_rn(s.x, decay4.x));
            s.y = fmaf(rate[i], k4.y, __fmul_rn(s.y, decay4.y));
            s.z = fmaf(rate[i], k4.z, __fmul_rn(s.z, decay4.z));
            s.w = fmaf(rate[i], k4.w, __fmul_rn(s.w, decay4.w));
        }
    }
}

// Rows begin in the same banks: odd ones take each two quads in the other order.
__device__ __forceinline__ float4 chosen(bool is_second, float4 first, float4 second) {
    return make_float4(is_second ? second.x : first.x, is_second ? second.y : first.y,
                       is_second ? second.z : first.z, is_second ? second.w : first.w);
}

__device__ __forceinline__ void load_state(State &state, const Holder &holder,
                                           const float *source) {
    const bool is_odd = holder.row & 1;
    source += holder.value * DIM + holder.key;
    const float *first = source + 16 * is_odd, *second = source + 16 - 16 * is_odd;
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int j = 0; j < QUADS; j += 2) {
            const float4 x = at(first + i * 8 * DIM + j * 16), y = at(second + i * 8 * DIM + j * 16);
            state[i][j] = chosen(is_odd, x, y);
            state[i][j + 1] = chosen(is_odd, y, x);
        }
}

__device__ __forceinline__ void store_state(const State &state, const Holder &holder,
                                            float *target) {
    target += holder.value * DIM + holder.key;
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int j = 0; j < QUADS; ++j) store_once(target + i * 8 * DIM + j * 16, state[i][j]);
}

// Has the copy engine store it: each two warps their rows, once those before have left.
__device__ __forceinline__ void hand_back(const State &state, const Holder &holder, Shared &shared,
                                          const Arguments &a, const Unit &unit) {
    const bool is_first = threadIdx.x % 32 == 0 && holder.half == 0;
    float *target = going_of(shared);
    if (is_first) wait_for_reads();
    __syncwarp();
    meet<64>(PAIR + holder.pair);
    const bool is_odd = holder.row & 1;
    target += holder.value * DIM + holder.key;
    float *first = target + 16 * is_odd, *second = target + 16 - 16 * is_odd;
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int j = 0; j < QUADS; j += 2) {
            at(first + i * 8 * DIM + j * 16) = chosen(is_odd, state[i][j], state[i][j + 1]);
            at(second + i * 8 * DIM + j * 16) = chosen(is_odd, state[i][j + 1], state[i][j]);
        }
    publish_shared();
    meet<64>(PAIR + holder.pair);
    if (is_first && unit.write_slot != 0)
        store_bulk(a.states + state_offset(a, unit, unit.write_slot) + holder.pair * QUARTER,
                   going_of(shared) + holder.pair * QUARTER, 4 * QUARTER, policy_of_streams());
    __syncwarp();
}

// Copies the state to the slots of the saves that are due behind so many tokens of the segment.
__device__ __forceinline__ void save(const State &state, const Holder &holder, const Arguments &a,
                                     const Unit &unit, int num_tokens) {
    if (a.first_save == nullptr) return;
    const int end = a.first_save[unit.number + 1];
#pragma unroll 1
    for (int index = a.first_save[unit.number]; index < end; ++index)
        if (a.save_tokens[index] == num_tokens)
            store_state(state, holder, a.states + state_offset(a, unit, a.save_slots[index]));
}

// The products of S with the 16 vectors, of a thread's keys: [row / 8][k, k, q, q] of token `row`
// and values 2 quad and 2 quad + 1.
__device__ __forceinline__ void multiply_state(float (&result)[ROWS][4], const Shared &shared,
                                               const State &state, const Holder &holder) {
    // Two sums, so that small products are added to small sums.
    float small[ROWS][4] = {};
#pragma unroll
    for (int j = 0; j < QUADS; ++j) {
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            const int place = 2 * (holder.key + 16 * j + 2 * part);
            const float4 vectors = at(&shared.vectors[holder.row][place]);
            const float4 rests = at(&shared.rests[holder.row][place]);
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                const float s0 = part ? state[i][j].z : state[i][j].x;
                const float s1 = part ? state[i][j].w : state[i][j].y;
                const float lead0 = leading_bits(s0), lead1 = leading_bits(s1);
                multiply_add(small[i], vectors, s0 - lead0, s1 - lead1);
                multiply_add(result[i], vectors, lead0, lead1);
                multiply_add(small[i], rests, lead0, lead1);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int n = 0; n < 4; ++n) result[i][n] += small[i][n];
}

// u and the outputs of a tile, of half of the values of a thread: those of the lower keys' warp are
// the first, and each warp adds its part of the other's sums to them first.
__device__ __forceinline__ void solve(Tokens &tokens, const float (&result)[ROWS][4],
                                      const Holder &holder, int count) {
    const int row = holder.row, half = holder.half;
    const int base = 32 * holder.pair + 2 * holder.quad;
    const int own = base + 16 * half, others = base + 16 - 16 * half;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float2 &v = pair_at(&tokens.v[row][others + 8 * i]);
        v.x -= half ? result[i][0] : result[2 + i][0];
        v.y -= half ? result[i][1] : result[2 + i][1];
        pair_at(&tokens.u[row][others + 8 * i]) =
            make_float2(half ? result[i][2] : result[2 + i][2],
                        half ? result[i][3] : result[2 + i][3]);
    }
    const float beta = tokens.beta[row];
    float a[TILE - 1], p[TILE - 1];
#pragma unroll
    for (int t = 0; t < TILE - 1; ++t) {
        const int place = row * (row - 1) / 2 + t;
        a[t] = t < row ? beta * tokens.pairs[0][place] : 0.0f;
        p[t] = t < row ? tokens.pairs[1][place] : 0.0f;
    }
    const float diagonal = tokens.pairs[row / 4][28 + row % 4];
    meet<64>(PAIR + holder.pair);

    float u[4], o[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float2 v = pair_at(&tokens.v[row][own + 8 * i]);
        const float2 products = pair_at(&tokens.u[row][own + 8 * i]);
        u[2 * i] = beta * (v.x - (half ? result[2 + i][0] : result[i][0]));
        u[2 * i + 1] = beta * (v.y - (half ? result[2 + i][1] : result[i][1]));
        o[2 * i] = products.x + (half ? result[2 + i][2] : result[i][2]);
        o[2 * i + 1] = products.y + (half ? result[2 + i][3] : result[i][3]);
    }
    // Row t has its u once those before it are taken off.
#pragma unroll
    for (int t = 0; t < TILE - 1; ++t) {
        if (t + 1 >= count) break;
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const float earlier = __shfl_sync(0xffffffffu, u[n], 4 * t + holder.quad);
            if (row > t) {
                u[n] = fmaf(-a[t], earlier, u[n]);
                o[n] = fmaf(p[t], earlier, o[n]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        pair_at(&tokens.u[row][own + 8 * i]) = make_float2(u[2 * i], u[2 * i + 1]);
        pair_at(&tokens.v[row][own + 8 * i]) = make_float2(fmaf(diagonal, u[2 * i], o[2 * i]),
                                                           fmaf(diagonal, u[2 * i + 1], o[2 * i + 1]));
    }
    meet<64>(PAIR + holder.pair);
}

// A state as it comes, with what is replayed on it: in registers before the item's tokens are ready,
// so that the next is on its way early.
__device__ __forceinline__ void take_state(State &state, const Holder &holder, Shared &shared,
                                           const Arguments &a, const Unit &unit, int index) {
    load_state(state, holder, coming_of(shared));
    pass<64 + 32>(STATE_READ + holder.pair);
    barrier_wait(&shared.replay_arrived[index & 1], index >> 1 & 1);
    const float *values = replayed_of(shared, a, index);
    if (a.first_save == nullptr) {
#pragma unroll 1
        for (int row = 0; row < unit.replay; ++row, values += ROW_WIDTH)
            fold(state, holder, values, values + DIM, values + 2 * DIM);
    } else {
#pragma unroll 1
        for (int row = 0; row < unit.replay; ++row, values += ROW_WIDTH) {
            fold(state, holder, values, values + DIM, values + 2 * DIM);
            save(state, holder, a, unit, row + 1 - unit.replay);
        }
    }
}

// Half of the block: each unit's state, from its arrival to its store.
__device__ __forceinline__ void hold_states(Shared &shared, const Arguments &a) {
    const Holder holder(threadIdx.x);
    State state;
    bool is_first = true;  // of an item
    int num_states = 0;
    for (int number = 0;; ++number) {
        if (is_first) {
            barrier_wait(&shared.state_arrived[holder.pair], num_states & 1);
            const Unit item = shared.items[num_states & 1];
            if (item.length == 0) {
                meet<NUM_MEETING>(TOKENS_READY);
                wait_for_reads();
                return;
            }
            take_state(state, holder, shared, a, item, num_states++);
        }
        meet<NUM_MEETING>(TOKENS_READY);
        const Unit unit = shared.units[number & (NUM_UNITS - 1)];
        Tokens &tokens = shared.tokens[number & 1];
        {
            float result[ROWS][4] = {};
            multiply_state(result, shared, state, holder);
            pass<NUM_MEETING>(VECTORS_READ);
            solve(tokens, result, holder, unit.count());
        }
        // Of the last tile only the anchor is wanted in the state.
        const bool is_last = unit.begin + TILE >= unit.length;
        const int end = is_last ? unit.begin == 0 : TILE;
#pragma unroll 1
        for (int place = 0; place < end; ++place) {
            fold(state, holder, tokens.decay[place], tokens.k[place], tokens.u[place]);
            if (is_last) break;
            if (unit.begin + place == 0) {
                hand_back(state, holder, shared, a, unit);
                save(state, holder, a, unit, 1);
            }
        }
        pass<NUM_MEETING>(RESULTS_READY + (number & 1));
        if (is_last && end > 0) {
            hand_back(state, holder, shared, a, unit);
            save(state, holder, a, unit, 1);
        }
        is_first = is_last;
    }
}
