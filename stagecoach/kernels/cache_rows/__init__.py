"""Rows of tokens stored to the caches of several layers at once."""

from stagecoach.kernels.cache_rows.door import store_rows

__all__ = ["store_rows"]
