// Rows of a head around the convolution, as they lie before and after a window, and its decays.
//
// `Work` says whose they are: its `number` is the segment's, `first` and `length` its tokens.
#pragma once

#include "window_arguments.cuh"

__device__ __forceinline__ float bounded_decay(float raw, float rate, float lower_bound) {
    return __expf(lower_bound * sigmoid(rate * raw));
}

__device__ __forceinline__ float free_decay(float raw, float rate) {
    return __expf(-rate * (raw > 20.0f ? raw : log1pf(__expf(raw))));
}

// Four channels of q, k or v at a place of the segment, before the convolution. Those before its
// start are in the slot that it reads.
template <class Work>
__device__ __forceinline__ const activation *raw_channels(const Arguments &a, const Work &b,
                                                          int channel, int place) {
    if (place >= 0) return a.channels + (b.first + place) * a.channels_stride + channel;
    return a.conv_rows + b.read_slot * a.conv_rows_stride + channel +
           (long long)(b.replay + HISTORY + place) * (3 * DIM * a.num_heads);
}

__device__ __forceinline__ activation *conv_row(const Arguments &a, long long slot, int row,
                                                int channel) {
    return a.conv_rows + slot * a.conv_rows_stride +
           (long long)row * (3 * DIM * a.num_heads) + channel;
}

// The rows before the convolution that saves file: one warp each of q, k and v.
template <class Work>
__device__ __forceinline__ void save_conv_rows(const Arguments &a, const Work &b, int thread) {
    const int part = thread >> 5;
    if (a.first_save == nullptr || part > 2) return;
    const int channel = (part * a.num_heads + b.head) * DIM + 4 * (thread & 31);
    const int end = a.first_save[b.number + 1];
#pragma unroll 1
    for (int index = a.first_save[b.number]; index < end; ++index)
#pragma unroll 1
        for (int row = 0; row < HISTORY; ++row)
            quad_at(conv_row(a, a.save_slots[index], row, channel)) =
                quad_at(raw_channels(a, b, channel, a.save_tokens[index] + row - HISTORY));
}

// What the segment leaves: the rows before its anchor's successor, then those of the drafts. The
// slot that is read may be the one that is written: all of its history is in shared memory.
template <class Work>
__device__ __forceinline__ void store_conv_rows(const activation (&raw)[HISTORY + TILE][3][DIM],
                                                const Arguments &a, const Work &b, int token,
                                                int thread) {
    const int place = thread >> 5, channel = 4 * (thread & 31);
    if (b.write_slot == 0) return;
#pragma unroll
    for (int part = 0; part < 3; ++part) {
        const int in_all = (part * a.num_heads + b.head) * DIM + channel;
        if (token < HISTORY - 1)
            quad_at(conv_row(a, b.write_slot, token, in_all)) =
                quad_at(&raw[1 + place][part][channel]);
        if (token < b.length)
            quad_at(conv_row(a, b.write_slot, HISTORY - 1 + token, in_all)) =
                quad_at(&raw[HISTORY + place][part][channel]);
    }
}
