"""What vLLM 0.20.0 did on the same kind of machine, with the same shape and the same load.

Kimi-Linear-48B-A3B, weights drawn alike, 1,024 tokens in and 256 out, greedy, all requests at
once; two H200s (driver 580, torch 2.11.0+cu130), CUDA graphs and torch.compile on. Its pipeline
did not start as shipped and was repaired by one method; with graphs it ran out of memory, so the
pipeline's figures are eager and host-bound.
"""

from typing import NamedTuple


class PeerPoint(NamedTuple):
    step_ms: float
    output_tokens_per_second: float


# By (stages, tensor-parallel ranks), then by concurrency.
DECODE: dict[tuple[int, int], dict[int, PeerPoint]] = {
    (1, 1): {
        1: PeerPoint(3.79, 233),
        8: PeerPoint(8.57, 803),
        64: PeerPoint(21.15, 2387),
        256: PeerPoint(35.67, 4544),
    },
    (1, 2): {
        1: PeerPoint(3.87, 238),
        8: PeerPoint(6.17, 1120),
        64: PeerPoint(13.12, 3609),
        256: PeerPoint(20.50, 7258),
    },
    (2, 1): {
        1: PeerPoint(37.0, 27),
        8: PeerPoint(41.3, 190),
        64: PeerPoint(46.6, 1238),
    },
}

# Tokens a second of one prompt.
PREFILL_TOKENS = 8192
PREFILL: dict[tuple[int, int], float] = {(1, 1): 45155.0, (1, 2): 59774.0, (2, 1): 50121.0}

KDA_VERIFY_SNAPSHOTS_US = 301.0  # fla 0.6.0: 16 requests x 96 heads x 128, 8 tokens
