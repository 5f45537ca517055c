"""Block attention residuals."""

from stagecoach.kernels.attn_res.door import mix, mix_rms_norm

__all__ = ["mix", "mix_rms_norm"]
