"""Multi-head latent attention over cached rows."""

from stagecoach.kernels.mla.door import head_product, mla_decode, mla_prefill, write_rows

__all__ = ["head_product", "mla_decode", "mla_prefill", "write_rows"]
