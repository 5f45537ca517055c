"""RMS norms."""

from stagecoach.kernels.norm.reference import gated_rms_norm, grouped_rms_norm, rms_norm

__all__ = ["gated_rms_norm", "grouped_rms_norm", "rms_norm"]
