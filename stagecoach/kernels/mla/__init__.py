"""Multi-head latent attention over cached rows."""

from stagecoach.kernels.mla.reference import mla_decode, mla_prefill, write_rows

__all__ = ["mla_decode", "mla_prefill", "write_rows"]
