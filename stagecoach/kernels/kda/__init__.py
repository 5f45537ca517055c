"""Kimi delta attention: what a layer calls, and the parts of the reference."""

from stagecoach.kernels.kda.door import kda_attention
from stagecoach.kernels.kda.reference import (
    kda_chunked,
    kda_gate,
    kda_recurrent,
    normalize_qk,
    read_states,
)
from stagecoach.kernels.kda.tensors import KdaInputs, KdaMemory, KdaWeights

__all__ = [
    "KdaInputs",
    "KdaMemory",
    "KdaWeights",
    "kda_attention",
    "kda_chunked",
    "kda_gate",
    "kda_recurrent",
    "normalize_qk",
    "read_states",
]
