"""RMS norms."""

from stagecoach.kernels.norm.door import add_rms_norm, gated_rms_norm, grouped_rms_norm, rms_norm

__all__ = ["add_rms_norm", "gated_rms_norm", "grouped_rms_norm", "rms_norm"]
