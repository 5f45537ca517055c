"""Block attention residuals."""

from stagecoach.kernels.attn_res.reference import mix

__all__ = ["mix"]
