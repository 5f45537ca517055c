"""Rotation of pairs of values by the angles of their positions."""

from stagecoach.kernels.rope.door import rotate_pairs

__all__ = ["rotate_pairs"]
