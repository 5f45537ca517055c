// KDA windows of 128 keys and 128 values a head; `reference.py` says what is computed.
//
// Hopper only. As many thread blocks as multiprocessors walk the heads of all segments: an item is
// one head of one segment, a unit up to 8 tokens of it. The formulas are those of `window.cu`. What
// is there one phase after the other is here the work of three kinds of warps at once:
//
//     8 hold the state of the present unit in registers, from the replayed rows to the last token
//     8 make the tokens of the next unit ready, a channel a thread, and store the present's outputs
//     2 have the copy engine bring rows and states
//
// States come through one buffer in shared memory and go through another, a quarter at a time: the
// next is on its way as soon as the present is in registers. Stores from registers would keep the
// other warps' loads waiting.
//
// ACTIVATION_IS_BF16 is 1 for bfloat16 activations, 0 for float32; SHARED_BYTES what the host takes
// `Shared` to be.

#include "walk_copies.cuh"
#include "walk_state.cuh"
#include "walk_tokens.cuh"

constexpr int STATE_REGISTERS = 128, COPIER_REGISTERS = 32;  // of a thread; the others keep 96

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
kda_walk(const __grid_constant__ Arguments a) {
    extern __shared__ float4 dynamic_memory[];
    Shared &shared = *reinterpret_cast<Shared *>(dynamic_memory);
    if (threadIdx.x == 0) {
        barrier_init(&shared.rows_arrived, 32 + 1);  // lanes, and what lane 0 expects
        barrier_init(&shared.replay_arrived[0], 1);
        barrier_init(&shared.replay_arrived[1], 1);
        for (int pair = 0; pair < NUM_PAIRS; ++pair) barrier_init(&shared.state_arrived[pair], 1);
        publish_barriers();
    }
    __syncthreads();
    if (threadIdx.x < NUM_ROLE_THREADS) {
        grow_to_registers<STATE_REGISTERS>();
        hold_states(shared, a);
    } else if (threadIdx.x < 2 * NUM_ROLE_THREADS) {
        run_tokens(shared, a, threadIdx.x - NUM_ROLE_THREADS);
    } else {
        shrink_to_registers<COPIER_REGISTERS>();
        const int copier = threadIdx.x / 32 - 2 * NUM_ROLE_THREADS / 32, lane = threadIdx.x & 31;
        if (copier == 0) run_row_copies(shared, a, lane);
        if (copier == 1) run_state_copies(shared, a, lane);
    }
}
