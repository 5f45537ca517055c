"""The newest token of each sampling row: kept where it is chosen, read by chained windows."""

from stagecoach.kernels.newest.door import fill_in_newest, note_newest

__all__ = ["fill_in_newest", "note_newest"]
