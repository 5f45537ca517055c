"""What the chunk kernels share: where a chunk's tokens lie, and the log-decays of its tokens.

Chunk n of segment b has the number offset_b // C + b + n. Such numbers never meet: a segment of
L tokens takes ceil(L / C) of them, and the next one begins at most that far behind. So a grid over
T // C + B numbers covers every step, and no layout is built for one.

Dimensions: B segments, C tokens of a chunk, H heads, K key channels, E saves.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl
from triton.language.extra import libdevice

_LOG2_E = tl.constexpr(1.4426950408889634)
# 2^-126 is the smallest normal float32: a token that decays by more leaves nothing.
_LEAST = tl.constexpr(-126.0)
_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _log2(x):
    # The precise one branches for numbers that a decay is not, and the interpreter has no other.
    return tl.log2(x) if _IS_INTERPRETED else libdevice.fast_log2f(x)


@triton.jit
def find_segment(offsets_S, number, num_segments, CHUNK: tl.constexpr, BLOCK_B: tl.constexpr):
    """The segment that the chunk `number` belongs to, and which of its chunks it is."""
    segments_B = tl.arange(0, BLOCK_B)
    is_segment_B = segments_B < num_segments
    first_B = tl.load(offsets_S + segments_B, mask=is_segment_B, other=0) // CHUNK + segments_B
    segment = tl.sum(tl.where(is_segment_B & (first_B <= number), 1, 0), 0) - 1
    first = tl.load(offsets_S + segment) // CHUNK + segment
    return segment, number - first


@triton.jit
def log2_decays(
    decay_TK,
    a_log,
    dt_bias_K,
    tokens_C,
    is_real_C,
    stride,
    keys_K,
    BOUND: tl.constexpr,
):
    """Logarithms to base 2 of the decays of one head's tokens, [C, K]; 0 where no token is.

    Formula: `reference.kda_gate`. BOUND is its lower bound, 0 where there is none.
    """
    places_CK = tokens_C[:, None] * stride + keys_K[None, :]
    raw_CK = tl.load(decay_TK + places_CK, mask=is_real_C[:, None], other=0).to(tl.float32)
    raw_CK += tl.load(dt_bias_K + keys_K).to(tl.float32)[None, :]
    rate = tl.exp(tl.load(a_log).to(tl.float32))
    if BOUND == 0:
        raw_CK *= _LOG2_E
        softplus_CK = tl.where(raw_CK > 30, raw_CK, _log2(1 + tl.exp2(raw_CK)))
        g_CK = -rate * softplus_CK
    else:
        g_CK = (BOUND * _LOG2_E) / (1 + tl.exp2(raw_CK * (-rate * _LOG2_E)))
    return tl.where(is_real_C[:, None], tl.maximum(g_CK, _LEAST), 0.0)


@triton.jit
def decays_over(passed_CC, log2_decay_CK, PRECISION: tl.constexpr):
    """Decay of each row over the tokens that it passes, [C, K], in (0, 1].

    Logarithms are summed by a matrix product of zeros and ones, so that none is taken away again.
    In float16 a logarithm of x is off by 2^-12 x at most: the decay, where it is not small, by
    less than its own rounding.

    Args:
        passed_CC: 1 for the tokens (columns) that the row passes, else 0.
        log2_decay_CK: of the tokens, in the same type.
    """
    return tl.exp2(tl.dot(passed_CC, log2_decay_CK, input_precision=PRECISION))
