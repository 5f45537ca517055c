// Codes and scales of MXFP4 as bfloat16, and the activation, for `mxfp4.cu` and `mxfp4_many.cu`:
// behind what each of them asks of the chip.

#pragma once

// Weights are decoded to 2^-32 of what they mean, as in `mxfp4_kernel.py`.
constexpr unsigned EXPONENT_SHIFT = 126 - 32, LARGEST_SCALE = 255 - EXPONENT_SHIFT;
constexpr float SUM_FACTOR = 4294967296.0f;

// The four operands of a word of 8 codes: (n0, n4) (n1, n5) (n2, n6) (n3, n7).
__device__ __forceinline__ void decode(unsigned word, unsigned factor, unsigned (&operands)[4]) {
    // Of two copies of a code, one has the sign in place, the other one the magnitude.
    constexpr unsigned LOW = 0x000f000fu, HIGH = 0x00f000f0u, IN_PLACE = 0x81c081c0u;
    unsigned rest = word >> 8;
    operands[0] = multiply((word & LOW) * 0x1040u & IN_PLACE, factor);
    operands[1] = multiply((word & HIGH) * 0x0104u & IN_PLACE, factor);
    operands[2] = multiply((rest & LOW) * 0x1040u & IN_PLACE, factor);
    operands[3] = multiply((rest & HIGH) * 0x0104u & IN_PLACE, factor);
}

// A scale as two bfloat16 that `decode` multiplies by; infinite for what is too large and for NaN.
__device__ __forceinline__ unsigned power_of_two(unsigned scale) {
    return min(scale, LARGEST_SCALE) * 0x00800080u + EXPONENT_SHIFT * 0x00800080u;
}

struct Activation {
    int is_situ, is_bound;
    float beta, linear_beta;
};

// tanh(x / beta), accurate at both ends, as in `activation_kernel.py`.
__device__ __forceinline__ float bounded(float x, float beta) {
    float scaled = divide(fabsf(x), beta), square = scaled * scaled;
    float shrunk = power_of_e(-2.0f * scaled);
    float far = divide(1.0f - shrunk, 1.0f + shrunk);
    // Of a small x `far` has lost digits, where a few terms of the series are exact.
    float series = -0.33333333f + square * (0.13333333f - square * 0.05396825f);
    float near = scaled + scaled * square * series;
    return copysignf(scaled < 0.15f ? near : far, x);
}

__device__ __forceinline__ float gated(const Activation &activation, float gate, float up) {
    float sigmoid = divide(1.0f, 1.0f + power_of_e(-gate));
    if (!activation.is_situ) return gate * sigmoid * up;
    if (activation.is_bound) up = activation.linear_beta * bounded(up, activation.linear_beta);
    return activation.beta * bounded(gate, activation.beta) * sigmoid * up;
}
