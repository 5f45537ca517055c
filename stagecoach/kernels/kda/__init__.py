"""Kimi delta attention: gate, normalisation, recurrent and chunked forms."""

from stagecoach.kernels.kda.reference import (
    kda_chunked,
    kda_gate,
    kda_recurrent,
    normalize_qk,
    read_states,
)

__all__ = ["kda_chunked", "kda_gate", "kda_recurrent", "normalize_qk", "read_states"]
